"""The sentences about attention are checked against the raw events of an H200's traces and of other programs."""

import gzip
import itertools
import json
import math
import re
from statistics import median

import pytest
from raw_events import raw_steps, raw_work
from references import OTHERS, REFERENCES, ROOT, measured

from tracereader import cli
from tracereader.changes.catalogue import opportunities
from tracereader.figures import summarize
from tracereader.findings import attention
from tracereader.trace import read

FOLDER = ROOT / "tests/traces"
GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def path(name):
    return FOLDER / f"attention_{name}.json.gz"


def raw(name):
    return json.loads(gzip.decompress(path(name).read_bytes()))


def both(name):
    """Return a trace's summary, the ops of its typical step, and the step's GPU work with the launching ops."""
    ours = measured(path(name))
    events = [event for event in raw(name)["traceEvents"] if event.get("ph") == "X"]
    mark = next(e for e in events if e["name"] == ours.typical_step and e["cat"] == "user_annotation")
    ops = sorted((e for e in events if e["cat"] == "cpu_op" and inside(e, mark)), key=lambda e: e["ts"])
    by_id = {op["args"]["External id"]: op["name"] for op in ops}
    work = [(e, by_id[e["args"]["External id"]]) for e in events if e["cat"] in GPU
            and e["args"].get("External id") in by_id]  # fmt: skip
    return ours, ops, sorted(work, key=lambda pair: pair[0]["ts"])


def inside(event, around):
    return around["ts"] <= event["ts"] < around["ts"] + around["dur"]


def us(value):
    return pytest.approx(value, abs=0.02)


def altered(tmp_path, name, change):
    """Write the trace with a changed document, and return the file."""
    document = raw(name)
    change(document)
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(document))
    return file


@pytest.mark.parametrize(("name", "pieces"), [("naive", 4), ("inplace", 3), ("math", 7), ("compiled_naive", 1)])
def test_unfused_attention_is_the_time_between_its_products(name, pieces):
    ours, _, work = both(name)
    products = [n for n, (e, op) in enumerate(work) if op == "aten::bmm" and e["cat"] == "kernel"]
    between = [e for e, op in work[products[0] + 1 : products[1]] if op != "aten::bmm"]
    (found,) = ours.attention.unfused
    assert found.pieces == len(between) == pieces
    assert found.us == us(sum(e["dur"] for e in between))
    assert found.products_us == us(sum(e["dur"] for e, op in work if op == "aten::bmm" and e["cat"] == "kernel"))
    assert found.scores is None  # no shapes in these traces
    assert attention.unfused().ask(ours).holds is True


@pytest.mark.parametrize("name", ["cpu_naive", "cpu_math"])
def test_unfused_attention_on_a_cpu_is_self_time_of_ops(name):
    """The time is the self time of ops between the two products, recomputed from their spans."""
    ours, ops, work = both(name)
    first, last = (op for op in ops if op["name"] == "aten::bmm")
    between = [op for op in ops if first["ts"] + first["dur"] <= op["ts"] < last["ts"]]
    roots, reached = [], 0.0
    for op in between:
        if op["ts"] >= reached:
            roots.append(op)
            reached = op["ts"] + op["dur"]
    # The matmul op around the second product is open when the product starts, so only the time before counts.
    open_at_last = [op for op in between if op["ts"] + op["dur"] > last["ts"]]
    inner = [op for op in between if open_at_last and inside(op, open_at_last[0]) and op not in open_at_last]
    within = sum(op["dur"] for op in inner if not any(o is not op and inside(op, o) for o in inner))
    closed = sum(op["dur"] for op in roots if op not in open_at_last)
    (found,) = ours.attention.unfused
    own = ours.cpu.ops["aten::matmul"].self_us
    assert not work and (found.pieces, found.scores) == (0, None)
    assert closed + within <= found.us + 0.02 <= closed + within + own + 0.04
    assert attention.mask_remade().ask(ours).holds is (name == "cpu_math")
    assert attention.hidden_copy().ask(ours).holds is (name == "cpu_naive")


