"""What a change saves, measured by runs in turn with the program as it is, and how far such a figure can be trusted."""

import itertools
import math
import statistics
from collections.abc import Sequence

import msgspec

# Student's t for 99% on both sides, by the degrees of freedom. At 95%, one of ten changes that do nothing would seem to
# help in every fourth search.
STUDENTS_T = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95)
# What two runs of one program usually differ by (one standard deviation) on a machine with nothing else to do and on a
# busy one, and how many measured differences this knowledge is worth.
USUAL_NOISE, BUSY_NOISE, USUAL_WORTH = 0.02, 0.06, 3
WORTH = 0.01  # a smaller saving is called none
BLOCKS = 5
FAR, FAR_AFTER = {1: 2.5, 2: 1.8}, 1.2  # the saving by its interval that convinces after so many runs, and after more
MEDIAN_FROM = 3  # runs with a change, from which on their median is taken, which one disturbed run does not move
TRIMMED = 0.2  # the share of differences that may come from disturbed runs
OF_TRIMMED = 1.51  # the deviation of normal differences by that of those that are left
MEDIANS_ERROR = 1.25  # the standard error of a median by that of a mean
# Where other programs slow some of the runs, no interval is narrow. A change helps, too, if its slowest run is faster
# than the fastest one without it by this share, and if equal programs would run in such an order less often than this.
GAP, CHANCE = 0.05, 0.02


class Noise(msgspec.Struct, frozen=True):
    """By which share two runs of the same program differ (one standard deviation), and the degrees of freedom.

    usual: the same without the largest differences, which a single disturbed run makes.
    """

    share: float
    freedom: int
    usual: float


class Saving(msgspec.Struct, frozen=True):
    """The share of the step that a change saves, and the half width of its 99% interval.

    error: the half width of the interval of the logarithm of the ratio. runs: how many runs with the change there are.
    faster: in how many of them the step was shorter than beside it. is_apart: see _are_apart().
    """

    share: float
    error: float
    runs: int = 1
    faster: int = 1
    is_apart: bool = False

    @property
    def plus_minus(self) -> float:
        return self.error * (1 - self.share)

    @property
    def helps(self) -> bool:
        """Return whether the saving is beyond the noise, and the runs agree: of four, one may be disturbed."""
        return (self.is_apart or self.is_beyond) and self.runs - self.faster <= self.runs // 4

    @property
    def is_beyond(self) -> bool:
        """Return whether the saving is larger than what chance makes of so many runs."""
        return self.share > max(WORTH, self.least_shown)

    @property
    def harms(self) -> bool:
        """Return whether the step is longer beyond the noise, and the runs agree."""
        return 1 - 1 / (1 - self.share) > max(WORTH, self.least_shown) and self.faster <= self.runs // 4

    @property
    def least_shown(self) -> float:
        """Return the least saving that so many runs show beside the noise."""
        return 1 - math.exp(-FAR.get(self.runs, FAR_AFTER) * self.error)

    @property
    def is_noise(self) -> bool:
        """Return whether a saving of more than 1% may be hidden, or is one by chance."""
        return not self.helps and not self.harms and self.plus_minus > WORTH

    @property
    def verdict(self) -> str:
        """Return "helps", "harms", "none", "within noise", or "too few runs" of what may be more than noise."""
        if self.helps:
            return "helps"
        if self.harms:
            return "harms"
        if not self.is_noise:
            return "none"
        return "too few runs" if abs(math.log(1 - self.share)) > self.error else "within noise"

    @property
    def is_clear(self) -> bool:
        """Return whether more runs would hardly change what is said: the interval is narrow against the saving."""
        return self.plus_minus < max(0.25 * abs(self.share), WORTH)


def step_us(steps: Sequence[float], together: int = 0) -> float:
    """Return the time of a step (µs): the median of the means of up to five equal blocks of steps.

    A mean holds what only some steps wait for, such as a loader's stall at each fourth step. The median drops the block
    in which the machine was busy with something else. Fewer than twenty steps are one block.

    together: how many batches a loader's workers prepare at a time. A block has at least as many steps.
    """
    blocks = _blocks(steps, max(4, together))
    return statistics.median(blocks) if len(blocks) >= 3 else statistics.fmean(steps)


