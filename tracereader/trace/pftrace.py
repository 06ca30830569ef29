"""Converts Perfetto's format (.pftrace), as torch 2.15 writes it, to Chrome's JSON.

A file is a sequence of packets in protobuf's wire format. This module reads the packets that torch writes: slices of
CPU threads, GPU work, counters, and the tables of names that they refer to by number. All other packets are skipped.
The numbers of the fields are those of Perfetto's reference of its trace packets.

In this format torch leaves out the devices' properties, the distributed run, allocations, arrows, and the facts that a
script stored.
"""

import re
import struct
from collections import deque
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from tracereader.trace.labels import AUTOGRAD

# How a field begins: (its number << 3) + its wire type. With another wire type it is a field that is not known.
TIME, SEQUENCE, FLAGS = 0x40, 0x50, 0x68
CLOCKS, SLICE, NAMES, TRACK, WORK, COUNTERS = 0x32, 0x5A, 0x62, 482, 426, 418
PACKED = (402, 1066)  # packets compressed once more, which torch does not write
CATEGORIES, EVENTS, ARGUMENTS, TEXTS, STAGES, LAUNCH = 0x0A, 0x12, 0x1A, 234, 194, 8010  # tables of names
COUNTED = 378  # the table of the groups of counters
REAL_TIME, SINCE_BOOT = 6, 1  # clocks
CLEARED = 1  # a bit of FLAGS: the tables so far no longer hold
BEGIN, END = 1, 2
DEEPEST = 100  # of lists in lists
# The categories of torch's JSON, by the names of the GPU's stages.
CATEGORY_OF = {
    "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Annotation": "gpu_user_annotation",
    "EventRecord": "graph_event_node", "HostNode": "graph_host_node",
}  # fmt: skip
# The arguments of GPU work are text. These have other names in torch's JSON, are text there, too, or are of the writer.
RENAMED = {"device id": "device", "context id": "context", "stream id": "stream"}
TEXT = ("Collective name", "Process Group Name", "Process Group Description")
OF_THE_WRITER = ("arch", "process_id", "process_name")
NO_STREAM = (1 << 31) - 1
FIRST_GPU = 5_000_000  # in the order of processes: what torch writes in JSON
GRAPH_ARROWS = 1 << 40  # the first number of the arrows between a graph's nodes, above all correlations
KEPT = 10_000  # arguments whose JSON is kept, because many slices have the same shapes

_VARINT = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
# A packet with the begin or the end of a slice in the order of torch's fields, up to the slice's arguments.
_SLICE = re.compile(
    rb"\x0a(V)\x40(V)\x50(V)(?:\x68\x02)?\x5a(V)\x48([\x01\x02])\x58(V)(?:\x50(V))?(?:\x18(V))?".replace(b"V", _VARINT),
    re.DOTALL,
)
_FIRST = re.compile(rb"\x0a%b[\x32\x40\x50\x5a\x62\x68\xe2]" % _VARINT, re.DOTALL)
# Two expressions, because one with anything between them is quadratic in the number of equal arguments.
_FORWARD, _SEQUENCE = re.compile(rb'"Fwd thread id":(\d+),'), re.compile(rb'"Sequence number":(\d+)')
_WHOLE = re.compile(r"-?(?:0|[1-9]\d{0,17})")
_LANE = re.compile(r"\[0*(\d{1,18})\] (.*)", re.DOTALL)
_encoded = msgspec.json.Encoder().encode


class Broken(ValueError):
    """The bytes are not such a trace. The message says why."""


def is_one(data: bytes) -> bool:
    """Return whether the bytes begin like a sequence of packets. No text begins in this way."""
    return _FIRST.match(data) is not None


