"""What torch itself writes into a trace around its ops: the profiler's marks, its libraries' annotations, rows of
torch.compile. Every other annotation is the user's."""

import re

from tracereader.trace.decoded import decoded

STEP = "ProfilerStep#"
MODULE = "nn.Module: "  # of a Python frame
# autograd's engine records each node of backward as an op of this name, which encloses the node's own ops.
AUTOGRAD = "autograd::engine::evaluate_function: "
# The node that gives a parameter its gradient or adds to it, and its record by the engine, which contains its hooks.
GIVES_GRADIENT = "torch::autograd::AccumulateGrad"
ACCUMULATES = f"{AUTOGRAD}{GIVES_GRADIENT}"
# Ops of backward that give a parameter a sparse gradient.
SPARSE_GRADIENT = ("aten::embedding_sparse_backward", "aten::_embedding_bag_sparse_backward")
# flex_attention's op and, with more letters, its backward's. Inductor's code calls neither, inference_mode not the op.
FLEX_ATTENTION = "FlexAttentionAutogradOp"

LOADER, OPTIMIZERS = "enumerate(DataLoader)#", "Optimizer."
OPTIMIZER, ZEROES = "Optimizer.step#", "Optimizer.zero_grad#"
DDPS_FORWARD = "DistributedDataParallel.forward"
OLDER_FSDP = "FullyShardedDataParallel."  # fully_shard() replaces it
# torch's own annotations that mark parts of a step that users look for.
PHASES = (LOADER, OPTIMIZERS, "DataParallel.forward", DDPS_FORWARD, f"{OLDER_FSDP}forward")
SHARDING = ("FSDP::", OLDER_FSDP)
# FSDP's annotations of gathering a block's parameters, and of what gathers them again for the backward pass.
GATHERS = ("FSDP::all_gather ", "FSDP::all_gather_copy_out ")
GATHERS_AGAIN = ("FSDP::pre_backward ", "FSDP::backward_prefetch ")
# The beginning of the whole model's forward pass with FSDP, and the reduction of a block's gradients.
FSDPS_FORWARD, REDUCES_A_BLOCK = "FSDP::root_pre_forward", "FSDP::post_backward_reduce "
# DDP's copies of gradients out of its buckets and into them, the latter once per parameter; and a bucket's reduction.
REDUCERS_CALLS, ALL_REDUCE = "torch::distributed::reducer::", "c10d::allreduce_"
DDPS_COPIES = ("torch.distributed.ddp.reducer::", REDUCERS_CALLS)
# Ops and annotations of the wrappers of data parallelism around the model's own ops: they copy, scale and shard.
WRAPPERS = (*DDPS_COPIES, "FSDP::", "fsdp::")
# The annotation of a process group's collective. On a CPU the collective runs in that time; on a GPU it is launched.
COLLECTIVE = re.compile(r"(nccl|gloo|mpi|xccl|ucc|hccl):(\w+)")
ON_CPU = ("gloo", "mpi")
# The ops that start collectives.
C10D = re.compile(r"(?:_c10d_functional|c10d)::(\w+)")
DESCRIBES_COLLECTIVE = "record_param_comms"

# torch.compile's rows: the lookup of a graph, the code around it, and its call. torch 2.15 records the call as an
# annotation, older versions as an op.
LOOKUP, REGION, INDUCTORS_CALL = "TorchDynamo Cache Lookup", "Torch-Compiled Region", "## Call CompiledFxGraph"
PREGRAPH, PROLOGUE = "Pregraph bytecode", "AOTDispatcher Runtime Wrapper Prologue"
COMPILE_ROWS = ("TorchDynamo", REGION, "Pregraph", "AOTDispatcher", INDUCTORS_CALL)
HOLDS_MANY_LAYERS = (REGION, INDUCTORS_CALL, "CompiledFunction")
GRAPH = re.compile(r"CompiledFxGraph (\w+)")  # the hash of its code
COMPILED_AGAIN = re.compile(rf"{REGION}: (\d+)/[1-9]\d*")
# A compilation's phases. The id names the frame (after compiled autograd's number, if any) and the compilation.
COMPILING = " (dynamo_timed)"
COMPILE_ID = re.compile(r"compile_id=(?:!\d+/)?(\d+/\d+)")


def is_torchs_own(name: str) -> bool:
    """Return whether torch, and not the user, wrote the annotation of this name."""
    return (
        name.startswith((STEP, *PHASES, *SHARDING, *COMPILE_ROWS))
        or name.endswith(COMPILING)
        or COLLECTIVE.match(name) is not None
        or COMPILE_ID.search(name) is not None
    )


def is_phase(name: str) -> bool:
    """Return whether an annotation of this name marks a part of the step: all of the user's, and those of PHASES."""
    return name.startswith(PHASES) or not is_torchs_own(name)


def annotation_of(args: dict) -> str | None:
    """The annotation that a CUDA graph's capture gave to a node, by its arguments; None without one.

    torch.cuda.graph_annotations writes its fields among them, a list of them as JSON. Its mark of backward is added.
    """
    if not args.get("graph node id"):
        return None
    named = args.get("name") or args.get("annotation")
    if isinstance(named, str) and named.startswith("["):
        listed = decoded(named)
        fields = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        args = {key: value for one in reversed(fields) for key, value in one.items()}
        named = args.get("name")
    if not isinstance(named, str) or not named:
        return None
    return named + " backward" * (args.get("autograd_phase") == "backward")


def collective_on_cpu(name: str) -> tuple[str, str] | None:
    """Return backend and call, such as gloo and all_reduce, of a slice in which a CPU backend runs a collective."""
    match = COLLECTIVE.match(name)
    return (match[1], match[2]) if match and match[1] in ON_CPU else None


def asks_for_collective(name: str) -> str | None:
    """Return the call in the name of an op or annotation that starts communication: nccl:all_reduce -> all_reduce."""
    match = COLLECTIVE.match(name) or C10D.match(name)
    return match[match.lastindex] if match else None
