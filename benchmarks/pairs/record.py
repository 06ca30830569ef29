"""Record programs before and after single changes: their step without the profiler, and a trace of three steps.

Usage: record.py FOLDER [--seconds S] [--programs A,B] [--part 1/2] [--rounds 2] [--passes 3] [--device cuda] [--tiny]
       record.py FOLDER --add OTHER ...
       record.py FOLDER --again OTHER

Nobody fits a rule of read-trace to these pairs: benchmarks/scoreboard.py shows how well the rules predict programs that
they were not written for. The programs are in the modules of MODULES.

Each variant of a program runs in processes of its own, one in each round: base, change 1, change 2, base, change 1, ...
The processes of one group of programs are set up side by side, and wait. Then one after the other measures its step
while all others sleep. All of them measure again in each pass, and the fastest pass counts: other programs on the
machine made half of the measurements up to 1.5 times as long. Then the first process of each variant records three
steps. FOLDER/results.json is written after each group, so that a run may end at any time. --add takes over the results
and traces of other folders. --again takes over only what their variants saved: scoreboard.py counts a saving if all
measurements show it.

The processes are forked after torch is imported, and each imports the other libraries that it needs. Where a forked
process cannot use the GPU, and with --fresh, each process starts anew and imports torch as well. The programs of TIERS
come in that order, so that a run that ends early has the quick ones. Compiling takes long: --compile says who does it.
"""

import argparse
import ctypes
import gzip
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODULES = (
    "vision", "language", "other", "loops", "kinds", "users", "research", "products", "several_inputs", "everyday",
    "services", "teams", "trades", "turns", "institutions", "measurements", "recurrent", "mainstream",
    "projects", "practice", "repositories", "labs", "makers", "stations", "studios", "workshops",
    "halls", "stages", "sheds", "barns", "yards", "docks", "quays", "piers", "wharves", "looms", "kilns",
)  # fmt: skip
# Programs of one tier may share a group. The first ones need only torch, the next ones other libraries.
TIERS = (
    "digits_vae request_server neural_ode game_player soft_actor_critic gaussian_process routed_experts lstm_tagger "
    "series_forecast translator segmentation diffusion_transformer click_prediction wasserstein_gan",
    "speech_to_text lora_fine_tuning checkpointed_llama sentence_embeddings review_classifier image_tagging "
    "convnext_training contrastive_views molecules photos_from_disk speech_recognizer detector citation_network",
    "neighbor_search pair_representation super_resolution character_model normalizing_flow",
    "video_scoring disentangled_attention",
)
FEW_COMPILED = {*TIERS[2].split(), "speech_decoder", "optical_flow"}
BLOCKS, BLOCK_S = 5, 0.08  # blocks of steps, each with one synchronization at its end; a block takes about this long
ALONE = 20  # steps at most that each begin when the GPU is idle
WARM, WARM_COMPILED = 5, 8
NO_TIME = "no time was left"
SAVING_S = 12  # kept at the end for writing traces and ending processes
MEASURING_S = 20  # the longest measurement of one process; most take less than 3 s
NOT_READ = ("Ev Idx", "Record function id", "cbid", "queued")
MOST_KB, MOST_MB = 300, 12  # a variant's trace, and all traces together; those of base are always kept


def main(argv=None):
    flags = _flags(argv)
    folder = Path(flags.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if flags.add:
        return _add(folder, flags.add)
    if flags.again:
        return _again(folder, Path(flags.again))
    began = time.monotonic()
    deadline = began + flags.seconds - SAVING_S
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # all processes are ended then
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("record.py: the time is over"))
    signal.setitimer(signal.ITIMER_REAL, max(1.0, flags.seconds - 2))
    _prepare(flags)
    programs = _programs(flags)
    unknown = set(flags.programs.split(",")) - {*programs, ""}
    if unknown:
        sys.exit(f"record.py: no such program: {', '.join(sorted(unknown))}")
    part, parts = map(int, flags.part.split("/"))
    chosen = [name for name in programs if not flags.programs or name in flags.programs.split(",")][part - 1 :: parts]
    results = _read(folder)
    start = _way_to_start(flags)
    for group in _groups(chosen, programs, flags):
        if time.monotonic() > deadline:
            _skip(results, group, programs)
            continue
        try:
            _run_group(group, programs, flags, folder, deadline, results, start)
        finally:
            _write(folder, results)
        print(f"{time.monotonic() - began:.0f} s: {len({name for name, *_ in group})} programs are done", flush=True)
    _write(folder, results)
    _drop_largest(folder)
    _print(results, chosen)
    return 0


