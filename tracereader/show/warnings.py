"""Words the warnings about a trace."""

from tracereader.figures import Summary
from tracereader.figures.source import TraceWarning
from tracereader.findings.finding import activities, counted, duration


def of(summary: Summary) -> list[str]:
    """Return a sentence for each warning."""
    return [_in_words(one, summary.source.has_steps) for one in summary.source.warnings]


def _in_words(one: TraceWarning, has_steps: bool) -> str:
    match one.name:
        case "zero_times":
            return f"{one.count} events have time stamp and duration zero (pytorch issue 188481); they are left out"
        case "table_of_another_run":
            return f"{one.names[0]} beside it is the profiler table of another run"
        case "category_left_out" | "category_taken_for_work":
            verb = ("is" if one.count == 1 else "are") + " left out"
            if one.name == "category_taken_for_work":
                verb = ("counts" if one.count == 1 else "count") + " as GPU activity"
            return f"{counted(one.count, 'slice')} of the unknown category {one.names[0]} on a device {verb}"
        case "captures_not_used":
            return f"no step launches a CUDA graph, so the captures in {' and '.join(one.names)} are not used"
        case "no_capture_fits":
            launches = counted(one.count, "CUDA graph launch fits", "CUDA graph launches fit")
            return f"{launches} no capture in {' and '.join(one.names)}"
        case "captures_differ":
            launches = counted(one.count, "CUDA graph launch fits", "CUDA graph launches fit")
            return (
                f"{launches} several captures in {' and '.join(one.names)}, which differ in ops, shapes or modules; "
                "none of them is used"
            )
        case "no_order":
            launches = counted(one.count, "CUDA graph launch", "CUDA graph launches")
            ran = f"{launches} {'runs' if one.count == 1 else 'run'} on several streams, and the trace does not number"
            return f"{ran} the graph's nodes, so no capture can be compared with {'it' if one.count == 1 else 'them'}"
        case "no_gpu_records":
            return "the CPU lane has launches, but there is no GPU work: the GPU's records are missing from this trace"
        case "no_launch" | "launched_before":
            several = one.count > 1
            first = activities(one.count) if several else "one GPU activity"
            why = f"{'have' if several else 'has'} no launch call in the trace"
            if one.name == "launched_before":
                why = f"{'were' if several else 'was'} launched before the recording began"
            said = f"{first} ({duration(one.us)}) {why}, so "
            belong = f"{'they belong' if several else 'it belongs'} to no"
            if not has_steps:
                return f"{said}{belong} op"
            left_out = f"the tables of steps and names leave {'them' if several else 'it'} out"
            return f"{said}{belong} step and no op, and {left_out}"
        case "starts_before_launch":
            return (
                f"{activities(one.count)} {'start' if one.count > 1 else 'starts'} before the launch call, by up to "
                f"{duration(one.us)}: launch latencies and idle times by cause are wrong by about that"
            )
    raise ValueError(one.name)
