"""Make what the documentation shows from the code and the reference traces: nothing in it is typed.

    uv run docs/make.py          rewrites README.md and docs/*.md
    uv run docs/make.py --check  says what is out of date, with exit status 1

A console block whose command is `uv run read_trace.py …` on traces/reference gets that command's
output. <!-- cheatsheet --> and <!-- verdicts --> hold the cheatsheet and the table of claims.
"""

import contextlib
import importlib.util
import io
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import cheatsheet, compare, trace  # noqa: E402

REFERENCE = ROOT / "traces/reference"
MACHINES = {"H200": "nvidia-h200", "CPU": "cpu"}
CONSOLE = re.compile(r"(```console\n\$ uv run (read_trace\.py [^\n]*traces/reference[^\n]*)\n)(.*?)(```)", re.S)
MADE = re.compile(r"(<!-- (cheatsheet|verdicts) -->\n)(.*?)(<!-- end -->)", re.S)

# What the articles report, on an NVIDIA A100-SXM4-80GB with PyTorch 2.13.
A100 = {
    "02": "2.314 ms CPU, 23.1 µs GPU", "03": "4.9 ms CPU, 4.5 ms GPU", "04": "yes", "05": "yes",
    "06": "gaps 227.8, 5.5, 4.5 µs", "07": "yes", "08": "yes, about 2.5 ms", "09": "yes", "10": "yes", "11": "yes",
    "12": "yes", "13": "1.78 ms over 26 µs", "14": "mean 1084, usually about 580 µs", "15": "yes", "16": "yes",
    "17": "32 MB in about 33 µs", "18": "about twice eager's CPU time", "19": "left as an exercise",
    "20": "left as an exercise", "21": "yes", "22": "yes", "23": "yes", "24": "yes, tn", "25": "yes",
    "27": "yes", "28": "yes", "29": "yes", "30": "0.19, 0.19, 0.17 ms", "31": "yes", "32": "yes",
    "33": "a round trip of 50 MB saved", "34": "yes", "35": "Liger 92.8, Inductor 89.4 µs", "37": "block 4096, 8 warps",
}  # fmt: skip
MARK = {True: "yes", False: "**no**", None: "–"}


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def output_of(command: str) -> str:
    """What a read_trace.py command prints into a pipe."""
    read_trace = load("read_trace")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.chdir(ROOT):
        status = read_trace.main(shlex.split(command)[1:])
    if status:
        raise SystemExit(f"docs/make.py: {command}: exit status {status}")
    return printed.getvalue().strip("\n") + "\n"


def single_runs() -> dict[tuple[str, str], dict[str, str]]:
    """(claims, guess) -> machine -> verdict, from every reference trace in turn."""
    scripts = {path.stem: load(path.stem) for path in ROOT.glob("0*.py")}
    table: dict[tuple[str, str], dict[str, str]] = {}
    for machine, folder in MACHINES.items():
        for file in sorted((REFERENCE / folder).rglob("*.json.gz"), key=order):
            read = trace.read(file)
            for guess in scripts[read.lesson["script"]].what_we_guess(Namespace(**read.lesson["flags"])):
                answer = guess.ask(read)
                cells = table.setdefault((guess.claims, guess.text), {})
                if machine not in cells or cells[machine].startswith("–"):
                    why = f" ({answer.because})" if answer.because and not answer.holds else ""
                    cells[machine] = f"{MARK[answer.holds]}: {answer.seen}{why}"
    return table


def order(file: Path) -> tuple:
    """The plain runs first: a claim is shown by the simplest trace that bears on it."""
    return file.parent.name, len(file.name), file.name


