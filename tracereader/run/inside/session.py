"""One process of the program: whether it is measured, what all ranks do at the same step, and its result."""

import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import weakref

OLDEST = 2, 1  # torch. Hooks on all optimizers came with 2.0; what came later is looked for before it is used
AHEAD = 3  # steps between a rank's decision and the step at which all ranks follow it
RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
LOCAL_WORLD = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# Steps of several threads, none of which ran beside another, and the seconds after which fewer are enough.
TURNS, TURNS_S = 100, 3
TURNS_SHARE = 0.3  # of the time, at least, that one of them is in its step
THREADS_S = 10  # for threads that make no steps, to end by themselves after the main one
END = getattr(signal, "SIGRTMAX", None)  # of the signals that have no other use


def begin(torch, plan_path, load):
    """Start what the plan says, in this process. load: returns a module of this folder by its name."""
    with open(plan_path, encoding="utf-8") as file:
        plan = json.load(file)
    if tuple(int(one) for one in torch.__version__.split(".")[:2]) < OLDEST:
        with open(os.path.join(plan["folder"], f"error-{os.getpid()}.txt"), "w", encoding="utf-8") as file:
            file.write(f"torch {torch.__version__} is too old; it has to be {OLDEST[0]}.{OLDEST[1]} or newer")
        return None
    session = Session(torch, plan, load)
    session.start()
    return session


