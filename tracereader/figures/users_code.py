"""The user's own code around a moment of a step. Only a recording with stacks has it."""

import re
import sys
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from tracereader.figures.gpu_time import python_in
from tracereader.trace.grouped import grouped
from tracereader.trace.slices import Frame

# The profiler leaves out the folders of sys.path, so a library's file begins with the library's name.
LIBRARIES = (
    "accelerate", "datasets", "deepspeed", "diffusers", "flash_attn", "ignite", "jax", "lightning", "lightning_fabric",
    "megatron", "numpy", "peft", "pytorch_lightning", "sglang", "timm", "torch", "torchao", "torchaudio", "torchvision",
    "transformers", "transformer_engine", "triton", "trl", "vllm", "xformers",
)  # fmt: skip
# Scripts have these four names, too.
NOT_THE_USERS = {*LIBRARIES, *sys.stdlib_module_names}.difference(("code", "profile", "test", "trace"))
INSTALLED = re.compile(r"(site|dist)-packages/|/lib/python\d|^<(?!ipython)")
CALL = re.compile(r"(.+)\((\d+)\): (.+)")
MOST = 0.5  # the function is the innermost one that holds at least this share of the time


class Function(msgspec.Struct, frozen=True):
    """A function of the user's code: its file, the line on which it begins, and its name."""

    file: str
    line: int
    name: str


@lru_cache(4096)
def users_function(name: str) -> Function | None:
    """Return the user's function that a Python frame of this name calls; None for a library's or a built-in one."""
    call = CALL.fullmatch(name.replace("\\", "/"))
    if call is None or INSTALLED.search(call[1]) or call[1].partition("/")[0].removesuffix(".py") in NOT_THE_USERS:
        return None
    return Function(call[1], int(call[2]), call[3])


def users_frames(frames: dict[tuple, list[Frame]]) -> dict[tuple, list[Frame]]:
    """Return the calls of the user's own functions by thread; empty without stacks."""
    own = {track: [one for one in some if users_function(one.name)] for track, some in frames.items()}
    return {track: some for track, some in own.items() if some}


def function_around(frames: dict[tuple, list[Frame]], spans: Iterable[tuple[tuple, int, int]]) -> Function | None:
    """Return the user's innermost function that holds most of some spans (track, start, end; ns).

    frames: see users_frames().
    """
    by_track = grouped((track, (start, end)) for track, start, end in spans if track in frames)
    held = python_in(frames, by_track, MOST).most_common(1)
    return users_function(held[0][0]) if held and held[0][1] else None
