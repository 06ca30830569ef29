"""Layers, tokens a second and avoidable work of a decoder's step: each figure is compared with raw events.

tests/traces/models has traces of an H200, cut to a step or two: Qwen3-0.6B's sizes with random weights (28 layers, 16
heads, 8 heads of keys and values), a small Qwen3-MoE (8 layers), BERT-base (12) and a GPT-2 of 6 layers in training.
"""

import gzip
import json
import random
import re
from collections import Counter, defaultdict
from functools import cache, lru_cache
from statistics import median

import pytest
import references
from raw_events import end, event, pace
from references import OTHERS, REFERENCES

from tracereader import cli
from tracereader.figures import summarize
from tracereader.figures.repeats import repeated_names, repeats
from tracereader.findings import cheatsheet, decoding
from tracereader.trace import read
from tracereader.trace.facts import run_facts

MODELS = {file.name.split(".")[0]: file for file in references.MODELS}
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# The layers of each model: for each run of equal stretches their number, and the activities counted by hand.
LAYERS = {
    "qwen3_decode_eager": [(28, 66)],
    "qwen3_decode_compiled": [(27, 19)],  # the first layer also computes shared values
    "qwen3_decode_graph": [(27, 19)],
    "qwen3_generate_static": [(28, 66)],
    "qwen3_prefill_logits": [(28, 55)],
    "qwen3moe_generate": [(8, 67)],
    "qwen3moe_generate_warm": [(8, 67)],
    "bert_modules": [(12, 13)],
    "bert_cold": [(12, 13)],
    "bert_warm": [(12, 13)],
    "gpt2_train": [(6, 35), (6, 54)],  # forward, backward
}


def measured(name):
    return references.measured(MODELS[name])


@lru_cache(maxsize=2)
def raw(name):
    """Return the complete events of a trace. The tests leave them as they are."""
    return [e for e in json.loads(gzip.decompress(MODELS[name].read_bytes()))["traceEvents"] if e.get("ph") == "X"]


def steps_of(events):
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    found = {}
    for mark in sorted(marks, key=lambda e: e["ts"]):
        calls = {
            e["args"]["correlation"]: e for e in events
            if e.get("cat") in ("cuda_runtime", "cuda_driver") and mark["ts"] <= e["ts"] < end(mark)
        }  # fmt: skip
        work = [e for e in events if e.get("cat") in GPU and e["args"]["correlation"] in calls]
        found[mark["name"]] = mark, calls, sorted(work, key=lambda e: e["ts"])
    return found


def medians(events, step):
    """Return each activity of a step with its median time over the steps, matched by name and number."""
    times = defaultdict(list)
    numbered = {}
    steps = steps_of(events)
    for name, (_, _, work) in steps.items():
        seen = defaultdict(int)
        for e in work:
            key = e["name"], seen[e["name"]]
            seen[e["name"]] += 1
            times[key].append(e["dur"])
            numbered[name, id(e)] = key
    return [(e, median(times[numbered[step, id(e)]])) for e in steps[step][2]]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if MODELS[name].stat().st_size > references.LARGE_FILE else ())
        for name in LAYERS
    ],
)
def test_the_kernels_names_give_the_layers(name):
    """Their number is the model's. One more stretch before or after them would have other kernels."""
    ours, events = measured(name), raw(name)
    assert [(one.times, one.pieces) for one in ours.repeats] == LAYERS[name]
    work = medians(events, ours.typical_step)
    alike = [re.sub(r"^(triton_\w+?)_fused.*", r"\1", e["name"]) for e, _ in work]
    alike = [re.sub(r"<.*|unrolled_|vectorized_", "", one) if "elementwise" in one else one for one in alike]
    for one in ours.repeats:
        stretches = [range(at, at + one.pieces) for at in range(one.start, one.end, one.pieces)]
        first = [alike[place] for place in stretches[0]]
        assert all([alike[place] for place in stretch] == first for stretch in stretches)
        after = alike[one.end : one.end + one.pieces]
        before = alike[max(0, one.start - one.pieces) : one.start]
        assert after != first and before != first
        costs = [sum(work[place][1] for place in stretch) for stretch in stretches]
        assert one.us == pytest.approx(median(costs), abs=0.05)
        assert one.total_us == pytest.approx(sum(costs), abs=0.5)
        assert costs[one.longest - 1] == pytest.approx(max(costs), abs=0.05)


