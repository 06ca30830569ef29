"""Decides which run comes next: each change by itself, those that help together, and each of them left out once."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tracereader.findings.finding import in_one_unit
from tracereader.run.candidates import Candidate, Seen, all_candidates, cpus, in_order
from tracereader.run.inside.changes import NUDGED
from tracereader.run.program import RECORDING
from tracereader.run.runs import Run, run_once
from tracereader.run.savings import (
    BUSY_NOISE,
    USUAL_NOISE,
    WORTH,
    Difference,
    Noise,
    Saving,
    beside,
    losses_differ,
    noise_of,
    outputs_differ,
    saving,
    spread_of,
)

AS_IT_IS: tuple[str, ...] = ()
SINGLES = 0.55  # of the time, before those that help are tried together
LEAST_LIMIT_S, COMPILE_LIMIT_S = 30.0, 240.0
COMPILE_S = {True: 30.0, False: 60.0}  # what compiling for a GPU, or for the CPU, adds to a run, before one was seen
COMPILE_SHARE = 0.15  # of the time, from which on a change that compiles waits for those that do not
NO_TIME, NOTHING_TO_CHANGE = "no time was left", "nothing in the program to change"
SAVING_S = 2.0  # for ending the last run and printing
MOST_ROUNDS = 5  # of one change by itself
MOST_BETWEEN = 4  # changes between two runs of the program as it is
QUIET = 0.02  # equal runs that differ by less need fewer runs of the program as it is
BET = 4  # changes at most that run together before each is known, where the time is short
MUCH, BET_ROUNDS = 0.2, 3  # what they must seem to save to be measured again at once, and how often
CLEARLY_SLOWER = 1.5  # times the step as it is, and the noise: such a run ends early
BUSY = 0.5  # the load by the number of CPUs, before the first run, from which on figures vary more
DOUBT = 3  # a saving of this part of its interval may be there
MAY_HELP = 0.03  # a change that may save this much is measured again

# The first run records the program, in less time than record-trace takes.
RECORD = {**RECORDING, "active": 3, "record_s": 5}


class Failed(msgspec.Struct, frozen=True):
    """A change that has no figure, and why."""

    key: str
    why: str


class Session:
    """The runs so far, in the order in which they ran, and how the next one is made.

    skipped: changes without a run, and why. together: the changes that were chosen. bet: those that ran together before
    each was known. is_short: whether the time is too short to compile early. predicted: by the id of
    read-trace's change, the share of the step that it is predicted to save. recording: the trace of the first run.
    skip: how many steps at least are the warm-up of a run.
    """

    def __init__(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        deadline: float,
        say: Callable[[str], None],
        cwd: str | None = None,
        show: bool = False,
        step_at: str | None = None,
    ):
        self.program, self.environment, self.folder = program, environment, folder
        self.deadline, self.say, self.cwd, self.show, self.step_at = deadline, say, cwd, show, step_at
        self.began, self.usual_noise = time.monotonic(), USUAL_NOISE
        self.runs: list[Run] = []
        self.failures: dict[tuple[str, ...], str] = {}
        self.skipped: list[Failed] = []
        self.together: tuple[str, ...] = ()
        self.bet: tuple[str, ...] = ()
        self.is_short = False
        self.failure, self.made_steps = "", False
        self.seen = Seen()
        self.candidates: list[Candidate] = []
        self.predicted: dict[str, float] = {}
        self.recording: Path | None = None
        self.skip = RECORDING["skip"]
        self._noise, self._noise_of = noise_of((), self.usual_noise), 0  # of so many runs
        self._extra_s: dict[tuple[str, ...], float] = {}

    # What is known.

    @property
    def as_it_is(self) -> list[Run]:
        """Return the runs of the program as it is."""
        return self.of(AS_IT_IS)

    @property
    def by_key(self) -> dict[str, Candidate]:
        return {one.key: one for one in self.candidates}

    @property
    def alone(self) -> list[Candidate]:
        """Return the changes that do anything by themselves."""
        return [one for one in self.candidates if not one.beside or self.seen.is_compiled]

    def of(self, keys: tuple[str, ...]) -> list[Run]:
        """Return the runs with exactly these changes."""
        return [one for one in self.runs if one.keys == keys]

    @property
    def noise(self) -> Noise:
        """Return by which share two equal runs differ. The steps of each run tell how busy the machine is, too."""
        if self._noise_of != len(self.runs):
            kinds = dict.fromkeys(one.keys for one in self.runs)
            spreads = [spread_of(one.steps_us, one.stock) for one in self.runs]
            # The median: a change that makes steps uneven, such as too many threads, says nothing of the others.
            usual = max(self.usual_noise, statistics.median(spreads))
            self._noise = noise_of([[one.step_us for one in self.of(keys)] for keys in kinds], usual)
            self._noise_of = len(self.runs)
        return self._noise

    def saving(self, keys: tuple[str, ...], than: tuple[str, ...] = AS_IT_IS) -> Saving | None:
        """Return what these changes save of the step of other ones; None if one of the two was not measured."""
        steps = [one.step_us for one in self.runs]
        kinds = [one.keys == than for one in self.runs]
        if not any(kinds):
            return None
        pairs = []
        for number, one in enumerate(self.runs):
            if one.keys == keys:
                pairs.append((beside(kinds, steps, number), one.step_us))
        return saving(pairs, self.noise, [one.step_us for one in self.of(than)]) if pairs else None

    def difference(self, keys: tuple[str, ...]) -> Difference:
        """Return how the losses, or without losses the outputs, differ from those of the program as it is."""
        run, as_it_is = self.of(keys)[0], [one for one in self.as_it_is if not one.nudged]
        if not as_it_is[0].losses:
            return outputs_differ([one.outputs for one in as_it_is], run.outputs, self.seen.is_half)
        why = next((one.other_numbers for key in keys if (one := self.by_key[key]).other_numbers), "")
        nudged = next((one.losses for one in self.as_it_is if one.nudged), ()) if "bf16" not in keys else ()
        return losses_differ([one.losses for one in as_it_is], run.losses, why, self.seen.is_half, nudged)

    def is_equal(self, keys: tuple[str, ...]) -> bool:
        """Return whether nothing says that these changes, or one of them by itself, give other results."""
        return all(self.difference(one).kind != "off" for one in {keys, *((key,) for key in keys)} if self.of(one))

    def is_known_to_help(self, key: str) -> bool:
        """Return whether a change of those together helps alone, or beside the others."""
        rest = tuple(one for one in self.together if one != key)
        found = self.saving((key,)), self.saving(self.together, rest) if self.of(rest) else None
        return any(one is not None and one.helps for one in found)

    @property
    def _slow_us(self) -> float | None:
        """Return the step from which on a change is clearly slower, so that its run may end early; None if unknown."""
        usual = [one.step_us for one in self.as_it_is]
        return max(usual) * CLEARLY_SLOWER * (1 + 2 * self.noise.share) if usual else None

    # Time.

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic() - SAVING_S

    def expected_s(self, keys: tuple[str, ...] = AS_IT_IS) -> float:
        """Return how long a run with these changes will take."""
        usual = sorted(one.seconds for one in self.as_it_is)
        base = usual[len(usual) // 2] if usual else 10.0
        if not any(self.by_key[key].compiles for key in keys):
            return base
        # What ran before is in the compiler's cache, so that it takes no longer than another run with the same code.
        likely = min if keys in self._extra_s else max
        return base + likely(self._compiled_s(keys), default=COMPILE_S[self.seen.on_gpu])

    def _compiled_s(self, keys: tuple[str, ...]) -> list[float]:
        """Return how long compiling took in the runs so far that compile in the same way."""
        compiled = {key for key in keys if self.by_key[key].compiles}
        return [extra for earlier, extra in self._extra_s.items() if compiled & set(earlier)]

    def fits(self, *runs: tuple[str, ...]) -> bool:
        """Return whether the time is enough for these runs."""
        return sum(map(self.expected_s, runs)) < self.left_s

    def run(self, keys: tuple[str, ...] = AS_IT_IS, look: str = "") -> Run | None:
        """Run the program with these changes, and return the run; None if it failed. The reason is kept then.

        look: "record" or "measure" for a run that shows what the program is made of, and is not compared with others.
        """
        keys = tuple(sorted(keys))
        compiles = any(self.by_key[key].compiles for key in keys)
        limit = max(LEAST_LIMIT_S, 4 * self.expected_s()) + COMPILE_LIMIT_S * compiles
        if not self.as_it_is:
            limit = self.left_s
        elif compiles and not self._compiled_s(keys):  # compiling may take minutes, and other runs are to follow
            limit = min(limit, max(LEAST_LIMIT_S, self.left_s / 2))
        nudge = not keys and len(self.as_it_is) == 1 and bool(self.as_it_is[0].losses)
        environment = dict(self.environment)
        for key in keys:
            environment |= _joined(environment, self.by_key[key].environment)
        plan = {
            **(RECORD if look == "record" else {}),
            "mode": look or "measure",
            "skip": self.skip,
            "changes": [*(key for key in keys if self.by_key[key].is_patch), *([NUDGED] if nudge else [])],
            "look": bool(look),
            "step_at": self.step_at,
            "slow_us": self._slow_us if keys else None,
        }
        one = run_once(
            self.program,
            plan,
            environment,
            self.folder / "run",
            min(limit, max(1.0, self.left_s)),
            cwd=self.cwd,
            show=self.show,
        )
        failure = one.failure or self._unapplied(one, keys)
        one = msgspec.structs.replace(one, keys=keys, nudged=bool(one.applied.get(NUDGED)), failure=failure)
        if one.failure:
            self.failure, self.made_steps = one.failure, one.steps > 0
            if self.left_s > 0 or not keys:
                self.failures.setdefault(keys, one.failure)
            elif len(keys) == 1 and not self.of(keys):
                self.skipped.append(Failed(keys[0], NO_TIME))
            return None
        if compiles:
            self._extra_s[keys] = max(0.0, one.seconds - self.expected_s())
        if not look:
            self.runs.append(one)
        return one

    def _unapplied(self, one: Run, keys: tuple[str, ...]) -> str:
        for key in keys:
            if self.by_key[key].is_patch and not one.applied.get(key):
                return one.refused.get(key) or "it found nothing to change"
        return ""


def _joined(environment: Mapping[str, str], variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the variables, the allocator's options after those that are set already."""
    found = {}
    for name, value in variables:
        before = environment.get(name) if name.endswith("ALLOC_CONF") else None
        found[name] = f"{before},{value}" if before else value
    return found


