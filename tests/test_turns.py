"""Sequences, tasks and updates that take turns in a step, from raw events of benchmarks/pairs.

Without the profiler the steps took on an H200: chat_service (six chats) 72.4 ms, 13.4 as one batch, and 8.7 with a
cache of fixed size as a CUDA graph; story_writers (five stories) 10.0 and 2.6; federated_round (ten clients) 58.2 and
14.1; curves_of_tasks (six curves) 33.8, 12.1 at once and 2.1 as a CUDA graph; deep_ensemble 17.1 and 1.6 as a CUDA
graph; value_learning 9.3 and 1.2; lora_tuning 36.2, and 25.1 with TF32; cross_validation (15 models) 45.8, 9.5 at once
and 9.8 as a CUDA graph; sac_agent 9.5 and 1.8; gpt_pretraining (a batch in four parts) 51.8, and 32.7 as one;
court_summaries (in four) 126 and 43; character_model (in two) 26.8 and 25.1.
"""

import copy
from itertools import groupby, pairwise

import pytest
import torch
from cpu_programs import record
from raw_events import raw_steps, raw_work
from test_graph_changes import in_step
from test_inference_changes import ops_of
from test_kept_promises import base, measured_us, saved
from test_later_workloads import edited
from test_opportunities import priced_changes, raw_events
from torch import nn

from tracereader.changes import equal_passes
from tracereader.changes.equal_passes import ADDS_UP, AGAIN, OWN_MODEL, UNEQUAL, allowed, loops
from tracereader.trace import read


def promised(one):
    low, high = one.estimated_savings
    assert low <= one.share <= high
    return one.share


SDPA = "aten::scaled_dot_product_attention"


@pytest.mark.parametrize(("program", "op"), [("chat_service", "aten::_softmax"), ("story_writers", SDPA)])
def test_each_sequence_with_a_cache_of_its_own_is_a_pass(program, op):
    events = raw_events(base(program))
    in_steps = [[e["args"]["Input Dims"] for e in ops_of(events, mark, op)] for mark in raw_steps(events)]
    keys = [[dims[0][3] if op == "aten::_softmax" else dims[1][2] for dims in ops] for ops in in_steps]
    for before, after in pairwise(keys):
        assert after == [number + 1 for number in before]
    sequences = [number for number, _ in groupby(keys[0])]
    found = priced_changes(base(program))
    one = found["larger_batch"]
    assert one.evidence.startswith(
        f"each of {len(sequences)} passes decodes a token of a sequence with a KV cache of its own"
    )
    assert one.how.startswith("if one model decodes all and no sequence needs another one's token: one batch")
    variant = "batched" if program == "chat_service" else "together"
    assert promised(one) == pytest.approx(saved(program, variant), abs=0.1)
    cache = found["static_cache"]
    assert f"here from {min(map(min, keys)):,} to {max(map(max, keys)):,}" in cache.evidence
    assert "cuda_graph" not in found, "the number of keys grows"
    assert "double_batch" not in found, "twice the sequences are twice the launches"
    if program == "chat_service":
        assert promised(cache) == pytest.approx(saved(program, "cuda_graph"), abs=0.1)


def one_that_does_not_grow(events):
    """Let a call of attention in the last step have as many keys as in the step before."""
    last = ops_of(events, raw_steps(events)[-1], SDPA)[-1]
    for place in (1, 2):
        last["args"]["Input Dims"][place][2] -= 1


def of_one_sequence(events):
    """Let a step look up one token only. Its layers have caches of several lengths."""
    for mark in raw_steps(events):
        _, _, *later = ops_of(events, mark, "aten::embedding")  # of the token, and of its place
        for e in later:
            e["name"] = "aten::add"


def of_two_models(events):
    """Let one of the sequences be that of a model with one layer less."""
    for mark in raw_steps(events):
        ops_of(events, mark, SDPA)[0]["name"] = "a_layer"


def two_of_one_length(events):
    """Let the first two sequences have as many keys."""
    for mark in raw_steps(events):
        ops = ops_of(events, mark, SDPA)
        first, second, *_ = sorted({e["args"]["Input Dims"][1][2] for e in ops})
        for e in ops:
            for place in (1, 2):
                dims = e["args"]["Input Dims"][place]
                dims[2] = first if dims[2] == second else dims[2]