# torch's records of these ops of naive attention, [8, 16, 1024, 64] in bf16.
Q, SCORES = [8, 16, 1024, 64], [8, 16, 1024, 1024]
STRIDES = [1024 * 1024 * 16, 1024 * 1024, 1024, 1]
BF16, BOOL = "c10::BFloat16", "bool"
SHAPES = {
    "aten::mul": ([SCORES, []], [BF16, "double"], [STRIDES, []]),
    "aten::copy_": ([SCORES, SCORES, []], [BF16, BF16, "Scalar"], [STRIDES, STRIDES, []]),
    "aten::masked_fill_": ([SCORES, SCORES, []], [BF16, BOOL, "Scalar"], [STRIDES, [0, 0, 1024, 1], []]),
    "aten::_softmax": ([SCORES, [], []], [BF16, "Scalar", "Scalar"], [STRIDES, [], []]),
}
PRODUCTS = (
    [[128, 1024, 64], [128, 64, 1024]],
    [[128, 1024, 1024], [128, 1024, 64]],
)


def with_shapes(document):
    products = {}
    for event in sorted(document["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event.get("cat") != "cpu_op":
            continue
        if event["name"] in SHAPES:
            dims, types, strides = SHAPES[event["name"]]
            event["args"] |= {"Input Dims": dims, "Input type": types, "Input Strides": strides}
        elif event["name"] == "aten::bmm":
            number = products["bmm"] = products.get("bmm", -1) + 1
            event["args"] |= {"Input Dims": PRODUCTS[number % 2], "Input type": [BF16, BF16]}


def test_writes_and_reads_of_the_scores_are_counted(tmp_path):
    """The first product, mul, the copy, masked_fill_ and softmax write them; the last four and the second product read
    them."""
    ours = summarize(read(altered(tmp_path, "naive", with_shapes)))
    (found,) = ours.attention.unfused
    matrix = 8 * 16 * 1024 * 1024 * 2
    assert (found.scores.bytes, found.scores.written, found.scores.read) == (matrix, 5, 5)
    assert found.scores.moved == 10 * matrix
    assert found.scores.at_least == 4 * 8 * 16 * 1024 * 64 * 2
    (saved,) = summarize(read(altered(tmp_path, "inplace", with_shapes))).attention.unfused
    assert (saved.scores.written, saved.scores.read) == (4, 4)
    seen = attention.unfused().ask(ours).evidence
    assert "the 128 x 1024 x 1024 scores (268.4 MB) are written 5 times and read 5 times: 2.68 GB moved" in seen


# torch's records of the math backend's ops on the scores, in fp32 with one mask for all heads; where() has an out=.
FP32, ROW, MASK = "float", [8, 16, 1024, 1], [1024, 1024]
MATH = {
    "aten::scaled_dot_product_attention": ([Q, Q, Q, [], [], []], [BF16] * 3 + ["", "Scalar", "Scalar"]),
    "aten::add_": ([SCORES, MASK, []], [FP32, FP32, "Scalar"]),
    "aten::_softmax": ([SCORES, [], []], [FP32, "Scalar", "Scalar"]),
    "aten::isneginf": ([SCORES], [FP32]),
    "aten::all": ([SCORES, [], []], [BOOL, "Scalar", "Scalar"]),
    "aten::where": ([ROW, [], SCORES, SCORES], [BOOL, FP32, FP32, FP32]),
    "aten::copy_": ([SCORES, SCORES, []], [BF16, FP32, "Scalar"]),
}


@pytest.mark.parametrize("out", [True, False])
def test_the_bytes_of_the_math_backends_scores_follow_their_types(tmp_path, out):
    """All are fp32 except isneginf's results of one byte and the copy in bf16. where() does not read its out=."""

    def change(document):
        products = 0
        for event in sorted(document["traceEvents"], key=lambda event: event.get("ts", 0)):
            if event.get("cat") == "cpu_op" and event["name"] in MATH:
                dims, types = MATH[event["name"]]
                last = 3 if event["name"] == "aten::where" and not out else len(dims)
                event["args"] |= {"Input Dims": dims[:last], "Input type": types[:last]}
            elif event.get("cat") == "cpu_op" and event["name"] == "aten::bmm":
                event["args"] |= {"Input Dims": PRODUCTS[products % 2], "Input type": [FP32, FP32]}
                products += 1

    (found,) = summarize(read(altered(tmp_path, "math", change))).attention.unfused
    elements = 8 * 16 * 1024 * 1024
    written = {"bmm": 4, "add_": 4, "_softmax": 4, "isneginf": 1, "where": 4, "copy_": 2}
    read_by = {"add_": 4, "_softmax": 4, "isneginf": 4, "all": 1, "where": 4, "copy_": 4, "bmm": 4}
    assert (found.scores.written, found.scores.read) == (len(written), len(read_by))
    assert found.scores.moved == elements * (sum(written.values()) + sum(read_by.values()))
    assert found.scores.at_least == 4 * math.prod(Q) * 2  # the call's inputs are bf16


def test_a_fused_kernel_reads_shared_keys_once(tmp_path):
    """Two heads of keys serve sixteen heads of queries. The math backend expands them for each query head."""

    def change(document):
        with_shapes(document)
        for event in document["traceEvents"]:
            if event.get("name") == "aten::scaled_dot_product_attention":
                keys = [8, 2, 1024, 64]
                event["args"] |= {"Input Dims": [Q, keys, keys], "Input type": [BF16] * 3}

    (found,) = summarize(read(altered(tmp_path, "math", change))).attention.unfused
    assert found.scores.at_least == 2 * 8 * (16 + 2) * 1024 * 64 * 2


def softmax_with(**args):
    def change(document):
        with_shapes(document)
        for event in document["traceEvents"]:
            if event.get("name") == "aten::_softmax":
                event["args"] |= args

    return change


# 32 x 1000 are other logits. One more column is a learned sink, which takes part only in the softmax.
@pytest.mark.parametrize(
    ("of", "holds"),
    [(SCORES, True), ([128, 1024, 1024], True), ([8, 16, 1024, 1025], True), ([32, 1000], False), ([1024, 16], False)],
)
@pytest.mark.parametrize("name", ["naive", "cpu_naive"])
def test_another_softmax_is_not_attention(tmp_path, name, of, holds):
    ours = summarize(read(altered(tmp_path, name, softmax_with(**{"Input Dims": [of, [], []]}))))
    (batch, rows, _), (_, _, columns) = PRODUCTS[0]
    assert holds is (math.prod(of) in (batch * rows * columns, batch * rows * (columns + 1)))
    assert len(ours.attention.unfused) == holds
    assert attention.unfused().ask(ours).holds is holds


@pytest.mark.parametrize(("over", "holds"), [("-1", True), ("3", True), ("2", False), ("1", False)])
@pytest.mark.parametrize("name", ["naive", "cpu_naive"])
def test_a_softmax_over_another_dimension_is_not_attention(tmp_path, name, over, holds):
    """Slot attention has one over the queries."""
    file = altered(tmp_path, name, softmax_with(**{"Concrete Inputs": ["", over, "False"]}))
    assert len(summarize(read(file)).attention.unfused) == holds


# A number divides the weights if dropout is written by hand.
@pytest.mark.parametrize(("op", "dims", "holds"), [
    ("aten::add", [SCORES, []], False), ("aten::add_", [SCORES, SCORES], False), ("aten::add", [Q, Q], True),
    ("aten::add", [[8, 16, 1, 1024, 1024], []], False), ("aten::mul", [SCORES, SCORES], True),
    ("aten::div", [SCORES, []], True), ("aten::div", [SCORES, [8, 16, 1024, 1]], False),
    ("aten::div_", [SCORES, [8, 16, 1024, 1]], False),
])  # fmt: skip
@pytest.mark.parametrize("name", ["naive", "cpu_naive"])
def test_a_softmax_whose_result_is_changed_is_not_attention(tmp_path, name, op, dims, holds):
    def change(document):
        with_shapes(document)
        events = document["traceEvents"]
        for softmax in [e for e in events if e.get("name") == "aten::softmax"]:
            args = {"Input Dims": dims, "Input type": [BF16] * 2, "External id": 10**6 + softmax["args"]["External id"]}
            added = softmax | {"name": op, "ts": softmax["ts"] + softmax["dur"] + 0.1, "dur": 1.2, "args": args}
            events.append(added)
            calls = [e for e in events if e.get("cat") == "cuda_runtime" and inside(e, softmax)]
            for call in [e for e in calls if "Launch" in e["name"]]:
                number = {"correlation": 10**6 + call["args"]["correlation"]}
                kernel = next(
                    e for e in events
                    if e.get("cat") == "kernel" and e["args"]["correlation"] == call["args"]["correlation"]
                )  # fmt: skip
                later = kernel["ts"] + kernel["dur"] + 0.01
                events += [
                    call | {"ts": added["ts"] + 0.3, "dur": 0.5, "args": call["args"] | number},
                    kernel | {"ts": later, "dur": 0.1, "args": kernel["args"] | number},
                ]

    before = summarize(read(altered(tmp_path, name, with_shapes))).attention.unfused
    after = summarize(read(altered(tmp_path, name, change))).attention.unfused
    assert (len(before), len(after)) == (1, holds)
    if holds and name == "naive":
        assert after[0].pieces == before[0].pieces + 1


def test_a_hidden_copy_is_found():
    ours, ops, work = both("naive")
    (out_of_place,) = [op for op in ops if op["name"] == "aten::masked_fill"]
    (clone,) = [op for op in ops if op["name"] == "aten::clone" and inside(op, out_of_place)]
    ((copy, _),) = [(e, op) for e, op in work if e["cat"] == "gpu_memcpy"]
    (found,) = ours.attention.hidden_copies
    assert (found.op, found.calls, found.copied) == ("aten::masked_fill", 1, 2 * copy["args"]["bytes"])
    assert found.gpu_us == us(copy["dur"]) and found.cpu_us == us(clone["dur"])
    verdict = attention.hidden_copy().ask(ours)
    assert verdict.holds and "aten::masked_fill_ does not" in verdict.evidence
    assert attention.hidden_copy().ask(both("inplace")[0]).holds is False


@pytest.mark.parametrize(("given", "holds"), [(SCORES, True), ([8, 16, 1, 1024], False)])
@pytest.mark.parametrize("name", ["naive", "cpu_naive"])
def test_in_place_is_not_proposed_if_the_result_is_larger_than_the_input(tmp_path, name, given, holds):
    """If masked_fill's mask is larger than the input, it fills an expanded copy of the input."""

    def change(document):
        for event in document["traceEvents"]:
            if event.get("name") in ("aten::masked_fill", "aten::masked_fill_"):
                mine = given if event["name"] == "aten::masked_fill" else SCORES
                event["args"] |= {"Input Dims": [mine, SCORES, []], "Input type": [BF16, BOOL, "Scalar"]}

    ours = summarize(read(altered(tmp_path, name, change)))
    assert len(ours.attention.hidden_copies) == holds
    assert attention.hidden_copy().ask(ours).holds is holds


@pytest.mark.parametrize(
    ("others", "told"), [(0, ""), (1, "; 1 more op clones its input"), (2, "; 2 more ops clone their input")]
)
def test_other_hidden_copies_are_counted(tmp_path, others, told):
    def event(name, ts, dur, cat="cpu_op"):
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {}}

    events = [event("ProfilerStep#1", 1000, 1000, "user_annotation")]
    for number in range(1 + others):
        ts = 1100 + 100 * number
        events.append(event(f"aten::fill{number}", ts, 90))
        events.append(event("aten::clone", ts + 10, 50 - number))
        events.append(event(f"aten::fill{number}_", ts + 70, 10))
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"traceEvents": events}))
    seen = attention.hidden_copy().ask(summarize(read(file)))
    assert (seen.holds, seen.evidence) == (
        True,
        f"aten::fill0 clones its input first: 50.0 µs; aten::fill0_ does not{told}",
    )


