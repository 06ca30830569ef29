"""Findings about the GPU work of a step: kernels, their names, copies, fusion, CUDA graphs."""

import itertools

from tracereader.figures import Summary
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.regime import MUCH_KNOWN
from tracereader.findings import finding as words
from tracereader.findings.finding import CPU, GPU, NO_GPU, TREE, Verdict, counted, finding, listed
from tracereader.trace.grouped import totals
from tracereader.trace.kernel_names import short

# The ratio of a step's summed times to its busy time. On the H200 it is 2.4 if each kernel starts during the one
# before, 1.3 beside collectives that wait, and 1.0 in training, where a memset sometimes runs beside a kernel.
OVERLAPS = 1.1


def overlap(summary: Summary) -> bool:
    """Return whether a step's kernels overlap so much that the sum of their times exceeds the busy time."""
    total = summary.summed_us
    return not all(one.ran_alone for one in summary.gpu_work) and total > OVERLAPS * summary.chosen.gpu_busy_us


def _gemms(summary: Summary) -> list[GpuWork]:
    return [one for one in summary.gpu_work if one.says.multiplies]


@finding(predicts=lambda count, what: f"{counted(count, 'kernel')} per step{what}", needs_gpu=True)
def kernels_are(summary: Summary, count: int, what: str = "") -> Verdict:
    kinds = {kind: summary.count(kind) for kind in ("kernel", "memcpy", "memset")}
    seen = ", ".join(counted(number, kind) for kind, number in kinds.items() if number)
    return Verdict(kinds["kernel"] == count, seen)


@finding(
    predicts="the only occupancy query comes before the first GEMM of the process: cuBLAS remembers the answer",
    needs_gpu=True,
    claims="11 28",
)
def occupancy_asked_once(summary: Summary) -> Verdict:
    asking = [step for step in summary.steps if step.occupancy_queries]
    if not asking:
        first, last = summary.steps[0].number, summary.steps[-1].number
        span = f"steps {first} to {last}" if first != last else first
        return Verdict(True, f"none in {span}: any query came before the recorded steps")
    first = asking[0]
    seen = f"{counted(first.occupancy_queries, 'query', 'queries')} in step {first.number}"
    if len(asking) > 1:
        why_not = "the library asks at each launch"
        return Verdict(False, f"{seen}, and in {counted(len(asking) - 1, 'later step')}", why_not)
    return Verdict(True, f"{seen}, none in the others")


@finding(
    predicts="the GEMM needs many registers and shared memory, the pointwise kernel little of either",
    needs_gpu=True,
    claims="12",
)
def gemm_is_heavy(summary: Summary) -> Verdict:
    prints = {}
    for one in summary.kernels_of_step:
        prints.setdefault("GEMM" if one.family == "GEMM" else "other", (one.registers, one.shared_memory))
    if set(prints) != {"GEMM", "other"} or None in [*prints["GEMM"], *prints["other"]]:
        return Verdict(None, "the trace does not have both kernels with their registers and shared memory")
    (registers, shared), (light, light_shared) = prints["GEMM"], prints["other"]
    gemm = f"the GEMM has {registers} registers per thread and {shared:,} B shared memory per block"
    seen = f"{gemm}; the other kernel has {light} and {light_shared:,} B"
    return Verdict(registers > light and shared > 0 and light_shared == 0, seen)


VARIES = 1.05  # on the H200 most kernels vary by at most 3%, and the second of two equal GEMMs varies by 9%


@finding(
    GPU,
    "one kernel with different times in different steps",
    predicts="the same kernel on the same data takes a different time in each step",
    needs_gpu=True,
    claims="14",
    teaches=True,
)
def duration_varies(summary: Summary) -> Verdict:
    """If its inputs are the same, the clock frequency, the temperature or other work on the GPU changed. Use the
    median, not the mean."""
    # Each position in the step is compared with itself, because one kernel name may do different work at each.
    widest = max(
        # Collectives are left out because their time depends on peers. Overlapping kernels share the GPU.
        (
            one
            for one in summary.gpu_work
            if one.steps > 2 and one.us >= 5 and one.low_us and one.family != "communication" and one.ran_alone
        ),
        key=lambda one: one.high_us / one.low_us,
        default=None,
    )
    if widest is None:
        return Verdict(None, "no kernel of at least 5 µs that ran alone in three steps")
    times = f"{widest.low_us:,.1f} to {widest.high_us:,.1f} µs, median {widest.us:,.1f}, mean {widest.mean_us:,.1f}"
    seen = f"{short(widest.name)}: {times} over {widest.steps} steps"
    steady = "clock frequency, temperature and power were probably stable"
    return Verdict(widest.high_us >= VARIES * widest.low_us, seen, steady)


