"""What each op reads and makes: how record-trace finds it, and what the reader concludes from it.

The trace is of eight passes over a state on a CPU, recorded with record-trace. Each pass computes a product of the
same tensors again, takes its part of an input, and computes an output that no later pass takes.
"""

import itertools
import random

import msgspec
import pytest
import torch
from conftest import ROOT
from cpu_programs import OBSERVED, record
from raw_events import end, raw_steps
from test_later_workloads import edited
from test_loops import without_data_flow
from test_opportunities import priced_changes, raw_events
from test_record_trace import recorded

from tracereader.changes.equal_passes import Loop, _proposed
from tracereader.figures.data_flow import calls_with_flow, computed_again, parts_without_other_passes
from tracereader.run import flow
from tracereader.run.inside.observing import Observer
from tracereader.trace import read

STATE = ROOT / "tests/traces/cpu/data_flow/state.json.gz"
PASSES = 8


def last_step():
    """Return the ops of the last step that read or make tensors, by start, and its trace."""
    events = raw_events(STATE)
    mark = raw_steps(events)[-1]
    ops = [e for e in events if e.get("cat") == "cpu_op" and mark["ts"] <= e["ts"] < end(mark)]
    return sorted((e for e in ops if "Makes" in e["args"]), key=lambda e: e["ts"]), read(STATE).steps[-1]


def test_a_product_of_the_same_tensors_is_found_in_all_passes_but_the_first_one():
    ops, step = last_step()
    linears = [e for e in ops if e["name"] == "aten::linear"]
    by_inputs = {}
    for e in linears:
        by_inputs.setdefault(tuple(e["args"]["Reads"]), []).append(e)
    (again,) = [some for some in by_inputs.values() if len(some) > 1]
    assert len(again) == PASSES and len(linears) == 3 * PASSES
    assert [op.name for op in computed_again(step)] == ["aten::linear"] * (PASSES - 1)
    found = priced_changes(STATE)["compute_once"]
    assert found.saves_us > sum(e["dur"] for e in again[1:]) and "GPU" not in found.evidence


def test_what_feeds_a_state_and_what_it_feeds_are_told_apart():
    ops, step = last_step()
    made = {version: e for e in ops for version in e["args"]["Makes"]}
    after, before = parts_without_other_passes(step)
    assert (after.before, before.before) == (False, True) and not after.whole and not before.whole
    assert [len(part.ops) for part in (after, before)] == [PASSES, PASSES]
    assert [op.name for op in after.ops[0]] == ["aten::sigmoid", "aten::linear", "aten::relu", "aten::mean"]
    assert [op.name for op in before.ops[0]] == ["aten::linear", "aten::select"]
    states = [e for e in ops if e["name"] == "aten::tanh"]
    for one, two in itertools.pairwise(states):  # each state comes from the one before it
        pending, found = [two], False
        while pending:
            sources = [made[version] for version in pending.pop()["args"]["Reads"] if version in made]
            found |= one in sources
            pending += [e for e in sources if e["ts"] > one["ts"]]
        assert found


def test_a_trace_without_data_flow_has_no_such_parts(tmp_path):
    file = edited(STATE, tmp_path, without_data_flow)
    step = read(file).steps[-1]
    assert calls_with_flow(step) == parts_without_other_passes(step) == computed_again(step) == []
    assert "compute_once" not in priced_changes(file)


def observe(file, *steps):
    observer = Observer(torch, str(file))
    for number, step in enumerate(steps):
        if number:
            observer.begin_step()
        step()
    observer.end()


def observed(tmp_path, *steps):
    """Return the flow of each step's ops on the program's thread that read or make tensors."""
    file = tmp_path / "observed.json"
    observe(file, *steps)
    found = flow.flows(msgspec.json.decode(file.read_bytes(), type=flow._Trace).nodes)
    return [of_step[0] for of_step in found]


def named(flows, name):
    return [one for its_name, one in flows if its_name == f"aten::{name}" and (one.reads or one.makes)]


