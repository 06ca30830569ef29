"""The marks of a trace's steps besides the profiler's own: calls of an annotation or op that come once in each step."""

import bisect
import enum
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice, pairwise
from operator import itemgetter
from pathlib import Path

import msgspec

from tracereader.trace.document import TraceError
from tracereader.trace.families import IN_EVERY_LAYER, of_op
from tracereader.trace.grouped import grouped
from tracereader.trace.labels import AUTOGRAD, GIVES_GRADIENT, LOADER, OPTIMIZER, REGION, STEP, ZEROES, is_torchs_own
from tracereader.trace.slices import Op, sort_by_start, start_of
from tracereader.trace.waits import SYNCHRONIZES

# With fewer calls or steps it may be no loop. Of torch's own annotations, these usually come once in each step.
LEAST_STEPS, ONCE_IN_A_STEP = 3, (LOADER, ZEROES, OPTIMIZER)
# The steps of a loop call the same ops. Some may call a few more, for example to log the loss: this share of the inner
# steps has to be equal, and the others' numbers of ops have to be within these factors of theirs.
EQUAL_SHARE, FEWER, MORE = 2 / 3, 0.8, 1.25
# Optimizers of one class may take turns, as those of two networks that compete: so many of them are tried. They update
# different numbers of parameters. Steps whose numbers of gradients differ by less than this share are equal.
TAKE_TURNS, SAME_GRADIENTS = (2, 3, 4), 0.9
# A program calls few optimizers and loaders. Of more names of one kind, the first ones are tried.
MANY_NAMES = 8
# A first or last step is whole if it has this share of the other steps' ops.
WHOLE = 0.9
# A language model looks up the embedding of the last token, and one of these ops chooses the next one. A compiled model
# has the lookup in a region of torch.compile.
LOOKS_UP, CHOOSE = "aten::embedding", ("aten::argmax", "aten::multinomial", "aten::topk")
# A layer that is repeated at least LEAST_STEPS times in a row takes at least this share of a pass. The periods that are
# tried are those of so many first and so many frequent distances.
OF_A_PASS, PERIODS, DISTANCES = 0.3, 200, 8
# A layer also normalizes or convolves, which experts or adapters in a layer do not. A model's own RMS norm calls ROOT.
ONLY_IN_LAYERS, ROOT = ("normalization", "convolution"), "aten::rsqrt"
# The annotations of vLLM and SGLang around each step of a server, and those of steps that generate one token for each
# sequence, with the number of sequences.
SERVES = re.compile(r"execute_(?:context_|new_)?\d+[_(]|step\[\w+").match
DECODES = re.compile(r"(?:execute_context_0\(0\)_generation_\d+\(|execute_new_0_cached_|step\[DECODE bs=)(\d+)").match


class StepsBy(enum.Enum):
    """What marks the steps where no annotation is named.

    RECORDED: the profiler's marks; without any, the whole recording is one step. FOUND: the same, but a loop recorded
    without prof.step() has the steps that found() returns. NOTHING: one step, whatever the profiler marked.
    """

    RECORDED = enum.auto()
    FOUND = enum.auto()
    NOTHING = enum.auto()


class Marks(msgspec.Struct, frozen=True):
    """The steps that calls of one name mark: each step's start and end (ns), in order, and the thread of the calls.

    name: of an annotation or an op. ends_them: whether a step ends with a call. Otherwise it begins with one. every:
    how many calls a step has, if each one ends with the last of several. equal: the number of steps that call the same
    ops, if their ops were compared; a first one counts even if other ops precede it.
    """

    name: str
    spans: Sequence[tuple[int, int]]
    track: tuple
    ends_them: bool = False
    every: int = 1
    equal: int = 0


def named(ops: Sequence[Op], name: str, path: Path) -> Marks:
    """Return a step for each call of an annotation.

    A step lasts until the next call begins, as with prof.step(). The last one lasts as long as its call, or, if calls
    are less than half of the steps, as long as the thread's ops. Of several threads, the one with the most calls
    decides. A call inside another one, or one that begins at the same time, is not counted. Raises TraceError.
    """
    calls = grouped((op.track, op) for op in ops if op.kind == "label" and op.name == name)
    if not calls:
        labels = Counter(op.name for op in ops if op.kind == "label" and not op.name.startswith(STEP))
        known = ", ".join(f"{one[:60]} ({count:,})" for one, count in labels.most_common(5))
        raise TraceError(
            f"{path}: --steps {name}: the trace has no annotation of this name"
            + (f"; it has {known}" if known else "; torch.profiler.record_function makes one")
        )
    track = max(calls, key=lambda track: len(calls[track]))
    spans = _apart(calls[track])
    starts, last = [start for start, _ in spans], spans[-1][1]
    if 2 * sum(end - start for start, end in spans[:-1]) < starts[-1] - starts[0]:
        last = max(op.end for op in ops if op.track == track and op.kind != "runtime" and not op.name.startswith(STEP))
    return Marks(name, [*pairwise(starts), (starts[-1], last)], track)


