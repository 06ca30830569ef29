"""Steps of loops that were recorded without prof.step(). Figures are recomputed from raw events."""

import gzip
import itertools
import json

import pytest
from raw_events import event, raw_steps, raw_work
from references import CHANGES, H200, ROOT, small_first

from tracereader import cli
from tracereader.figures import summarize
from tracereader.trace import StepsBy, read
from tracereader.trace.facts import RunFacts

TRACES = ROOT / "tests/traces"
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
MANY_LOADERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
# Traces with the profiler's marks, which are removed; the calls that then mark the steps, and whether they end them.
LOOPS = [
    (TRACES / "cpu/adamw_fused.json.gz", "Optimizer.zero_grad#AdamW.zero_grad", False),
    (TRACES / "cpu/closure.json.gz", "Optimizer.step#SGD.step", True),
    (TRACES / "cpu/loader_inline.json.gz", LOADER, False),
    (TRACES / "cpu/one_worker.json.gz", MANY_LOADERS, False),
    (TRACES / "cpu/two_optimizers.json.gz", "Optimizer.zero_grad#Adam.zero_grad", True),
    (TRACES / "h100/copies/pinned.json.gz", "Optimizer.step#AdamW.step", True),
    (TRACES / "h100/debugging/blocking.json.gz", "Optimizer.zero_grad#AdamW.zero_grad", False),
    (TRACES / "h100/graphs/accum.json.gz", "Optimizer.zero_grad#AdamW.zero_grad", False),
    (TRACES / "h100/graphs/ctc_graphed.json.gz", "Optimizer.zero_grad#AdamW.zero_grad", False),
    (TRACES / "h100/graphs/ema_graph.json.gz", "Optimizer.zero_grad#AdamW.zero_grad", False),
    (TRACES / "h100/graphs/finetune.json.gz", MANY_LOADERS, False),
    (TRACES / "h100/graphs/inference.json.gz", "aten::embedding", False),
    (TRACES / "h100/graphs/lengths.json.gz", "Optimizer.step#AdamW.step", True),
    (TRACES / "h100/loops/scan_compiled.json.gz", "Optimizer.zero_grad#AdamW.zero_grad", False),
    (TRACES / "h100/solvers/lbfgs.json.gz", "Optimizer.step#LBFGS.step", True),
    (TRACES / "models/bert_cold.json.gz", "my_step", False),
    (TRACES / "h100/loops/attack.json.gz", "aten::clone", False),
    (CHANGES / "vit/eager.json.gz", "aten::conv2d", False),
    (CHANGES / "decode/eager.json.gz", "aten::layer_norm", False),
    (CHANGES / "logits/all.json.gz", "aten::embedding", False),
    (CHANGES / "optimizer/forloop.json.gz", "Optimizer.zero_grad#AdamW.zero_grad", True),
    (CHANGES / "gpt2/recompute.json.gz", "Optimizer.zero_grad#AdamW.zero_grad", True),
]


