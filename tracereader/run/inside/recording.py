"""Records a few steady steps with PyTorch's profiler, after the same steps were timed without it."""

import contextlib
import ctypes
import gc
import gzip
import json
import mmap
import os
import shutil
import statistics
import threading
import time
import warnings

DISCARDED = 2  # recorded steps that are thrown away: the profiler's first steps are slower
ALIKE = 1.04  # the first recording is kept if later steps take as long as before, but for this factor
SLOW = 1.5  # a step of another kind takes this many times the median; so does a cold one
MUCH_SLOWER = 4  # times the median; where a step takes as long, their geometric mean may separate the two kinds
REPEATS = 3  # so many slow steps at equal distances make a period, if they are most of the slow ones
MOSTLY = 0.6
LOOKED_AT = 1000  # steps among which slow ones are looked for: ten times as many take a second and more
WAIT_FOR_PERIOD = 4  # times as many steps and seconds are timed where slow steps may return at equal distances
MORE = 1.25  # times as many steps before it is asked again whether they return: that reads files of the kernel
TIMING = "timing steps without the profiler"
SHAPES = "recording shapes"
FLOW = "recording what the ops read and make"
FLOW_S = 1.0  # the longest step for which this is recorded
SHAPES_S = 5.0  # the longest time for which steps on a CPU are recorded a second time
DETACH = "TEARDOWN_CUPTI"  # which the profiler reads when a recording ends
NAMES = ("unprofiled_step_us", "unprofiled_quartiles_us", "unprofiled_steps")
ON_CPU = "unprofiled_cpu_us"


