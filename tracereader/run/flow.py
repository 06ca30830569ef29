"""Gives a trace what each op reads and makes, by an execution trace of other steps of the same program.

torch's ExecutionTraceObserver records each op's tensors and their memory. From this follows which op computes what
another one takes, and which op computes the same a second time. record-trace records these steps apart, because the
observer makes them longer.
"""

import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tracereader.run import shapes
from tracereader.run.inside import observing
from tracereader.trace.grouped import grouped
from tracereader.trace.op_names import FROM_PYTHON
from tracereader.trace.types import Flow

USER_SCOPE = 7  # of record_function, which the profiler writes as an annotation
OF_TORCH = "aten::"
NO_OPS = ("[pytorch", "profiler::")
# Nodes of autograd, whose ops below them compute, and calls that only change Python's view of a tensor.
COMPUTES_BELOW = re.compile(r"(autograd::|torch::autograd::|detach_?$|\w+Backward\d*$)").match
RANDOM = re.compile(
    r"rand|bernoulli|normal_|uniform|exponential|dropout|multinomial|poisson|cauchy|geometric|_rnn"
).search
# What these make is not known yet.
EMPTY = re.compile(r"aten::(new_)?empty|aten::(resize|set)_").match
OVERWRITES = ("aten::copy_", "aten::fill_", "aten::zero_")
BYTES_OF_NUMBERS = (1, 8, 16)  # of a bool, of a float or an int, and of a complex number
ATTENDS = re.compile(r"aten::_\w*attention").match
MUTABLE = re.compile(r"\(\w+!").search


class _Tensors(msgspec.Struct):
    values: list
    shapes: list = []
    strides: list = []


class _Attribute(msgspec.Struct):
    name: str = ""
    value: object = None


class _Node(msgspec.Struct):
    id: int
    name: str
    ctrl_deps: int
    inputs: _Tensors
    outputs: _Tensors
    attrs: list[_Attribute]

    def attribute(self, name: str) -> object:
        return next((one.value for one in self.attrs if one.name == name), None)


class _Trace(msgspec.Struct):
    nodes: list[_Node]


class Version(NamedTuple):
    """The contents of a tensor's memory: their number, and a value that is equal for equal computations."""

    number: int
    value: Hashable


def put_together(results: Iterable[Mapping[str, object]]) -> None:
    """Give each trace of these results of a program's processes what was recorded apart from it, once."""
    for one in results:
        for name, put in (("with_shapes", shapes.put_into), ("flow", put_into)):
            file = Path(str(one.get(name)))
            if file.exists():
                put(Path(str(one["trace"])), file)
                file.unlink()


def put_into(trace: Path, file: Path) -> None:
    """Give the ops of a trace what they read and make, as far as steps of the execution trace call the same ones."""
    try:
        observed = flows(msgspec.json.decode(file.read_bytes(), type=_Trace).nodes)
    except msgspec.DecodeError:  # another process wrote into the file, too
        return
    threads = [one for step in reversed(observed) for one in step]
    document = msgspec.json.decode(shapes.content(trace))
    changed = False
    for lane in (lane for _, lanes in shapes.ops_by_step(document) for lane in lanes):
        ops = [op for op in lane if not op["name"].startswith(NO_OPS)]
        for op, (_, known) in _in_common(ops, threads):
            if known.reads or known.makes:
                op["args"] = {**op.get("args", {}), **msgspec.to_builtins(known)}
                changed = True
    if changed:
        shapes.write(trace, document)


def _in_common(ops: Sequence[dict], observed: Iterable[Sequence[tuple[str, Flow]]]) -> list[tuple[dict, tuple]]:
    """Return most of the ops, each with the observed one that is like it: all, or those at the beginning or the end.

    They are most of the observed step's ops on a thread, too, so that a short thread is not like each longer one.
    In between, a program may change images at random. Only one stretch is returned: beside another one, it would look
    as if nothing led from one to the other.
    """
    most: list[tuple[dict, tuple]] = []
    for some in observed:
        for turn in (1, -1):
            pairs = zip(ops[::turn], some[::turn], strict=False)
            same = list(itertools.takewhile(lambda pair: pair[0]["name"] == pair[1][0], pairs))
            if 2 * len(same) > max(len(ops), len(some)):
                most = max(most, same, key=len)
    return most