# Traces whose steps the calls of the program's own annotation hold, and nothing else tells apart.
ANNOTATED = [
    (H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_eager.json.gz", "mlp_fwd"),
    (H200 / "01_matmul_add/64_bf16_cold_eager.json.gz", "matmul_add"),
]


def without_a_loop():
    """Return traces in which the marks are the only sign of the steps."""
    return [
        TRACES / "h100/flex/inference_compiled.json.gz",  # two layers, each with products for queries, keys and values
        TRACES / "h100/adapters/apart.json.gz",
        TRACES / "h100/loops/images.json.gz",  # one pass for each image
    ]


@pytest.mark.parametrize(("path", "name"), ANNOTATED, ids=lambda one: getattr(one, "stem", None))
def test_an_annotation_whose_calls_hold_nearly_everything_begins_the_steps(unmarked, path, name):
    file, events = unmarked(path)
    calls = sorted(e["ts"] for e in events if (e["name"], e["cat"]) == (name, "user_annotation"))
    trace = read(file, steps_by=StepsBy.FOUND)
    assert (trace.steps_by, trace.steps_end_with_it, len(trace.steps)) == (name, False, len(calls))
    apart = [step.start - trace.steps[0].start for step in trace.steps]
    assert apart == pytest.approx([1000 * (ts - calls[0]) for ts in calls], abs=1)


@pytest.mark.parametrize("around", [False, True])
def test_annotations_inside_another_one_may_be_layers(tmp_path, around):
    events = [event("forward", "user_annotation", 0, 400)] * around
    for number in range(4):
        events.append(event("layer", "user_annotation", 5 + 95 * number, 90))
        events += [event(name, "cpu_op", 10 + 95 * number + 20 * at, 9) for at, name in enumerate(LAYER[:3])]
    file = tmp_path / "made.json"
    file.write_text(json.dumps({"traceEvents": events}))
    assert read(file, steps_by=StepsBy.FOUND).steps_by == (None if around else "layer")


def test_a_step_of_an_annotation_that_began_in_the_step_before_has_its_ops(tmp_path):
    """A step from one lookup to the next crosses the annotations, which begin a little earlier."""
    events, token = [], ("aten::embedding", "aten::linear", "aten::argmax")
    for number in range(5):
        begin = 100 * number
        events += [event("aten::to", "cpu_op", begin, 1), event("aten::add", "cpu_op", begin + 2, 1)]
        events.append(event("token", "user_annotation", begin + 4, 90))
        events += [event(name, "cpu_op", begin + 10 + 20 * at, 9) for at, name in enumerate(token)]
    file = tmp_path / "made.json"
    file.write_text(json.dumps({"traceEvents": events}))
    trace = read(file, steps_by=StepsBy.FOUND)
    assert trace.steps_by == "aten::embedding" and len(trace.steps) >= 4
    for step in trace.steps:
        assert [op.name for op in step.walk() if op.kind == "op"][:3] == list(token)


@pytest.mark.parametrize(("path", "name", "ends"), small_first(LOOPS), ids=lambda one: getattr(one, "stem", None))
def test_the_steps_are_those_that_the_profiler_marked(unmarked, path, name, ends):
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    marks = raw_steps(events)
    trace = read(unmarked(path)[0], steps_by=StepsBy.FOUND)
    assert (trace.steps_by, trace.steps_end_with_it) == (name, ends)
    assert len(trace.steps) == len(marks)
    for step, mark in zip(trace.steps, marks, strict=True):
        assert len(step.work) == len(raw_work(events, mark))
    # An optimizer or a loader is called within 2% of the step's time before or after prof.step().
    for step, mark in list(zip(trace.steps, marks, strict=True))[1:-1]:
        assert step.us == pytest.approx(mark["dur"], rel=0.02)


@pytest.mark.parametrize("path", without_a_loop(), ids=lambda path: path.stem)
def test_nothing_else_tells_steps_apart(unmarked, path):
    trace = read(unmarked(path)[0], steps_by=StepsBy.FOUND)
    assert (trace.has_steps, trace.steps_by, len(trace.steps)) == (False, None, 1)


def test_each_token_of_generate_is_a_step(unmarked):
    """Two calls of generate() are marked, with the prompt and five more tokens each."""
    path = TRACES / "h200/generate_calls.json.gz"
    file, events = unmarked(path)
    chosen = [e["ts"] for e in events if e["name"] == "aten::argmax"]
    lookups = sorted(e["ts"] for e in events if e["name"] == "aten::embedding")
    trace = read(file, steps_by=StepsBy.FOUND)
    assert len(trace.steps) == len(lookups) == len(chosen) == 12
    apart = [(after - before) for before, after in itertools.pairwise(lookups)]
    assert [step.us for step in trace.steps[:-1]] == pytest.approx(apart, abs=0.01)


class Loop:
    """Slices of a made-up program, one after the other on one thread."""

    def __init__(self):
        self.events, self.now = [], 0.0

    def call(self, *names, us=10):
        for name in names:
            is_op = "::" in name
            self.events.append(event(name, "cpu_op" if is_op else "user_annotation", self.now, us - 1))
            self.now += us
        return self

    def read(self, tmp_path, **others):
        file = tmp_path / "made.json"
        file.write_text(json.dumps({"traceEvents": self.events, **others}))
        return read(file, steps_by=StepsBy.FOUND)


ZERO, STEP = "Optimizer.zero_grad#Adam.zero_grad", "Optimizer.step#Adam.step"
GRADIENT = "torch::autograd::AccumulateGrad"
FORWARD, LOSS = ("aten::linear", "aten::relu") * 6, ("aten::mse_loss",)


@pytest.mark.parametrize(
    ("body", "name", "ends"),
    [
        ((ZERO, *FORWARD, *LOSS, STEP), ZERO, False),
        ((*FORWARD, *LOSS, ZERO, "aten::ones_like", STEP), STEP, True),
        ((*FORWARD, *LOSS, STEP, ZERO), ZERO, True),
        ((LOADER, *FORWARD, *LOSS, ZERO, "aten::ones_like", STEP), LOADER, False),
        ((LOADER, "aten::stack", *FORWARD), LOADER, False),
        ((*FORWARD, *LOSS, STEP, "aten::item"), STEP, True),
    ],
    ids=["zeroes first", "zeroes before backward", "zeroes last", "loads", "inference", "only updates"],
)
def test_a_step_begins_where_the_loop_begins(tmp_path, body, name, ends):
    loop = Loop()
    for _ in range(5):
        loop.call(*body)
    trace = loop.read(tmp_path)
    assert (trace.steps_by, trace.steps_end_with_it, len(trace.steps)) == (name, ends, 5)
    ops = [[op.name for op in step.walk() if op.kind == "op"] for step in trace.steps]
    loops = [name for name in body if name.startswith("aten::")]
    # What follows the optimizer's step comes first in the next step.
    after = [name for name in body[body.index(STEP) :] if name.startswith("aten::")] if name == STEP else []
    assert ops == [loops[: len(loops) - len(after)], *[[*after, *loops[: len(loops) - len(after)]]] * 4]


def test_what_precedes_and_follows_the_loop_belongs_to_no_step(tmp_path, capsys):
    loop = Loop().call(*["aten::uniform_"] * 40)
    for _ in range(4):
        loop.call(*FORWARD, *LOSS, STEP)
    loop.call(*["aten::topk"] * 30)
    trace = loop.read(tmp_path)
    assert trace.steps_end_with_it
    # Where the first of these steps begins is unknown, and the last call ends the last one.
    assert [step.us for step in trace.steps] == [140, 140, 140]
    assert len(trace.outside) == 40 + 30 + len((*FORWARD, *LOSS, STEP))
    assert cli.main([str(trace.path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"3 steps of 140.0 µs, each ending with a call of {STEP} · " in said
    assert "839.0 µs of the recording lies outside the steps" in said  # 40 x 10 + 140 - 1 before, and 30 x 10 after


def test_a_batch_that_is_not_the_last_one_of_its_step_is_no_step(tmp_path):
    """Gradients of four batches are added up."""
    loop = Loop()
    for _ in range(4):
        for _ in range(4):
            loop.call(LOADER, *FORWARD, *LOSS)
        loop.call(STEP, ZERO)
    trace = loop.read(tmp_path)
    assert trace.steps_by in (STEP, ZERO) and len(trace.steps) == 4
    for step in trace.steps:
        assert [op.name for op in step.walk()].count("aten::mse_loss") == 4


@pytest.mark.parametrize(
    ("prompt", "token"),
    [
        (("aten::embedding", *FORWARD, "aten::argmax"), ("aten::embedding", *FORWARD, "aten::argmax", "aten::cat")),
        ((), (*("aten::embedding",) * 2, *FORWARD, "aten::topk", "aten::multinomial")),  # tokens and positions
        ((), ("Torch-Compiled Region: 0/0", "aten::index", "aten::argmax")),
    ],
    ids=["one lookup", "two lookups", "compiled"],
)
def test_a_token_begins_with_its_first_lookup(tmp_path, prompt, token):
    loop = Loop().call(*prompt)
    for _ in range(6):
        loop.call(*token)
    trace = loop.read(tmp_path)
    assert trace.steps_by == token[0] and len(trace.steps) == 6 + bool(prompt)
    for step in trace.steps[bool(prompt) :]:
        assert [op.name for op in step.walk()][1:] == list(token)


def test_networks_that_take_turns_are_trained_in_one_step(tmp_path):
    """Both optimizers have one name, so each second call ends a step."""
    one = (ZERO, *FORWARD, *LOSS, *[GRADIENT] * 4, STEP)
    other = (ZERO, *FORWARD, *FORWARD, *LOSS, *[GRADIENT] * 8, STEP)
    loop = Loop()
    for _ in range(4):
        loop.call(*one, *other)
    trace = loop.read(tmp_path)
    assert (trace.steps_by, trace.steps_end_with_it, len(trace.steps)) == (STEP, True, 4)
    assert trace.calls_in_a_step == 2
    ops = [name for name in (*one, *other) if "::" in name]
    assert [[op.name for op in step.walk() if op.kind == "op"] for step in trace.steps] == [ops] * 4


@pytest.mark.parametrize("every", [2, 3, 4])
def test_a_loop_that_does_more_in_some_steps_is_not_taken_for_networks_that_take_turns(tmp_path, every):
    """An average of the weights is updated in some steps, but all steps update the same parameters."""
    loop = Loop()
    for number in range(12):
        loop.call(ZERO, *FORWARD, *LOSS, *[GRADIENT] * 6, STEP, *["aten::lerp_"] * 8 * (number % every == 0))
    trace = loop.read(tmp_path)
    assert trace.calls_in_a_step == 1 and len(trace.steps) in (1, 11, 12)


def test_networks_with_several_updates_in_a_step_are_not_taken_for_steps(tmp_path):
    """Two critics and an actor: two of three updates have equal ops, and the third one nearly as many."""
    critic = (*FORWARD, "aten::neg", *LOSS, *[GRADIENT] * 4, STEP)
    actor = (*FORWARD, "aten::mean", *LOSS, *[GRADIENT] * 6, STEP)
    loop = Loop()
    for _ in range(5):
        loop.call(*critic, *critic, *actor)
    trace = loop.read(tmp_path)
    assert (trace.steps_by, len(trace.steps), trace.calls_in_a_step) == (STEP, 5, 3)


def test_one_iteration_with_several_updates_is_no_loop(tmp_path):
    loop = Loop().call(*FORWARD * 3, *LOSS, STEP, *FORWARD, *LOSS, STEP, *FORWARD, *LOSS, STEP)
    assert loop.read(tmp_path).steps_by is None


def test_an_optimizer_for_each_parameter_in_backward_marks_no_steps(tmp_path):
    """A hook calls it inside the engine's op of each parameter."""
    loop = Loop().call(*FORWARD)
    for _ in range(12):
        begin = loop.now
        loop.call("aten::mm", STEP, "aten::mul_")
        engine = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
        loop.events.append(event(engine, "cpu_op", begin, loop.now - begin - 0.5))
    assert loop.read(tmp_path).steps_by is None


@pytest.mark.parametrize("before", [0, 40], ids=["nothing", "models are made"])
def test_the_last_of_several_optimizers_ends_the_step(tmp_path, before):
    other = "Optimizer.step#SGD.step"
    loop = Loop().call(*["aten::uniform_"] * before)
    for _ in range(5):
        loop.call(*FORWARD, *LOSS, other, *FORWARD * 2, *LOSS, "aten::neg", STEP)
    trace = loop.read(tmp_path)
    assert (trace.steps_by, len(trace.steps)) == (STEP, 5 - bool(before))


def test_layers_that_choose_experts_in_compiled_code_are_no_tokens(tmp_path):
    loop = Loop()
    for _ in range(8):
        begin = loop.now
        loop.call("aten::linear", "aten::topk", "aten::linear")
        loop.events.append(event("Torch-Compiled Region: 0/0", "cpu_op", begin, loop.now - begin - 0.5))
    assert loop.call("aten::linear").read(tmp_path).steps_by is None


def test_a_batch_before_generation_does_not_hide_the_tokens(tmp_path):
    loop = Loop().call(LOADER)
    for _ in range(6):
        loop.call("aten::embedding", *FORWARD, "aten::argmax")
    assert loop.read(tmp_path).steps_by == "aten::embedding"


def test_what_follows_the_loop_is_in_no_step(tmp_path):
    loop = Loop()
    for _ in range(5):
        loop.call(LOADER, *FORWARD)
    trace = loop.call("aten::copy_", "aten::item", us=5000).read(tmp_path)
    assert [step.us for step in trace.steps] == [10 * (1 + len(FORWARD))] * 5
    assert [op.name for op in trace.outside] == ["aten::copy_", "aten::item"]


def test_the_thread_with_the_most_ops_decides(tmp_path):
    """A thread of the loader loads more batches than the model trains on."""
    loop = Loop()
    for _ in range(10):
        loop.call(ZERO, *FORWARD, *LOSS, STEP)
    for number in range(14):
        for name, kind in ((LOADER, "user_annotation"), ("aten::_pin_memory", "cpu_op")):
            loop.events.append(event(name, kind, 20 * number + 10 * (kind == "cpu_op"), 9, tid=7))
    trace = loop.read(tmp_path)
    assert trace.steps_by == ZERO and len(trace.steps) == 10


LAYER = ("aten::layer_norm", "aten::linear", "aten::gelu", "aten::linear", "aten::add")


def test_equal_passes_through_a_model_of_layers_are_steps(tmp_path):
    passed = ("aten::conv2d", *LAYER * 6, "aten::mean", "aten::linear")
    loop = Loop()
    for _ in range(4):
        loop.call(*passed)
    trace = loop.call("aten::stack").read(tmp_path)
    assert trace.steps_by == "aten::conv2d" and len(trace.steps) == 4
    for step in trace.steps:
        assert [op.name for op in step.walk() if op.kind == "op"] == list(passed)
    assert [op.name for op in trace.outside] == ["aten::stack"]


@pytest.mark.parametrize(
    "body",
    [
        LAYER * 6,  # passes through layers without anything before or after them
        ("aten::layer_norm", *("aten::linear", "aten::transpose") * 3, "aten::matmul", "aten::linear", "aten::add"),
        ("aten::add", "aten::mul", "aten::exp") * 3 + ("aten::sum",),
        ("aten::layer_norm", *("aten::linear", "aten::silu", "aten::linear") * 4, "aten::add"),
        ("autograd::engine::evaluate_function: MmBackward0", *LAYER * 6, "aten::mean"),
    ],
    ids=["layers", "attention", "no product", "experts", "backward"],
)
def test_what_may_be_the_layers_of_one_pass_are_no_steps(tmp_path, body):
    loop = Loop()
    for _ in range(4):
        loop.call(*body)
    assert loop.read(tmp_path).steps_by is None


@pytest.mark.parametrize(
    "body",
    [
        ("aten::embedding", "aten::linear"),
        ("aten::linear", "aten::argmax", "aten::index"),  # the layers of a model choose experts
        ("aten::linear", "aten::relu", "aten::embedding") * 4,  # in one pass
    ],
    ids=["nothing is chosen", "nothing is looked up", "layers"],
)
def test_calls_that_mark_no_steps(tmp_path, body):
    loop = Loop()
    for _ in range(4):
        loop.call(*body)
    loop.call("aten::argmax")
    trace = loop.read(tmp_path)
    assert (trace.has_steps, trace.steps_by) == (False, None)


def test_some_steps_may_call_a_few_more_ops(tmp_path):
    """Each fourth step logs its loss, and the first one makes the optimizer's state."""
    loop = Loop()
    for number in range(12):
        loop.call(ZERO, *FORWARD, *LOSS, *["aten::zeros_like"] * 9 * (not number), STEP)
        loop.call(*["aten::item"] * (number % 4 == 3))
    trace = loop.read(tmp_path)
    ops = [sum(op.kind == "op" for op in step.walk()) for step in trace.steps]
    assert ops == [22, 13, 13, 14, 13, 13, 13, 14, 13, 13, 13, 13]  # what follows the last step does not count


def test_a_run_that_stored_facts_decides_itself_what_a_step_is(tmp_path):
    loop = Loop()
    for _ in range(4):
        loop.call(ZERO, *FORWARD, *LOSS, STEP)
    assert loop.read(tmp_path, unprofiled_step_us=200.0).steps_by is None
    trace = loop.read(tmp_path)
    assert trace.steps_by == ZERO and trace.facts == RunFacts()


def test_the_profilers_marks_decide_if_there_are_any():
    path = TRACES / "h100/graphs/accum.json.gz"
    marked, found = (read(path, steps_by=by) for by in (StepsBy.RECORDED, StepsBy.FOUND))
    assert [step.name for step in found.steps] == [step.name for step in marked.steps] and found.steps_by is None


def test_the_whole_recording_as_one_step(unmarked, capsys):
    path = TRACES / "cpu/adamw_fused.json.gz"
    file, events = unmarked(path)
    slices = [e for e in events if e["cat"] in ("cpu_op", "user_annotation")]
    first, last = min(e["ts"] for e in slices), max(e["ts"] + e["dur"] for e in slices)
    for trace in (file, path):
        assert cli.main([str(trace), "--whole", "--json", "--only", "steps"]) == 0
        (step,) = json.loads(capsys.readouterr().out)["steps"]
        assert step["name"] == "whole trace"
    assert read(file, steps_by=StepsBy.NOTHING).steps[0].us == pytest.approx(last - first, abs=0.01)
    assert cli.main([str(file), "--whole", "--only", "short"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "counts as one step (--steps NAME: the calls of an annotation are the steps)" in said


@pytest.mark.parametrize("flags", [["--steps", "x"], ["--ranks"], ["--export", "x.json"]], ids=lambda flags: flags[0])
def test_the_whole_recording_is_for_the_report_of_one_process(capsys, flags):
    paths = [str(TRACES / f"cpu/{name}.json.gz") for name in ("adamw_fused", "adamw_forloop")]
    assert cli.main([*paths[: 1 + ("--ranks" in flags)], "--whole", *flags]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "--whole" in said.err


def test_a_comparison_and_the_json_name_the_calls(unmarked, capsys):
    file, _ = unmarked(TRACES / "cpu/adamw_fused.json.gz")
    assert cli.main([str(file), "--json", "--only", "short,steps"]) == 0
    source = json.loads(capsys.readouterr().out)
    assert (source["steps_by"], source["steps_end_with_it"]) == ("Optimizer.zero_grad#AdamW.zero_grad", False)
    assert source["outside_us"] == summarize(read(file, steps_by=StepsBy.FOUND)).source.outside_us
    assert cli.main([str(file), str(TRACES / "cpu/adamw_fused.json.gz")]) == 0
    said = capsys.readouterr().out
    assert "each step from a call of Optimizer.zero_grad#AdamW.zero_grad to the next" in said
    assert "no profiler steps" not in said


def served(tmp_path, names):
    """Return a server's trace whose steps have these names, and its raw events."""
    document = json.loads(gzip.decompress((TRACES / "serving/vllm.json.gz").read_bytes()))
    calls = sorted((e for e in document["traceEvents"] if e["name"].startswith("execute_")), key=lambda e: e["ts"])
    for e, name in zip([e for e in calls if e["cat"] == "user_annotation"], names, strict=True):
        e["name"] = name
    file = tmp_path / "served.json"
    file.write_text(json.dumps(document))
    return file, calls


@pytest.mark.parametrize(("prompt", "decode", "tokens"), [
    ("execute_context_2(900)_generation_30(30)", "execute_context_0(0)_generation_32(32)", 32),
    ("execute_new_2_cached_30", "execute_new_0_cached_31", 31),
    ("step[EXTEND bs=2 toks=900]", "step[DECODE bs=30]", 30),
], ids=["vLLM", "an older vLLM", "SGLang"])  # fmt: skip
def test_the_steps_of_a_server_are_those_that_decode(tmp_path, capsys, prompt, decode, tokens):
    file, calls = served(tmp_path, [decode, decode, prompt, decode, decode, decode])
    starts = [e["ts"] for e in calls if e["cat"] == "user_annotation"]
    trace = read(file, steps_by=StepsBy.FOUND)
    assert trace.steps_by == decode
    assert [step.us for step in trace.steps[:-1]] == pytest.approx(
        [after - before for k, (before, after) in enumerate(itertools.pairwise(starts)) if k != 2]
    )
    assert cli.main([str(file), "--only", "short"]) == 0
    speed = tokens / summarize(trace).recorded_step_us * 1e6
    assert f"({tokens} tokens each, {speed:,.0f} tokens/s)" in " ".join(capsys.readouterr().out.split())


def test_a_server_that_reads_prompts_alone_has_steps_without_a_rate_of_tokens(tmp_path, capsys):
    file, _ = served(tmp_path, ["execute_context_2(900)_generation_0(0)"] * 6)
    assert len(read(file, steps_by=StepsBy.FOUND).steps) == 6
    assert cli.main([str(file), "--only", "short"]) == 0
    assert "tokens/s" not in capsys.readouterr().out
