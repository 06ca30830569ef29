"""How well the reports' predictions agree with what was measured after a change, over all recorded pairs.

    uv run python benchmarks/scoreboard.py [--json] [--list] [--pairs FOLDER]

fitted: the pairs of docs/opportunities.py, with which the rules were written, and those of benchmarks/pairs because of
which a rule was changed later. unfitted: the other ones of benchmarks/pairs, to which nobody fits a rule; FOLDER
(benchmarks/pairs) has their results.json, and their traces beside it. A step is the one without the profiler where both
recordings have it, otherwise the recorded one. --list prints every pair.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs"), str(ROOT / "benchmarks")]

import opportunities as docs  # noqa: E402
from pairs.record import step_us  # noqa: E402

from tracereader.changes import ranks as rank_changes  # noqa: E402
from tracereader.changes.catalogue import checked, opportunities  # noqa: E402
from tracereader.command import DEFAULT_LIMIT  # noqa: E402
from tracereader.figures import summarize  # noqa: E402
from tracereader.replay import Refused  # noqa: E402
from tracereader.show.ranks import opened  # noqa: E402
from tracereader.show.view import View  # noqa: E402
from tracereader.trace import read  # noqa: E402

WITHIN = 0.3  # of the measured step
PROMISED, KEPT = 0.05, 0.02  # a promised saving of the step, and what is less than nothing worth mentioning
POINTS = 0.1


class Pair(msgspec.Struct, frozen=True):
    """A change that was made and measured.

    before, after: the names of the two recordings. change: the id of the proposal that it follows; empty if no proposal
    stands for it, or if the comparison does not decide which one. rank: its place among the proposals, from 1; None if
    the report does not propose it. best_rank: the same among the proposals that were measured. is_best: whether it
    saves most of several measured changes of one recording, and PROMISED or more. predicted_us: the step that the
    report predicts, and predicted_from_us the one that it begins with: the trace may come from another process than the
    measurement. measured_from_us, measured_us: the step before and after the change. promised: the share of the step
    that the report says is saved; 0 without a proposal. low, high: the printed range of that share; None if one number
    is printed. blind: the range that is printed if the step without the profiler is not known and the CPU limits it;
    None for other steps. others: the shares that other comparisons show, see shares_of_processes().
    """

    before: str
    after: str
    change: str
    measured_from_us: float
    measured_us: float
    rank: int | None = None
    best_rank: int | None = None
    is_best: bool = False
    predicted_from_us: float | None = None
    predicted_us: float | None = None
    promised: float = 0.0
    low: float | None = None
    high: float | None = None
    blind: tuple[float, float] | None = None
    others: tuple[float, ...] = ()

    @property
    def is_predicted(self) -> bool:
        return self.predicted_us is not None

    @property
    def ratio(self) -> float:
        """Return the predicted step divided by the measured one, each as a share of the step before."""
        return self.predicted_us / self.predicted_from_us / (1 - self.saved)

    @property
    def saved(self) -> float:
        """Return the measured saving's share of the step."""
        return 1 - self.measured_us / self.measured_from_us

    @property
    def least_saved(self) -> float:
        """Return the saving that all measurements show."""
        return min(self.saved, *self.others) if self.others else self.saved

    @property
    def most_saved(self) -> float:
        """Return the largest saving that a measurement shows."""
        return max(self.saved, *self.others) if self.others else self.saved

    @property
    def as_printed(self) -> bool:
        """Return whether the measured saving lies in the printed range, or within POINTS of the printed number."""
        if self.low is not None:
            return round(self.low, 2) <= round(max(0.0, self.saved), 2) <= round(self.high, 2)
        return abs(self.promised - self.saved) <= POINTS