def two_runs() -> list[tuple[str, str, str]]:
    """Claims that set one run against another: claim, sentence, what the H200's traces show."""

    def side(name: str) -> compare.Side:
        return compare.Side(trace.read(REFERENCE / "nvidia-h200" / f"{name}.json.gz"))

    eager, compiled = (side(f"01_matmul_add/4096_bf16_warm_{path}") for path in ("eager", "compile"))
    linear, linear_compiled = (side(f"02_linear/1024x32x64_bf16_warm_{path}") for path in ("eager", "compile"))
    mlp, mlp_compiled = (side(f"03_simple_mlp/64x128x768x3072_bf16_warm_{path}") for path in ("eager", "compile"))
    liger = side("03_kernels_mlp/64x128x768x3072_bf16_warm_eager")

    def gemms(one: compare.Side) -> list[str]:
        return sorted(row.work.name for row in one.rows if row.says.family == "GEMM")

    def same(one, two) -> str:
        return f"{MARK[gemms(one) == gemms(two)]}: {', '.join(dict.fromkeys(gemms(one) + gemms(two)))}"

    def fused(one) -> float:
        return next(row.us for row in one.rows if row.work.kind == "kernel" and row.says.family == "pointwise")

    factor = compiled.cpu_us / eager.cpu_us
    inductor, by_hand = fused(mlp_compiled), fused(liger)
    return [
        ("16", "compiled: the GEMM kernel has the name that eager has", same(eager, compiled)),
        ("18", "compiled: about twice the CPU time a step",
         f"{MARK[factor > 1.5]}: {compiled.cpu_us:.1f} against {eager.cpu_us:.1f} µs, x {factor:.2f}"),
        ("23", "compiled linear: the same kernel, by name", same(linear, linear_compiled)),
        ("31", "compiled MLP: the GEMMs' names are eager's", same(mlp, mlp_compiled)),
        ("34", "Liger: the GEMMs are the same kernels", same(mlp, liger)),
        ("35", "Liger's kernel is slightly slower than Inductor's",
         f"{MARK[by_hand > inductor]}: Liger {by_hand:.1f}, Inductor {inductor:.1f} µs"),
    ]  # fmt: skip


def verdicts() -> str:
    lines = ["| claim | our guess | A100, as the articles report | H200 | CPU |", "|---|---|---|---|---|"]
    for (claims, text), cells in sorted(single_runs().items()):
        reported = "; ".join(dict.fromkeys(A100[claim] for claim in claims.split()))
        shown = (cells.get(machine, "not asked") for machine in MACHINES)
        lines.append(f"| {claims} | {text} | {reported} | {' | '.join(shown)} |")
    lines += ["", "Claims that set one run against another, on the H200:", "",
              "| claim | sentence | A100, as the articles report | H200 |", "|---|---|---|---|"]  # fmt: skip
    lines += [f"| {claim} | {text} | {A100[claim]} | {seen} |" for claim, text, seen in two_runs()]
    for claim, text, file in (
        ("26", "given other strides, compiled code raises an error", "02_linear/then-strides"),
        ("36", "each new shape compiles again", "03_simple_mlp/then-seq"),
        ("36", "Liger's kernel takes any shape", "03_kernels_mlp/then-seq"),
    ):
        screen = (REFERENCE / "nvidia-h200" / f"{file}.screen.txt").read_text().rstrip()
        lines += ["", f"Claim {claim}: {text}. On the H200:", "", "```", screen, "```"]
    return "\n".join(lines) + "\n"


def refreshed(text: str) -> str:
    """A page with everything in it that is made, made again."""
    text = CONSOLE.sub(lambda found: found[1] + output_of(found[2]) + found[4], text)
    makers = {"cheatsheet": lambda: cheatsheet.markdown() + "\n", "verdicts": verdicts}
    return MADE.sub(lambda found: found[1] + makers[found[2]]() + found[4], text)


def main() -> int:
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        before = page.read_text()
        after = refreshed(before)
        if after != before:
            stale.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv:
                page.write_text(after)
    print(("out of date: " if "--check" in sys.argv else "rewritten: ") + (", ".join(stale) or "nothing"))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