EXPECTED = {
    "times": {"whole": "conv2d relu conv2d relu"},
    "times_with_layers": {"whole": "linear tanh linear tanh"},
    "last_result_without_gradients": {"after": "add conv2d relu conv2d relu"},  # no pass takes what is kept
    "state_of_an_encoder": {"before": "conv2d relu conv2d relu"},
    "layers_around_a_cell": {"before": "linear relu linear", "after": "linear tanh linear tanh"},
    "layers_under_autocast": {"before": "linear tanh linear tanh", "after": "linear to"},
    "losses_in_each_pass": {"before": "linear relu", "after": "linear mse_loss add"},
    "scores_subtracted": {"before": "matmul matmul linear relu", "after": "linear sigmoid sum sub_"},
    "image_fed_back": {"before": "conv2d relu"},  # and not the layer of the last image
    "state_without_its_history": {"before": "linear", "after": "linear"},
    "average_of_features": {"before": "linear mul"},
    "state_first": {"before": "linear"},
    "detached_state_first": {"before": "linear"},
    "centered_inputs": {"before": "mul"},
}  # of each pass, the ops that make something; all other programs hand on everything


@pytest.mark.parametrize("program", OBSERVED, ids=lambda program: program.__name__)
def test_only_what_needs_no_other_pass_is_a_part_of_its_own(program, tmp_path):
    step, trace = program(), tmp_path / "trace.json.gz"
    record(step, tmp_path / "trace.json")
    observe(tmp_path / "flow", step, step)
    flow.put_into(trace, tmp_path / "flow")
    found, last = {}, read(trace).steps[-1]
    making = {id(one.op) for one in calls_with_flow(last) if one.flow.makes}
    assert making
    for part in parts_without_other_passes(last):
        kind = "whole" if part.whole else "before" if part.before else "after"
        assert kind not in found and len(part.ops) == 12
        found[kind] = " ".join(op.name.removeprefix("aten::") for op in part.ops[0] if id(op) in making)
    assert found == EXPECTED.get(program.__name__, {})


@pytest.mark.parametrize(("changes", "is_known"), [(9, True), (300, False)])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_ops_that_differ_from_step_to_step_hide_the_others_only_if_they_are_most(
    tmp_path, changes, is_known, at_the_end
):
    """As random changes of images do."""
    program, number, image = OBSERVED[0](), itertools.count(), torch.ones(3, 3)

    def change():
        chosen = random.Random(next(number))
        for _ in range(changes):
            chosen.choice([image.flip, image.roll])(1, 0)

    def step():
        for one in (program, change) if at_the_end else (change, program):
            one()

    record(step, tmp_path / "trace.json")
    observe(tmp_path / "flow", step, step, step)
    flow.put_into(tmp_path / "trace.json.gz", tmp_path / "flow")
    last = read(tmp_path / "trace.json.gz").steps[-1]
    assert [part.whole for part in parts_without_other_passes(last)] == [True] * is_known
    assert bool(calls_with_flow(last)) == is_known


def test_a_thread_with_few_ops_is_not_like_one_that_begins_with_these():
    ops = [{"name": name} for name in ("aten::ones", "aten::add", "aten::mul")]
    observed = [(one["name"], flow.Flow([], [number])) for number, one in enumerate(ops)]
    assert flow._in_common(ops, [observed]) == list(zip(ops, observed, strict=True))
    assert flow._in_common(ops[:1], [observed]) == []


def test_writing_in_place_makes_new_contents(tmp_path):
    tensor, other = torch.zeros(4), torch.ones(4)

    def step():
        first = tensor.exp()
        tensor.add_(other)
        return first + tensor.exp()

    (flows,) = observed(tmp_path, step)
    before, after = named(flows, "exp")
    (adds,) = named(flows, "add_")
    assert before.reads == adds.reads[:1] and after.reads == adds.makes and not after.again


def test_random_numbers_and_empty_memory_are_never_the_same(tmp_path):
    def step():
        for _ in range(2):
            torch.rand(4).exp()
            torch.empty(4).cos()
            torch.ones(4).sin()

    (flows,) = observed(tmp_path, step)
    assert not any(one.again for name in ("rand", "exp", "empty", "cos") for one in named(flows, name))
    assert [bool(one.again) for name in ("ones", "sin") for one in named(flows, name)] == [False, True] * 2


def test_memory_that_python_fills_may_contain_anything(tmp_path):
    """torch.from_numpy calls lift_fresh, and nothing else. The array may have changed since."""
    tensor = torch.ones(4)

    def step():
        for _ in range(2):
            torch.ops.aten.lift_fresh(tensor).exp()

    (flows,) = observed(tmp_path, step)
    assert [one.again for one in named(flows, "exp")] == [[], []]


def test_parts_of_one_tensor_differ_by_their_place(tmp_path):
    tensor = torch.randn(3, 4)

    def step():
        for place in (0, 1, 0):
            tensor[place].exp()

    (flows,) = observed(tmp_path, step)
    assert [bool(one.again) for one in named(flows, "exp")] == [False, False, True]