def flows(nodes: Iterable[_Node]) -> list[list[list[tuple[str, Flow]]]]:
    """Return the names of each observed step's ops, and what they read and make, by threads, in order.

    Only ops that no other op of torch calls read and make anything; what they call in turn is part of them. A version
    that the step makes has a positive number, in the order in which they are made, and any other one a negative number.
    """
    nodes = {one.id: one for one in sorted(nodes, key=lambda one: one.id)}
    below = grouped((one.ctrl_deps, one) for one in nodes.values() if one.ctrl_deps != one.id)
    memory, steps, opened, inside = _Memory(), [], [], set()
    for node in nodes.values():
        while opened and not _is_below(node, opened[-1], nodes):
            memory.forget(opened.pop())
        if node.name == observing.STEP:
            memory.begin_step()
            steps.append({})
        if not steps or node.attribute("scope") == USER_SCOPE or node.name.startswith(NO_OPS):
            continue
        flow = Flow([], [])
        steps[-1].setdefault(node.attribute("tid"), []).append((node.name, flow))
        if node.ctrl_deps in inside:
            inside.add(node.id)
        elif node.name.startswith(OF_TORCH):
            inside.add(node.id)
            mark = nodes[node.ctrl_deps].name if node.ctrl_deps in nodes else ""
            memory.run(node, list(_walk(node, below)), flow, mark if mark.startswith(observing.NUMBERS) else "")
        elif not COMPUTES_BELOW(node.name):
            opened.append(node)
    return [list(one.values()) for one in steps]


def _is_below(node: _Node | None, other: _Node, nodes: Mapping[int, _Node]) -> bool:
    while node is not None and node.id > other.id:
        node = nodes.get(node.ctrl_deps)
    return node is other


def _walk(node: _Node, below: Mapping[int, Sequence[_Node]]) -> Iterator[_Node]:
    yield node
    for one in below.get(node.id, ()):
        yield from _walk(one, below)


def _tensors(values: object) -> Iterator[list]:
    """Yield the tensors among values, which may be lists of them: id, storage, offset, elements, bytes, device."""
    if isinstance(values, list):
        if len(values) == 6 and isinstance(values[5], str) and all(type(one) is int for one in values[:5]):
            yield values
        else:
            for one in values:
                yield from _tensors(one)


