"""The parts of a profiled run that every numbered script shares: device, warm-up, checks, and the files it writes."""

import contextlib
import importlib
import io
import itertools
import json
import mmap
import os
import re
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

# Kineto prints to stderr when it starts and stops. This is its own switch, and it is read when the first
# profiler starts. check_recording() finds in the trace what Kineto would have reported as an error.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import msgspec
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from common import screen
from common.distributed import place
from common.flags import UNPROFILED_STEPS, profiled_flags, tag_of
from common.publish import finish_trace, published
from common.speed import measured_roofs, steady_threads, synchronize
from tracereader.command import BadInput, RunFailed
from tracereader.trace.facts import RunFacts, as_stored

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# A larger relative error is not explained by rounding. bf16 keeps 8 bits.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-4}
TABLE_ROWS = 15
MANY_STEPS = 10_000
UNPROFILED_S = 0.2
# These are searched in the trace's text, because parsing the trace would take most of the harness's time.
GPU_EVENT = re.compile(rb'"cat":\s*"(?:kernel|gpu_memcpy|gpu_memset)"')
# A replayed CUDA graph records only its kernels, so a Triton kernel also counts as compiled code.
COMPILED = re.compile(rb'Torch-Compiled Region|"name": "triton_')
ZERO_STAMP = re.compile(rb'"ts":\s*0(?:\.0*)?\s*[,}]')


@dataclass(frozen=True)
class Run:
    """One profiled run: its two files (three with --code), and what the report's header says about it."""

    id: str
    title: str
    machine: str
    trace: Path
    table: Path
    code: Path | None  # with --code
    warmup: int  # calls before the profiler's schedule; 0: a cold run
    first_call_s: float
    error: float | None  # see relative_error(); None for the eager run, which is the reference
    against: str  # the reference that the error is measured against
    peak_bytes: int | None
    smaller: dict[str, int]  # flags that took a smaller default because this run is on a CPU
    rank: int = 0
    ranks: tuple[Path, ...] = ()  # the traces of all ranks, if they write to one folder
    threads: dict[str, float] | None = None  # see steady_threads()


def prepare(args, predictions: Callable[..., Iterable] = lambda args: ()):
    """Return the flags with everything that follows from them: device, dtype, the run's tag, the predictions.

    Also seeds the random number generators. Raises BadInput for a run that is impossible on this machine.
    """
    device = _device(args.device)
    if args.needs_gpu and device.type == "cpu":
        raise BadInput(args.needs_gpu)
    if args.compile and device.type == "cpu" and not _cxx_compiler():
        raise BadInput("--compile on a CPU needs a C++ compiler and none was found: install g++ or clang++, or set CXX")
    # The profiler would import this when it starts, in the middle of the loop, and the import can fail there.
    inductor = importlib.import_module("torch._inductor.config")
    inductor.cpp.enable_kernel_profile = True  # or a CPU trace would not show Inductor's C++ kernels
    torch.manual_seed(args.seed)
    if device.type == "cpu":
        # Ranks share the cores, and would disturb each other's measurement.
        args = replace(args, **args.on_cpu, threads=None if place() else steady_threads())
    named = replace(args, device="auto" if device.type == _auto_device() else device.type)
    settled = replace(args, device=device, dtype=DTYPES[args.dtype], tag=tag_of(named), profiled=profiled_flags(named))
    return replace(settled, predictions=tuple(predictions(settled)))


def _auto_device() -> str:
    # torch.accelerator would also return mps, which the profiler cannot trace.
    return "cuda" if torch.cuda.is_available() else "xpu" if torch.xpu.is_available() else "cpu"


def _device(name: str) -> torch.device:
    chosen = _auto_device() if name == "auto" else name
    if chosen != "cpu" and not torch.get_device_module(chosen).is_available():
        raise BadInput(
            f"--device {chosen}: torch {torch.__version__} sees no such device here "
            "(no GPU, or a driver too old for this build); --device cpu works everywhere"
        )
    return torch.device(chosen)


def _cxx_compiler() -> str | None:
    # Inductor tries these names.
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", default))


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' * (threads != 1)}"
    return torch.get_device_module(device).get_device_name()


