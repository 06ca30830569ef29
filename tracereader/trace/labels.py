"""What torch itself writes into a trace around its ops: the profiler's marks, its libraries' annotations, rows of
torch.compile. Every other annotation is the user's."""

import re

STEP = "ProfilerStep#"
MODULE = "nn.Module: "  # of a Python frame
# How autograd's engine calls a node of backward: an op, in which that node's ops lie.
AUTOGRAD = "autograd::engine::evaluate_function: "

LOADER, OPTIMIZERS = "enumerate(DataLoader)#", "Optimizer."
OPTIMIZER = "Optimizer.step#"
# torch's own annotations of parts that a user looks for in a step.
PHASES = (
    LOADER, OPTIMIZERS, "DataParallel.forward", "DistributedDataParallel.forward",
    "FullyShardedDataParallel.forward",
)  # fmt: skip
SHARDING = ("FSDP::", "FullyShardedDataParallel.")
# A collective, as its backend's process group labels it. On a CPU it is done in that time; on a GPU, handed over.
COLLECTIVE = re.compile(r"(nccl|gloo|mpi|xccl|ucc|hccl):(\w+)")
ON_CPU = ("gloo", "mpi")
# The ops by which collectives are asked for.
C10D = re.compile(r"(?:_c10d_functional|c10d)::(\w+)")
DESCRIBES_COLLECTIVE = "record_param_comms"

# torch.compile: what looks a graph up, leads to it and calls it. torch 2.15 records the last as an annotation,
# older ones as an op.
LOOKUP, REGION, INDUCTORS_CALL = "TorchDynamo Cache Lookup", "Torch-Compiled Region", "## Call CompiledFxGraph"
PREGRAPH, PROLOGUE = "Pregraph bytecode", "AOTDispatcher Runtime Wrapper Prologue"
COMPILE_ROWS = ("TorchDynamo", REGION, "Pregraph", "AOTDispatcher", INDUCTORS_CALL)
HOLDS_MANY_LAYERS = (REGION, INDUCTORS_CALL, "CompiledFunction")
GRAPH = re.compile(r"CompiledFxGraph (\w+)")  # by the hash of its code
COMPILED_AGAIN = re.compile(rf"{REGION}: (\d+)/[1-9]\d*")
# Around the phases of a compilation; and which one it is: of the frame (compiled autograd's number before it), and how
# often it had been compiled before.
COMPILING = " (dynamo_timed)"
COMPILE_ID = re.compile(r"compile_id=(?:!\d+/)?(\d+/\d+)")


def is_torchs_own(name: str) -> bool:
    """Whether torch, and not the user, wrote the annotation of this name."""
    return (
        name.startswith((STEP, *PHASES, *SHARDING, *COMPILE_ROWS))
        or name.endswith(COMPILING)
        or COLLECTIVE.match(name) is not None
        or COMPILE_ID.search(name) is not None
    )


def is_phase(name: str) -> bool:
    """Whether an annotation of this name marks a part of the step: the user's, and those of PHASES."""
    return name.startswith(PHASES) or not is_torchs_own(name)


def collective_on_cpu(name: str) -> tuple[str, str] | None:
    """Backend and call, gloo and all_reduce, of the slice in which a CPU's backend does a collective."""
    match = COLLECTIVE.match(name)
    return (match[1], match[2]) if match and match[1] in ON_CPU else None


def asks_for_collective(name: str) -> str | None:
    """The call in the name of an op or annotation that starts communication: all_reduce of nccl:all_reduce."""
    match = COLLECTIVE.match(name) or C10D.match(name)
    return match[match.lastindex] if match else None
