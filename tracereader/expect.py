"""What a numbered script can guess: each function makes one guess, which the trace then holds as data.

A guess is a finding; its text is the sentence, ask(summary) the verdict, record what the trace stores.
"""

from tracereader.findings.attention import (
    cast_before_product,
    hidden_copy,
    low_occupancy,
    mask_remade,
    on_cuda_cores,
    time_in_a_library,
    unfused,
)
from tracereader.findings.attention_guesses import (
    gpu_does,
    kernel_is,
    launched_by,
    occupancy_not_estimated,
    safe_softmax,
    scores_in_memory,
    sdpa_runs_on,
    written_for_this_gpu,
)
from tracereader.findings.finding import Finding, read_record
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

_MAKERS = {
    make.__name__: make
    for make in (
        bias_copy_then_gemm, bias_in_the_epilogue, compiled_rows, dispatches, down_proj_has_another_tile,
        duration_varies, dynamo_costs_more_than_the_op, first_step_is_wider, fused_into_one, gemm_is_heavy,
        graph_replay_without_copies, kernels_are, launch_nothing, launch_settings, long_final_sync,
        name_says_transposed, no_compile_rows, occupancy_asked_once, one_buffer_request, ops_are,
        pointwise_round_trip, product_sizes, records_steps, regime_is, self_time_excludes_children, steps_are_alike,
        # training
        backward_is_twice_the_forward, busy_while_waiting, communication_is_hidden, optimizer_for_loop, recomputation,
        starving,
        # attention
        cast_before_product, gpu_does, hidden_copy, kernel_is, launched_by, low_occupancy, mask_remade,
        occupancy_not_estimated, on_cuda_cores, safe_softmax, scores_in_memory, sdpa_runs_on, time_in_a_library,
        unfused, written_for_this_gpu,
    )
}  # fmt: skip


def from_record(record: dict) -> Finding | None:
    """The guess that a trace holds; None where this version knows no such one."""
    return read_record(record, _MAKERS)
