"""Profile one step function: schedule, record_function, table, Chrome trace; returns a Run."""

import contextlib
import io
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Kineto writes to stderr as it starts and stops, on every machine; this is its own switch, read
# when the first profiler starts. What it would report as an error shows in the trace: see _check_recording().
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from common import screen, text, trace
from common.cli import BadInput, RunFailed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Relative error past which a result is wrong rather than rounded: bf16 keeps 8 bits.
TOLERANCE = {"bf16": 2e-2, "fp16": 2e-2, "fp32": 1e-4}
TABLE_ROWS = 15
# Looked for in a trace as text: parsing it would be most of the harness's work.
GPU_EVENT = re.compile(rb'"cat":\s*"(?:kernel|gpu_memcpy|gpu_memset)"')
ZERO_STAMP = re.compile(rb'"ts":\s*0(?:\.0*)?\s*[,}]')
# Flags that change nothing in the trace (--out is a path of this machine, and stays out of it).
NOT_PROFILED = ("script", "out", "guess", "lanes", "step", "only", "open", "then_seq", "then_strides")


@dataclass(frozen=True)
class Run:
    """One profiled run: its two files, and the facts that no trace holds."""

    title: str
    trace: Path
    table: Path
    totals: tuple[str, ...]  # the table's last lines
    first_call_s: float
    error: float | None  # ‖out − ref‖ / ‖ref‖ in float32; None where eager is itself the reference
    peak_bytes: int | None
    device_type: str
    device_name: str
    torch_version: str


def prepare(args, **tensors: tuple[int, ...]) -> tuple[torch.device, torch.dtype]:
    """Choose the device, refuse what cannot run there, seed: everything short of allocating.

    tensors: the shape of every tensor alive at once in the step, by name; the largest are named
    in the refusal when they cannot fit. Raises BadInput.
    """
    first = args.wait + args.schedule_warmup
    if args.step is not None and not first <= args.step < first + args.active:
        raise BadInput(f"--step {args.step}: this schedule records #{first} to #{first + args.active - 1}")
    device = _device(args.device)
    if args.compile and device.type == "cpu" and not _cxx_compiler():
        raise BadInput(
            "--compile on a CPU needs a C++ compiler and none was found: install g++ or clang++, "
            "or set CXX"
        )
    dtype = DTYPES[args.dtype]
    _require_memory(tensors, dtype, device)
    torch.manual_seed(args.seed)
    return device, dtype


def _auto_device() -> str:
    # torch.accelerator would also answer mps, which the profiler cannot trace.
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
    # The names that Inductor itself tries.
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", default))


def _require_memory(tensors: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
    free = free_bytes(device)
    if free is None:
        return
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in tensors.items()}
    # The check holds the reference beside the step's tensors and compares the two in float32.
    *_, last = tensors.values()
    needed = sum(sizes.values()) + math.prod(last) * (dtype.itemsize + 3 * 4)
    if needed <= free:
        return
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
    where = "this machine" if device.type == "cpu" else torch.get_device_module(device).get_device_name()
    raise BadInput(
        f"these shapes need about {text.size(needed)} and {where} has {text.size(free)} free "
        f"({', '.join(f'{name}: {text.size(sizes[name])}' for name in largest)}, …): make them smaller"
    )


def free_bytes(device: torch.device) -> int | None:
    """Memory that tensors can take without swapping; None where the system does not say."""
    if device.type != "cpu":
        return torch.get_device_module(device).mem_get_info()[0]
    limits = []
    with contextlib.suppress(OSError, ValueError):  # Linux
        available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        limits.append(int(available[1]) * 1024)
        group = Path("/sys/fs/cgroup")  # a container's own limit, cgroup v2
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    if not limits:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # macOS: all there is
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def tag(args, device: torch.device, shape: str, *own: str | None) -> str:
    """The file name of a run: shape, dtype, cold or warm, path, then what is not the default.

    own: the tokens of the rung's own flags, None or "" for one that has its default.
    """
    tokens = [shape, args.dtype, "warm" if args.warmup else "cold", "compile" if args.compile else "eager", *own]
    if args.compile not in (None, "default"):
        tokens.append(args.compile)
    for name, value, default in (
        ("warmup", args.warmup, (0, 3)),
        ("wait", args.wait, (1,)),
        ("schedwarmup", args.schedule_warmup, (1,)),
        ("active", args.active, (3,)),
        ("seed", args.seed, (0,)),
    ):
        if value not in default:
            tokens.append(f"{name}{value}")
    for token, given in (
        (device.type, device.type != _auto_device()),
        ("shapes", args.record_shapes),
        ("stack", args.with_stack),
        ("memory", args.profile_memory),
    ):
        if given:
            tokens.append(token)
    return "_".join(token for token in tokens if token)