def test_the_math_backend_makes_masks_and_casts():
    ours, ops, work = both("math")
    mask = {"aten::fill_", "aten::tril", "aten::where"}
    (ones,) = [op for op in ops if op["name"] == "aten::ones"]
    (softmax,) = [op for op in ops if op["name"] == "aten::_safe_softmax"]
    # These ops launch the mask's kernels before the first product.
    first = next(n for n, (_, op) in enumerate(work) if op == "aten::bmm")
    made = [e for e, op in work[:first] if op in mask]
    assert ours.attention.mask_made.pieces == len(made) == 5
    assert ours.attention.mask_made.gpu_us == us(sum(e["dur"] for e in made))
    assert ours.attention.mask_made.steps == 3 and ones["ts"] < softmax["ts"]
    assert ours.attention.mask_made.ops == ("aten::ones", "aten::tril", "aten::scalar_tensor", "aten::where")
    casts = [e for e, op in work if op == "aten::copy_" and "LoadWithCast" in e["name"]]
    products = [e for e, op in work if op == "aten::bmm"]
    assert all("ffma" in e["name"] for e in products)
    found = ours.attention.cast_products
    assert (found.casts, found.products) == (len(casts), len(products)) == (3, 2)
    assert found.cast_us == us(sum(e["dur"] for e in casts))
    cores = attention.on_cuda_cores().ask(ours)
    seen = re.match(r"2 of 2 products, ([\d.]+) µs", cores.evidence)
    assert cores.holds and float(seen[1]) == pytest.approx(sum(e["dur"] for e in products), rel=0.02)
    for finding in (attention.mask_remade, attention.cast_before_product, attention.for_an_older_gpu):
        assert finding().ask(ours).holds is True
    for name in ("naive", "flash", "flex"):
        assert attention.mask_remade().ask(both(name)[0]).holds is False
        assert attention.on_cuda_cores().ask(both(name)[0]).holds is not True


