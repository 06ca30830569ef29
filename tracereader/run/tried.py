"""Shows what was measured: the table, the lines to change, and JSON."""

from collections.abc import Sequence

from tracereader.command import printable
from tracereader.findings.finding import in_one_unit
from tracereader.run.candidates import Candidate, following
from tracereader.run.savings import Difference, Saving
from tracereader.run.search import AS_IT_IS, Session
from tracereader.show.text import console, paragraph, plain, print_columns, strict_json


def show_list(candidates: Sequence[Candidate]) -> None:
    """Print each change that can be tried, and the changes of read-trace that it follows."""
    rows = [[one.key, one.title, ", ".join(one.follows) or "–"] for one in candidates]
    print_columns(console(), ["key", "change", "follows in read-trace"], rows, left=(0, 1, 2))


def saved_text(found: Saving) -> str:
    """Return what a change saves: "62% ± 1", "none" if the step is longer, or "within noise"."""
    plus_minus = f"± {max(1, round(100 * found.plus_minus))}"
    if found.helps:
        return f"{found.share:.0%} {plus_minus}"
    if found.harms:
        return f"none, {-found.share:.0%} longer"
    return f"within noise ({plus_minus})" if found.plus_minus > 0.01 else "none"


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
        return f"  without {missing[0]}"
    added = [key for key in keys if key not in session.together]
    if len(added) == 1 and set(session.together) < set(keys):
        return f"  and {session.by_key[added[0]].title}"
    return " + ".join(titles)


def _count(number: int) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return words[number] if number < len(words) else str(number)