@contextlib.contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turn what get_kernel raises where the Hub or the kernel is out of reach into BadInput."""
    try:
        yield
    except Exception as problem:  # its errors have no common type
        raise BadInput(
            f"{repo} could not be loaded ({str(problem).strip().splitlines()[0]}). Without a way to the "
            "Hub: run this once on a machine with a connection and copy its ~/.cache/huggingface here, "
            "then set HF_HUB_OFFLINE=1; or set "
            f"LOCAL_KERNELS={repo}=FOLDER. docs/troubleshooting.md has both, step by step"
        ) from None


@contextlib.contextmanager
def _published(folder: Path, *names: str) -> Iterator[list[Path]]:
    """Paths to write to, renamed to `names` at the end: files appear whole or not at all.

    Raises BadInput where the folder cannot be written; on any error nothing is published.
    """
    # Hidden names beside the final ones: a rename within one folder is atomic.
    files = [folder / f".unfinished-{os.getpid()}-{name}" for name in names]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(f"cannot write to {folder}: {problem.strerror or problem}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"cannot write to {folder}: no permission")
    try:
        yield files
        for file, name in zip(files, names, strict=True):
            os.replace(file, folder / name)
    except BaseException:
        for file in files:
            file.unlink(missing_ok=True)
        raise


def profile(
    step: Callable[[], torch.Tensor],
    args,
    device: torch.device,
    *,
    name: str,
    reference: Callable[[], torch.Tensor] | None = None,
) -> Run:
    """Run `step` through the schedule, write its trace and table under args.out, check its result.

    step: one annotated step; returns its output. reference: computes the same in eager mode, or
    None where the step is eager itself. name: see tag(). Raises BadInput and RunFailed; then no
    file has been written or replaced.
    """
    folder = args.out / args.script
    names = (f"{name}.json", f"{name}.txt")
    with _published(folder, *names) as (trace_file, table_file), torch.no_grad():
        prof, out, first_call_s, peak = _record(step, args, device)
        table = profiler_table(prof, device)
        table_file.write_text(table)
        prof.export_chrome_trace(str(trace_file))
        _check_recording(trace_file, device)
        error = None if reference is None else relative_error(out, reference())
        if error is not None and not error <= TOLERANCE[args.dtype]:  # so that NaN fails too
            raise RunFailed(
                f"the profiled step does not compute what eager computes: relative error {error:.1e}, "
                f"at most {TOLERANCE[args.dtype]:.0e} is rounding in {args.dtype}; no file was written"
            )
    return Run(
        title=f"{args.script} · {name.replace('_', ' · ')}",
        trace=folder / names[0],
        table=folder / names[1],
        totals=tuple(line for line in table.splitlines() if line.startswith("Self ")),
        first_call_s=first_call_s,
        error=error,
        peak_bytes=peak,
        device_type=device.type,
        device_name=device_name(device),
        torch_version=torch.__version__,
    )


def _record(step, args, device) -> tuple[torch.profiler.profile, torch.Tensor, float, int | None]:
    """Warm up, then profile: the profiler, the last output, the first call's seconds, peak bytes."""
    device_module = torch.get_device_module(device)
    prof = torch.profiler.profile(
        activities=_activities(device),
        schedule=torch.profiler.schedule(
            wait=args.wait, warmup=args.schedule_warmup, active=args.active, repeat=1
        ),
        record_shapes=args.record_shapes,
        with_stack=args.with_stack,
        profile_memory=args.profile_memory,
    )
    prof.preset_metadata_json("lesson", json.dumps(_facts(args, device)))
    first_call_s = None
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(screen.status("compiling …" if args.compile else "first call …"))
        if args.compile and args.compile.startswith("max-autotune"):
            # Inductor prints its candidates there, and has no switch for all of it.
            waiting.enter_context(contextlib.redirect_stderr(io.StringIO()))

        def first_call():
            # Until Python has control again: compiling and loading happen in there, and waiting
            # for the GPU would put a synchronization into a cold run's trace.
            nonlocal first_call_s
            start = time.perf_counter()
            out = step()
            first_call_s = time.perf_counter() - start
            waiting.close()
            return out

        if args.warmup:
            first_call()
            for _ in range(args.warmup - 1):
                step()
        if device.type != "cpu":
            device_module.synchronize()
            device_module.reset_peak_memory_stats()
        before = args.wait + args.schedule_warmup
        with prof:
            for number in range(before):
                out = step() if first_call_s is not None else first_call()
                if number == before - 1 and device.type != "cpu":
                    # Large steps queue up: what is not recorded must not run into the first one that is.
                    device_module.synchronize()
                prof.step()
            for _ in range(args.active):
                out = step() if first_call_s is not None else first_call()
                prof.step()
    # max_memory_allocated() would flatten and sort a hundred counters for this one.
    allocated = device_module.memory_stats_as_nested_dict() if device.type != "cpu" else None
    return prof, out, first_call_s, allocated and allocated["allocated_bytes"]["all"]["peak"]


def _activities(device: torch.device) -> list[ProfilerActivity]:
    accelerator = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}.get(device.type)
    return [ProfilerActivity.CPU, *([accelerator] if accelerator else [])]


def _facts(args, device: torch.device) -> dict:
    """What ran, stored in the trace itself: a reader of the file has nothing else."""
    flags = {key: value for key, value in vars(args).items() if key not in NOT_PROFILED}
    return {"script": args.script, "flags": flags, "device": device_name(device), "torch": torch.__version__}


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    return torch.get_device_module(device).get_device_name()


def profiler_table(prof: torch.profiler.profile, device: torch.device) -> str:
    """torch's own table, without the GPU-side spans that it adds under the labels' names."""
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


def _check_recording(file: Path, device: torch.device) -> None:
    """Refuse a trace that would teach nonsense. Raises RunFailed."""
    data = file.read_bytes()
    if device.type != "cpu" and not GPU_EVENT.search(data):
        raise RunFailed(
            "the profiler recorded no GPU work at all, though the step ran on the GPU: CUPTI did not "
            "start (another profiler attached, or no permission for it); no file was written"
        )
    if ZERO_STAMP.search(data):
        events = json.loads(data)["traceEvents"]
        if zeroed := sum(trace.is_zeroed(event) for event in events):
            raise RunFailed(
                f"{zeroed} of {len(events)} events carry neither a time stamp nor a duration (pytorch issue "
                "188481): run again, or with another torch; no file was written"
            )


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """‖out − ref‖ / ‖ref‖, in float32."""
    ref = ref.float()
    return (torch.linalg.vector_norm(out.float() - ref) / torch.linalg.vector_norm(ref)).item()
