"""The figures of a page of one run's ranks: their steps side by side, and who waits for whom."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tracereader import __version__
from tracereader.changes.opportunity import Opportunity
from tracereader.figures.rank import RankTrace
from tracereader.figures.ranks import Collective, RankFigures, RanksSummary
from tracereader.findings import ranks as findings
from tracereader.replay import Refused
from tracereader.show.page import data
from tracereader.show.page.timeline import Packing
from tracereader.show.ranks import rank_as_builtins
from tracereader.trace.grouped import grouped, totals
from tracereader.trace.slices import Slice

# With more ranks' parts in collectives than this, the timeline has the collectives of only one step.
PARTS_DRAWN = 200_000
# More bars side by side cannot be read. The heat map has all ranks and steps.
RANKS_BESIDE, STEPS_BESIDE = 16, 12


def page(
    summary: RanksSummary, traces: Sequence[RankTrace], found: Sequence[Opportunity] | Refused | None
) -> tuple[dict, dict, list[bytes]]:
    """Return the figures, the description of the timeline's columns, and the columns. found: None without proposals."""
    lanes = {one.rank: one.lane for one in traces if one.path not in summary.not_read and one.lane}
    drawn = next((one.step for one in lanes.values() if one.step in summary.steps), None)
    # A trace with other steps may have another one in its middle.
    lanes = {rank: one for rank, one in lanes.items() if one.step == drawn}
    collectives = [*summary.matched, *summary.messages]
    all_drawn = sum(len(one.ranks) for one in collectives) <= PARTS_DRAWN
    if not all_drawn:
        collectives = [one for one in collectives if one.step == drawn]
    packing = Packing()
    rows = _rows(summary, traces, lanes, collectives)
    zero = min((one.start for some in rows.values() for one, _ in some), default=0)
    for one in summary.ranks:
        host = f" on {one.host}" if len(summary.clocks.hosts) > 1 and one.host else ""
        packing.add("CPU", f"rank {one.rank}{host}", rows[one.rank], zero)
    slices, chunks = packing.packed({"steps": _steps(summary.steps, collectives, rows, lanes, zero), "zero": zero})
    slices = data.described(slices, {}, [], "")
    straggler, regime = findings.straggler(summary), findings.regime(summary)
    beside = summary.steps[:STEPS_BESIDE] if len(summary.ranks) <= RANKS_BESIDE else ()
    figures = {
        "page": "ranks",
        "version": __version__,
        "file": f"{len(summary.ranks)} of {summary.world_size} ranks",
        "holds": data.holds([one.host for one in summary.ranks], slices),
        "device": summary.device,
        "on_gpu": summary.on_gpu,
        "world_size": summary.world_size,
        "regime": regime[0] if regime else None,
        "in_short": [*([": ".join(regime)] if regime else []), *findings.sentences(summary)],
        "straggler": straggler.rank if straggler else None,
        "opportunities": None if found is None else data.proposed(found),
        "missing": summary.missing,
        "not_read": {Path(path).name: findings.why_not_read(why) for path, why in summary.not_read.items()},
        "drawn": drawn,
        "collectives_drawn": "of all steps" if all_drawn else "of that step alone",
        "ranks": [_rank(one, beside) for one in summary.ranks],
        "steps": summary.steps,
        "beside": beside,
        "heat": _heat(summary),
        "matched": [_collective(one) for one in summary.matched],
        "unmatched": summary.unmatched,
        "pairs": msgspec.to_builtins(summary.pairs),
        "unmatched_messages": summary.unmatched_messages,
        "kinds": msgspec.to_builtins(summary.kinds),
    }
    return figures, slices, chunks


def _rank(one: RankFigures, beside: Sequence[str]) -> dict:
    """Return one rank's figures, with those of the steps that are drawn side by side with the other ranks'."""
    found = rank_as_builtins(msgspec.structs.replace(one, steps=()))
    steps = [msgspec.to_builtins(step) for step in one.steps if step.name in beside]
    return {**found, "trace": Path(one.trace).name, "steps": steps}