def search(session: Session, only: Sequence[str] = (), without: Sequence[str] = ()) -> None:
    """Run the program until everything is known that the time allows.

    only, without: keys of changes; all that apply are tried without them.
    """
    load = os.getloadavg()[0]
    if load > BUSY * cpus():
        session.usual_noise = BUSY_NOISE
        session.say(
            f"other programs keep this machine busy (load {load:.1f}, {cpus()} CPUs), which makes its figures vary"
        )
    first = session.run(look="record")
    if first is None and session.made_steps:  # such as a program that starts a profiler of its own
        session.failures.clear()
        first = session.run(look="measure")
    if first is None:
        return
    if first.trace:
        session.recording = _kept(session, Path(first.trace))
        session.predicted = predictions(session.recording)
    session.skip = max(session.skip, first.cold)
    session.seen = first.seen
    known = all_candidates(first.seen.world_size)
    chosen = [one for one in known if (not only or one.key in only) and one.key not in without]
    apply = [one for one in chosen if one.applies(first.seen)]
    groups = {one.group for one in apply}
    apply = [one for one in apply if not one.beside or first.seen.is_compiled or one.beside in groups]
    session.candidates = in_order(apply, session.predicted)
    session.skipped += [Failed(one.key, NOTHING_TO_CHANGE) for one in chosen if one.key in only]
    session.skipped = [one for one in session.skipped if one.key not in session.by_key]
    session.is_short = COMPILE_SHARE * session.left_s < COMPILE_S[session.seen.on_gpu]
    if session.is_short:
        session.candidates.sort(key=lambda one: one.compiles)
    session.say(_announcement(session, first))
    if _run(session) is None or not session.candidates:
        return
    try:
        if _changes_between(session) == MOST_BETWEEN:
            _bet(session)
            _improve(session, session.bet)
        _each_alone(session)
        if session.together and session.is_equal(session.together):
            session.together = tuple(sorted(_each_added(session, session.together)))  # some were measured alone since
        else:
            _measure_again(session, until=SINGLES + 0.1)
            _all_together(session)
        _measure_again(session, until=1.0)
        if best := _best(session):  # one may be known to help only now
            session.together = tuple(sorted(_each_added(session, best)))
            _end_as_it_is(session)
    finally:  # Ctrl-C ends it at any moment
        session.together = _best(session)


