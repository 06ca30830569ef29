"""The way into a program: Python imports this at its start, because its folder is on PYTHONPATH.

It takes itself off sys.path and out of os.environ, runs the sitecustomize that it hides, and waits for `import torch`.
The files beside it are loaded by their paths. They use the standard library and the torch of the program only, because
tracereader may not be installed there.
"""

import atexit
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PLAN = "TRACEREADER_PLAN"
# Without it the profiler prints to stderr. It is written so that no user's value is taken for it.
_QUIET = ("KINETO_LOG_LEVEL", "0099")


def _load(name):
    """Return the module of the file beside this one. No .pyc is written."""
    full = "_tracereader_" + name
    if full not in sys.modules:
        path = os.path.join(_FOLDER, name + ".py")
        module = type(sys)(full)
        module.__file__ = path
        sys.modules[full] = module
        try:
            with open(path, encoding="utf-8") as file:
                exec(compile(file.read(), path, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[full]
            raise
    return sys.modules[full]


class _OnImport:
    """Calls a function when a module has been imported, before the program goes on."""

    def __init__(self, then):
        self.then = then

    def find_spec(self, name, path=None, target=None):
        if name not in self.then:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    self._follow(name, spec.loader)
                return spec
        return None

    def _follow(self, name, loader):
        """Have a loader call the function. Who asks for a module need not import it: transformers asks for torch."""
        execute = loader.exec_module

        def executed(module):
            del loader.exec_module
            execute(module)
            then = self.then.pop(name, None)
            if not self.then and self in sys.meta_path:
                sys.meta_path.remove(self)
            if then is not None:
                then(module)

        loader.exec_module = executed


def _begin(torch):
    """Start what the plan says. A mistake of ours must not end the program: it is told in the folder of results."""
    if sys.modules.get("sitecustomize") is _this:  # Python's import needed it there until now
        del sys.modules["sitecustomize"]
    global _session
    try:
        _session = _load("session").begin(torch, _plan_path, _load)
    except Exception:
        import traceback

        folder = os.path.dirname(_plan_path)
        try:
            with open(os.path.join(folder, f"error-{os.getpid()}.txt"), "w") as file:
                file.write(traceback.format_exc())
        except OSError:
            pass


def _leave():
    """End a run of try-changes at once, after all that it does at its exit: to take torch apart can take seconds."""
    one = _session
    if one is None or not one.exits or one.plan["changes"] is None or os.getpid() != one.pid:
        return
    import contextlib
    import gc
    import io

    kinds = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom
    # isinstance() would ask an object for its class, which a weak reference to a deleted one cannot say.
    for file in [each for each in gc.get_objects() if issubclass(type(each), kinds)]:
        with contextlib.suppress(OSError, ValueError):
            file.flush()  # a file that is still open would be written now
    os._exit(0)


def _with_us(environment):
    """Return a copy of a child's environment with the way in; the same object if it is none of this program's."""
    if environment is None or _PLAN in environment or os.environ.get("PATH") != environment.get("PATH"):
        return environment
    path = environment.get("PYTHONPATH")
    ours = {_PLAN: _plan_path, "PYTHONPATH": _FOLDER + (os.pathsep + path if path else "")}
    return {**environment, **ours, **_quiet}


def _follow_children(subprocess):
    """Give children with an environment of their own, as torchrun starts its ranks, the way in."""
    start = subprocess.Popen.__init__
    names = start.__code__.co_varnames[: start.__code__.co_argcount]
    position = names.index("env") - 1 if "env" in names else -1

    def __init__(self, *args, **kwargs):
        if kwargs.get("env") is not None:
            kwargs["env"] = _with_us(kwargs["env"])
        elif 0 <= position < len(args):
            args = (*args[:position], _with_us(args[position]), *args[position + 1 :])
        start(self, *args, **kwargs)

    __init__.__wrapped__ = start
    subprocess.Popen.__init__ = __init__


def _hide():
    """Take the way in out of what the program sees. C's environment keeps it, and children inherit that one."""
    seen = os.environ._data
    seen.pop(os.environ.encodekey(_PLAN), None)
    for name in _quiet:
        seen.pop(os.environ.encodekey(name), None)
    key = os.environ.encodekey("PYTHONPATH")
    entries = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one != _FOLDER]
    if entries:
        seen[key] = os.environ.encodevalue(os.pathsep.join(entries))
    else:
        seen.pop(key, None)


_this = sys.modules.get("sitecustomize")
sys.path[:] = [one for one in sys.path if one != _FOLDER]
_plan_path = os.environ.get(_PLAN)
_quiet = dict([_QUIET]) if os.environ.get(_QUIET[0]) == _QUIET[1] else {}
_session = None
if _plan_path and os.path.isfile(_plan_path):
    _hide()
    atexit.register(_leave)  # first, so that it comes last
    try:
        with open(os.path.join(os.path.dirname(_plan_path), "entered"), "a"):
            pass
    except OSError:
        pass
    _execve = os.execve

    def _replaced(path, args, env):
        return _execve(path, args, _with_us(env))

    os.execve = _replaced
    _then = {"torch": _begin, "subprocess": _follow_children}
    if "subprocess" in sys.modules:
        _follow_children(sys.modules["subprocess"])
        del _then["subprocess"]
    sys.meta_path.insert(0, _OnImport(_then))

# The sitecustomize that this one hides. Its errors are Python's to tell, as without us.
sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401
except ImportError as problem:
    if problem.name != "sitecustomize":
        raise
    if _this is not None:
        sys.modules["sitecustomize"] = _this