def _collective(one: Collective) -> dict:
    """Return one collective as a row of a table. Its times by rank are in the timeline."""
    left_out = ("ranks", "starts_us", "took_us", "waits_us")
    found = {name: getattr(one, name) for name in one.__struct_fields__ if name not in left_out}
    return {**found, "wait_us": max(one.waits_us, default=0.0), "start_us": min(one.starts_us, default=0.0)}


def _heat(summary: RanksSummary) -> dict | None:
    """Return by rank and step the step's time, and the sum of the rank's waits in its collectives and messages."""
    if not summary.steps:
        return None
    times = {(one.rank, step.name): round(step.us, 3) for one in summary.ranks for step in one.steps}
    communication = [*summary.matched, *summary.messages]
    waits = totals(
        ((rank, one.step), us) for one in communication for rank, us in zip(one.ranks, one.waits_us, strict=True)
    )
    ranks = [one.rank for one in summary.ranks]
    waited = [[round(float(waits[rank, name]), 3) for name in summary.steps] for rank in ranks]
    return {
        "ranks": ranks,
        "us": [[times.get((rank, name)) for name in summary.steps] for rank in ranks],
        "waited_us": waited if communication else None,
    }


def _rows(
    summary: RanksSummary, traces: Sequence[RankTrace], lanes: dict, collectives: Sequence[Collective]
) -> dict[int, list[tuple[Slice, int]]]:
    """Return the slices by rank on the common clock.

    They are the compute of the drawn step, below it the collectives and receives, and below these the sends, which may
    run beside them.
    """
    ahead = {rank: round(us * 1000) for rank, us in summary.clocks.ahead_us.items()}
    origin = min((one.start - ahead[one.rank] for one in traces if one.rank in lanes), default=0)
    found: dict[int, list[tuple[Slice, int]]] = {one.rank: [] for one in summary.ranks}
    for rank, lane in lanes.items():
        for start, end, name in lane.pieces if rank in found else ():
            at = start - ahead[rank] - origin
            found[rank].append((Slice(name or "compute", "phase", at, end - start, (), b""), 0))
    for one in collectives:
        told = {
            "collective": one.kind, "group": one.group, "step": one.step, "bytes": one.bytes,
            "last to arrive": f"rank {one.last}", "bus GB/s": one.bus_gb_s,
        }  # fmt: skip
        told = {name: value for name, value in told.items() if value is not None}
        for rank, *times in zip(one.ranks, one.starts_us, one.waits_us, one.took_us, strict=True):
            start, waited, took = (round(us * 1000) for us in times)
            raw = json.dumps({**told, "waited, µs": round(waited / 1e3, 3)}).encode()
            sends = one.kind == "send" and rank == one.ranks[0]
            name, depth = "receive" if one.kind == "send" and not sends else one.kind, 2 if sends else 1
            if waited > 0:
                found[rank].append((Slice(f"waits for rank {one.last}", "wait", start, waited, (), raw), depth))
            found[rank].append((Slice(name, "collective", start + waited, max(0, took - waited), (), raw), depth))
    return {rank: sorted(rows, key=lambda row: row[0].start) for rank, rows in found.items()}


def _steps(names: Sequence[str], collectives: Sequence[Collective], rows: dict, lanes: dict, zero: int) -> list[dict]:
    """Return each step's start and end on the common clock, around its collectives and the drawn compute."""
    slices = ((lane.step, one) for rank, lane in lanes.items() for one, _ in rows.get(rank, ()) if one.kind == "phase")
    spans = [(step, (one.start, one.end)) for step, one in slices]
    for one in collectives:
        end = max(start + took for start, took in zip(one.starts_us, one.took_us, strict=True))
        spans.append((one.step, (round(min(one.starts_us) * 1000), round(end * 1000))))
    edges = {name: list(zip(*some, strict=True)) for name, some in grouped(spans).items()}
    bounds = {name: (min(starts) - zero, max(ends) - zero) for name, (starts, ends) in edges.items()}
    return [{"name": name, "start": bounds[name][0], "end": bounds[name][1]} for name in names if name in bounds]