def test_one_step_does_not_show_whether_every_step_makes_a_mask(tmp_path):
    def only_the_second(document):
        events = [e for e in document["traceEvents"] if e.get("ph") == "X"]
        mark = next(e for e in events if e["name"] == "ProfilerStep#3" and e["cat"] == "user_annotation")
        document["traceEvents"] = [e for e in events if inside(e, mark) or e["cat"] in GPU]

    ours = summarize(read(altered(tmp_path, "math", only_the_second)))
    assert attention.mask_remade().ask(ours).holds is None


@pytest.mark.parametrize(
    ("name", "backend", "older", "library", "low"),
    [
        ("math", "math", True, False, None),
        ("efficient", "efficient", True, None, False),
        ("flash", "flash", None, None, True),
        ("cudnn", "cudnn", False, True, False),
        ("auto", "cudnn", False, True, False),
        ("flex", None, None, None, True),
        ("naive", None, False, False, None),
    ],
)
def test_verdicts(name, backend, older, library, low):
    ours = measured(path(name))
    assert list(attention.backends(ours)) == ([backend] if backend else [])
    assert attention.for_an_older_gpu().ask(ours).holds is older
    assert attention.time_in_a_library().ask(ours).holds is library
    assert attention.low_occupancy().ask(ours).holds is low


