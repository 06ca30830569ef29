"""Make what the pages show from the code and the reference traces.

    uv run docs/make.py          rewrites README.md and docs/*.md
    uv run docs/make.py --check  says what is out of date, with exit status 1

A console block whose command is `uv run read-trace …` on a committed trace gets that command's output, and a block
whose command is `cat …` or `sed -n …` of a file there gets what that command prints. <!-- cheatsheet --> holds the
cheatsheet. <!-- verdicts -->, <!-- part1 -->, <!-- part2 --> and <!-- tables --> hold the articles' claims and figures
(figures.py). <!-- climb-… --> hold a decoder's runs, one after the other (climb.py). <!-- =NAME -->…<!-- = --> holds
one threshold of the code, by its name in THRESHOLDS. <!-- changes -->, <!-- predictions --> and <!-- recordings -->
hold what reports propose, against what was measured (opportunities.py).
"""

import contextlib
import glob
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import climb  # noqa: E402
import opportunities  # noqa: E402
from figures import GPU_ONLY, HEADS, NEEDS_TRITON, PART_1, PART_2, TABLES, Figure  # noqa: E402

from tracereader import cli  # noqa: E402
from tracereader.figures import cpu_work, pace, ranks, regime, summarize  # noqa: E402
from tracereader.figures import steps as step_figures  # noqa: E402
from tracereader.findings import cheatsheet, decoding, steps  # noqa: E402
from tracereader.findings import ranks as rank_findings  # noqa: E402
from tracereader.findings.attention import backends  # noqa: E402
from tracereader.findings.finding import Prediction  # noqa: E402
from tracereader.replay import recorded  # noqa: E402
from tracereader.show.predictions import predictions_of  # noqa: E402
from tracereader.trace import read  # noqa: E402
from tracereader.two_runs import compare  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = ROOT / "traces/reference"
MACHINES = {"H200": "nvidia-h200", "CPU": "cpu"}
CONSOLE = re.compile(
    r"(```console\n\$ (uv run read-trace|cat|sed -n) ([^\n]*(?:traces/reference|tests/traces)[^\n]*)\n)(.*?)(```)", re.S
)
TABLES_MADE = (
    r"cheatsheet|verdicts|part1|part2|tables|training|(?:cpu-only-)?changes|(?:rank-)?predictions|recordings"
    r"|climb-\w+"
)
MADE = re.compile(rf"(<!-- ({TABLES_MADE}) -->\n)(.*?)(<!-- end -->)", re.S)
VALUE = re.compile(r"(<!-- =([\w-]+) -->)(.*?)(<!-- = -->)", re.S)

# The thresholds that the pages name, as the code has them.
THRESHOLDS = {
    "idle": f"{regime.MUCH_IDLE:.0%}",
    "tolerance": f"{recorded.TOLERANCE:.0%}",
    "too-far": f"{recorded.TOO_FAR:.0%}",
    "busy": f"{1 - regime.MUCH_IDLE:.0%}",
    "some-idle": f"{steps.SOME_IDLE:.0%}",
    "exposed": f"{regime.MUCH_EXPOSED:.0%}",
    "near-peak": f"{regime.NEAR_THE_ROOF:.0%}",
    "known": f"{regime.MUCH_KNOWN:.0%}",
    "wide-step": f"{step_figures.STANDS_OUT:g}",
    "left-out": f"{pace.FAR_WIDER:g}",
    "cached": f"{cpu_work.CACHED / 2**20:.0f} MiB",
    "faster": f"{cpu_work.MUCH_FASTER - 1:.0%}",
    "reading": f"{decoding.MUCH_READING:.0%}",
    "waited": f"{rank_findings.MUCH_WAITED:.0%}",
    "longer": f"{rank_findings.MUCH_LONGER:.0%}",
    "causes": f"{rank_findings.CAUSES_IT:.0%}",
    "reason": f"{rank_findings.A_REASON:.0%}",
    "little": f"{rank_findings.LITTLE:.0%}",
    "slow-link": f"{rank_findings.MUCH_SLOWER:g}",
    "more-launches": f"{rank_findings.MORE_LAUNCHES:.0%}",
    "slower-cpu": f"{rank_findings.CPU_IS_SLOWER:g}",
    "clocks-off": f"{ranks.CLOCKS_OFF / 1e9:.0f} s",
    "ends-apart": f"{ranks.FAR_APART / 1e6:g} ms",
}

