"""The figures of a page of one run's ranks: their steps beside each other, and who waits for whom."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tracereader import __version__
from tracereader.figures.rank import RankTrace
from tracereader.figures.ranks import RanksSummary
from tracereader.findings import ranks as findings
from tracereader.show.page import data
from tracereader.show.page.timeline import Packing


class _Slice(msgspec.Struct):
    """What the timeline draws of a rank. Times in ns."""

    name: str
    kind: str
    start: int
    dur: int
    raw: bytes = b""

    @property
    def end(self) -> int:
        return self.start + self.dur


def page(summary: RanksSummary, traces: Sequence[RankTrace]) -> tuple[dict, dict, list[bytes]]:
    """The figures, the description of the timeline's columns, and the columns."""
    lanes = {one.rank: one.lane for one in traces if one.path not in summary.not_read and one.lane}
    packing = Packing()
    rows = {one.rank: _rows(summary, one.rank, traces, lanes) for one in summary.ranks}
    zero = min((one.start for some in rows.values() for one, _ in some), default=0)
    for one in summary.ranks:
        host = f" on {one.host}" if len(summary.clocks.hosts) > 1 and one.host else ""
        packing.add("CPU", f"rank {one.rank}{host}", rows[one.rank], zero)
    slices, chunks = packing.packed({"steps": _steps(summary, rows, lanes, zero), "zero": zero})
    slices = data.described(slices, {}, [], "")
    straggler = findings.straggler(summary)
    figures = {
        "page": "ranks",
        "version": __version__,
        "file": f"{len(summary.ranks)} of {summary.world_size} ranks",
        "holds": data.holds([one.host for one in summary.ranks], slices),
        "device": summary.device,
        "on_gpu": summary.on_gpu,
        "world_size": summary.world_size,
        "in_short": findings.sentences(summary),
        "straggler": straggler.rank if straggler else None,
        "missing": summary.missing,
        "not_read": {Path(path).name: why for path, why in summary.not_read.items()},
        "drawn": next((one.step for one in lanes.values()), None),
        "ranks": [{**msgspec.to_builtins(one), "trace": Path(one.trace).name} for one in summary.ranks],
        "steps": summary.steps,
        "matched": [{**msgspec.to_builtins(one), "wait_us": max(one.waits_us, default=0.0)} for one in summary.matched],
        "unmatched": summary.unmatched,
        "kinds": msgspec.to_builtins(summary.kinds),
    }
    return figures, slices, chunks


def _rows(summary: RanksSummary, rank: int, traces: Sequence[RankTrace], lanes: dict) -> list[tuple[_Slice, int]]:
    """On the common clock: what a rank computes in the drawn step, and below it its collectives of all steps."""
    origin = min(
        (one.start - round(summary.clocks.ahead_us[one.rank] * 1000) for one in traces if one.rank in lanes), default=0
    )
    ahead = round(summary.clocks.ahead_us[rank] * 1000) + origin
    lane = lanes.get(rank)
    found = [
        (_Slice(name or "compute", "phase", start - ahead, end - start), 0)
        for start, end, name in (lane.pieces if lane else ())
    ]
    for one in summary.matched:
        if rank not in one.ranks:
            continue
        at = one.ranks.index(rank)
        start, waited, took = (round(some[at] * 1000) for some in (one.starts_us, one.waits_us, one.took_us))
        told = {
            "collective": one.kind,
            "group": one.group,
            "step": one.step,
            "bytes": one.bytes,
            "waited, µs": round(waited / 1e3, 3),
            "last to arrive": f"rank {one.last}",
            "bus GB/s": one.bus_gb_s,
        }
        raw = json.dumps({name: value for name, value in told.items() if value is not None}).encode()
        if waited > 0:
            found.append((_Slice(f"waits for rank {one.last}", "wait", start, waited, raw), 1))
        found.append((_Slice(one.kind, "collective", start + waited, max(0, took - waited), raw), 1))
    return sorted(found, key=lambda row: row[0].start)


def _steps(summary: RanksSummary, rows: dict, lanes: dict, zero: int) -> list[dict]:
    """Where the collectives of each step lie, and the computing that is drawn, on the common clock."""
    edges: dict[str, tuple[int, int]] = {}
    for rank, lane in lanes.items():
        drawn = [one for one, _ in rows.get(rank, ()) if one.kind == "phase"]
        if drawn:
            start, end = min(one.start for one in drawn) - zero, max(one.end for one in drawn) - zero
            before = edges.get(lane.step, (start, end))
            edges[lane.step] = min(before[0], start), max(before[1], end)
    for one in summary.matched:
        start = round(min(one.starts_us) * 1000) - zero
        end = round(max(a + b for a, b in zip(one.starts_us, one.took_us, strict=True)) * 1000) - zero
        before = edges.get(one.step, (start, end))
        edges[one.step] = min(before[0], start), max(before[1], end)
    return [{"name": name, "start": edges[name][0], "end": edges[name][1]} for name in summary.steps if name in edges]
