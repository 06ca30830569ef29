"""How long a program's steps wait for CPUs that other programs use. Linux tells this of each thread.

The time in which this thread is ready and has no CPU is left out as far as other programs cause it. Helpers, such as
other threads and a loader's workers, are delayed, too. That stays, because it looks like sleeping or reading a file.
"""

import contextlib
import itertools
import os
import statistics
import threading


class Contention:
    """Takes the times of this thread at the ends of steps, and returns the steps as on an idle machine.

    begin() and times() are called in the thread that makes the steps. Nothing is left out where the kernel does not
    tell the times.
    """

    def __init__(self):
        self.file = None
        self.before = None

    def times(self):
        """Return the seconds in which this thread had a CPU, and those in which it waited for one, since its start."""
        if self.file is None:
            with contextlib.suppress(OSError, AttributeError):
                self.file = os.open(
                    f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC
                )
            if self.file is None:
                self.file = -1
        with contextlib.suppress(OSError, ValueError, IndexError):
            if self.file >= 0:
                cpu, waited = os.pread(self.file, 100, 0).split()[:2]
                return int(cpu) / 1e9, int(waited) / 1e9
        return 0.0, 0.0

    def begin(self):
        """Begin to count what other programs use."""
        self.before = self._state()

    def without_others(self, marks, own):
        """Return the steps (s) between marks (s), without what other programs cost.

        own: (number of the mark, its times()), in order, for the first mark and as many others as these were taken at.
        What was waited between two of them is left out of the longest steps there, until those are as long as the
        others: a step is much longer if it loses its CPU. What remains is left out of the longest steps until all of
        these are equally long. Leaving out the same part of each step made steps without a wait shorter than the CPU
        time in them: 4.9 ms for 5 ms. No time in which the thread had a CPU is left out, because the share is an
        estimate.
        """
        share = self._share_of_others()
        steps = [after - before for before, after in itertools.pairwise(marks)]
        for (first, (had, before)), (last, (had_after, after)) in itertools.pairwise(own):
            some = steps[first:last]
            waited = min(share * (after - before), max(0.0, sum(some) - (had_after - had)))
            usual = statistics.median_low(some)
            for place in sorted(range(len(some)), key=some.__getitem__, reverse=True):
                less = min(waited, max(0.0, some[place] - usual))
                some[place] -= less
                waited -= less
            longest = _longest(some, max(0.01 * sum(some), sum(some) - waited))
            steps[first:last] = [min(one, longest) for one in some]
        return steps

    def _share_of_others(self):
        """Return the share of the waiting that other programs cause, and not this program's helpers."""
        if self.before is None:
            return 0.0
        (busy, cpu, helpers), (busy_after, cpu_after, helpers_after) = self.before, self._state()
        had = sum(helpers_after[one] - helpers[one] for one in helpers.keys() & helpers_after.keys())
        others = max(0.0, busy_after - busy - had - (cpu_after - cpu))
        return others / (others + had) if others else 0.0

    def _state(self):
        return self._busy(), self.times()[0], self._helpers()

    def _busy(self):
        """Return the seconds in which the CPUs that this process may use had work."""
        with contextlib.suppress(OSError, ValueError, AttributeError), open("/proc/stat") as file:
            names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            lines = [line.split() for line in file if line.startswith("cpu")]
            ticks = sum(sum(map(int, [*one[1:4], *one[6:8]])) for one in lines if one[0] in names)
            return ticks / os.sysconf("SC_CLK_TCK")
        return 0.0

    def _helpers(self):
        """Return the seconds in which each other thread of this process, and each of its children, had a CPU."""
        found, own = {}, threading.get_native_id()
        for process in ("self", *_children()):
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{process}/task"):
                    if int(thread) != own:
                        with (
                            contextlib.suppress(OSError, ValueError),
                            open(f"/proc/{process}/task/{thread}/schedstat") as file,
                        ):
                            found[thread] = int(file.read().split()[0]) / 1e9
        return found


def _longest(times, total):
    """Return the length to which the longest of these times are cut to have this total. It is at most their sum."""
    for place, one in enumerate(sorted(times)):
        equal = total / (len(times) - place)
        if equal <= one:
            return equal
        total -= one
    return max(times)


def _children():
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
                found += file.read().split()
    return found