def found(ops: Sequence[Op]) -> Marks | None:
    """Return the steps of a loop that was recorded without prof.step(); None if the recording shows none.

    A server's annotations come first. Of its steps, those that generate a token for each sequence count. Prompts lie
    outside of them, unless there are too few of the former.

    A loader's calls begin the steps, an optimizer's end them, and zero_grad() may do either. Of several possible ones,
    those with the most steps are taken: steps that begin in the middle of the loop lack one. Without such calls, the
    program's own annotation begins the steps, if its calls hold nearly everything; or a language model's first lookup
    after it has chosen a token; or the steps are equal passes through a model. Most steps call the same ops, and the
    others nearly the same, except for the first one, which may be a cold start or a prompt. What is recorded before and
    after the loop belongs to no step.
    """
    if (served := _served(ops)) is not None:
        return served
    threads = sorted(_threads(ops), key=lambda one: -len(one.ops))  # the one with the most ops first
    gradients = sorted([op.start for op in ops if op.name == GIVES_GRADIENT])
    for optimizers in (1, *TAKE_TURNS):
        for thread in threads:
            if possible := list(_of_loops(thread, gradients, optimizers)):
                return max(possible, key=lambda marks: (len(marks.spans), marks.equal))
    for marks in _of_annotations(ops, threads[0]) if threads else ():
        return marks
    calls = [spans for thread in threads for spans in thread.calls.values()]
    possible = []
    if all(len(spans) < LEAST_STEPS for spans in calls):
        possible = [marks for thread in threads for marks in _of_tokens(thread)]
    if threads and not (possible or calls):
        possible = list(_of_passes(threads[0]))
    return max(possible, key=lambda marks: len(marks.spans), default=None)


def _served(ops: Sequence[Op]) -> Marks | None:
    """Return the steps of a server's annotations, each until the next call or the last one's own end."""
    calls = grouped((op.track, op) for op in ops if op.kind == "label" and SERVES(op.name))
    if not calls:
        return None
    track, calls = max(calls.items(), key=lambda entry: len(entry[1]))
    spans, named_at = _apart(calls), {op.start: op.name for op in calls}
    ends = [*(start for start, _ in spans[1:]), spans[-1][1]]
    steps = [(named_at[start], (start, end)) for (start, _), end in zip(spans, ends, strict=True)]
    decoding = [one for one in steps if DECODES(one[0])]
    steps = decoding if len(decoding) >= LEAST_STEPS else steps
    if len(steps) < LEAST_STEPS:
        return None
    (name, _), *_ = Counter(name for name, _ in steps).most_common(1)
    return Marks(name, [span for _, span in steps], track)


class _Thread(msgspec.Struct):
    """What a thread does: its ops, the start and end (ns) of all its slices, and calls of ONCE_IN_A_STEP by name.

    ops: by start, and an op before those inside it. regions: the calls of compiled code, which are ops or annotations,
    as torch's version decides.
    """

    track: tuple
    ops: list[Op]
    regions: list[Op]
    start: int
    until: int
    calls: dict[str, list[tuple[int, int]]]

    def of(self, begins: str) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Yield the calls of each annotation whose name begins so."""
        return ((name, spans) for name, spans in self.calls.items() if name.startswith(begins))

    def all_of(self, begins: str) -> list[tuple[int, int]]:
        """Return the outermost of these calls, in order."""
        return _outermost_spans(span for _, spans in self.of(begins) for span in spans)


def _threads(ops: Sequence[Op]) -> Iterator[_Thread]:
    """Yield the threads that run ops."""
    for track, own in grouped((op.track, op) for op in ops).items():
        # A wait for the GPU after the loop does not count.
        slices = [op for op in own if op.kind != "label" and not SYNCHRONIZES.search(op.name)]
        run = [op for op in slices if op.kind == "op"]
        if not run:
            continue
        sort_by_start(run)
        calls = grouped((op.name, op) for op in own if op.kind == "label" and op.name.startswith(ONCE_IN_A_STEP))
        # A hook may call an optimizer for each parameter in the backward pass.
        engine = _apart([op for op in run if op.name.startswith(AUTOGRAD)]) if calls else []
        by_name = {name: _apart(_outside(sorted(some, key=start_of), engine)) for name, some in calls.items()}
        start, until = min([op.start for op in slices]), max([op.end for op in slices])
        yield _Thread(track, run, [op for op in own if op.name.startswith(REGION)], start, until, by_name)


def _apart(calls: Iterable[Op]) -> list[tuple[int, int]]:
    """Return start and end of the calls that lie in no other one and begin at different times, in order."""
    return _outermost_spans((op.start, op.end) for op in calls)


def _outermost_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not kept or (start >= kept[-1][1] and start > kept[-1][0]):
            kept.append((start, end))
    return kept


def _of_loops(thread: _Thread, gradients: Sequence[int], every: int) -> Iterator[Marks]:
    """Yield the steps that calls of torch's annotations begin or end, if the steps are alike.

    gradients: when parameters get their gradients (ns). every: how many steps of optimizers of one name, which take
    turns, are one step of the loop.
    """
    updates = thread.all_of(OPTIMIZER)
    begins = [begin for begin, _ in updates]
    # How many ops a batch takes may depend on its samples.
    own = _outside(thread.ops, thread.all_of(LOADER))
    for prefix in ONCE_IN_A_STEP if every == 1 else (OPTIMIZER,):
        for name, all_calls in islice(thread.of(prefix), MANY_NAMES):
            calls = all_calls[every - 1 :: every]
            if len(calls) < LEAST_STEPS or (prefix == ZEROES and not _precedes_forward(calls, updates, thread.ops)):
                continue
            if every > 1 and _are_close(_numbers(gradients, list(pairwise([end for _, end in all_calls])))):
                continue  # one optimizer, in a loop that does more in some steps
            marks = Marks(name, (), thread.track, every=every)
            if prefix != OPTIMIZER:
                bounds = [*(begin for begin, _ in calls), thread.until]
                yield from _alike(marks, bounds, own, begins, gradients)
            if prefix != LOADER:
                bounds = [thread.start, *(end for _, end in calls)]
                yield from _alike(msgspec.structs.replace(marks, ends_them=True), bounds, own, begins, gradients)


def _numbers(times: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many of the times lie in each interval. times: in order."""
    return [bisect.bisect_left(times, end) - bisect.bisect_left(times, start) for start, end in spans]