def sets_in_order(session: Session) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the single changes that were measured, the largest saving first, and the sets of several."""
    kinds = [one for one in dict.fromkeys(one.keys for one in session.runs) if one != AS_IT_IS]
    singles = sorted((one for one in kinds if len(one) == 1), key=lambda one: -session.saving(one).share)
    several = [one for one in kinds if len(one) > 1]
    chosen = session.together
    several.sort(key=lambda one: (one != chosen, not set(one) < set(chosen), -session.saving(one).share))
    return singles, several


def show(session: Session) -> None:
    """Print the table of all measured changes, and how to keep those that help together."""
    out = console()
    singles, several = sets_in_order(session)
    usual = session.as_it_is
    steps = [_step(session, keys) for keys in (AS_IT_IS, *singles, *several)]
    unit, shown = in_one_unit(steps)
    has_predictions = any(predicted(session, (one.key,)) is not None for one in session.candidates)
    has_memory = any(one.peak_bytes for one in usual)
    with_losses = bool(usual[0].losses)
    compared = max((session.difference(keys).compared for keys in (*singles, *several)), default=0)
    what = (f"loss over {compared} steps" if compared else "loss") if with_losses else "output"
    heads = ["", f"step, {unit}", "saves", *(["predicted"] * has_predictions), what, *(["memory, GB"] * has_memory)]
    rows = []
    for keys, step in zip((AS_IT_IS, *singles, *several), shown, strict=True):
        if keys == AS_IT_IS:
            rows.append(
                [_name_of_usual(session), step, "", *([""] * has_predictions), "", *[_memory(usual)] * has_memory]
            )
            continue
        guess = predicted(session, keys)
        rows.append(
            [
                _name(session, keys),
                step,
                saved_text(session.saving(keys)),
                *([f"{guess:.0%}" if guess is not None else ""] * has_predictions),
                session.difference(keys).text,
                *[_memory(session.of(keys))] * has_memory,
            ]
        )
    below = {}
    for keys, why in session.failures.items():
        if not session.of(keys):
            below[len(rows)] = why
            rows.append([_name(session, keys), "fails", *[""] * (len(heads) - 2)])
    print_columns(out, heads, rows, below=below)
    for line in _sentences(session, singles, several):
        paragraph(out, plain(line))


def _name_of_usual(session: Session) -> str:
    noise, _ = session.noise
    return f"as it is ({len(session.as_it_is)} runs, ± {noise:.1%})" if len(session.as_it_is) > 2 else "as it is"


def _step(session: Session, keys: tuple[str, ...]) -> float:
    """Return the step (µs) that the table shows: of all runs with these changes, the upper median."""
    steps = sorted(one.step_us for one in session.of(keys))
    return steps[len(steps) // 2]


def _memory(runs: Sequence) -> str:
    peak = max((one.peak_bytes or 0 for one in runs), default=0)
    return f"{peak / 1e9:.2f}" if peak else ""


def _sentences(session: Session, singles: Sequence[tuple[str, ...]], several: Sequence[tuple[str, ...]]) -> list[str]:
    lines = []
    reasons = {}
    for keys in (*singles, *several):
        found = session.difference(keys)
        if found.why:
            reasons.setdefault(found.why, []).append((keys, found))
    for why, rows in reasons.items():
        (keys, found), *_ = rows
        trend = f" (the mean of the last quarter differs by {found.size:.1%})" if found.kind == "not comparable" else ""
        names = ", ".join(_name(session, one).strip() for one, _ in rows[:4])
        lines.append(f"not comparable: {names}: {why}{trend}" if found.kind == "not comparable" else f"{names}: {why}")
    helpful = session.together
    best = session.saving(helpful) if helpful else None
    if best is None or not best.helps:
        noise, _ = session.noise
        lines.append(
            f"Nothing helps: no change saves more than what two equal runs differ by ({noise:.1%}) and 1% of the step."
            if singles
            else "No change was measured."
        )
    else:
        lines.append("To keep " + ("them:" if len(helpful) > 1 else "it:"))
        for key in helpful:
            unknown = "" if session.is_known_to_help(key) else " (its part is within the noise)"
            lines.append(f"  {session.by_key[key].title}{unknown}: {session.by_key[key].keep(session.seen)}")
    off = [keys for keys in singles if session.saving(keys).helps and session.difference(keys).kind == "off"]
    if off:
        names = ", ".join(_name(session, keys) for keys in off)
        lines.append(f"Faster with other results, so that it is not among those that help: {names}.")
    waiting = [session_title(session, one.key) for one in session.skipped if one.why == "no time was left"]
    if waiting:
        lines.append(f"Not tried, because the time was over (--minutes): {', '.join(waiting)}.")
    nothing = [session_title(session, one.key) for one in session.skipped if one.why != "no time was left"]
    if nothing:
        lines.append(f"Nothing in the program to change: {', '.join(nothing)}.")
    return lines


def session_title(session: Session, key: str) -> str:
    from tracereader.run.candidates import all_candidates

    return next((one.title for one in all_candidates() if one.key == key), key)


def as_json(session: Session, program: Sequence[str]) -> str:
    """Return everything that was measured as strict JSON."""
    singles, several = sets_in_order(session)
    noise, _ = session.noise
    return strict_json(
        {
            "program": [printable(one) for one in program],
            "torch": session.seen.torch,
            "device": session.seen.gpu or session.seen.device,
            "noise": noise,
            "as_it_is": {"step_us": _step(session, AS_IT_IS), **_runs(session, AS_IT_IS)},
            "changes": [_row(session, keys) for keys in singles],
            "several": [_row(session, keys) for keys in several],
            "together": list(session.together),
            "keep": {key: session.by_key[key].keep(session.seen) for key in session.together},
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
        "verdict": "helps" if found.helps else "harms" if found.harms else "within noise",
        "results": _difference(difference),
        "predicted": predicted(session, keys),
        **_runs(session, keys),
    }


def _difference(found: Difference) -> dict:
    return {"kind": found.kind, "size": found.size, "compared": found.compared, "why": found.why}


def _runs(session: Session, keys: tuple[str, ...]) -> dict:
    runs = session.of(keys)
    return {
        "runs": [{"step_us": one.step_us, "steps": len(one.steps_us), "seconds": one.seconds} for one in runs],
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
