"""A Summary and its findings as a JSON document."""

from collections.abc import Sequence

import msgspec

from tracereader.changes.catalogue import opportunities
from tracereader.figures import Summary
from tracereader.figures.cpu import Cpu
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

# The parts of the summary that each section of the report shows.
SECTION_KEYS = {
    "try": ("opportunities", "opportunities_refused"),
    "short": ("waits_for", "waits_because", "gpu", "families", "captures", "decoding",
              "communication"),
    "table": ("table",),
    "predictions": ("predictions",),
    "steps": ("steps", "left_out", "cpu_us"),
    "gpu": ("gpu", "families", "step_gpu", "idle_in", "idle_in_graphs_us", "idle_python", "by_label", "by_phase",
            "by_module", "by_module_class"),
    "repeats": ("repeats",),
    "training": ("training", "by_label", "by_phase", "by_module", "by_module_class"),
    "kernels": ("kernels",),
    "cpu": ("ops", "inputs", "runtime", "cpu_work"),
    "work": ("gpu_work",),
    "names": ("gpu_work",),
    "starts": ("starts",),
    "counters": ("counters",),
    "inside": ("inside",),
    "series": ("series",),
    "chain": ("label", "chain"),
    "patterns": ("patterns", "buffer_requests", "overheads", "final_sync_us", "compiled_graphs",
                 "graphs_of_steps", "cache_lookups", "recompiled", "unfused", "hidden_copies", "mask_made",
                 "cast_products"),
}  # fmt: skip
ALWAYS = ("version", "trace", "lesson", "devices", "backend", "rank", "world_size", "has_steps", "steps_by",
          "steps_end_with_it", "processes", "calls_in_a_step", "outside_us", "shapes_recorded", "recording", "notes",
          "warnings", "busy_machine", "typical_step", "typical_index", "window_us", "recorded_step_us",
          "unprofiled_step_us")  # fmt: skip
# Raised when a documented name disappears or changes its meaning.
VERSION = 2
# The summary's parts whose fields are at the top level of the document.
FLAT = ("source", "cpu", "places", "attention", "llm", "compiled", "profiler")


def as_json(trace: Trace, summary: Summary, predictions: Sequence[Prediction], view: View) -> str:
    """Return one JSON document: times in µs, shares from 0 to 1."""
    measured = msgspec.to_builtins(summary, enc_hook=Cpu.fields)
    del measured["source"]["facts"]  # stored facts keep the form that they have in the trace
    stored = as_stored(summary.source.facts)
    if summary.counters is None:
        del measured["counters"]  # of most traces: nothing was sampled
    if not summary.inside:
        del measured["inside"]
    known = {name: stored[name] for name in ("script", "flags", "facts")} if stored["script"] else None
    document = {"version": VERSION, "lesson": known}
    for name, value in measured.items():
        document |= value if name in FLAT else {name: value}
    for step, row in zip(summary.steps, document["steps"], strict=True):
        row["cause"] = steps.cause(summary, step)
    document["warnings"] = [*warnings.of_folder(view.left_out), *warnings.of(summary)]
    if summary.recording.incomplete:
        document["recorded_step_us"] = None
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
    measured_here = {
        "table": lambda: profiler_table(trace),
        "starts": lambda: starts(trace, step),
        "series": lambda: series(trace, step, summary.left_out),
    }
    for section, measure in measured_here.items():
        if view.shows(section):
            document[section] = msgspec.to_builtins(measure())
    if view.shows("try"):
        changes = opportunities(trace, summary)
        refused = isinstance(changes, Refused)
        document["opportunities"] = [] if refused else msgspec.to_builtins(changes)
        document["opportunities_refused"] = str(changes) if refused else None
    if view.only:
        wanted = {*ALWAYS, *(key for section in view.only for key in SECTION_KEYS.get(section, ()))}
        document = {key: value for key, value in document.items() if key in wanted}
    return strict_json(document)