def _are_close(numbers: Sequence[int]) -> bool:
    return min(numbers, default=0) >= SAME_GRADIENTS * max(numbers, default=0)


def _precedes_forward(zeroes: Sequence[tuple[int, int]], updates: Sequence[tuple[int, int]], ops: Sequence[Op]) -> bool:
    """Return whether the gradients are set to zero before forward, not between it and backward, and not in a closure.

    Then most ops on the thread lie between such a call and the optimizer's next step: those of forward. ops: by start.
    """
    at = [op.start for op in ops]
    before = after = 0
    for start, end in zeroes:
        place = bisect.bisect_right(updates, start, key=itemgetter(0))
        if place and updates[place - 1][1] > start:
            return False  # the optimizer calls it
        first, last = bisect.bisect_left(at, start), bisect.bisect_left(at, end)
        if place:
            before += first - bisect.bisect_left(at, updates[place - 1][1])
        if place < len(updates):
            after += bisect.bisect_left(at, updates[place][0]) - last
    return after >= before


def _of_annotations(ops: Sequence[Op], thread: _Thread) -> Iterator[Marks]:
    """Yield the steps that begin with a call of an annotation, if the calls hold WHOLE of the thread's ops.

    Calls inside other annotations may be the layers of a model.
    """
    users = [op for op in ops if op.kind == "label" and op.track == thread.track and not is_torchs_own(op.name)]
    outer = set(_apart(users))
    for name, some in grouped((op.name, (op.start, op.end)) for op in users if (op.start, op.end) in outer).items():
        spans = sorted(set(some))
        if len(spans) >= LEAST_STEPS and len(_outside(thread.ops, spans)) <= (1 - WHOLE) * len(thread.ops):
            yield from _alike(Marks(name, (), thread.track), [*(start for start, _ in spans), thread.until], thread.ops)


def _of_tokens(thread: _Thread) -> Iterator[Marks]:
    """Yield the steps that begin with the first lookup after each choice, if they are alike."""
    firsts = grouped(())
    chosen, last = True, 0
    # Compiled layers may choose experts.
    eager = _outside([op for op in thread.ops if op.name in (LOOKS_UP, *CHOOSE)], _apart(thread.regions))
    for op in sorted(eager + thread.regions, key=start_of):
        if op.name in CHOOSE:
            chosen, last = True, op.start
        elif chosen:
            firsts[op.name].append(op.start)
            chosen = False
    if not firsts:
        return
    name, starts = max(firsts.items(), key=lambda one: len(one[1]))
    if last > starts[-1]:
        yield from _alike(Marks(name, (), thread.track), [*starts, thread.until], thread.ops)


