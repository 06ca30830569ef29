"""Shows what was measured: the table, the lines to change, and JSON."""

import math
import statistics
from collections.abc import Sequence

import msgspec

from tracereader.command import BadInput, RunFailed, printable
from tracereader.findings.finding import in_one_unit
from tracereader.run.candidates import Candidate, all_candidates, following
from tracereader.run.savings import Difference, Saving
from tracereader.run.search import AS_IT_IS, NO_TIME, NOTHING_TO_CHANGE, Session
from tracereader.show.text import Name, capitalized, console, paragraph, plain, print_columns, strict_json

CROWDED = 0.05  # the share of the time that other programs cost, from which on it is said
NOISY = 0.05  # a machine on which equal runs differ by more is said to be noisy


def show_list(candidates: Sequence[Candidate]) -> None:
    """Print the key of each change that can be tried, its title, and the proposals of read-trace that lead to it."""
    out, width = console(), max(len(one.key) for one in candidates) + 2
    out.print(f"{'key':{width}}change (the proposals of read-trace that lead to it)")
    for one in candidates:
        proposals = f" ({', '.join(one.follows)})" if one.follows else ""
        paragraph(out, plain(f"{one.title}{proposals}"), f"{one.key:{width}}", " " * width)


def saved_text(found: Saving) -> str:
    """Return what a change saves: "62% ± 1", "3% longer", or the verdict where neither is known."""
    if found.helps:
        return f"{found.share:.0%} ± {max(1, round(100 * found.plus_minus))}"
    if found.harms:
        return f"{-found.share:.0%} longer" if found.share > -1 else f"{1 - found.share:.0f} times as long"
    return found.verdict


def predicted(session: Session, keys: tuple[str, ...]) -> float | None:
    """Return the largest saving that read-trace predicts for what a single change does; None without one."""
    if len(keys) != 1:
        return None
    follows = session.by_key[keys[0]].follows
    return max((session.predicted[one] for one in follows if one in session.predicted), default=None)


def _name(session: Session, keys: tuple[str, ...]) -> str:
    titles = [session.by_key[key].title for key in keys]
    if len(keys) == 1:
        return titles[0]
    if keys == session.together:
        known = all(map(session.is_known_to_help, keys))
        return f"the {_count(len(keys))} that help, together" if known else f"{_count(len(keys))} together"
    missing = [session.by_key[key].title for key in session.together if key not in keys]
    if len(missing) == 1 and set(keys) < set(session.together):
        title = missing[0]
        return f"  with {title.removeprefix('no ')}" if title.startswith("no ") else f"  without {title}"
    added = [key for key in keys if key not in session.together]
    if len(added) == 1 and set(session.together) < set(keys):
        return f"  and {session.by_key[added[0]].title}"
    return f"{_count(len(keys))} together"


def _titles(session: Session, keys: tuple[str, ...]) -> str:
    return " + ".join(session.by_key[key].title for key in keys)


def _count(number: int) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return words[number] if number < len(words) else str(number)


def _is_larger(first: Saving, second: Saving) -> bool:
    """Return whether the first saving is larger by more than the noise. 95% is enough, of intervals of 99%."""
    return first.share - second.share > 0.75 * math.hypot(first.plus_minus, second.plus_minus)