def as_json(data: bytes, limit: int) -> bytes:
    """Return the trace in Chrome's JSON, as torch writes it. Raises Broken.

    limit: the most bytes that the JSON may have.
    """
    reader = _Reader(data, limit, oldest_first=True)
    if reader.in_order and reader.nested:
        # torch 2.15 writes the begins of many slices and then their ends in the same order. A file in the order of
        # time is another writer's: there, an end belongs to the slice that began last.
        reader = _Reader(data, limit, oldest_first=False)
    return reader.whole()


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number, and the position of the next field."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
        if shift == 70:
            raise Broken("a number in it has more than ten bytes")
    raise Broken("it is cut short: it ends within a number")


def _field(data: bytes, at: int, end: int) -> tuple[int, int | bytes, int]:
    """Return a field's tag, its value (bytes for a field with a length), and the position of the next field."""
    tag, at = _varint(data, at, end)
    wire = tag & 7
    if wire == 0:
        value, at = _varint(data, at, end)
        return tag, value, at
    if wire == 2:
        length, at = _varint(data, at, end)
    elif wire in (1, 5):
        length = 8 if wire == 1 else 4
    else:
        raise Broken(f"a field in it has wire type {wire}, which Perfetto does not use")
    if length > end - at:
        raise Broken(f"it is cut short: a field has {length:,} bytes, and {end - at:,} are left")
    return tag, data[at : at + length], at + length


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message: each tag and value."""
    at, end = 0, len(data)
    while at < end:
        tag, value, at = _field(data, at, end)
        yield tag, value


def _numbers(data: bytes) -> Iterator[int]:
    """Yield the numbers of a packed field."""
    at, end = 0, len(data)
    while at < end:
        number, at = _varint(data, at, end)
        yield number


@lru_cache(4096)
def _number(raw: bytes) -> int:
    return _varint(raw, 0, len(raw))[0]


def _time(raw: bytes) -> int:
    """Return a time in ns since 1970. It is fast because only the lowest bits change from slice to slice."""
    if len(raw) < 5:
        return _number(raw)
    low = raw[0] & 0x7F | (raw[1] & 0x7F) << 7 | (raw[2] & 0x7F) << 14 | (raw[3] & 0x7F) << 21
    return (low | _number(raw[4:]) << 28) & 0xFFFF_FFFF_FFFF_FFFF


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@lru_cache(4096)
def _quoted(text: str) -> bytes:
    return _encoded(text)


@lru_cache(4096)
def _named(category: str, name: str) -> bytes:
    return b'{"ph":"X","cat":%b,"name":%b,' % (_encoded(category), _encoded(name))


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _us(ns: int) -> bytes:
    return b"%d.%03d" % divmod(ns, 1000) if ns >= 0 else b"-%d.%03d" % divmod(-ns, 1000)


@lru_cache(4096)
def _said(data: bytes) -> tuple[str, object]:
    """Return an argument of GPU work: its name in torch's JSON, and its value."""
    found = dict(_fields(data))
    name, value = (_text(found.get(tag, b"")) for tag in (0x0A, 0x12))
    return RENAMED.get(name, name), int(value) if name not in TEXT and _WHOLE.fullmatch(value) else value


@lru_cache(4096)
def _sizes(data: bytes) -> list[int]:
    found = dict(_fields(data))
    return [found.get(tag, 0) for tag in (0x08, 0x10, 0x18)]