@pytest.mark.parametrize(("name", "limit", "by"), [("flash", "12.5%", "registers"),
                                                   ("cudnn", "18.8%", "registers and shared memory")])  # fmt: skip
def test_occupancy_of_claims_51_and_55(capsys, name, limit, by):
    assert cli.main([str(path(name)), "--only", "names"]) == 0
    screen = capsys.readouterr().out
    assert f"occupancy at most {limit}, limited by {by}" in screen
    assert ("13% by the profiler's estimate" in screen) == (name == "flash")
    assert ("the profiler's 0% is no estimate" in screen) == (name == "cudnn")


@pytest.mark.parametrize("file", [*REFERENCES, *OTHERS], ids=lambda file: f"{file.parents[1].name}/{file.stem}")
def test_missing_occupancy_estimates_follow_from_shared_memory(file):
    """It reports 0% for each kernel with more than 48 KB a block, and for no other that fills half the GPU."""
    ours = measured(file)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    for event in events:
        args = event.get("args", {})
        if event.get("cat") != "kernel" or "blocks per SM" not in args:
            continue
        if args["shared memory"] > 48 * 1024:
            assert args["est. achieved occupancy %"] == 0
        elif args["blocks per SM"] >= 0.5:
            assert args["est. achieved occupancy %"] > 0
    for one in ours.gpu_work:
        if one.occupancy:
            assert one.occupancy.not_estimated == (one.shared_memory > 48 * 1024)