class _Memory:
    """What each tensor's memory contains, as far as the ops tell."""

    def __init__(self):
        self.versions: dict[int, Version] = {}
        self.found: set[int] = set()  # storages on the CPU that no op has made
        self.elements: dict[int, int] = {}  # of a storage, if an op is known that made it
        self.values: dict[Hashable, int] = {}
        self.first_of: dict[int, int] = {}  # the number of the first version with a value
        self.made = self.begun = 0

    def begin_step(self) -> None:
        """Forget what the CPU's memory contained: a new batch may lie where the one before it lay."""
        for one in self.found:
            self.versions.pop(one, None)
        self.found.clear()
        self.begun = self.made

    def emitted(self, number: int) -> int:
        return number - self.begun + 1 if number >= self.begun else number if number < 0 else -2 * number - 2

    def version(self, tensor: list) -> Version:
        """Return what a tensor's memory contains. What no op has made has an odd negative number."""
        if tensor[1] not in self.versions:
            self.versions[tensor[1]] = self._version(None, -2 * len(self.values) - 1)
            if tensor[5] == "cpu":
                self.found.add(tensor[1])
        return self.versions[tensor[1]]

    def _version(self, value: Hashable, number: int) -> Version:
        value = self.values.setdefault(("new", number) if value is None else value, len(self.values))
        self.first_of.setdefault(value, number)
        return Version(number, value)

    def set(self, tensor: list, value: Hashable) -> None:
        """Give a tensor's memory new contents, which are like no others if value is None."""
        self.versions[tensor[1]] = self._version(value, self.made)
        self.found.discard(tensor[1])
        self.made += 1

    def forget(self, node: _Node) -> None:
        """Take in that a function that is not torch's may have written all its tensors."""
        tensors = {one[1]: one for one in _tensors([node.inputs.values, node.outputs.values])}
        for one in tensors.values():
            self.set(one, None)

    def run(self, node: _Node, calls: Sequence[_Node], flow: Flow, numbers: str) -> None:
        """Take in what an op makes. calls: the op and those below it. numbers: those that Python gave it, if known.

        A tensor that may be a number of Python has unknown contents if they are not known: it may lie where another
        number lay.
        """
        values = node.inputs.values
        may_be_numbers = {place for place, one in enumerate(values) if _may_be_number(node, place, one)}
        tensors = [one for place, one in enumerate(values) if not (numbers and place in may_be_numbers)]
        given = {one[1]: one for one in _tensors(tensors)}
        flow.reads.extend(self.emitted(self.version(one).number) for one in given.values())
        if node.name == FROM_PYTHON:  # the memory may have been another tensor's
            for one in given.values():
                self.versions.pop(one[1])
            return
        is_known = not EMPTY(node.name) and not any(map(_is_random, calls)) and (numbers or not may_be_numbers)
        parts = [node.name, str(node.inputs.shapes), str(node.inputs.strides)]
        for place, one in enumerate(values):
            if place in may_be_numbers:
                parts.append(numbers)
                continue
            tensors = list(_tensors(one))
            is_whole = node.name in OVERWRITES and not place and self._is_whole(tensors)
            parts.append(tuple((not is_whole and self.version(t).value, t[2], t[5]) for t in tensors) or str(one))
        written = {one[1]: one for call in calls for one in _written(call) if one[1] in given}
        made = {one[1]: one for one in _tensors(node.outputs.values) if one[1] not in given}
        for place, one in enumerate((*written.values(), *made.values())):
            self.set(one, (*parts, place) if is_known else None)
            version = self.versions[one[1]]
            flow.makes.append(self.emitted(version.number))
            earlier = self.first_of[version.value]
            flow.again.extend([self.emitted(earlier)] if earlier != version.number else [])
        self.elements |= {storage: one[3] for storage, one in made.items()}
        if len(flow.again) < len(flow.makes):
            flow.again.clear()

    def _is_whole(self, tensors: Sequence[list]) -> bool:
        return all(one[2] == 0 and self.elements.get(one[1]) == one[3] for one in tensors)


def _may_be_number(node: _Node, place: int, value: object) -> bool:
    """Return whether an op's input may be a number that Python gave it: it comes as a tensor without dimensions."""
    is_tensor = isinstance(value, list) and next(_tensors(value), None) is value and value[5] == "cpu"
    return is_tensor and value[4] in BYTES_OF_NUMBERS and node.inputs.shapes[place] == [] and node.name != FROM_PYTHON


def _is_random(node: _Node) -> bool:
    """Return whether an op draws random numbers. Attention does if it drops any score."""
    if ATTENDS(node.name):
        return any(isinstance(one, float) and one > 0 for one in node.inputs.values[3:6])
    return bool(RANDOM(node.name))


def _written(node: _Node) -> list[list]:
    """Return the tensors that an op writes, by its schema."""
    schema = str(node.attribute("op_schema") or "")
    if not MUTABLE(schema):
        return []
    arguments = schema[schema.find("(") + 1 : schema.rfind("->")].replace(", *,", ",").split(", ")
    places = [place for place, one in enumerate(arguments) if MUTABLE(one)]
    return [one for place in places if place < len(node.inputs.values) for one in _tensors(node.inputs.values[place])]
