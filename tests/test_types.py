"""Element types in all their spellings, and torch's records of an op's inputs."""

import json

import pytest
import torch

from tracereader.trace import kernel_names
from tracereader.trace.decoded import decoded
from tracereader.trace.types import DTYPES, WRITTEN, Inputs, dtype_of, inputs_of

# torch's own types by the names that are used here.
TORCHS = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
    "complex fp32": torch.complex64, "complex fp64": torch.complex128, "uint8": torch.uint8, "int8": torch.int8,
    "int16": torch.int16, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: one.collectives)
def test_each_type_has_torchs_size_in_every_spelling(dtype):
    torchs = TORCHS.get(dtype.name) or getattr(torch, dtype.collectives.lower())
    assert dtype.bytes == torchs.itemsize
    for spelling in (*dtype.written, dtype.collectives, dtype.collectives.lower(), dtype.name):
        assert dtype_of(spelling).bytes == dtype.bytes and dtype_of(spelling).name == dtype.name


def test_torchs_type_names_in_a_trace_are_known(tmp_path):
    """Input types as this machine's torch records them for one op on each type."""
    made = [torch.ones(2, 3, dtype=dtype) for dtype in TORCHS.values()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as recorded:
        for one in made:
            one.clone()
    recorded.export_chrome_trace(str(tmp_path / "t.json"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    clones = sorted((e for e in events if e["name"] == "aten::clone"), key=lambda e: e["ts"])
    assert [dtype_of(Inputs(e["args"]).types[0]).name for e in clones] == list(TORCHS)
    assert all(Inputs(e["args"]).dims == [[2, 3]] for e in clones)


def test_no_type():
    assert [dtype_of(one) for one in ("", "Scalar", "ScalarList", "GenericList", None, 3, "TensorList")] == [None] * 7


def test_the_names_in_kernels_are_the_same():
    assert kernel_names.TYPES is WRITTEN


def test_inputs_keep_their_positions():
    args = {
        "Input Dims": [[4, 8], [], [8], [[1], [2]], [2, -1], "x", [3, 5]],
        "Input type": ["c10::BFloat16", "Scalar", "float", "TensorList", "float", 3, "c10::complex<float>"],
        "Input Strides": [[0, 1], [], [1], [], [], [], [5, 1]],
    }
    found = Inputs(args)
    first, scalar, second, several, broken, text, complex_ = found.by_position
    assert (first.shape, first.stored, first.item, first.type) == ([4, 8], 8, 2, "c10::BFloat16")
    assert (second.shape, second.bytes) == ([8], 32) and not any((scalar, several, broken, text))
    assert (complex_.item, complex_.stored) == (None, 15)  # its product is more FLOPs than its shape says
    assert found.tensors == [first, second, complex_] and found.dims == [[4, 8], [8], [3, 5]]
    assert [found.dims_at(place) for place in range(8)] == [[4, 8], [], [8], None, None, None, [3, 5], None]


@pytest.mark.parametrize("args", [{}, {"Input Dims": None}, {"Input Dims": "x", "Input type": 3}])
def test_nothing_recorded(args):
    found = Inputs(args)
    assert found.by_position == found.types == [] and found.dims_at(0) is None


def test_recorded_without_types():
    (only,) = Inputs({"Input Dims": [[2, 3]]}).by_position
    assert (only.stored, only.item, only.type) == (6, None, "")


def test_ops_with_equal_inputs_share_what_is_read_of_them():
    text = '{"External id": %d, "Input Dims": [[2, %d]], "Input type": ["float"], "Concrete Inputs": [""]}'
    one, equal, other = (inputs_of((text % numbers).encode()) for numbers in ((1, 3), (2, 3), (1, 4)))
    assert one is equal and (one.dims, one.types, one.concrete) == ([[2, 3]], ["float"], [""])
    assert other.dims == [[2, 4]]


@pytest.mark.parametrize(
    "args",
    [
        b"null", b"[]", b"{}", b"{", b'{"Input Dims": null}', b'{"Input Dims": NaN}',
        b'{"Input type": ["\xff", "\\ud800"]}',
    ],
)  # fmt: skip
def test_inputs_of_odd_json_are_those_of_its_decoded_arguments(args):
    found, expected = inputs_of(args), Inputs(decoded(args) if isinstance(decoded(args), dict) else {})
    assert (found.recorded, found.types, found.concrete) == (expected.recorded, expected.types, expected.concrete)
