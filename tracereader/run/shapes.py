"""Gives a trace without shapes those of another recording of the same program.

To record shapes makes steps on a CPU longer, up to several times. So record-trace records such a program twice.
"""

import gzip
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from tracereader.show.atomic import replace
from tracereader.trace.grouped import grouped

KEYS = "Input Dims", "Input type", "Input Strides", "Concrete Inputs"
# If shapes do not make steps longer than this, the recording with them will do.
LONGER = 1.1

Event = dict[str, object]
Lanes = list[list[Event]]  # the ops of each thread in a step


def put_into(trace: Path, other: Path) -> None:
    """Give a trace the shapes of the other one. It becomes the other one if they do not fit, or made no step longer.

    They fit if all steps of the other trace with the same ops, in the same order, have the same shapes. So a program
    whose batches differ in length keeps the recording that has its own.
    """
    first, second = (msgspec.json.decode(content(one)) for one in (trace, other))
    steps, shaped = list(ops_by_step(first)), list(ops_by_step(second))
    with_shapes = second
    if steps and shaped and _median_us(shaped) > LONGER * _median_us(steps):
        by_ops = grouped((_names(lanes), _shapes(lanes)) for _, lanes in shaped)
        fitting = [by_ops[_names(lanes)] for _, lanes in steps]
        if all(some and all(one == some[0] for one in some) for some in fitting):
            with_shapes = first | {"record_shapes": 1}
            for (_, lanes), (some, *_) in zip(steps, fitting, strict=True):
                for lane, of_lane in zip(lanes, some, strict=True):
                    for op, known in zip(lane, of_lane, strict=True):
                        op["args"] = {**op.get("args", {}), **known}
    with_shapes |= {name: value for name, value in first.items() if name.startswith("unprofiled")}
    write(trace, with_shapes)


def write(trace: Path, document: Mapping[str, object]) -> None:
    """Replace a trace at once, compressed if its name says so."""
    data = msgspec.json.encode(document)
    replace(trace, gzip.compress(data, 5) if trace.suffix == ".gz" else data)


def content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def ops_by_step(trace: Mapping[str, object]) -> Iterator[tuple[float, Lanes]]:
    """Yield the time (µs) of each step and the ops that begin in it, by their threads."""
    events = [one for one in trace["traceEvents"] if one.get("ph") == "X"]
    ops = sorted((one for one in events if one.get("cat") == "cpu_op"), key=lambda one: (one["ts"], -one["dur"]))
    marks = [one for one in events if one.get("cat") == "user_annotation" and one["name"].startswith("ProfilerStep#")]
    place = 0
    for mark in sorted(marks, key=lambda one: one["ts"]):
        found, end = grouped(()), mark["ts"] + mark["dur"]
        while place < len(ops) and ops[place]["ts"] < end:
            if ops[place]["ts"] >= mark["ts"]:
                found[ops[place]["tid"]].append(ops[place])
            place += 1
        yield mark["dur"], list(found.values())


def _median_us(steps: list[tuple[float, Lanes]]) -> float:
    return statistics.median(us for us, _ in steps)


def _names(lanes: Lanes) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(op["name"] for op in lane) for lane in lanes)


def _shapes(lanes: Lanes) -> list[list[dict[str, object]]]:
    return [[{key: op["args"][key] for key in KEYS if key in op.get("args", {})} for op in lane] for lane in lanes]
