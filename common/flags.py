"""The flags of a numbered script. They are read and checked before torch is loaded, which takes seconds."""

import argparse
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from common import not_installed, publish
from tracereader.command import BadInput, OneLineParser, command, not_negative, positive
from tracereader.machine import free_memory
from tracereader.show import sections

ROOT = Path(__file__).resolve().parent.parent
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # which replay a CUDA graph

# The peak memory per recorded step of few ops, while the trace is written: 35 kB (rung 1 on a CPU) to 53 kB measured.
BYTES_A_STEP = 53_000
TORCH_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
DAY_MS = 24 * 60 * 60 * 1000
# A run calls its step at most this often. A step takes 20 µs or more, so that more would take hours.
MOST_CALLS = 10_000_000
# At most this many calls measure a warm step before the profiler starts; see harness.unprofiled_step_us().
UNPROFILED_STEPS = 11

WHAT, HOW, SCHEDULE = "what is profiled", "how it runs", "the profiler's schedule"
SHOWN, RECORDED = "how it is shown", "what else is recorded, and where"


@dataclass(frozen=True)
class Flag:
    """One flag, as flag() declares it."""

    name: str
    group: str
    tag: str | None
    shape: bool
    untagged: tuple
    on_cpu: Any
    options: dict[str, Any]

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the folder has no name; . is the current folder")
    return Path(text)


def _dtype(text: str) -> str:
    named = TORCH_NAMES.get(text.removeprefix("torch."))
    if named:
        raise argparse.ArgumentTypeError(f"{text} is written {named} here")
    return text


def flag(
    name: str,
    says: str,
    *,
    group: str = WHAT,
    tag: str | None = None,
    shape: bool = False,
    untagged: tuple = (),
    on_cpu: Any = None,
    **options,
) -> Flag:
    """Declare a flag. says: its help. options: as argparse's add_argument takes them; the first choice is the default.

    tag: the word in a run's name if the flag does not have its default; "{}" stands for its value, and "" means that
    the name has the value already. A flag without a tag does not change what is profiled, so neither the name nor the
    trace mentions it. shape: the value is part of the name's first word.
    untagged: further values that the name does not mention. on_cpu: the default for a run on a CPU.
    """
    if options.get("type") in (positive, not_negative):
        options.setdefault("metavar", "N")
    if "choices" in options and "nargs" not in options:
        options.setdefault("default", options["choices"][0])
    default = options.get("default", False if options.get("action") == "store_true" else None)
    return Flag(name, group, "" if shape else tag, shape, (default, *untagged), on_cpu, options | {"help": says})