def _kept(session: Session, trace: Path) -> Path:
    """Move a recording out of the folder of its run, which the next run deletes, and return its path."""
    script = next((Path(one).stem for one in session.program if one.endswith(".py")), "program")
    return trace.rename(session.folder / f"{script}_trace{''.join(trace.suffixes)}")


def predictions(trace: Path) -> dict[str, float]:
    """Return what each change is predicted to save, by its id in read-trace: the share of the step."""
    from tracereader.changes.catalogue import opportunities
    from tracereader.figures import summarize
    from tracereader.replay import Refused
    from tracereader.trace import read

    try:
        read_ = read(trace)
        found = opportunities(read_, summarize(read_))
    except Exception:  # a recording that cannot be read gives no order, and everything is tried all the same
        return {}
    if isinstance(found, Refused):
        return {}
    return {one.change: one.likely_share for one in found}


def _announcement(session: Session, first: Run) -> str:
    titles = ", ".join(one.title for one in session.alone)
    if not titles:
        return "none of the changes applies to this program"
    number = 2 * len(session.alone) + 3
    most = int(session.left_s / max(first.seconds, 1))
    if most < 2:
        return f"a run takes about {first.seconds:.0f} s, which leaves no time to try a change; --minutes gives more"
    runs = f"{number} runs or more" if number < most else f"About {most} runs"
    follow = f"a run takes about {first.seconds:.0f} s. {runs} follow: as it is, and in turn with"
    if len(session.alone) == 1:
        return f"{follow} one change ({titles})."
    return f"{follow} each of {len(session.alone)} changes ({titles}). Then those that help run together."


