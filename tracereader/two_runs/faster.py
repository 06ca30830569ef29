"""How much faster one run's step is than another's, and the reasons that the two traces show."""

from collections import Counter
from collections.abc import Callable, Sequence

from tracereader.findings.finding import copies_as_noun, counted, family_as_noun, in_one_unit, listed
from tracereader.trace.grouped import totals
from tracereader.two_runs import compare
from tracereader.two_runs.side import Side

# Steps are equally fast if their times differ by less than this share, as two recordings of one program do.
ALIKE = 0.05
# A reason is named if it explains at least this share of the difference between two steps.
CONSIDERABLE = 0.15
MOSTLY = 0.5
REASONS = 3
# A prediction missed if the measured step differs from it by more than this share. Of the pairs that the rules were
# made from, 69 of 92 lie within it (docs/opportunities.md).
MISSED = 0.3
# Kernels are "almost the same" if at least this share of them has the same names.
ALMOST = 0.9


def step_us(side: Side, chosen: bool = False) -> float:
    """Return the step's time (µs) from start to start. chosen: only the reported step, on the longer lane."""
    one = side.summary.chosen
    return max(one.cpu_us, one.gpu_span_us) if chosen else side.summary.recorded_step_us


def pace(before_us: float, after_us: float, than: str = "") -> str:
    """Return, for example, "is 7.8 times as fast: 0.747 ms per step instead of 5.80". than: the other run's name."""
    unit, (was, now) = in_one_unit((before_us, after_us))
    times = f"{now} {unit} per step instead of {was}"
    against = f" as {than}" if than else ""
    if not before_us or not after_us:
        return f"takes {times}"
    if is_alike(before_us, after_us):
        return f"is about as fast{against}: {times}"
    return f"{'is' if before_us > after_us else 'takes'} {ratio(before_us, after_us)}{against}: {times}"


def ratio(before_us: float, after_us: float) -> str:
    """Return, for example, "7.8 times as fast", or "1.20 times as long" if the second time is longer."""
    factor = max(before_us, after_us) / min(before_us, after_us)
    digits = 2 if factor < 2 else 1 if factor < 100 else 0
    return f"{factor:,.{digits}f} times as {'fast' if before_us >= after_us else 'long'}"


def sentence(who: str, before: Side, after: Side, than: str = "", of_one_step: bool = False) -> str:
    """Return the pace of a run against another, with the reasons; of one step without them."""
    if compare.only_one_has_gpu_work(before, after):
        first = than or "the first"
        only = who if after.summary.has_gpu_work else first
        why = f"only {only} has GPU work, so they are not recordings of the same kind"
        return f"{who} does not compare with {first}: {why}"
    if compare.only_one_has_steps(before, after):
        why = "one of them has no profiler steps, so its whole recording counts as one step"
        return f"{who} does not compare with {than or 'the first'} by step: {why}"
    paced = pace(step_us(before, of_one_step), step_us(after, of_one_step), than)
    return "; ".join([f"{who} {paced}", *([] if of_one_step else reasons(before, after))])


def is_alike(one_us: float, other_us: float) -> bool:
    return abs(one_us - other_us) <= ALIKE * max(one_us, other_us)


def reasons(before: Side, after: Side) -> list[str]:
    """Return the reasons why the times of two steps differ, launches first; empty if the traces do not show any."""
    first, second = before.summary, after.summary
    if first.source.devices != second.source.devices:
        return []
    difference = step_us(before) - step_us(after)
    alike = is_alike(step_us(before), step_us(after))
    if not first.has_gpu_work or not second.has_gpu_work:
        return [] if alike or first.has_gpu_work != second.has_gpu_work else _by_op(before, after, difference)
    launched = _launched(before, after)
    if alike:
        return launched
    by_graph = bool(graphs_launched(before)) != bool(graphs_launched(after))
    idle = [max(0.0, step_us(side) - side.summary.gpu_us) for side in (before, after)]
    share = (idle[0] - idle[1]) / difference
    waits = _waits(before, after) if share >= CONSIDERABLE else []
    if not by_graph and not waits and share >= MOSTLY:
        unit, (was, now) = in_one_unit(idle)
        calls = [side.summary.chosen.launches for side in (before, after)]
        with_calls = f", with {counted(calls[1], 'launch', 'launches')} instead of {calls[0]:,}"
        explains = _differ(*calls) and (calls[0] > calls[1]) == (idle[0] > idle[1])
        waits = [f"the GPU is idle for {now} {unit} of the step instead of {was}{with_calls * explains}"]
    was, now = _same_calls_us(before, after)
    is_slower = not by_graph and share >= CONSIDERABLE and (was - now) / difference >= CONSIDERABLE
    speed = [_same_calls(was, now)] if is_slower else []
    found = [*launched, *_other_ways(before, after), *speed, *waits, *_by_family(before, after, difference)]
    return found[: REASONS + 1]