def _flags(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=540, help="end within this time (default 540)")
    parser.add_argument("--programs", default="", help="names, separated by commas (default: all)")
    parser.add_argument("--part", default="1/1", help="1/2: every second program, from the first one")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each variant (default 2)")
    parser.add_argument("--passes", type=int, default=3, help="measurements of each process (default 3)")
    parser.add_argument("--run-seconds", type=float, default=60, help="the longest set-up of one process (default 60)")
    parser.add_argument("--fresh", action="store_true", help="start each process anew instead of forking it")
    parser.add_argument(
        "--compile", choices=("none", "few", "all"), default="few", help="which programs run with torch.compile"
    )
    parser.add_argument("--traces", choices=("none", "base", "all"), default="all", help="variants that record a trace")
    parser.add_argument("--at-once", type=int, default=20, help="processes that are set up side by side (default 20)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps, to test the programs")
    parser.add_argument("--add", nargs="+", metavar="OTHER", help="only take over the results of these folders")
    parser.add_argument("--again", metavar="OTHER", help="only note what the variants of this folder saved")
    return parser.parse_args(argv)


def _prepare(flags):
    """Set the environment of all processes. It must be complete before torch is imported."""
    os.environ["PAIRS_DEVICE"], os.environ["PAIRS_TINY"] = flags.device, "1" if flags.tiny else "0"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # is_available() must not start CUDA before a fork
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if flags.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.path[:0] = [str(HERE), str(HERE.parent.parent)]


def _programs(flags):
    """Return the programs by name, in the order of TIERS: the module, and the variants that flags ask for.

    Each variant has the id of its proposal and the number of base's batches that one of its steps serves.
    """
    found = {}
    for module in MODULES:
        for make, changes in importlib.import_module(module).PROGRAMS.items():
            name = make.__name__
            rows = {change: (one, 1) if isinstance(one, str) else one for change, one in changes.items()}
            if flags.compile == "none" or (flags.compile == "few" and name not in FEW_COMPILED):
                rows = {change: one for change, one in rows.items() if not change.startswith("compile")}
            found[name] = (module, {"base": ("", 1), **rows})
    order = " ".join(TIERS).split()
    return {name: found[name] for name in sorted(found, key=lambda name: order.index(name) if name in order else 99)}


def _way_to_start(flags):
    """Return "fork", or "spawn" if it is asked for or a forked process cannot use the GPU. Exit if neither can."""
    if flags.device == "cpu":
        return "spawn" if flags.fresh else "fork"
    for way in ("spawn",) if flags.fresh else ("fork", "spawn"):
        probe = multiprocessing.get_context(way).Process(target=_probe, daemon=True)
        probe.start()
        probe.join(30 if way == "fork" else 60)
        if probe.exitcode == 0:
            return way
        probe.kill()
        if way == "fork":
            print("a forked process cannot use the GPU, so each process starts anew", flush=True)
    print("record.py: no process can use the GPU", file=sys.stderr)
    sys.exit(2)


def _probe():
    """Use the GPU. The exit status of the process says whether that was possible."""
    _be_quiet()
    import torch

    torch.cuda.init()
    torch.ones(1, device="cuda").item()
    os._exit(0)


def _be_quiet():
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)


def _groups(chosen, programs, flags):
    """Yield lists of runs (program, variant, round), at most flags.at_once in each list. A program is never split.

    A program may overtake others of its tier if it fits into a group that those are too large for.
    """
    runs = {
        name: [(name, variant, number) for number in range(flags.rounds) for variant in programs[name][1]]
        for name in chosen
    }
    tiers = [[name for name in chosen if name in tier.split()] for tier in TIERS]
    for tier in [*tiers, [name for name in chosen if not any(name in known for known in tiers)]]:
        while tier:
            group = []
            for name in list(tier):
                if not group or len(group) + len(runs[name]) <= flags.at_once:
                    group += runs[name]
                    tier.remove(name)
            yield group