def _told(session: Session, keys: tuple[str, ...], one: Run | None) -> None:
    name = " + ".join(session.by_key[key].title for key in keys) or "as it is"
    unit, (step,) = in_one_unit([one.step_us if one else 0.0])
    result = f"{step} {unit} a step" if one else session.failures.get(tuple(sorted(keys)), session.failure)
    session.say(f"{name}: {result} ({(time.monotonic() - session.began) / 60:.1f} min)")


def _run(session: Session, keys: tuple[str, ...] = AS_IT_IS) -> Run | None:
    one = session.run(keys)
    _told(session, keys, one)
    return one


def _end_as_it_is(session: Session) -> None:
    """Run the program as it is after the last change, as far as the time allows, so that the change has both sides."""
    if session.runs[-1].keys != AS_IT_IS and session.fits(AS_IT_IS):
        _run(session)


def _spent(session: Session) -> float:
    """Return the share of the time that is spent."""
    now = time.monotonic()
    return (now - session.began) / max(1e-9, session.deadline - session.began)


def _bet(session: Session) -> None:
    """Run what is most likely to help together, because the time is too short to learn of each change alone first.

    If it seems to save much and a disturbed run hides it, it is measured again before anything else takes the time.
    """
    keys, groups = [], set()
    waits_for_loader = bool(session.predicted) and session.candidates[0].key == "workers"  # a faster model waits, too
    for one in session.candidates:
        late = one.compiles and (session.is_short or waits_for_loader)
        if one.is_safe and not (one.group and one.group in groups) and not late:
            keys.append(one.key)
            groups.add(one.group)
    bet = tuple(sorted(keys[:BET]))
    while len(bet) > 1 and len(session.of(bet)) < BET_ROUNDS and session.fits(bet, AS_IT_IS, AS_IT_IS):
        if _run(session, bet) is None:
            return
        session.bet = bet
        _run(session)
        found = session.saving(bet)
        if found.helps or found.share < MUCH or not session.is_equal(bet):
            return


def _improve(session: Session, keys: tuple[str, ...]) -> None:
    """Leave each of the changes that save much together out once, and add each other one that may help beside them.

    Where their results together cannot be compared, each that can be compared by itself runs alone first.
    """
    found = session.saving(keys) if keys else None
    if found is None or not found.helps or found.share < MUCH:
        return
    if session.difference(keys).kind == "not comparable":
        for key in keys:
            alone = (key,)
            if not session.by_key[key].other_numbers and not session.of(alone) and session.fits(alone):
                _run(session, alone)
    if not session.is_equal(keys):
        return
    session.together = keys
    chosen = [one.key for one in session.candidates if one.key in keys]
    session.together = tuple(sorted(_each_left_out(session, chosen)))
    session.together = tuple(sorted(_each_added(session, session.together)))


