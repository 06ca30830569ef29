"""Whether two runs compute the same: what a judge of a change asks before it says that the change was made."""

from collections import Counter
from collections.abc import Callable, Sequence

from tracereader.figures.attention import ATTENTION
from tracereader.figures.gpu_work import GpuWork
from tracereader.trace.families import HEAVY
from tracereader.trace.grouped import totals
from tracereader.trace.labels import AUTOGRAD, INDUCTORS_CALL
from tracereader.trace.op_names import BATCHED, CONVOLUTIONS, PRODUCTS
from tracereader.two_runs.faster import ALMOST, graphs_launched, share_in_common
from tracereader.two_runs.side import Side

Judge = Callable[[Side, Side], bool]  # of the run before a change, and of the one after it
# If at most this share remains, the work counts as gone.
LEFT = 0.5
# Matrix products and convolutions whose FLOPs differ by less than this share are the same work.
SAME_FLOPS = 0.05


def halved(figure: Callable[[Side], float], *same: Judge) -> Judge:
    """Return a judge that holds if at most half of a figure of the step is left, and two runs are alike otherwise.

    same: each says in one way whether they are.
    """

    def holds(before: Side, after: Side) -> bool:
        was, now = figure(before), figure(after)
        return was > 0 and now <= LEFT * was and all(one(before, after) for one in same)

    return holds


def us_of(wanted: Callable[[GpuWork], bool]) -> Callable[[Side], float]:
    """Return the figure that is the time (µs) of a step's GPU activities of some kind."""
    return lambda side: sum(one.us for one in side.summary.gpu_work if wanted(one))


def the_same_work(before: Side, after: Side) -> bool:
    """Return whether both steps run about the same kernels, launched one by one in both or as CUDA graphs in both."""
    return by_calls(before, after) and share_in_common(before, after) >= ALMOST


def by_calls(before: Side, after: Side) -> bool:
    """Return whether both steps launch their kernels one by one, or both as CUDA graphs."""
    return bool(graphs_launched(before)) == bool(graphs_launched(after))


def same_heavy(before: Side, after: Side) -> bool:
    """Return whether kernels of the same names have most of the time of matrix products and other heavy work.

    Heavy work is products, convolutions, attention and communication. The result is False if Inductor wrote kernels of
    only one of the two steps. Without GPU work the ops are compared.
    """
    if not on_the_gpu(before, after):
        return same_on_the_cpu(before, after)
    work = [[one for one in side.summary.gpu_work if one.family in HEAVY] for side in (before, after)]
    times = [totals((one.name, one.us) for one in some) for some in work]
    shared = [sum(us for name, us in times[here].items() if name in times[1 - here]) for here in (0, 1)]
    same = all(us >= ALMOST * some.total() for us, some in zip(shared, times, strict=True))
    kernels = list(map(len, work))
    return same and min(kernels) >= ALMOST * max(kernels) and compiled(before) == compiled(after)


def on_the_gpu(before: Side, after: Side) -> bool:
    return before.summary.has_gpu_work or after.summary.has_gpu_work


def same_on_the_cpu(before: Side, after: Side, fused: bool = False) -> bool:
    """Return whether two steps without GPU work compute equally large products and attention by as many ops.

    The sizes are compared if they are recorded. fused: whether fused attention replaces the batched products of a
    softmax's scores. A backward pass, or Inductor's code, in only one of the steps is a difference.
    """
    names = (*PRODUCTS, *CONVOLUTIONS, *ATTENTION)
    calls = [Counter({name: side.ops[name] for name in names}) for side in (before, after)]
    sizes = [Counter((one.product, one.attention) for one in side.summary.cpu.cpu_work if one.product or one.attention)
             for side in (before, after)]  # fmt: skip
    parts = [[any(name.startswith(part) for name in side.ops) for part in (AUTOGRAD, INDUCTORS_CALL)]
             for side in (before, after)]  # fmt: skip
    if parts[0] != parts[1]:
        return False
    if not fused:
        return calls[0] == calls[1] and sizes[0] == sizes[1]
    scores = {(one.batch, one.m, one.n) for one, _ in sizes[0] - sizes[1] if one}
    attends = {(one.batch * one.heads, one.queries, one.keys) for _, one in sizes[1] - sizes[0] if one}
    gone, new = +(calls[0] - calls[1]), +(calls[1] - calls[0])
    return bool(new) and gone.keys() <= {*BATCHED} and new.keys() <= {*ATTENTION} and attends <= scores


def same_products(before: Side, after: Side) -> bool:
    """Return whether equally many ops launch products and convolutions.

    If only one of the steps is mostly CUDA graphs, whose replay has no ops, or one of them has no such op, kernels of
    products and other heavy work are counted.
    """
    calls = [[sum(side.ops[name] for name in names) for names in (PRODUCTS, CONVOLUTIONS)] for side in (before, after)]
    if all(map(any, calls)) and by_calls(before, after):
        return calls[0] == calls[1]
    kernels = [[sum(one.family == name for one in side.summary.gpu_work) for name in HEAVY] for side in (before, after)]
    return kernels[0] == kernels[1]


def same_products_as_long(before: Side, after: Side) -> bool:
    """Return whether products, convolutions and attention are equally many, and take about as long in both steps."""
    us = [sum(side.summary.by_family[name] for name in HEAVY) for side in (before, after)]
    return 0 < max(us) <= 2 * min(us) and same_products(before, after)


def compiled(side: Side) -> bool:
    """Return whether Inductor wrote some of the step's kernels."""
    return any(one.is_compiled for one in side.summary.gpu_work)


def as_compiled(before: Side, after: Side) -> bool:
    return compiled(before) == compiled(after)


def newly_compiled(before: Side, after: Side) -> bool:
    return compiled(after) and not compiled(before)


def usual_type(side: Side) -> str | None:
    """Return the types with most of the time of products and convolutions, among kernels whose names give types."""
    heavy = (one for one in side.summary.gpu_work if one.family in ("GEMM", "convolution"))
    times = totals((said, one.us) for one in heavy if (said := one.name_says.get("types")))
    return max(times, key=times.__getitem__, default=None)


def same_type(before: Side, after: Side) -> bool:
    return usual_type(before) == usual_type(after)


def products(side: Side) -> list[GpuWork]:
    return [one for one in side.summary.gpu_work if one.family == "GEMM" and one.product]


def equal_single_products(before: Side, after: Side) -> bool:
    """Return whether both steps have as many products outside attention, and, with shapes, equal FLOPs."""
    was, now = (single_products(side) for side in (before, after))
    return len(was) == len(now) and (not was or same_flops(was, now))


def single_products(side: Side) -> list[GpuWork]:
    """Return the products that are not batched. This leaves out attention's own products."""
    return [one for one in products(side) if one.product.batch == 1]


def same_flops(was: Sequence[GpuWork], now: Sequence[GpuWork]) -> bool:
    old, new = (sum(one.flops or 0 for one in some) for some in (was, now))
    return old > 0 and abs(old - new) <= SAME_FLOPS * max(old, new)