PLAIN = [file for file in REFERENCES if file.parent.name[:2] in ("01", "02", "03")] + [
    FOLDER / f"{name}.json.gz"
    for name in ("blocking", "conv", "memory_bound", "misc", "streams", "train_item", "train_stack")
]


@pytest.mark.parametrize("file", PLAIN, ids=lambda file: f"{file.parents[1].name}/{file.stem}")
def test_reports_without_attention_do_not_mention_it(file):
    ours = measured(file)
    assert (
        ours.attention.unfused,
        ours.attention.hidden_copies,
        ours.attention.mask_made,
        ours.attention.cast_products,
    ) == ((), (), None, None)
    assert not attention.backends(ours)


REASON = "Flash attention requires last dimension of inputs to be at most 256"


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"attention": {"refused": {"flash": [REASON]}}}, True),
        ({"attention": {"refused": {"flash": REASON}}}, False),
        ({"attention": {"refused": {"flash": [3], "cudnn": []}}}, False),
        ({"attention": {"refused": [REASON]}}, False),
        ({"attention": [REASON]}, False),
        ({}, False),
    ],
)
def test_reasons_against_other_backends_are_shown(tmp_path, facts, told):
    def stored(document):
        document["lesson"] = {"script": "somebody's", "facts": facts}

    seen = attention.sdpa_backend.ask(summarize(read(altered(tmp_path, "cudnn", stored)))).evidence
    assert seen == "cudnn in 1 call" + f". flash refused: {REASON}" * told


def recorded(op, dims, inputs):
    def change(document):
        for event in document["traceEvents"]:
            if event.get("name") == op:
                types = [BF16, BF16, BF16]
                event["args"] |= {"Input Dims": dims, "Input type": types, "Concrete Inputs": inputs}

    return change


CUDNN, FLASH = "aten::_cudnn_attention_forward", "aten::_flash_attention_forward"
PAIRS = 1024 * 1025 // 2


@pytest.mark.parametrize(
    ("name", "change", "causal", "pairs"),
    [
        ("cudnn", recorded(CUDNN, [Q] * 3, [""] * 10 + ["True"]), True, PAIRS),
        ("cudnn", recorded(CUDNN, [Q] * 3, [""] * 10 + ["False"]), False, 1024 * 1024),
        ("cudnn", recorded(CUDNN, [Q] * 3, None), None, 1024 * 1024),
        ("cudnn", recorded(CUDNN, [[8, 16, 1, 64], Q, Q], [""] * 10 + ["True"]), None, 1024),
        # The kernel's name says causal.
        ("flash", recorded(FLASH, [[8, 1024, 16, 64]] * 3, None), True, PAIRS),
        ("efficient", recorded("aten::_efficient_attention_forward", [[8, 1024, 16, 64]] * 3, [""] * 9 + ["1"]), True,
         PAIRS),
    ],
)  # fmt: skip
def test_flops_of_attention_follow_its_mask(tmp_path, capsys, name, change, causal, pairs):
    file = altered(tmp_path, name, change)
    (one,) = [one for one in summarize(read(file)).gpu_work if one.kind == "kernel"]
    assert one.attention.causal is causal
    assert one.flops == 2 * 2 * 8 * 16 * pairs * 64  # two products, a multiplication and an addition each
    ran = [e for e in raw(name)["traceEvents"] if e.get("cat") == "kernel" and e["name"] == one.name]
    assert any(one.tflops == pytest.approx(one.flops / e["dur"] / 1e6, rel=1e-3) for e in ran)
    compute = one.flops / one.tflops * 1e-12 * 989e12 / one.flops  # what the data sheet's peak would take, over it
    assert (one.of_roof is None) == (causal is None)
    if causal is not None:
        assert one.roof == "compute" and one.of_roof == pytest.approx(1e12 * one.tflops / 989e12, rel=1e-6), compute
    assert cli.main([str(file), "--only", "names"]) == 0
    assert f"FLOP {({True: 'causal', False: 'not causal', None: 'without a mask'})[causal]} at " in (
        capsys.readouterr().out
    )