@finding(predicts="two GPU activities per step: a copy of the bias, then a GEMM that adds to it", needs_gpu=True)
def bias_copy_then_gemm(summary: Summary) -> Verdict:
    work = [one for one in summary.gpu_work if one.kind != "memset"]
    kinds = ["GEMM" if one.family == "GEMM" else one.kind for one in work]
    copy = next((one for one in work if one.kind == "memcpy"), None)
    seen = listed(kinds)
    if copy is not None and copy.bytes_moved and "DtoD" in copy.name:
        seen += f"; the copy of {words.size(copy.bytes_moved // 2)} takes {copy.us:.1f} µs"
    return Verdict(kinds == ["memcpy", "GEMM"], seen)


@finding(GPU, "a device-to-device copy before a GEMM")
def copy_before_gemm(summary: Summary) -> Verdict:
    """addmm copies the bias into the output, and the GEMM adds to it (beta = 1). This saves no kernel."""
    for copy, after in itertools.pairwise([one for one in summary.gpu_work if one.kind != "memset"]):
        adds = copy.asked_by == after.asked_by == "aten::addmm" or "beta adds" in after.name_says.get("epilogue", "")
        if adds and "DtoD" in copy.name and after.family == "GEMM":
            return Verdict(copy.us >= 1, f"{copy.us:.1f} µs before {short(after.name)}")
    return Verdict(False, "")


@finding(TREE, "addmm without an add", teaches=True)
def addmm_without_add(summary: Summary) -> Verdict:
    """The GEMM's epilogue adds the bias while it writes the result."""
    kernels = [one for one in summary.kernels_of_step if one.asked_by == "aten::addmm"]
    product = next((one for one in kernels if one.family == "GEMM"), None)
    calls = summary.cpu.ops["aten::addmm"].calls if "aten::addmm" in summary.cpu.ops else 0
    if product is None or len(kernels) != calls or "aten::add" in summary.cpu.ops:
        return Verdict(False, "")
    return Verdict(True, short(product.name, 60))


@finding(predicts="one kernel per step: the GEMM's epilogue adds the bias", needs_gpu=True, claims="22")
def bias_in_the_epilogue(summary: Summary) -> Verdict:
    kernels = summary.kernels_of_step
    seen = listed(short(one.name, 60) for one in kernels)
    if len(kernels) != 1 or kernels[0].family != "GEMM":
        return Verdict(False, seen)
    copies = summary.count("memcpy")
    if "bias" in kernels[0].name_says.get("epilogue", ""):
        return Verdict(True, f"{seen}: its name says bias")
    return Verdict(not copies, f"{seen}; {counted(copies, 'copy', 'copies')} of a bias beside it")


@finding(predicts="the GEMM's name says that one input is read transposed", needs_gpu=True, claims="24")
def name_says_transposed(summary: Summary) -> Verdict:
    gemms = _gemms(summary)
    layouts = {one.name_says.get("layout", "") for one in gemms}
    if not gemms or layouts == {""}:
        return Verdict(None, f"no GEMM's name gives its layout: {listed({one.name for one in gemms})}")
    return Verdict(all("t" in layout.lower() for layout in layouts), f"layout {listed(sorted(layouts))}")


@finding(
    predicts="gate and up use the same kernel; down has the same FLOPs and uses a faster one",
    needs_gpu=True,
    claims="30",
)
def down_proj_has_another_tile(summary: Summary) -> Verdict:
    gemms = _gemms(summary)
    if len(gemms) != 3:
        return Verdict(None, f"{len(gemms)} GEMMs per step, not three")
    gate, up, down = gemms
    tiles = [one.name_says.get("tile", "unnamed") for one in gemms]
    seen = f"{gate.us:.1f}, {up.us:.1f}, {down.us:.1f} µs on tiles {', '.join(tiles)}"
    return Verdict(gate.name == up.name != down.name and down.us < min(gate.us, up.us), seen)


@finding(
    predicts=lambda m, k, n: f"batch and sequence flatten to {m} rows, and the GEMMs have the same FLOPs",
    needs_gpu=True,
    claims="30",
)
def product_sizes(summary: Summary, m: int, k: int, n: int) -> Verdict:
    shapes = [one.product for one in _gemms(summary)]
    if not shapes or None in shapes:
        return Verdict(None, "no shapes in this trace: --record-shapes records them")
    flops = {shape.flops for shape in shapes}
    seen = ", ".join(f"{shape.m}·{shape.k}·{shape.n}" for shape in shapes)
    return Verdict(flops == {2 * m * k * n}, f"{seen}: {max(flops) / 1e9:.1f} GFLOP each")