def test_a_step_computes_again_what_the_step_before_has_computed_unless_it_is_new_data(tmp_path):
    def step():
        torch.arange(4).exp()
        torch.tensor([1.0, 2.0]).cos()

    _, flows = observed(tmp_path, step, step)
    (known,), (new,) = named(flows, "exp"), named(flows, "cos")
    assert known.again and max(known.again) < 0 and not new.again


def test_an_ops_number_counts_as_one_of_its_inputs(tmp_path):
    """torch gives an op such a number as a tensor, which may lie where the last pass's number lay."""
    context = torch.randn(4, 4)

    def step():
        for number in range(4):
            (context + number).exp()
            (context / 2.0).cos()
            (1 - context).sin()
            (context * torch.tensor(number, dtype=torch.double)).tan()  # Python may write into this tensor

    without, with_numbers = observed(tmp_path, step, step)
    again = {name: [bool(one.again) for one in named(with_numbers, name)] for name in ("exp", "cos", "sin", "tan")}
    assert again == {"exp": [False] * 4, "cos": [False, *[True] * 3], "sin": [False, *[True] * 3], "tan": [False] * 4}
    assert not any(one.again for name in ("exp", "cos", "tan") for one in named(without, name))


def test_a_programs_modes_outlive_the_one_that_observes(tmp_path):
    def modes():
        return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]

    before = modes()
    with torch.device("cpu"):
        its = modes()
        observe(tmp_path / "observed.json", dict, lambda: torch.ones(2) * 2)
        assert modes() == its
    observer = Observer(torch, str(tmp_path / "observed.json"))
    observer.begin_step()
    with torch.device("cpu"):
        observer.end()
        assert len(modes()) == len(before) + 2 and (torch.ones(2) * 2).sum() == 4
    torch._C._pop_torch_function_stack()
    assert modes() == before


@pytest.mark.parametrize("content", [b"", b"{}", b'{"nodes": [{"id": 1}]}', b'{"nodes": [', b"\xff"])
def test_a_trace_stays_as_it_is_if_the_observers_file_is_broken(tmp_path, content):
    trace, file = tmp_path / "trace.json.gz", tmp_path / "flow"
    trace.write_bytes(STATE.read_bytes())
    file.write_bytes(content)
    flow.put_into(trace, file)
    assert trace.read_bytes() == STATE.read_bytes()


def test_a_sentence_about_loops_counts_those_of_which_it_holds():
    several = [Loop((0, 1), 2, "reads"), Loop((3, 4, 5), 6, "reads"), Loop((7, 8), 9, "writes")]
    assert (
        _proposed(None, several, "").evidence == "each of 5 passes in 2 loops reads; the saving includes 1 other loop"
    )
    assert _proposed(None, several[:1], "").evidence == "each of 2 passes reads"


LOOP = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.key, self.cell = (torch.nn.Linear(64, 64) for _ in range(3))
    def forward(self, inputs, context):
        state = torch.zeros(64, device=DEVICE)
        for one in inputs:
            state = torch.tanh(self.cell(state) + torch.relu(self.layer(one)) + self.key(context).mean(0))
        return state
model, context = Model().to(DEVICE), torch.randn(32, 64, device=DEVICE)
with torch.no_grad():
    for step in range(1000):
        model(torch.tensor([[float(step + number)] * 64 for number in range(8)]).to(DEVICE), context)
"""


CUDA = pytest.param("cuda", PASSES, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("device", "count"), [("cpu", PASSES - 1), CUDA])
def test_record_trace_observes_a_loop(tmp_path, device, count):
    """A tensor of the CPU may have new contents in each step, so the step before says nothing about it."""
    found, traces = recorded(tmp_path, LOOP.replace("DEVICE", repr(device)))
    assert found.returncode == 0, found.stderr
    (name,) = traces
    step = read(tmp_path / name).steps[-1]
    again = [str(op.inputs.recorded[0]) for op in computed_again(step) if op.name == "aten::linear"]
    assert again.count("[32, 64]") == count and len(again) <= count + 1  # and the cell of the first state, on a GPU
    (before,) = parts_without_other_passes(step)
    assert before.before and not before.whole and len(before.ops) == PASSES
    assert {op.name for op in before.ops[0]} == {f"aten::{name}" for name in ("linear", "relu", "mean")}
