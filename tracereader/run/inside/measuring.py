"""Times a program's steps without the profiler, once they are steady."""

import itertools
import statistics
import sys
import threading
import time

STEADY = 4  # so many steps are compared with as many before them
FALLING = 1.15  # steps that were longer than the latest ones by this factor are still becoming shorter
STOCK_S = 8  # for using up the batches that are ready, which say nothing of how fast a loader is
STEPS_AT_MOST, SECONDS_AT_MOST = 120, 60  # of a warm-up that is never steady, after the first step
# Page faults that a step has more or less once the recording has changed the allocator's memory. Each takes about 1 µs.
OTHER_FAULTS = 100
# A GPU's event costs the CPU about as much as a launch or two, so short steps share one: a step of 54 µs took 81 µs on
# an H100 with an event of its own.
EVENT_EACH_S, STEPS_AN_EVENT = 0.004, 50
# So seldom more is done at the end of a step than to read the clock: that takes 50 µs where the program's work fills
# the caches. Training steps of 0.5 and 0.7 ms took 0.8 to 1.7% longer with 0.02, and 0.9 to 1.1% with this.
ASKED_EACH_S = 0.05
USUAL = 10  # steps, at least
# Steps that each begin when the GPU is idle, so that the CPU's clock shows what it needs for them: a few of long ones.
ALONE, ALONE_S = (3, 20), 0.1
# Forty steps of 50 µs are over before a GPU's clocks are up.
CLOCKS_UP_S = 0.1
# Half a second later its power limit may have lowered them: steps of 245 µs on an H200 took 263 µs from then on.
SHORTEST_S = 1.0
# A generator's steps on a CPU took 14 µs each, and 6 µs later. The kernel counts in hundredths of a second what other
# programs use: a step of 1.2 ms was 38% off after 40 of them.
SHORTEST_BY_CPU_S = 0.5


