"""Changes of a running program, by key, made without an edit of its code; and what the program is made of.

try-changes loads this file by its path into the user's program. It uses the standard library and the torch of that
program only. install() is called when `import torch` has ended and before the program goes on.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import os
import random
import sys
import sysconfig

SEED = 0
SETTLED_AFTER = 3  # steps, after which nearly everything that stays is there
FROZEN = "frozen_parameters"
GUARDED_UNTIL = 5  # steps, after which what torch.compile compiles is compiled
NUDGED = "nudged"  # the key of a run that shows how far rounding changes the losses
TF32_ROUNDING = 2**-11
FOUND_BY = 2  # steps, in which the outermost modules have been called
WORKERS_LEAST, WORKERS_MOST = 4, 16
LOSSES_KEPT, OUTPUTS_KEPT, VALUES_KEPT = 64, 3, 1024

HERE = os.path.dirname(os.path.abspath(__file__))
COMPILE_MODES = {"compile": None, "compile_reduce_overhead": "reduce-overhead", "compile_max_autotune": "max-autotune"}
ATTENTION = ("flash", "mem_efficient", "cudnn")


class Changes:
    """The changes that are made in this process, and what was seen of the program.

    applied: how often each change found something to change, by key. refused: torch's reason where it did not allow
    one. seen: the objects that decide which changes can be made, each with the line that made it. outputs: numbers of
    what the outermost modules returned first.
    """

    def __init__(self, torch, keys, look=False):
        self.torch, self.keys, self.look = torch, frozenset(keys), look
        self.applied = dict.fromkeys(keys, 0)
        self.refused = {}
        self.seen = {"modules": [], "optimizers": [], "loaders": [], "ddp": [], "checkpoints": [], "copies": []}
        self.seen.update(attention=[], zero_grad=[], compiled=[], unused=[], anomaly=[])
        self.outputs, self._losses = [], []
        self.stock = 0  # the batches that the workers of the loaders prepare ahead
        self.steps = 0
        self._searching, self._ends = False, []
        self._known = {}
        self._outermost, self._optimizers = [], []  # until it is known which gradients no optimizer uses

    # What measuring calls.

    def step_ended(self):
        """Tell that a step has ended."""
        self.steps += 1
        if self.steps >= FOUND_BY and self._ends:
            self._ends = [end for end in self._ends if not end()]
        if self.steps == SETTLED_AFTER and "gc_freeze" in self.keys:
            gc.collect()
            gc.freeze()
            self.applied["gc_freeze"] += 1
        if self.steps == SETTLED_AFTER and (self.look or FROZEN in self.keys):
            self._find_unused_gradients()
        if self.steps == GUARDED_UNTIL and "skip_guards" in self.keys:
            self._skip_guards()

    def _find_unused_gradients(self):
        """Find the parameters that get gradients and that no optimizer has; stop their gradients if that is wanted."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        used = {id(one) for group in groups for one in group["params"]}
        for module, place in self._outermost if used else ():
            unused = [one for one in module.parameters() if one.grad is not None and id(one) not in used]
            if unused and self.look:
                numbers = sum(one.numel() for one in unused)
                self.seen["unused"].append({**place, "name": type(module).__name__, "parameters": numbers, "calls": 1})
            if unused and FROZEN in self.keys:
                self.applied[FROZEN] += 1
                for one in unused:
                    one.requires_grad_(False)
                    one.grad = None
        self._outermost.clear()
        self._optimizers.clear()

    def _skip_guards(self):
        """Let compiled code run without checks whether it fits its inputs. torch raises an error if it must compile."""
        try:
            self.torch.compiler.set_stance(skip_guard_eval_unsafe=True)
            self.applied["skip_guards"] += 1
        except (AttributeError, TypeError):
            self.refused["skip_guards"] = "this torch cannot skip them"

    def facts(self):
        """Return what was seen, what was applied and what was refused, as JSON can hold it."""
        torch = self.torch
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return {
            "applied": dict(self.applied),
            "refused": dict(self.refused),
            "losses": [float(one) for one in self._losses],
            "outputs": self.outputs,
            "stock": self.stock,
            "seen": {
                **self.seen,
                "torch": str(torch.__version__),
                "device": "cuda" if cuda else "cpu",
                "gpu": torch.cuda.get_device_name() if cuda else "",
                "capability": list(torch.cuda.get_device_capability()) if cuda else [],
                "hip": bool(getattr(torch.version, "hip", None)),
                "threads": torch.get_num_threads(),
                "workers": workers(),
                "tf32": self._tf32(),
                "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
            },
        }

    def _tf32(self):
        try:
            return self.torch.get_float32_matmul_precision() != "highest"
        except RuntimeError:  # the program has set the new names, and torch refuses to mix them with the old ones
            return True

    # How changes are made.

    def make(self):
        """Make the changes that need no object of the program, and watch for the objects that the others need."""
        torch = self.torch
        if "tf32" in self.keys:
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
            self.applied["tf32"] += 1
        if "cudnn_benchmark" in self.keys:
            torch.backends.cudnn.benchmark = True
            self.applied["cudnn_benchmark"] += 1
        for name in ATTENTION:
            if f"attention_{name}" in self.keys:
                self._only_attention(name)
        if self.look or "no_checkpoint" in self.keys:
            self._patch_checkpoint()
        self._patch_optimizers()
        self._patch_loader()
        if self.look or self.keys & {"non_blocking", "pin_memory"}:
            self._patch_copies()
        if self.look or "set_to_none" in self.keys:
            self._patch_zero_grad()
        if self.look or "no_anomaly_detection" in self.keys:
            self._patch_anomaly_detection()
        if self.look or any(key.startswith("ddp_") for key in self.keys):
            self._patch_ddp()
        if self.look:
            self._watch_attention()
        if "static_cache" in self.keys:
            self._patch_generate()
        self._search_modules()
        self._keep_losses()

    def _only_attention(self, name):
        backends = self.torch.backends.cuda
        for other in ATTENTION:
            switch = getattr(backends, f"enable_{other}_sdp", None)  # cuDNN's came with torch 2.5
            if switch is not None:
                switch(other == name)
            elif other == name:
                self.refused[f"attention_{name}"] = "this torch does not have it"
                return
        self.applied[f"attention_{name}"] += 1

    def _patch_checkpoint(self):
        module = importlib.import_module("torch.utils.checkpoint")  # which torch 2.4 does not import by itself
        original = module.checkpoint
        if "no_checkpoint" in self.keys:
            changed = _without_checkpoint(self._counted("no_checkpoint"))
        else:

            def changed(*args, **kwargs):
                self._see("checkpoints")
                return original(*args, **kwargs)

        module.checkpoint = functools.wraps(original)(changed)

    def _trace_checkpoints(self):
        """Let torch.compile trace our checkpoint: it makes one of what has that name, without looking into it."""
        if "no_checkpoint" in self.keys:
            for name, module in list(sys.modules.items()):
                if name.startswith("torch._dynamo.") and hasattr(module, "is_utils_checkpoint"):
                    module.is_utils_checkpoint = lambda obj: False

    def _counted(self, key):
        """Return a function that counts an application once. It is cheap enough for a call in each step."""

        def count():
            if not self.applied[key]:
                self.applied[key] = 1

        return count

    def _patch_optimizers(self):
        optim = self.torch.optim
        if self.look:
            self._wrap_init(optim.Optimizer, self._see_optimizer)
        if self.look or FROZEN in self.keys:
            self._wrap_init(optim.Optimizer, self._optimizers.append)
        wanted = [name for name in ("fused", "foreach") if f"{name}_optimizer" in self.keys]
        for kind in {one for one in vars(optim).values() if isinstance(one, type)} if wanted else ():
            takes = inspect.signature(kind.__init__).parameters
            for name in wanted:
                if name in takes:
                    self._make_optimizers(kind, name)

    def _make_optimizers(self, kind, name):
        original, signature = kind.__init__, inspect.signature(kind.__init__)
        key = f"{name}_optimizer"

        @functools.wraps(original)
        def init(optimizer, *args, **kwargs):
            if getattr(optimizer, "_changed", False):  # AdamW's calls Adam's
                return original(optimizer, *args, **kwargs)
            given = signature.bind(optimizer, *args, **kwargs)
            for one in ("fused", "foreach"):
                if one in signature.parameters:
                    given.arguments[one] = True if one == name else None
            # The parameters may be a generator, which two attempts cannot both read.
            given.arguments["params"] = list(given.arguments["params"])
            optimizer._changed = True
            before = dict(optimizer.__dict__)
            try:
                result = original(*given.args, **given.kwargs)
            except (RuntimeError, ValueError) as problem:
                self.refused[key] = _one_line(problem)
                optimizer.__dict__.clear()
                optimizer.__dict__.update(before)
                given.arguments[name] = None
                result = original(*given.args, **given.kwargs)
            else:
                self.applied[key] += 1
            finally:
                optimizer.__dict__.pop("_changed", None)
            return result

        kind.__init__ = init

    def _see_optimizer(self, optimizer):
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        kind = type(optimizer)
        offers = inspect.signature(kind.__init__).parameters if kind.__module__.startswith("torch.") else ()
        self._see(
            "optimizers",
            once=False,
            name=kind.__name__,
            torchs=kind.__module__.startswith("torch."),
            offers=[name for name in ("fused", "foreach") if name in offers],
            fused=optimizer.defaults.get("fused"),
            foreach=optimizer.defaults.get("foreach"),
            parameters=len(parameters),
            device=parameters[0].device.type if parameters else "",
        )

    def _wrap_init(self, kind, after):
        original = kind.__init__

        @functools.wraps(original)
        def init(one, *args, **kwargs):
            original(one, *args, **kwargs)
            after(one)

        kind.__init__ = init

    def _patch_loader(self):
        kind = self.torch.utils.data.DataLoader
        original, signature = kind.__init__, inspect.signature(kind.__init__)

        @functools.wraps(original)
        def init(loader, *args, **kwargs):
            given = signature.bind(loader, *args, **kwargs)
            had = given.arguments.get("num_workers", 0)
            if self.look:
                dataset = given.arguments.get("dataset")
                self._see(
                    "loaders",
                    once=False,
                    workers=had,
                    pin_memory=bool(given.arguments.get("pin_memory", False)),
                    persistent=bool(given.arguments.get("persistent_workers", False)),
                    iterable=not hasattr(dataset, "__getitem__"),
                    dataset=type(dataset).__name__,
                )
            if "workers" in self.keys and had < workers():
                given.arguments.update(num_workers=workers(), persistent_workers=True)
                self.applied["workers"] += 1
            if "persistent_workers" in self.keys and given.arguments.get("num_workers", 0):
                given.arguments["persistent_workers"] = True
                self.applied["persistent_workers"] += 1
            if "pin_memory" in self.keys:
                given.arguments["pin_memory"] = True
                self.applied["pin_memory"] += 1
            ahead = given.arguments.get("num_workers", 0) * (given.arguments.get("prefetch_factor") or 2)
            self.stock = max(self.stock, ahead)
            return original(*given.args, **given.kwargs)

        kind.__init__ = init

    def _patch_copies(self):
        torch = self.torch
        wanted = bool(self.keys & {"non_blocking", "pin_memory"})
        count = self._counted("non_blocking") if "non_blocking" in self.keys else lambda: None

        def patch(name, goes_to_gpu):
            original = getattr(torch.Tensor, name)

            @functools.wraps(original)
            def copied(tensor, *args, **kwargs):
                if goes_to_gpu(args, kwargs) and not tensor.is_cuda:
                    if wanted and len(args) < 2:
                        count()
                        kwargs["non_blocking"] = True
                    elif self.look and not kwargs.get("non_blocking"):
                        self._see("copies")
                return original(tensor, *args, **kwargs)

            setattr(torch.Tensor, name, copied)

        def names_gpu(args, kwargs):
            target = kwargs.get("device", args[0] if args else None)
            if isinstance(target, str):
                return target.startswith("cuda")
            return isinstance(target, torch.device) and target.type == "cuda"

        patch("to", names_gpu)
        patch("cuda", lambda args, kwargs: True)

    def _patch_zero_grad(self):
        for kind in (self.torch.optim.Optimizer, self.torch.nn.Module):
            original = kind.zero_grad

            @functools.wraps(original)
            def zero_grad(one, set_to_none=True, original=original):
                if not set_to_none:
                    if "set_to_none" in self.keys:
                        self.applied["set_to_none"] = 1
                        set_to_none = True
                    elif self.look:
                        self._see("zero_grad")
                return original(one, set_to_none)

            kind.zero_grad = zero_grad

    def _patch_anomaly_detection(self):
        original = self.torch.set_anomaly_enabled  # which the context managers and set_detect_anomaly() call

        @functools.wraps(original)
        def set_enabled(enabled, *args, **kwargs):
            if enabled and "no_anomaly_detection" in self.keys:
                self.applied["no_anomaly_detection"] = 1
                enabled = False
            elif enabled:
                self._see("anomaly")
            return original(enabled, *args, **kwargs)

        self.torch.set_anomaly_enabled = set_enabled

    def _patch_ddp(self):
        kind = self.torch.nn.parallel.DistributedDataParallel
        original, signature = kind.__init__, inspect.signature(kind.__init__)
        options = {
            "ddp_bucket": {"bucket_cap_mb": 100},
            "ddp_static_graph": {"static_graph": True, "find_unused_parameters": False},
            "ddp_no_buffers": {"broadcast_buffers": False},
            "ddp_bucket_view": {"gradient_as_bucket_view": True},
        }

        @functools.wraps(original)
        def init(ddp, *args, **kwargs):
            given = signature.bind(ddp, *args, **kwargs)
            if self.look:
                self._see(
                    "ddp",
                    once=False,
                    bucket_cap_mb=given.arguments.get("bucket_cap_mb"),
                    static_graph=bool(given.arguments.get("static_graph")),
                    broadcast_buffers=bool(given.arguments.get("broadcast_buffers", True)),
                    gradient_as_bucket_view=bool(given.arguments.get("gradient_as_bucket_view")),
                    buffers=sum(1 for _ in given.arguments["module"].buffers()),
                )
            for key, values in options.items():
                if key in self.keys:
                    given.arguments.update(values)
                    self.applied[key] += 1
            return original(*given.args, **given.kwargs)

        kind.__init__ = init

    def _keep_losses(self):
        """Keep the first numbers on which backward is called, without waiting for them."""
        torch = self.torch
        autograd, original = torch.autograd, torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors, *args, **kwargs):
            one = tensors[0] if isinstance(tensors, (tuple, list)) and len(tensors) == 1 else tensors
            if len(self._losses) < LOSSES_KEPT and isinstance(one, torch.Tensor) and one.numel() == 1:
                self._losses.append(one.detach().clone())  # a CUDA graph overwrites its outputs
            return original(tensors, *args, **kwargs)

        autograd.backward = backward

    def _watch_attention(self):
        functional = self.torch.nn.functional
        original = functional.scaled_dot_product_attention

        @functools.wraps(original)
        def attention(query, *args, **kwargs):
            with contextlib.suppress(Exception):  # such as in a trace of torch.compile
                self._see("attention", dtype=str(query.dtype).removeprefix("torch."), device=query.device.type)
            return original(query, *args, **kwargs)

        functional.scaled_dot_product_attention = attention

        def end():
            functional.scaled_dot_product_attention = original
            return True

        self._ends.append(end)

    def _patch_generate(self):
        """Give generate() of transformers a static cache, once the program makes a module that has this method."""
        kind = self.torch.nn.Module
        make = kind.__init__

        @functools.wraps(make)
        def __init__(module, *args, **kwargs):
            make(module, *args, **kwargs)
            mixin = next((one for one in type(module).__mro__ if one.__name__ == "GenerationMixin"), None)
            if mixin is not None and kind.__init__ is __init__:
                kind.__init__ = make
                mixin.generate = self._with_static_cache(mixin.generate)

        kind.__init__ = __init__

    def _with_static_cache(self, generate):
        @functools.wraps(generate)
        def changed(model, *args, **kwargs):
            config = kwargs.get("generation_config") or model.generation_config
            given = (
                kwargs.get(name) for name in ("cache_implementation", "past_key_values", "cache", "assistant_model")
            )
            if all(one is None for one in (getattr(config, "cache_implementation", ""), *given)):
                kwargs["cache_implementation"] = "static"
                self.applied["static_cache"] += 1
            return generate(model, *args, **kwargs)

        return changed

    # The outermost modules.

    def _search_modules(self):
        """Find the modules that the program calls itself, in the first steps, and change how they are called.

        nn.Module's own __call__ is put back during each call and after the search, because torch.compile traces it.
        """
        torch = self.torch
        kind = torch.nn.Module
        original, compile_ = kind.__call__, torch.compile
        modes = [mode for key, mode in COMPILE_MODES.items() if mode and key in self.keys]

        @functools.wraps(original)
        def found(module, *args, **kwargs):
            if not self._searching:
                return original(module, *args, **kwargs)
            before = self._put_back(original)
            try:
                is_new = self._adopt(module, args, kwargs)
                result = module(*args, **kwargs)
                if is_new and len(self.outputs) < OUTPUTS_KEPT:
                    self._keep_output(result)
                return result
            finally:
                kind.__call__ = before

        @functools.wraps(compile_)
        def compiled(model=None, **kwargs):
            if model is not None and self.look:
                self._see("compiled", mode=kwargs.get("mode"))
            if modes and kwargs.get("mode") in (None, "default") and kwargs.get("options") is None:
                kwargs["mode"] = modes[0]
                self.applied[next(key for key, mode in COMPILE_MODES.items() if mode == modes[0])] += 1
            before = self._put_back(original)  # the compiled module keeps the method that it finds
            try:
                return compile_(model, **kwargs)
            finally:
                kind.__call__ = before
                self._trace_checkpoints()

        def end():
            self._searching = False
            found.is_over = True  # what counts steps may have patched it since, and then takes it back
            if kind.__call__ is found:
                kind.__call__ = original
            return kind.__call__ is original

        found.beneath = original
        kind.__call__ = found
        torch.compile = compiled
        self._searching = True
        self._ends.append(end)

    def _put_back(self, original):
        """Give nn.Module its own __call__, and return the one that it had."""
        kind = self.torch.nn.Module
        before, kind.__call__ = kind.__call__, original
        return before

    def _adopt(self, module, args, kwargs):
        torch = self.torch
        outer, is_compiled = module, hasattr(module, "_orig_mod")  # torch.compile(module) made it
        module = getattr(module, "_orig_mod", module)
        if id(module) in self._known:
            return False
        for one in module.modules():  # kept, so that no other module gets its id
            self._known[id(one)] = one  # a part is also called alone where activations are recomputed
        first = next(module.parameters(), None)
        if first is None:
            return False
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        if self.look or FROZEN in self.keys:
            self._outermost.append((module, where(torch)))
        if self.look:
            kinds = {type(one) for one in module.modules()}
            self._see(
                "modules",
                once=False,
                name=type(module).__name__,
                device=first.device.type,
                dtype=str(first.dtype).removeprefix("torch."),
                parameters=sum(one.numel() for one in module.parameters()),
                convolutions=any(issubclass(one, torch.nn.modules.conv._ConvNd) for one in kinds),
                four_dimensions=any(one.dim() == 4 for one in given),
                gradients=torch.is_grad_enabled(),
                inference=torch.is_inference_mode_enabled(),
                training=module.training,
                autocast=_autocast_is_on(torch, first.device.type),
                compiled=is_compiled or getattr(module, "_compiled_call_impl", None) is not None,
            )
        if NUDGED in self.keys and torch.is_grad_enabled():
            self._nudge(module)
        has_slot = hasattr(torch.nn.Module, "_compiled_call_impl")  # since torch 2.2
        was_compiled = is_compiled or (has_slot and outer._compiled_call_impl is not None)
        before = outer._compiled_call_impl if has_slot else None
        call = before or (outer._call_impl if has_slot else outer.forward)
        original = call
        for key, mode in COMPILE_MODES.items():
            if key in self.keys and not was_compiled:
                call = torch.compile(call) if mode is None else torch.compile(call, mode=mode)
                self.applied[key] += 1
        if "channels_last" in self.keys and any(one.dim() == 4 for one in module.parameters()):
            module.to(memory_format=torch.channels_last)
            call = _in_channels_last(torch, call)
            self.applied["channels_last"] += 1
        if "bf16" in self.keys and not _autocast_is_on(torch, first.device.type):
            call = _in_bf16(torch, call, first.device.type)
            self.applied["bf16"] += 1
        if "inference_mode" in self.keys:
            call = _without_autograd(torch, call)
            self.applied["inference_mode"] += 1
        if call is not original:
            # Past a __setattr__ of its own, which a compiled module has.
            outer.__dict__["_compiled_call_impl" if has_slot else "forward"] = call
        return True

    def _nudge(self, module):
        """Change each weight by about as much as TF32, or its own type if that is coarser, rounds it."""
        torch = self.torch
        with torch.no_grad():
            for weight in filter(torch.is_floating_point, module.parameters()):
                # A weight that torch cannot multiply so stays: of a type without arithmetic, or spread over devices.
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    generator = torch.Generator(weight.device).manual_seed(0)  # the program's own numbers stay the same
                    part = max(TF32_ROUNDING, torch.finfo(weight.dtype).eps)
                    random_ = torch.randn(weight.shape, generator=generator, device=weight.device)
                    weight.mul_(1 + part * random_.to(weight.dtype))
                    self.applied[NUDGED] = 1

    def _keep_output(self, result):
        """Keep numbers of the first floating tensor that a module's first call returned."""
        torch, found = self.torch, []

        def keep(tensor):
            if tensor.is_floating_point() and tensor.numel() and not found:
                flat = tensor.detach().reshape(-1)
                found.extend(flat[:: max(1, flat.numel() // VALUES_KEPT)][:VALUES_KEPT].double().cpu().tolist())
            return tensor

        with contextlib.suppress(Exception):  # a sparse tensor, or a kind of its own
            mapped(torch, result, keep)
        if found:
            self.outputs.append(found)

    def _see(self, what, once=True, **facts):
        """Keep an object or a call with its line; of calls from one line the first, with their number."""
        place = where(self.torch)
        if once:
            for one in self.seen[what]:
                if one["line"] == place["line"]:
                    one["calls"] += 1
                    return
        if len(self.seen[what]) < 50:
            self.seen[what].append({**place, **facts, "calls": 1})


def install(torch, keys, look=False):
    """Make the changes with these keys in this process, and return them as Changes.

    look: whether to note what the program is made of, which takes time in its first steps.
    """
    changes = Changes(torch, keys, look)
    changes.make()
    return changes


def seed(torch):
    """Seed the generators of torch, numpy and random, so that equal programs draw equal numbers."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    with contextlib.suppress(AttributeError):  # another module of this name
        numpy.random.seed(SEED)
        original, given = numpy.random.default_rng, iter(range(SEED, 2**31))

        @functools.wraps(original)
        def default_rng(seed=None):
            return original(next(given) if seed is None else seed)

        numpy.random.default_rng = default_rng


def workers():
    """Return the number of workers of a DataLoader to try: this process's share of the machine's CPUs."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:
        cpus = os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(WORKERS_LEAST, min(WORKERS_MOST, cpus // ranks))


def where(torch):
    """Return the line of the program's own code that led here, and the package's line that it called, if any.

    {"line": "train.py:31", "through": "transformers/trainer.py:1200" or ""}. The program's own code is in the folder of
    its script or in the current one. If none of it led here, it is the nearest code that is in no package.
    """
    own = os.path.dirname(torch.__file__)
    libraries = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    homes = _homes()
    package, other, frame = "", "", sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not (path.startswith((own, HERE, "<frozen")) or "_dynamo" in path):
            in_packages = "site-packages" in path or "dist-packages" in path
            if in_packages or path.startswith(libraries):
                if not package and in_packages:
                    package = f"{path.split('-packages' + os.sep)[-1]}:{frame.f_lineno}"
            elif os.path.abspath(path).startswith(homes):
                return {"line": f"{_shown(path)}:{frame.f_lineno}", "through": package or other}
            elif not other:
                other = f"{_shown(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return {"line": other, "through": package} if other else {"line": package, "through": ""}


def _homes():
    """Return the folders of the program's own code."""
    found = set()
    with contextlib.suppress(OSError):  # the folder was deleted
        found.add(os.path.join(os.getcwd(), ""))
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        found.add(os.path.join(os.path.dirname(os.path.abspath(script)), ""))
    return tuple(found)


def _shown(path):
    try:
        nearer = os.path.relpath(path)
    except (ValueError, OSError):
        return path
    return os.path.abspath(path) if nearer.startswith("..") else nearer


def _one_line(problem):
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:300]


def _without_checkpoint(count):
    own = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")

    def checkpoint(function, *args, **kwargs):
        count()
        return function(*args, **{name: one for name, one in kwargs.items() if name not in own})

    return checkpoint


def _autocast_is_on(torch, device):
    if device == "cuda":
        return torch.is_autocast_enabled()
    return device == "cpu" and torch.is_autocast_cpu_enabled()


def _in_bf16(torch, call, device):
    def in_bf16(*args, **kwargs):
        with torch.autocast(device, dtype=torch.bfloat16):
            result = call(*args, **kwargs)
        return mapped(torch, result, to_float32)

    def to_float32(tensor):
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

    return in_bf16


def _in_channels_last(torch, call):
    def converted(tensor):
        if tensor.dim() == 4 and tensor.is_floating_point():
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def in_channels_last(*args, **kwargs):
        return call(*mapped(torch, args, converted), **mapped(torch, kwargs, converted))

    return in_channels_last


def _without_autograd(torch, call):
    def without_autograd(*args, **kwargs):
        with torch.inference_mode():
            return call(*args, **kwargs)

    return without_autograd


def mapped(torch, value, function):
    """Return the value with the function applied to each tensor in its tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        inner = [mapped(torch, one, function) for one in value]
        return type(value)(*inner) if hasattr(value, "_fields") else tuple(inner)
    if type(value) is list:
        return [mapped(torch, one, function) for one in value]
    if type(value) is dict:
        return {name: mapped(torch, one, function) for name, one in value.items()}
    if isinstance(value, dict):  # such as transformers' outputs, which keep their class
        for name in list(value):
            if isinstance(value[name], (torch.Tensor, tuple, list, dict)):
                value[name] = mapped(torch, value[name], function)
    return value