def test_programs_without_layers_have_no_repeats():
    """These are scripts without layers, other programs but the one with four equal products, and shuffled calls."""
    flat = [file for file in REFERENCES if file.parent.name < "04_z"]
    found = {file: references.measured(file).repeats for file in [*flat, *OTHERS] if "streams" not in file.name}
    assert len(found) > 50 and not [file for file, some in found.items() if some]
    names = [one.name for one in measured("qwen3_decode_eager").gpu_work]
    assert repeated_names(names) == (17, 66, 28)
    random.Random(12).shuffle(names)
    assert repeated_names(names) is None


def test_a_different_layer_splits_the_run():
    names = [one.name for one in measured("qwen3_decode_eager").gpu_work]
    names.insert(17 + 66 * 20 + 5, "a kernel that no other layer has")
    assert repeated_names(names) == (17, 66, 20)


def test_each_token_of_generate_has_its_layers():
    """A trace of generate() without steps repeats its tokens, and each token repeats its layers."""
    work = measured("qwen3_decode_eager").gpu_work
    step = read(MODELS["qwen3_decode_eager"]).steps[0].work
    (tokens,) = repeats(list(step) * 5, work * 5)
    assert (tokens.times, tokens.pieces) == (5, 1877)
    assert (tokens.inside.times, tokens.inside.pieces) == (28, 66)


def test_graph_replays_are_equal_in_any_order_of_activities(tmp_path, capsys):
    """Four replays of a graph have other orders, as with several streams, and other work runs between them."""
    lot, events = random.Random(18), []
    ((_, _, graph), *_) = steps_of(raw("qwen3_decode_graph")).values()
    (longest, _), *_ = Counter(e["args"]["correlation"] for e in graph).most_common(1)
    graph = [e for e in graph if e["args"]["correlation"] == longest]
    for replay in range(4):
        start, order = 100_000 * replay, list(graph)
        for at in range(len(order) - 1):
            if lot.random() < 0.1:
                order[at : at + 2] = reversed(order[at : at + 2])
        call = {"ph": "X", "cat": "cuda_runtime", "pid": 1, "tid": 1, "ts": start, "dur": 50}
        events.append({**call, "name": "cudaGraphLaunch", "args": {"correlation": replay + 1}})
        at = start + 100
        for e in order:
            events.append({**e, "ts": at, "args": {**e["args"], "correlation": replay + 1}})
            at += e["dur"] + 1
        for other in range(lot.randrange(1, 9)):  # sampling has another length each time
            number = 1000 + 10 * replay + other
            args = {"correlation": number}
            events.append({**call, "name": "cudaLaunchKernel", "ts": at, "dur": 2, "args": args})
            events.append(
                {
                    **graph[0],
                    "name": f"sample{lot.random()}",
                    "ts": at + 5,
                    "dur": 3,
                    "args": {**graph[0]["args"], **args},
                }
            )
            at += 10
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"traceEvents": events}))
    (found,) = summarize(read(file)).repeats
    assert (found.times, found.pieces) == (4, len(graph))
    assert found.total_us == pytest.approx(4 * sum(e["dur"] for e in graph), rel=1e-4)
    assert cli.main([str(file), "--only", "repeats,work"]) == 0
    said = capsys.readouterr().out
    assert f"the same {len(graph)} GPU activities 4 times, replays of a CUDA graph" in said and "4 x nvjet" in said


def see(summary):
    return {one.name: verdict.evidence for one, verdict in cheatsheet.found(summary)}


# 05_llm stores these facts: 596,049,920 parameters in bf16; keys and values of 28 layers with 8 heads of 128.
KEY_BYTES = 2 * 28 * 8 * 128 * 2
FACTS = {"phase": "decode", "batch": 1, "tokens": 1, "weight_bytes": 1192099840, "cache_bytes": 521 * KEY_BYTES,
         "cache_bytes_allocated": 524 * KEY_BYTES, "layers": 28, "parameters": 596049920, "gb_s": 4200.0}  # fmt: skip


def with_facts(name, tmp_path, dtype="bf16", **facts):
    lesson = {"script": "05_llm", "flags": {"dtype": dtype}, "guesses": [], "facts": {"decoding": FACTS | facts}}
    text = unpacked(name)
    assert text.startswith("{") and '"lesson"' not in text
    file = tmp_path / "facts.json"
    file.write_text(f'{{"lesson": {json.dumps(lesson)}, {text[1:]}')
    return file