def sets_in_order(session: Session) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the single changes that were measured, and the sets of several.

    The largest saving comes first, then what is within the noise, then what takes longer. Changes whose savings differ
    by less than the noise keep the order in which they were proposed, so that a second search gives the same order.
    """
    kinds = [one for one in dict.fromkeys(one.keys for one in session.runs) if one != AS_IT_IS]
    proposed = [(one.key,) for one in session.candidates]
    saved = {one: session.saving(one) for one in kinds}
    left = [one for one in kinds if len(one) == 1]
    singles = []
    for group in (
        [one for one in left if saved[one].helps],
        [one for one in left if not saved[one].helps and not saved[one].harms],
        [one for one in left if saved[one].harms],
    ):
        while group:
            largest = [one for one in group if not any(_is_larger(saved[other], saved[one]) for other in group)]
            singles.append(min(largest, key=proposed.index))
            group.remove(singles[-1])
    several = [one for one in kinds if len(one) > 1]
    chosen = session.together
    several.sort(key=lambda one: (one != chosen, not set(one) < set(chosen), -session.saving(one).share))
    return singles, several


class Shown(msgspec.Struct, frozen=True):
    """What was measured, as text: the terminal and the page show the same.

    left: the columns that are aligned to the left. below: a sentence below a row, by its number. keep_title: what comes
    before the lines of `keep`, which are two for each change: its name, and how to keep it; empty if nothing helps.
    """

    heads: list[str]
    left: list[int]
    rows: list[list[str]]
    below: dict[int, str]
    keep_title: str
    keep: list[tuple[str, str]]
    said: list[str]


def shown(session: Session) -> Shown:
    """Return the table of all measured changes, how to keep those that help together, and what else is to say."""
    singles, several = sets_in_order(session)
    steps = [_step(session, keys) for keys in (AS_IT_IS, *singles, *several)]
    unit, figures = in_one_unit(steps)
    has_predictions = any(predicted(session, (one.key,)) is not None for one in session.candidates)
    has_memory = any(one.peak_bytes for one in session.as_it_is)
    what = "loss" if session.as_it_is[0].losses else "output"
    heads = ["", f"step, {unit}", "saves", *(["predicted"] * has_predictions), what, *(["GB"] * has_memory)]
    rows, below = [], {}
    for keys, step in zip((AS_IT_IS, *singles, *several), figures, strict=True):
        measured = keys != AS_IT_IS
        if len(keys) > 1 and _name(session, keys).endswith("together"):
            below[len(rows)] = _titles(session, keys)
        guess = predicted(session, keys) if measured else None
        rows.append(
            [
                _name(session, keys) if measured else "as it is",
                step,
                saved_text(session.saving(keys)) if measured else "",
                *([f"{guess:.0%}" if guess is not None else ""] * has_predictions),
                session.difference(keys).text if measured else "",
                *[_memory(session.of(keys))] * has_memory,
            ]
        )
    for keys, why in session.failures.items():
        if not session.of(keys):
            below[len(rows)] = f"{_titles(session, keys)}: {why}" if len(keys) > 1 else why
            rows.append([_name(session, keys), "fails", *[""] * (len(heads) - 2)])
    best = session.saving(session.together) if session.together else None
    keep = [_how_to_keep(session, key) for key in kept_in_order(session)] if best is not None and best.helps else []
    title = f"To keep {'them' if len(keep) > 1 else 'it'}:" if keep else ""
    said = _sentences(session, singles, several, nothing=not keep)
    return Shown(heads, [0, 2, heads.index(what)], rows, below, title, keep, said)


def show(session: Session) -> None:
    """Print what was measured. Names are shortened before the table becomes wider than the terminal."""
    out, found = console(), shown(session)
    rows = [[Name(name), *cells] for name, *cells in found.rows]
    print_columns(out, found.heads, rows, left=found.left, below=found.below)
    if found.keep:
        out.print()
        out.print(found.keep_title)
    for name, how in found.keep:
        out.print(plain(f"  {name}"))
        paragraph(out, plain(how), " " * 4, " " * 4)
    out.print()
    for line in found.said:
        paragraph(out, plain(line))


def page(session: Session) -> tuple[str, list[str]]:
    """Return the page of the recording with what was measured: see show.page. Raises RunFailed without a recording."""
    from tracereader.show import page as pages
    from tracereader.show.view import View

    if session.recording is None:
        raise RunFailed("--html: the program could not be recorded, so that there is no page")
    try:
        return pages.of_file(session.recording, View(), msgspec.to_builtins(shown(session), str_keys=True))
    except BadInput as problem:
        raise RunFailed(f"--html: {problem}") from None


def kept_in_order(session: Session) -> list[str]:
    """Return the changes to keep, the largest saving alone first, and last those that were not measured alone."""
    alone = {key: session.saving((key,)) for key in session.together}
    return sorted(alone, key=lambda key: -alone[key].share if alone[key] is not None else math.inf)


def _how_to_keep(session: Session, key: str) -> tuple[str, str]:
    change = session.by_key[key]
    unknown = "" if session.is_known_to_help(key) else " (its part is within the noise)"
    return f"{change.title}{unknown}", change.to_keep(session.seen)


def _step(session: Session, keys: tuple[str, ...]) -> float:
    """Return the step (µs) that the table shows: the median of all runs with these changes."""
    return statistics.median(one.step_us for one in session.of(keys))


def _memory(runs: Sequence) -> str:
    peak = max((one.peak_bytes or 0 for one in runs), default=0)
    return f"{peak / 1e9:.2f}" if peak else ""


def _sentences(
    session: Session, singles: Sequence[tuple[str, ...]], several: Sequence[tuple[str, ...]], nothing: bool
) -> list[str]:
    noise = session.noise.share
    measured = (*singles, *several)
    lines = []
    if nothing and measured:
        all_ran = not session.failures and all(one.why != NO_TIME for one in session.skipped)
        who = "Nothing helps: no change" if all_ran and noise <= NOISY else "None of the changes that ran"
        lines.append(f"{who} saves more than the noise and 1% of the step.")
    elif nothing:
        lines.append("No change was measured.")
    unclear = [saved for keys in measured if (saved := session.saving(keys)) is not None and saved.is_noise]
    runs = f"{len(session.as_it_is)} run{'s' if len(session.as_it_is) > 1 else ''} as it is"
    if unclear:
        hidden = [one.least_shown for one in unclear if one.verdict == "within noise"]
        noted = f"Noise: equal runs differ by ± {noise:.1%} ({runs})."
        if hidden:
            least = max(1, round(100 * statistics.median(hidden)))
            more = " A machine with nothing else to do, or more --minutes, shows smaller ones." if noise > NOISY else ""
            noted += f" A row within the noise ran few times, and may hide a saving of up to {least}%.{more}"
        if len(hidden) < len(unclear):
            noted += " A row with too few runs differs by more than the noise, and more --minutes decide it."
        lines.append(noted)
    if any((saved := session.saving(keys)) is not None and saved.is_apart and not saved.is_beyond for keys in measured):
        lines.append(
            "A saving that is hardly larger than its ± helps if each run with it was faster than each one as it is."
        )
    others = statistics.median(one.others for one in session.runs)
    if others > CROWDED:
        lines.append(f"Other programs had the CPUs for {others:.0%} of the time, which is left out of the steps.")
    reasons = {}
    for keys in measured:
        found = session.difference(keys)
        if found.why:
            reasons.setdefault((found.kind, found.why), []).append((keys, found))
    for (kind, why), rows in reasons.items():
        trend = (
            f" (the mean of the last quarter differs by {100 * rows[0][1].size:.2g}%)"
            if kind == "not comparable"
            else ""
        )
        alone = [one for one, _ in rows if len(one) == 1] or [one for one, _ in rows]
        names = ", ".join(_name(session, one).strip() for one in alone)
        lines.append(f"{capitalized(kind)}: {names}: {why}{trend}." if kind == "not comparable" else f"{names}: {why}.")
    compared = max((session.difference(keys).compared for keys in measured), default=0)
    if compared and session.as_it_is[0].losses:
        lines.append(f"The losses of the first {compared} steps are compared; equal seeds are set in each run.")
    off = [keys for keys in singles if session.saving(keys).helps and session.difference(keys).kind == "off"]
    if off:
        names = ", ".join(_name(session, keys) for keys in off)
        lines.append(f"Faster with other results, so that it is not among those that help: {names}.")
    within = {key for keys in several for key in keys}
    late = [one.key for one in session.skipped if one.why == NO_TIME]
    for start, keys in (
        ("Measured beside others only, because the time was over (--minutes)", [key for key in late if key in within]),
        ("Not tried, because the time was over (--minutes)", [key for key in late if key not in within]),
        ("Nothing in the program to change", [one.key for one in session.skipped if one.why == NOTHING_TO_CHANGE]),
    ):
        if keys:
            lines.append(f"{start}: {', '.join(map(title_of, keys))}.")
    return lines


def title_of(key: str) -> str:
    """Return the title of a change, also of one that was not tried."""
    return next((one.title for one in all_candidates() if one.key == key), key)


def as_json(session: Session, program: Sequence[str]) -> str:
    """Return everything that was measured as strict JSON."""
    singles, several = sets_in_order(session)
    return strict_json(
        {
            "program": [printable(one) for one in program],
            "torch": session.seen.torch,
            "device": session.seen.gpu or session.seen.device,
            "noise": session.noise.share,
            "as_it_is": {"step_us": _step(session, AS_IT_IS), **_runs(session, AS_IT_IS)},
            "changes": [_row(session, keys) for keys in singles],
            "several": [_row(session, keys) for keys in several],
            "together": list(session.together),
            "keep": {key: session.by_key[key].to_keep(session.seen) for key in kept_in_order(session)},
            "failed": [{"changes": list(keys), "why": why} for keys, why in session.failures.items()],
            "not_tried": [{"change": one.key, "why": one.why} for one in session.skipped],
            "predicted": session.predicted,
            "scoreboard": _scoreboard(session, [AS_IT_IS, *singles]),
        }
    )


def _row(session: Session, keys: tuple[str, ...]) -> dict:
    found, difference = session.saving(keys), session.difference(keys)
    return {
        "changes": list(keys),
        "title": _name(session, keys).strip(),
        "step_us": _step(session, keys),
        "saves": found.share,
        "plus_minus": found.plus_minus,
        "verdict": found.verdict,
        "each_run_faster": found.is_apart,
        "results": _difference(difference),
        "predicted": predicted(session, keys),
        **_runs(session, keys),
    }


def _difference(found: Difference) -> dict:
    return {"kind": found.kind, "size": found.size, "compared": found.compared, "why": found.why}


def _runs(session: Session, keys: tuple[str, ...]) -> dict:
    runs = session.of(keys)
    return {
        "runs": [
            {"step_us": one.step_us, "steps": len(one.steps_us), "seconds": one.seconds, "others": one.others}
            for one in runs
        ],
        "peak_bytes": max((one.peak_bytes for one in runs if one.peak_bytes), default=None),
    }


def _scoreboard(session: Session, sets: Sequence[tuple[str, ...]]) -> dict:
    """Return the single changes in the format of benchmarks/pairs/results.json: one variant each."""
    ids = {key: change for change, keys in following().items() for key in keys if change in session.predicted}
    found = {}
    for keys in sets:
        name = keys[0] if keys else "base"
        found[name] = {
            "proposal": ids.get(name, ""),
            "served": 1,
            "runs": [
                {
                    "first": one.losses[0] if one.losses else None,
                    "last": one.losses[-1] if one.losses else None,
                    "setup_s": round(one.seconds - sum(one.steps_us) / 1e6, 1),
                    "median_us": one.step_us,
                    "lowest_us": min(one.steps_us),
                    "highest_us": max(one.steps_us),
                    "steps": len(one.steps_us),
                    "device": session.seen.gpu or session.seen.device,
                    "torch": session.seen.torch,
                }
                for one in session.of(keys)
            ],
            "failures": [],
        }
    return found