@pytest.mark.parametrize(
    ("edit", "grows", "sequences"),
    [
        (one_that_does_not_grow, False, 0), (of_one_sequence, True, 0), (of_two_models, True, 0),
        (two_of_one_length, True, 5),
    ],
)  # fmt: skip
def test_sequences_begin_with_their_lookups_and_have_calls_of_one_length(tmp_path, edit, grows, sequences):
    file = edited(base("story_writers"), tmp_path, edit)
    found, trace = priced_changes(file), read(file)
    in_turn = [len(equal_passes._in_turn(trace, step)) for step in trace.steps]
    assert in_turn == ([sequences] * 3 if grows else [5, 5, 0])
    assert ("static_cache" in found) == grows and ("cuda_graph" in found) != grows
    one = found.get("larger_batch")
    assert one.evidence.startswith(f"each of {sequences} passes") if sequences else one is None


def runs_of_clones(program):
    """Return in order how often a step clones, with nothing but detach() between the clones of one run."""
    events = raw_events(base(program))
    ops = sorted(in_step(events, raw_steps(events)[0], "cpu_op"), key=lambda e: (e["ts"], -e["dur"]))
    outer, until = [], 0.0
    for e in ops:
        if e["ts"] >= until:
            outer, until = [*outer, e["name"]], e["ts"] + e["dur"]
    names = (name for name in outer if name != "aten::detach")
    return [len(list(run)) for is_clone, run in groupby(names, "aten::clone".__eq__) if is_clone]


@pytest.mark.parametrize(
    ("program", "variant"), [("federated_round", "clients_at_once"), ("curves_of_tasks", "at_once")]
)
def test_models_that_are_copied_and_trained_in_turn_are_trained_at_once(program, variant):
    runs = runs_of_clones(program)
    assert len(set(runs)) == 1 < len(runs)
    one = priced_changes(base(program))["larger_batch"]
    assert one.evidence.startswith(f"each of {len(runs)} passes computes with a model of its own")
    assert promised(one) == pytest.approx(saved(program, variant), abs=0.17)


def an_update_of_the_original(events):
    """Let a kernel add to a weight of the network after each copy, which the next copy would take."""
    for e in events:
        if e.get("name") == "aten::tanh":
            e["name"], e["args"]["Input Dims"] = "aten::add_", [[256, 256], [256, 256]]


def copies_of_other_models(events):
    """Let each copy have a weight of another size."""
    for mark in raw_steps(events):
        clones = ops_of(events, mark, "aten::clone")
        for number, e in enumerate(e for e in clones if e["args"]["Input Dims"][0] == [256, 1]):
            e["args"]["Input Dims"][0] = [257 + number, 1]


@pytest.mark.parametrize("edit", [an_update_of_the_original, copies_of_other_models])
def test_copies_that_may_need_each_other_are_no_models_of_their_own(tmp_path, edit):
    one = priced_changes(edited(base("curves_of_tasks"), tmp_path, edit)).get("larger_batch")
    assert one is None or "a model of its own" not in one.evidence


def trained_in_turn(model, x):
    """Each copy is freed once the next one is made, which is the one after the next that may get its name."""
    for _ in range(5):
        one = copy.deepcopy(model)
        one(x).sum().backward()


def not_trained(model, x):
    """Backward is for the model itself."""
    model(sum(copy.deepcopy(model)(x).detach() for _ in range(5))).sum().backward()


def snapshots(model, x):
    """One model is updated five times, and its weights are kept before each update."""
    for _ in range(5):
        _ = [one.clone() for one in model.state_dict().values()]
        model(x).sum().backward()


def target_copies(model, x):
    for _ in range(5):
        (model(x) - copy.deepcopy(model)(x).detach()).square().sum().backward()


def moved_original(model, x):
    """As Reptile in sequence: the next copy is made of what this one moved."""
    for _ in range(5):
        one = copy.deepcopy(model)
        one(x).sum().backward()
        torch._foreach_lerp_([w.detach() for w in model.parameters()], [w.detach() for w in one.parameters()], 0.1)


