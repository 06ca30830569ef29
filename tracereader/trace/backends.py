"""Which kind of device a trace is of, and which slices of a device's lane are none of its work."""

import functools
import re
from collections import Counter
from collections.abc import Iterable

# The words for each backend, in the order in which they are asked: what a device's name has; how the names of its
# runtime's calls begin; and what the names of its ops begin with. A backend is named as torch names its device, but
# AMD's, which torch calls cuda, is hip.
BACKENDS = {
    "cuda": (r"NVIDIA|GeForce|Quadro|Tesla", r"cuda[A-Z]|cu[A-Z]", r"aten::\w*cudnn_(?!is_acceptable)"),
    "hip": (r"AMD|Radeon|Instinct|\bgfx\d", r"hip[A-Z]|hsa_", r"aten::miopen_"),
    "xpu": (r"Intel|\bXPU\b", r"ur[A-Z]|ze[A-Z]|sycl|pi[A-Z]", r"xpu::"),
    "npu": (r"Ascend|\bNPU\b", r"acl|AscendCL", r"npu::|aclnn"),
    "mtia": (r"\bMTIA\b", r"mtia|runFunction", r"mtia::"),
    "hpu": (r"Gaudi|Habana|\bHL-\d|\bHPU\b", r"syn[A-Z]", r"hpu::"),
    "mps": (r"Apple|Metal|\bMPS\b", r"mps|MTL|metal", r"aten::\w*_mps|mps::"),
    "xla": (r"\bTPU\b", r"xla|Pjrt|PJRT", r"xla::"),
    "musa": (r"Moore Threads|\bMTT\b", r"musa[A-Z]|mu[A-Z]", r"musa::"),
    "mlu": (r"Cambricon|\bMLU", r"cn[A-Z]", r"torch_mlu::"),
}
OTHER = "other"  # an accelerator that only its categories show, such as privateuse1_runtime
# Categories of Kineto with these beginnings are also those of other backends than CUDA.
OF_ANY = ("cuda", "gpu", "cpu", "user", "python", "hardware")
CATEGORY = re.compile(r"([a-z]+\d*)_\w*(?:runtime|driver|sync|op|events?)")
# The words of which the names of waits and records of events on a device's lane consist.
WAITS = {
    "wait", "waits", "record", "sync", "synchronize", "synchronization", "barrier", "marker", "notify", "signal",
    "reset",
}  # fmt: skip
AWAITED = {
    "event", "events", "stream", "context", "device", "queue", "notifier", "semaphore", "fence", "remote", "hardware",
    "capture", "packet", "and", "or", "on", "for", "all", "value", "bit", "with", "timeout",
}  # fmt: skip
ALONE = {"barrier", "marker"}
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def backend_of(
    devices: Iterable[str],
    calls: Iterable[str],
    processes: Iterable[str],
    categories: Iterable[str],
    op_names: Iterable[str],
) -> str | None:
    """Return the kind of device that a trace is of: a name of BACKENDS, or OTHER; None where nothing shows it.

    devices: the names of the devices with work. calls: of the runtime's calls. processes: of the processes in the file,
    among which profilers list devices. They are asked in this order.
    """
    for place, names in ((0, devices), (1, calls), (0, processes)):
        if found := _most(names, place):
            return found
    own = {match[1] for one in categories if (match := CATEGORY.fullmatch(one))}
    if others := sorted(own.difference(OF_ANY)):
        return next((one for one in others if one in BACKENDS), OTHER)
    return _most(op_names, 2) or ("cuda" if "cuda" in own else None)


def shows_use(backend: str | None) -> bool:
    """Return whether this backend of a trace without GPU work shows that the program used a device.

    The profiler itself synchronizes with CUDA's and HIP's devices, also for a program on the CPU.
    """
    return backend not in (None, "cuda", "hip")


def _most(names: Iterable[str], place: int) -> str | None:
    """Return the backend whose words most of the names have; None if no name has any."""
    found = Counter()
    for name in names:
        ask = re.match if place else re.search
        found.update([backend for backend, words in BACKENDS.items() if ask(words[place], name)][:1])
    return max(found, key=found.__getitem__, default=None)


@functools.lru_cache(4096)
def only_waits(name: str) -> bool:
    """Return whether a slice of this name on a device's lane is a wait for an event, or its record, and no work.

    MTIA writes event_wait, Ascend EVENT_WAIT and Notify_Record, ROCm Barrier, CUPTI Stream Wait Event. A kernel has a
    grid, which a caller has to look for.
    """
    if len(name) > 40:
        return False
    words = [word.lower() for word in WORDS.findall(name)]
    if not words or any(one not in WAITS and one not in AWAITED for one in words):
        return False
    return (len(words) > 1 and not WAITS.isdisjoint(words)) or words[0] in ALONE
