"""Words the warnings about a trace."""

from collections.abc import Sequence
from pathlib import Path

from tracereader.command import is_url, printable
from tracereader.figures import Summary
from tracereader.figures.source import Source, TraceWarning
from tracereader.findings.finding import activities, counted, duration
from tracereader.show.text import shown_path
from tracereader.trace.lenient import Defects
from tracereader.trace.processes import some_of

MARK = "[yellow]warning[/yellow] "


def of(summary: Summary) -> list[str]:
    """Return a sentence for each warning."""
    source, said_already = summary.source, ["no_gpu_records"] * summary.recording.incomplete
    return [_in_words(one, source) for one in source.warnings if one.name not in said_already]


def of_folder(left_out: Sequence[Path]) -> list[str]:
    """Return a sentence on the files of a folder that are left out as front ends; none without any."""
    if not left_out:
        return []
    count, names = len(left_out), some_of([str(path) if is_url(path) else shown_path(path) for path in left_out])
    return [
        f"{names} {_verb(count, 'was', 'were')} recorded at the same time and {_verb(count, 'has', 'have')} no launch "
        f"and no GPU work, as the front end of a server: {_verb(count, 'it is', 'they are')} left out"
    ]


def _in_words(one: TraceWarning, source: Source) -> str:
    match one.name:
        case "one_of_several_processes":
            mine, *others = (printable(name) for name in one.names)
            ran = f", with {counted(source.processes[0].gpu_activities, 'GPU activity', 'GPU activities')}"
            what, ran = (" with GPU work", ran) if source.processes[0].gpu_activities else ("", "")
            holds = f"the file holds {one.count + 1:,} processes{what}; this report is about {mine}{ran}"
            return f"{holds}; --process reads another one: {some_of(others)}"
        case "others_without_gpu_work":
            mine, *others = (printable(name) for name in one.names)
            have = _verb(one.count, "has", "have")
            return f"{some_of(others)} in the same file {have} no GPU work: this report is about {mine} alone"
        case "of_no_process":
            belong = _verb(one.count, "belongs", "belong")
            to_none = f"{belong} to none of the file's processes for sure, and {_verb(one.count)} left out"
            return f"{activities(one.count)} {to_none}"
        case "zero_times":
            return f"{one.count} events have time stamp and duration zero (pytorch issue 188481); they are left out"
        case "defects":
            return _defects(one.defects)
        case "category_left_out" | "category_taken_for_work":
            does = f"{_verb(one.count)} left out"
            if one.name == "category_taken_for_work":
                does = f"{_verb(one.count, 'counts', 'count')} as GPU activity"
            return f"{counted(one.count, 'slice')} of the unknown category {one.names[0]} on a device {does}"
        case "captures_not_used":
            return f"no step launches a CUDA graph, so the captures in {' and '.join(one.names)} are not used"
        case "no_capture_fits" | "captures_differ":
            launches = counted(one.count, "CUDA graph launch fits", "CUDA graph launches fit")
            if one.name == "no_capture_fits":
                return f"{launches} no capture in {' and '.join(one.names)}"
            differ = "which differ in ops, shapes or modules; none of them is used"
            return f"{launches} several captures in {' and '.join(one.names)}, {differ}"
        case "no_order":
            launches = counted(one.count, "CUDA graph launch", "CUDA graph launches")
            ran = f"{launches} {_verb(one.count, 'runs', 'run')} on several streams, and the trace does not number"
            return f"{ran} the graph's nodes, so no capture can be compared with {_verb(one.count, 'it', 'them')}"
        case "no_gpu_records":
            return "the CPU lane has launches, but there is no GPU work: the GPU's records are missing from this trace"
        case "no_launch" | "launched_before":
            first = activities(one.count) if one.count > 1 else "one GPU activity"
            why = f"{_verb(one.count, 'has', 'have')} no launch call in the trace"
            if one.name == "launched_before":
                why = f"{_verb(one.count, 'was', 'were')} launched before the recording began"
            said = f"{first} ({duration(one.us)}) {why}, so {_verb(one.count, 'it belongs', 'they belong')} to no"
            if not source.has_steps and one.name == "no_launch":
                return f"{said} op"
            them = _verb(one.count, "it", "them")
            return f"{said} step and no op, and the tables of steps and names leave {them} out"
        case "starts_before_launch":
            starts = f"{activities(one.count)} {_verb(one.count, 'starts', 'start')} before the launch call"
            wrong = "launch latencies and idle times by cause are wrong by about that"
            return f"{starts}, by up to {duration(one.us)}: {wrong}"
    raise ValueError(one.name)


def _defects(found: Defects) -> str:
    """Return a sentence on what is left out of a file, or replaced in it."""
    said = (
        (found.events, "{:,} event without a usable time stamp and duration is left out",
         "{:,} events without a usable time stamp and duration are left out"),
        (found.paths, "{:,} text has unescaped backslashes", "{:,} texts have unescaped backslashes"),
        (found.controls, "{:,} text has raw control characters", "{:,} texts have raw control characters"),
        (found.no_text, "{:,} place is not valid text (U+FFFD stands for it)",
         "{:,} places are not valid text (U+FFFD stands for them)"),
        (found.gpu, "{:,} GPU activity is left out, because only prof.export_chrome_trace writes its stream and launch",
         "{:,} GPU activities are left out, because only prof.export_chrome_trace writes their streams and launches"),
    )  # fmt: skip
    parts = [(one if count == 1 else several).format(count) for count, one, several in said if count]
    return f"in the file, {'; '.join(parts)}"


def _verb(count: int, one: str = "is", several: str = "are") -> str:
    """Return the form of a word that goes with so many."""
    return one if count == 1 else several
