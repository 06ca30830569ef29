"""The bytes that an op moves, computed by hand from its recorded shapes: each input once, each output once."""

import json
import math

import pytest
from raw_events import event

from tracereader.figures import summarize
from tracereader.trace import read

BF16, HALF, NUMBER, LIST = "c10::BFloat16", "c10::Half", "Scalar", "ScalarList"
N = 64 * 1024
KERNEL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::SomeFunctor<float>, std::array<char*, 3ul> >(int)"
)
CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy{}<{}, unsigned int, 3, 128, 1>(x)"


@pytest.fixture
def moved(tmp_path):
    """Return a function: moved(op, dims, types, concrete) -> the bytes of that op's kernel; more: its other kernels."""

    def write(op, dims, types, concrete=None, strides=None, kernel=KERNEL, more=()):
        told = {"Input Dims": dims, "Input type": types, "Concrete Inputs": concrete, "Input Strides": strides}
        events = [event(op, "cpu_op", 10, 80, **{key: one for key, one in told.items() if one is not None})]
        for at, name in enumerate([kernel, *more]):
            cat = "gpu_memset" if name.startswith("Memset") else "kernel"
            events.append(event("cudaLaunchKernel", "cuda_runtime", 20 + 10 * at, 1, correlation=at + 1))
            events.append(event(name, cat, 100 + 100 * at, 50, 7, correlation=at + 1, device=0, stream=7))
        (tmp_path / "made.json").write_text(json.dumps({"traceEvents": events}))
        return summarize(read(tmp_path / "made.json")).gpu_work[0].bytes_moved

    return write


A = [64, 1024]


@pytest.mark.parametrize(
    ("op", "dims", "types", "concrete", "bytes_moved"),
    [
        # with a number, which is no tensor; out of place and in place
        ("aten::mul", [A, []], [BF16, "double"], ["", ""], 2 * N + 2 * N),
        ("aten::mul", [A, []], ["float", NUMBER], None, 4 * N + 4 * N),
        ("aten::add_", [A, A, []], [BF16, BF16, NUMBER], ["", "", "1"], 2 * N + 2 * N + 2 * N),
        ("aten::pow", [A, []], ["float", NUMBER], ["", "2"], 4 * N + 4 * N),
        ("aten::clamp", [A, [], []], [HALF, NUMBER, NUMBER], ["", "0", "1"], 2 * N + 2 * N),
        # broadcast by shape: neither input is as large as the result
        ("aten::add", [[64, 1], [1024], []], ["float", "float", NUMBER], None, 4 * 64 + 4 * 1024 + 4 * N),
        ("aten::masked_fill_", [A, [1024], []], [BF16, "bool", NUMBER], ["", "", "-inf"], 2 * N + 1024 + 2 * N),
        ("aten::masked_fill", [A, A, []], [BF16, "bool", NUMBER], ["", "", "0"], 2 * N + N + 2 * N),
        ("aten::where", [A, A, []], ["bool", "float", "float"], None, N + 4 * N + 4 * N),
        # the result's type: promoted, or true and false
        ("aten::mul", [A, A], [BF16, "float"], None, 2 * N + 4 * N + 4 * N),
        ("aten::mul", [A, A], [BF16, HALF], None, 2 * N + 2 * N + 4 * N),
        ("aten::mul", [A, A], ["long int", BF16], None, 8 * N + 2 * N + 2 * N),
        ("aten::add", [A, A, []], ["long int", "long int", NUMBER], None, 8 * N + 8 * N + 8 * N),
        ("aten::gt", [A, []], ["float", NUMBER], ["", "0"], 4 * N + N),
        # out=: written, not read
        ("aten::mul", [A, A, A], ["float", "float", BF16], None, 4 * N + 4 * N + 2 * N),
        ("aten::fill_", [A, []], [BF16, NUMBER], ["", "0."], 2 * N),
        ("aten::addcmul_", [A, A, A, []], ["float"] * 3 + [NUMBER], None, 4 * (4 * N)),
        ("aten::gelu_backward", [A, A, []], [BF16, BF16, ""], ["", "", ""], 3 * 2 * N),
        ("aten::native_dropout", [A, [], []], [BF16, NUMBER, NUMBER], ["", "0.1", "True"], 2 * N + 2 * N + N),
        # softmax, and wider than its input
        ("aten::_softmax", [A, [], []], [BF16, NUMBER, NUMBER], ["", "-1", "False"], 2 * N + 2 * N),
        ("aten::_softmax", [A, [], []], [BF16, NUMBER, NUMBER], ["", "-1", "True"], 2 * N + 4 * N),
        ("aten::_log_softmax_backward_data", [A, A, [], []], ["float"] * 2 + [NUMBER] * 2, ["", "", "1", "5"],
         4 * N + 4 * N + 2 * N),
        # layer norm reads its weights and keeps a row's mean and deviation
        ("aten::native_layer_norm", [A, [], [1024], [1024], []], [BF16, LIST, BF16, BF16, NUMBER],
         ["", "[1024]", "", "", "1e-05"], 2 * N + 2 * 2 * 1024 + 2 * N + 2 * 4 * 64),
        ("aten::native_layer_norm", [A, [], [], [], []], [BF16, LIST, "", "", NUMBER], ["", "[1024]", "", "", "1e-05"],
         2 * N + 2 * N + 2 * 4 * 64),
        # reductions: over some dimensions, over all of them, into another type
        ("aten::mean", [A, [], [], []], ["float", LIST, NUMBER, ""], ["", "[-1]", "True", ""], 4 * N + 4 * 64),
        ("aten::sum", [A, [], [], []], [BF16, LIST, NUMBER, ""], ["", "[0]", "False", "6"], 2 * N + 4 * 1024),
        ("aten::sum", [A, []], ["bool", ""], ["", ""], N + 8),
        ("aten::sum", [A, [], [], [], [64]], ["float", LIST, NUMBER, "", "float"], ["", "[1]", "False", "", ""],
         4 * N + 4 * 64),
        ("aten::amax", [A, [], []], ["float", LIST, NUMBER], ["", "[0, 1]", "False"], 4 * N + 4),
        ("aten::argmax", [A, [], []], ["float", NUMBER, NUMBER], ["", "-1", "False"], 4 * N + 8 * 64),
        ("aten::all", [A], ["bool"], [""], N + 1),
        ("aten::linalg_vector_norm", [A, [], [], [], []], ["float", NUMBER, "", NUMBER, ""], ["", "2", "", "False", ""],
         4 * N + 4),
    ],
)  # fmt: skip
def test_bytes_that_an_op_reads_and_writes(moved, op, dims, types, concrete, bytes_moved):
    assert moved(op, dims, types, concrete) == bytes_moved