# What the articles claim and report, on an NVIDIA A100-SXM4-80GB with PyTorch 2.13.
A100 = {
    "01": "yes", "02": "2.314 ms CPU, 23.1 µs GPU", "03": "4.9 ms CPU, 4.5 ms GPU", "04": "yes", "05": "yes",
    "06": "gaps 227.8, 5.5, 4.5 µs", "07": "yes", "08": "yes, about 2.5 ms", "09": "yes", "10": "yes", "11": "yes",
    "12": "yes", "13": "1.78 ms over 26 µs", "14": "mean 1084, usually about 580 µs", "15": "yes", "16": "yes",
    "17": "32 MB in about 33 µs", "18": "about twice eager's CPU time", "19": "left as an exercise",
    "20": "left as an exercise", "21": "yes", "22": "yes", "23": "yes", "24": "yes, tn", "25": "yes",
    "26": "claimed", "27": "yes", "28": "yes", "29": "yes", "30": "0.19, 0.19, 0.17 ms", "31": "yes", "32": "yes",
    "33": "a round trip of 50 MB saved", "34": "yes", "35": "Liger 92.8, Inductor 89.4 µs", "36": "claimed",
    "37": "block 4096, 8 warps", "38": "yes", "39": "yes, with version 0.1's call", "40": "yes",
    "41": "yes, six things", "42": "yes", "43": "5 kernels", "44": "7.239 against 1.955 ms, 3.7 times", "45": "yes",
    "46": "yes, sgemm", "47": "yes", "48": "yes", "49": "277.9 µs", "50": "146.8 µs, the fastest", "51": "13%",
    "52": "186.3 µs", "53": "yes", "54": "yes", "55": "0% reported; one block of 8 warps, 12.5%",
    "56": "214 against 138 and 117 µs", "57": "not reported", "58": "yes", "59": "yes",
}  # fmt: skip


def claims_of(prediction: Prediction, script: str, flags: dict) -> str:
    """The claims of the articles that one prediction bears on; "" where it is of none.

    A finding declares them; where they depend on more than the finding, they are here.
    """
    kind, record, compiled = prediction.finding.name, prediction.record, bool(flags.get("compile"))
    if kind == "regime_is":
        return {"overhead-bound": "02", "compute-bound": "03", "GPU-bound": "03"}[record["name"]]
    if kind == "dispatches":
        return {"aten::mm": "09", "aten::bmm": "10", "aten::addmm": "21"}[record["child"]]
    if kind == "bias_copy_then_gemm":
        return "17" if compiled else "20"
    if kind == "gpu_does":
        return {"04_a_naive_attention": "41", "04_b_inplace_ops_attention": "43"}[script]
    if kind == "kernel_is":
        of_sdpa = {"fmha_cutlassF": "49", "flash_fwd_kernel": "50", "cudnn_generated": "52"}
        return of_sdpa.get(record["word"], "") if script == "04_c_sdpa_attention" else "58"
    if kind == "fused_into_one" and script.startswith("04"):
        return ""
    if kind == "fused_into_one":
        return "32 33" if compiled and script == "03_simple_mlp" else "34"
    if kind == "kernels_are":
        return {"01_matmul_add": "09", "03_simple_mlp": "27", "03_kernels_mlp": "34",
                "04_c_sdpa_attention": "45"}[script]  # fmt: skip
    if kind != "ops_are":
        return prediction.finding.claims
    return {
        "01_matmul_add": ("09" if record["name"] == "aten::add" else "20", "16"),
        "02_linear": ("21", "23"), "03_simple_mlp": ("27", "31"), "03_kernels_mlp": ("34", "34"),
        "04_a_naive_attention": ("41", ""), "04_b_inplace_ops_attention": ("43", ""),
        "04_c_sdpa_attention": ("53", "53"), "04_d_kernels_attention": ("58", "58"),
    }[script][compiled]  # fmt: skip


MARK = {True: "yes", False: "**no**", None: "–"}