FLEX, SUMS = "triton_tem_fused_flex_attention_0", [8, 16, 1024]
BLOCKS = [[1, 1, 8], [1, 1, 8, 8], [1, 1, 8], [1, 1, 8, 8]]
SWAPPED = [8, 1024, 16, 64]


@pytest.mark.parametrize(
    ("tensors", "causal", "heads"),
    [
        ([Q, Q, Q, SUMS, SUMS, *BLOCKS, Q], True, 16),
        ([Q, Q, Q, SUMS, *BLOCKS, Q], False, 16),
        ([Q, [8, 2, 1024, 64], [8, 2, 1024, 64], SUMS, *BLOCKS, Q], True, 2),
        ([Q, Q, Q, SUMS, *BLOCKS, Q], None, None),  # an unknown mask
        ([SWAPPED, SWAPPED, SWAPPED, SUMS, *BLOCKS, Q], True, None),  # another order in memory
        ([Q, SWAPPED, SWAPPED, SUMS, *BLOCKS, Q], True, None),
        ([Q, Q, SUMS, *BLOCKS, Q], True, None),  # key and value are one
        ([Q, [8, 0, 1024, 64], [8, 0, 1024, 64], SUMS, *BLOCKS, Q], True, None),
        ([[1024], [1024], [1024]], True, None),
    ],
)
def test_sizes_of_flex_attention_follow_its_tensors(tmp_path, tensors, causal, heads):
    def change(document):
        recorded(FLEX, tensors, ["1"] * 12)(document)
        known = {"attention": {} if causal is None else {"causal": causal}}
        document["lesson"] = {"script": "x", "flags": {"dtype": "bf16"}, "facts": known}

    (one,) = [one for one in summarize(read(altered(tmp_path, "flex", change))).gpu_work if one.kind == "kernel"]
    if heads is None:
        assert (one.attention, one.flops, one.tflops) == (None, None, None)
        return
    assert (one.attention.kv_heads, one.attention.causal) == (heads, causal)
    assert one.flops == 4 * 8 * 16 * (PAIRS if causal else 1024 * 1024) * 64
    assert one.tflops == pytest.approx(one.flops / 1e6 / one.us, rel=0.1)
    assert one.bytes_moved == 2 * 8 * (16 + heads) * 1024 * 64 * 2


@pytest.mark.parametrize(("heads", "told"), [(16, "heads 16 · "), (2, "heads 16, 2 of keys and values · ")])
def test_heads_that_share_keys_and_values(tmp_path, capsys, heads, told):
    shared = [8, heads, 1024, 64]
    file = altered(tmp_path, "cudnn", recorded(CUDNN, [Q, shared, shared], [""] * 10 + ["True"]))
    assert cli.main([str(file), "--only", "names"]) == 0
    shown = capsys.readouterr().out
    assert f"batch 8 · {told}1024 queries" in " ".join(shown.split())
    moved = 2 * (2 * math.prod(Q) + 2 * math.prod(shared))  # bf16: query, result, key and value
    assert f"{moved / 1e6:.1f} MB to move at least" in " ".join(shown.split())


