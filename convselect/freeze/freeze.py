"""`freeze(model)`: inference on a CPU with folded normalisations, fused epilogues and prepared weights; `unfreeze`.

Each traceable part of the model gets a `forward` as an instance attribute, which hides the class's without touching it:
modules, parameters, buffers, hooks and state_dict stay what they are, and `unfreeze` only removes the attribute.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _nn_module

from convselect.aten.strides import in_functorch
from convselect.base import settings as _settings
from convselect.base.lru import LRU
from convselect.base.warnings import warn_once
from convselect.freeze import refusals
from convselect.freeze.capture import Traced, Untraceable, required_arguments, trace
from convselect.freeze.chains import has_hooks, why_not_frozen
from convselect.freeze.plan import CHANNELS_LAST, CONTIGUOUS, Plan, Program, make_plan
from convselect.freeze.watch import Watch
from convselect.layer import check_module

M = TypeVar("M", bound=nn.Module)

_PLANS = 16
_MEASURED_PLANS = 8

_grad_enabled = torch.is_grad_enabled
_set_grad_enabled: Any = torch._C._set_grad_enabled
_threads = torch.get_num_threads
_any_autocast: Any = torch._C._is_any_autocast_enabled
_mkldnn_enabled: Any = torch._C._get_mkldnn_enabled
_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
_tracing_state: Any = torch._C._get_tracing_state
_is_compiling = torch.compiler.is_compiling
_current_settings = _settings.current
_training: Any = operator.attrgetter("training")
_PLAIN = frozenset({Tensor, nn.Parameter})


def freeze(model: M, *example: Any) -> M:
    """Make inference with `model` on a CPU as fast as measuring can make it. In place; `unfreeze` undoes it.

    Folds batch normalisation into the convolution before it, runs bias, residual sum and activation in the
    convolution's epilogue, keeps weights in the form each kernel wants, and measures: for every convolution, the
    fastest candidate that agrees with `torch.conv2d`; for the whole, NCHW or NHWC between the layers, or the model as
    it was if nothing is faster. Parameters, buffers, modules, hooks and state_dict are not touched.
    `convselect.summary(model)` says what was folded, fused and chosen, and what was left alone and why.

    Measuring happens at the first call with inputs of a new shape, stride, dtype or thread count, and takes from a
    fraction of a second to some tens of seconds; the given example makes that first call now. After eight kinds of
    input, further ones take what was chosen before. Planning runs the model several times, so hooks inside see more
    calls.

    What a call with a frozen model still does:

    - Replaced parameters, buffers and submodules, and everything that moves a tensor's version counter (loading a
      state_dict, any operation in place) are noticed at once, and folded and packed again before the call goes on.
      `.data = other` is noticed at once for weights and within eight calls for biases and statistics. Writes behind
      the counter (`.data.copy_`, NumPy) are noticed at once if they reach the one element per weight that each call
      samples, as whole-tensor updates do, within eight calls for biases and statistics, and otherwise when the 64 KiB
      that each call adds up in turn come to them. Other attributes (stride, eps) are read once.
    - Hooks: a module with forward hooks is called as a module, and parts are traced around and inside it. If hooks
      were added later, or global ones are set, calls run the original forward.
    - Autocast, tracers, torch.compile, torch.func, dispatch modes, tensor subclasses, other devices, sizes that depend
      on data, optional arguments that are given, a forced policy and batch invariance run the original forward.
    - NaN and infinity, in inputs or weights, run the original forward if a kernel would spread or lose them.
    - Results never require gradients. An input that does, under grad mode, is an error, as are `train()` and
      `torch.jit.script`, and a module that was put in, is in training mode and may compute something else there.

    A deep copy or an unpickled copy of a frozen model is frozen and plans anew. Print statements and other side effects
    of a traced forward do not happen.

    Args:
        model: in evaluation mode.
        example: the arguments of one call.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module.
        RuntimeError: it, or a module inside, is in training mode.
    """
    check_module(model, "freeze")
    if any(module.training for module in model.modules()):
        raise RuntimeError("freeze takes a model in evaluation mode: call model.eval() first")
    unfreeze(model)
    remembered: dict[Any, str] = {}
    untraced: dict[str, str] = {}
    for name, root, traced in list(_traceable_parts(model, untraced)):
        around = tuple(untraced.get(other, "") for other in parents(name))
        FrozenForward(root, around, remembered, traced).install()
    if example:
        model(*example)
    return model


def unfreeze(model: M) -> M:
    """Undo `freeze`, exactly.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module.
    """
    check_module(model, "unfreeze")
    for module in model.modules():
        if isinstance(vars(module).get("forward"), FrozenForward):
            for name in refusals.ATTRIBUTES:
                vars(module).pop(name, None)
    return model


def frozen_forwards(model: nn.Module) -> dict[str, FrozenForward]:
    """Name of each module of `model` whose forward is frozen -> that forward; "" is the model itself."""
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    return {name: forward for name, forward in forwards.items() if isinstance(forward, FrozenForward)}


def parents(name: str) -> list[str]:
    """Names of the modules around this one, the innermost first: "a.b.c" -> ["a.b", "a", ""]."""
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in reversed(range(len(parts)))]


def _traceable_parts(model: nn.Module, untraced: dict[str, str]) -> Iterator[tuple[str, nn.Module, Traced]]:
    """The largest modules that can be traced and hold a convolution to freeze; why the others cannot goes to
    `untraced`."""
    pending = [("", model)]
    seen: set[int] = set()
    while pending:
        name, module = pending.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        if not any(why_not_frozen(m) is None for m in module.modules()):
            continue
        prefix = f"{name}." if name else ""
        try:
            traced = trace(module)
        except Untraceable as why:
            if not isinstance(module, nn.ModuleList | nn.ModuleDict):
                untraced[name] = f"It was not traced as a whole: {str(why).rstrip('.')}."
            pending += [(prefix + child_name, child) for child_name, child in module.named_children()]
            continue
        pending += [(prefix + inner, module.get_submodule(inner)) for inner in traced.boundaries]
        if traced.chains:
            yield name, module, traced


class FrozenForward:
    """The `forward` of a frozen module.

    Args:
        root: the module.
        around: why each of the modules around it was not frozen as a whole, the innermost first; "" if there is no
            reason to tell.
        remembered: candidates chosen so far, shared between the parts of one model.
        traced: the steps of the root's forward, if they are known already.
    """

    def __init__(
        self,
        root: nn.Module,
        around: tuple[str, ...] = (),
        remembered: dict[Any, str] | None = None,
        traced: Traced | None = None,
    ) -> None:
        # `root` may still be empty here, while a copy of it is being made.
        self.root = root
        self.around = around
        self.why_original: str | None = None
        """Why the module runs as it was, for good: it can no longer be traced."""
        self._remembered: dict[Any, str] = {} if remembered is None else remembered
        self._traced = traced
        self._lock = threading.RLock()
        self._plans = LRU(_PLANS)
        self._program: Program | None = None
        self._watch: Watch | None = None
        self._finite = True
        self._required: list[str] = []
        self._structure: list[dict[str, Any]] = []
        self._saved_structure: list[dict[str, Any]] = []
        self._hooks: list[dict[Any, Any]] = []
        self._modes: list[nn.Module] = []

    def install(self) -> None:
        if self._traced is not None:
            self._note_modules(self._traced)
        self.root.forward = self
        self.root.train = refusals.RefuseTraining(self.root)  # type: ignore[assignment]
        self.root.__prepare_scriptable__ = refusals.RefuseScripting()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        forward = type(self.root).forward.__get__(self.root) if name.startswith("__") and "root" in vars(self) else None
        if forward is not None and name == "__signature__":
            return inspect.signature(forward)
        if forward is not None and name in ("__code__", "__globals__"):  # exporters ask for them
            return getattr(forward, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenForward:
        return FrozenForward(memo.get(id(self.root), self.root), self.around)

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenForward, (self.root, self.around))

    def traced(self) -> Traced | None:
        """The steps of the root's own forward; None if it can no longer be traced, and runs as it was."""
        with self._lock:
            if self._program is None and self._structure != self._saved_structure:
                self._traced = None  # modules were replaced since
            if self._traced is not None or self.why_original is not None:
                return self._traced
            replaced = vars(self.root).pop("forward", None)
            try:
                self._traced = trace(self.root)
                self._note_modules(self._traced)
            except Untraceable as why:
                self.why_original = str(why)
                what = f"a frozen {type(self.root).__name__}"
                warn_once(f"freeze:{id(self)}", f"convselect: {what} runs as it was: {why}")
            finally:
                if replaced is not None:
                    vars(self.root)["forward"] = replaced
            return self._traced

    def plans(self) -> list[tuple[str, Plan]]:
        """Each kind of input met so far, in words, and how it is computed."""
        entries: dict[Any, Plan] = dict(self._plans.entries)
        return [(_describe(key), plan) for key, plan in entries.items()]

    # ---- a call -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            _is_compiling()
            or _dispatch_modes() > 0
            or in_functorch()
            or forward_ad._current_level >= 0
            or _tracing_state() is not None
        ):
            return self._original(*args, **kwargs)
        if not _grad_enabled():
            return self._call(args, kwargs)
        refusals.refuse_gradient((*args, *kwargs.values()))
        _set_grad_enabled(False)
        try:
            return self._call(args, kwargs)
        finally:
            _set_grad_enabled(True)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call without gradients."""
        if _any_autocast():
            return self._original(*args, **kwargs)
        if self._program is None and not self._prepare():
            return self._original(*args, **kwargs)
        if kwargs or len(args) != len(self._required):
            bound = self._bound(args, kwargs)
            if bound is None:
                return self._original(*args, **kwargs)
            args = bound
        settings = _current_settings()
        if not settings.chooses or settings.batch_invariant or any(self._hooks):
            return self._original(*args)
        key: list[Any] = [_threads(), settings, _mkldnn_enabled()]
        for a in args:
            if type(a) in _PLAIN:
                if not a.is_cpu or a.layout is not torch.strided or a.is_neg():
                    return self._original(*args)
                key += (a.shape, a.stride(), a.dtype)
            elif a is None or isinstance(a, int | float | str):
                key += (type(a), a)
            else:
                return self._original(*args)
        if any(map(_training, self._modes)):
            refusals.refuse_training(self.root)
        if not self._is_current() and self._program is None:
            return self._original(*args)
        if not self._finite:
            return self._original(*args)
        frozen_key = tuple(key)
        plan = self._plans.entries.get(frozen_key)
        if plan is None:
            return self._plan(frozen_key, args)
        plan.age = self._plans.clock
        return plan.run(args, self._original)

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.root).forward(self.root, *args, **kwargs)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """The required arguments in order, if the optional ones have their defaults."""
        try:
            bound = inspect.signature(type(self.root).forward).bind(self.root, *args, **kwargs)
        except TypeError:
            return None
        given = dict(list(bound.arguments.items())[1:])
        parameters = bound.signature.parameters
        if any(given[name] is not parameters[name].default for name in given.keys() - set(self._required)):
            return None
        return tuple(given[name] for name in self._required)

    # ---- preparation --------------------------------------------------------------------------------------------

    def _prepare(self) -> bool:
        """Trace, fold, and watch the weights. False if the module can no longer be traced."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._program is not None:
                return True
            if self.why_original is not None:
                return False
            refusals.refuse_training(self.root)
            if not self._is_on_cpu():
                return False  # it was moved since
            if self._traced is not None and not self._traced.is_readable:
                self._traced = None  # weights were replaced by those of a quantisation library since
            traced = self.traced()
            if traced is None:
                return False
            self._plans.clear()
            program = Program(self.root, traced)
            self._watch = Watch([layer.sources() for layer in program.layers.values()])
            self._finite, self._program = program.finite, program
            return True

    def _is_on_cpu(self) -> bool:
        return all(t.is_cpu for t in (*self.root.parameters(), *self.root.buffers()))

    def _note_modules(self, traced: Traced) -> None:
        """Remember the arguments of the forward, and what to ask the modules inside at every call: whether one was
        replaced, got a hook, or was set to training."""
        root = self.root
        inside = list(_inside(root, {root.get_submodule(name) for name in traced.boundaries}))
        self._structure = [module._modules for module in inside if module._modules]
        self._saved_structure = [dict(children) for children in self._structure]
        self._hooks = [_nn_module._global_forward_hooks, _nn_module._global_forward_pre_hooks]
        for module in inside:
            if module is not root:
                self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        self._modes = [module for module in inside if not module._modules and refusals.may_depend_on_training(module)]
        self._required = ["input"] if isinstance(root, nn.Conv2d) else required_arguments(type(root).forward)

    def _is_current(self) -> bool:
        """False if something changed; what was derived from it is then made anew, if the module can still be frozen."""
        assert self._watch is not None
        same_modules = self._structure == self._saved_structure
        changed = self._watch.changed() if same_modules else set()
        if same_modules and not changed:
            return True
        with self._lock, torch.inference_mode(False), torch.no_grad():
            layers = [] if self._program is None else list(self._program.layers.values())
            sources = [layer.sources() for layer in layers]
            if same_modules and self._watch.is_readable() and self._watch.covers(sources):
                changed |= self._watch.changed_anywhere()
                self._watch.accept()
                refolded = [layers[i].refold() for i in changed]
                if self._program is not None and all(refolded):
                    self._finite = self._program.finite
                    return False
            self._traced = self._program = None
            self._prepare()
            return False

    def _plan(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        """The first call with arguments of this kind: the model's own result, and a plan for the next ones."""
        with self._lock:
            found = self._plans.entries.get(key)
            if found is None:
                copies = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)
                result = self._original(*args)
                in_use: list[Plan] = list(self._plans.entries.values())
                measured = [plan for plan in in_use if plan.eager_us is not None]
                measure = len(measured) < _MEASURED_PLANS
                layouts: tuple[str, ...] = (CONTIGUOUS, CHANNELS_LAST)
                if not measure and measured[-1].layout is not None:
                    layouts = (measured[-1].layout,)
                program, settings = self._program, key[1]
                assert program is not None
                with torch.inference_mode(False), torch.no_grad():
                    args = tuple(a.clone() if isinstance(a, Tensor) else a for a in copies)
                    plan = make_plan(
                        program, args, result, self._original, settings, self._remembered, layouts, measure, in_use
                    )
                self._plans.put(key, plan)
                return result
        return found.run(args, self._original)


def _inside(root: nn.Module, boundaries: set[nn.Module]) -> Iterator[nn.Module]:
    """Modules whose calls were traced or taken over; not those that are called as modules, nor what is in them."""
    yield root
    for child in root.children():
        if child not in boundaries and not has_hooks(child):
            yield from _inside(child, boundaries)


def _describe(key: tuple[Any, ...]) -> str:
    threads, _, _, *rest = key
    shapes = [str(tuple(part)) for part in rest if isinstance(part, torch.Size)]
    dtypes = sorted({str(part).removeprefix("torch.") for part in rest if isinstance(part, torch.dtype)})
    return f"{', '.join(shapes)} {', '.join(dtypes)}, {threads} thread{'s' if threads > 1 else ''}"
