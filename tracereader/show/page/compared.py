"""The figures of a page of several runs. Each run is compared with the first."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tracereader import __version__
from tracereader.changes import catalogue
from tracereader.changes.opportunity import Opportunity
from tracereader.figures import Summary
from tracereader.findings import steps
from tracereader.findings.finding import family_in_words
from tracereader.show.comparison import proposed_by
from tracereader.show.limits import measures
from tracereader.show.page import data, html
from tracereader.show.page.timeline import Packing
from tracereader.trace import Trace
from tracereader.trace.kernel_names import labels
from tracereader.two_runs import compare, faster, sentences

# Kernels of two recordings of one program differ by up to 9%.
ALIKE = 0.09


class Runs:
    """Collects the page's content run by run, so that only one trace at a time is in memory."""

    def __init__(self):
        self.packing = Packing()
        self.summaries: list[Summary] = []
        self.proposed: Sequence[Opportunity] = ()  # by the first run's report
        self.decoded: dict[str, str] = {}
        self.pieces: list[dict] = []
        self.steps: list[dict] = []
        self.hosts: list[str | None] = []

    def add(self, trace: Trace, summary: Summary) -> None:
        """Add a run with the step that its summary describes. On the axis, each run starts at zero."""
        step, number = trace.steps[summary.typical_index], len(self.summaries) + 1
        # The clocks of the CPU and the GPU differ, so that GPU work may start before the step that launches it.
        zero = min([step.start, *(one.start for one in step.work)])
        first = len(self.pieces)
        own = {id(one): first + place for place, one in enumerate(step.work, 1)}
        self.packing.add_trace(trace, own, zero, [step], f"run {number} · ")
        self.pieces += data.pieces(summary)
        self.decoded |= data.decoded_names(trace)
        if not self.summaries:
            self.proposed = proposed_by(trace, summary)
        self.summaries.append(summary)
        self.steps.append(
            {"name": f"run {number}, step {step.number}", "start": step.start - zero, "end": step.end - zero}
        )
        self.hosts.append(trace.host)

    def page(self) -> tuple[str, list[str]]:
        """Return the page's HTML text, and descriptions of content that the user may not want to share."""
        slices, chunks = self.packing.packed({"steps": self.steps})
        slices = data.described(slices, self.decoded, self.pieces, "")
        figures = {
            "page": "comparison",
            "version": __version__,
            "file": f"{len(self.summaries)} runs",
            "holds": data.holds(self.hosts, slices),
            **_figures(self.summaries, self.proposed),
        }
        return html.assembled(figures, slices, chunks), figures["holds"]


def _figures(summaries: Sequence[Summary], proposed: Sequence[Opportunity]) -> dict:
    sides = [compare.Side(summary) for summary in compare.with_like_families(summaries)]
    names = compare.distinct_names(sides)
    runs = [_run(side, name) for side, name in zip(sides, names, strict=True)]
    for number, (run, side) in enumerate(zip(runs[1:], sides[1:], strict=True), 2):
        run["pace"] = faster.sentence(f"run {number}", sides[0], side, "run 1")
    found = [sentences.difference(sides[0], side) for side in sides[1:]]
    if len(sides) == 2:
        times = list(map(faster.step_us, sides))
        runs[1]["ratio"] = faster.ratio(*times) if compare.compare_by_step(*sides) and all(times) else None
    for run, side in zip(runs, sides, strict=True):
        compares = runs[0]["step"] and not compare.only_one_has_gpu_work(sides[0], side)
        run["of_first"] = run["step"] / runs[0]["step"] if compares else None
    return {
        "runs": runs,
        "families": _rows([{family_in_words(one): us for one, us in side.summary.by_family.items()} for side in sides]),
        "kernels": kernel_rows(sides),
        "ops": _rows([{name: one.self_us for name, one in side.summary.cpu.ops.items()} for side in sides]),
        "changes": [
            {"name": name, "changed": one.changed, "same": one.same} for name, one in zip(names[1:], found, strict=True)
        ],
        "predicted": _predicted(sides, proposed),
    }


def _predicted(sides: Sequence[compare.Side], proposed: Sequence[Opportunity]) -> list[dict]:
    """Return the first run's proposals. measured_us: for each other run, its step's time if it makes that change.

    missed: sentences on why a run that makes this change alone differs by much from its prediction.
    """
    rows = [{**msgspec.to_builtins(one), "measured_us": [], "missed": []} for one in proposed]
    for number, side in enumerate(sides[1:], 2):
        found = catalogue.checked(sides[0], proposed, side)
        changes = {one.change for one in found.proposals} if found else set()
        for row in rows:
            row["measured_us"].append(found.measured_us if row["change"] in changes else None)
            if changes == {row["change"]}:
                why = faster.why_missed(sides[0], side, row["step_us_after"], found.measured_us)
                row["missed"] += [f"In run {number}, {why}."] * bool(why)
    return rows


def _run(side: compare.Side, name: str) -> dict:
    one = side.summary
    word, why = steps.waiting(one)
    return {
        "name": name,
        "file": Path(one.source.trace).name,
        "device": compare.devices_of(side),
        "regime": word,
        "why": why,
        "busy": steps.busy_machine(one),
        **measures(one),
        "memcpys": one.count("memcpy"),
        "memsets": one.count("memset"),
        "tokens_s": one.llm.decoding.tokens_s if one.llm.decoding else None,
    }


def _rows(times: Sequence[dict[str, float]]) -> list[dict]:
    """Return a row for each name with its times by run. The largest differences come first."""
    names = dict.fromkeys(name for one in times for name in one)
    rows = [{"name": name, "us": [one.get(name) for one in times]} for name in names]
    for row in rows:
        row["change_us"] = (row["us"][-1] or 0.0) - (row["us"][0] or 0.0)
        row["status"] = status(row["us"][0], row["us"][-1])
    return sorted(rows, key=lambda row: min(us or 0.0 for us in row["us"]) - max(us or 0.0 for us in row["us"]))


def kernel_rows(sides: Sequence[compare.Side]) -> list[dict]:
    """Return the GPU activities of one step by name. The largest differences come first."""
    rows = _rows([dict(side.times) for side in sides])
    shown = labels([row["name"] for row in rows], data.NAME_SHOWN)
    says = {name: said for side in reversed(sides) for name, said in side.says.items()}
    for row in rows:
        name = row["name"]
        row["short"], row["family"], row["decoded"] = shown[name], says[name].family, str(says[name])
        row["counts"] = [side.work.get(name, 0) for side in sides]
    return rows


def status(before: float | None, after: float | None) -> str:
    """Return how a time changed from the first run to the last."""
    if before is None:
        return "new" if after is not None else "between"
    if after is None:
        return "gone"
    if after > (1 + ALIKE) * before:
        return "longer"
    return "shorter" if before > (1 + ALIKE) * after else "alike"
