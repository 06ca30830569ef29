"""A language model's step: the bytes that it reads, its stored facts, and work that may be unnecessary."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import attrgetter

import msgspec

from tracereader.figures.gpu_work import launch_args
from tracereader.figures.hardware import common_peaks, peak_tflops
from tracereader.trace import Op, Step, Trace, Work
from tracereader.trace.facts import ModelFacts
from tracereader.trace.grouped import grouped
from tracereader.trace.types import dtype_of

# Share of a step's time in which the GPU is busy. Below it the GPU waits for the CPU, however unevenly the steps begin.
# In the H200's traces, compiled decoding keeps the GPU busy for 8%, eager for 12%, one graph per step for 89 to 99%.
MUCH_BUSY = 0.5
# A step with fewer launches may lose more than it gains, because a graph needs its inputs copied to fixed addresses: on
# the H200 reduce-overhead made a step of 2 slower (claim 19).
MANY_LAUNCHES = 50
COMPARED = 2  # steps whose shapes are compared with those of the first step; names are compared in all steps
# For ops that take weights, the position of the input, and the positions of weight and bias, among the arguments.
TAKES_WEIGHTS = {
    "aten::linear": (0, (1, 2)),
    "aten::addmm": (1, (0, 2)),
    **dict.fromkeys(("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution"), (0, (1, 2))),
}
# The types of weights that are not quantized.
FLOATS = ("bf16", "fp16", "fp32", "fp64")
_name = attrgetter("name")


class Decoding(msgspec.Struct, frozen=True):
    """A language model's step compared with its minimum time. A field is None if type or peaks are unknown.

    step_us: the step's time while it was recorded; see pace.py. lane: the one that limits the step, which is the CPU if
    the GPU is mostly idle.
    read_us: the time to read weights and cache once at gb_s. measured: whether the run measured gb_s itself; it is the
    data sheet's value otherwise.
    multiply_us: the time of the weights' products: `flops` at `tflops`, the data sheet's peak for the run's type.
    """

    facts: ModelFacts
    step_us: float
    lane: str  # CPU or GPU
    tokens_s: float
    gb_s: float | None
    measured: bool
    read_us: float | None
    flops: int | None = None
    tflops: float | None = None
    multiply_us: float | None = None

    @property
    def least_us(self) -> float | None:
        """Return the minimum time of a step (µs), as far as it is known. Reading and arithmetic may overlap."""
        return max(self.read_us, self.multiply_us or 0.0) if self.read_us else None


class LanguageModel(msgspec.Struct, frozen=True):
    """The reads and repetitions of a language model's step, and work that it may not need.

    decoding: None if the run did not store what a step reads. weight_casts: the number of casts of a layer's weight or
    bias; needs recorded shapes. same_in_all_steps: see same_in_all_steps().
    """

    decoding: Decoding | None
    weight_casts: int
    same_in_all_steps: bool | None


def decoding(trace: Trace, lanes_us: Mapping[str, float], busy_us: float) -> Decoding | None:
    """Return the step as tokens per second and its minimum time; None if the run did not store what a step reads.

    lanes_us: the step's time (µs) by lane; the longer one is the step's time. busy_us: the GPU's busy time in a step.
    """
    facts, step_us = trace.facts.decoding, max(lanes_us.values())
    if facts is None or not trace.has_steps or step_us <= 0:
        return None
    lane = "CPU" if busy_us < MUCH_BUSY * lanes_us["CPU"] else max(lanes_us, key=lanes_us.get)
    peaks = common_peaks(trace.devices)
    gb_s = facts.gb_s or (peaks.gb_s if peaks else None)
    read = (facts.weight_bytes or 0) + (facts.cache_bytes or 0)
    # Each weight and token take one multiplication and one addition. The record does not show whether fp32 uses TF32.
    of_two_bytes = facts.weight_bytes and trace.facts.dtype in ("bf16", "fp16")
    flops = 2 * (facts.weight_bytes // 2) * facts.tokens if of_two_bytes else None
    tflops = peak_tflops(peaks, trace.facts.dtype) if peaks and flops else None
    return Decoding(
        facts=facts,
        step_us=step_us,
        lane=lane,
        tokens_s=facts.tokens / step_us * 1e6,
        gb_s=gb_s,
        measured=facts.gb_s is not None,
        read_us=read / gb_s / 1e3 if gb_s and facts.weight_bytes else None,
        flops=flops,
        tflops=tflops,
        multiply_us=flops / tflops / 1e6 if tflops else None,
    )


def same_in_all_steps(steps: Sequence[Step]) -> bool | None:
    """Return whether steps have the same GPU work, by names and partly by shapes; None for one step or no launches."""
    first, *others = steps
    if not others or not first.work:
        return None
    names = _by_stream(first, map(_name, first.work))
    if any(_by_stream(step, map(_name, step.work)) != names for step in others):
        return False
    signature = _signature(first)
    return all(_signature(step) == signature for step in others[:: -(-len(others) // COMPARED)])


def _by_stream(step: Step, values: Iterable[Hashable]) -> Counter[tuple]:
    """Return the values of each stream's GPU activities, and how many streams have these values in this order.

    The order of work on different streams differs by chance, and so may the streams that a step uses.
    """
    by_stream = grouped((one.track, value) for one, value in zip(step.work, values, strict=True))
    return Counter(map(tuple, by_stream.values()))


def _signature(step: Step) -> Counter[tuple]:
    found, shapes = [], {}  # the shapes as text, which can be hashed; ops with equal inputs share one object
    for one, op in zip(step.work, step.asking, strict=True):
        args, inputs = launch_args(one), op.inputs if op is not None else None
        if id(inputs) not in shapes:
            shapes[id(inputs)] = repr(inputs.recorded) if inputs is not None else None
        found.append((tuple(args.grid or ()), args.bytes, shapes[id(inputs)]))
    return _by_stream(step, found)


def weight_casts(step: Step) -> list[tuple[Op, list[Work]]]:
    """Return the ops of a step that cast a layer's weight or bias to another type, with the work that each launches."""
    found, pending = [], []
    for op in step.named(lambda name: name == "aten::to" or name in TAKES_WEIGHTS):
        if op.name == "aten::to":
            if op.children and (work := _cast_below(op)):
                pending.append((op, work))
        elif pending:
            of_input, of_weights = TAKES_WEIGHTS[op.name]
            weights = [op.inputs.dims_at(place) for place in of_weights]
            # A tensor of the input's shape may be the input.
            found += [cast for cast in pending if (dims := cast[0].inputs.dims_at(0)) in weights
                      and dims and dims != op.inputs.dims_at(of_input)]  # fmt: skip
            pending = []
    return found


def _cast_below(op: Op) -> list[Work]:
    """Return the work that an aten::to launches to convert its input to another floating-point type.

    Empty if it moves the input to another device. Quantized weights are left out: they are stored in few bytes.
    """
    below = [(child, copy) for child in op.children for copy in child.children]
    types = [copy.inputs.types for child, copy in below if (child.name, copy.name) == ("aten::_to_copy", "aten::copy_")]
    if not types or any(len(some) < 2 or some[0] == some[1] for some in types):
        return []
    if any(source is not None and source.name not in FLOATS for source in [dtype_of(some[1]) for some in types]):
        return []
    launches = [call for _, copy in below for call in copy.children if call.kind == "runtime"]
    return [one for call in launches for one in call.work if one.kind == "kernel"]
