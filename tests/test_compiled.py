"""The report on torch.compile's own rows, checked on small synthetic traces."""

import json

import pytest
from raw_events import event

from tracereader import cli, expect
from tracereader.figures import summarize
from tracereader.trace import read
from tracereader.two_runs import compare, sentences

LOOKUP, PROLOGUE = "TorchDynamo Cache Lookup", "AOTDispatcher Runtime Wrapper Prologue"
CACHED = f"{LOOKUP} in every step"
STEP_US = 1000


def region(number):
    return f"Torch-Compiled Region: {number}/0"


def graph(of):
    return f"## Call CompiledFxGraph {of} ##"


def made(tmp_path, *steps, name="made.json"):
    """Return a trace with these slices in each of its steps: name, start and duration (µs)."""
    events = []
    for number, slices in enumerate(steps):
        start = number * STEP_US
        events.append(event(f"ProfilerStep#{number + 2}", "user_annotation", start, STEP_US - 1))
        events += [event(text, "cpu_op", start + ts, dur) for text, ts, dur in slices]
    file = tmp_path / name
    file.write_text(json.dumps({"traceEvents": events}))
    return file


def printed(capsys, *words):
    assert cli.main([*map(str, words)]) == 0
    return " ".join(capsys.readouterr().out.split())


def own_us(slices, *starts):
    """Return the time in slices of these names, where each microsecond counts for the innermost slice."""
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


def test_nested_regions_and_ops_between_graphs_count_once(tmp_path, capsys):
    """After a graph break the rest is a separate region inside the first one, after the ops that run eagerly."""
    lookup = sum(dur for name, _, dur in BROKEN if name == LOOKUP)
    own = own_us(BROKEN, LOOKUP, "Torch-Compiled Region", "Pregraph", "AOTDispatcher")
    assert 0 < lookup < own < 400
    said = printed(capsys, made(tmp_path, *[BROKEN] * 3), "--only", "patterns")
    beside = f"with pregraph bytecode, prologues and the regions' self time it is {own:.1f} µs"
    assert f"{CACHED} ({lookup:.1f} of the step's CPU time of {STEP_US - 1} µs; {beside})" in said


def test_the_cost_of_torch_compile_is_its_own_time(tmp_path, capsys):
    """Only the self time of torch.compile's rows counts, without ops between two graphs."""
    lean = [
        (LOOKUP, 1, 4), (region("0"), 10, 980), (graph("faa"), 12, 24), ("aten::sort", 37, 900),
        (LOOKUP, 940, 4), (region("1"), 945, 44), (graph("fbb"), 947, 41),
    ]  # fmt: skip
    assert 0 < own_us(lean, LOOKUP, "Torch-Compiled Region") < 0.05 * STEP_US
    for calls in (lean, BROKEN):
        us = own_us(calls, LOOKUP, "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher")
        said = printed(capsys, made(tmp_path, *[calls] * 3), "--only", "patterns")
        assert CACHED in said and f"{us:,.1f}" in said


def called(of, number="0"):
    """Return the slices of one compiled graph's call in a step."""
    return [(LOOKUP, 1, 9), (region(number), 10, 400), (PROLOGUE, 14, 5), (graph(of), 20, 300)]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([called("faa")] * 3, "1 graph hash in 3 steps"),
        (
            [called("faa") + called("fbb", "1")] * 3,
            "2 graph hashes in 3 steps, the same in each",
        ),  # forward and backward
        # Two functions, taken in turn.
        ([called("faa"), called("fbb", "1"), called("faa")], "2 graph hashes in 3 steps, not the same in each"),
        ([called("faa"), called("faa"), []], "1 graph hash in 3 steps, not the same in each"),
        ([called("faa")], "1 graph hash in 1 step"),
        ([[("aten::add", 1, 9)]] * 3, "0 graph hashes in 3 steps"),
    ],
)
def test_all_steps_call_the_same_graph(tmp_path, steps, says):
    verdict = expect.compiled_rows().ask(summarize(read(made(tmp_path, *steps))))
    assert verdict.evidence.split("; ")[0] == says


def test_another_graph_in_one_step_contradicts_the_prediction(tmp_path):
    """A step that calls no graph contradicts it, too."""
    judged = {}
    for name, steps in {"same": ["faa"] * 3, "other": ["faa", "fbb", "faa"], "none": ["faa", None, "faa"]}.items():
        file = made(tmp_path, *[called(one) if one else [] for one in steps])
        judged[name] = expect.compiled_rows().ask(summarize(read(file)))
    assert {name: one.holds for name, one in judged.items()} == {"same": True, "other": False, "none": False}
    assert judged["same"].evidence == "1 graph hash in 3 steps"
    assert judged["other"].evidence == "2 graph hashes in 3 steps, not the same in each"
    assert judged["none"].evidence == "1 graph hash in 3 steps, not the same in each"


def changed(*files):
    return sentences.difference(*(compare.Side(summarize(read(file))) for file in files)).changed


@pytest.mark.parametrize(("last", "said"), [(called("faa"), True), ([("aten::add", 1, 9)], False)])
def test_every_step_has_a_cache_lookup(tmp_path, capsys, last, said):
    file = made(tmp_path, called("faa"), called("faa"), last)
    assert (CACHED in printed(capsys, file, "--only", "patterns")) is said


def test_the_graphs_of_two_compiled_runs_are_compared(tmp_path):
    """A graph on the CPU shows none of the ops that it computes, so equal rows do not mean equal work."""
    hashes = ["fqb7xds7omh4v6hwlsk2ka6bz6", "f6bjdgkszm3r7mk4oxv2uqyjgt", "fjhrkszm3r7mk4oxv2uqyjgtaa"]
    first, other, third = (
        made(tmp_path, *[called(one)] * 3, name=f"{number}.json") for number, one in enumerate(hashes)
    )
    differs = f"the compiled graph has another hash: {hashes[0][:12]}…, then {hashes[1][:12]}…"
    assert changed(first, other) == (differs,)
    assert changed(first, first) == ()
    both = made(tmp_path, *[called(hashes[0]) + called(hashes[2], "1")] * 3, name="both.json")
    two = ", ".join(f"{one[:12]}…" for one in sorted([hashes[0], hashes[2]]))
    assert changed(third, both)[-1] == f"the compiled graphs have other hashes: {hashes[2][:12]}…, then {two}"
    eager = made(tmp_path, *[[("aten::add", 1, 9)]] * 3, name="eager.json")
    assert "hash" not in " ".join(changed(eager, other))
