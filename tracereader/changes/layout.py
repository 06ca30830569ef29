"""Changes of tensors' shapes and layouts: alignment, channels_last, and work in place."""

import re
from collections.abc import Iterable, Iterator, Sequence

from tracereader.changes import prices
from tracereader.changes.attention import scores_of, touches
from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.opportunity import Proposal
from tracereader.changes.roofline import BY_CHANNEL, TWO_BYTES, moving_us, multiplying_us, type_of
from tracereader.figures.avoidable import cloned_inputs
from tracereader.figures.convolution import convolution
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.phases import in_backward
from tracereader.findings.finding import counted, duration, listed
from tracereader.replay.changes import with_durations, without_ops, without_work
from tracereader.trace import Op, Work
from tracereader.trace.grouped import grouped
from tracereader.trace.op_names import BATCHED, NEED_CONTIGUOUS
from tracereader.two_runs.faster import share_in_common
from tracereader.two_runs.same_work import (
    LEFT,
    as_compiled,
    by_calls,
    halved,
    same_flops,
    same_products,
    same_type,
    single_products,
    us_of,
)
from tracereader.two_runs.side import Side

# A product below this share of its peak is slow. A product above it has little to gain.
SLOW = 0.4
# The kernels' names tell which alignment they need, in elements. cuBLAS's nvjet kernels load tiles with TMA, which
# needs rows of a multiple of 16 bytes. On an H200, products by align1 kernels in bf16 take 5.7 and 6.4 times as long as
# with padded dimensions (the committed pairs "odd_width" and "gpt2").
ALIGNED = re.compile(r"^nvjet|_align8(?!\d)|_ldg8_")
# Names of cuDNN's kernels: the first and last ones of a convolution by FFTs, all of them, and conversions of layouts.
BY_FFT, OF_FFTS = re.compile(r"fft2d_|DSE::\w*fft|flip_filter"), re.compile(r"fft|region_transform|cf32|flip_filter")
CONVERTS = re.compile(r"nchwToNhwc|nhwcToNchw")  # images or volumes


def _follows_align_shapes(before: Side, after: Side) -> bool:
    """As many products run, and at most half as many have a dimension that is not a multiple of 8."""
    was, now = (single_products(side) for side in (before, after))
    sizes = ([(one.product.m, one.product.k, one.product.n) for one in some] for some in (was, now))
    odd = [sum(any(size % 8 and size > 64 for size in one) for one in some) for some in sizes]
    return len(was) == len(now) and odd[1] <= LEFT * odd[0] and odd[1] < odd[0] and same_flops(was, now)


