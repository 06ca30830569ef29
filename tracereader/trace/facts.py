"""The facts that a run stored about itself in its trace. common/ fills a RunFacts; the reader decodes it here.

In the file it is the key "lesson": {"script", "flags", "device", "torch", "run", "guesses", "facts": {…}}. A program
that is no numbered script may store "unprofiled_step_us" at the top of the trace.
"""

import contextlib
from typing import Annotated, Literal, TypeVar

import msgspec

T = TypeVar("T")
# A larger number is not a plausible count or rate, and a double does not hold it exactly.
Count = Annotated[int, msgspec.Meta(gt=0, lt=2**53)]
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Amount = Annotated[float, msgspec.Meta(gt=0, lt=2**53)]
Size = Annotated[int, msgspec.Meta(gt=0, lt=2**40)]
STORED_APART = ("script", "flags", "device", "torch", "run", "guesses")  # beside "facts"


class Roofs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured peaks of a run's machine. tflops: TFLOP/s in the run's --dtype. gb_s: GB/s of memory."""

    tflops: Amount
    gb_s: Amount


class AttentionFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The attention that a step computes. refused: torch's reasons against other SDPA backends, by backend."""

    batch: Size | None = None
    heads: Size | None = None
    seq: Size | None = None
    head_dim: Size | None = None
    causal: bool | None = None
    backend: str | None = None
    refused: dict[str, list[str]] = {}

    @property
    def sizes(self) -> tuple[int, int, int, int] | None:
        """batch, heads, seq, head_dim; None if one of them is unknown."""
        found = (self.batch, self.heads, self.seq, self.head_dim)
        return None if None in found else found


class ModelFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The language model whose step was profiled. A field is None if it is unknown.

    tokens: per step, over all sequences. weight_bytes, cache_bytes: the weights and the filled part of the KV cache,
    which a step reads once each. gb_s: the device's bandwidth that the run measured.
    """

    phase: Literal["decode", "prefill"]
    batch: Count
    tokens: Count
    weight_bytes: Bytes | None = None
    cache_bytes: Bytes | None = None
    cache_bytes_allocated: Bytes | None = None
    layers: Count | None = None
    parameters: Count | None = None
    gb_s: Amount | None = None


class TrainingFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model that was trained. tokens: per step of one rank. losses: one per step, None if not a number."""

    parameters: Count | None = None
    tokens: Count | None = None
    losses: tuple[float | None, ...] = ()


class RunFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts that a run stored about itself; the defaults if it stored none.

    script: the numbered script, "" for any other program. guesses: the predictions, as expect.py records them.
    run: the run's id, which its table has, too. first_call_s: the seconds of the first call of the step.
    unprofiled_step_us: the µs of a step without the profiler. unprofiled_cpu_us: the CPU's for one that finds the GPU
    idle. layers: the names of the step's matrix products, in the order of the forward pass.
    """

    script: str = ""
    flags: dict[str, object] = {}
    device: str = ""
    torch: str = ""
    run: str = ""
    guesses: tuple[dict, ...] = ()
    first_call_s: Amount | None = None
    unprofiled_step_us: Amount | None = None
    unprofiled_cpu_us: Amount | None = None
    peak_bytes: Count | None = None
    relative_error: float | None = None
    roofs: Roofs | None = None
    layers: tuple[str, ...] = ()
    attention: AttentionFacts | None = None
    decoding: ModelFacts | None = None
    training: TrainingFacts | None = None

    @property
    def dtype(self) -> str:
        """The run's --dtype; "None" if it has none."""
        return str(self.flags.get("dtype"))


def run_facts(lesson: object, unprofiled_step_us: object = None, unprofiled_cpu_us: object = None) -> RunFacts:
    """Return the facts in the trace's values of these keys. One of a wrong type, as in old traces, is not stored."""
    top = {"unprofiled_step_us": unprofiled_step_us, "unprofiled_cpu_us": unprofiled_cpu_us}
    if not isinstance(lesson, dict) or not isinstance(lesson.get("script"), str):
        return usable(RunFacts, top)
    facts = lesson.get("facts") if isinstance(lesson.get("facts"), dict) else {}
    guesses = lesson.get("guesses")
    guesses = [one for one in guesses if isinstance(one, dict)] if isinstance(guesses, list) else []
    beside = {name: lesson.get(name) for name in STORED_APART} | {"run": str(lesson.get("run", "")), "guesses": guesses}
    if (named := facts.get("attention")) is not None:
        facts = facts | {"attention": usable(AttentionFacts, named)}
    if isinstance(named := facts.get("decoding"), dict):
        known = {name: _whole(one) if name != "gb_s" else one for name, one in named.items() if one}
        facts = facts | {"decoding": usable(ModelFacts, known)}
    return usable(RunFacts, top | {name: one for name, one in facts.items() if one is not None} | beside)


def of_other_steps(facts: RunFacts) -> RunFacts:
    """Return the facts that still hold where other intervals count as the steps: those that are not about a step."""
    of_steps = ("unprofiled_step_us", "unprofiled_cpu_us", "attention", "decoding", "training")
    return msgspec.structs.replace(facts, guesses=(), layers=(), **dict.fromkeys(of_steps))


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and abs(value) < 2**53 else value


def usable(kind: type[T], found: object) -> T | None:
    """Return the struct of all values of the right type; None if a field without a default has none."""
    stored = found if isinstance(found, dict) else {}
    values = {}
    for field in msgspec.structs.fields(kind):
        with contextlib.suppress(msgspec.ValidationError):
            if field.encode_name in stored:
                value = stored[field.encode_name]
                values[field.name] = value if isinstance(value, msgspec.Struct) else msgspec.convert(value, field.type)
    with contextlib.suppress(TypeError):
        return kind(**values)
    return None


def as_stored(facts: RunFacts) -> dict:
    """The trace's key "lesson": what run_facts() reads again."""
    # The value of a flag may have its own class, such as a model's name. It is stored as its text.
    found = msgspec.to_builtins(facts, enc_hook=lambda one: str.__str__(one) if isinstance(one, str) else str(one))
    return {name: found.pop(name) for name in STORED_APART} | {"facts": found}
