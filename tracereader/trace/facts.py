"""What a run stored about itself in its trace: common/ fills a RunFacts, and the reader decodes and validates it here.

In the file it is the key "lesson": {"script", "flags", "device", "torch", "run", "guesses", "facts": {…}}. A program
that is no numbered script may store "unprofiled_step_us" at the top of the trace.
"""

import contextlib
from typing import Annotated, Literal, TypeVar

import msgspec

T = TypeVar("T")
# Larger numbers are no count and no rate of anything, and a double does not hold them exactly.
Count = Annotated[int, msgspec.Meta(gt=0, lt=2**53)]
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Amount = Annotated[float, msgspec.Meta(gt=0, lt=2**53)]
Size = Annotated[int, msgspec.Meta(gt=0, lt=2**40)]
STORED_APART = ("script", "flags", "device", "torch", "run", "guesses")  # beside "facts"


class Roofs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TFLOP/s and GB/s, the best that a run measured on its machine; the first for elements of its --dtype alone."""

    tflops: Amount
    gb_s: Amount


class AttentionFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one attention that a step computes. refused: torch's reasons against other backends of SDPA, by backend."""

    batch: Size | None = None
    heads: Size | None = None
    seq: Size | None = None
    head_dim: Size | None = None
    causal: bool | None = None
    backend: str | None = None
    refused: dict[str, list[str]] = {}

    @property
    def sizes(self) -> tuple[int, int, int, int] | None:
        """batch, heads, seq, head_dim; None where one of them is not known."""
        found = (self.batch, self.heads, self.seq, self.head_dim)
        return None if None in found else found


class ModelFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The language model whose step was profiled; None where it is not known.

    tokens: of one step, over all sequences. *_bytes: of one step: weights and the filled part of the cache,
    each read once. gb_s: the device's bandwidth as that run measured it.
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
    """The model that was trained. tokens: of one rank's step. losses: one a step, None where it is no number."""

    parameters: Count | None = None
    tokens: Count | None = None
    losses: tuple[float | None, ...] = ()


class RunFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run stored about itself; all defaults where it stored nothing.

    script: the numbered script; "" of any other program. guesses: as expect.py records them. run: the run's id, which
    stands in its table, too. first_call_s: of the step, cold. unprofiled_step_us: the step's time without the
    profiler. layers: the names of the step's matrix products, in the order in which forward calls them.
    """

    script: str = ""
    flags: dict[str, object] = {}
    device: str = ""
    torch: str = ""
    run: str = ""
    guesses: tuple[dict, ...] = ()
    first_call_s: Amount | None = None
    unprofiled_step_us: Amount | None = None
    peak_bytes: Count | None = None
    relative_error: float | None = None
    roofs: Roofs | None = None
    layers: tuple[str, ...] = ()
    attention: AttentionFacts | None = None
    decoding: ModelFacts | None = None
    training: TrainingFacts | None = None

    @property
    def dtype(self) -> str:
        """The run's --dtype; "None" where it had none."""
        return str(self.flags.get("dtype"))


def run_facts(lesson: object, unprofiled_step_us: object = None) -> RunFacts:
    """The facts that a trace holds. Old and foreign traces are read, too: what is not usable counts as not stored.

    lesson, unprofiled_step_us: what the trace has under these keys.
    """
    top = {"unprofiled_step_us": unprofiled_step_us}
    if not isinstance(lesson, dict) or not isinstance(lesson.get("script"), str):
        return _usable(RunFacts, top)
    facts = lesson.get("facts") if isinstance(lesson.get("facts"), dict) else {}
    guesses = lesson.get("guesses")
    guesses = [one for one in guesses if isinstance(one, dict)] if isinstance(guesses, list) else []
    beside = {name: lesson.get(name) for name in STORED_APART} | {"run": str(lesson.get("run", "")), "guesses": guesses}
    if (named := facts.get("attention")) is not None:
        facts = facts | {"attention": _usable(AttentionFacts, named)}
    if isinstance(named := facts.get("decoding"), dict):
        known = {name: _whole(one) if name != "gb_s" else one for name, one in named.items() if one}
        facts = facts | {"decoding": _usable(ModelFacts, known)}
    return _usable(RunFacts, top | {name: one for name, one in facts.items() if one is not None} | beside)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and abs(value) < 2**53 else value


def _usable(kind: type[T], found: object) -> T | None:
    """The struct of what has the right type; None where a field without a default has not."""
    told = found if isinstance(found, dict) else {}
    values = {}
    for field in msgspec.structs.fields(kind):
        with contextlib.suppress(msgspec.ValidationError):
            if field.name in told:
                value = told[field.name]
                values[field.name] = value if isinstance(value, msgspec.Struct) else msgspec.convert(value, field.type)
    with contextlib.suppress(TypeError):
        return kind(**values)
    return None


def as_stored(facts: RunFacts) -> dict:
    """The trace's key "lesson": what run_facts() reads again."""
    # A flag's value may be of a class of its own, as a model's name is, which is stored as the text that it is.
    found = msgspec.to_builtins(facts, enc_hook=lambda one: str.__str__(one) if isinstance(one, str) else str(one))
    return {name: found.pop(name) for name in STORED_APART} | {"facts": found}
