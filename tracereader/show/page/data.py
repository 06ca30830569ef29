"""The figures of a page, from the Summary. Only this module of the page uses the Summary's attributes.

It measures nothing that the report or --json measures. The browser computes no figures; it sorts, filters and draws
these. Times are in µs, shares from 0 to 1.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tracereader import __version__
from tracereader.changes.opportunity import Opportunity
from tracereader.figures import Summary, flame
from tracereader.figures.gpu_work import GpuWork, numbered
from tracereader.figures.hardware import common_peaks
from tracereader.figures.places import NUMBER, by_module_path
from tracereader.findings import cheatsheet, communication, recording, steps
from tracereader.findings.finding import Prediction, counted, family_in_words
from tracereader.findings.gpu_work import overlap
from tracereader.replay import Refused
from tracereader.show import warnings
from tracereader.show.text import capitalized
from tracereader.show.work import attention_in_words, product_in_words
from tracereader.trace import Step, Trace, Work
from tracereader.trace.families import says
from tracereader.trace.grouped import grouped, totals
from tracereader.trace.kernel_names import labels
from tracereader.trace.processes import some_of

NAME_SHOWN = 72  # characters of a name in a table; a click shows all of it
NAME_IN_A_SLICE = 48
# The depth of the tree of modules. Deeper modules count for their ancestor at this depth. Models nest ten deep.
DEEPEST_MODULE = 100
# A path of a file with at least two folders.
PATH = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][\w.@+~-]+){2,}")
MANY = 4  # modules of a class, such as layers, that fold into one row
OF_A_STEP = ("name", "number", "cpu_us", "gpu_busy_us", "gpu_span_us", "gpu_idle_share", "launches",
             "launch_to_start_us", "times_the_typical", "loading_us")  # fmt: skip
OF_A_KERNEL = ("family", "asked_by", "count", "total_us", "median_us", "low_us", "high_us", "share")


def figures(
    trace: Trace, summary: Summary, found: Sequence[Opportunity] | Refused, guesses: Sequence[Prediction]
) -> dict:
    """Return the page of one trace without its timeline."""
    step = trace.steps[summary.typical_index]
    return {
        "page": "trace",
        "version": __version__,
        "file": Path(summary.source.trace).name,
        "head": _head(summary),
        "opportunities": proposed(found),
        "guesses": [
            {"text": one.text, "holds": said.holds, "evidence": said.evidence}
            for one, said in ((guess, guess.ask(summary)) for guess in guesses)
        ],
        "patterns": [
            {**_named(one, ("where", "see", "means")), "figure": said.evidence}
            for one, said in cheatsheet.found(summary)
        ],
        "steps": _steps(summary),
        "time": _time(summary),
        "kernels": _kernels(summary),
        "ops": _ops(summary),
        "by_inputs": [
            msgspec.to_builtins(one) for one in summary.cpu.by_inputs if one.gpu_us or not summary.has_gpu_work
        ],
        "flames": msgspec.to_builtins({"calls": flame.of_ops(step), "Python functions": flame.of_python(trace, step)}),
        "modules": _modules(trace, summary, step),
        "memory": msgspec.to_builtins(summary.training.memory),
        "peak_bytes": summary.source.peak_bytes,
        "roofline": _roofline(summary),
    }


def _head(summary: Summary) -> dict:
    word, why = steps.waiting(summary)
    # The last one explains a GPU time below that is longer than the step's time.
    sentences = [why, recording.unprofiled(summary), steps.overlap_of_steps(summary)]
    sentences += map(capitalized, communication.in_words(summary))
    recorded = counted(len(summary.steps), "step") if summary.source.has_steps else "no profiler steps"
    facts = []
    if len(summary.source.devices) > 1:
        facts.append(f"{len(summary.source.devices)} GPUs")
    if summary.source.rank is not None:
        facts.append(f"rank {summary.source.rank} of {summary.source.world_size}")
    if summary.has_gpu_work:
        facts.append(f"{counted(summary.chosen.launches, 'launch', 'launches')} per step")
        facts.append(f"{counted(summary.count('kernel'), 'kernel')} per step")
    return {
        "device": ", ".join(dict.fromkeys(summary.source.devices)) or steps.without_activity(summary),
        "gpu": summary.has_gpu_work,
        "has_steps": summary.source.has_steps,
        "step_us": None if summary.recording.incomplete else summary.recorded_step_us,
        "unprofiled_us": summary.unprofiled_step_us,
        "cpu_us": summary.chosen.cpu_us,
        "gpu_us": summary.chosen.gpu_busy_us,
        "busy_share": summary.busy_share,
        "launches": summary.chosen.launches,
        "recorded": "; ".join(filter(None, [recorded + steps.by_calls(summary), steps.outside(summary)])),
        "step": summary.chosen.number,
        "step_name": summary.typical_step,
        "step_index": summary.typical_index,
        "regime": word + " while it is recorded" * recording.changes_the_regime(summary),
        "why": ". ".join(one.removesuffix(".") for one in sentences if one),
        "facts": facts,
        "script": summary.source.facts.script or None,
        "notes": steps.of_recording(summary),
        "warnings": warnings.of(summary),
        "busy": steps.busy_machine(summary),
        "left_out": [one.removeprefix("ProfilerStep") for one in summary.left_out],
    }


def proposed(found: Sequence[Opportunity] | Refused) -> dict:
    """Return the changes to try first, or why no saving can be computed."""
    if isinstance(found, Refused):
        return {"refused": str(found), "found": []}
    rows = [msgspec.to_builtins(one) | _named(one, ("share", "is_unknown")) for one in found]
    return {"refused": None, "found": rows}


def _steps(summary: Summary) -> list[dict]:
    return [
        _named(one, OF_A_STEP) | {"cause": steps.cause(summary, one) if one.times_the_typical is not None else None}
        for one in summary.steps
    ]


def _named(one: object, names: Iterable[str]) -> dict:
    return {name: getattr(one, name) for name in names}


def _time(summary: Summary) -> dict:
    """Return a step's time in parts that add up to it, and the GPU time by family, phase and annotation.

    The parts are the mean over the steady window, as in the report.
    """
    gpu, parts, count = summary.steady, [], max(1, len(summary.steady_steps))
    if gpu:
        parts = [
            {"name": steps.PARTS.get(key, key), "key": key, "us": us / count}
            for key, us in (("compute", gpu.compute_us), *steps.parts_besides_compute(gpu).items())
            if us
        ]
    return {
        "window_us": summary.window_us,
        "several": len(summary.source.devices) > 1,
        "overlap": overlap(summary) if summary.has_gpu_work else False,
        "parts": parts,
        "families": [{**msgspec.to_builtins(one), "name": family_in_words(one.family)} for one in summary.families],
        "idle_in": [{"name": name, "us": us} for name, us in summary.idle_in.items()],
        "by_phase": msgspec.to_builtins(summary.places.by_phase),
        "by_label": msgspec.to_builtins(summary.places.by_label),
    }


def _kernels(summary: Summary) -> list[dict]:
    """Return the GPU activities of all steps by name. Rates are of the reported step, if its sizes are known."""
    by_name = grouped((one.name, one) for one in summary.gpu_work)
    shown = labels([one.name for one in summary.kernels], NAME_SHOWN)
    return [
        {
            "name": one.name,
            "short": shown[one.name],
            "decoded": str(by_name[one.name][0].says) if one.name in by_name else "",
            **_named(one, OF_A_KERNEL),
            **_rates(by_name[one.name]),
        }
        for one in summary.kernels
    ]


def _rates(pieces: Sequence[GpuWork]) -> dict:
    """Return mean rates, weighted by time, over the activities that have one. roof: the limit of most of that time."""
    known = [one for one in pieces if one.of_roof is not None]
    roofs = totals((one.roof, one.us) for one in known)
    return {
        "tflops": _mean(pieces, "tflops"),
        "gb_s": _mean(pieces, "gb_s"),
        "of_roof": steps.reached(known) if known else None,
        "roof": max(roofs, key=roofs.get) if known else None,
    }


def _mean(pieces: Sequence[GpuWork], rate: str) -> float | None:
    known = [(getattr(one, rate), one.us) for one in pieces if getattr(one, rate) is not None]
    time = sum(us for _, us in known)
    return sum(value * us for value, us in known) / time if time else None


def _ops(summary: Summary) -> list[dict]:
    return [
        {"name": name, "kind": kind, **msgspec.to_builtins(one)}
        for kind, table in (("op", summary.cpu.ops), ("runtime", summary.cpu.runtime))
        for name, one in sorted(table.items(), key=lambda item: -item[1].self_us)
    ]


def _modules(trace: Trace, summary: Summary, step: Step) -> dict:
    """Return the tree of modules with self time and total time, the largest first."""
    root: dict = {"children": {}}
    for path, (ns, pieces) in by_module_path(trace, step).items():
        node = root
        for name in path[:DEEPEST_MODULE]:
            node = node["children"].setdefault(name, {"self_us": 0.0, "pieces": 0, "children": {}})
        node["self_us"] += ns / 1e3
        node["pieces"] += pieces
    return {
        "on_gpu": bool(step.work),
        "tree": _summed(root)["children"],
        "classes": msgspec.to_builtins(summary.places.by_module_class),
    }


def _summed(root: dict) -> dict:
    """Return the tree with total times, as lists sorted by them. This does not recurse, as modules nest deeply."""
    order, stack = [], [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node["children"].values())
    for node in reversed(order):
        below = [{"name": name, **child} for name, child in node["children"].items()]
        node["children"] = _folded(sorted(below, key=lambda child: -child["total_us"]))
        node["total_us"] = node.get("self_us", 0.0) + sum(child["total_us"] for child in below)
    return root


def _folded(modules: Sequence[dict]) -> list[dict]:
    """Return sibling modules, the largest first, with those of a class that has many below one row."""
    rows = []
    for name, some in grouped((NUMBER.sub("", one["name"]), one) for one in modules).items():
        if len(some) < MANY:
            rows += some
            continue
        total = sum(one["total_us"] for one in some)
        rows.append(
            {"name": f"{len(some):,} x {name}", "self_us": 0.0, "pieces": 0, "children": some, "total_us": total}
        )
    return sorted(rows, key=lambda one: -one["total_us"])


def _roofline(summary: Summary) -> dict | None:
    """Return the kernels of known FLOPs and bytes, equal ones together, and the device's peaks; None without peaks."""
    peaks = common_peaks(summary.source.devices) if summary.source.devices else None
    if peaks is None:
        return None
    known = [one for one in summary.kernels_of_step if one.flops and one.bytes_moved and one.tflops]
    equal = grouped(((one.name, one.flops, one.bytes_moved), one) for one in known)
    shown = labels([one.name for one in summary.kernels], NAME_SHOWN)
    return {
        "peaks": msgspec.to_builtins(peaks),
        "device": summary.source.devices[0],
        "placed": len(known),
        "of": len(summary.kernels_of_step),
        "placed_us": sum(one.us for one in known),
        "summed_us": summary.summed_us,
        "points": [
            {
                "name": name,
                "short": shown[name],
                "family": some[0].family,
                "count": len(some),
                "us": sum(one.us for one in some),
                "intensity": flops / moved,
                "says": _size_in_words(some[0]),
                **_rates(some),
            }
            for (name, flops, moved), some in sorted(equal.items(), key=lambda item: -sum(one.us for one in item[1]))
        ],
    }