class Session:
    """What is done in this process. It does nothing before the first step, and nothing in a process without steps."""

    def __init__(self, torch, plan, load):
        self.torch, self.plan, self.load = torch, plan, load
        self.folder = plan["folder"]
        self.pid = os.getpid()
        self.made = None
        self.listens = False  # whether a signal ends the program by an exception in its main thread
        self.fresh()

    def fresh(self):
        """Forget what was counted: at the start, and in a child that was forked."""
        self.claimed = None  # None: no step yet. False: another process is measured. True: this one is
        self.why = "ended"
        self.result = {}
        self.over = False
        self.exits = 0
        self.settled = None  # whether this process leads, once that is known
        self.decisions = {}
        self.thread = None
        self.turns = None  # since when it is watched whether several threads take turns, and their calls' time then
        self.elsewhere = 0  # steps in other threads than the one that is measured
        self.threads = weakref.WeakSet()  # these threads
        self.roams = False  # whether each step is measured in the thread that makes it, because these end
        self.lock = threading.Lock()
        self.steps = self.load("steps").Steps(self.torch, self.step_ended, self.plan.get("step_at"))
        kind = self.load("recording").Recording if self.plan["mode"] == "record" else Timing
        self.work = kind(self)

    def start(self):
        """Watch for steps. Make the plan's changes first, if it has any."""
        if self.plan.get("changes") is not None:
            changes = self.load("changes")
            self.made = changes.install(self.torch, self.plan["changes"], self.plan.get("look", False))
            changes.seed(self.torch)
        self.steps.start()
        self._listen()
        self._write("imported", "")
        atexit.register(self.at_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forked)

    def _listen(self):
        """Have a signal end the program as end_program() does, for steps that another thread makes."""

        def end(number, frame):
            raise SystemExit(0)

        in_main = threading.current_thread() is threading.main_thread()
        if END is not None and in_main and not self.plan.get("go_on") and signal.getsignal(END) is signal.SIG_DFL:
            signal.signal(END, end)
            self.listens = True

    def forked(self):
        """Begin again in the child of a fork. Another process is measured, so it records only if that one does not."""
        if self.over:
            return
        self.pid = os.getpid()
        self.steps.stop()
        self.work.close()
        self.fresh()
        self.steps.start()

    # What the launcher says of this process.

    @property
    def rank(self):
        return self._distributed("get_rank", RANKS, 0)

    @property
    def world_size(self):
        return self._distributed("get_world_size", WORLD, 1)

    def _distributed(self, asked, names, default):
        distributed = sys.modules.get("torch.distributed")
        try:
            if distributed is not None and distributed.is_available() and distributed.is_initialized():
                return getattr(distributed, asked)()
        except Exception:
            pass
        return _number(names, default)

    @property
    def local_world_size(self):
        return _number(LOCAL_WORLD, self.world_size)

    @property
    def leads(self):
        """Whether this process decides for all that are on this machine."""
        if self.settled is not None:
            return self.settled
        return self.world_size == 1 or _number(LOCAL_RANKS, self.rank) == 0

    def settle(self):
        """Ask no more whether this process leads: that takes as long as some ops, and steps are timed from now on."""
        self.settled = self.leads

    # Steps.

    def step_ended(self):
        if self.over:
            return
        thread = threading.current_thread()
        if self.claimed is None:
            with self.lock:  # several threads may end their first step now
                if self.claimed is None:
                    self.thread = thread  # no number of it: a later thread may get the same one
                    self.claimed = self.claim()
                    if self.claimed and self.local_world_size == 1:  # other ranks look like other programs
                        self.work.measuring.contention = self.load("contention").Contention()
            if not self.claimed:
                self.finish()
        if not self.claimed:
            return
        if thread is not self.thread and not self._follows(thread):
            return
        if self.made is not None:
            self.made.step_ended()
            self.work.measuring.stock = self.made.stock
        with self.lock:
            try:
                self.work.ended()
            except Exception as problem:
                if self.exits:  # pytest's own way to end is an Exception
                    raise
                self.fail(problem)  # ours: it must not end the program

    def _follows(self, thread):
        """Return whether to go on in another thread: the one before has ended, as in a server with one per request."""
        self.threads.add(thread)
        if not self.roams:
            if self.thread.is_alive() or self.result:
                self.elsewhere += 1
                return False
            if not self.work.can_roam():
                self.why = (
                    "each of its steps runs in a new thread, and the profiler follows one thread; have one make all "
                    "steps, as a server without threads does, or use a newer torch"
                )
                self.write_result()
                self.finish()
                return False
            self._roam()
        self.thread = thread
        return True

    def _roam(self):
        self.roams, self.elsewhere = True, 0
        self.work.measuring.contention = None  # it counts what one thread waits

    def takes_in(self):
        """Return whether the warm-up goes on, to see whether the steps of several threads are those of one program.

        They are if the threads make them in turn, as a pool of threads does that serves one request at a time: a step
        of one of them would last until it is that thread's turn again. The warm-up begins again then.
        """
        if self.roams or not self.elsewhere or self.steps.kind != "module" or self.steps.together:
            return False
        if not self.work.can_roam():
            return False
        now, inside_s = time.perf_counter(), self.steps.inside_s
        since, before = self.turns = self.turns or (now, inside_s)
        if self.elsewhere >= TURNS or now > since + TURNS_S:
            if inside_s - before < TURNS_SHARE * (now - since):
                return False  # short calls of threads that do not know of each other seldom meet
            self._roam()
            self.work.measuring.warm_up_again()
        return True

    def claim(self):
        """Take this rank for this process. A process that has ended without a result has lost it."""
        path = os.path.join(self.folder, f"claim-{self.rank}")
        for _ in range(3):
            try:
                with open(path, "x") as file:
                    file.write(str(self.pid))
                return True
            except FileExistsError:
                try:
                    with open(path) as file:
                        other = int(file.read() or 0)
                except (OSError, ValueError):
                    return False
                if not other or _lives(other) or os.path.exists(self._path(f"done-{self.rank}")):
                    return False
                try:
                    os.unlink(path)
                except OSError:
                    return False
        return False

    def decide(self, what, value=True):
        """Have all ranks of this machine do `what` at the same step, a few steps from now; at once without ranks."""
        if what in self.decisions:
            return
        alone = self.local_world_size == 1
        self.decisions[what] = (self.work.steps + (0 if alone else AHEAD), value)
        if not alone:
            self._write("decision-" + what, json.dumps(self.decisions[what]))

    def due(self, what):
        """Return what was decided if this step is the one at which it is done, or a later one; otherwise None."""
        if what not in self.decisions:
            if self.leads:
                return None
            try:
                with open(self._path("decision-" + what)) as file:
                    self.decisions[what] = tuple(json.load(file))
            except (OSError, ValueError):
                return None
        step, value = self.decisions[what]
        return value if self.work.steps >= step else None

    # The end.

    def finish(self):
        """Take everything back that was put into torch."""
        self.over = True
        self.steps.stop()
        self.work.close()

    def fail(self, problem):
        self.why = f"{type(problem).__name__}: {problem}"
        self.write_result()
        self.finish()

    def done(self):
        """Tell that this rank has its result. The program ends when all ranks of this machine have theirs."""
        self.write_result()
        self._write(f"done-{self.rank}", "")

    def all_are_done(self):
        return len([one for one in os.listdir(self.folder) if one.startswith("done-")]) >= self.local_world_size

    def end_program(self):
        """End the program by an exception that lets it clean up. Another one follows if it was caught."""
        self.exits += 1
        if self.exits >= 3:
            self.finish()
        self.steps.stop()
        outside = threading.current_thread() is not threading.main_thread()
        if outside:
            self.finish()
            if not self.listens:
                return  # an exception would end this thread only: the command ends the program
            signal.pthread_kill(threading.main_thread().ident, END)
        if self.exits == 1:
            with contextlib.suppress(AttributeError, RuntimeError):  # Python has no public name for this
                threading._register_atexit(self._end_threads)
        if outside and self.roams:
            return  # it may end by itself, and answer its request before
        outcomes = sys.modules.get("_pytest.outcomes")
        if outcomes is not None and "PYTEST_CURRENT_TEST" in os.environ:
            raise outcomes.Exit("the steps are measured", 0)
        with contextlib.suppress(Exception):  # asyncio prints what a task raised and nobody asked for
            sys.modules["asyncio"].current_task().add_done_callback(lambda task: task.cancelled() or task.exception())
        raise SystemExit(0)

    def _end_threads(self):
        """End the threads for which Python would wait after the main one: those with steps at once, others in a while.

        The threads of a pool are left out. It ends them itself, and would print an exception between two tasks.
        """
        pools = getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", ())
        waiting = {one for one in threading.enumerate() if not one.daemon} - {threading.main_thread(), *pools}
        until = time.monotonic() + THREADS_S
        for one in sorted(waiting, key=lambda one: one not in self.threads):
            if one not in self.threads:
                one.join(max(0.0, until - time.monotonic()))
            if one.is_alive():
                number, kind = ctypes.c_ulong(one.ident), ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, kind)

    def at_exit(self):
        if os.getpid() == self.pid and self.claimed and not self.result:
            self.write_result()
            if self.roams:
                self.finish()  # its profiler runs on in no thread

    def write_result(self):
        torch = self.torch
        self.result = {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_world_size": self.local_world_size,
            "pid": self.pid,
            "steps": self.work.steps,
            "elsewhere": self.elsewhere,
            "can_exit": self.listens or self.thread is threading.main_thread(),
            "kind": self.steps.kind,
            "ends_with": self.steps.ends_with,
            "page_faults": self.work.measuring.faults,
            "why": self.why,
            "peak_bytes": torch.cuda.max_memory_allocated() if _on_gpu(torch) else None,
            **self.work.facts(),
            **(self.made.facts() if self.made is not None else {}),
        }
        self._write(f"{self.pid}.json", json.dumps(self.result))

    def _path(self, name):
        return os.path.join(self.folder, name)

    def _write(self, name, text):
        temporary = self._path(f"{name}.{self.pid}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, self._path(name))
        except OSError:  # the command has ended, and its folder with it
            pass


class Timing:
    """Times the steps without the profiler, and then ends the program."""

    def __init__(self, session):
        self.session, plan = session, session.plan
        measuring = session.load("measuring")
        self.measuring = measuring.Measuring(
            session.torch, plan.get("skip", 5), plan.get("least", 10), plan.get("seconds", 1.0), plan.get("most"),
            plan.get("slow_us"),
        )  # fmt: skip
        self.steps_us, self.wall_us = [], None

    @property
    def steps(self):
        return self.measuring.steps

    def ended(self):
        session, measuring = self.session, self.measuring
        measuring.ended()
        if self.steps_us:
            if session.leads and session.all_are_done():
                session.decide("end")
            if session.due("end"):
                session.end_program()
        elif measuring.measuring:
            if session.leads and measuring.enough:
                session.decide("stop")
            if session.due("stop"):
                self.wall_us = sum(measuring.so_far())
                self.steps_us = measuring.finish()
                session.why = "measured"
                session.done()
                if session.local_world_size == 1:
                    session.end_program()
        else:
            if session.leads and measuring.ready and not session.takes_in():
                session.decide("time")
            if session.due("time"):
                session.steps.narrow()
                session.settle()
                measuring.begin()

    def can_roam(self):
        """Whether steps can be timed in several threads, one after another."""
        return True

    def close(self):
        """Take back what was put into torch: nothing."""

    def facts(self):
        return {"steps_us": self.steps_us, "wall_us": self.wall_us, "steady": self.measuring.steady}


def _number(names, default):
    for name in names:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return default


def _lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _on_gpu(torch):
    return torch.cuda.is_available() and torch.cuda.is_initialized()