@cache
def unpacked(name):
    return gzip.decompress(MODELS[name].read_bytes()).decode()


def test_tokens_a_second_and_the_roofline_equal_the_raw_events(tmp_path):
    """The step is the time from step to step on the longer lane. Weights and cache are read once."""
    for name, lane in (("qwen3_decode_eager", "CPU"), ("qwen3_decode_graph", "GPU")):
        ours = summarize(read(with_facts(name, tmp_path))).llm.decoding
        steps = list(steps_of(raw(name)).values())
        cpu = pace([mark["ts"] for mark, _, _ in steps], steps[-1][0]["dur"])
        firsts = [min(e["ts"] for e in work) for _, _, work in steps]
        gpu = pace(firsts, max(map(end, steps[-1][2])) - firsts[-1])
        assert ours.lane == lane
        assert ours.step_us == pytest.approx(max(cpu, gpu), abs=0.01)
        assert ours.tokens_s == pytest.approx(1e6 / max(cpu, gpu))
        assert ours.read_us == pytest.approx((1192099840 + 521 * KEY_BYTES) / 4200e3)
    told = decoding.in_words(summarize(read(with_facts("qwen3_decode_graph", tmp_path))))
    assert told[0].startswith("decode of one sequence: a step of 1 token takes ")
    assert "lane, which is 412 tokens a second" in told[0]
    allowed = 4200e9 / (1192099840 + 521 * KEY_BYTES)
    assert told[1].startswith(f"the roofline allows {allowed:,.0f} tokens a second, and the step reaches")
    assert "of that: reading the weights (1.19 GB)" in told[1]
    assert told[1].endswith("at 4.2 TB/s, the bandwidth that the run measured")
    events = raw("qwen3_decode_graph")
    product = re.compile(r"nvjet|gemm|triton_(per|red)_(?!.*_cos_).*_b?mm_")
    us = sum(us for e, us in medians(events, "ProfilerStep#3") if product.search(e["name"]))
    rate = 1192099840 / us / 1e6
    assert told[2].endswith(f"and read the weights at {rate:.2f} TB/s, {rate / 4.2:.0%} of that bandwidth")
    unmeasured = decoding.in_words(summarize(read(with_facts("qwen3_decode_graph", tmp_path, gb_s=None))))
    assert unmeasured[1].endswith("at the data sheet's 4.8 TB/s")
    # A roofline below the measured rate is not shown.
    assert len(decoding.in_words(summarize(read(with_facts("qwen3_decode_graph", tmp_path, weight_bytes=2**40))))) == 1


def test_arithmetic_limits_many_sequences(tmp_path):
    """Each weight multiplies and adds once per token. For 1,024 tokens this takes longer than reading."""
    many = {"batch": 1024, "tokens": 1024}
    summary = summarize(read(with_facts("qwen3_decode_graph", tmp_path, **many)))
    reading, multiplying = (1192099840 + 521 * KEY_BYTES) / 4200e3, 2 * 596049920 * 1024 / 989e6
    assert multiplying > reading and summary.llm.decoding.least_us == pytest.approx(multiplying)
    told = decoding.in_words(summary)
    assert told[1].startswith(
        f"the roofline allows {1024 / multiplying * 1e6:,.0f} tokens a second, and the step reaches "
        f"{multiplying / summary.llm.decoding.step_us:.1%} of that: arithmetic is the limit, because 2 x 596.0 M "
        f"weights x 1,024 tokens = {2 * 596049920 * 1024 / 1e9:,.1f} GFLOP take {multiplying / 1e3:.1f} ms at "
        "the data sheet's 989 TFLOP/s; reading the weights (1.19 GB)"
    )
    assert f"takes {reading:.1f} µs at 4.2 TB/s" in told[1]
    # Reading limits one sequence. Without a known type only the limit of reading is shown.
    assert summarize(read(with_facts("qwen3_decode_graph", tmp_path))).llm.decoding.least_us == pytest.approx(reading)
    for dtype in ("fp32", None):
        unknown = decoding.in_words(summarize(read(with_facts("qwen3_decode_graph", tmp_path, dtype=dtype, **many))))
        assert unknown[1].startswith(f"reading alone allows {1024 / reading * 1e6:,.0f} tokens a second, and")
    faster = decoding.in_words(summarize(read(with_facts("qwen3_decode_graph", tmp_path, batch=4096, tokens=4096))))
    assert len(faster) == 1