@contextlib.contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turn the errors of get_kernel, for example without a network connection, into BadInput."""
    try:
        yield
    except (Exception, SystemExit) as problem:  # its errors have no common type, and some code ends the program
        said = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        raise BadInput(
            f"{repo} could not be loaded ({said}). Without a way to the "
            "Hub: run this once on a machine with a connection and copy its ~/.cache/huggingface here, "
            "then set HF_HUB_OFFLINE=1; or set "
            f"LOCAL_KERNELS={repo}=FOLDER. docs/setup.md has both, step by step"
        ) from None


class Steps:
    """The calls of one run. The constructor makes the calls of --warmup; iterating yields the schedule's calls.

    A recorded step is the script's own function, without a wrapper, unless it is the first call of the process.
    """

    first_call_s: float
    unprofiled_us: float | None = None  # see unprofiled_step_us()
    code: list[str]  # with --code: the code that Inductor generated for each graph

    def __init__(self, step: Callable[[], torch.Tensor], args):
        self.code = _generated_code() if args.code else []
        # The status ends when the first call returns. In a cold run that call is a part of the trace.
        waiting = contextlib.ExitStack()
        waiting.enter_context(screen.status("compiling …" if args.compile else "first call …"))

        def first_call():
            # The time until Python has control again includes compiling and loading. A synchronization here
            # would appear in a cold run's trace.
            with waiting, _inductor_quiet(args.compile):
                start = time.perf_counter()
                out = step()
                self.first_call_s = time.perf_counter() - start
            return out

        def step_then_idle():
            # Long GPU steps queue up. Work that is not recorded must not run into the first recorded step.
            out = step() if args.warmup or unrecorded > 1 else first_call()
            synchronize(args.device)
            return out

        def after_pause(call):
            def paused():
                time.sleep(args.pause / 1000)
                return call()

            return paused

        for number in range(args.warmup):
            step() if number else first_call()
        synchronize(args.device)
        if args.device.type != "cpu":
            torch.get_device_module(args.device).reset_peak_memory_stats()

        unrecorded = args.wait + args.schedule_warmup
        special = {} if args.warmup else {0: first_call}
        if unrecorded:
            special[unrecorded - 1] = step_then_idle
        # A generator, because a list would take 8 bytes per step.
        before = (special.get(number, step) for number in range(unrecorded))
        cold = [first_call] if not (unrecorded or args.warmup) else []
        calls = itertools.chain(before, cold, itertools.repeat(step, args.active - len(cold)))
        if args.pause:
            calls = map(after_pause, calls)
        total = unrecorded + args.active
        if total < MANY_STEPS:
            calls = list(calls)  # so that no work of ours lies between two steps
        self._calls = screen.counted(calls, total, "step")

    def __iter__(self) -> Iterator[Callable[[], torch.Tensor]]:
        return self._calls


def _generated_code() -> list[str]:
    """Return a list that receives all code that Inductor generates, or loads from its cache, from now on."""
    from torch._inductor.graph import GraphLowering

    kept = []
    GraphLowering.save_output_code = kept.append  # as torch._inductor.utils.run_and_get_code does
    return kept


def warm_up(step: Callable[[], torch.Tensor], args) -> Steps:
    """Call `step` as often as --warmup says, and return the schedule's calls, for the profiler's loop."""
    return Steps(step, args)


def unprofiled_step_us(step: Callable[[], torch.Tensor], args) -> float | None:
    """µs that a warm step takes without the profiler: the median of a few. None in a cold run, or with pauses.

    This is measured before the profiler starts, because its hooks stay in the process and keep each step slower. The
    device is waited for at both ends only, so that work queues up as in the recorded loop.
    """
    if not args.warmup or args.pause:
        return None
    start = time.perf_counter()
    step()
    synchronize(args.device)
    on_cpu = args.device.type == "cpu"
    # The first step only decides how many there is time for. Steps that overlap on a device need three.
    count = max(1 if on_cpu else 3, min(UNPROFILED_STEPS - 1, int(UNPROFILED_S / (time.perf_counter() - start))))
    if args.ranks:
        count = args.ranks.of_rank_0("unprofiled steps", count)  # all ranks must join each collective

    def mark():
        if on_cpu:
            return time.perf_counter()
        # The device notes the time when it reaches the event. The CPU does not wait for it.
        event = torch.get_device_module(args.device).Event(enable_timing=True)
        event.record()
        return event

    marks = [mark()]
    for _ in range(count):
        step()
        marks.append(mark())
    synchronize(args.device)
    return statistics.median(
        (after - before) * 1e6 if on_cpu else before.elapsed_time(after) * 1e3
        for before, after in itertools.pairwise(marks)
    )


def _inductor_quiet(mode: str | None) -> contextlib.AbstractContextManager:
    # With max-autotune Inductor prints its candidates to stderr, and no setting turns all of that off.
    quiet = mode is not None and mode.startswith("max-autotune")
    return contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext()


def activities(args) -> list[ProfilerActivity]:
    """Return what the profiler records: CPU activity, and GPU activity if the run is on a GPU."""
    gpu = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}.get(args.device.type)
    return [ProfilerActivity.CPU, *([gpu] if gpu else [])]


def profiler(args) -> torch.profiler.profile:
    """Return the profiler that the first rung creates in its own code."""
    return torch.profiler.profile(
        activities=activities(args),
        schedule=torch.profiler.schedule(wait=args.wait, warmup=args.schedule_warmup, active=args.active, repeat=1),
        record_shapes=args.record_shapes,
        with_stack=args.with_stack,
        profile_memory=args.profile_memory,
    )


def save(
    prof: torch.profiler.profile,
    args,
    steps: Steps,
    out: torch.Tensor,
    reference: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]] | None = None,
    facts: dict | None = None,
    against: str = "eager",
    check: Callable[[torch.Tensor], float] | None = None,
    lanes: Callable[[Path], None] | None = None,
) -> Run:
    """Check the recorded run, and write its trace and table under args.out. Files are written atomically.

    out: the result of the last step. reference: computes the same result in eager mode, or in the way that `against`
    names; None if the step is eager itself. If the result is a sum whose addends may cancel, it returns the addends.
    facts: what the report says of this run and no profiler records; stored in the trace as JSON.
    check: takes the place of a reference; it returns the relative error of `out`, or raises RunFailed.
    Raises BadInput and RunFailed; then no file has been written or replaced.
    """
    # Memory is read before the reference computes. max_memory_allocated() would flatten and sort a hundred counters.
    stats = None if args.device.type == "cpu" else torch.get_device_module(args.device).memory_stats_as_nested_dict()
    with screen.status(f"checking against {against} …"):
        error = check(out) if check else reference and _checked(out, reference, args, against)
    peak_bytes = stats and stats["allocated_bytes"]["all"]["peak"]
    run_id = args.ranks.run_id if args.ranks else secrets.token_hex(8)
    known = {"first_call_s": steps.first_call_s, "unprofiled_step_us": steps.unprofiled_us}
    known |= {"peak_bytes": peak_bytes, "relative_error": error, "roofs": _roofs(args)}
    lesson = as_stored(_run_facts(args, run_id, known | (facts or {})))
    code = "\n\n".join(dict.fromkeys(steps.code))
    if args.code and not code:
        raise RunFailed("--code: Inductor handed out no code for what ran; no file was written")
    folder, names = args.out / args.script, [f"{args.tag}.json", f"{args.tag}.txt", f"{args.tag}.py"]
    with screen.status("writing the trace …"):
        table = profiler_table(prof, args.device)
        with published(folder, *names[: 3 if code else 2]) as (trace_file, table_file, *code_file):
            table_file.write_text(f"run {run_id}\n{table}")
            for file in code_file:
                file.write_text(f"# run {run_id}: what Inductor generated\n{code}")
            export(prof, trace_file)
            if lanes:
                lanes(trace_file)
            finish_trace(trace_file, lesson=lesson)
            check_recording(trace_file, args.device, compiled=args.compile is not None)
            if args.ranks:
                args.ranks.all_agree()
    return Run(
        id=run_id,
        title=f"{args.script} · {args.tag.replace('_', ' · ')}",
        machine=f"{device_name(args.device)} · torch {torch.__version__}",
        trace=folder / names[0],
        table=folder / names[1],
        code=folder / names[2] if code else None,
        warmup=args.warmup,
        first_call_s=steps.first_call_s,
        error=error,
        against=against,
        peak_bytes=peak_bytes,
        smaller=args.on_cpu if args.device.type == "cpu" else {},
        rank=args.ranks.rank if args.ranks else 0,
        ranks=tuple(folder / f"{tag}.json" for tag in args.ranks.tags) if args.ranks else (),
        threads=args.threads,
    )


def _run_facts(args, run_id: str, facts: dict) -> RunFacts:
    """Return the facts about this run that are stored in its trace, for later reports."""
    known = {
        "script": args.script,
        "flags": args.profiled,
        "device": device_name(args.device),
        "torch": str(torch.__version__),
        "run": run_id,
        "guesses": [one.record for one in args.predictions],
    }
    return msgspec.convert(known | facts, RunFacts)


def _roofs(args) -> dict[str, float] | None:
    """Return the measured peaks of a CPU, which no data sheet gives. None unless shapes are recorded, as rates need."""
    if not args.record_shapes or args.device.type != "cpu" or args.ranks:
        return None
    with screen.status("measuring the peaks of this machine …"):
        compute, memory = measured_roofs(args.device, args.dtype)
    return {"tflops": compute.rate, "gb_s": memory.rate}


def export(prof: torch.profiler.profile, file: Path) -> None:
    """Write the profiler's Chrome trace to a file of any name. Raises OSError."""
    # Kineto first writes a temporary file beside this one, and reports a failure only on stderr. Opening such a
    # file here raises the error instead.
    beside = file.with_name(f"{file.name}.tmp")
    beside.touch()
    beside.unlink()
    if str(file).isprintable() and not {'"', "\\"} & set(str(file)):
        prof.export_chrome_trace(str(file))
        return
    # Kineto cannot write to such a path, so it gets a symbolic link that leads to the same file.
    with tempfile.TemporaryDirectory() as plain:
        folder = Path(plain) / "folder"
        folder.symlink_to(file.parent.resolve())
        simply = file.with_name(re.sub(r"[^\w.-]", "-", file.name, flags=re.ASCII))
        prof.export_chrome_trace(str(folder / simply.name))
        simply.replace(file)