def kernels(side: Side) -> Counter:
    """Return the step's kernels by name, without memset kernels, which a CUDA graph uses instead of memsets."""
    return Counter(one.name for one in side.summary.gpu_work if one.kind == "kernel" and one.family != "memset")


def share_in_common(before: Side, after: Side) -> float:
    """Return the share of two steps' kernels that have the same names."""
    one, other = kernels(before), kernels(after)
    most = max(one.total(), other.total())
    return (one & other).total() / most if most else 1.0


def share_kept(before: Side, after: Side) -> float:
    """Return the share of the first step's kernels that the second step has by name, beside any others."""
    one = kernels(before)
    return (one & kernels(after)).total() / one.total() if one else 1.0


def graphs_launched(side: Side) -> int:
    """Return the number of CUDA graphs that a step launches if most of its GPU activities belong to one; else 0."""
    return (side.summary.graph_launches or 1) if share_in_graphs(side) > MOSTLY else 0


def share_in_graphs(side: Side) -> float:
    """Return the share of a step's GPU activities that CUDA graphs launch."""
    work = side.summary.gpu_work
    return sum(one.from_graph for one in work) / len(work) if work else 0.0


def synchronizations(side: Side) -> int:
    return sum(one.calls for one in side.summary.training.syncs)


def _launched(before: Side, after: Side) -> list[str]:
    """Return whether the kernels are the same, and whether a CUDA graph launches them, as sentences."""
    every = [Counter(one.name for one in side.summary.kernels_of_step) for side in (before, after)]
    was, now, shared = every[0].total(), every[1].total(), (every[0] & every[1]).total()
    common = share_in_common(before, after)
    same = common == 1 and was == now and was
    if same:
        which = f"the same {counted(now, 'kernel')}" if now > 1 else "the same kernel"
    elif common >= ALMOST:
        which = f"almost the same kernels ({shared:,} of {max(was, now):,} by name)"
    else:
        which = counted(now, "kernel")
    graphs = [graphs_launched(side) for side in (before, after)]
    calls = [side.summary.chosen.launches for side in (before, after)]
    if bool(graphs[0]) == bool(graphs[1]):
        return [which] if same and graphs == [0, 0] and not _differ(*calls) else []
    instead = "" if common >= ALMOST else f" {counted(was, 'kernel')}"
    as_graph = [("one CUDA graph" if count == 1 else f"{count:,} CUDA graphs") for count in graphs]
    for here, side in enumerate((before, after)):
        if graphs[here] and share_in_graphs(side) < ALMOST:
            as_graph[here] += f" and {counted(calls[here] - graphs[here], 'other call')}"
    if graphs[1]:
        single = counted(calls[0], "call")
        return [f"{which}, launched as {as_graph[1]} instead of{instead}{' in' if instead else ''} {single}"]
    return [f"{which}, launched in {counted(calls[1], 'call')} instead of{instead} as {as_graph[0]}"]


def _differ(was: int, now: int) -> bool:
    return min(was, now) < ALMOST * max(was, now)


def _other_ways(before: Side, after: Side) -> list[str]:
    """Return sentences on a changed implementation of the optimizer, and on recomputed activations."""
    was, now = (side.summary.training for side in (before, after))
    hows = {one.name: one.how for one in was.optimizers}
    found = [
        f"{one.name} as {one.how} instead of {hows[one.name]}"
        for one in now.optimizers
        if one.how and hows.get(one.name, one.how) not in ("", one.how)
    ]
    again = [one.recomputed.calls if one.recomputed else 0 for one in (was, now)]
    if _differ(*again):
        found.append(f"{counted(again[1], 'forward op') if again[1] else 'no forward op'} run again in backward "
                     f"instead of {again[0]:,}")  # fmt: skip
    return found


def _waits(before: Side, after: Side) -> list[str]:
    was, now = synchronizations(before), synchronizations(after)
    said = counted(now, "synchronization") if now else "no synchronization"
    difference = step_us(before) - step_us(after)
    found = [f"{said} per step instead of {was:,}"] if (was - now) * difference > 0 else []
    loading = [side.summary.training.loading for side in (before, after)]
    us = [one.us if one else 0.0 for one in loading]
    if (us[0] - us[1]) / difference >= CONSIDERABLE:
        unit, (was_us, now_us) = in_one_unit(us)
        found.append(f"{now_us} {unit} of waiting for the DataLoader instead of {was_us}")
    return found


def _same_calls_us(before: Side, after: Side) -> tuple[float, float]:
    """Return the self time (µs) that two steps spend in the ops and runtime calls that both call equally often."""
    us = [0.0, 0.0]
    for kind in ("ops", "runtime"):
        was, now = (getattr(side.summary.cpu, kind) for side in (before, after))
        for name in was.keys() & now.keys():
            if was[name].calls == now[name].calls:
                us[0] += was[name].self_us
                us[1] += now[name].self_us
    return us[0], us[1]


def _same_calls(was: float, now: float) -> str:
    unit, (old_us, new_us) = in_one_unit((was, now))
    return f"the same ops and calls take the CPU {new_us} {unit} instead of {old_us}"