def test_stored_sizes_of_a_script_are_used(tmp_path):
    known = {"batch": 8, "heads": 16, "seq": 1024, "head_dim": 64, "causal": True}

    def stored(facts):
        def change(document):
            document["lesson"] = {"script": "x", "flags": {"dtype": "bf16"}, "facts": {"attention": facts}}

        return change

    for name in ("cudnn", "flex"):
        ours = summarize(read(altered(tmp_path, name, stored(known))))
        (one,) = [one for one in ours.gpu_work if one.kind == "kernel"]
        assert one.flops == 4 * 8 * 16 * PAIRS * 64 and one.of_roof is not None
        assert one.bytes_moved == 4 * 8 * 16 * 1024 * 64 * 2
    for odd in ({**known, "seq": "1024"}, {**known, "heads": -1}, "all", None):
        ours = summarize(read(altered(tmp_path, "cudnn", stored(odd))))
        assert all(one.attention is None for one in ours.gpu_work)


SIX = ("naive", "inplace", "math", "efficient", "flash", "cudnn")


def closing_table(capsys, *arguments):
    assert cli.main([*(str(path(name)) for name in SIX), *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 140])
def test_the_closing_table_equals_the_raw_events(monkeypatch, capsys, width):
    """Each run is a column. Times and kernels equal the raw events, and no table is too wide."""
    monkeypatch.setenv("COLUMNS", str(width))
    screen = closing_table(capsys)
    # In a pipe of 140 columns a sentence stays on one line.
    assert max(len(line) for line in screen.splitlines() if width == 80 or not line.startswith("run ")) <= width
    flat = " ".join(screen.split())
    busy, kernels = [], []
    for name in SIX:
        _, _, work = both(name)
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e, _ in work)
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(spans))  # one stream: no overlap
        events = [e for e in raw(name)["traceEvents"] if e.get("ph") == "X"]
        busy.append(median(sum(e["dur"] for e in raw_work(events, mark)) for mark in raw_steps(events)))
        kernels.append(sum(e["cat"] == "kernel" for e, _ in work))
    assert kernels == [5, 5, 20, 1, 1, 1]
    rows = {line[:18].strip(): line[18:].split() for line in screen.splitlines()}
    assert rows["GPU busy, ms"] == [f"{us / 1e3:.3f}" for us in busy]
    assert rows["kernels"] == [str(count) for count in kernels]
    assert rows["copies"] == ["1", "0", "0", "0", "0", "0"]
    for said in ("no copies instead of 1", "fp32 instead of bf16", "1 fused attention kernel instead of 1 softmax"):
        assert said in flat
    assert "aten::_softmax" in closing_table(capsys, "--only", "chain")


def test_memory_of_a_run_is_stored_or_profiled(tmp_path, capsys):
    """The stored peak is used first, then the maximum of the profiler's GPU events, then of its CPU events."""

    def stored(document):
        document["lesson"] = {"script": "x", "facts": {"peak_bytes": 554_000_000}}

    def events(document):
        for device, total in ((-1, 9_000_000_000), (0, 17_000_000), (0, 3_000_000), (0, "many"), (None, 5)):
            args = {"Bytes": 512, "Total Allocated": total, "Device Id": device, "Device Type": int(device != -1)}
            document["traceEvents"].append(
                {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 1, "pid": 1, "tid": 1, "args": args}
            )

    naive, flash = altered(tmp_path, "naive", stored), altered(tmp_path, "flash", events)
    assert cli.main([str(naive), str(flash), str(path("cudnn")), "--only", "steps"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "memory" in line]
    assert row.split()[-5:] == ["554.0", "MB", "17.0", "MB", "–"], row


@pytest.mark.parametrize("name", ["cpu_naive", "cpu_math"])
def test_memory_equals_the_profilers_events(name):
    totals = [e["args"]["Total Allocated"] for e in raw(name)["traceEvents"] if e.get("name") == "[memory]"]
    assert totals and measured(path(name)).source.peak_bytes == max(totals) > 0


def test_changes_name_the_costliest_work():
    def named(name):
        trace = read(path(name))
        return [one.change for one in opportunities(trace, summarize(trace))]

    assert named("naive") == ["fused_attention", "in_place"]
    assert named("math")[0] == "fused_attention"
    assert named("flash") == []