def scores(pairs: Sequence[Pair]) -> dict[str, float | int | None]:
    """Return the figures over some pairs. A share or a median over nothing is None."""
    proposed = [one for one in pairs if one.is_predicted]
    promised = [one for one in proposed if one.promised >= PROMISED]
    found = [one for one in pairs if one.change and one.least_saved >= PROMISED]
    best = [one for one in pairs if one.is_best]
    return {
        "pairs": len(pairs),
        "predicted": len(proposed),
        "within_30_percent": sum(abs(one.ratio - 1) <= WITHIN for one in proposed),
        "median_error": _median(abs(one.ratio - 1) for one in proposed),
        "rank_correlation": spearman([one.promised for one in proposed], [one.saved for one in proposed]),
        "as_printed": sum(one.as_printed for one in proposed),
        "blind": sum(one.blind is not None for one in pairs),
        "in_blind_range": sum(one.blind[0] <= max(0.0, one.saved) <= one.blind[1] for one in pairs if one.blind),
        "promises": len(promised),
        "promises_not_kept": sum(one.most_saved < KEPT for one in promised),
        "savings_with_a_proposal_id": len(found),
        "savings_not_proposed": sum(not one.is_predicted for one in found),
        "recordings_with_several_changes": len(best),
        "best_is_first": sum(one.rank == 1 for one in best),
        "best_is_first_of_measured": sum(one.best_rank == 1 for one in best),
    }


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; equal values share their mean rank. None if it is not defined."""
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    return statistics.correlation(_ranks(xs), _ranks(ys))


def _ranks(values: Sequence[float]) -> list[float]:
    places = defaultdict(list)
    for place, value in enumerate(sorted(values)):
        places[value].append(place)
    return [statistics.mean(places[value]) for value in values]


def ranked(pairs: list[Pair]) -> list[Pair]:
    """Return the pairs of one recording with their places among the proposals that were measured, and the best one."""
    places = sorted({one.rank for one in pairs if one.rank})
    known = [one for one in pairs if one.change]
    best = max(known, key=lambda one: one.least_saved) if len({one.change for one in known}) > 1 else None
    return [
        msgspec.structs.replace(
            one,
            best_rank=places.index(one.rank) + 1 if one.rank else None,
            is_best=one is best and one.least_saved >= PROMISED,
        )
        for one in pairs
    ]


def _pair(
    before: str,
    after: str,
    change: str,
    steps: tuple[float, float],
    proposed: Sequence,
    one: object,
    blind: Sequence = (),
) -> Pair:
    """Return a pair.

    steps: measured before and after, µs. one: the proposal of `proposed` that it follows, or None. blind: the proposals
    where the step without the profiler is not known.
    """
    if one is None:
        return Pair(before, after, change, *steps)
    predicted_from_us, predicted_us = one.times_us
    low, high = one.estimated_savings or (None, None)
    return Pair(
        before,
        after,
        change,
        *steps,
        rank=1 + proposed.index(one),
        predicted_from_us=predicted_from_us,
        predicted_us=predicted_us,
        promised=one.likely_share,
        low=low,
        high=high,
        blind=next((x.estimated_savings for x in blind if x.change == one.change), None),
    )


def _blind(path: Path) -> Sequence:
    """Return the proposals of an overhead-bound step as if its time without the profiler were not known."""
    trace = read(path)
    summary = msgspec.structs.replace(summarize(trace), unprofiled_step_us=None)
    found = opportunities(trace, summary) if summary.waits_for == "overhead" else ()
    return () if isinstance(found, Refused) else found


def fitted() -> list[Pair]:
    """Return the pairs of docs/opportunities.py: those of one process, and those of several ranks."""
    of_one = defaultdict(list)
    for before, after in docs.PAIRS + docs.CPU_ONLY_PAIRS:
        (side, proposed), (now, _) = docs._run(before), docs._run(after)
        found = checked(side, proposed, now)
        one = found.proposals[0] if found and len(found.proposals) == 1 else None
        steps = [(side.summary.unprofiled_step_us, now.summary.unprofiled_step_us)]
        if not all(steps[0]):
            steps = [(side.summary.recorded_step_us, now.summary.recorded_step_us)]
            one = one and msgspec.structs.replace(one, unprofiled_step_us=None, unprofiled_step_us_after=None)
        kept = [x if one is None or x.change != one.change else one for x in proposed]
        change = one.change if one else ""
        blind = _blind(docs.REFERENCE / f"{before}.json.gz") if one and one.knows_unprofiled else ()
        of_one[before].append(_pair(docs.shown(before), docs.shown(after), change, steps[0], kept, one, blind))
    for before, change, after in docs.RANK_PAIRS:
        summary, _ = opened(docs._traces(before), View())
        proposed = list(rank_changes.opportunities(summary, DEFAULT_LIMIT))
        one = next((one for one in proposed if one.change == change), None)
        steps = docs._slowest_us(before), docs._slowest_us(after)
        of_one[before].append(_pair(docs._ranks_in(before), docs._ranks_in(after), change, steps, proposed, one))
    return [one for some in of_one.values() for one in ranked(some)]


def of_folder(folder: Path) -> dict[str, list[Pair]]:
    """Return the pairs of a folder that benchmarks/pairs/record.py wrote. Variants that failed are left out.

    A variant because of which a rule was written or changed says "fitted" in results.json, and counts among these. The
    best change of a program is that of all its variants.
    """
    file, pairs = folder / "results.json", {"fitted": [], "unfitted": []}
    if not file.exists():
        return pairs
    for program, variants in json.loads(file.read_text()).items():
        trace, base = folder / program / "base.json.gz", step_us(variants.get("base"))
        if base is None or not trace.exists():
            continue
        document = read(trace)
        proposed = opportunities(document, summarize(document))
        proposed = [] if isinstance(proposed, Refused) else list(proposed)
        some, blind = [], _blind(trace)
        for variant, row in variants.items():
            us = step_us(row)
            if variant == "base" or us is None:
                continue
            one = next((x for x in proposed if x.change == row["proposal"]), None)
            name = f"{program}/{variant}"
            # A variant that was recorded later has a base of its own, in "base_runs".
            first = {"runs": row["base_runs"], "served": 1} if "base_runs" in row else variants["base"]
            pair = _pair(f"{program}/base", name, row["proposal"], (step_us(first), us), proposed, one, blind)
            some.append((row, msgspec.structs.replace(pair, others=shares_of_processes(first, row))))
        for (row, _), pair in zip(some, ranked([pair for _, pair in some]), strict=True):
            pairs["fitted" if row.get("fitted") else "unfitted"].append(pair)
    return pairs


def shares_of_processes(base: dict, row: dict) -> tuple[float, ...]:
    """Return the saved share of the step between each process of base and each of a variant, and one from elsewhere.

    The fastest block of steps of each process is compared. Other programs on the machine make a step on the CPU up to
    twice as long for minutes, so that medians of two processes differ by 20% where the same code runs. The share from
    elsewhere is of another measurement without a trace (record.py --again).
    """
    before, after = (
        [run.get("lowest_us", run["median_us"]) / one.get("served", 1) for run in one["runs"]] for one in (base, row)
    )
    found = [1 - now / then for then in before for now in after]
    return (*found, row["elsewhere"]) if "elsewhere" in row else tuple(found)


ROWS = (
    ("measured pairs", "{pairs}"),
    ("with a prediction of this change", "{predicted}"),
    (
        "predicted step within 30% of the measured one, relative to the step before",
        "{within_30_percent} of {predicted}",
    ),
    ("median error of the predicted step", "{median_error:.0%}"),
    ("rank correlation of predicted and measured savings", "{rank_correlation:.2f}"),
    ("measured saving in the printed range or within 10 points", "{as_printed} of {predicted}"),
    ("the same in the range where the CPU limits an unknown step", "{in_blind_range} of {blind}"),
    ("promised 5% or more, less than 2% in each comparison of processes", "{promises_not_kept} of {promises}"),
    (
        "5% or more in each comparison, with a known change, not proposed",
        "{savings_not_proposed} of {savings_with_a_proposal_id}",
    ),
    ("best measured change is the first proposal", "{best_is_first} of {recordings_with_several_changes}"),
    ("it is the first of the measured proposals", "{best_is_first_of_measured} of {recordings_with_several_changes}"),
)


def _cell(template: str, found: dict) -> str:
    return "–" if any(found[name] is None for name in found if f"{{{name}" in template) else template.format(**found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--list", action="store_true", help="print every pair, too")
    parser.add_argument("--pairs", type=Path, default=ROOT / "benchmarks/pairs", help="where results.json is")
    flags = parser.parse_args(argv)
    sets = of_folder(flags.pairs)
    sets["fitted"] = fitted() + sets["fitted"]
    found = {name: scores(pairs) for name, pairs in sets.items()}
    if flags.json:
        more = {"all_pairs": {name: msgspec.to_builtins(pairs) for name, pairs in sets.items()}} if flags.list else {}
        print(json.dumps(found | more, indent=1))
        return 0
    wide = max(len(title) for title, _ in ROWS)
    print(f"{'':{wide}}  {'fitted':>10}  {'unfitted':>10}")
    for title, template in ROWS:
        print(f"{title:{wide}}  {_cell(template, found['fitted']):>10}  {_cell(template, found['unfitted']):>10}")
    for name, pairs in sets.items() if flags.list else ():
        print(f"\n{name}: step before and after, measured; saved, measured and promised; place among the proposals")
        for one in pairs:
            promised = f"{one.promised:7.1%}" if one.is_predicted else "      –"
            steps = f"{one.measured_from_us / 1e3:10.3f} {one.measured_us / 1e3:10.3f} ms"
            place = f"{one.rank or '–':>3}  {one.change or '–':16}"
            print(f"{steps} {one.saved:7.1%} {promised} {place} {one.before} → {one.after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