def why_missed(before: Side, after: Side, predicted_us: float, measured_us: float) -> str:
    """Return why the step after a change was predicted wrongly by much; "" if the two traces do not show it."""
    missed_us = measured_us - predicted_us
    if abs(missed_us) <= MISSED * measured_us:
        return ""
    was, now = (side.summary.gpu_us for side in (before, after))
    if now - predicted_us >= MOSTLY * missed_us > 0:  # the GPU's work alone exceeds the prediction
        unit, (old_us, new_us) = in_one_unit((was, now))
        longer = _by_family(before, after, was - now)[:1] if now > was else []
        return ": ".join([f"the GPU works for {new_us} {unit} of the step instead of {old_us}", *longer])
    idle_us = max(measured_us, predicted_us) - now  # only a CPU that the step waits for explains anything
    if idle_us < MOSTLY * abs(missed_us):
        return ""
    was, now = _same_calls_us(before, after)
    return _same_calls(was, now) if MOSTLY <= (now - was) / missed_us <= 1 / MOSTLY else ""


def _by_family(before: Side, after: Side, difference: float) -> list[str]:
    """Return sentences on the families of GPU work whose times explain much of the difference, the largest first."""
    found = []
    fused = _fused_attention(before, after)
    for family in {**before.summary.by_family, **after.summary.by_family}:
        was, now = (side.summary.by_family.get(family, 0.0) for side in (before, after))
        if (was - now) / difference < CONSIDERABLE or (family == "attention" and fused):
            continue
        found.append((was - now, _family_said(before, after, family, was, now)))
    found.sort(key=lambda one: -abs(one[0]))
    return fused + [text for _, text in found[: REASONS - len(fused)]]


def _fused_attention(before: Side, after: Side) -> list[str]:
    was, now = len(before.summary.attention.unfused), len(after.summary.attention.unfused)
    attention = [sum(one.family == "attention" for one in side.summary.gpu_work) for side in (before, after)]
    if was > now and attention[1] > attention[0]:
        gone = f"{counted(was - now, 'softmax', 'softmaxes')} between batched products"
        return [f"{counted(attention[1] - attention[0], 'fused attention kernel')} instead of {gone}"]
    return []


def _family_said(before: Side, after: Side, family: str, was: float, now: float) -> str:
    unit, (old_us, new_us) = in_one_unit((was, now))
    rows = [[one for one in side.summary.gpu_work if one.family == family] for side in (before, after)]
    names = [Counter(one.name for one in some) for some in rows]
    old, new = map(len, rows)
    kinds = {one.kind == "kernel" for some in rows for one in some}
    nouns = copies_as_noun(False in kinds, True in kinds) if family == "copy" else family_as_noun(family)
    if not new:
        return f"no {nouns} instead of {old:,} ({old_us} {unit})"
    if not old:
        return f"{new_us} {unit} of {nouns} ({new:,}) instead of none"
    if old != new:
        how = f"{new:,} instead of {old:,}"
    elif names[0] == names[1]:
        how = f"the same {new:,}"
    else:
        how = _other_kernels(*rows)
    return f"{new_us} {unit} of {nouns} instead of {old_us} ({how})"


def _other_kernels(before: Sequence, after: Sequence) -> str:
    """Return how equally many kernels changed: the cores and types with most of the time, if the names give them."""
    changed = []
    for said in ("on", "types"):
        was, now = (_mostly(some, lambda one, said=said: one.name_says.get(said)) for some in (before, after))
        if was and now and was != now:
            changed.append(f"{now} instead of {was}")
    if changed:
        return ", ".join(changed)
    if any(one.kind != "kernel" for one in (*before, *after)):
        was, now = (_mostly(some, lambda one: one.name) for some in (before, after))
        return f"{now} instead of {was}" if was and now and was != now else f"{len(after):,} of other kinds"
    return f"{len(after):,} by other kernels" if len(after) > 1 else "another kernel"


def _mostly(rows: Sequence, key: Callable) -> str | None:
    """Return the value of the key that has more than half of these kernels' time; None if no value has."""
    times = totals((key(one), one.us) for one in rows)
    (said, us), *_ = times.most_common(1)
    return said if us > times.total() / 2 else None


def _by_op(before: Side, after: Side, difference: float) -> list[str]:
    """Return a sentence on the ops whose self time explains much of the difference between two steps on the CPU."""
    was, now = (side.summary.cpu.ops for side in (before, after))
    found = []
    for name in {**was, **now}:
        old, new = (ops[name].self_us if name in ops else 0.0 for ops in (was, now))
        if (old - new) / difference >= CONSIDERABLE:
            unit, (old_us, new_us) = in_one_unit((old, new))
            found.append((abs(old - new), f"{name}: {new_us} {unit} instead of {old_us}"))
    found.sort(key=lambda one: -one[0])
    return [listed(text for _, text in found[:REASONS])] if found else []
