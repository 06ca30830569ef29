"""Converts Perfetto's format (.pftrace), as torch 2.15 writes it, to Chrome's JSON.

A file is a message of protobuf, a sequence of packets. This module reads the packets that torch writes: slices of CPU
threads, GPU work, and the tables of names that they refer to by number. It leaves out sampled counters. The package
protobuf skips all others. The names and numbers of the fields are those of Perfetto's reference of its trace packets.

In this format torch leaves out the devices' properties, the distributed run, allocations, arrows, and a script's facts.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import cache, lru_cache

import msgspec

from tracereader.command import MissingPackage
from tracereader.trace.labels import AUTOGRAD

# Each message with the names, the numbers and the types of its fields. "*": the field is repeated. "|": a message has
# at most one of its fields with this mark. Texts are bytes, because a text may be broken; so are the messages of which
# many are equal, because those are read once, and packets, because all at once would take much memory.
MESSAGES = """
Trace: packet 1 *bytes
Packet: timestamp 8 uint64, trusted_packet_sequence_id 10 uint64, sequence_flags 13 uint64, interned_data 12 Interned
Packet: clock_snapshot 6 |Clocks, track_event 11 |Slice, track_descriptor 60 |Track
Packet: gpu_render_stage_event 53 |Work, compressed_packets 50 |bytes, zstd_compressed_packets 133 |bytes
Clocks: clocks 1 *Clock
Clock: clock_id 1 uint64, timestamp 2 uint64
Slice: type 9 uint64, track_uuid 11 uint64, name_iid 10 uint64, category_iids 3 uint64, debug_annotations 4 *bytes
Argument: name_iid 1 uint64, name 10 bytes, bool_value 2 |bool, uint_value 3 |uint64, int_value 4 |int64
Argument: double_value 5 |double, string_value 6 |bytes, pointer_value 7 |uint64, string_value_iid 17 |uint64
Argument: dict_entries 11 *Argument, array_values 12 *Argument
Interned: event_categories 1 *Entry, event_names 2 *Entry, debug_annotation_names 3 *Entry
Interned: debug_annotation_string_values 29 *Entry, gpu_specifications 24 *Entry, compute_arg_names 1001 *Entry
Entry: iid 1 uint64, name 2 bytes
Track: uuid 1 uint64, parent_uuid 5 uint64, process 3 Process, thread 4 Thread
Process: pid 1 int64, process_name 6 bytes
Thread: pid 1 int64, tid 2 int64, thread_name 5 bytes
Work: duration 2 int64, gpu_id 11 int64, hw_queue_iid 13 uint64, stage_iid 14 uint64, name_iid 20 uint64
Work: compute_kernel 21 bytes, extra_data 6 *bytes
ExtraData: name 1 bytes, value 2 bytes
Launch: grid_size 1 Sizes, workgroup_size 2 Sizes, args 3 *LaunchArgument
Sizes: x 1 uint64, y 2 uint64, z 3 uint64
LaunchArgument: name_iid 1 uint64, uint_value 4 uint64
"""
# The tables of names.
TABLES = CATEGORIES, EVENTS, ARGUMENTS, TEXTS, STAGES, LAUNCH = (
    "event_categories", "event_names", "debug_annotation_names", "debug_annotation_string_values",
    "gpu_specifications", "compute_arg_names",
)  # fmt: skip
REAL_TIME, SINCE_BOOT = 6, 1  # clocks
CLEARED = 1  # a bit of a packet's flags: the tables so far no longer hold
BEGIN, END = 1, 2
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
KEPT = 10_000  # arguments whose JSON is kept, because many slices have the same shapes

_FIRST = re.compile(rb"\x0a[\x80-\xff]{0,9}[\x00-\x7f][\x32\x40\x50\x5a\x62\x68\xe2]", re.DOTALL)
# Two expressions, because one with anything between them is quadratic in the number of equal arguments.
_FORWARD, _SEQUENCE = re.compile(rb'"Fwd thread id":(\d+),'), re.compile(rb'"Sequence number":(\d+)')
_WHOLE = re.compile(r"-?(?:0|[1-9]\d{0,17})")
_LANE = re.compile(r"\[0*(\d{1,18})\] (.*)", re.DOTALL)
_encoded = msgspec.json.Encoder().encode
_quoted = lru_cache(4096)(_encoded)


class Broken(ValueError):
    """The bytes are not such a trace. The message says why."""


def is_one(data: bytes) -> bool:
    """Return whether the bytes begin like a sequence of packets. No text begins in this way."""
    return _FIRST.match(data) is not None


def as_json(data: bytes, limit: int) -> bytes:
    """Return the trace in Chrome's JSON, of at most `limit` bytes. Raises Broken; MissingPackage without protobuf."""
    packets = _parsed("Trace", data).packet
    reader = _Reader(packets, limit, oldest_first=True)
    if reader.in_order and reader.nested:
        # torch 2.15 writes the begins of many slices and then their ends in the same order. A file in the order of
        # time is another writer's: there, an end belongs to the slice that began last.
        reader = _Reader(packets, limit, oldest_first=False)
    return reader.whole()


