"""What is wrong with a trace, and the facts of the report as one JSON document."""

from common import cheatsheet, kernel_names, reading
from common.trace import Trace


def facts(trace: Trace) -> dict:
    """What the report says, for programs: times in µs, shares from 0 to 1."""
    found = reading.regime(trace)
    return {
        "trace": str(trace.path),
        "devices": list(trace.devices),
        "shapes_recorded": trace.has_shapes,
        "warnings": warnings(trace),
        "steps": [
            {
                "name": one.step.name, "cpu_us": one.step.us, "label_to_first_op_us": one.gap_us,
                "launches": one.launches, "gpu_busy_us": one.busy_us, "gpu_span_us": one.span_us,
                "gpu_idle_share": one.idle, "launch_to_start_us": one.offset_us,
                "times_the_median": one.ratio, "cause": one.cause,
            }
            for one in reading.step_facts(trace)
        ],
        "typical_step": reading.typical(trace).name,
        "gpu_work": [
            {
                "name": row.work.name, "kind": row.work.kind, "asked_by": row.asked_by, "us": row.us,
                "low_us": row.low_us, "high_us": row.high_us, "launched_by": row.launched_by,
                "occupancy_queries": row.queries, "family": row.says.family, "maker": row.says.maker,
                "name_says": row.says.parts, "tflops": row.tflops, "bytes_moved": row.moved, "gb_s": row.gb_s,
            }
            for row in reading.work_rows(trace)
        ],
        "regime": {"name": found.name, "gpu_busy_share": found.share, "window_us": found.window_us},
        "patterns": [{"where": one.where, "see": one.see, "means": one.means, "figure": figure}
                     for one, figure in cheatsheet.found(trace)],
    }  # fmt: skip


def warnings(trace: Trace) -> list[str]:
    """What is wrong with the trace itself."""
    found = []
    if trace.zeroed:
        found.append(f"{trace.zeroed} events have time stamp and duration zero (pytorch issue 188481): left out")
    if trace.crossing:
        names = ", ".join(kernel_names.short(name) for name, _ in trace.crossing.most_common(3))
        found.append(
            f"{trace.crossing.total()} slices cross another of their track instead of nesting, and Perfetto drops "
            f"such slices: {names}"
        )
    if trace.unlaunched:
        found.append(f"{trace.unlaunched} pieces of GPU work have no launch in the trace: in no step, tied to no op")
    return found
