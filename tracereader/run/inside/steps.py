"""When does a step of the program end?

With an optimizer's step; where nothing is trained, with the outermost call of a module; or where the user says.
Several optimizers (or modules) that take turns make one step: it ends with the last one of the turn.
"""

import contextlib
import functools
import itertools
import sys
import threading
import time
import types
import weakref

RARE = 8  # what is called this many times less often than another one does not end the steps
WAIT_CALLS, WAIT_S = 64, 20  # after these, calls of modules count even if there is an optimizer that has made no step
REPLAYS = 4  # of one CUDA graph without another end of a step: the graph holds the whole step
PARAMETERLESS = 8  # so many calls of modules without parameters before they count
NO_BACKWARD = -1  # the number of the backward pass outside of any
SEVERAL = -1  # threads call modules
LOOKED_AT = 500  # values in the inputs of a call
OTHERS = 512  # calls of other objects without one that ends a step: the program has gone on to something else


class Turn:
    """Which of several objects is the last one of a turn, such as the generator of a GAN after its discriminator."""

    def __init__(self):
        self.seen = weakref.WeakKeyDictionary()  # object -> [calls, when it was first seen, its latest call]
        self.calls = 0
        self.only = None, None  # a reference to the object that is called alone so far, and its entry

    def ends(self, one):
        """Count a call of this object, and return whether it ends a turn."""
        self.calls += 1
        only, entry = self.only
        if only is not None and only() is one:  # the usual case, which costs least
            entry[0] += 1
            entry[2] = self.calls
            return True
        entry = self.seen.get(one)
        if entry is None:
            entry = self.seen[one] = [0, self.calls, 0]
        entry[0] += 1
        entry[2] = self.calls
        if len(self.seen) == 1:
            self.only = weakref.ref(one), entry
            return True
        self.only = None, None
        entries = list(self.seen.values())
        most = max(each[0] for each in entries)
        # One that has stopped being called, as in an earlier phase, ends no turn any more.
        recent = self.calls - 4 * RARE * len(entries)
        # Of the latest turn, one may be missing still: a GAN's generator after its discriminator's second five steps.
        usual = [each for each in entries if (each[0] + 1) * RARE >= most and each[2] > recent] or entries
        least = min(each[0] for each in usual)
        return entry is max((each for each in usual if each[0] <= least + 1), key=lambda each: each[1])