def output_of(command: str, arguments: str) -> str:
    """What a command prints to a pipe."""
    if command != "uv run read-trace":
        words = [*command.split(), *shlex.split(arguments)]
        return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip("\n") + "\n"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.chdir(ROOT):
        words = shlex.split(arguments)  # each * is expanded as a shell does it
        status = cli.main([name for word in words for name in sorted(glob.glob(word)) or [word]])
    if status:
        raise SystemExit(f"docs/make.py: read-trace {arguments}: exit status {status}")
    return printed.getvalue().strip("\n") + "\n"


def single_runs() -> dict[tuple[str, str], dict[str, str]]:
    """The verdicts of all reference traces: (claims, prediction) -> machine -> verdict."""
    table: dict[tuple[str, str], dict[str, str]] = {}
    for machine, folder in MACHINES.items():
        for file in sorted((REFERENCE / folder).glob("*/*.json.gz"), key=order):
            trace = read(file)
            if trace.facts.script == "06_training":  # it checks no claim of the articles: see training()
                continue
            summary = summarize(trace)
            for one in predictions_of(trace):
                verdict = one.ask(summary)
                claims = claims_of(one, trace.facts.script, trace.facts.flags)
                cells = table.setdefault((claims, one.text), {})
                if machine not in cells or cells[machine].startswith("–"):
                    why = f" ({verdict.why_not})" if verdict.why_not and not verdict.holds else ""
                    cells[machine] = f"{MARK[verdict.holds]}: {verdict.evidence}{why}"
    return table


def training() -> str:
    """The predictions of rung 6, and the runs whose traces confirm each or not: rank 0's where there are several."""
    runs: dict[str, dict[bool | None, list[str]]] = {}
    for file in sorted((REFERENCE / "nvidia-h200-x2/06_training").glob("*.json.gz"), key=lambda file: file.name):
        run = file.name.removesuffix(".json.gz").split("_warm_")[1]
        if run.endswith("rank1"):
            continue
        trace = read(file)
        summary = summarize(trace)
        for one in predictions_of(trace):
            if one.finding.name != "records_steps":
                of_one = runs.setdefault(one.text, {})
                of_one.setdefault(one.ask(summary).holds, []).append(run.removesuffix("_rank0"))
    lines = ["| prediction | holds | does not hold |", "|---|---|---|"]
    for text, of_one in sorted(runs.items()):
        held, refuted = (", ".join(of_one.get(holds, ())) or "–" for holds in (True, False))
        lines.append(f"| {text} | {held} | {refuted} |")
    return "\n".join(lines) + "\n"


def order(file: Path) -> tuple:
    """Sorts plain runs first and large ones before small ones: the simplest trace shows a claim."""
    return file.parent.name, len(file.name.split("_")), -int(re.match(r"\d+", file.name)[0]), file.name


def two_runs() -> list[tuple[str, str, str]]:
    """Claims that compare two runs: claim, sentence, what the H200's traces show."""

    def side(name: str) -> compare.Side:
        return compare.Side(summarize(read(REFERENCE / "nvidia-h200" / f"{name}.json.gz")))

    eager, compiled = (side(f"01_matmul_add/4096_bf16_warm_{path}") for path in ("eager", "compile"))
    linear, linear_compiled = (side(f"02_linear/1024x32x64_bf16_warm_{path}") for path in ("eager", "compile"))
    mlp, mlp_compiled = (side(f"03_simple_mlp/64x128x768x3072_bf16_warm_{path}") for path in ("eager", "compile"))
    liger = side("03_kernels_mlp/64x128x768x3072_bf16_warm_eager")

    def gemms(one: compare.Side) -> list[str]:
        return sorted(row.name for row in one.summary.gpu_work if row.family == "GEMM")

    def same(one, two) -> str:
        return f"{MARK[gemms(one) == gemms(two)]}: {', '.join(dict.fromkeys(gemms(one) + gemms(two)))}"

    def fused(one) -> float:
        return next(row.us for row in one.summary.gpu_work if row.kind == "kernel" and row.family == "pointwise")

    before, after = (one.summary.chosen.cpu_us for one in (eager, compiled))
    factor = after / before
    inductor, by_hand = fused(mlp_compiled), fused(liger)
    return [
        ("16", "compiled: the GEMM kernel has the name that eager has", same(eager, compiled)),
        ("18", "compiled: about twice the CPU time a step",
         f"{MARK[factor > 1.5]}: {after:.1f} against {before:.1f} µs, x {factor:.2f}"),
        ("23", "compiled linear: the same kernel, by name", same(linear, linear_compiled)),
        ("31", "compiled MLP: the GEMMs' names are eager's", same(mlp, mlp_compiled)),
        ("34", "Liger: the GEMMs are the same kernels", same(mlp, liger)),
        ("35", "Liger's kernel is slightly slower than Inductor's",
         f"{MARK[by_hand > inductor]}: Liger {by_hand:.1f}, Inductor {inductor:.1f} µs"),
        *attention_runs(side),
    ]  # fmt: skip