def profiler_table(prof: torch.profiler.profile, device: torch.device) -> str:
    """Return torch's own table, without the rows that it adds for the GPU side of each annotation."""
    averages = prof.key_averages()
    spans = {row.key for row in averages if row.is_user_annotation and row.device_type != DeviceType.CPU}
    averages[:] = [row for row in averages if row.key not in spans or row.device_type == DeviceType.CPU]
    by = "cpu_time_total" if device.type == "cpu" else "device_time_total"
    table = averages.table(sort_by=by, row_limit=TABLE_ROWS)
    if spans:
        rows, totals = table.split("\nSelf CPU time total", 1)
        note = (
            f"Left out: a second row for {', '.join(sorted(spans))}, the span on the GPU from its first "
            "kernel's start to its last one's end, idle gaps included; its percentage misleads."
        )
        table = f"{rows}\n{note}\nSelf CPU time total{totals}"
    return table.rstrip("\n") + "\n"


def check_recording(file: Path, device: torch.device, compiled: bool = False) -> None:
    """Raise RunFailed for a trace without GPU work, without compiled code, or with events without time stamps."""
    with file.open("rb") as trace, mmap.mmap(trace.fileno(), 0, access=mmap.ACCESS_READ) as data:
        gpu_event, zero_stamp = GPU_EVENT.search(data) is not None, ZERO_STAMP.search(data) is not None
        ran_compiled = COMPILED.search(data) is not None
    if device.type != "cpu" and not gpu_event:
        raise RunFailed(
            "the profiler recorded no GPU work at all, though the step ran on the GPU: CUPTI did not "
            "start (another profiler attached, or no permission for it); no file was written"
        )
    if compiled and not ran_compiled:
        raise RunFailed(
            "--compile: the recorded steps ran nothing compiled (is TORCH_COMPILE_DISABLE or "
            "TORCHDYNAMO_DISABLE set?); no file was written"
        )
    if zero_stamp:
        events = json.loads(file.read_bytes())["traceEvents"]
        zeroed = sum(event.get("ph") == "X" and not event.get("ts") and not event.get("dur") for event in events)
        if zeroed:
            raise RunFailed(
                f"{zeroed} of {len(events)} events carry neither a time stamp nor a duration (pytorch issue "
                "188481): run again, or with another torch; no file was written"
            )


def _checked(
    out: torch.Tensor, reference: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]], args, against: str
) -> float:
    with torch.no_grad():
        ref = reference()
        addends = ref if isinstance(ref, tuple) else ()
        error = relative_error(out, sum(addends[1:], addends[0]) if addends else ref, *addends)
    if not error <= TOLERANCE[args.dtype]:  # so that NaN fails too
        raise RunFailed(
            f"the profiled step does not compute what {against} computes: relative error {error:.1e}, at most "
            f"{TOLERANCE[args.dtype]:.0e} is rounding in {args.profiled['dtype']}; no file was written"
        )
    return error


def relative_error(out: torch.Tensor, ref: torch.Tensor, *addends: torch.Tensor) -> float:
    """Return ‖out − ref‖ / ‖ref‖ in float32. A larger norm of an addend replaces ‖ref‖: addends round, then cancel."""
    scale = torch.stack([torch.linalg.vector_norm(one.float()) for one in (ref, *addends)]).max()
    return (torch.linalg.vector_norm(out.float() - ref.float()) / scale).item()
