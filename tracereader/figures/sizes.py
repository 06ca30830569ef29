"""FLOPs and minimum bytes of a GPU activity, by the shapes that torch recorded for its op."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain

import msgspec

from tracereader.figures.attention import ATTENTION, Attention, attention, stored
from tracereader.figures.convolution import Convolution, convolution
from tracereader.figures.moved import moved, pointwise_bytes
from tracereader.trace import Op, Work, families, kernel_names
from tracereader.trace.facts import RunFacts
from tracereader.trace.kernel_names import KernelName
from tracereader.trace.op_names import MATMULS
from tracereader.trace.types import Dtype, dtype_of

# The share of the time of an op's GEMM kernels from which the longest computes the product. Helpers of convolutions
# took 3% of the product's time on an H200. Kernels that share a product take similar times.
MAIN = 2 / 3

# Kernels that a library runs before or after a convolution's product, and that compute no product.
CONVOLUTION_HELPERS = re.compile(
    r"im2col|2col|col2im|vol2|flipfilter|offsets|tiles|winograd\w*(?:data|filter|output|delta|transform)|xform|fft|"
    r"transpose|nchw\w*nhwc|nhwc\w*nchw|workspace|calcbias|reduce|(?:sub|set|scale|cast)tensor|op\dd?tensor|optensor",
    re.IGNORECASE,
)


class Product(msgspec.Struct, frozen=True):
    """A matrix product: batch x [m, k] x [k, n]."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def elements(self) -> int:
        """Return the number of elements of both factors and the result."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


def sizes_of(
    work: Work, op: Op | None, size: int | None, says: KernelName, alone: bool, facts: RunFacts
) -> tuple[Product | Attention | Convolution | None, int | None, str]:
    """Return the sizes of a GEMM, an attention kernel or a convolution, the bytes that it has to move, and its type.

    size: the bytes that a copy copies. alone: whether the op's shapes are this activity's: see does_it_alone(). Nothing
    else of the work counts but its kind and its name, and of the op its name and its inputs.
    """
    if work.kind == "memcpy":
        return None, size and size * (2 if says.parts.get("does") == kernel_names.COPIES["DtoD"] else 1), ""
    if op is None:
        return None, None, ""
    if says.family not in ("GEMM", "attention", "convolution"):
        return None, moved(op.name, op.inputs, work.name) if alone else None, ""
    asked = op.inputs
    shapes, first = asked.dims, dtype_of(next(iter(asked.types), None))
    item = first.bytes if first and first.is_plain else None
    found, types = None, _two_byte_type(first)
    if says.family == "GEMM":
        found = product(op.name, shapes) if alone and says.multiplies else None
    elif says.family == "convolution":
        if alone and _convolves(work.name):
            found = convolution(op.name, asked)
    elif says.parts.get("does", "forward") != "forward":
        pass  # a kernel that combines parts, or backward, which has other FLOPs
    elif shapes:
        found = attention(op.name, asked, says, facts.attention) if alone else None
    elif found := stored(facts.attention, says):
        types = _two_byte_type(dtype_of(facts.dtype))
        item = 2 if types else None
    return found, found.elements * item if found and item else None, types


def does_it_alone(work: Work, op: Op | None, says: KernelName, known: dict[tuple, int]) -> bool:
    """Return whether the op's inputs are those of this activity. They are a GEMM's beside activities of other families.

    An op that launches several GEMM kernels computes its product once. It is the longest kernel's if the others are
    short, as those that add up parts or apply an epilogue; otherwise the trace does not show how it is split.

    says: the content of the work's name. known: an empty dict at first, and the same one for all work of a step. It
    keeps counts and the ids of GEMM kernels, because an op may have thousands of activities, as an LSTM of cuDNN has.
    """
    if op is None:
        return True
    recorded = work.recorded  # of a captured op, only the activities of this work's replay count
    whole = op if recorded is None else recorded.together
    asked = chain.from_iterable(call.work for call in op.children) if recorded is None else whole
    if says.family == "GEMM":
        key = (id(whole), "GEMM")
        if key not in known:
            times = Counter({id(one): one.dur for one in asked if families.says(one).multiplies})
            longest = max(times, key=times.get, default=None)
            # An activity of a deeper call is not among them, and is the only one of its call.
            known[key] = longest if longest is None or times[longest] >= MAIN * times.total() else 0
        return known[key] in (None, id(work))
    by_name = (says.family, says.parts.get("does")) if says.family in ("attention", "convolution") else ()
    key = (id(whole), *by_name)
    if key not in known:
        known[key] = sum(_shares_inputs(one, says) for one in asked)
    is_counted = recorded is not None or (work.launch is not None and work.launch.parent is op)
    return known[key] == (is_counted and _shares_inputs(work, says))


def _shares_inputs(other: Work, says: KernelName) -> bool:
    """Return whether an activity of the op may read or write what the one does whose name says this."""
    if says.family not in ("attention", "convolution"):
        return other.kind != "memset"  # the shapes do not show which of several kernels reads and writes them
    # An op that starts two kernels of one kind (forward, towards the data or towards the weights) has split the work
    # between them, and the trace does not show how.
    if says.family == "convolution" and not _convolves(other.name):
        return False
    its = families.says(other)
    return its.family == says.family and its.parts.get("does") == says.parts.get("does")


@lru_cache(4096)  # names are far fewer than activities
def _convolves(kernel: str) -> bool:
    """Return whether a kernel that a convolution launched computes the convolution itself, by the kernel's own name."""
    name = kernel_names.decode(kernel)
    does = name.parts.get("does", "")
    if name.family not in ("convolution", "GEMM") or does.startswith(kernel_names.SPLIT_K):
        return False
    return does in kernel_names.CONVOLVING.values() or not CONVOLUTION_HELPERS.search(does.replace(" ", ""))


def _two_byte_type(dtype: Dtype | None) -> str:
    """Return bf16 or fp16 for these types, else "". For fp32 only the kernel's name shows whether it uses TF32."""
    return dtype.name if dtype and dtype.name in ("bf16", "fp16") else ""


def without_ones(dims: Iterable[int]) -> list[int]:
    """Return a shape without its dimensions of one, which views add and drop."""
    return [one for one in dims if one > 1]


def product(op: str, dims: list[list[int]]) -> Product | None:
    """Return the sizes of a matrix product's op, by its inputs' shapes; None if they do not show them."""
    # Compiled code lists its output after the two factors; addmm lists its bias before them.
    first = 1 if op in ("aten::addmm", "aten::baddbmm") else 0
    factors = dims[first : first + 2]
    if op not in MATMULS or len(factors) < 2 or any(len(dim) < 2 for dim in factors):
        return None
    *batch, m, k = factors[0]
    return Product(math.prod(batch), m, k, factors[1][-1]) if k == factors[1][-2] else None


def sizes_of_op(op: Op) -> tuple[Product | Attention | None, int | None]:
    """Return the sizes of a product or of attention, or the bytes that a pointwise op moves, by recorded shapes."""
    asked = op.inputs
    if op.name in MATMULS:
        return product(op.name, asked.dims), None
    if op.name in ATTENTION:
        return attention(op.name, asked, kernel_names.decode(""), None), None
    return None, pointwise_bytes(op.name, asked.by_position)