def attention_runs(side) -> list[tuple[str, str, str]]:
    """The same for the third article."""
    plain = "8x16x1024x64_bf16_warm_eager"
    naive, in_place = side(f"04_a_naive_attention/{plain}").summary, side(f"04_b_inplace_ops_attention/{plain}").summary
    auto = side(f"04_c_sdpa_attention/{plain}").summary
    named = {name: side(f"04_c_sdpa_attention/{plain}_{name}").summary
             for name in ("math", "efficient", "flash", "cudnn")}  # fmt: skip
    fused = {name: named[name] for name in ("efficient", "flash", "cudnn")}

    def gpu_us(one) -> float:
        return sum(work.us for work in one.gpu_work)

    def ops(one) -> int:
        return sum(call.kind == "op" for call in one.cpu.chain)

    def occupancy(one) -> float:
        return next(work.occupancy.limit for work in one.gpu_work if work.family == "attention")

    def each(figure, unit: str = "") -> str:
        return ", ".join(f"{name} {figure(one)}{unit}" for name, one in fused.items())

    def best(figure) -> str:
        return min(fused, key=lambda name: figure(fused[name]))

    def misleads(better) -> bool:
        """Whether of two backends the one with the better (larger) figure is the slower one."""
        return any(better(one) > better(two) and gpu_us(one) > gpu_us(two)
                   for one in fused.values() for two in fused.values())  # fmt: skip

    slower, fastest, dearest = gpu_us(named["math"]) / gpu_us(in_place), best(gpu_us), best(lambda one: -one.cpu_us)
    picked = ", ".join(backends(auto))
    looks = {
        "occupancy": occupancy, "fewer GPU activities": lambda one: -len(one.gpu_work),
        "fewer ops": lambda one: -ops(one),
    }  # fmt: skip
    misleading = [name for name, better in looks.items() if misleads(better)]
    times = each(lambda one: f"{gpu_us(one):.1f}", " µs")
    return [
        ("43", "in place: no copy, and fewer ops on the CPU",
         f"{MARK[in_place.count('memcpy') == 0 and ops(in_place) < ops(naive)]}: {ops(in_place)} ops against "
         f"{ops(naive)}, {gpu_us(in_place):,.1f} µs of GPU work against {gpu_us(naive):,.1f}"),
        ("44", "SDPA's math backend is slower than the in-place formula",
         f"{MARK[slower > 1]}: {gpu_us(named['math']):,.1f} against {gpu_us(in_place):,.1f} µs, x {slower:.1f}"),
        ("50", "flash is the fastest backend", f"{MARK[fastest == 'flash']}: {times}"),
        ("56", "cudnn costs the most CPU time of the three",
         f"{MARK[dearest == 'cudnn']}: {each(lambda one: f'{one.cpu_us:.1f}', ' µs a step')}"),
        ("57", "left to itself, SDPA picks the fastest backend",
         f"{MARK[picked == fastest]}: it takes {picked}, {gpu_us(auto):.1f} µs"),
        ("59", "higher occupancy, fewer GPU activities, fewer ops: none of them is speed",
         f"{MARK[len(misleading) == len(looks)]}: in {', '.join(misleading) or 'none'} one looks better and is slower; "
         f"{times}; occupancy at most {each(lambda one: f'{occupancy(one):.1%}')}; {each(ops)} ops; "
         f"{each(lambda one: len(one.gpu_work))} GPU activities"),
    ]  # fmt: skip