def states(model, x):
    """What is cloned is a state that the passes hand on."""
    for _ in range(5):
        x = model(x.detach().clone())
        x.sum().backward()


@pytest.mark.parametrize(
    ("step", "found"),
    [(trained_in_turn, [5]), *((one, []) for one in (not_trained, snapshots, target_copies, moved_original, states))],
)
def test_clones_of_other_kinds_are_no_models_of_their_own(tmp_path, step, found):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(3, 4)
    record(lambda: step(model, x), tmp_path / "trace.json", with_modules=True)
    trace = read(tmp_path / "trace.json.gz")
    of_models = [one for one in loops(trace, trace.steps[-1]) if one.what == OWN_MODEL]
    assert [len(one.starts) for one in of_models] == found


def loads_of(events, mark):
    name = "enumerate(DataLoader)#"
    return [e for e in in_step(events, mark, "user_annotation") if e["name"].startswith(name)]


def test_models_with_batches_of_their_own_are_trained_at_once_and_their_batches_are_still_loaded():
    events = raw_events(base("cross_validation"))
    marks = raw_steps(events)
    updates = [e for e in in_step(events, marks[1], "user_annotation") if e["name"] == "Optimizer.step#AdamW.step"]
    one = priced_changes(base("cross_validation"))["larger_batch"]
    assert one.evidence.startswith(f"each of {len(updates)} passes computes with a model of its own")
    loading_us = min(sum(e["dur"] for e in loads_of(events, mark)) for mark in marks)
    assert one.step_us_after > loading_us > 0.2 * one.step_us
    assert promised(one) == pytest.approx(saved("cross_validation", "stacked_models"), abs=0.1)


def passes_of(events, mark):
    """Return how many parameters take a gradient in each backward of a step, and how many add it to another one."""
    ops = sorted(in_step(events, mark, "cpu_op"), key=lambda e: e["ts"])
    # Each loss gets a gradient of ones at first.
    begins = [e["ts"] for e in ops if e["name"] == "aten::ones_like" and e["args"]["Input Dims"][0] == []]
    taking = [e for e in ops if e["name"] == "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"]
    adding = {
        (e["ts"], e["dur"]) for e in taking
        if any(a["name"] == "aten::add_" and e["ts"] < a["ts"] < e["ts"] + e["dur"] for a in ops)
    }  # fmt: skip
    spans = [(b, n) for b, n in pairwise([*begins, float("inf")])]
    return [
        (len(some), sum((e["ts"], e["dur"]) in adding for e in some))
        for some in ([e for e in taking if b < e["ts"] < n] for b, n in spans) if some
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "variant", "within"),
    [
        ("gpt_pretraining", "one_large_batch", 0.11),
        ("court_summaries", "whole_batch", 0.17),
        ("character_model", "whole_batch", 0.05),
        ("packed_pretraining", "larger_microbatches", 0.06),  # whose loops inside have little of the time
    ],
)
def test_the_parts_of_a_batch_whose_gradients_add_up_are_computed_at_once(program, variant, within):
    events = raw_events(base(program))
    passes = passes_of(events, raw_steps(events)[1])
    assert passes[0][1] == 0 < passes[0][0] and set(passes[1:]) == {(passes[0][0], passes[0][0])}
    one = priced_changes(base(program))["larger_batch"]
    assert one.evidence.startswith(f"each of {len(passes)} passes adds to the gradients of one model")
    assert one.title == "compute equal passes at once" and "if the memory allows" in one.how
    assert promised(one) == pytest.approx(saved(program, variant), abs=within)


def in_parts(model, x):
    for part in x.expand(3, 3, 4):
        model(part).sum().backward()


def with_updates(model, x):
    for part in x.expand(3, 3, 4):
        model(part).sum().backward()
        torch._foreach_add_([w.detach() for w in model.parameters()], [w.grad for w in model.parameters()])


def with_an_optimizer(model, x):
    optimizer = torch.optim.SGD(model.parameters(), foreach=True)
    for part in x.expand(3, 3, 4):
        model(part).sum().backward()
        optimizer.step()