class Measuring:
    """Takes the ends of steps, and measures from the step on at which compilations and allocations have stopped.

    counted: how many steps have ended outside the measurement. ready: whether the steps are steady. begin() starts the
    measurement; finish() returns the measured steps in µs. Each rank begins and finishes at the same step, so the
    caller decides when.
    """

    def __init__(self, torch, skip=5, least=10, seconds=1.0, most=None, slow_us=None):
        self.torch, self.skip, self.least, self.seconds, self.most = torch, skip, least, seconds, most
        self.slow_us = slow_us  # if all steps are longer, a few of them tell enough
        self.contention = None  # leaves out what other programs cost, where steps are timed by the CPU's clock
        self.counted = 0
        self.ends = []  # of the steps of the warm-up, in s
        self.work = None  # what was compiled and allocated so far
        self.quiet = 0  # steps without any of these
        self.inputs = ()  # the shapes of steps' inputs so far, which may grow
        self.known_inputs, self.repeated = 0, 0  # how many shapes, and the latest steps without a new one
        self.waits_for_inputs = False  # whether steps have to repeat their shapes
        self.marks = []  # the CPU's times (s) at the ends of steps
        self.events = []  # of the GPU: (number of the mark, event)
        self.measures_cpu = False  # whether the first steps show how much CPU time one needs, where a GPU computes
        self.alone_us, self.alone = [], False  # the times of these steps so far, and whether the next one is among them
        self.own = []  # this thread's times: (number of the mark, (had a CPU, waited for one))
        self.every = 1  # so many steps share an event
        self.stock = 0  # batches that a loader's workers have prepared while the first steps were slow
        self.measuring = False
        self.steady = False
        self.faults = 0.0  # page faults of each measured step

    @property
    def steps(self):
        """How many steps have ended."""
        return self.counted + max(0, len(self.marks) - 1)

    def ended(self):
        """Count the end of a step."""
        if self.alone:
            self._ended_alone()
            return
        if self.measuring:
            self._mark()
            return
        self.counted += 1
        if self.counted == 1:
            self.first_end = time.perf_counter()
        self.ends.append(time.perf_counter() - self._waited())
        del self.ends[: -2 * STEADY - 1]
        work = compiled_graphs(), self._allocated()
        self.quiet = self.quiet + 1 if work == self.work else 0
        self.work = work
        self.repeated = self.repeated + 1 if len(self.inputs) == self.known_inputs else 0
        self.known_inputs = len(self.inputs)

    @property
    def ready(self):
        """Whether the warm-up is over. It is also over where the steps never become steady."""
        if self.steady:
            return True  # other ranks follow some steps later
        if self.steps < self.skip + 1:
            return False
        if self.steps <= 2 * self.stock and time.perf_counter() < self.first_end + STOCK_S:
            return False
        if self.waits_for_inputs and self.repeated < 2 and time.perf_counter() < self.first_end + SECONDS_AT_MOST:
            return False
        late = self.steps > self.skip + STEPS_AT_MOST or time.perf_counter() > self.first_end + SECONDS_AT_MOST
        times = self._warm_s()
        latest, before = times[-STEADY:], times[:-STEADY]
        few = len(times) < STEADY or (len(before) < 2 and sum(times) < 10)  # long steps need not be so many
        falls = before and statistics.median(before) > FALLING * statistics.median(latest)
        self.steady = self.quiet >= 2 and not few and not falls
        return self.steady or late or self._is_slow([one * 1e6 for one in latest])

    @property
    def has_new_inputs(self):
        """Whether the latest step of the warm-up had inputs of new shapes, where a GPU computes."""
        return self.timed_by_gpu and not self.repeated

    def warm_up_again(self, waits_for_inputs=False):
        """Forget the steps so far: those that follow are others. waits_for_inputs: their shapes have to be known."""
        self.ends, self.quiet, self.steady, self.skip = [], 0, False, self.steps
        self.waits_for_inputs = waits_for_inputs

    def _warm_s(self):
        return [after - before for before, after in itertools.pairwise(self.ends)]

    def _is_slow(self, times_us):
        """Return whether the latest steps are all clearly longer than they need to be, and nothing is compiled."""
        return self.slow_us is not None and self.quiet >= 2 and len(times_us) >= STEADY and min(times_us) > self.slow_us

    def begin(self, hastily=True):
        """Begin to measure at the step that ends now. hastily: few short steps may be enough.

        They are too many for a program that ends soon. A GPU times them for as long as its clocks take to rise.
        """
        self.measuring = True
        times = self._warm_s()
        self.usual = statistics.median(times) if times else EVENT_EACH_S
        self.every = max(1, min(STEPS_AN_EVENT, int(EVENT_EACH_S / max(self.usual, 1e-6))))
        self.timed_by_gpu = self._on_gpu()
        self.hastily = hastily
        self.marks, self.events, self.own = [], [], []
        if self.measures_cpu and self.timed_by_gpu and self.least >= USUAL:
            self.alone_us, self.alone = [], True
            self._begin_alone()
            self.alone_until = self.alone_began + ALONE_S
        else:
            self._begin_marks()

    def _ended_alone(self):
        now = time.perf_counter()
        self.alone_us.append((now - self.alone_began) * 1e6)
        self.counted += 1
        few, many = ALONE
        self.alone = len(self.alone_us) < (few if now > self.alone_until else many)
        self._begin_alone() if self.alone else self._begin_marks()

    def _begin_alone(self):
        self._synchronize()
        self.alone_began = time.perf_counter()

    def _begin_marks(self):
        self._synchronize()
        self.faulted = page_faults()
        if self.contention is not None:
            self.contention.begin()
        self._mark()

    @property
    def enough(self):
        """Whether enough steps are measured."""
        count = len(self.marks) - 1
        if count < 3:
            return False
        least = self.least - ALONE[0] * bool(self.measures_cpu and self.alone_us)  # a program may end soon
        seconds = self.marks[-1] - self.marks[0]
        if self.slow_us is not None and count == max(STEADY, self.stock) and self._is_slow(self.without_others()):
            return True
        too_short = (self.timed_by_gpu and self._takes_less(CLOCKS_UP_S)) if self.hastily else self.hasty
        most = self.most and count >= self.most and not too_short
        if count >= max(least, self.stock) and (seconds >= self.seconds or most):
            return True
        longest = max(5.0, self.seconds) * (1 if count >= self.stock else 2)  # workers end several batches at a time
        return seconds >= longest

    @property
    def hasty(self):
        """Whether the measured steps took less time together than short ones should."""
        return self._takes_less(SHORTEST_S if self.timed_by_gpu else SHORTEST_BY_CPU_S)

    def _takes_less(self, seconds):
        # Where fewer steps are asked for, they take less time, too.
        return self.marks[-1] - self.marks[0] < seconds * min(1.0, self.least / USUAL)

    def quickly(self):
        """Return a function that takes the end of a step of this thread and returns True.

        It returns False where ended() has to do it.

        It does no more than it has to, because each of its lines takes several times as long where the program's work
        fills the caches.
        """
        append, clock, thread_of = self.marks.append, time.perf_counter, threading.get_ident
        thread = thread_of()
        left = self._until_asked()

        def quick():
            nonlocal left
            if thread_of() != thread:  # other threads make steps, too
                return False
            left -= 1
            if left:
                append(clock())
                return True
            left = self._until_asked(1)
            return False

        return quick

    def _until_asked(self, more=0):
        """Return after how many steps it is asked whether enough are measured, if so many more are about to end."""
        count = len(self.marks) - 1 + more
        enough = [one - count for one in (max(self.least, self.stock), self.most or 0) if one > count]
        event = [self.every - count % self.every] * self.timed_by_gpu
        return max(1, min([int(ASKED_EACH_S / max(self.usual, 1e-6)), *event, *enough]))

    def so_far(self):
        """Return the measured steps in µs by the CPU's clock, which runs ahead of a GPU's."""
        return [(after - before) * 1e6 for before, after in itertools.pairwise(self.marks)]

    def finish(self):
        """Return the measured steps in µs: by the GPU's clock where there is one."""
        self.measuring = False
        self._synchronize()
        if len(self.marks) < 2:
            return []
        self.faults = (page_faults() - self.faulted) / (len(self.marks) - 1)
        found = []
        for (first, before), (last, after) in itertools.pairwise(self.events):
            count = last - first
            found += [before.elapsed_time(after) * 1e3 / count] * count
        # While a graph is captured no event is recorded. If that lasts to the end, the CPU's clock has all steps.
        if not self.timed_by_gpu or len(found) < len(self.marks) - self.every:
            found = self.without_others()
        self.counted, self.marks = self.steps, []
        return found

    def has_other_memory(self, faults):
        """Return whether the steps that were measured last have far more or fewer page faults than earlier ones."""
        least, most = sorted((faults, self.faults))
        return most > 2 * least + OTHER_FAULTS and not self.timed_by_gpu

    def without_others(self):
        """Return the measured steps in µs by the CPU's clock, without what other programs cost if that is known."""
        if self.contention is None:
            return self.so_far()
        return [one * 1e6 for one in self.contention.without_others(self.marks, self.own)]

    def _waited(self):
        return self.contention.times()[1] if self.contention is not None else 0.0

    def _mark(self):
        number = len(self.marks)
        if self.contention is not None:
            self.own.append((number, self.contention.times()))
        self.marks.append(time.perf_counter())
        if self.timed_by_gpu and not number % self.every and not self.torch.cuda.is_current_stream_capturing():
            event = self.torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append((number, event))

    def _on_gpu(self):
        cuda = getattr(self.torch, "cuda", None)
        return cuda is not None and cuda.is_initialized()

    def _synchronize(self):
        if self._on_gpu() and not self.torch.cuda.is_current_stream_capturing():
            self.torch.cuda.synchronize()

    def _allocated(self):
        if not self._on_gpu():
            return 0
        try:
            return self.torch._C._cuda_memoryStats(self.torch.cuda.current_device())["segment"]["all"]["allocated"]
        except Exception:  # an allocator of the program's own
            return 0


def compiled_graphs():
    """Return how many graphs torch.compile has compiled in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters["stats"].get("unique_graphs", 0) if counters and "stats" in counters else 0


def page_faults():
    """Return the minor page faults of this process so far; 0 where the system does not count them."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