COPIES = "triton_poi_fused_clone_expand_scaled_dot_product_attention_5"


def decode_in_a_graph(tmp_path, gap=1.0, copies=False, **facts):
    """Write a trace of three steps with one graph launch each, a product of 400 µs and attention of 1,000 µs."""
    events = []
    for number in range(3):
        at, called = 2500.0 * number, {"correlation": number + 1}
        events += [
            event(f"ProfilerStep#{number}", "user_annotation", at, 2000.0),
            event("cudaGraphLaunch", "cuda_runtime", at + 10, 20.0, **called),
        ]
        on_gpu = [("nvjet_tst_64x8_64x16_1x2_h_bz_NNT", 400.0)] + [(COPIES, 10.0)] * 2 * copies
        on_gpu += [("cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16", 1000.0)]
        start = at + 50
        for name, dur in on_gpu:
            events.append(event(name, "kernel", start, dur, tid=7, device=0, stream=7, grid=[1, 1, 1], **called))
            start += dur + gap
    document = {
        "traceEvents": events,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "lesson": {"script": "05_llm", "flags": {"dtype": "bf16"}, "facts": {"decoding": FACTS | facts}},
    }
    file = tmp_path / "made.json"
    file.write_text(json.dumps(document))
    return file


def test_a_cuda_graph_is_not_attributed_to_torch_compile(tmp_path):
    shown = cheatsheet.found(summarize(read(decode_in_a_graph(tmp_path))))
    (graph,) = [one for one, _ in shown if one.name == "graph_replay"]
    assert graph.where == "CPU lane" and "torch.cuda.graph" in graph.means


@pytest.mark.parametrize(
    "facts",
    [None, 7, [], {"phase": "nap"}, {"batch": 0}, {"batch": "1"}, {"tokens": None}, {"tokens": -1}, {"tokens": 1e999}],
)
def test_odd_facts_do_not_stop_the_report(facts, tmp_path):
    """A file may contain anything. Usable facts are used, and the report is printed."""
    told = {**FACTS, **facts} if isinstance(facts, dict) else facts
    assert run_facts({"script": "x", "facts": {"decoding": told}}).decoding is None
    assert run_facts({"script": "x", "facts": facts}).decoding is None
    odd = run_facts({"script": "x", "facts": {"decoding": {**FACTS, "gb_s": "fast", "layers": True}}}).decoding
    assert (odd.gb_s, odd.layers, odd.tokens) == (None, None, FACTS["tokens"])


@pytest.mark.exhaustive
def test_a_prefill_is_told_as_tokens(tmp_path):
    facts = {"phase": "prefill", "tokens": 512, "gb_s": None}
    summary = summarize(read(with_facts("qwen3_prefill_logits", tmp_path, **facts)))
    (told,) = decoding.in_words(summary)
    assert told.startswith("prefill of one sequence: ") and "a step of 512 tokens" in told


def test_equal_modules_share_a_row():
    """BERT-base has 12 layers of six Linears, and a pooler."""
    ours = measured("bert_modules")
    rows = {place.name: place for place in ours.places.by_module_class}
    assert rows["36 x Linear in BertSelfAttention"].pieces == 36
    assert {"12 x Linear in BertIntermediate", "12 x Linear in BertOutput", "Linear in BertPooler"} <= set(rows)
    assert sum(place.pieces for place in ours.places.by_module_class) == len(ours.gpu_work)
    assert sum(place.gpu_us for place in ours.places.by_module_class) == pytest.approx(
        sum(place.gpu_us for place in ours.places.by_module)
    )


@pytest.mark.parametrize(("name", "file"), references.small_first([*MODELS.items()]))
def test_a_models_report_fits_and_folds(name, file, capsys):
    assert cli.main([str(file)]) == 0
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) <= 120
    times, pieces = LAYERS[name][0]
    assert f"{times} x {pieces} activities" in screen
    assert cli.main([str(file), "--only", "work"]) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{times} x ")]
    assert len(listed) == sum(pieces for some, pieces in LAYERS[name] if some == times)