def spread_of(steps: Sequence[float], together: int = 0) -> float:
    """Return by which share the blocks of one run differ (one standard deviation); 0 where there are fewer than two.

    Other programs on the machine come and go within a run, too. together: see step_us().
    """
    blocks = _blocks(steps, max(3, together))
    return statistics.stdev(map(math.log, blocks)) if len(blocks) >= 2 else 0.0


def _blocks(steps: Sequence[float], least: int) -> list[float]:
    """Return the means of up to five equal blocks of steps, each with at least so many steps."""
    count = min(BLOCKS, len(steps) // least)
    size = len(steps) // count if count else 0
    return [statistics.fmean(steps[i * size : (i + 1) * size]) for i in range(count)]


def noise_of(series: Sequence[Sequence[float]], usual: float = USUAL_NOISE) -> Noise:
    """Return by which share two runs of the same program differ.

    series: the steps (µs) of each program's runs, in the order in which they ran. Only neighbors are compared, because
    a machine becomes slower or faster over minutes. usual: what they differ by as far as is known without
    them.
    """
    differences = []
    for runs in series:
        logs = [math.log(one) for one in runs]
        differences += [b - a for a, b in itertools.pairwise(logs)]
    freedom = USUAL_WORTH + len(differences)

    def deviation(squares: float) -> float:
        return math.sqrt((USUAL_WORTH * usual**2 + squares / 2) / freedom)

    squares = sorted(one**2 for one in differences)
    kept = squares[: len(squares) - int(TRIMMED * len(squares))]
    share = deviation(math.fsum(squares))
    trimmed = (
        deviation(math.fsum(kept) * len(squares) / len(kept) * OF_TRIMMED**2) if len(kept) < len(squares) else share
    )
    return Noise(share, freedom, min(share, trimmed))


def saving(pairs: Sequence[tuple[Sequence[float], float]], noise: Noise, usual: Sequence[float] = ()) -> Saving:
    """Return what a change saves: of one or two runs the mean ratio, of more the median ratio.

    pairs: for each run with the change the steps of the runs as it is around it (µs), and its own step. The median is
    that of the ratios to each of them, because two runs share the one between them, which may be a disturbed one, or
    the median of the mean ratios, whichever is smaller. usual: the steps of all runs as it is, which decide is_apart.
    """
    each = [[math.log(after / one) for one in before] for before, after in pairs]
    logs = [statistics.fmean(ratios) for ratios in each]
    is_median = len(logs) >= MEDIAN_FROM
    medians = statistics.median(itertools.chain.from_iterable(each)), statistics.median(logs)
    middle = min(medians, key=abs) if is_median else statistics.fmean(logs)
    share = 1 - math.exp(middle)
    # The runs as it is on both sides of a run are shared with its neighbors, so that they count once.
    around = min(len(pairs) + 1, sum(map(len, each)))
    deviation = noise.usual if is_median else noise.share
    error = deviation * math.sqrt((MEDIANS_ERROR**2 if is_median else 1) / len(pairs) + 1 / around)
    error *= STUDENTS_T[min(noise.freedom, len(STUDENTS_T)) - 1]
    return Saving(share, error, len(logs), sum(one < 0 for one in logs), _are_apart([one for _, one in pairs], usual))


def _are_apart(changed: Sequence[float], usual: Sequence[float]) -> bool:
    """Return whether each run with a change was faster than each without it, which is no chance.

    What disturbs a run makes it slower, so that the fastest run as it is shows what the program takes at least.
    """
    by_chance = 1 / math.comb(len(changed) + len(usual), len(changed))
    return by_chance < CHANCE and max(changed) < min(usual) * (1 - GAP)


def beside(kinds: Sequence[bool], steps: Sequence[float], number: int) -> list[float]:
    """Return the steps of the runs as it is around run `number` (µs): of one before it and one after it, as far as any.

    kinds: whether each run was the program as it is. At least one was.
    """
    before = next((i for i in range(number - 1, -1, -1) if kinds[i]), None)
    after = next((i for i in range(number + 1, len(kinds)) if kinds[i]), None)
    return [steps[i] for i in (before, after) if i is not None]


class Difference(msgspec.Struct, frozen=True):
    """How far the losses, or the outputs, of a run are from those of the program as it is.

    kind: "same", "within" (as near as runs of the program as it is, or rounding), "off", "not comparable" or "unknown".
    size: the largest relative difference. compared: how many values or steps.
    """

    kind: str
    size: float | None = None
    compared: int = 0
    why: str = ""

    @property
    def text(self) -> str:
        if self.kind in ("within", "off"):
            figure = f"{self.size:.1%}" if self.size >= 0.001 else f"{self.size:.0e}"
            return f"{self.kind} {figure}" if self.kind == "within" else f"off by {figure}"
        return self.kind


# Computing in another order, or with TF32, changes a loss by less than this over the steps of a run, and an output by
# less than the other.
ROUNDING, OUTPUTS_ROUNDING = 1e-3, 5e-3
# The same of a program with parameters in bf16 or fp16, whose steps are rounded to 3 digits: on an H100 an attention
# backend changed the losses of 40 steps of rung 6 by 0.5%, and the fused AdamW by 1.5%.
HALF_ROUNDING = 2e-2
DIFFERS_FROM_ITSELF = 0.05
AMPLIFIES = "weights that differ by rounding change the losses of this training as much"
TREND = 0.25  # the part of the steps, at the end, whose mean loss is compared if the steps cannot be


def losses_differ(
    as_it_is: Sequence[Sequence[float]],
    changed: Sequence[float],
    other_numbers: str = "",
    is_half: bool = False,
    nudged: Sequence[float] = (),
) -> Difference:
    """Return how far the losses of a changed run are from those of the program as it is, step by step.

    as_it_is: the losses of each run as it is. other_numbers: why the change may draw other random numbers. is_half:
    whether the program's parameters are in bf16 or fp16. nudged: the losses as it is from weights that differ by
    rounding, if they may excuse the change. Its first loss, before any weight has learned, must be equal all the same.
    """
    rounding = HALF_ROUNDING if is_half else ROUNDING
    first, *others = as_it_is
    count = min(len(first), len(changed))
    if not count:
        return Difference("unknown")
    if not all(map(math.isfinite, changed[:count])) and all(map(math.isfinite, first[:count])):
        return Difference("off", math.inf, count, "the loss is not a number")
    own = max((_largest(first, one) for one in others), default=0.0)
    if own > DIFFERS_FROM_ITSELF:
        return Difference("not comparable", own, count, "the program as it is differs from itself")
    size = _largest(first, changed)
    if size == 0:
        return Difference("same", 0.0, count)
    if size <= max(rounding, 2 * own):
        return Difference("within", size, count)
    if size <= 2 * _largest(first, nudged[:count]) and _largest(first[:1], changed[:1]) <= rounding:
        other_numbers = other_numbers or AMPLIFIES
    if other_numbers:
        last = max(1, int(count * TREND))
        before, after = (statistics.fmean(one[count - last : count]) for one in (first, changed))
        trend = abs(after - before) / max(abs(before), 1e-12)
        return Difference("not comparable", trend, count, other_numbers)
    return Difference("off", size, count)


def outputs_differ(as_it_is: Sequence[Sequence[float]], changed: Sequence[float], is_half: bool = False) -> Difference:
    """Return the relative error of a changed run's output: the norm of the difference by the norm of the output.

    is_half: whether the program's parameters are in bf16 or fp16.
    """
    rounding = HALF_ROUNDING if is_half else OUTPUTS_ROUNDING
    first, *others = as_it_is
    if not first or len(first) != len(changed):
        return Difference("unknown")
    own = max((_error(first, one) for one in others if len(one) == len(first)), default=0.0)
    if own > DIFFERS_FROM_ITSELF:
        return Difference("not comparable", own, len(first), "the program as it is differs from itself")
    size = _error(first, changed)
    if size == 0:
        return Difference("same", 0.0, len(first))
    return Difference("within" if size <= max(rounding, 2 * own) else "off", size, len(first))


def _largest(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest difference of two series of losses, divided by the largest loss near it."""
    found = 0.0
    for a, b in zip(first, second, strict=False):
        if a != b and not (math.isnan(a) and math.isnan(b)):
            found = max(found, abs(a - b) / max(abs(a), abs(b), 1e-12))
    return found


def _error(first: Sequence[float], second: Sequence[float]) -> float:
    norm = math.sqrt(math.fsum(a * a for a in first))
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(first, second, strict=True))) / (norm or 1e-12)