# A run's name mentions them in this order.
COMMON = (
    flag(
        "--compile",
        f"run it through torch.compile; MODE is one of {', '.join(COMPILE_MODES)} (without MODE: default)",
        group=HOW,
        tag="{}",
        untagged=("default",),
        nargs="?",
        const="default",
        choices=COMPILE_MODES,
        metavar="MODE",
    ),
    flag(
        "--warmup",
        "call the step N times before the profiler starts (3 without N); without this flag the run is cold",
        group=HOW,
        tag="warmup{}",
        untagged=(3,),
        nargs="?",
        const=3,
        default=0,
        type=not_negative,
    ),
    flag("--dtype", "element type (bf16)", group=HOW, tag="", type=_dtype, choices=("bf16", "fp16", "fp32")),
    flag("--wait", "steps that are not profiled (1)", group=SCHEDULE, tag="wait{}", default=1, type=not_negative),
    flag(
        "--schedule-warmup",
        "steps that are profiled and discarded (1)",
        group=SCHEDULE,
        tag="schedwarmup{}",
        default=1,
        type=not_negative,
    ),
    flag("--active", "steps that are recorded (3)", group=SCHEDULE, tag="active{}", default=3, type=positive),
    flag(
        "--pause",
        "sleep MS milliseconds before each step, to see whether a pause slows down the step after it (0)",
        group=SCHEDULE,
        tag="pause{}",
        default=0,
        type=not_negative,
        metavar="MS",
    ),
    flag("--seed", "seed of the random inputs (0)", group=HOW, tag="seed{}", default=0, type=not_negative),
    flag(
        "--device",
        "auto: the GPU if there is one, else the CPU; cuda includes ROCm (auto)",
        group=HOW,
        tag="{}",
        choices=("auto", "cuda", "xpu", "cpu"),
    ),
    flag(
        "--guess",
        "answer questions about the run before it (at a terminal, except in CI)",
        group=HOW,
        action=argparse.BooleanOptionalAction,
    ),
    flag("--on", "play the lesson on that machine's committed trace: h200", group=HOW, metavar="MACHINE"),
    flag("--record-shapes", "record the shapes of the ops' inputs", group=RECORDED, tag="shapes", action="store_true"),
    flag("--with-stack", "record Python stacks, with file paths", group=RECORDED, tag="stack", action="store_true"),
    flag("--profile-memory", "record allocations", group=RECORDED, tag="memory", action="store_true"),
    flag("--code", "with --compile, write Inductor's generated code to <tag>.py", group=RECORDED, action="store_true"),
    flag(
        "--out",
        "folder for the trace and the table (traces/ beside the scripts)",
        group=RECORDED,
        type=_folder,
        default=ROOT / "traces",
        metavar="DIR",
    ),
)


def parse(
    argv: Sequence[str] | None,
    doc: str | None,
    file: str,
    *own: Flag,
    needs_gpu: str | None = None,
    ranks: bool = False,
):
    """Return the flags of one run as a frozen object with one field per flag; prepare() adds the rest.

    doc: the script's docstring, which begins the help page; None under python -OO. file: the script's __file__.
    own: the script's flags in addition to COMMON; a flag of the same name replaces the common one. needs_gpu: why the
    script cannot run on a CPU, if it cannot. ranks: whether several processes can run it together. Raises BadInput.
    """
    if not ranks:
        _require_one_process()
    try:
        os.getcwd()
    except OSError:  # MKL would end the program without a current folder
        raise BadInput("the current folder has been deleted: change to another one") from None
    script = Path(file)
    parser = OneLineParser(prog=script.name, usage="%(prog)s [flags]", description=(doc or "").strip())
    groups = {title: parser.add_argument_group(title) for title in (WHAT, HOW, SCHEDULE, SHOWN, RECORDED)}
    common = {one.name for one in COMMON}
    instead = {one.name: one for one in own if one.name in common}
    declared = (*(one for one in own if one.name not in common), *(instead.get(one.name, one) for one in COMMON))
    for one in declared:
        groups[one.group].add_argument(one.name, **one.options | ({} if one.on_cpu is None else {"default": None}))
    sections.add_view_flags(groups[SHOWN])
    args = parser.parse_args(argv)
    sections.refuse_conflicts(args)
    given = vars(args)
    if given["html"] is not None:
        from tracereader.show.page import files

        if given["html"] == files.STDOUT:
            raise BadInput("--html -: a script prints its report; name a file")
        files.refuse_early(given["html"], given["force"])
    # Which of its two defaults a flag gets depends on the device, which only torch knows.
    open_ones = [one for one in declared if one.on_cpu is not None and given[one.dest] is None]
    given |= {one.dest: one.options.get("default") for one in open_ones}
    on_cpu = {one.dest: one.on_cpu for one in open_ones}

    first, count = given["wait"] + given["schedule_warmup"], given["active"]
    if given["step"] is not None and not first <= given["step"] < first + count:
        raise BadInput(f"--step {given['step']}: this schedule records #{first} to #{first + count - 1}")
    if given["code"] and not given["compile"]:
        raise BadInput("--code writes the code that Inductor generates: add --compile")
    if given["pause"] > DAY_MS:
        raise BadInput(f"--pause {given['pause']} is longer than a day")
    if given["warmup"] + first + count > MOST_CALLS:
        most = max(("warmup", "wait", "schedule_warmup", "active"), key=given.__getitem__)
        raise BadInput(f"--{most.replace('_', '-')} {given[most]}: a run has at most {MOST_CALLS:,} steps")
    free = free_memory()
    if free is not None and count * BYTES_A_STEP > free:
        from tracereader.findings.finding import size

        raise BadInput(
            f"--active {count}: recording takes about {size(BYTES_A_STEP)} a step or more, which makes "
            f"{size(count * BYTES_A_STEP)}, and this machine has {size(free)} free: record fewer"
        )
    if needs_gpu and given["device"] == "cpu":
        raise BadInput(needs_gpu)
    at_a_terminal = all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout))
    if given["guess"] and not at_a_terminal:
        raise BadInput("--guess asks questions and needs a terminal: leave it out, or run the script at a terminal")
    given["asks"] = given["guess"] or (
        given["guess"] is None and at_a_terminal and not os.environ.get("CI") and _is_the_only_process()
    )

    settings = given | {"script": script.stem, "declared": declared, "needs_gpu": needs_gpu, "on_cpu": on_cpu}
    # prepare(), which needs torch, sets these; processes() sets ranks if there are several.
    settled_later = {"tag": "", "profiled": {}, "predictions": (), "threads": None, "ranks": None}
    return make_dataclass("Args", [*settings, *settled_later], frozen=True)(**settings, **settled_later)