def verdicts() -> str:
    """The claims that a machine does not confirm, and the numbers of those that hold."""
    singles, pairs = single_runs(), two_runs()
    every = {claim for claims, _ in singles for claim in claims.split()} | {claim for claim, _, _ in pairs}
    lines = ["| claim | prediction | A100, as the articles report | H200 | CPU |", "|---|---|---|---|---|"]
    for (claims, text), cells in sorted(singles.items()):
        if any(cell.startswith(MARK[False]) for cell in cells.values()) and claims:
            reported = "; ".join(dict.fromkeys(A100[claim] for claim in claims.split()))
            shown = (cells.get(machine, "–") for machine in MACHINES)
            shown = ("–" if cell.startswith("–") else cell for cell in shown)
            lines.append(f"| {claims} | {text} | {reported} | {' | '.join(shown)} |")
            every -= set(claims.split())
    for claim, text, seen in pairs:
        if seen.startswith(MARK[False]) or claim in SHOWN:
            lines.append(f"| {claim} | {text} | {A100[claim]} | {seen} | – |")
            every.discard(claim)
    lines += [f"| {claim} | {text} | {A100[claim]} | {here} | – |" for claim, text, here in ABOUT_THE_SUITE]
    lines += ["", "| claims | on the H200, and on the CPU where its trace decides them |", "|---|---|"]
    lines.append(f"| {' '.join(sorted(every | HOLD))} | hold |")
    return "\n".join(lines) + "\n"


# Claims that hold and whose figures are worth a row; claims about the programs themselves, which tests check.
SHOWN, HOLD = {"44", "59"}, {"01", "40"}
ABOUT_THE_SUITE = (
    ("38", "`get_kernel(…, version=1)` loads a pinned package whose `.layers` has drop-in modules",
     "yes, through LOCAL_KERNELS; the Hub itself could not be reached. From version 2 on `LigerGEGLUMLP(config)` "
     "raises a TypeError"),
    ("39", "trace-util uploads traces/ to a bucket and prints Perfetto links",
     "its call has changed: version 0.2 needs `-f traces -b <user>/traces`, and a test checks this call with the "
     "program's own parser; nothing was uploaded"),
)  # fmt: skip


def seen_in(figure: Figure, machine: str) -> tuple[list[str], str]:
    """The lines of a command's output that show a figure on a machine, or the reason why there are none."""
    pattern = (figure.on_cpu or figure.lines) if machine == "cpu" else figure.lines
    trace = REFERENCE / machine / f"{figure.trace}.json.gz"
    if machine == "cpu" and (pattern.startswith(GPU_ONLY) or pattern == NEEDS_TRITON):
        return [], pattern
    printed = output_of("uv run read-trace", f"{trace.relative_to(ROOT)} {figure.look}")
    found = [line for line in printed.splitlines() if re.fullmatch(pattern, line)]
    heads = [line for line in printed.splitlines() if re.fullmatch(HEADS, line)]
    return [line for line in printed.splitlines() if line in found or (found and line in heads)], ""


def figures(some: tuple[Figure, ...]) -> str:
    """A table with one row for each figure of a part."""
    lines = ["| figure | your run, and `read-trace TRACE …` | what to see |", "|---|---|---|"]
    lines += [f"| **{one.number}** {one.title} | `uv run {one.run}`<br>`{one.look}` | {one.see} |" for one in some]
    return "\n".join(lines) + "\n"


def tables() -> str:
    lines = ["| table | your run | then | shows |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(one)} |" for one in TABLES]
    return "\n".join(lines) + "\n"


def refreshed(text: str) -> str:
    """A page in which everything that is generated is generated again."""
    text = CONSOLE.sub(lambda found: found[1] + output_of(found[2], found[3]) + found[5], text)
    text = VALUE.sub(lambda found: found[1] + THRESHOLDS[found[2]] + found[4], text)
    makers = {
        "cheatsheet": lambda: cheatsheet.markdown() + "\n",
        "verdicts": verdicts,
        "part1": lambda: figures(PART_1),
        "part2": lambda: figures(PART_2),
        "tables": tables,
        "training": training,
        "changes": opportunities.changes,
        "predictions": opportunities.predictions,
        "cpu-only-changes": opportunities.cpu_only_changes,
        "recordings": opportunities.recordings,
        "rank-predictions": opportunities.rank_predictions,
        **{name: lambda name=name: climb.table(name) for name in climb.CLIMBS},
    }
    return MADE.sub(lambda found: found[1] + makers[found[2]]() + found[4], text)


def main() -> int:
    stale = []
    for page in PAGES:
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