class Recording:
    """Warms up, times the steps, records them, writes the trace, and ends the program or lets it go on.

    The plan's fields beside those of try-changes: out (the trace's path, to which several ranks add their numbers),
    active, record_s (the recording's seconds at most), go_on, shapes, stacks, memory, modules.
    """

    def __init__(self, session):
        self.session, self.plan, self.torch = session, session.plan, session.torch
        plan = self.plan
        self.measuring = session.load("measuring").Measuring(
            session.torch, plan["skip"], plan["least"], plan["seconds"], plan["most"]
        )
        self.measuring.inputs = session.steps.inputs
        self.phase = "warming up"
        self.steps_us, self.period = [], None
        self.cpu_began, self.cpu_s = 0.0, 0.0  # the process's CPU time when timing began, and in a timed step
        self.awaited = 0  # steps that are timed before it is asked again whether slow ones return
        self.again = False  # whether steps are timed once more after the recording
        self.hasty = False  # because they took too little time together, so that they are recorded once more, too
        self.recorded = 0
        self.recorded_us = []  # the steps of the recording, by the CPU's clock
        self.round = 0  # how many recordings have ended
        self.fresh = True  # whether nothing is known of the steps that are timed next
        self.doubted = False  # whether timed steps may have been cold: they are timed and recorded once more then
        self.cold = 0  # how many steps were cold, if they were
        self.is_detached = False  # whether the profiler leaves CUDA between two recordings
        self.profiler, self.left, self.active = None, 0, plan["active"]
        self.notes = None  # of modules' calls; the profiler makes its own with stacks
        self.names_modules = False
        self.of_thread = threading.local()
        self.trace = None
        self.with_shapes = None  # another trace, with the shapes that `trace` does not have
        self.flow = None  # a file with what the ops of some steps read and make
        self.observer = None  # which writes that file
        self.undo = []
        self.starting = False
        self._watch_other_profilers()

    @property
    def steps(self):
        return self.measuring.steps

    def facts(self):
        return {
            "phase": self.phase,
            "steps_us": self.steps_us,
            "steady": self.measuring.steady,
            "trace": self.trace,
            "with_shapes": self.with_shapes,
            "flow": self.flow,
            "recorded": self.recorded,
            "names_modules": self.names_modules,
            "cold": self.cold,
            **(unprofiled(self.steps_us, self.period, self.measuring.alone_us) if self.steps_us else {}),
        }

    def ended(self):
        """Go on to the next phase at the end of a step, if all ranks of this machine do so."""
        session, measuring = self.session, self.measuring
        if self.profiler is not None or self.observer is not None:
            measuring.counted += 1
            (self._step_of_profiler if self.profiler is not None else self._step_of_observer)()
            return
        alone = measuring.alone
        measuring.ended()
        if alone:
            if not measuring.alone:
                self._hasten()
            return
        if self.phase == "warming up":
            what = f"time-{self.round}"
            if session.leads and measuring.ready and not session.takes_in():
                session.decide(what)
            if session.due(what):
                session.steps.narrow()
                session.settle()
                self._time_steps()
        elif self.phase == TIMING:
            # When slow steps return takes many steps to find, and the caches are full late. A program that ends before
            # leaves a trace, too: its steps are timed a second time after they are recorded.
            what = f"profile-{self.round}"
            if session.leads and measuring.enough:
                awaits, count = self._awaits_period(), self._count()
                if self.fresh:
                    self.hasty = measuring.hasty
                    session.decide(what, (count, awaits or self.hasty))
                elif not awaits:
                    session.decide(what, (count if self.hasty or count > self.active else 0, False))
            if decided := session.due(what):
                session.steps.hasten(None)
                self._timed(*decided)
        elif self.phase == "recorded":
            if session.leads and session.all_are_done():
                session.decide("end")
            if session.due("end"):
                session.end_program()

    def _time_steps(self):
        session = self.session
        self.phase, self.cpu_began = TIMING, time.process_time()
        self.measuring.measures_cpu = self.fresh  # later the profiler may be attached, which makes calls longer
        # A program that ends soon gets a trace all the same; one of several ranks on GPUs seldom does.
        self.measuring.begin(self.fresh and (session.world_size == 1 or not self._devices()))
        if not self.measuring.alone:
            self._hasten()

    def _hasten(self):
        session = self.session
        if session.local_world_size == 1 and session.made is None and not session.roams:
            session.steps.hasten(self.measuring.quickly())

    def _timed(self, count, again):
        """Record so many steps now that they are timed; none if those that are recorded will do."""
        measuring, before = self.measuring, self.measuring.faults
        cpu_s = (time.process_time() - self.cpu_began) / max(1, len(measuring.marks) - 1)
        less_cpu_us, self.cpu_s = (self.cpu_s - cpu_s) * 1e6, cpu_s
        times = measuring.finish()
        if self.fresh and self.doubted:
            if self._were_cold(times, less_cpu_us):
                self.cold = self.steps - len(times)
            elif self.again:
                self.fresh, self.round = False, self.round + 1
                self._time_steps()
                return
            else:
                count = 0
        elif not self.fresh and measuring.timed_by_gpu:
            times = times if self.is_detached else self._as_before(times)
            if count <= self.active and self._are_alike(times):
                count = 0
        # The profiler's own memory can change for good how the allocator serves the program: steps of 8.2 ms with 1,700
        # page faults took 2.8 ms with none. The first times are the program's.
        if not count or (self.trace is not None and measuring.has_other_memory(before)):
            self._end()
            return
        self.active, self.again, self.fresh = count, again, False
        self._keep(times)
        if self.plan["modules"] and not self.plan["stacks"]:
            self._note_modules()
        self._profile(1, DISCARDED, None)
        self.phase = "starting the profiler"

    def _were_cold(self, times, less_cpu_us):
        """Return whether the steps that were timed first did far more work than these.

        Their inputs had shapes that were new to the process, or they took more CPU time. Steps that waited for data may
        take as little now: the data was made ready during the recording.
        """
        less_us = statistics.median(self.steps_us) - statistics.median(times)
        did_more = self.measuring.waits_for_inputs or less_cpu_us > less_us / 2
        return did_more and _times_as_long(self.steps_us, times) > SLOW

    def _as_before(self, times):
        """Return times from between two recordings without what the profiler adds if it is attached: see _detached().

        The usual step tells how much that is. A step that became faster, or far slower, is another one.
        """
        share = _times_as_long(self.steps_us, times)
        return [share * one for one in times] if 1 / SLOW < share < 1 else times

    def _are_alike(self, times):
        """Return whether these steps take about as long as those before. Of several ranks, one cannot decide that."""
        return self.session.world_size == 1 and 1 / ALIKE < _times_as_long(self.steps_us, times) < ALIKE

    def _keep(self, times):
        self.steps_us, self.period = times, period(times)

    def _awaits_period(self):
        measuring, plan = self.measuring, self.plan
        if len(measuring.marks) - 1 < self.awaited:
            return True
        times = measuring.without_others()
        least = 0 if self.trace else 1  # slow steps: some were seen before the recording
        if not any(least <= len(_slow(times, limit)) < REPEATS for limit in _limits(times)):
            return False
        self.awaited = MORE * len(times)
        return len(times) < WAIT_FOR_PERIOD * plan["most"] and sum(times) < 1e6 * WAIT_FOR_PERIOD * plan["seconds"]

    def _count(self):
        times = self.measuring.without_others()
        longest = max(self.plan["active"], period(times) or 0)
        return max(self.plan["active"], min(longest, int(self.plan["record_s"] * 1e6 / statistics.fmean(times))))

    # The profiler.

    def _profile(self, warmup, active, then):
        keep_thresholds()
        profiler = self.torch.profiler
        kinds = [getattr(profiler.ProfilerActivity, one) for one in ("CPU", *self._devices())]
        with _quiet(), self._ours():
            self.profiler = profiler.profile(
                activities=kinds,
                schedule=profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1),
                on_trace_ready=then,
                record_shapes=self.plan["shapes"] and (self.phase == SHAPES or not self._records_shapes_apart()),
                profile_memory=self.plan["memory"],
                with_stack=self.plan["stacks"],
                experimental_config=_of_all_threads(self.torch) if self.session.roams else None,
            )
            self.profiler.start()
        alone = self.session.thread is not threading.main_thread() and not self.session.roams
        if alone and not hasattr(self.of_thread, "at_its_end"):
            # torch crashes at the program's end if this thread ends before its profiler.
            self.of_thread.at_its_end = _Deleted(self._drop_profiler)
        self.left = warmup + active
        self.recorded_us, self.step_began = [], time.perf_counter()

    def _devices(self):
        modules = [(device, getattr(self.torch, device, None)) for device in ("cuda", "xpu")]
        return [one.upper() for one, module in modules if module and module.is_available() and module.is_initialized()]

    def _records_shapes_apart(self):
        """Return whether shapes are recorded a second time, in other steps, because they make steps on a CPU longer.

        For each op, the profiler keeps a small part of its inputs. It can keep glibc from using the memory of a tensor
        that is gone again: each large tensor then is in new memory, and an op that fills it takes four times as long.
        """
        longest = SHAPES_S * 1e6 / (self.active + 1)
        return self.plan["shapes"] and not self._devices() and statistics.median(self.steps_us) < longest

    def can_roam(self):
        """Whether the profiler can record steps of several threads, one after another: not if it has been started."""
        return not self.steps_us and _of_all_threads(self.torch) is not None

    def _step_of_profiler(self):
        self.left -= 1
        self.recorded_us.append((time.perf_counter() - self.step_began) * 1e6)
        is_last = not self.left and self.phase == "recording"
        if is_last and not self.doubted and self.session.world_size == 1:  # several ranks would have to agree
            self.doubted = self.fresh = self._may_be_cold()
        goes_on_timing = self.fresh or self.again
        # Beside NCCL, detaching was tried at the end only.
        detaches = is_last and (self.session.world_size == 1 if goes_on_timing else self.plan["go_on"])
        with _quiet(), self._ours(), self._detached() if detaches else contextlib.nullcontext():
            before = time.time_ns()
            self.profiler.step()
            self.step_began = time.perf_counter()
            if self.left:
                if self.notes is not None:
                    self.notes.step_began(before)
                return
            self.profiler.stop()
        self.profiler = None
        if self.phase == "starting the profiler" or (self.phase == "recording" and self._records_shapes_apart()):
            self.phase = SHAPES if self.phase == "recording" else "recording"
            if self.notes is not None:
                self.notes.clear()
            self._profile(1, self.active, self._write)
            return
        self._end_notes()
        if goes_on_timing and gc.isenabled():
            gc.collect()  # otherwise one timed step has to: the profiler's objects made it 0.16 s longer
        if self._observes_flow():
            self.phase, self.left = FLOW, self.session.load("observing").STEPS
            self._observe()
        else:
            self._recorded()

    def _recorded(self):
        """Go on after the recording: end, or time steps once more."""
        self.round += 1
        if not self.again and not self.fresh:
            self._end()
            return
        self.session.write_result()  # which a program that is killed leaves
        self.session.result = {}
        if self.fresh:
            self.phase = "warming up"
            self.session.steps.looks = True
            self.measuring.warm_up_again(self.measuring.has_new_inputs)
        else:
            self._time_steps()

    # What the ops read and make, for which torch has an observer of its own.

    def _observes_flow(self):
        usual = statistics.median(self.steps_us)
        alone = self.session.world_size == 1 and not self.session.roams and not self.fresh
        is_known = self.session.load("observing").Observer.is_known(self.torch)
        return self.plan["shapes"] and self.trace is not None and alone and is_known and usual < FLOW_S * 1e6

    def _observe(self):
        flow = os.path.join(self.plan["folder"], f"flow-{self.session.rank}.raw")
        try:
            compiles = self.session.load("measuring").compiled_graphs() > 0
            self.observer = self.session.load("observing").Observer(self.torch, flow, notes_numbers=not compiles)
            self.flow = flow
        except Exception:  # the trace is complete without it
            self._recorded()

    def _step_of_observer(self):
        self.left -= 1
        if self.left:
            self.observer.begin_step()
            return
        self._end_observer()
        self._recorded()

    def _end_observer(self):
        observer, self.observer = self.observer, None
        if observer is not None:
            observer.end()

    def _may_be_cold(self):
        """Return whether timed steps may have been cold: recorded ones take less, or inputs had new shapes.

        cuDNN plans its attention for each shape on the CPU: while a generator wrote its first text on an H200, a token
        took 67 ms, and later 4.
        """
        recorded_us = self.recorded_us[-self.active :]
        return self.measuring.has_new_inputs or _times_as_long(self.steps_us, recorded_us) > SLOW

    def _end(self):
        self.phase = "recorded"
        self._unwatch()
        self.session.why = "recorded"
        self.session.done()
        if self.plan["go_on"]:
            self.session.finish()
        elif self.session.local_world_size == 1:
            self.session.end_program()

    def _write(self, recorded):
        """Write the trace under its name at once, with the time of a step without the profiler."""
        path = self.plan["out"]
        if self.phase == SHAPES:
            path = os.path.join(self.plan["folder"], f"shapes-{self.session.rank}.gz")
        elif self.session.world_size > 1:
            end = ".json.gz" if path.endswith(".gz") else ".json"
            path = f"{path[: -len(end)]}_rank{self.session.rank}{end}"
        name = os.path.basename(path)
        # Beside the user's trace: each .json file in our own folder is a result.
        raw = os.path.join(os.path.dirname(self.plan["out"]), f".{name}.{os.getpid()}.json")
        try:
            recorded.export_chrome_trace(raw)
            with open(raw, "rb") as source, _replaced(path) as target:
                with mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as trace:
                    brace = trace.find(b"{") + 1
                    modules = self.notes.insertion(trace) if self.notes is not None else None
                self.names_modules = modules is not None
                place, slices = modules or (brace, b"")
                target.write(source.read(brace) + b"\n  " + self._known() + b",")
                target.write(source.read(place - brace) + slices)
                shutil.copyfileobj(source, target, 1 << 20)
            if self.phase == SHAPES:
                self.with_shapes = path
            else:
                self.trace, self.recorded = path, self.active
        finally:
            with contextlib.suppress(OSError):
                os.unlink(raw)

    def _known(self):
        """Return the members of the trace with the time of a step without the profiler."""
        return json.dumps(unprofiled(self.steps_us, self.period, self.measuring.alone_us))[1:-1].encode()

    # Modules, without stacks.

    def _note_modules(self):
        session = self.session
        steps = session.load("steps")
        self.notes = session.load("modules").Notes(self.torch, steps.is_compiling(self.torch), steps.patched)
        session.steps.noted = self.notes.start()

    @contextlib.contextmanager
    def _detached(self):
        """Have the profiler detach from CUDA where its recording ends in here, unless the user has decided that.

        By default it stays attached, and each later call of CUDA takes longer: training steps took up to a third longer
        on an H200. With CUDA before 12.6, CUDA graphs may crash afterwards.
        """
        version = [int(one) for one in (getattr(self.torch.version, "cuda", None) or "0").split(".")[:2]]
        if version < [12, 6] or DETACH in os.environ:
            yield
            return
        os.environ[DETACH], self.is_detached = "1", True
        try:
            yield
        finally:
            os.environ.pop(DETACH, None)

    def _end_notes(self):
        if self.notes is not None:
            self.session.steps.noted = None
            self.notes.stop()
            self.notes = None

    # A profiler of the program's own. Two at a time raise an error in the second one, which must not be the program's.

    def _watch_other_profilers(self):
        torch = self.torch
        for kind, name in ((torch.profiler.profile, "start"), (torch.autograd.profiler.profile, "__enter__")):
            self._watch(kind, name)

    def _watch(self, kind, name):
        start = getattr(kind, name)

        def watched(one, *args, **kwargs):
            if not self.starting:
                self._give_way()
            return start(one, *args, **kwargs)

        watched.__wrapped__ = start
        self.undo.append(self.session.load("steps").patched(kind, name, watched))

    def _unwatch(self):
        while self.undo:
            self.undo.pop()()

    def _give_way(self):
        self._unwatch()
        if self.session.over:
            return
        self.close()
        self.session.why = "the program starts a profiler of its own: read what it writes, or leave it out"
        self.session.write_result()
        self.session.finish()

    def close(self):
        """Stop the profiler if it runs, and take back what was put into torch."""
        self._unwatch()
        self._end_notes()
        self._end_observer()
        if self.session.roams or threading.current_thread() is self.session.thread:  # no other can stop its profiler
            self._drop_profiler()

    def _drop_profiler(self):
        if self.profiler is not None:
            profiler, self.profiler = self.profiler, None
            profiler.on_trace_ready = None
            with _quiet(), contextlib.suppress(Exception):
                profiler.stop()

    @contextlib.contextmanager
    def _ours(self):
        self.starting = True
        try:
            yield
        finally:
            self.starting = False