class _Reader:
    """Reads a file in one pass, and writes its events as JSON at once.

    oldest_first: an end belongs to the slice of its track that began first, not to the one that began last.
    """

    def __init__(self, data: bytes, limit: int, oldest_first: bool):
        self.limit, self.oldest_first = limit, oldest_first
        self.size = 0
        self.events: list[bytes] = []
        self.names: dict[int, dict] = {}  # by table and number, of the sequence that is being read
        self.sequences = {0: self.names}
        self.sequence = 0
        self.tracks: dict[int, tuple[bytes, str]] = {}  # where its slices stand; their category if they do not say it
        self.waiting: dict[int, deque] = {}  # by track: the slices whose end has not come
        self.latest = 0
        self.in_order, self.nested = True, False
        self.real_time = self.since_boot = 0
        self.named: set[tuple] = set()  # devices and their lanes
        self.ops: list[tuple] = []  # of autograd: start, thread of the forward op, sequence number, place
        self.nodes: dict[int, tuple[bytes, int, int]] = {}  # of replayed graphs, by id: place, start, end
        self.waits: list[tuple[int, int]] = []  # a node's id, and that of one that it waits for
        self.known: dict[bytes, bytes] = {}  # arguments of slices as JSON, and how those that are numbers begin
        self.launches: dict[bytes, dict[str, object]] = {}  # grids, blocks and registers
        self.heads: dict[tuple[int, int], tuple[bytes, bool]] = {}  # by name and category
        self._read(data)

    def whole(self) -> bytes:
        """Return the whole trace as JSON."""
        head = b'{"schemaVersion":1,"displayTimeUnit":"ms","baseTimeNanoseconds":%d,"traceEvents":[' % self.real_time
        return head + b",".join(self.events) + b"]}"

    def _read(self, data: bytes) -> None:
        at, end = 0, len(data)
        while at < end:
            if found := _SLICE.match(data, at):
                length, time, sequence, inner, kind, track, name, category = found.groups(b"\x00")
                after = found.end()
                stop = found.end(1) + _number(length)
                if after <= stop == found.end(4) + _number(inner) <= end:
                    self._use_sequence(_number(sequence))
                    numbers = _number(track), _number(name), _number(category)
                    self._slice(_time(time), kind[0], *numbers, data[after:stop])
                    at = stop
                    continue
            tag, packet, at = _field(data, at, end)
            if tag != 0x0A:
                raise Broken("something in it is not a packet")
            self._packet(packet)
        if unfinished := sum(map(len, self.waiting.values())):
            raise Broken(f"{unfinished:,} of its slices have no end")
        self._draw_backward()
        self._draw_graphs()

    def _packet(self, data: bytes) -> None:
        time, flags, messages = 0, 0, []
        for tag, value in _fields(data):
            if tag == TIME:
                time = value
            elif tag == SEQUENCE:
                self._use_sequence(value)
            elif tag == FLAGS:
                flags = value
            elif tag in PACKED:
                raise Broken("its packets are compressed one by one, as PyTorch does not write them")
            elif tag in (CLOCKS, SLICE, NAMES, TRACK, WORK, COUNTERS):
                messages.append((tag, value))
        if flags & CLEARED:
            self.names.clear()
            self._forget()
        for tag, value in messages:
            if tag == SLICE:
                found = dict(_fields(value))
                kind, *numbers = (found.get(one, 0) for one in (0x48, 0x58, 0x50, 0x18))
                if kind in (BEGIN, END):
                    self._slice(time, kind, *numbers, value)
            elif tag == WORK:
                self._work(time, value)
            elif tag == NAMES:
                self._tables(value)
            elif tag == TRACK:
                self._track(value)
            elif tag == COUNTERS:
                self._samples(time, value)
            elif not self.real_time:
                self._clocks(value)

    def _use_sequence(self, number: int) -> None:
        if number != self.sequence:
            self.sequence, self.names = number, self.sequences.setdefault(number, {})
            self._forget()

    def _forget(self) -> None:
        """Drop all that depends on the tables of names, because new tables follow."""
        self.known.clear()
        self.heads.clear()
        self.launches.clear()

    def _add(self, event: bytes) -> None:
        self.size += len(event) + 1
        if self.size > self.limit:
            raise Broken(f"more than {self.limit:,} bytes as JSON; --limit and the free memory set this limit")
        self.events.append(event)

    def _clocks(self, data: bytes) -> None:
        found = [dict(_fields(value)) for tag, value in _fields(data) if tag == 0x0A]
        clocks = {one.get(0x08): one.get(0x10, 0) for one in found}
        self.real_time = clocks.get(REAL_TIME, 0)
        self.since_boot = clocks.get(SINCE_BOOT, self.real_time)

    def _tables(self, data: bytes) -> None:
        self._forget()
        for tag, value in _fields(data):
            if tag in (CATEGORIES, EVENTS, ARGUMENTS, TEXTS, STAGES, LAUNCH):
                entry = dict(_fields(value))
                self.names.setdefault(tag, {})[entry.get(0x08, 0)] = _text(entry.get(0x12, b""))
            elif tag == COUNTED:
                self.names.setdefault(tag, {})[dict(_fields(value)).get(0x08, 0)] = self._counted(value)

    def _name(self, table: int, number: int) -> str:
        return self.names.get(table, {}).get(number, "")

    def _track(self, data: bytes) -> None:
        track = dict(_fields(data))
        place = track.get(0x22, track.get(0x1A))
        if place is None:
            return
        found = dict(_fields(place))
        pid, tid = (_signed(found.get(tag, 0)) for tag in (0x08, 0x10))
        if 0x22 in track:
            usual = self.tracks.get(track.get(0x28, 0), (b"", ""))[1]
            pid = -1 if usual == "overhead" else pid
            # What waits for no stream is torch's stream -1, whose track has the number 1 in torch's JSON.
            tid = 1 if usual == "cuda_sync" and tid == NO_STREAM else tid
            self._say("thread_name", pid, tid, name=_text(found.get(0x2A, b"")))
        else:
            name = _text(found.get(0x32, b""))
            # torch writes no category for what profiling itself costs and for what waits on a device.
            usual = "overhead" if name == "Overhead" else "cuda_sync" if name == f"GPU {pid}" else ""
            pid = -1 if name == "Overhead" else pid
            self._say("process_name", pid, name=name)
            self._say("process_labels", pid, labels=name if usual else "CPU")
        self.tracks[track.get(0x08, 0)] = b'"pid":%d,"tid":%d' % (pid, tid), usual

    def _say(self, what: str, pid: int | str, tid: int = 0, **args: object) -> None:
        self._add(_encoded({"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}))

    def _slice(self, time: int, kind: int, track: int, name: int, category: int, fields: bytes) -> None:
        """Add the begin or the end of a slice. fields: the slice's fields, which include its arguments."""
        if time < self.latest:
            self.in_order = False
        self.latest = time
        waiting = self.waiting.get(track)
        if waiting is None:
            waiting = self.waiting[track] = deque()
        if kind == BEGIN:
            if waiting:
                self.nested = True
            head = self.heads.get((name, category)) or self._head(name, category)
            waiting.append((time, head, fields))
            return
        if not waiting:
            raise Broken("a slice in it ends and did not begin")
        start, (head, of_autograd), fields = waiting.popleft() if self.oldest_first else waiting.pop()
        place, usual = self.tracks.get(track) or (b'"pid":0,"tid":%d' % track, "")
        if usual:
            head = head.replace(b'"cat":""', b'"cat":%b' % _quoted(usual), 1)
        args = self._args(fields)
        self._x(head, place, start, time - start, args)
        if of_autograd and (thread := _FORWARD.search(args)) and (numbers := _SEQUENCE.findall(args, thread.end())):
            self.ops.append((start, int(thread[1]), int(numbers[-1]), place))

    def _head(self, name: int, category: int) -> tuple[bytes, bool]:
        """Return the begin of a slice's JSON, and whether it may be an op that autograd numbers."""
        named, cat = self._name(EVENTS, name), self._name(CATEGORIES, category)
        found = _named(cat, named), cat == "cpu_op" and not named.startswith(AUTOGRAD)
        if len(self.heads) < KEPT:
            self.heads[name, category] = found
        return found

    def _x(self, head: bytes, place: bytes, start: int, ns: int, args: bytes) -> None:
        self._add(b'%b%b,"ts":%b,"dur":%b,"args":{%b}}' % (head, place, _us(start - self.since_boot), _us(ns), args))

    def _args(self, data: bytes) -> bytes:
        """Return the arguments among a slice's fields as members of a JSON object."""
        found, known = [], self.known
        at, end = 0, len(data)
        while at < end:
            stop = at + 2 + data[at + 1] if data[at] == 0x22 and at + 1 < end else end + 1
            if stop > end or data[at + 1] >= 0x80:
                tag, one, at = _field(data, at, end)
                if tag != 0x22:
                    continue
            else:
                one = data[at + 2 : stop]
                at = stop
            member = known.get(one)
            if member is None:
                # Mostly a name and a number that no other slice has.
                after = one[1] + 3 if len(one) > 3 else 0
                head, number = known.get(one[:after]), one[after:]
                if head is None or not number or number[-1] >= 0x80:
                    member = self._arg(one)
                else:
                    member = head + b"%d" % _signed(_number(number))
            found.append(member)
        return b",".join(found)

    def _arg(self, data: bytes, depth: int = 0) -> bytes:
        """Return an argument as a member of a JSON object."""
        found = list(_fields(data))
        names = [
            _text(value) if tag == 0x52 else self._name(ARGUMENTS, value) for tag, value in found if tag in (0x08, 0x52)
        ]
        name = _encoded(names[-1] if names else "") + b":"
        member = name + self._value(found, depth)
        if not depth and len(self.known) < KEPT:
            if [tag for tag, _ in found] == [0x52, 0x20] and data[1] < 0x80:
                self.known[data[: data[1] + 3]] = name
            else:
                self.known[data] = member
        return member

    def _value(self, fields: list, depth: int) -> bytes:
        """Return an argument's value as JSON. torch writes an empty list without any value."""
        if depth > DEEPEST:
            raise Broken(f"lists are nested more than {DEEPEST} deep in it")
        items, members = [], []
        for tag, value in fields:
            if tag in (0x18, 0x20, 0x38):
                return b"%d" % (_signed(value) if tag == 0x20 else value)
            if tag == 0x10:
                return b"true" if value else b"false"
            if tag == 0x29:
                return _encoded(struct.unpack("<d", value)[0])
            if tag == 0x32:
                return _encoded(_text(value))
            if tag == 136:
                return _encoded(self._name(TEXTS, value))
            if tag == 0x62:
                items.append(self._value(list(_fields(value)), depth + 1))
            elif tag == 0x5A:
                members.append(self._arg(value, depth + 1))
        return b"{" + b",".join(members) + b"}" if members else b"[" + b",".join(items) + b"]"

    def _work(self, time: int, data: bytes) -> None:
        """Add a GPU event: a kernel, a copy, a memset, a node of a graph, or an annotation around some of them."""
        found, args, waits = {}, {}, []
        for tag, value in _fields(data):
            if tag == 0x32:
                name, value = _said(value)
                if name not in OF_THE_WRITER:
                    args[name] = value
            elif tag == 144:
                waits.append(value)
            elif tag == 146:
                waits.extend(_numbers(value))
            else:
                found[tag] = value
        number, device, ns = found.get(0x08, 0), _signed(found.get(0x58, 0)), _signed(found.get(0x10, 0))
        stage = self._name(STAGES, found.get(0x70, 0))
        launch = found.get(170, b"")
        if (how := self.launches.get(launch)) is None:
            how = self._launch(launch)
            if len(self.launches) < KEPT:
                self.launches[launch] = how
        args |= how
        stream = args.get("stream")
        lane, lane_name = stream if type(stream) is int else 0, f"stream {stream}"
        if told := _LANE.fullmatch(self._name(STAGES, found.get(0x68, 0))):
            lane, lane_name = int(told[1]), told[2]
        if "graph node id" in args and stream != lane:
            args |= {"stream": lane, "original_stream": stream}
        if stage != "Annotation":
            args.setdefault("correlation", 0)
        name = f"HostNode: {args['host fn']}" if "host fn" in args else self._name(EVENTS, found.get(160, 0)) or stage
        self._name_lane(device, lane, lane_name)
        place = b'"pid":%d,"tid":%d' % (device, lane)
        self._x(_named(CATEGORY_OF.get(stage, stage), name), place, time, ns, _encoded(args)[1:-1])
        if "graph node id" in args:
            self.nodes[number] = place, time, time + ns
            self.waits.extend((number, other) for other in waits)

    def _launch(self, data: bytes) -> dict[str, object]:
        """Return a kernel's grid, block and registers as in torch's JSON.

        It has no shared memory: in torch's JSON that includes the kernel's own part, which this format does not have.
        """
        args = {}
        for tag, value in _fields(data):
            if tag == 0x0A:
                args["grid"] = _sizes(value)
            elif tag == 0x12:
                args["block"] = _sizes(value)
            elif tag == 0x1A:
                found = dict(_fields(value))
                if self._name(LAUNCH, found.get(0x08, 0)) == "registers_per_thread":
                    args["registers per thread"] = found.get(0x20, 0)
        return args

    def _name_lane(self, device: int, lane: int, name: str) -> None:
        if device not in self.named:
            self.named.add(device)
            self._say("process_name", device, name="python")
            self._say("process_labels", device, labels=f"GPU {device}")
            self._say("process_sort_index", device, sort_index=FIRST_GPU + device)
        if (device, lane) not in self.named:
            self.named.add((device, lane))
            self._say("thread_name", device, lane, name=name)
            self._say("thread_sort_index", device, lane, sort_index=lane)

    def _counted(self, data: bytes) -> tuple[int, dict[int, str]]:
        """Return the device of a group of counters, and the counters' names by number."""
        found = dict(_fields(data))
        specs = [dict(_fields(value)) for tag, value in _fields(found.get(0x12, b"")) if tag == 0x0A]
        return _signed(found.get(0x18, 0)), {one.get(0x08, 0): _text(one.get(0x12, b"")) for one in specs}

    def _samples(self, time: int, data: bytes) -> None:
        """Add the counters as in torch's JSON, with a process for each device."""
        found = list(_fields(data))
        device, names = self.names.get(COUNTED, {}).get(dict(found).get(0x20, 0), (0, {}))
        for tag, value in found:
            sample = dict(_fields(value)) if tag == 0x12 else {}
            if (name := names.get(sample.get(0x08, 0))) and (0x10 in sample or 0x19 in sample):
                number = _signed(sample[0x10]) if 0x10 in sample else struct.unpack("<d", sample[0x19])[0]
                parts = _quoted(name), device, _us(time - self.since_boot), _encoded(number)
                self._add(b'{"ph":"C","name":%b,"pid":"GPU %d Counters","ts":%b,"args":{"":%b}}' % parts)

    def _draw_backward(self) -> None:
        """Add the arrows from forward to backward ops, by the rule of torch's profiler.

        Among the forward ops with one sequence number, the last one leads to the backward op. This format does not have
        these arrows. A number that ops of two threads share leads to no arrow.
        """
        forward: dict[int, tuple[int, bytes] | None] = {}
        arrows = 0
        for start, thread, number, place in sorted(self.ops, key=lambda op: op[0]):
            if not thread:
                before = forward.get(number, (start, place))
                forward[number] = (start, place) if before is not None and before[1] == place else None
            elif source := forward.pop(number, None):
                arrows += 1
                self._arrow(b"fwdbwd", arrows, source[1], source[0], place, start)

    def _draw_graphs(self) -> None:
        """Add the arrows between the nodes of a replayed graph, from the end of one to the start of the next."""
        for number, (node, other) in enumerate(self.waits):
            if other in self.nodes:
                (place, start, _), (source, _, end) = self.nodes[node], self.nodes[other]
                self._arrow(b"ac2g", GRAPH_ARROWS + number, source, end, place, start)

    def _arrow(self, kind: bytes, number: int, source: bytes, from_ns: int, place: bytes, to_ns: int) -> None:
        for ph, where, ns, more in ((b"s", source, from_ns, b""), (b"f", place, to_ns, b',"bp":"e"')):
            parts = (ph, number, where, _us(ns - self.since_boot), kind, kind, more)
            self._add(b'{"ph":"%b","id":%d,%b,"ts":%b,"cat":"%b","name":"%b"%b}' % parts)