class Steps:
    """Calls `ended()` at the end of each step, from start() to stop(), in the thread of the program that makes it.

    kind: "optimizer", "module", "graph" or "named" once a step has ended. ends_with: what ended it, in words.
    """

    def __init__(self, torch, ended, step_at=None):
        self.torch, self.ended, self.step_at = torch, ended, step_at
        self.kind = None
        self.undo = []
        self.optimizers, self.modules, self.parameterless, self.graphs = Turn(), Turn(), Turn(), Turn()
        self.replays = weakref.WeakKeyDictionary()  # since the last end of a step
        self.replayed = False
        self.optimizers_made = 0
        self.waits = True  # for the optimizers to make a step
        self.began = time.monotonic()
        self.busy = _Busy()
        self.classes, self.module_undo = set(), []
        self.watches = {}  # the latest watch of each class's calls
        self.module_calls = 0
        self.inside = []  # one entry for each thread that is in an outermost call
        self.inside_s = 0.0  # the time of such calls before steps are timed
        self.together = False  # whether several threads were in outermost calls at a time
        self.caller = None  # the number of the thread that calls modules, or SEVERAL
        self.looks = True  # at the inputs of outermost calls, before steps are timed
        self.inputs = set()  # a number for the shapes of each
        self.with_parameters = weakref.WeakKeyDictionary()
        self.noted = None  # what our watch calls in place of Module.__call__ while the calls of modules are noted
        self.since_backward = None  # calls of modules since the latest backward pass; None before the first one
        self.ender = None  # a reference to the object that ended the latest step
        self.ends_with = step_at  # in words
        self.fast = []  # that one, and what takes the end of its steps, while hasten() is in force
        self.others = 0  # calls of other objects since then
        self.compiling = is_compiling(torch)
        # One call less, where torch.compile alone matters.
        self.traced = getattr(getattr(torch, "compiler", None), "is_dynamo_compiling", self.compiling)
        self.backward = getattr(torch._C, "_current_graph_task_id", lambda: NO_BACKWARD)

    def start(self):
        """Watch for the ends of steps."""
        if self.step_at:
            self.kind = "named"
            self._watch_function() if ":" in self.step_at else self._watch_annotation()
            return
        torch = self.torch
        from torch.optim import optimizer

        traced, fast = self.traced, self.fast

        def stepped(one, args, kwargs):
            if traced():  # a compiled optimizer: its code must not hold this call
                return
            if not fast or fast[0]() is not one or not fast[1]():
                self._optimizer_stepped(one)

        self.undo.append(optimizer.register_optimizer_step_post_hook(stepped).remove)
        kind = optimizer.Optimizer
        make = kind.__init__

        def __init__(one, *args, **kwargs):
            self.optimizers_made += 1
            make(one, *args, **kwargs)

        __init__.__wrapped__ = make
        self._patch(kind, "__init__", __init__)
        call = torch.nn.Module.__call__
        self.usual_call = getattr(call, "beneath", call)  # below the one that changes how modules are called
        self._watch_calls([torch.nn.Module])
        self._watch_compiled_calls()
        self._watch_graphs(getattr(torch.cuda, "CUDAGraph", None))

    def hasten(self, quick):
        """Let the object that ended the latest step end all further ones, until hasten(None).

        quick: takes the end of a step in place of ended() if it returns True. As little as possible is called then: the
        step's work has filled the caches, so that each function takes several times as long as in a loop of its own.
        """
        self.others = 0
        self.fast[:] = (self.ender, quick) if quick is not None and self.since_backward is None else ()

    def _hastened(self, one):
        """Return whether the call of an object is dealt with, because the same object ends each step."""
        if not self.fast:
            return False
        if self.fast[0]() is one:
            self.others = 0
            self.ended()
            return True
        self.others += 1
        if self.others > OTHERS:
            self.fast.clear()
        return bool(self.fast)

    def _ends(self, one):
        self.ender = weakref.ref(one)
        name = type(one).__name__
        self.ends_with = f"{name}.step" if self.kind == "optimizer" else f"a call of {name}"
        if self.kind == "graph":
            self.ends_with = "a replay of a CUDA graph"
        self.ended()

    def _named_ends(self):
        if not self.fast or not self.fast[1]():
            self.ended()

    def stop(self):
        """Take back everything that start() put into the program's torch."""
        self.fast.clear()
        while self.undo:
            self.undo.pop()()
        self.module_undo = []
        self.classes.clear()

    def _patch(self, owner, name, new):
        back = patched(owner, name, new)
        self.undo.append(back)
        return back

    def _optimizer_stepped(self, one):
        if self.compiling() or self._hastened(one):
            return
        if self.backward() != NO_BACKWARD:
            self.waits = False  # the profiler cannot be started there, so that calls of modules end the steps
            return
        if self.kind == "graph":
            return
        if self.replayed:
            self._forget_replays()
        if self.kind != "optimizer" and _is_loader_worker():
            return
        ends = self.optimizers.ends(one)
        if self.kind != "optimizer":
            self.kind = "optimizer"
            self.since_backward = None
            self._forget_modules()
        if ends:
            self._ends(one)

    # Outermost calls of modules.

    def _watch_calls(self, kinds):
        for kind in kinds:
            self._watch_modules(kind)
        if kinds:
            self._watch_backward(self.torch.autograd)

    def _watch_backward(self, autograd):
        backward = autograd.backward

        @functools.wraps(backward)
        def watched(*args, **kwargs):
            result = backward(*args, **kwargs)
            if self.since_backward is None:
                self.modules = Turn()  # before the first backward pass each call counted
                self.fast.clear()
            self.since_backward = 0
            return result

        _keep_from_compiler(self.torch, watched.__code__)
        self.module_undo.append(self._patch(autograd, "backward", watched))

    def _watch_modules(self, kind):
        if kind in self.classes:
            return
        self.classes.add(kind)
        watch = self.watches[kind] = self._watching(kind, kind.__call__)
        self.module_undo.append(self._patch(kind, "__call__", watch))

    def _watching(self, kind, call):
        """Return the function that watches calls of modules of a class. call: what makes them."""
        busy, fast, traced, backward = self.busy, self.fast, self.traced, self.backward
        inside, clock, watches = self.inside, time.perf_counter, self.watches
        is_usual = call is self.usual_call  # otherwise it calls the usual one itself
        # Layers of transformers call nn.Module's __call__ by its name, so that their compiled code holds for that
        # method only. It therefore finds its own: another one would have the model compiled again when we leave.
        usual = self.usual_call if kind is self.torch.nn.Module else None

        def __call__(module, *args, **kwargs):
            # A program may keep a module's call while it makes many steps, as generate() does.
            run = (is_usual and self.noted) or call
            if busy.inside or traced():
                return run(module, *args, **kwargs)
            if fast and fast[0]() is not module:
                self.others += 1
                if self.others <= OTHERS:
                    return run(module, *args, **kwargs)
                fast.clear()
            busy.inside = True
            # A program may keep our method after we have left.
            hidden = usual and self._one_thread_calls() and kind.__call__ is watches.get(kind)
            if hidden:
                kind.__call__ = usual
            counts = not fast
            if counts:
                began = clock()
                inside.append(module)
                self.together = self.together or len(inside) > 1
                if self.looks:
                    self._look_at((*args, *kwargs.values()))
            try:
                result = run(module, *args, **kwargs)
            finally:
                busy.inside = False
                if counts:
                    inside.pop()
                    self.inside_s += clock() - began
                if hidden and kind in self.classes and kind.__call__ is usual:
                    kind.__call__ = watches[kind]
            if fast and backward() == NO_BACKWARD and fast[1]():
                self.others = 0
            else:
                self._called(module)
            return result

        __call__.__wrapped__ = call
        return __call__

    def _watch_compiled_calls(self):
        """Watch calls of modules that the program compiles by themselves, as generate() does with a static cache.

        What torch.compile makes of a module's call does not call our watch any more. It is made of the module's usual
        call, so that nothing of ours is in its code.
        """
        module_kind, make = self.torch.nn.Module, getattr(self.torch, "compile", None)
        if make is None:
            return

        @functools.wraps(make)
        def compile_(model=None, *args, **kwargs):
            module, watch = getattr(model, "__self__", None), getattr(model, "__func__", None)
            if not isinstance(module, module_kind) or watch not in self.watches.values():
                return make(model, *args, **kwargs)
            compiled = make(types.MethodType(watch.__wrapped__, module), *args, **kwargs)
            watching = self._watching(module_kind, lambda _, *args, **kwargs: compiled(*args, **kwargs))

            @functools.wraps(compiled)
            def call(*args, **kwargs):
                return watching(module, *args, **kwargs)

            return call

        self._patch(self.torch, "compile", compile_)

    def _one_thread_calls(self):
        """Return whether one thread has made all calls of modules so far: what it hides, the others do not find."""
        thread = threading.get_ident()
        self.caller = thread if self.caller in (None, thread) else SEVERAL
        return self.caller == thread

    def _forget_modules(self):
        for back in self.module_undo:
            back()
            self.undo.remove(back)
        self.module_undo = []
        self.classes.clear()

    def _called(self, module):
        if self.kind in ("optimizer", "graph") or self.compiling() or self.backward() != NO_BACKWARD:
            return  # a call in backward computes a checkpoint's activations again
        if self._hastened(module) or _is_loader_worker():
            return
        self.module_calls += 1
        if self.replayed:
            self._forget_replays()
        if (
            self.waits
            and self.optimizers_made
            and (self.module_calls < WAIT_CALLS or time.monotonic() < self.began + WAIT_S)
        ):
            return
        has = self.with_parameters.get(module)
        if has is None:
            has = self.with_parameters[module] = next(module.parameters(), None) is not None
        if has:
            if self.since_backward is not None:
                self.since_backward += 1
                if 1 < self.since_backward <= WAIT_CALLS:
                    return  # parameters are changed by hand: the first call after each backward pass ends a step
            ends = self.modules.ends(module)
        else:
            ends = self.parameterless.ends(module)
            if self.modules.calls or self.parameterless.calls < PARAMETERLESS:
                return
        self.kind = "module"
        if ends:
            self._ends(module)

    def _look_at(self, inputs):
        """Remember the shapes of the tensors among these inputs and in what they hold, such as a KV cache."""
        left, shapes = [inputs], []  # what is added to `left` meanwhile is looked at, too
        with contextlib.suppress(Exception):  # such as a nested tensor, which has no shape
            for one in itertools.islice(left, LOOKED_AT):
                if isinstance(one, self.torch.Tensor):
                    shapes.append(tuple(one.shape))
                elif isinstance(one, (list, tuple)):
                    left += one[:LOOKED_AT]
                elif isinstance(one, dict):
                    left += itertools.islice(one.values(), LOOKED_AT)
                elif hasattr(one, "__dict__") and not isinstance(one, type):
                    left.append(vars(one))
            self.inputs.add(hash(tuple(shapes)))  # a generator may bring new ones for a minute

    def narrow(self):
        """Watch the classes of the modules that were called only, so that other calls take no more time."""
        self.looks = False
        if self.kind != "module":
            return
        turn = self.modules if self.modules.calls else self.parameterless
        kinds = {type(one) for one in turn.seen}
        self._forget_modules()
        self._watch_calls(kinds)

    # Replays of a CUDA graph that holds the whole step: nothing else of it is seen.

    def _watch_graphs(self, kind):
        replay_it = getattr(kind, "replay", None)
        if replay_it is None:
            return

        def replay(graph, *args, **kwargs):
            result = replay_it(graph, *args, **kwargs)
            self._replayed(graph)
            return result

        replay.__wrapped__ = replay_it
        self._patch(kind, "replay", replay)

    def _forget_replays(self):
        self.replays.clear()
        self.replayed = False

    def _replayed(self, graph):
        if self.fast and self.fast[0]() is graph and self.fast[1]():
            return
        if self._hastened(graph):
            return  # what ends the steps may replay graphs, and its own end is not counted here meanwhile
        if self.kind != "graph":
            self.replayed = True
            self.replays[graph] = self.replays.get(graph, 0) + 1
            if self.replays[graph] < REPLAYS:
                return
            self.kind = "graph"
            self._forget_modules()
        if self.graphs.ends(graph):
            self._ends(graph)

    # Where the user says.

    def _watch_annotation(self):
        kind, name = self.torch.autograd.profiler.record_function, self.step_at
        leave = kind.__exit__

        def __exit__(one, *args):
            result = leave(one, *args)
            if one.name == name and not self.compiling():
                self._named_ends()
            return result

        self._patch(kind, "__exit__", __exit__)

    def _watch_function(self):
        stopped = threading.Event()
        self.undo.append(stopped.set)

        def look():
            # The function exists when its module has been executed so far; nothing tells when that is.
            while not stopped.wait(0.01):
                if self._wrap_function():
                    return

        threading.Thread(target=look, name="record-trace", daemon=True).start()

    def _wrap_function(self):
        module_name, _, path = self.step_at.partition(":")
        *owners, name = path.split(".")
        main = sys.modules.get("__main__")
        stem = getattr(main, "__file__", None) or ""
        spec = getattr(main, "__spec__", None)
        is_main = module_name in (
            "__main__",
            stem.replace("\\", "/").rpartition("/")[2].removesuffix(".py"),
            spec.name.removesuffix(".__main__") if spec else None,
        )
        owner = main if is_main else sys.modules.get(module_name)
        for each in owners:
            owner = getattr(owner, each, None)
        function = getattr(owner, name, None)
        if not callable(function):
            return False

        @functools.wraps(function, updated=())
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            self._named_ends()
            return result

        self._patch(owner, name, call)
        return True


class _Busy(threading.local):
    inside = False  # the outermost call of a module


def patched(owner, name, new):
    """Set an attribute of a class or a module, and return the function that takes that back."""
    own, old = name in vars(owner), getattr(owner, name)
    setattr(owner, name, new)

    def back():
        if vars(owner).get(name) is new:  # or somebody else has patched it since
            before = old.beneath if getattr(old, "is_over", False) else old  # the search for modules has ended
            setattr(owner, name, before) if own else delattr(owner, name)

    return back


def is_compiling(torch):
    """Return the function that tells whether torch.compile reads the program's code now."""
    compiler = getattr(torch, "compiler", None)
    if hasattr(compiler, "is_compiling"):
        return compiler.is_compiling
    return lambda: "torch._dynamo" in sys.modules and sys.modules["torch._dynamo"].is_compiling()


def _keep_from_compiler(torch, code):
    """Have torch.compile leave a function alone. It would compile it where it breaks a graph."""
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "skip_code"):  # of an older torch
        frames.skip_code(code)
    elif hasattr(frames, "set_code_exec_strategy"):
        action = frames._FrameAction
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))


def _is_loader_worker():
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker.get_worker_info() is not None