def _run_group(group, programs, flags, folder, deadline, results, start):
    """Set up all runs of a group side by side, measure them one by one, and let them write their traces together."""
    children = []
    try:
        for run in group:
            children.append(_Child(run, programs, flags, folder, start))
        until = time.monotonic() + flags.run_seconds
        for child in children:
            child.hear(until, deadline)  # set up
        for _ in range(flags.passes):
            began = time.monotonic()
            for child in children:
                if child.failure is None and time.monotonic() > deadline:
                    child.fail(NO_TIME)
                child.ask("measure")
                child.hear(time.monotonic() + MEASURING_S, deadline)
            if time.monotonic() + 2 * (time.monotonic() - began) > deadline:
                break  # another pass and the recordings would not end in time
        for child in children:
            child.ask("record")
            child.hear(time.monotonic() + MEASURING_S, deadline)
        for child in children:
            child.ask("export")
        until = time.monotonic() + MEASURING_S
        for child in children:
            child.hear(until, deadline + SAVING_S / 2)
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.process.join(2)
        for child in children:
            if "median_us" not in child.found and child.failure is None:
                child.failure = NO_TIME
            _keep(results, child, programs)
            print(child.told(), flush=True)


class _Child:
    """A process that runs one variant of a program, and what it reported."""

    def __init__(self, run, programs, flags, folder, start):
        self.run, self.found, self.failure = run, {}, None
        context = multiprocessing.get_context(start)
        self.pipe, theirs = context.Pipe()
        name, variant, number = run
        traced = number == 0 and flags.traces in ("all", variant)
        trace = folder / name / f"{variant}.json" if traced else None
        self.process = context.Process(
            target=_child, args=(theirs, programs[name][0], name, variant, trace, flags.tiny)
        )
        self.process.start()
        theirs.close()

    def ask(self, what):
        """Tell a process that has not failed what to do next."""
        if self.failure is None:
            try:
                self.pipe.send(what)
            except OSError:
                self.fail("the process ended while it waited")

    def hear(self, until, deadline):
        """Wait for the next report, at most until the earlier of both times. A process that is late is ended."""
        if self.failure is not None:
            return
        try:
            if not self.pipe.poll(max(0.0, min(until, deadline) - time.monotonic())):
                return self.fail("it took too long" if until < deadline else NO_TIME)
            told = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            return self.fail(f"the process ended (exit status {self.process.exitcode})")
        self.failure = told.pop("failure", None)
        self.found |= told

    def fail(self, why):
        self.failure = why
        self.kill()

    def kill(self):
        """End the process and those that it started. What it had to say and to write is here already."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it is gone, or has not made its group yet
            self.process.kill()

    def told(self):
        name, variant, number = self.run
        if self.failure is not None:
            return f"{name} {variant} {number + 1}: failed: {self.failure[:160]}"
        return f"{name} {variant} {number + 1}: {self.found['median_us'] / 1e3:,.3f} ms"


def _child(pipe, module, name, variant, trace, tiny):
    os.setsid()  # a group of its own, so that its workers can be ended with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive the process that started it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    multiprocessing.set_start_method("fork", force=True)  # workers of a DataLoader get data sets that cannot be pickled
    _be_quiet()  # what a library prints about itself would hide what is measured; failures are reported
    try:
        import torch

        make = getattr(importlib.import_module(module), name)

        torch.manual_seed(0)
        if tiny:
            torch.set_num_threads(1)
        began = time.perf_counter()
        step = make(variant)
        first = _value(step())
        for _ in range((2 if tiny else WARM_COMPILED if "compile" in variant else WARM) - 1):
            last = _value(step())
        _wait()
        if os.environ["PAIRS_DEVICE"] == "cuda":
            torch.cuda.empty_cache()  # other processes are set up meanwhile; the memory is taken again before timing
        pipe.send({"first": first, "last": last, "setup_s": round(time.perf_counter() - began, 1)})
        cuda = torch.cuda.is_available() and os.environ["PAIRS_DEVICE"] == "cuda"
        machine = {"device": torch.cuda.get_device_name() if cuda else "CPU", "torch": torch.__version__}
        measured = []
        while (asked := pipe.recv()) == "measure":
            measured.append(_measured(step, tiny))
            fastest = min(measured, key=lambda one: one["median_us"])
            lowest = {"lowest_us": min(one["lowest_us"] for one in measured)}
            pipe.send(fastest | lowest | {"passes_us": [one["median_us"] for one in measured]} | machine)
        assert asked == "record"
        recorded = _recorded(step, fastest) if trace else None
        observed = _observed(step, trace.with_suffix(".flow")) if recorded and variant == "base" else None
        pipe.send({})
        assert pipe.recv() == "export"
        if recorded:
            trace.parent.mkdir(parents=True, exist_ok=True)
            from tracereader.run import flow

            profiler, notes = recorded
            profiler.export_chrome_trace(str(trace))
            _note_modules(trace, notes)
            if observed:
                flow.put_into(trace, observed)
                observed.unlink()
            _squeeze(trace)
        pipe.send({})
    except BaseException as error:
        lines = traceback.format_exception_only(error)
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        pipe.send({"failure": f"{' '.join(''.join(lines).split())[:400]} ({where})"})


def _value(result):
    """Return a loss, or a weighted sum of a result's first numbers, to see that variants compute the same."""
    import torch

    some = result.detach().flatten()[:4096].double().cpu()
    return float((some * torch.arange(len(some)).cos()).sum())