@pytest.mark.parametrize(
    ("kernel", "item"),
    [(CAT.format("_contig", "at::native::(anonymous namespace)::OpaqueType<2u>"), 2), (CAT.format("", "float"), 4),
     (CAT.format("", "c10::Half"), 2), (CAT.format("", "unsigned char"), 1), (CAT.format("", "T"), None)],
)  # fmt: skip
def test_a_concatenation_takes_its_type_from_the_kernels_name(moved, kernel, item):
    shapes = [[8, 128, 64], [8, 100, 64]]
    elements = sum(map(math.prod, shapes))
    found = moved("aten::cat", [shapes, []], ["TensorList", NUMBER], ["", "1"], kernel=kernel)
    assert found == (item and 2 * elements * item)


def test_an_expanded_tensor_is_read_once(moved):
    strides = [[1024, 1], [0, 1]]
    assert moved("aten::mul", [A, A], ["float", "float"], strides=strides) == 4 * N + 4 * 1024 + 4 * N


# What the record does not decide.
@pytest.mark.parametrize(
    ("op", "dims", "types", "concrete"),
    [
        ("aten::mul", [A, []], ["long int", "double"], ["", ""]),  # 2 or 2.5: another type
        ("aten::div", [A, A], ["long int", "long int"], None),
        ("aten::exp", [A], ["long int"], None),
        ("aten::add", [[3, 4], [5], []], ["float", "float", NUMBER], None),  # do not go together
        ("aten::_softmax", [A, [], []], [BF16, NUMBER, NUMBER], None),
        ("aten::mean", [A, [], [], []], ["float", LIST, NUMBER, ""], None),
        ("aten::mean", [A, [], [], []], ["float", LIST, NUMBER, ""], ["", "[7]", "True", ""]),
        ("aten::sum", [A, [], [], []], ["float", LIST, NUMBER, ""], ["", "[-1]", "True", "99"]),
        ("aten::sum", [A, [], [], []], ["float", LIST, NUMBER, ""], ["", "[" * 99, "True", ""]),
        ("aten::native_layer_norm", [A, [], [], [], []], [BF16, LIST, "", "", NUMBER], None),
        ("aten::native_dropout", [A, [], []], [BF16, NUMBER, NUMBER], None),
        ("aten::native_dropout", [A, [], []], [BF16, NUMBER, NUMBER], 7),
        ("aten::embedding", [[1000, 64], [512], [], [], []], ["float", "long int"] + [NUMBER] * 3, None),
        ("aten::mul", [A, A], ["float", "c10::complex<float>"], None),
        ("aten::fill_", [[], []], ["float", NUMBER], None),
        ("aten::cat", [], [], None),
        ("aten::cat", ["x"], ["TensorList"], None),
        ("aten::_softmax", "x", 3, {}),
    ],
)
def test_bytes_are_unknown_if_the_record_does_not_decide(moved, op, dims, types, concrete):
    assert moved(op, dims, types, concrete) is None


def test_no_kernel_of_several_has_all_bytes_of_their_op(moved):
    given = ("aten::sum", [A, [], [], []], ["float", LIST, NUMBER, ""], ["", "[-1]", "True", ""])
    assert moved(*given, more=["Memset (Device)"]) == 4 * N + 4 * 64
    assert moved(*given, more=["another_kernel"]) is None