def require_at_most(args, **most: int) -> None:
    """Raise BadInput if a flag's value, given by the flag's name, is larger than its limit."""
    for name, limit in most.items():
        if (getattr(args, name) or 0) > limit:
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)} is too large: {limit:,} is the most")


def _is_the_only_process() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1"


def _require_one_process() -> None:
    """If a launcher has started several processes, raise BadInput on rank 0 and end the others silently."""
    if _is_the_only_process():
        return
    from common.distributed import place  # here, because importing it turns off torch's C++ log

    here = place()
    if here and here.rank:
        raise SystemExit(2)
    if here:
        raise BadInput(f"this script is for one process, and {here.world_size} were started: start it without torchrun")


def tag_of(args) -> str:
    """Return the run's name: shape, dtype, cold or warm, eager or compile, then all flags without their default."""
    shape = "x".join(str(getattr(args, one.dest)) for one in args.declared if one.shape)
    words = [shape, args.dtype, "warm" if args.warmup else "cold", "compile" if args.compile else "eager"]
    for one in args.declared:
        value = getattr(args, one.dest)
        if one.tag and value not in one.untagged:
            words.append(one.tag.format(value))
    return "_".join(words)


def profiled_flags(args) -> dict[str, Any]:
    """Return the flags that change what is profiled, which the trace stores."""
    return {one.dest: getattr(args, one.dest) for one in args.declared if one.tag is not None}


def calls_at_most(args) -> int:
    """Return how often a run calls its step at most: warm-up, unprofiled steps, and the profiler's schedule."""
    before = args.warmup + UNPROFILED_STEPS if args.warmup else 0
    return before + args.wait + args.schedule_warmup + args.active


def answer_before_torch(flags: Callable, file: str, *packages: str) -> None:
    """If this script is the program, print --help or refuse a wrong flag here, before torch is imported.

    Otherwise say at a terminal that importing torch takes long. flags: the script's function that reads them;
    file: its __file__; packages: what it imports besides torch.
    """
    if Path(sys.argv[0]).resolve() != Path(file).resolve():
        return
    if _asks_for_flags.get():
        raise _Flags(flags([]))

    def answered(argv):
        args = flags()  # --help ends the program by itself
        if args.on is not None:
            from common import elsewhere

            elsewhere.play(args, tag_of(args))
            raise SystemExit(0)
        if _is_the_only_process():  # a rank tells the other ranks later
            with publish.out_refused():
                publish.refuse_early(args.out / args.script)
        if lacks := not_installed(Path(file).name, "torch", *packages):
            raise BadInput(lacks)

    try:
        answered(None)
    except (BadInput, OSError):  # OSError: --help to a full disk or a closed pipe
        sys.exit(command(answered)())  # prints the error in one line
    if "torch" not in sys.modules and sys.stderr.isatty():
        print("importing torch, which takes up to half a minute the first time …", file=sys.stderr, flush=True)