def _each_alone(session: Session) -> None:
    """Run with each change by itself. The program as it is runs before each, or before some of them."""
    every = _changes_between(session)
    since = 0
    for candidate in session.alone:
        keys = (candidate.key,)
        late = _spent(session) + session.expected_s(keys) / (session.deadline - session.began) > SINGLES + 0.1
        then = (tuple({*keys, *_helping(session)}), AS_IT_IS)  # those that help must still run together
        wanted = (keys, *then, *[AS_IT_IS] * (not since)) if len(session.runs) > 1 else (keys,)
        if (late and len(session.runs) > 1) or not session.fits(*wanted):
            session.skipped.append(Failed(candidate.key, NO_TIME))
            continue
        is_quiet = len(session.as_it_is) > 2 and session.noise.share < QUIET
        if since >= max(every, 2 * is_quiet):
            _run(session)
            since = 0
        if _run(session, keys):
            since += 1
    if since and session.fits(AS_IT_IS):
        _run(session)


def _changes_between(session: Session) -> int:
    """Return how many changes are measured between two runs of the program as it is."""
    changed = sum(session.expected_s((one.key,)) for one in session.alone)
    usual = session.expected_s() * len(session.alone)
    room = SINGLES * (session.deadline - time.monotonic())
    return next((every for every in range(1, MOST_BETWEEN) if changed + usual / every <= room), MOST_BETWEEN)


def _measure_again(session: Session, until: float) -> None:
    """Measure again, in turn with the program as it is, what may help and is not clear, the largest saving first.

    Where nothing helps so far, the changes for which no time was left come before what hardly does.
    """
    while _spent(session) < until:
        unclear = []
        sets = [(one.key,) for one in session.alone]
        if len(session.together) > 1:
            sets.insert(0, tuple(sorted(session.together)))
        together = session.saving(session.together) if session.together else None
        later = () if session.together else (tuple(_helping(session)), AS_IT_IS)
        for keys in sets:
            number, found = len(session.of(keys)), session.saving(keys)
            if number >= MOST_ROUNDS or keys in session.failures or not session.fits(keys, AS_IT_IS, *later):
                continue
            if found is None:
                if together is None or not together.helps:
                    unclear.append((1, 0, 0.0, keys))
                continue
            may_help = found.share + found.plus_minus > MAY_HELP
            if may_help and not (found.is_clear and (found.helps or found.harms) and number > 1):
                unclear.append((2 * (number > 1 or found.share < found.plus_minus), number, -found.share, keys))
        if not unclear:
            return
        keys = min(unclear)[-1]
        session.skipped = [one for one in session.skipped if (one.key,) != keys]
        if session.runs[-1].keys != AS_IT_IS:
            _run(session)
        _run(session, keys)
        if session.fits(AS_IT_IS):
            _run(session)


def _helping(session: Session) -> list[str]:
    """Return the changes to try together, the best of each group, the largest saving first.

    They give equal results, and each helps alone, or seems to, or is one that hardly ever costs anything.
    """
    found, groups = [], set()
    alone = [(session.saving((one.key,)), one) for one in session.candidates]
    alone = [(one, candidate) for one, candidate in alone if one is not None]
    for single, candidate in sorted(alone, key=lambda pair: -pair[0].share):
        seems = single.share > max(WORTH, single.plus_minus / DOUBT) or (candidate.usual and not single.harms)
        if seems and session.is_equal((candidate.key,)) and not (candidate.group and candidate.group in groups):
            found.append(candidate.key)
            groups.add(candidate.group)
    return found