@cache
def _classes() -> tuple[dict[str, type], type[Exception]]:
    """Return protobuf's classes of the messages by name, and the error that they raise. Raises MissingPackage."""
    try:
        from google.protobuf import descriptor_pool, message_factory
        from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
        from google.protobuf.message import DecodeError
    except ImportError:
        raise MissingPackage("Perfetto's format", "protobuf") from None
    messages: dict[str, list[str]] = {}
    for line in MESSAGES.strip().splitlines():
        name, _, fields = line.partition(": ")
        messages.setdefault(name, []).extend(fields.split(", "))
    file = FileDescriptorProto(name="torch.proto", package="torch")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for said in fields:
            field_name, number, kind = said.split()
            field = message.field.add(name=field_name, number=int(number))
            field.label = field.LABEL_REPEATED if kind[0] == "*" else field.LABEL_OPTIONAL
            if kind[0] == "|":
                field.oneof_index = 0
                if not message.oneof_decl:
                    message.oneof_decl.add(name="one")
            kind = kind.lstrip("*|")
            if kind in messages:
                field.type, field.type_name = field.TYPE_MESSAGE, f".torch.{kind}"
            else:
                field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"torch.{name}") for name in messages}
    return {name: message_factory.GetMessageClass(one) for name, one in found.items()}, DecodeError


def _parsed(name: str, data: bytes):
    """Return the message of this name in the bytes. Raises Broken."""
    classes, cannot_read = _classes()
    try:
        return classes[name].FromString(data)
    except cannot_read:
        raise Broken("it is cut short or broken: protobuf cannot read it") from None


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
    found = _parsed("ExtraData", data)
    name, value = _text(found.name), _text(found.value)
    return RENAMED.get(name, name), int(value) if name not in TEXT and _WHOLE.fullmatch(value) else value