def attack(model, x):
    """Each pass takes the input that the gradient of the pass before has moved."""
    x = x.clone().requires_grad_()
    for _ in range(3):
        model(x).sum().backward()
        x.detach().add_(x.grad.sign())


def with_picks(model, x):
    """Each pass takes what the one before it chose, as a decoder does."""
    for _ in range(3):
        y = model(x)
        y.sum().backward()
        x = x + y.argmax(1, keepdim=True)


def all_forwards_first(model, x):
    for loss in [model(part).sum() for part in x.expand(3, 3, 4)]:
        loss.backward()


def several_losses(model, x):
    for one in model(x):
        one.sum().backward(retain_graph=True)


def another_model(model, x):
    """Each model gets its first gradients."""
    for one in (model, copy.deepcopy(model), copy.deepcopy(model)):
        one(x).sum().backward()


def two_models(model, x):
    """Both have weights of the same shapes, and learn in turn."""
    other = copy.deepcopy(model)
    other.zero_grad()
    for _ in range(3):
        model(x).sum().backward()
        other(x).sum().backward()


def two_critics(model, x):
    """Each adds to gradients of zeros that it got before."""
    critics = model, copy.deepcopy(model)
    for w in (w for one in critics for w in one.parameters()):
        w.grad = torch.zeros_like(w)
    for one in critics:
        one(x).sum().backward()


def parts_of_other_sizes(model, x):
    for size in (3, 3, 1):
        model(x[:size]).sum().backward()


def with_clipping(model, x):
    for _ in range(3):
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=True)


def with_hooks(model, x):
    def clamp(w):
        w.grad.clamp_(-1, 1)

    hooks = [w.register_post_accumulate_grad_hook(clamp) for w in model.parameters()]
    in_parts(model, x)
    for hook in hooks:
        hook.remove()


def parts_of_the_model(model, x):
    model(x).sum().backward()
    model[2](model[:2](x).detach()).sum().backward()
    model(x).sum().backward()


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (in_parts, [3]),
        *((one, []) for one in (with_updates, with_an_optimizer, attack, several_losses, another_model)),
        *((one, []) for one in (two_models, two_critics, parts_of_other_sizes, with_clipping, with_hooks)),
        *((one, []) for one in (with_picks, all_forwards_first, parts_of_the_model)),
    ],
)
def test_passes_whose_gradients_add_up_are_parts_of_a_batch_if_none_needs_the_one_before(tmp_path, step, found):
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(3, 4)

    def cleared():
        model.zero_grad()
        step(model, x)

    record(cleared, tmp_path / "trace.json", with_modules=True)
    trace = read(tmp_path / "trace.json.gz")
    assert [len(one.starts) for one in loops(trace, trace.steps[-1]) if one.what == ADDS_UP] == found


def chains(lengths):
    """Return a step that trains a cell with both functions of gates on sequences of these lengths in turn."""
    cell, inputs = nn.Linear(6, 4), [torch.randn(length, 2, 3) for length in lengths]

    def step():
        cell.zero_grad()
        for sequence in inputs:
            h = torch.zeros(2, 3)
            for x in sequence:
                gates = cell(torch.cat([h, x], 1))
                h = torch.tanh(gates[:, :3]) * torch.sigmoid(gates[:, 3:])
            h.sum().backward()

    return step


@pytest.mark.parametrize(("lengths", "at_once"), [((2, 5, 3, 7, 4), True), ((4, 4, 4, 4, 2), False)])
def test_passes_with_gates_are_parts_of_a_sequence_unless_most_have_numbers_of_ops_of_their_own(
    tmp_path, lengths, at_once
):
    record(chains(lengths), tmp_path / "trace.json", with_modules=True)
    trace = read(tmp_path / "trace.json.gz")
    found = [one for one in allowed(trace, trace.steps[-1]) if len(one.starts) == len(lengths)]
    assert [one.what for one in found] == [UNEQUAL] * at_once