@change("pad dimensions to a multiple of 8", "the rate of a good product in bf16", followed=_follows_align_shapes)
def align_shapes(case: Case) -> Proposal | None:
    """Return a proposal to pad products, by recorded shapes. The number of rows of an activation needs no alignment.

    Products of scores are left out: padded tokens need a mask, and a fused attention kernel does not need them.
    """
    if case.peaks is None:
        return None
    scores = scores_of(case)
    products = [
        (work, one, op)
        for work, one, op in case.activities
        if one.family == "GEMM" and one.product and one.flops and op is not None
        and not (op.name in BATCHED and touches(one, op, scores))
    ]  # fmt: skip
    rows = {one.product.m for _, one, op in products if one.product.batch == 1 and not in_backward(op)}
    aligned = {name for name in {one.name for _, one, _ in products} if ALIGNED.search(name)}
    times, spent, odd = {}, 0.0, {}
    for work, one, op in products:
        shape = one.product
        if one.name in aligned or type_of(op) not in TWO_BYTES:
            continue
        kept = rows if shape.batch == 1 else ()
        bad = [size for size in (shape.m, shape.k, shape.n) if size % 8 and size > 64 and size not in kept]
        if not bad:
            continue
        us = max(one.flops / (prices.PRODUCT * case.peaks.bf16) / 1e6, prices.SMALL_PRODUCT_US)
        if one.bytes_moved:
            us = max(us, moving_us(one.bytes_moved, case.peaks))
        if us < SLOW / prices.PRODUCT * one.us:
            times[work], spent = us, spent + one.us
            odd |= {dimension: -(-dimension // 8) * 8 for dimension in bad}
    if not times:
        return None
    padded = listed(f"{dimension:,} to {better:,}" for dimension, better in odd.items())
    slowest = max((one for work, one, _ in case.activities if work in times), key=lambda one: one.us)
    return Proposal(
        with_durations(case.graph, case.in_all_steps(times)),
        f"{counted(len(times), 'product')} with a dimension of {listed(f'{one:,}' for one in odd)} "
        f"take {duration(spent)}, at {slowest.tflops or 0:,.0f} TFLOP/s at worst",
        f"pad {padded} (a multiple of 8)",
        assumed=True,
        title=f"pad {padded}",
    )


def by_ffts(case: Case, types: str) -> list[tuple[list[Work], float]]:
    """Return the kernels of each convolution that cuDNN computes by FFTs, and its time (µs) by products of these types.

    On an H200 cuDNN chose FFTs for gradients of filters in fp32, with torch.backends.cudnn.benchmark, too. It never did
    in bf16, and in the channels_last layout for one of nine. Conversions of layouts are not among the kernels.
    """
    if case.trace.backend != "cuda" or case.peaks is None or not case.named(BY_FFT.search):
        return []
    found = []
    for op, some in grouped((op, work) for work, _, op in case.activities if op is not None).items():
        places = [place for place, work in enumerate(some) if BY_FFT.search(work.name)]
        sizes = convolution(op.name, op.inputs) if places and type_of(op) == "fp32" else None
        if sizes is None:
            continue
        kernels = [work for work in some[places[0] : places[-1] + 1] if not CONVERTS.search(work.name)]
        rate, item = prices.FILTER_GRADIENT * getattr(case.peaks, types), 4 if types == "tf32" else 2
        us = multiplying_us(sizes.flops, rate, item * sizes.elements, case.peaks)
        if us < sum(work.us for work in kernels):
            found.append((kernels, us))
    return found


def computed_by_ffts(groups: Sequence[tuple[list[Work], float]]) -> str:
    """Return what these kernels of by_ffts() take, and how long products of tensor cores would."""
    spent, then = sum(work.us for some, _ in groups for work in some), sum(us for _, us in groups)
    how = f"by FFTs, {counted(sum(len(some) for some, _ in groups), 'kernel')}"
    return f"cuDNN computes {counted(len(groups), 'convolution')} {how}: {duration(spent)}, then about {duration(then)}"


def conversions(case: Case) -> tuple[list[tuple[Work, GpuWork]], str, str]:
    """Return the kernels that convert a layout around convolutions, the layout that needs none, and of what it is.

    There are none if the convolutions cannot have this layout.
    """
    found = [(work, one) for work, one, _ in case.named(CONVERTS.search)]
    convolutions = case.step.named(lambda name: name.startswith("aten::convolution")) if found else ()
    layout = _channels_last_layout(convolutions) if found else None
    return (found, *layout) if layout else ([], "", "")


@change(
    "keep images in the channels_last layout",
    "convolutions without FFTs take as long, batch norms in training as long as their data takes to move",
    followed=halved(
        us_of(lambda one: CONVERTS.search(one.name) or (one.family == "convolution" and BY_FFT.search(one.name))),
        same_type,
        same_products,
        as_compiled,
    ),
    keys=("channels_last",),
)
def channels_last(case: Case) -> Proposal | None:
    found, layout, what = conversions(case)
    if found and case.step.named(NEED_CONTIGUOUS.__contains__):
        found = []  # these ops convert the layout again
    groups = by_ffts(case, "tf32") if layout == "channels_last" else []
    if not found and not groups:
        return None
    graph = without_work(case.graph, case.in_all_steps(dict.fromkeys((work for work, _ in found), 0.0)))
    parts = []
    if found:
        us = sum(one.us for _, one in found)
        parts.append(f"{counted(len(found), 'layout conversion')} around convolutions: {duration(us)}")
    if layout == "channels_last" and found and (norms := _with_channels_last(case)):
        graph = with_durations(graph, case.in_all_steps(norms))
        now, then = (duration(sum(some)) for some in ((one.us for one in norms), norms.values()))
        parts.append(f"{counted(len(norms), 'batch norm')} with one block for each channel: {now}, then about {then}")
    if groups:
        graph = Case(case.trace, case.summary, graph).condensed(groups, prices.CALL_US)
        parts.append(computed_by_ffts(groups))
    return Proposal(
        graph,
        "; ".join(parts),
        f"model.to(memory_format=torch.{layout}), and the same for the {what}",
        assumed=True,
        title=f"keep {what} in the {layout} layout",
    )


def norms_by_channel(case: Case) -> Iterator[tuple[Work, str, str, int]]:
    """Yield batch norms of images with one block for each channel: direction and type (BY_CHANNEL), and the bytes.

    An instance norm calls the same kernels for a single image with more channels.
    """
    for work, one, op in case.named(BY_CHANNEL.search):
        images = next(iter(op.inputs.by_position), None) if op is not None else None
        if images is not None and len(images.shape) == 4 and images.shape[0] > 1 and images.item:
            yield work, *BY_CHANNEL.search(one.name).groups(), images.bytes


def _with_channels_last(case: Case) -> dict[Work, float]:
    """Return the shorter times (µs) of batch norms with the channels last: 2.4 to 4.1 TB/s on an H200 ("leaf_sorter").

    Few channels leave most of the GPU idle in the other layout.
    """
    norms = norms_by_channel(case) if case.peaks is not None else ()
    times = {work: moving_us(prices.BATCH_NORM_PASSES[way] * size, case.peaks) for work, way, _, size in norms}
    return {work: us for work, us in times.items() if us < work.us}


def _channels_last_layout(ops: Iterable[Op]) -> tuple[str, str] | None:
    """Return the layout with the channels last that these ops' first inputs can have, and what these inputs are.

    Without recorded shapes they are taken for images. The result is None for other inputs.
    """
    ranks = {len(dims) for op in ops for dims in op.inputs.dims[:1]}
    if 5 in ranks:
        return "channels_last_3d", "volumes"
    return ("channels_last", "images") if 4 in ranks or not ranks else None


def _follows_in_place(before: Side, after: Side) -> bool:
    """The kernels are the same, and fewer ops out of place copy their input."""
    fewer = len(after.summary.attention.hidden_copies) < len(before.summary.attention.hidden_copies)
    return fewer and by_calls(before, after) and share_in_common(before, after) == 1


@change("work in place", "nothing else reads the tensor that is overwritten", followed=_follows_in_place)
def in_place(case: Case) -> Proposal | None:
    """Return a proposal to work in place, except in training, where a gradient may need the input."""
    if case.trace.trains or not case.has("aten::clone".__eq__):
        return None
    clones, typical = case.in_each_step(cloned_inputs)
    if not typical:
        return None
    us = sum(work.us for some in typical.values() for op in some for work in op.work_below())
    return Proposal(
        without_ops(case.graph, [op for found in clones for some in found.values() for op in some]),
        f"the step clones the input of {listed(typical)} first: "
        f"{counted(sum(map(len, typical.values())), 'copy', 'copies')}, {duration(us)} of GPU time",
        f"{listed(name.removeprefix('aten::') + '_' for name in typical)}, if nothing else reads the input",
    )