class _Reader:
    """Reads the packets in one pass, and writes their events as JSON at once.

    oldest_first: an end belongs to the slice of its track that began first, not to the one that began last.
    """

    def __init__(self, packets: Iterable[bytes], limit: int, oldest_first: bool):
        self.limit, self.oldest_first = limit, oldest_first
        self.size = 0
        self.events: list[bytes] = []
        self.names: dict[str, dict] = {}  # by table and number, of the sequence that is being read
        self.sequences = {0: self.names}
        self.sequence = 0
        self.tracks: dict[int, tuple[bytes, str]] = {}  # where its slices stand; their category if they do not say it
        self.waiting: dict[int, deque] = defaultdict(deque)  # by track: the slices whose end has not come
        self.latest = 0
        self.in_order, self.nested = True, False
        self.real_time = self.since_boot = 0
        self.named: set[tuple] = set()  # devices and their lanes
        self.ops: list[tuple] = []  # of autograd: start, thread of the forward op, sequence number, place
        self.known: dict[bytes, bytes] = {}  # arguments of slices as JSON
        self.launches: dict[bytes, dict[str, object]] = {}  # grids, blocks and registers
        self._read(packets)

    def whole(self) -> bytes:
        """Return the whole trace as JSON."""
        head = b'{"schemaVersion":1,"displayTimeUnit":"ms","baseTimeNanoseconds":%d,"traceEvents":[' % self.real_time
        return head + b",".join(self.events) + b"]}"

    def _read(self, packets: Iterable[bytes]) -> None:
        for packet in (_parsed("Packet", one) for one in packets):
            if (number := packet.trusted_packet_sequence_id) and number != self.sequence:
                self.sequence, self.names = number, self.sequences.setdefault(number, {})
                self._forget()
            if packet.sequence_flags & CLEARED:
                self.names.clear()
                self._forget()
            if packet.HasField("interned_data"):
                self._forget()
                for table in TABLES:
                    entries = ((one.iid, _text(one.name)) for one in getattr(packet.interned_data, table))
                    self.names.setdefault(table, {}).update(entries)
            kind, time = packet.WhichOneof("one"), packet.timestamp
            if kind == "track_event":
                self._slice(time, packet.track_event)
            elif kind == "gpu_render_stage_event":
                self._work(time, packet.gpu_render_stage_event)
            elif kind == "track_descriptor":
                self._track(packet.track_descriptor)
            elif kind == "clock_snapshot" and not self.real_time:
                clocks = {one.clock_id: one.timestamp for one in packet.clock_snapshot.clocks}
                self.real_time = clocks.get(REAL_TIME, 0)
                self.since_boot = clocks.get(SINCE_BOOT, self.real_time)
            elif kind in ("compressed_packets", "zstd_compressed_packets"):
                raise Broken("its packets are compressed one by one, as PyTorch does not write them")
        if unfinished := sum(map(len, self.waiting.values())):
            raise Broken(f"{unfinished:,} of its slices have no end")
        self._draw_backward()

    def _forget(self) -> None:
        """Drop all that depends on the tables of names, because new tables follow."""
        self.known.clear()
        self.launches.clear()

    def _add(self, event: bytes) -> None:
        self.size += len(event) + 1
        if self.size > self.limit:
            raise Broken(f"more than {self.limit:,} bytes as JSON; --limit and the free memory set this limit")
        self.events.append(event)

    def _name(self, table: str, number: int) -> str:
        return self.names.get(table, {}).get(number, "")

    def _track(self, track) -> None:
        if track.HasField("thread"):
            pid, tid = track.thread.pid, track.thread.tid
            usual = self.tracks.get(track.parent_uuid, (b"", ""))[1]
            pid = -1 if usual == "overhead" else pid
            # What waits for no stream is torch's stream -1, whose track has the number 1 in torch's JSON.
            tid = 1 if usual == "cuda_sync" and tid == NO_STREAM else tid
            self._say("thread_name", pid, tid, name=_text(track.thread.thread_name))
        elif track.HasField("process"):
            pid, tid, name = track.process.pid, 0, _text(track.process.process_name)
            # torch writes no category for what profiling itself costs and for what waits on a device.
            usual = "overhead" if name == "Overhead" else "cuda_sync" if name == f"GPU {pid}" else ""
            pid = -1 if name == "Overhead" else pid
            self._say("process_name", pid, name=name)
            self._say("process_labels", pid, labels=name if usual else "CPU")
        else:
            return
        self.tracks[track.uuid] = b'"pid":%d,"tid":%d' % (pid, tid), usual

    def _say(self, what: str, pid: int | str, tid: int = 0, **args: object) -> None:
        self._add(_encoded({"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}))

    def _slice(self, time: int, one) -> None:
        kind, track = one.type, one.track_uuid
        if kind not in (BEGIN, END):
            return
        if time < self.latest:
            self.in_order = False
        self.latest = time
        waiting = self.waiting[track]
        if kind == BEGIN:
            if waiting:
                self.nested = True
            named, cat = self._name(EVENTS, one.name_iid), self._name(CATEGORIES, one.category_iids)
            waiting.append((time, cat, named, one.debug_annotations))
            return
        if not waiting:
            raise Broken("a slice in it ends and did not begin")
        start, cat, named, arguments = waiting.popleft() if self.oldest_first else waiting.pop()
        place, usual = self.tracks.get(track) or (b'"pid":0,"tid":%d' % track, "")
        args = self._args(arguments)
        self._x(_named(cat or usual, named), place, start, time - start, args)
        is_numbered = cat == "cpu_op" and not named.startswith(AUTOGRAD)
        if is_numbered and (thread := _FORWARD.search(args)) and (numbers := _SEQUENCE.findall(args, thread.end())):
            self.ops.append((start, int(thread[1]), int(numbers[-1]), place))

    def _x(self, head: bytes, place: bytes, start: int, ns: int, args: bytes) -> None:
        self._add(b'%b%b,"ts":%b,"dur":%b,"args":{%b}}' % (head, place, _us(start - self.since_boot), _us(ns), args))

    def _args(self, arguments: Iterable[bytes]) -> bytes:
        """Return the arguments of a slice as members of a JSON object."""
        found = []
        for one in arguments:
            if (member := self.known.get(one)) is None:
                member = self._arg(_parsed("Argument", one))
                if len(self.known) < KEPT:
                    self.known[one] = member
            found.append(member)
        return b",".join(found)

    def _arg(self, one) -> bytes:
        name = _text(one.name) if one.HasField("name") else self._name(ARGUMENTS, one.name_iid)
        return _quoted(name) + b":" + self._value(one)

    def _value(self, one) -> bytes:
        """Return an argument's value as JSON. torch writes an empty list without any value."""
        if (kind := one.WhichOneof("one")) is not None:
            value = getattr(one, kind)
            if kind == "string_value":
                value = _text(value)
            return _encoded(self._name(TEXTS, value) if kind == "string_value_iid" else value)
        if one.dict_entries:
            return b"{" + b",".join(map(self._arg, one.dict_entries)) + b"}"
        return b"[" + b",".join(map(self._value, one.array_values)) + b"]"

    def _work(self, time: int, work) -> None:
        """Add a GPU event: a kernel, a copy, a memset, a node of a graph, or an annotation around some of them."""
        args = dict(map(_said, work.extra_data))
        for name in OF_THE_WRITER:
            args.pop(name, None)
        if (how := self.launches.get(work.compute_kernel)) is None:
            how = self._launch(_parsed("Launch", work.compute_kernel))
            if len(self.launches) < KEPT:
                self.launches[work.compute_kernel] = how
        args |= how
        device, stage, stream = work.gpu_id, self._name(STAGES, work.stage_iid), args.get("stream")
        lane, lane_name = stream if type(stream) is int else 0, f"stream {stream}"
        if told := _LANE.fullmatch(self._name(STAGES, work.hw_queue_iid)):
            lane, lane_name = int(told[1]), told[2]
        if "graph node id" in args and stream != lane:
            args |= {"stream": lane, "original_stream": stream}
        if stage != "Annotation":
            args.setdefault("correlation", 0)
        name = f"HostNode: {args['host fn']}" if "host fn" in args else self._name(EVENTS, work.name_iid) or stage
        self._name_lane(device, lane, lane_name)
        place = b'"pid":%d,"tid":%d' % (device, lane)
        self._x(_named(CATEGORY_OF.get(stage, stage), name), place, time, work.duration, _encoded(args)[1:-1])

    def _launch(self, launch) -> dict[str, object]:
        """Return a kernel's grid, block and registers as in torch's JSON.

        It has no shared memory: in torch's JSON that includes the kernel's own part, which this format does not have.
        """
        args = {}
        for name, field in (("grid", "grid_size"), ("block", "workgroup_size")):
            if launch.HasField(field):
                size = getattr(launch, field)
                args[name] = [size.x, size.y, size.z]
        for one in launch.args:
            if self._name(LAUNCH, one.name_iid) == "registers_per_thread":
                args["registers per thread"] = one.uint_value
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
                for ph, (ns, where), more in ((b"s", source, b""), (b"f", (start, place), b',"bp":"e"')):
                    parts = (ph, arrows, where, _us(ns - self.since_boot), more)
                    self._add(b'{"ph":"%b","id":%d,%b,"ts":%b,"cat":"fwdbwd","name":"fwdbwd"%b}' % parts)