def advice(problem: str) -> str | None:
    """Return one line of advice for an error of Inductor or Triton that only the user can fix; else None."""
    # The text decides, because Triton raises no type of its own, and Inductor's types need torch.
    if "Failed to find C compiler" in problem:
        return "Triton needs a C compiler and found none: install gcc, or set CC"
    if refused := re.search(r"InductorError: (?:\w*NotFound|\w*Exists|Permission|\w*Directory|OS)Error: (.*)", problem):
        return f"--compile cannot write to its cache: {refused[1]}; set TORCHINDUCTOR_CACHE_DIR to another folder"
    if "InvalidCxxCompiler" in problem or "CppCompileError" in problem:
        named = os.environ.get("CXX", "g++")
        return f"--compile needs a C++ compiler, and {named} does not compile: install g++ or clang++, or set CXX"
    return None


def several_numbers(argv: Sequence[str]) -> list[tuple[int, int]]:
    """Return the positions of the flags that several whole numbers follow: the flag's index, and the end index."""
    starts = [at for at, word in enumerate(argv) if word.startswith("--")]
    return [
        (at, end)
        for at, end in itertools.pairwise([*starts, len(argv)])
        if end - at > 2 and all(word.isdecimal() for word in argv[at + 1 : end])
    ]


def one_by_one(argv: Sequence[str]) -> tuple[str, dict[int, list[str]]]:
    """Return the flag that several whole numbers follow, and for each number the command line with it alone.

    Raises BadInput if there is no such flag, or more than one.
    """
    found = several_numbers(argv)
    if len(found) != 1:
        named = f"; {' and '.join(argv[at] for at, _ in found)} have" if found else ""
        raise BadInput(f"one flag takes several whole numbers here, as in --size 64 128 256{named}")
    ((at, end),) = found
    try:
        return argv[at], {not_negative(word): [*argv[: at + 1], word, *argv[end:]] for word in argv[at + 1 : end]}
    except argparse.ArgumentTypeError as problem:
        raise BadInput(f"argument {argv[at]}: {problem}") from None


class _Flags(Exception):
    """Carries a script's default flags, and ends the script because nothing else was asked of it."""


_asks_for_flags: ContextVar[bool] = ContextVar("asks_for_flags", default=False)


def declared_by(file: Path) -> tuple[Flag, ...]:
    """Return the flags that a numbered script declares, read before it imports torch. Raises BadInput."""
    asked = _asks_for_flags.set(True)
    try:
        load_script(file, [])
    except _Flags as found:
        return found.args[0].declared
    finally:
        _asks_for_flags.reset(asked)
    raise BadInput(f"{file} is no numbered script")


def load_script(file: Path, argv: Sequence[str]) -> ModuleType:
    """Import a numbered script to run it with these flags. A wrong flag is refused before torch is loaded.

    Raises BadInput if there is no such script.
    """
    if not file.is_file() or file.suffix != ".py":
        raise BadInput(f"there is no script {file}")
    spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
    script = importlib.util.module_from_spec(spec)
    typed, sys.argv = sys.argv, [str(file), *argv]
    try:
        spec.loader.exec_module(script)
    finally:
        sys.argv = typed
    if not hasattr(script, "flags"):
        raise BadInput(f"{file} is no numbered script")
    return script
