"""What is said of torch.compile's own rows, against small made traces."""

import json

from tracereader import cli

LOOKUP, PROLOGUE = "TorchDynamo Cache Lookup", "AOTDispatcher Runtime Wrapper Prologue"
CACHED = f"{LOOKUP} in every step"
STEP_US = 1000


def region(number):
    return f"Torch-Compiled Region: {number}/0"


def graph(of):
    return f"## Call CompiledFxGraph {of} ##"


def made(tmp_path, *steps, name="made.json"):
    """A trace with these slices in each of its steps: name, start and duration (µs)."""
    events = []
    for number, slices in enumerate(steps):
        start = number * STEP_US
        events.append(slice_of(f"ProfilerStep#{number + 2}", "user_annotation", start, STEP_US - 1))
        events += [slice_of(text, "cpu_op", start + ts, dur) for text, ts, dur in slices]
    file = tmp_path / name
    file.write_text(json.dumps({"traceEvents": events}))
    return file


def slice_of(name, cat, ts, dur):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {}}


def printed(capsys, *words):
    assert cli.main([*map(str, words)]) == 0
    return " ".join(capsys.readouterr().out.split())


def own_us(slices, *starts):
    """Time in the slices of these names and in no other slice, microsecond by microsecond: the innermost has it."""
    us = 0
    for moment in range(STEP_US):
        around = [(dur, name) for name, ts, dur in slices if ts <= moment < ts + dur]
        us += bool(around) and min(around)[1].startswith(starts)
    return us


BROKEN = [
    (LOOKUP, 1, 9), (region("0"), 10, 900), ("Pregraph bytecode", 11, 2), (PROLOGUE, 14, 5), (graph("faa"), 20, 24),
    ("aten::sort", 50, 600), ("aten::arange", 60, 35), (LOOKUP, 660, 43), (region("1"), 710, 190),
    ("Pregraph bytecode", 712, 3), (PROLOGUE, 720, 15), ("CompiledFunction", 740, 80), (graph("fbb"), 745, 70),
]  # fmt: skip


def test_a_region_in_a_region_and_an_op_between_graphs_are_counted_once(tmp_path, capsys):
    """After a graph break the rest is a region of its own, within the first one, behind what runs eagerly."""
    lookup = sum(dur for name, _, dur in BROKEN if name == LOOKUP)
    own = own_us(BROKEN, LOOKUP, "Torch-Compiled Region", "Pregraph", "AOTDispatcher")
    assert 0 < lookup < own < 400
    said = printed(capsys, made(tmp_path, *[BROKEN] * 3), "--only", "patterns")
    beside = f"with pregraph bytecode, prologues and the regions' own time {own:.1f} µs"
    assert f"{CACHED} ({lookup:.1f} of the step's {STEP_US - 1}.0 µs; {beside})" in said


def test_what_it_costs_is_what_torch_compile_adds(tmp_path, capsys):
    """The answer names what costs more than a twentieth of the step: an op between two graphs is no such cost."""
    lean = [
        (LOOKUP, 1, 4), (region("0"), 10, 980), (graph("faa"), 12, 24), ("aten::sort", 37, 900),
        (LOOKUP, 940, 4), (region("1"), 945, 44), (graph("fbb"), 947, 41),
    ]  # fmt: skip
    assert 0 < own_us(lean, LOOKUP, "Torch-Compiled Region") < 0.05 * STEP_US
    assert CACHED not in printed(capsys, made(tmp_path, *[lean] * 3), "--only", "short")
    assert own_us(BROKEN, LOOKUP, "Torch-Compiled Region") > 0.05 * STEP_US
    assert CACHED in printed(capsys, made(tmp_path, *[BROKEN] * 3), "--only", "short")