def _size_in_words(one: GpuWork) -> str | None:
    if one.product:
        return product_in_words(one.product)
    return attention_in_words(one.attention) if one.attention else None


def decoded_names(trace: Trace) -> dict[str, str]:
    """Return the decoded name of each GPU activity, by name."""
    firsts: dict[str, Work] = {}
    for one in trace.work:
        firsts.setdefault(one.name, one)
    return {name: str(says(one)) for name, one in firsts.items()}


def pieces(summary: Summary) -> list[dict]:
    """Return the details of the step's GPU activities beyond their arguments: size, rate, op and layer."""
    return [
        {
            **_named(one, ("us", "asked_by", "layer")),
            "size": _size_in_words(one),
            **_named(one, ("tflops", "gb_s", "roof", "of_roof")),
            "occupancy": one.occupancy.limit if one.occupancy else None,
        }
        for one in summary.gpu_work
    ]


def described(slices: dict, decoded: dict[str, str], pieces: Sequence[dict], step: str) -> dict:
    """Return the description of the timeline's columns, completed with decoded names and details of GPU activities."""
    return {**slices, "decoded": decoded, "shown": labels(decoded, NAME_IN_A_SLICE), "pieces": pieces, "step": step}


def holds(hosts: Iterable[str | None], slices: dict) -> list[str]:
    """Return descriptions of content that the user may not want to share: host names, and paths in the slices."""
    names = [host for host in dict.fromkeys(hosts) if host]
    found = [f"the host name {host}" for host in names] if len(names) == 1 else []
    if len(names) > 1:
        found = [f"{counted(len(names), 'host name')}: {some_of(names)}"]
    texts = [*slices["names"], *map(str, slices["arguments"])]
    paths = dict.fromkeys(path for text in texts for path in PATH.findall(text))
    if paths:
        found.append(f"{counted(len(paths), 'file path')}: {some_of(list(paths))}")
    return found


def numbers_of_pieces(trace: Trace, summary: Summary) -> dict[int, int]:
    """Return by the id of a GPU activity its position in the Summary's gpu_work, from 1 up."""
    places = {key: number for number, (key, _) in enumerate(numbered(trace.steps[summary.typical_index].work), 1)}
    return {id(one): places[key] for some in trace.steps for key, one in numbered(some.work) if key in places}