def test_an_update_whose_tensors_have_no_recorded_shapes_is_still_one(tmp_path):
    """Older versions of PyTorch record no shapes of the tensors in a list."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(3, 4)

    def step():
        model.zero_grad()
        with_updates(model, x)

    def without_lists(events):
        for e in events:
            if e.get("name") == "aten::_foreach_add_":
                e["args"]["Input Dims"] = [[], [], []]

    record(step, tmp_path / "trace.json", with_modules=True)
    trace = read(edited(tmp_path / "trace.json.gz", tmp_path, without_lists))
    assert not [one for one in loops(trace, trace.steps[-1]) if one.what == ADDS_UP]


def without_shapes(events):
    for e in events:
        e.get("args", {}).pop("Input Dims", None)


def test_passes_whose_shapes_are_not_recorded_are_no_parts_of_a_batch(tmp_path):
    """An update between them would not be seen."""
    one = priced_changes(edited(base("court_summaries"), tmp_path, without_shapes)).get("larger_batch")
    assert one is None or "adds to the gradients" not in one.evidence


def test_what_the_cpu_computes_in_parts_of_a_batch_stays(tmp_path):
    """Such as the samples of each part."""

    def with_pauses(events):
        """Let Python take 6 ms of each forward."""
        for mark in raw_steps(events):
            ops = ops_of(events, mark, "aten::embedding")
            assert len(ops) == 4
            for e in ops:
                gone = [one for one in events if e["ts"] + 2000 < one.get("ts", 0) < e["ts"] + 8000]
                for one in gone:
                    if one.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver"):
                        one["name"], one["cat"] = "gone", "gone"

    before = priced_changes(base("court_summaries"))["larger_batch"]
    after = priced_changes(edited(base("court_summaries"), tmp_path, with_pauses))["larger_batch"]
    assert after.saves_us < before.saves_us - 3 * 5000


def test_passes_that_hand_on_a_state_are_no_parts_of_a_batch(tmp_path):
    """As in truncated backpropagation through time."""
    model, x = nn.GRU(4, 8), torch.randn(3, 2, 4)

    def step():
        model.zero_grad()
        state = torch.zeros(1, 2, 8)
        for _ in range(3):
            y, state = model(x, state.detach())
            y.sum().backward()

    record(step, tmp_path / "trace.json", with_modules=True)
    trace = read(tmp_path / "trace.json.gz")
    assert not [one for one in loops(trace, trace.steps[-1]) if one.what == ADDS_UP]


def test_what_lies_between_two_parts_of_a_batch_stays(tmp_path):
    """A generator makes an input of the second pass, as in a GAN whose discriminator sees both apart."""
    model, generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), nn.Linear(6, 4)
    real, noise = torch.randn(3, 4), torch.randn(3, 6)

    def step():
        model.zero_grad()
        model(real).sum().backward()
        with torch.no_grad():
            fake = generator(noise)
        model(fake).sum().backward()

    record(step, tmp_path / "trace.json", with_modules=True)
    trace = read(tmp_path / "trace.json.gz")
    (one,) = [one for one in loops(trace, trace.steps[-1]) if one.what == ADDS_UP]
    (made,) = [op for op in trace.steps[-1].named("aten::linear".__eq__) if op.inputs.dims[0] == [3, 6]]
    assert one.ends[0] < made.start < made.end < one.starts[1]


@pytest.mark.parametrize("program", ["curves_of_tasks", "deep_ensemble", "value_learning"])
def test_a_step_with_several_updates_is_captured_as_a_whole(program):
    """Graphs of forward and backward would leave the updates between them as they are."""
    updates = [
        e for e in raw_events(base(program)) if str(e.get("name")).startswith("Optimizer.step#")
        and e.get("cat") == "user_annotation"
    ]  # fmt: skip
    assert len(updates) > len(raw_steps(raw_events(base(program))))
    one = priced_changes(base(program))["cuda_graph"]
    assert one.how.startswith("torch.cuda.graph around forward, backward and the optimizer's step")
    assert promised(one) == pytest.approx(saved(program, "graph"), abs=0.07)


@pytest.mark.parametrize(
    ("program", "variant"),
    [("federated_round", "graph"), ("cross_validation", "cuda_graph"), ("sac_agent", "cuda_graph_update")],
)
def test_a_step_with_several_updates_is_captured_as_a_whole_once_it_does_not_wait(program, variant):
    one = priced_changes(base(program))["cuda_graph"]
    assert one.title == "remove what keeps CUDA graphs out" and one.conditional
    assert "torch.cuda.graph around forward, backward and the optimizer's step" in one.how
    assert promised(one) == pytest.approx(saved(program, variant), abs=0.09)


def test_updates_that_differ_from_step_to_step_stay_outside_of_graphs(tmp_path):
    """As where an actor is updated in every second step."""

    def with_another_optimizer(events):
        for e in in_step(events, raw_steps(events)[1], "user_annotation"):
            e["name"] = e["name"].replace("Optimizer.step#Adam", "Optimizer.step#SGD")

    whole = priced_changes(base("sac_agent"))["cuda_graph"]
    one = priced_changes(edited(base("sac_agent"), tmp_path, with_another_optimizer))["cuda_graph"]
    assert "around forward, backward" in whole.how and "around forward, backward" not in one.how
    assert one.saves_us < whole.saves_us


def test_products_in_fp32_are_named_although_the_cpu_limits_the_recorded_step():
    """A step of 36.6 ms without the profiler, in which the GPU is busy for 31 ms, took 25 ms with TF32."""
    events = raw_events(base("lora_tuning"))
    work = raw_work(events, raw_steps(events)[1])
    in_fp32_us = sum(e["dur"] for e in work if "f32f32_f32f32" in e["name"] or "sgemm" in e["name"])
    share = in_fp32_us / measured_us("lora_tuning", "base")
    one = priced_changes(base("lora_tuning"))["tf32"]
    low, high = one.estimated_savings
    assert low <= saved("lora_tuning", "tf32") <= high < share + 0.02
    assert abs(one.saves_us) < 1, "the CPU limits the recorded step"


class Images(nn.Module):
    """A small model of images, with or without a state beside its result. Its activation is no gate."""

    def __init__(self, out):
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, out, 1)
        self.join, self.add = nn.Conv2d(12, 6, 1), nn.Conv2d(6, 6, 1)

    def forward(self, x, state=None, joins=True):
        x = self.first(x).relu()
        if state is None:
            return self.last(x)
        state = self.join(torch.cat([x, state], 1)).relu() if joins else (x + self.add(state)).relu()
        return self.last(state), state


def flipped(model, x):
    total = model(x).softmax(1)
    for dim in (1, 2, 3):
        total = total + model(x.flip(dim)).softmax(1)
    return total


def joined_at_once(model, x):
    ones, others = model(x), model(x)
    return (ones + 3 * (others.to(ones.dtype) - ones)).abs()


def a_part_is_the_next_input(model, x):
    for _ in range(5):
        change, _ = model(x).detach().chunk(2, 1)
        x = x - 0.1 * change
    return x


def a_state_from_zeros(model, x):
    state, results = torch.zeros(2, 6, 8, 8), []
    for part in x.repeat(5, 1, 1, 1, 1).unbind():
        result, state = model(part, state, joins=False)
        results.append(result.softmax(1))
    return results


def a_state_from_before(model, x, kept={}):  # noqa: B006 - the state of the step before
    state, results = kept.get("state", x.new_ones(2, 6, 8, 8)), []
    for part in x.repeat(5, 1, 1, 1, 1).unbind():
        result, state = model(part, state)
        results.append(result.softmax(1))
    kept["state"] = state
    return results


@pytest.mark.parametrize(
    ("step", "out", "found"),
    [
        (flipped, 5, [4]), (joined_at_once, 5, [2]), (a_part_is_the_next_input, 8, []),
        (a_state_from_zeros, 5, []), (a_state_from_before, 5, []),
    ],
)  # fmt: skip
def test_calls_of_a_model_whose_result_goes_into_the_next_call_stay_apart(tmp_path, step, out, found):
    model, x = Images(out).eval(), torch.randn(2, 4, 8, 8)

    def without_gradients():
        with torch.no_grad():
            step(model, x)

    record(without_gradients, tmp_path / "trace.json", with_modules=True)
    trace = read(tmp_path / "trace.json.gz")
    assert [len(one.starts) for one in loops(trace, trace.steps[-1]) if one.what == AGAIN] == found
