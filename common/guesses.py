"""A guess is a sentence and a question to the trace; the answer is yes or no, and what was seen.

Each function here makes one guess; the numbered scripts choose among them by their flags.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

from common import kernel_names, reading
from common.trace import STEP, Trace, Work

NO_GPU = "no GPU lane: this run was on the CPU"


@dataclass(frozen=True)
class Answer:
    """holds: None where this trace cannot tell. because: why, shown only where it breaks."""

    holds: bool | None
    seen: str
    because: str = ""


@dataclass(frozen=True)
class Guess:
    """claims: the numbers in docs/claims.md that it checks."""

    claims: str
    text: str
    ask: Callable[[Trace], Answer]


def _needs_gpu(ask: Callable[[Trace], Answer]) -> Callable[[Trace], Answer]:
    return lambda trace: ask(trace) if reading.has_gpu_work(trace) else Answer(None, NO_GPU)


def _work(trace: Trace) -> list[Work]:
    return list(reading.typical(trace).work)


def _gemms(trace: Trace) -> list[reading.WorkRow]:
    return [row for row in reading.work_rows(trace) if row.says.family == "GEMM"]


def _listed(names) -> str:
    return ", ".join(names) or "none"


def regime_is(name: str) -> Guess:
    def ask(trace):
        found = reading.regime(trace)
        seen = f"the GPU is busy {found.share:.0%} of the window: {found.name}"
        sooner = "a faster GPU needs larger work to be kept busy" if name == "compute-bound" else ""
        return Answer(found.name == name, seen, sooner)

    return Guess("02 03", f"at this size the step is {name}", _needs_gpu(ask))


def self_time_excludes_children() -> Guess:
    def ask(trace):
        label = reading.label_of(reading.typical(trace))
        if label is None:
            return Answer(None, "the step has no label")
        inside = sum(child.us for child in label.children)
        own = label.us - inside
        seen = f"{label.name}: {label.us:,.1f} µs in total, {own:,.1f} its own, {inside:,.1f} in ops below"
        return Answer(0 < inside < label.us, seen)

    return Guess("04", "the label's own (self) time is its total less its children's", ask)


def records_steps(first: int, count: int) -> Guess:
    expected = [f"{STEP}{first + i}" for i in range(count)]

    def ask(trace):
        names = [step.name for step in trace.steps] if trace.has_steps else []
        return Answer(names == expected, f"{names[0]} to {names[-1]}" if names else "no step")

    return Guess("05", f"the trace holds steps #{first} to #{first + count - 1}", ask)


def first_step_is_wider() -> Guess:
    def ask(trace):
        facts = reading.step_facts(trace)
        first, usual = facts[0], reading.typical(trace)
        gaps = [one.gap_us for one in facts if one.gap_us is not None]
        if len(facts) < 2 or first.gap_us is None:
            return Answer(None, "fewer than two steps with a label")
        more, gap_more = first.step.us - usual.us, first.gap_us - median(gaps)
        wider = first.ratio is not None
        seen = (
            f"{first.step.us:,.1f} µs against {usual.us:,.1f}; of the {more:,.1f} more, {gap_more:,.1f} are in "
            f"the gap ({', '.join(f'{gap:.1f}' for gap in gaps[:3])} µs)"
        )
        return Answer(wider and gap_more > more / 2, seen, first.cause or "")

    return Guess("06", "cold: the first step is wider, through the gap from the label to its first op", ask)


def steps_are_alike() -> Guess:
    def ask(trace):
        facts = reading.step_facts(trace)
        wide = [one for one in facts if one.ratio is not None]
        seen = ", ".join(f"{one.step.us:,.1f}" for one in facts[:5]) + " µs"
        because = f"{wide[0].step.name.removeprefix('Profiler')}: {wide[0].cause}" if wide and wide[0].cause else ""
        return Answer(not wide, seen, because)

    return Guess("07", "warm: the steps take alike", ask)


def one_buffer_request() -> Guess:
    def ask(trace):
        requests = reading.buffer_requests(trace)
        first = min((one.start for step in trace.steps for one in step.work), default=0)
        before = [one for one in requests if one.start < first]
        seen = f"{len(requests)}" + (f", {before[0].us:,.0f} µs before the first kernel" if before else "")
        return Answer(len(requests) == 1 and len(before) == 1, seen)

    return Guess("08", "the profiler asks for its buffer once, before the first kernel", _needs_gpu(ask))


def dispatches(parent: str, child: str) -> Guess:
    def ask(trace):
        step = reading.typical(trace)
        inside = {below.name for op in step.walk() if op.name == parent for below in op.walk() if below is not op}
        has = any(op.name == parent for op in step.walk())
        return Answer(child in inside, f"{parent} holds {_listed(sorted(inside)[:6])}" if has else f"no {parent}")

    return Guess("09 10", f"{parent} resolves to {child}", ask)


def ops_are(count: int, name: str, claims: str, gone: tuple[str, ...] = ()) -> Guess:
    """`count` calls of an op a step, and none of the ops in `gone`."""

    def ask(trace):
        counts = reading.op_counts(trace)
        left = [op for op in gone if counts[op]]
        seen = f"{counts[name]} {name}" + (f"; still there: {_listed(left)}" if left else "")
        return Answer(counts[name] == count and not left, seen)

    text = f"{count} {name} a step" + (f", and no {' or '.join(gone)}" if gone else "")
    return Guess(claims, text, ask)


def kernels_are(count: int, claims: str, what: str = "") -> Guess:
    def ask(trace):
        kinds = {kind: reading.count_per_step(trace, kind) for kind in ("kernel", "memcpy", "memset")}
        seen = ", ".join(f"{number} {kind}{'s' * (number != 1)}" for kind, number in kinds.items() if number)
        return Answer(kinds["kernel"] == count, seen)

    return Guess(claims, f"{count} kernel{'s' * (count != 1)} a step{what}", _needs_gpu(ask))


def query_before_gemms() -> Guess:
    def ask(trace):
        rows = [row for row in reading.work_rows(trace) if row.work.kind == "kernel"]
        gemms = [row for row in rows if row.says.family == "GEMM"]
        if not gemms:
            return Answer(None, "no matrix product among the kernels")
        others = [row for row in rows if row.says.family != "GEMM" and row.queries]
        asked = [row for row in gemms if row.queries]
        seen = f"{len(asked)} of {len(gemms)} GEMMs with a query, {len(others)} other kernels"
        because = ""
        if not asked and all("nvjet" in row.says.maker for row in gemms):
            calls = _listed(sorted({row.launched_by for row in gemms}))
            because = f"cuBLAS launches its Hopper kernels (nvjet) with {calls} and asks nothing first"
        return Answer(len(asked) == len(gemms) and not others, seen, because)

    return Guess("11 28", "an occupancy query precedes each GEMM's launch, and no other's", _needs_gpu(ask))


def gemm_is_heavy() -> Guess:
    def ask(trace):
        rows = [row for row in reading.work_rows(trace) if row.work.kind == "kernel"]
        prints = {}
        for row in rows:
            prints.setdefault("GEMM" if row.says.family == "GEMM" else "other", _footprint(row.work))
        if set(prints) != {"GEMM", "other"} or None in [*prints["GEMM"], *prints["other"]]:
            return Answer(None, "not a GEMM and another kernel with their footprints")
        (registers, shared), (light, light_shared) = prints["GEMM"], prints["other"]
        seen = (
            f"GEMM {registers} registers a thread and {shared:,} B shared memory a block; "
            f"the other {light} and {light_shared:,}"
        )
        return Answer(registers > light and shared > 0 and light_shared == 0, seen)

    return Guess("12", "the GEMM's footprint is heavy, the pointwise kernel's light", _needs_gpu(ask))


def _footprint(work: Work) -> tuple[int | None, int | None]:
    values = (work.args.get("registers per thread"), work.args.get("shared memory"))
    return tuple(value if type(value) is int else None for value in values)


def long_final_sync() -> Guess:
    def ask(trace):
        sync = reading.final_sync(trace)
        if sync is None:
            return Answer(None, "no synchronization after the last step")
        busy = reading.regime(trace).busy_us
        seen = f"{sync.us:,.1f} µs, for {busy:,.1f} µs of GPU work"
        short = "here it only waits for the last kernel: it measures no idleness"
        return Answer(sync.us > 10 * busy, seen, short)

    return Guess("13", "the closing cudaDeviceSynchronize dwarfs the GPU's work", _needs_gpu(ask))


def duration_varies() -> Guess:
    def ask(trace):
        rows = [row for row in reading.work_rows(trace) if row.work.kind == "kernel"]
        row = max(rows, key=lambda one: one.us)
        times = reading.kernel_us(trace, row.work.name)
        seen = (
            f"{kernel_names.short(row.work.name)}: median {median(times):,.1f}, mean {mean(times):,.1f}, "
            f"{min(times):,.1f} to {max(times):,.1f} µs over {len(times)}"
        )
        return Answer(max(times) >= 1.02 * min(times), seen, "clocks, heat and power were steady while these ran")

    return Guess("14", "the same kernel on the same data takes a different time in each step", _needs_gpu(ask))


def compiled_rows() -> Guess:
    rows = ("TorchDynamo Cache Lookup", "Torch-Compiled Region", "AOTDispatcher Runtime Wrapper Prologue")

    def ask(trace):
        names = [op.name for op in reading.typical(trace).walk()]
        missing = [row for row in rows if not any(name.startswith(row) for name in names)]
        hashes = reading.graph_hashes(trace)
        extra = ["Pregraph bytecode"] if "Pregraph bytecode" in names else []
        seen = f"{len(hashes)} graph hash{'es' * (len(hashes) != 1)} in {len(trace.steps)} steps" + (
            f"; missing: {_listed(missing)}" if missing else ""
        ) + (f"; besides: {_listed(extra)}" if extra else "")  # fmt: skip
        return Answer(not missing and len(hashes) == 1, seen)

    return Guess("15", "Dynamo looks up its cache in every call, and every step calls the same graph", ask)


def dynamo_costs_more_than_the_op(op: str) -> Guess:
    def ask(trace):
        step = reading.typical(trace)
        us = sum(one.us for one in step.walk() if one.name == op)
        return Answer(0 < us < step.us / 2, f"{op} {us:,.1f} of the step's {step.us:,.1f} µs")

    return Guess("18", f"compiled: more CPU time goes to getting to {op} than to {op}", ask)


def bias_copy_then_gemm(claims: str) -> Guess:
    def ask(trace):
        kinds = [
            "GEMM" if kernel_names.decode(one.name).family == "GEMM" else one.kind
            for one in _work(trace) if one.kind != "memset"
        ]  # fmt: skip
        copies = [row for row in reading.work_rows(trace) if row.work.kind == "memcpy"]
        size = copies[0].work.args.get("bytes") if copies else None
        if type(size) is int:
            kinds[kinds.index("memcpy")] = f"memcpy ({size / 1e6:.1f} MB in {copies[0].us:.1f} µs)"
        return Answer([kind.split()[0] for kind in kinds] == ["memcpy", "GEMM"], _listed(kinds))

    text = "still two things on the GPU: a copy of the bias, then a GEMM that adds to it"
    return Guess(claims, text, _needs_gpu(ask))


def graph_replay_without_copies() -> Guess:
    def ask(trace):
        rows = reading.work_rows(trace)
        replayed = [row for row in rows if "GraphLaunch" in row.launched_by]
        others = [row for row in rows if "GraphLaunch" not in row.launched_by]
        seen = f"{len(replayed)} pieces of work from one graph launch" + (
            f", {len(others)} more before it: {sum(row.us for row in others):.1f} µs" if others else ""
        )
        because = "a graph replays fixed addresses, so inputs that may change are copied in first"
        return Answer(bool(replayed) and not others, seen, because if others else "")

    return Guess("19", "a CUDA graph replays the whole step with one launch", _needs_gpu(ask))


def launch_nothing(*ops: str) -> Guess:
    def ask(trace):
        found = [op for op in reading.typical(trace).walk() if op.name in ops]
        if not found:
            return Answer(None, "none of them in this trace")
        launching = sorted({op.name for op in found if not reading.launches_nothing(op)})
        seen = f"{len(found)} calls, {_listed(launching)} with GPU work"
        return Answer(not launching, seen)

    return Guess("21 25 29", f"{', '.join(ops)}: no GPU work, a view moves no data", _needs_gpu(ask))


def bias_in_the_epilogue() -> Guess:
    def ask(trace):
        names = [one.name for one in _work(trace) if one.kind == "kernel"]
        seen = _listed(kernel_names.short(name, 60) for name in names)
        return Answer(len(names) == 1 and kernel_names.decode(names[0]).family == "GEMM", seen)

    return Guess("22", "one kernel a step: the bias is added in the GEMM's epilogue", _needs_gpu(ask))


def name_says_transposed() -> Guess:
    def ask(trace):
        gemms = _gemms(trace)
        layouts = {row.says.parts.get("layout", "") for row in gemms}
        if not gemms or layouts == {""}:
            return Answer(None, f"no GEMM whose name tells its layout: {_listed({row.work.name for row in gemms})}")
        return Answer(all("t" in layout.lower() for layout in layouts), f"layout {_listed(sorted(layouts))}")

    return Guess("24", "the GEMM's name says that one input is read transposed", _needs_gpu(ask))


def down_proj_has_another_tile() -> Guess:
    def ask(trace):
        gemms = _gemms(trace)
        if len(gemms) != 3:
            return Answer(None, f"{len(gemms)} GEMMs a step, not three")
        gate, up, down = gemms
        tiles = [row.says.parts.get("tile", "unnamed") for row in gemms]
        seen = f"{gate.us:.1f}, {up.us:.1f}, {down.us:.1f} µs on tiles {', '.join(tiles)}"
        return Answer(gate.work.name == up.work.name != down.work.name and down.us < min(gate.us, up.us), seen)

    return Guess("30", "gate and up share a kernel; down, of equal arithmetic, gets a faster one", _needs_gpu(ask))


def product_sizes(m: int, k: int, n: int) -> Guess:
    def ask(trace):
        shapes = [row.shape for row in _gemms(trace)]
        if not shapes or None in shapes:
            return Answer(None, "no shapes in this trace: --record-shapes records them")
        flops = {shape.flops for shape in shapes}
        seen = ", ".join(f"{shape.m}·{shape.k}·{shape.n}" for shape in shapes)
        return Answer(flops == {2 * m * k * n}, f"{seen}: {max(flops) / 1e9:.1f} GFLOP each")

    return Guess("30", f"batch and sequence flatten to {m} rows, and the GEMMs do equal arithmetic", _needs_gpu(ask))


def fused_into_one(maker: str, *words: str, claims: str) -> Guess:
    def ask(trace):
        others = [row for row in reading.work_rows(trace) if row.work.kind == "kernel" and row.says.family != "GEMM"]
        seen = _listed(f"{kernel_names.short(row.work.name, 60)} {row.us:.1f} µs" for row in others)
        return Answer(len(others) == 1 and all(word in others[0].work.name for word in words), seen)

    merged = " and ".join(words) + (" are" if len(words) > 1 else " is")
    return Guess(claims, f"{merged} one kernel, written by {maker}", _needs_gpu(ask))


def pointwise_round_trip(rows: int, columns: int, itemsize: int) -> Guess:
    def ask(trace):
        pointwise = [row for row in reading.work_rows(trace) if row.says.family == "pointwise"]
        seen = _listed(f"{row.says.parts.get('does', row.work.name)} {row.us:.1f} µs" for row in pointwise)
        return Answer(len(pointwise) == 2, seen)

    size = rows * columns * itemsize / 1e6
    return Guess("33", f"gelu writes {size:.1f} MB and mul reads them back: two pointwise kernels", _needs_gpu(ask))


def no_compile_rows() -> Guess:
    def ask(trace):
        rows = [op.name for op in reading.typical(trace).walk() if "Dynamo" in op.name or "Compiled" in op.name]
        return Answer(not rows, f"{len(rows)} such rows")

    return Guess("34", "none of torch.compile's rows on the CPU", ask)


def launch_settings(threads: int, rows: int) -> Guess:
    def ask(trace):
        mine = next((one for one in _work(trace) if "geglu" in one.name), None)
        if mine is None:
            return Answer(None, "Liger's kernel is not in this trace")
        block, grid = mine.args.get("block"), mine.args.get("grid")
        return Answer(block == [threads, 1, 1] and grid == [rows, 1, 1], f"grid {grid}, block {block}")

    text = f"one block a row, {threads} threads in each, chosen from the number of columns"
    return Guess("37", text, _needs_gpu(ask))