def _of_passes(thread: _Thread) -> Iterator[Marks]:
    """Yield the passes through a model if a thread's outermost ops are equal passes from the first op on.

    A single pass may consist of equal layers, too. So each pass has to have equal layers inside it. A thread of
    autograd's engine runs backward, and a pass is one of forward.
    """
    if any(op.name.startswith(AUTOGRAD) for op in thread.ops):
        return
    outermost: list[Op] = []
    for op in thread.ops:
        if not outermost or op.start >= outermost[-1].end:
            outermost.append(op)
    names = [op.name for op in outermost]
    places = (place for place in range(2, len(names) // LEAST_STEPS + 1) if names[place] == names[0])
    for period in islice(places, PERIODS):
        if names[period : LEAST_STEPS * period] != names[: (LEAST_STEPS - 1) * period]:
            continue
        differs = (now != before for now, before in zip(names[period:], names, strict=False))
        passes = next((place for place, one in enumerate(differs, period) if one), len(names)) // period
        if len(names) - passes * period >= period:
            continue  # what follows is more than a part of one more pass, so these may be a pass's layers
        if _has_equal_layers(names[:period]):
            starts = [op.start for op in outermost[: passes * period : period]]
            yield Marks(names[0], list(pairwise([*starts, outermost[passes * period - 1].end])), thread.track)
        return


def _has_equal_layers(names: Sequence[str]) -> bool:
    """Return whether equal sequences of ops, each with several products, follow each other in a pass.

    A single product may follow an equal one in a layer, too, as for attention's queries, keys and values.
    """
    is_product = [of_op(name) in IN_EVERY_LAYER for name in names]
    products = list(compress(range(len(names)), is_product))
    apart = Counter(after - before for place, before in enumerate(products) for after in products[place + 1 :][:16])
    for distance, _ in apart.most_common(DISTANCES):
        run = 0
        for place, (name, later) in enumerate(zip(names, names[distance:], strict=False)):
            run = run + 1 if name == later else 0
            if run >= max((LEAST_STEPS - 1) * distance, OF_A_PASS * len(names) - distance):
                layer = slice(place + 1, place + 1 + distance)
                normalizes = any(of_op(one) in ONLY_IN_LAYERS or one == ROOT for one in names[layer])
                if sum(is_product[layer]) > 1 and normalizes:
                    return True
                break
    return False


def _outside(ops: Sequence[Op], spans: Sequence[tuple[int, int]]) -> list[Op]:
    """Return the ops that start in none of the intervals. ops: by start."""
    kept: list[Op] = []
    reached = 0
    for start, end in spans:
        kept += ops[reached : bisect.bisect_left(ops, start, key=start_of)]
        reached = bisect.bisect_left(ops, end, key=start_of)
    return [*kept, *ops[reached:]]


def _alike(
    marks: Marks, bounds: Sequence[int], ops: Sequence[Op], updates: Sequence[int] = (), gradients: Sequence[int] = ()
) -> Iterator[Marks]:
    """Yield the marks with the steps, without a first and a last one that are no whole steps; none if they differ.

    bounds: where the steps begin, and the end of the last one (ns). ops: those of the calls' thread, by start. updates:
    when the optimizer is called, which is as often in each step. gradients: when parameters get their gradients.
    """
    spans = [span for span in pairwise(bounds) if span[0] < span[1]]
    if len(spans) < LEAST_STEPS:
        return
    at = [op.start for op in ops]
    places = [(bisect.bisect_left(at, start), bisect.bisect_left(at, end)) for start, end in spans]
    counts = [Counter(op.name for op in ops[first:last]) for first, last in places]
    usual, equal = Counter(frozenset(one.items()) for one in counts).most_common(1)[0]
    size = sum(count for _, count in usual)
    first, *inner, last = counts
    if equal < 2 or not size or sum(one.items() == usual for one in inner) < EQUAL_SHARE * len(inner):
        return
    if len(set(_numbers(updates, spans[1:-1]))) > 1 or not _are_close(_numbers(gradients, spans[1:-1])):
        return
    if not all(FEWER * size <= one.total() <= MORE * size for one in inner):
        return

    def holds_a_step(calls: Counter) -> bool:
        return sum(min(calls[name], count) for name, count in usual) >= WHOLE * size

    # A first step that includes a cold start may call more ops, unless it may be what precedes the loop.
    has_first = holds_a_step(first) and (first.total() <= MORE * size or not marks.ends_them)
    has_last = holds_a_step(last) and last.total() <= MORE * size
    kept = spans[0 if has_first else 1 : len(spans) if has_last else -1]
    if len(kept) < LEAST_STEPS:
        return
    if has_last and not marks.ends_them:
        # What follows the loop does not count, as far as it begins with an op that no other step calls.
        names = {name for name, _ in usual}
        tail = ops[slice(*places[-1])]
        while tail and tail[-1].name not in names:
            tail.pop()
        after = places[-1][0] + len(tail)
        if after < places[-1][1]:
            kept[-1] = kept[-1][0], ops[after].start
    yield msgspec.structs.replace(marks, spans=kept, equal=equal + (holds_a_step(first) and not has_first))