def _wait():
    import torch

    if os.environ["PAIRS_DEVICE"] == "cuda":
        torch.cuda.synchronize()


def _timed(step, count):
    _wait()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    _wait()
    return (time.perf_counter() - begin) / count * 1e6


def _measured(step, tiny):
    """Return the median of several blocks' mean steps (µs), the shortest and longest one, and the number of steps."""
    for _ in range(1 if tiny else 3):  # the process slept
        step()
    count = 1 if tiny else max(1, min(200, round(BLOCK_S * 1e6 / _timed(step, 2))))
    blocks = [_timed(step, count) for _ in range(2 if tiny else BLOCKS)]
    return {
        "median_us": round(statistics.median(blocks), 2), "lowest_us": round(min(blocks), 2),
        "highest_us": round(max(blocks), 2), "steps": count * len(blocks),
        "cpu_us": round(statistics.median(_on_cpu(step) for _ in range(min(ALONE, count))), 2),
    }  # fmt: skip


def _on_cpu(step):
    """Return the CPU's time (µs) of a step that finds the GPU idle, with its waits for the GPU."""
    _wait()
    begin = time.perf_counter()
    step()
    return (time.perf_counter() - begin) * 1e6


def _recorded(step, measured):
    """Return a profiler that recorded three steps as the usual recipe does, and record-trace's notes of the modules."""
    import torch
    from torch.profiler import profile, schedule

    from tracereader.run.inside import modules, steps

    profiler = profile(schedule=schedule(wait=1, warmup=1, active=3, repeat=1), record_shapes=True)
    if hasattr(profiler, "preset_metadata_json"):
        profiler.preset_metadata_json("unprofiled_step_us", json.dumps(measured["median_us"]))
        profiler.preset_metadata_json("unprofiled_cpu_us", json.dumps(measured["cpu_us"]))
    notes = modules.Notes(torch, steps.is_compiling(torch), steps.patched)
    with profiler:
        for number in range(5):
            if number == 2:
                notes.start()
            step()
            before = time.time_ns()
            profiler.step()
            notes.step_began(before)
    notes.stop()
    _wait()
    return profiler, notes


def _observed(step, file):
    """Return the file with what the ops of some steps read and make, as record-trace writes it; None without it."""
    import torch

    from tracereader.run.inside import measuring, observing

    if not observing.Observer.is_known(torch):
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    observer = observing.Observer(torch, str(file), notes_numbers=not measuring.compiled_graphs())
    for number in range(observing.STEPS):
        if number:
            observer.begin_step()
        step()
    observer.end()
    _wait()
    return file


