"""Element types and recorded shapes: the only reader of what record_shapes stores about an op's inputs."""

import math
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec

from tracereader.trace.decoded import decoded, decoded_as, decoded_object

SHAPES = "Input Dims"
# All arguments that describe an op's inputs.
RECORDED = (SHAPES, "Input type", "Input Strides", "Concrete Inputs")


class Dtype(NamedTuple):
    """An element type. code: its number in c10::ScalarType, as an op's arguments record a dtype."""

    name: str
    bytes: int
    code: int
    written: tuple[str, ...]  # in kernels' names and in "Input type"
    collectives: str  # in the args of collectives

    @property
    def is_plain(self) -> bool:
        """Return whether one operation is one FLOP at a peak that is known here. Complex numbers and fp8 are not."""
        return not self.name.startswith(("complex", "fp8"))


DTYPES = (
    Dtype("bf16", 2, 15, ("c10::BFloat16", "cutlass::bfloat16_t", "__nv_bfloat16", "__hip_bfloat16"), "BFloat16"),
    Dtype("fp16", 2, 5, ("c10::Half", "cutlass::half_t", "__half"), "Half"),
    Dtype("fp32", 4, 6, ("float",), "Float"),
    Dtype("fp64", 8, 7, ("double",), "Double"),
    Dtype("fp8", 1, 24, ("c10::Float8_e4m3fn", "cutlass::float_e4m3_t"), "Float8_e4m3fn"),
    Dtype("fp8", 1, 23, ("c10::Float8_e5m2",), "Float8_e5m2"),
    Dtype("complex fp32", 8, 9, ("c10::complex<float>",), "ComplexFloat"),
    Dtype("complex fp64", 16, 10, ("c10::complex<double>",), "ComplexDouble"),
    Dtype("uint8", 1, 0, ("unsigned char",), "Byte"),
    Dtype("int8", 1, 1, ("signed char",), "Char"),
    Dtype("int16", 2, 2, ("short int", "short"), "Short"),
    Dtype("int32", 4, 3, ("int",), "Int"),
    Dtype("int64", 8, 4, ("long int", "long"), "Long"),
    Dtype("bool", 1, 11, ("bool",), "Bool"),
)
# The short name for each C++ spelling.
WRITTEN = {spelling: one.name for one in DTYPES for spelling in one.written}
# The bytes of an element, by the dtype number that an op's arguments record.
BYTES_BY_CODE = {str(one.code): one.bytes for one in DTYPES}


def _key(spelling: str) -> str:
    return spelling.removeprefix("c10::").replace(" ", "").lower()


_BY_SPELLING = {_key(spelling): one for one in DTYPES for spelling in (*one.written, one.collectives, one.name)}


def dtype_of(spelling: object) -> Dtype | None:
    """Return the type of any spelling: c10::BFloat16, BFloat16 or bf16. None for an unknown one."""
    return _of_spelling(spelling) if isinstance(spelling, str) else None


@lru_cache(256)  # called for every input of every op, while a trace has only a few spellings
def _of_spelling(spelling: str) -> Dtype | None:
    return _BY_SPELLING.get(_key(spelling))


class Tensor(NamedTuple):
    """A tensor that is an op's input.

    stored: the number of elements in memory; those of an expanded dimension count once. item: bytes per element, None
    if unknown. type: torch's own spelling; "" if it was not recorded.
    """

    shape: list[int]
    stored: int
    item: int | None
    type: str

    @property
    def bytes(self) -> int:
        """The bytes in memory; valid only if item is known."""
        return self.stored * self.item