@finding(
    predicts=lambda maker, *words: (
        f"{' and '.join(words)} {'are' if len(words) > 1 else 'is'} one kernel, written by {maker}"
    )
)
def fused_into_one(summary: Summary, maker: str, *words: str) -> Verdict:
    if not summary.has_gpu_work:  # Inductor's C++ kernels are rows of the CPU lane
        written = {name: op for name, op in summary.cpu.ops.items() if "cpp_fused" in name}
        seen = listed(f"{short(name, 60)} {op.self_us:,.1f} µs" for name, op in written.items())
        merged = [name for name in written if all(word in name for word in words)]
        return Verdict(len(merged) == 1, seen) if written else Verdict(None, NO_GPU)
    others = [one for one in summary.kernels_of_step if one.family != "GEMM"]
    seen = listed(f"{short(one.name, 60)} {one.us:.1f} µs" for one in others)
    return Verdict(len(others) == 1 and all(word in others[0].name for word in words), seen)


@finding(
    predicts=lambda rows, columns, itemsize: (
        f"gelu writes {rows * columns * itemsize / 1e6:.1f} MB and mul reads them back: two pointwise kernels"
    ),
    needs_gpu=True,
    claims="33",
)
def pointwise_round_trip(summary: Summary, rows: int, columns: int, itemsize: int) -> Verdict:
    written = rows * columns * itemsize
    pointwise = [one for one in summary.gpu_work if one.family == "pointwise"]
    seen = listed(f"{one.name_says.get('does', one.name)} {one.us:.1f} µs" for one in pointwise)
    if len(pointwise) != 2:
        return Verdict(False, seen)
    gelu, mul = pointwise
    if gelu.bytes_moved is None or mul.bytes_moved is None:
        return Verdict(None, f"{seen}; their bytes are known with --record-shapes")
    seen += f"; they move {gelu.bytes_moved / 1e6:,.1f} and {mul.bytes_moved / 1e6:,.1f} MB"
    # gelu reads one such tensor and writes one; mul reads two and writes one.
    return Verdict((gelu.bytes_moved, mul.bytes_moved) == (2 * written, 3 * written), seen)


@finding(
    predicts=lambda threads, rows: f"Liger launches one block per row, with {threads} threads",
    needs_gpu=True,
    claims="37",
)
def launch_settings(summary: Summary, threads: int, rows: int) -> Verdict:
    mine = next((one for one in summary.gpu_work if "geglu" in one.name), None)
    if mine is None:
        return Verdict(None, "Liger's kernel is not in this trace")
    return Verdict(mine.block == [threads, 1, 1] and mine.grid == [rows, 1, 1], f"grid {mine.grid}, block {mine.block}")


@finding(predicts="a CUDA graph replays the whole step with one launch", needs_gpu=True, claims="19")
def graph_replay_without_copies(summary: Summary) -> Verdict:
    replayed = [one for one in summary.gpu_work if one.from_graph]
    others = [one for one in summary.gpu_work if not one.from_graph]
    seen = f"{words.activities(len(replayed))} from {counted(summary.graph_launches, 'graph launch', 'graph launches')}"
    if not others:
        return Verdict(bool(replayed), seen)
    because = "a graph replays fixed addresses, so inputs that may change are copied in first"
    return Verdict(False, f"{seen}, and {len(others)} more before it: {sum(one.us for one in others):.1f} µs", because)


@finding(CPU, "cudaGraphLaunch", teaches=True)
def graph_replay(summary: Summary) -> Verdict:
    """One launch of a CUDA graph replays recorded work (torch.cuda.graph, or torch.compile with reduce-overhead or
    max-autotune)."""
    replayed = [one for one in summary.gpu_work if one.from_graph]
    launches = summary.graph_launches
    return Verdict(bool(replayed), f"{words.activities(len(replayed))} from {counted(launches, 'launch', 'launches')}")


def near_the_peaks(summary: Summary) -> str:
    """Return how much of the step its kernels would take at the device's peaks; "" if few sizes are known."""
    known = [one for one in summary.gpu_work if one.of_roof is not None]
    known_us, least = sum(one.us for one in known), sum(one.us * min(1.0, one.of_roof) for one in known)
    step = summary.unprofiled_step_us or summary.recorded_step_us
    if known_us <= MUCH_KNOWN * summary.summed_us or not step:
        return ""
    ((roof, _),) = totals((one.roof, one.us * one.of_roof) for one in known).most_common(1)
    share, limit = known_us / summary.summed_us, words.ROOFS[roof][0]
    return (
        f"At the data sheet's peaks, the kernels of known sizes ({share:.0%} of the GPU time) would take "
        f"{least / step:.0%} of the step, mostly at the {limit}."
    )