def keep_thresholds():
    """Keep the thresholds of glibc's allocator as the program has them.

    They grow when the profiler frees its large buffers. The allocator returns less memory to the system from then on,
    which made a step a quarter faster. The number of mappings stays at its default; setting it ends that growth: see
    mallopt(3).
    """
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        with contextlib.suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).mallopt(-4, 65536)  # M_MMAP_MAX


class _Deleted:
    """Calls a function when it is deleted, as a thread's own objects are at the thread's end."""

    def __init__(self, then):
        self.then = then

    def __del__(self):
        self.then()


def _of_all_threads(torch):
    """Return the configuration with which the profiler records all threads; None if this torch has none."""
    with contextlib.suppress(AttributeError, TypeError):
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return None


@contextlib.contextmanager
def _replaced(path):
    """Yield a file that takes the place of this one at once, when all of it is written."""
    folder, name = os.path.split(path)
    copy = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        with gzip.open(copy, "wb", compresslevel=5) if path.endswith(".gz") else open(copy, "wb") as file:
            yield file
        os.replace(copy, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(copy)


def _times_as_long(some_us, others_us):
    """Return how many times as long as the others the usual one of some steps takes."""
    return statistics.median(some_us) / statistics.median(others_us)


def period(times_us):
    """Return after how many steps a slow one returns; None if it does not, as where other programs make steps slow."""
    times_us = times_us[-LOOKED_AT:]
    for limit in _limits(times_us):
        slow = set(_slow(times_us, limit))
        for distance in range(2, (len(times_us) - 1) // (REPEATS - 1) + 1):
            for first in (place for place in slow if place < distance):
                places = range(first, len(times_us), distance)
                if slow.issuperset(places) and len(places) >= max(REPEATS, MOSTLY * len(slow)):
                    return distance
    return None


def _limits(times_us):
    """Return what slow steps may be longer than, the least first. Other programs may make some steps slow, too."""
    median = statistics.median_low(times_us)  # of two kinds that take turns, the shorter one
    longest = max(times_us)
    return [SLOW * median, *([(median * longest) ** 0.5] if longest > MUCH_SLOWER * median else [])]


def _slow(times_us, limit):
    return [place for place, one in enumerate(times_us) if one > limit]


def unprofiled(times_us, repeats=None, alone_us=()):
    """Return what the trace says about the steps without the profiler (NAMES).

    The time of a step is the median, because another program may have made some of them longer. Where steps of two
    kinds take turns, it is the mean over whole turns. alone_us: the CPU's times of steps that found the GPU idle; the
    trace gets their median.
    """
    quartiles = statistics.quantiles(times_us, n=4, method="inclusive") if len(times_us) > 1 else 3 * list(times_us)
    whole = times_us[: len(times_us) // repeats * repeats] if repeats else ()
    step = statistics.fmean(whole) if whole else statistics.median(times_us)
    on_cpu = {ON_CPU: statistics.median(alone_us)} if alone_us else {}
    return dict(zip(NAMES, (step, [quartiles[0], quartiles[2]], len(times_us)), strict=True)) | on_cpu


@contextlib.contextmanager
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