class Inputs:
    """What torch recorded of an op's inputs. Ops with equal inputs share one, so nothing in it may be changed.

    recorded: the shape of each input, unchecked; for a list of tensors, their shapes. types: the types of all inputs as
    torch writes them. concrete: the inputs that are not tensors, by position, as text. Each is an empty list if it was
    not recorded.
    """

    def __init__(self, args: dict):
        dims, types, strides, concrete = (args.get(name) for name in RECORDED)
        self.recorded: list = dims if isinstance(dims, list) else []
        self.types = [one if isinstance(one, str) else "" for one in types] if isinstance(types, list) else []
        self.concrete: list = concrete if isinstance(concrete, list) else []
        self._strides = strides

    @cached_property
    def by_position(self) -> list[Tensor | None]:
        """Return the inputs by position: tensors of at least one dimension, None for anything else."""
        dims, types, strides = self.recorded, self.types, self._strides
        types = types if len(types) == len(dims) else [""] * len(dims)
        strides = strides if isinstance(strides, list) and len(strides) == len(dims) else [None] * len(dims)
        found: list[Tensor | None] = []
        for shape, type_name, stride in zip(dims, types, strides, strict=True):
            if not shape or not is_shape(shape):
                found.append(None)
                continue
            expanded = isinstance(stride, list) and len(stride) == len(shape) and 0 in stride
            distinct = [size for size, step in zip(shape, stride, strict=True) if step != 0] if expanded else shape
            dtype = dtype_of(type_name)
            item = dtype.bytes if dtype and dtype.is_plain else None
            found.append(Tensor(shape, math.prod(distinct), item, type_name))
        return found

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Return the tensors among the inputs."""
        return [one for one in self.by_position if one is not None]

    @cached_property
    def dims(self) -> list[list[int]]:
        """Return the shapes of the tensors."""
        return [one.shape for one in self.tensors]

    def last_stride_at(self, place: int) -> int | None:
        """Return how many elements apart neighbors along the last dimension of that input are; None if unknown."""
        found = self._strides[place] if isinstance(self._strides, list) and len(self._strides) > place else None
        return found[-1] if found and is_shape(found) else None

    def argument(self, place: int) -> str | None:
        """Return the argument at that position as text; None if it was not recorded."""
        found = self.concrete[place] if len(self.concrete) > place else None
        return found if isinstance(found, str) else None

    def numbers_at(self, place: int) -> list[int] | None:
        """Return the numbers in the argument at that position, which is a number or a list; None for anything else."""
        found = decoded_as(_numbers, self.argument(place) or "")
        return [found] if isinstance(found, int) else found

    def dims_at(self, place: int) -> list[int] | None:
        """Return the shape of the input at that position, [] for a single number, None if it was not recorded."""
        return self.recorded[place] if len(self.recorded) > place and is_shape(self.recorded[place]) else None


class _Raw(msgspec.Struct, gc=False):
    dims: msgspec.Raw = msgspec.field(name=RECORDED[0], default=msgspec.Raw(b"null"))
    types: msgspec.Raw = msgspec.field(name=RECORDED[1], default=msgspec.Raw(b"null"))
    strides: msgspec.Raw = msgspec.field(name=RECORDED[2], default=msgspec.Raw(b"null"))
    concrete: msgspec.Raw = msgspec.field(name=RECORDED[3], default=msgspec.Raw(b"null"))


class Flow(msgspec.Struct, gc=False, omit_defaults=True):
    """What an op reads and makes: numbers of a tensor's contents. record-trace writes them for ops of torch.

    A positive number was made in this step. again: for each that the op makes, one with equal contents that was made
    before; empty if one of them is new.
    """

    reads: list[int] = msgspec.field(name="Reads")
    makes: list[int] = msgspec.field(name="Makes")
    again: list[int] = msgspec.field(name="Again", default_factory=list)


_raw, _flow = msgspec.json.Decoder(_Raw), msgspec.json.Decoder(Flow)
_numbers = msgspec.json.Decoder(int | list[int])


def flow_of(args: bytes) -> Flow | None:
    """Return what an op reads and makes; None if that was not recorded."""
    return decoded_as(_flow, args) if b'"Makes"' in bytes(args) else None


def inputs_of(args: bytes) -> Inputs:
    """Return the inputs in an op's arguments, which are given as JSON."""
    raw = decoded_as(_raw, args)
    if raw is None:
        return Inputs(decoded_object(args))
    return _shared(bytes(raw.dims), bytes(raw.types), bytes(raw.strides), bytes(raw.concrete))


@lru_cache(4096)  # a trace has a hundred times as many ops as different inputs
def _shared(*values: bytes) -> Inputs:
    return Inputs(dict(zip(RECORDED, map(decoded, values), strict=True)))


def is_shape(found: object) -> bool:
    """Return whether the value is a list of sizes."""
    return isinstance(found, list) and all(type(size) is int and 0 <= size < 2**40 for size in found)