def _read(folder):
    """Return the results that a folder has: by program and variant."""
    file = folder / "results.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _write(folder, results):
    file = folder / "results.json"
    part = file.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(file)


def _row(results, name, variant, programs):
    proposal, served = programs[name][1][variant]
    empty = {"proposal": proposal, "served": served, "runs": [], "failures": []}
    return results.setdefault(name, {}).setdefault(variant, empty)


def _keep(results, child, programs):
    """Add a run to the results. The first round replaces what the folder had of this variant."""
    name, variant, number = child.run
    if number == 0:
        results.get(name, {}).pop(variant, None)
    row = _row(results, name, variant, programs)
    if child.failure is not None:
        row["failures"].append(child.failure)
    if "median_us" in child.found:  # also of a process that failed later, when it wrote its trace
        row["runs"].append(child.found)


def _skip(results, group, programs):
    for name, variant, _ in group:
        row = _row(results, name, variant, programs)
        if not row["runs"] and NO_TIME not in row["failures"]:
            row["failures"].append(NO_TIME)


def _note_modules(path, notes):
    """Write into a trace which modules ran when, as record-trace does."""
    trace = path.read_bytes()
    if found := notes.insertion(trace):
        place, slices = found
        path.write_bytes(trace[:place] + slices + trace[place:])


def _squeeze(path):
    """Replace a trace by a compressed one without the arguments that nobody reads, as a whole or not at all."""
    document = json.loads(path.read_bytes())
    for event in document.get("traceEvents", ()):
        for name in NOT_READ:
            event.get("args", {}).pop(name, None)
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 9, mtime=0))
    part.replace(path.with_suffix(".json.gz"))
    path.unlink()


def _drop_largest(folder):
    """Drop the largest traces of changed variants if they are larger than agreed, and traces that are incomplete."""
    for path in (*folder.glob("*/*.json"), *folder.glob("*/*.part"), *folder.glob("*/*.flow")):
        path.unlink()
    total = 0
    for path in sorted(folder.glob("*/*.json.gz"), key=lambda one: (one.name != "base.json.gz", one.stat().st_size)):
        size = path.stat().st_size
        if path.name != "base.json.gz" and (size > MOST_KB * 1000 or total + size > MOST_MB * 1e6):
            path.unlink()
        else:
            total += size
    print(f"traces: {total / 1e6:.1f} MB", flush=True)


def _add(folder, others):
    results = _read(folder)
    for other in map(Path, others):
        results |= _read(other)
        for path in other.glob("*/*.json.gz"):
            (folder / path.parent.name).mkdir(exist_ok=True)
            shutil.copyfile(path, folder / path.parent.name / path.name)
    _write(folder, results)
    return 0


def _again(folder, other):
    """Note beside each variant what it saved in another folder: the share of the step, as "elsewhere"."""
    results = _read(folder)
    for name, variants in _read(other).items():
        base = step_us(variants.get("base"))
        for variant, row in variants.items():
            us = step_us(row)
            if base and us and variant != "base" and variant in results.get(name, {}):
                results[name][variant]["elsewhere"] = round(1 - us / base, 4)
    _write(folder, results)
    return 0


def _print(results, chosen):
    """Print each variant's step for one batch of base, what it saves, and the medians of its processes."""
    for name in chosen:
        print(f"\n{name}")
        base = step_us(results.get(name, {}).get("base"))
        for variant, row in results.get(name, {}).items():
            us = step_us(row)
            if us is None:
                print(f"  {variant:16} failed: {'; '.join(row['failures'])[:90]}")
                continue
            saved = f"{1 - us / base:6.1%}" if base else "     –"
            each = " ".join(f"{run['median_us'] / row['served'] / 1e3:.3f}" for run in row["runs"])
            value = row["runs"][0]["last"]
            print(f"  {variant:16} {us / 1e3:9.3f} ms {saved}  [{each}]  {row['proposal'] or '–'}  value {value:.5g}")


def step_us(row):
    """Return a variant's step for one batch of base (µs): the median of its processes; None without a measurement."""
    if not row or not row["runs"]:
        return None
    return statistics.median(run["median_us"] for run in row["runs"]) / row["served"]


if __name__ == "__main__":
    sys.exit(main())
