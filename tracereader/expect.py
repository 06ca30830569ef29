"""What a numbered script can predict. Called with its parameters, each of these findings makes one prediction.

A prediction's text is its sentence, ask(summary) the verdict of a trace, and record what the trace stores.
"""
# ruff: noqa: F401  scripts import these from here

from tracereader.findings.attention import (
    cast_before_product,
    hidden_copy,
    low_occupancy,
    mask_remade,
    on_cuda_cores,
    time_in_a_library,
    unfused,
)
from tracereader.findings.attention_predictions import (
    gpu_does,
    kernel_is,
    launched_by,
    occupancy_not_estimated,
    safe_softmax,
    scores_in_memory,
    sdpa_runs_on,
    written_for_this_gpu,
)
from tracereader.findings.cheatsheet import PREDICTABLE
from tracereader.findings.finding import Prediction, read_record
from tracereader.findings.gpu_work import (
    bias_copy_then_gemm,
    bias_in_the_epilogue,
    down_proj_has_another_tile,
    duration_varies,
    fused_into_one,
    gemm_is_heavy,
    graph_replay_without_copies,
    kernels_are,
    launch_settings,
    name_says_transposed,
    occupancy_asked_once,
    pointwise_round_trip,
    product_sizes,
)
from tracereader.findings.ops import (
    compiled_rows,
    dispatches,
    dynamo_costs_more_than_the_op,
    launch_nothing,
    no_compile_rows,
    ops_are,
    self_time_excludes_children,
)
from tracereader.findings.steps import (
    first_step_is_wider,
    long_final_sync,
    one_buffer_request,
    records_steps,
    regime_is,
    steps_are_alike,
)
from tracereader.findings.training import (
    backward_is_twice_the_forward,
    busy_while_waiting,
    communication_is_hidden,
    optimizer_for_loop,
    recomputation,
    starving,
)


def from_record(record: dict) -> Prediction | None:
    """The prediction that a trace holds; None where this version does not know it."""
    return read_record(record, PREDICTABLE)
