"""A Summary and its findings as a JSON document: all of it, the members of some sections, or the short form."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from heapq import nlargest
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict, fields

from tracereader.changes.catalogue import opportunities
from tracereader.figures import Summary
from tracereader.figures.series import series
from tracereader.figures.starts import starts
from tracereader.figures.table import profiler_table
from tracereader.findings import cheatsheet, steps
from tracereader.findings.finding import Prediction
from tracereader.replay import Refused
from tracereader.show import warnings
from tracereader.show.text import strict_json
from tracereader.show.view import View
from tracereader.trace import Trace
from tracereader.trace.facts import as_stored
from tracereader.trace.kernel_names import cut, labels

# The members that each section of the report shows; of the other sections, the member of the same name.
SECTION_KEYS = {
    "try": ("opportunities", "opportunities_refused"),
    "short": ("waits_for", "waits_because", "gpu", "families", "captures", "decoding",
              "communication"),
    "steps": ("steps", "left_out", "cpu_us"),
    "gpu": ("gpu", "families", "step_gpu", "idle_in", "idle_python", "by_label", "by_phase", "by_module",
            "by_module_class"),
    "training": ("training", "by_label", "by_phase", "by_module", "by_module_class"),
    "cpu": ("ops", "inputs", "runtime", "cpu_work"),
    "work": ("gpu_work",),
    "names": ("gpu_work",),
    "chain": ("label", "chain"),
    "patterns": ("patterns", "buffer_requests", "final_sync_us", "compiled_graphs", "graphs_of_steps",
                 "cache_lookups", "recompiled", "unfused", "hidden_copies", "mask_made", "cast_products"),
}  # fmt: skip
ALWAYS = ("version", "form", "trace", "devices", "backend", "rank", "world_size", "has_steps", "steps_by",
          "steps_end_with_it", "calls_in_a_step", "outside_us", "shapes_recorded", "typical_step", "window_us",
          "recorded_step_us", "unprofiled_step_us", "unprofiled_cpu_us", "recording", "notes", "warnings",
          "busy_machine", "processes", "typical_index", "lesson")  # fmt: skip
# Raised when a documented name disappears or changes its meaning. 3: --json alone is the short form.
VERSION = 3
# The summary's parts whose fields are at the top level of the document.
FLAT = ("source", "places", "attention", "llm", "compiled", "profiler")
NAME = 160  # columns of a name in the short form; CUTLASS has names of more than a thousand


class Rows(NamedTuple):
    """What the short form has of a list, or of figures by name.

    most: the number of rows. fields: of a row; empty for all. by: the time (µs) whose largest rows are kept, in the
    order of the list, or the largest first if they are by name; "" for the first rows.
    """

    most: int
    fields: tuple[str, ...] = ()
    by: str = ""


PROPOSED = Rows(8, ("change", "title", "step_us", "step_us_after", "saves_us", "basis", "evidence", "try",
                    "unprofiled_step_us", "unprofiled_step_us_after", "estimated_savings", "needs_other_ranks",
                    "conditional"))  # fmt: skip
# The members of the short form in its order; None for a whole one.
SHORT: dict[str, Rows | None] = {
    **dict.fromkeys([*ALWAYS[: ALWAYS.index("recording")], "waits_for", "waits_because", "notes", "busy_machine"]),
    "warnings": Rows(8),
    "opportunities": PROPOSED,
    "opportunities_refused": None,
    "patterns": Rows(12, ("name", "figure", "change")),
    "steps": Rows(10, ("name", "cpu_us", "gpu_busy_us", "launches", "gpu_idle_share", "cause"), "cpu_us"),
    "gpu": None,
    "families": Rows(8, by="us"),
    "kernels": Rows(10, ("name", "family", "asked_by", "count", "total_us", "share", "median_us"), "total_us"),
    "ops": Rows(10, ("calls", "total_us", "self_us"), "self_us"),
    "communication": None,
    "communication.collectives": Rows(6),
    "recording": None,
    "recording.left_out": Rows(10),
    "recording.lost_calls": Rows(10),
    "processes": Rows(8),
}


def as_json(trace: Trace, summary: Summary, predictions: Sequence[Prediction], view: View, short: bool = False) -> str:
    """Return one JSON document: times in µs, shares from 0 to 1. short: the short form, unless `view` asks for more."""
    form = form_of(view, short)
    sections = [*ALWAYS, *(key for one in view.only or () for key in SECTION_KEYS.get(one, (one,)))]
    wanted = {"short": SHORT, "sections": sections}.get(form)
    document = {"version": VERSION, "form": form, "lesson": None} | asdict(summary)
    for part in map(document.pop, FLAT):
        document |= {field.encode_name: getattr(part, field.name) for field in fields(part)}
    del document["facts"]  # stored facts keep the form that they have in the trace
    if not document["inside"]:
        del document["inside"]  # of most traces: no kernel recorded its phases
    stored = as_stored(summary.source.facts)
    if stored["script"]:
        document["lesson"] = {name: stored[name] for name in ("script", "flags", "facts")}
    if summary.recording.incomplete:
        document["recorded_step_us"] = None
    document["steps"] = [msgspec.to_builtins(step) | {"cause": steps.cause(summary, step)} for step in summary.steps]
    document["warnings"] = [*warnings.of_folder(view.left_out), *warnings.of(summary)]
    document["notes"] = steps.of_recording(summary)
    document["busy_machine"] = steps.busy_machine(summary)
    document["waits_because"] = steps.waiting(summary)[1]
    document["patterns"] = [
        {key: getattr(one, key) for key in ("name", "where", "see", "means")}
        | {"figure": verdict.evidence, "change": one.change or None}
        for one, verdict in cheatsheet.found(summary)
    ]
    document["predictions"] = [
        {"prediction": one.text, "holds": verdict.holds, "evidence": verdict.evidence, "why_not": verdict.why_not}
        for one in predictions
        for verdict in (one.ask(summary),)
    ]
    step = trace.steps[summary.typical_index]
    # These are measured only if they are wanted.
    cpu = document.pop("cpu")
    document |= {name: partial(getattr, cpu, name) for name in cpu.FIELDS} | {
        "table": partial(profiler_table, trace),
        "starts": partial(starts, trace, step),
        "series": partial(series, trace, step, summary.left_out),
    }
    if wanted is None or "opportunities" in wanted:
        changes = opportunities(trace, summary)
        refused = isinstance(changes, Refused)
        document["opportunities"] = [] if refused else changes
        document["opportunities_refused"] = str(changes) if refused else None
    return written(document, wanted)


def form_of(view: View, short: bool) -> str:
    """Return the form of a document, as it says itself. short: whether the short form is asked for."""
    return "sections" if view.only else "short" if short and not view.all else "all"


def written(document: Mapping[str, object], wanted: Iterable[str] | None) -> str:
    """Return the JSON of the wanted members; None for all. A callable is called for its value.

    wanted: for the short form the Rows of each, in the order of the document.
    """
    names = document.keys() if wanted is None else [name for name in wanted if name in document]
    values = ((name, document[name]) for name in names)
    found = {name: value() if callable(value) else value for name, value in values}
    if not isinstance(wanted, Mapping):
        return strict_json(found)
    found, more = msgspec.to_builtins(found), {}
    for path, rows in wanted.items():
        *around, name = path.split(".")
        holder = found[around[0]] if around else found
        if rows is not None and holder is not None:
            holder[name], left_out = _few(holder[name], rows)
            more |= {path: left_out} if left_out else {}
    return strict_json(found | {"more": more})


def _few(found: list | dict, rows: Rows) -> tuple[list | dict, dict | None]:
    """Return the rows that the short form keeps, and the number and the summed time of the others; None without any."""
    keys = list(found) if isinstance(found, dict) else range(len(found))
    chosen = nlargest(rows.most, keys, key=lambda key: found[key][rows.by]) if rows.by else keys[: rows.most]
    if isinstance(found, dict):
        kept = {name: _brief(found[key], rows) for key, name in labels(chosen, NAME, cut).items()}
    else:
        kept = [_brief(found[key], rows) for key in sorted(chosen)]
    others = [found[key] for key in {*keys} - {*chosen}]
    time = {"us": math.fsum(one[rows.by] for one in others)} if rows.by else {}
    return kept, {"rows": len(others)} | time if others else None


def _brief(row: object, rows: Rows) -> object:
    """Return a row with the fields that the short form keeps, its name not too long."""
    if not isinstance(row, dict):
        return row
    kept = {name: value for name, value in row.items() if name in (rows.fields or row)}
    return kept | {"name": cut(kept["name"], NAME)} if "name" in kept else kept