def _all_together(session: Session) -> None:
    """Find the changes that save most together, as far as the time allows."""
    helping = _helping(session)
    chosen = helping[:1]
    if len(helping) > 1 and session.fits(tuple(helping)):
        is_bet = tuple(sorted(helping)) == session.bet
        chosen = helping if is_bet or _run(session, tuple(helping)) else _one_after_the_other(session, helping)
    chosen = _or_the_bet(session, chosen)
    if len(chosen) > 1:
        session.together = tuple(sorted(chosen))
        _end_as_it_is(session)
        chosen = _each_left_out(session, chosen)
    session.together = tuple(sorted(chosen))
    found = session.saving(session.together) if chosen else None
    if found is not None and found.helps:
        chosen = _each_added(session, chosen)
        session.together = tuple(sorted(chosen))


def _or_the_bet(session: Session, chosen: list[str]) -> list[str]:
    """Return the changes that ran together first, if they save more than those that were chosen since."""
    if not session.bet or not session.is_equal(session.bet):
        return chosen
    bet, found = session.saving(session.bet), session.saving(tuple(sorted(chosen))) if chosen else None
    if bet is None or not bet.share > (found.share if found else WORTH):
        return chosen
    return sorted(session.bet, key=lambda key: [one.key for one in session.candidates].index(key))


def _best(session: Session) -> tuple[str, ...]:
    """Return the changes that were chosen together, or one of them where it saves more; none where nothing helps.

    If none of these is known to help, as when the time was over before, all that give equal results count.
    """
    chosen = [session.together, *((key,) for key in session.together)]
    measured = [keys for keys in {one.keys for one in session.runs} if keys and session.is_equal(keys)]
    for sets in (chosen, measured):
        found = {keys: saved for keys in sets if keys and (saved := session.saving(keys)) is not None and saved.helps}
        if found:
            return max(found, key=lambda keys: found[keys].share)
    return ()


def _one_after_the_other(session: Session, helping: Sequence[str]) -> list[str]:
    """Return the changes that run together, where all of them do not: each is added, and stays if that runs."""
    chosen = list(helping[:1])
    for key in helping[1:]:
        wanted = tuple(sorted([*chosen, key]))
        if wanted not in session.failures and session.fits(wanted) and _run(session, wanted):
            chosen.append(key)
    return chosen


def _each_left_out(session: Session, chosen: Sequence[str]) -> list[str]:
    """Return the changes without those that add nothing to the others."""
    chosen = list(chosen)
    for key in reversed(list(chosen)):
        rest = tuple(sorted(one for one in chosen if one != key))
        if len(rest) < 1 or not session.fits(rest):
            continue
        if len(rest) > 1:
            _run(session, rest)
        adds = session.saving(tuple(sorted(chosen)), rest)
        if adds is not None and adds.share <= max(WORTH, adds.plus_minus / 2) and session.is_equal(rest):
            chosen.remove(key)
    return chosen


def _each_added(session: Session, chosen: Sequence[str]) -> list[str]:
    """Return the changes and those that help beside them, though they did not alone: another limit is gone.

    Where one was not measured alone, and the others draw other random numbers, its results cannot be compared. Then it
    is added only if it is known to keep them.
    """
    chosen = list(chosen)
    alone = {one.key: session.saving((one.key,)) for one in session.candidates}

    def order(one: Candidate) -> tuple[float, bool]:
        return -alone[one.key].share if alone[one.key] else 0.0, one.compiles

    for candidate in sorted(session.candidates, key=order):
        groups = {session.by_key[key].group for key in chosen} - {""}
        found = alone[candidate.key]
        is_idle = candidate not in session.alone and candidate.beside not in groups
        if candidate.key in chosen or candidate.group in groups or is_idle or (found is not None and found.harms):
            continue
        wanted, now = tuple(sorted([*chosen, candidate.key])), tuple(sorted(chosen))
        comparable = session.difference(now).kind != "not comparable" if session.of(now) else True
        if not session.is_equal((candidate.key,)) or not (found is not None or candidate.is_safe or comparable):
            continue
        fails = any(set(one) <= set(wanted) for one in session.failures)
        if fails or session.of(wanted) or not session.fits(wanted, AS_IT_IS):
            continue
        if _run(session, wanted) is None:
            continue
        better = session.saving(wanted, now)
        for keys in (now, wanted):
            if better is None or better.helps or better.share < 0.5 * better.plus_minus or not session.fits(keys):
                break
            _run(session, keys)
            better = session.saving(wanted, now)
        if better is not None and better.helps and session.is_equal(wanted):
            chosen.append(candidate.key)
    return chosen
