"""`freeze(model)`: inference on a CPU with folded normalisations, fused epilogues and prepared weights; `unfreeze`.

Each traceable part of the model gets a `forward` of its own as an instance attribute, which hides the class's without
touching it: modules, parameters, buffers, hooks and state_dict stay what they are, and taking the attribute away is all
that `unfreeze` has to do.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _nn_module

from convselect import settings as _settings
from convselect.aten.autograd import in_functorch
from convselect.freeze.capture import Traced, Untraceable, required_arguments, trace
from convselect.freeze.chains import has_hooks, why_not_frozen
from convselect.freeze.plan import CHANNELS_LAST, CONTIGUOUS, Plan, Program, make_plan
from convselect.freeze.watch import Watch
from convselect.layer import SelectedConv2d
from convselect.lru import LRU
from convselect.warnings import warn_once

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
_SAME_IN_TRAINING = frozenset({
    nn.Conv2d, SelectedConv2d, nn.ConvTranspose2d, nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.ReLU, nn.ReLU6, nn.SiLU,
    nn.GELU, nn.Sigmoid, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Identity, nn.Upsample,
})  # fmt: skip
_PLAIN = frozenset({Tensor, nn.Parameter})
_REFUSAL = "this model is frozen for inference; call convselect.unfreeze(model) to train it again"


@dataclass(frozen=True)
class FreezeReport:
    """What `freeze` did.

    Attributes:
        parts: names of the modules whose forward was replaced; "" is the model itself.
        folded: convolution -> the batch normalisation that is now part of its weight and bias.
        fused: layer -> what is folded in or runs in its epilogue: "batch norm", "scale", "bias", "residual", "relu",
            "relu6", "silu", "gelu". Layers are convolutions, and linear layers of up to 16 MiB beside them.
        left_alone: name -> reason, for convolutions that run as they are and for modules that were not traced whole.
    """

    parts: tuple[str, ...]
    folded: dict[str, str]
    fused: dict[str, tuple[str, ...]]
    left_alone: dict[str, str]
    _frozen: tuple[_FrozenForward, ...] = field(default=(), repr=False, compare=False)

    @property
    def chosen(self) -> dict[str, dict[str, str]]:
        """Part and input -> layer -> what runs it: "native", "onednn_packed", "gemm", an algorithm of the pool, or
        "block" for each layer of an inverted residual block that runs as one call. Grows with every kind of input that
        the model meets."""
        return {
            f"{part.name or '(the model itself)'} {text}": {part.full(name): c for name, c in plan.chosen.items()}
            for part in self._frozen
            for text, plan in part.described()
        }

    def __str__(self) -> str:
        lines = [
            f"{len(self.fused)} layers frozen in {len(self.parts)} parts, {len(self.folded)} batch normalisations"
            f" folded, {len(self.left_alone)} left alone"
        ]
        for name, parts in self.fused.items():
            lines.append(f"  {name or '(the model itself)'}: {', '.join(parts) or 'nothing to fuse'}")
        lines += [f"  left alone: {name or '(the model itself)'}: {why}" for name, why in self.left_alone.items()]
        for part in self._frozen:
            for text, plan in part.described():
                times = "" if plan.eager_us is None else f", {plan.eager_us:.0f} us before, {plan.frozen_us:.0f} us now"
                lines.append(f"{part.name or '(the model itself)'} for {text}: {plan.layout or 'as it was'}{times}")
                lines += [f"  {part.full(name)}: {candidate}" for name, candidate in plan.chosen.items()]
        return "\n".join(lines)


def freeze(model: nn.Module, *example: Any) -> FreezeReport:
    """Make inference with `model` on a CPU as fast as measuring can make it. In place; `unfreeze` takes it back.

    Folds batch normalisation into the convolution before it, runs bias, residual sum and activation in the
    convolution's epilogue, keeps weights in the form each kernel wants, and picks, for every convolution, the fastest
    candidate that agrees with `torch.conv2d`, and for the whole, NCHW or NHWC between the layers, or the model as it
    was where nothing beats it. Parameters, buffers, modules, hooks and state_dict are not touched.

    Measuring happens at the first call with inputs of a new shape, stride, dtype or thread count, and takes from a
    fraction of a second to some tens of seconds; the given example makes that first call now. After eight kinds of
    input, further ones take what was chosen before. Planning runs the model several times, so that hooks inside see
    more calls.

    What a call with a frozen model still does:

    - Replaced parameters, buffers and submodules, and everything that moves a tensor's version counter (loading a
      state_dict, any operation in place) are noticed at once, and folded and packed again before the call goes on.
      `.data = other` is noticed at once for weights and within eight calls for biases and statistics. Writes behind
      the counter (`.data.copy_`, NumPy) are noticed at once where they reach the one element per weight that each call
      samples, as whole-tensor updates do, within eight calls for biases and statistics, and otherwise when the 64 KiB
      that each call adds up in turn come to them. Other attributes (stride, eps) are read once.
    - Hooks: a module with forward hooks is called as a module, and parts are traced around and inside it. While hooks
      were added later, or global ones are set, calls run the original forward.
    - Autocast, tracers, torch.compile, torch.func, dispatch modes, tensor subclasses, other devices, sizes that depend
      on data, optional arguments that are given, a forced policy and batch invariance run the original forward.
    - NaN and infinity, in inputs or weights, run the original forward where a kernel would spread or lose them.
    - Results never require gradients. An input that does, under grad mode, is an error, as is `train()`.

    A deep copy or an unpickled copy of a frozen model is frozen and plans anew. Print statements and other side effects
    of a traced forward do not happen.

    Args:
        model: in evaluation mode.
        example: the arguments of one call.

    Returns:
        What was folded, fused and chosen, and what was left alone and why.

    Raises:
        TypeError: `model` is not a module.
        RuntimeError: it, or a module inside, is in training mode.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"freeze takes an nn.Module, not {type(model).__name__}")
    if any(module.training for module in model.modules()):
        raise RuntimeError("freeze takes a model in evaluation mode: call model.eval() first")
    unfreeze(model)
    left_alone: dict[str, str] = {}
    remembered: dict[Any, str] = {}
    parts = [
        _FrozenForward(root, name, remembered, traced) for name, root, traced in _traceable_parts(model, left_alone)
    ]
    for part in parts:
        part.install()
    report = FreezeReport(
        tuple(part.name for part in parts),
        {part.full(c.name): part.full(c.norm_name) for part in parts for c in part.chains if c.norm_name},
        {part.full(c.name): c.fused for part in parts for c in part.chains},
        left_alone,
        tuple(parts),
    )
    if example:
        model(*example)
    return report


def unfreeze(model: nn.Module) -> int:
    """Undo `freeze`, exactly. Returns in how many parts the model was frozen.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unfreeze takes an nn.Module, not {type(model).__name__}")
    count = 0
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _FrozenForward):
            del vars(module)["forward"], vars(module)["train"]
            count += 1
    return count


def _traceable_parts(model: nn.Module, left_alone: dict[str, str]) -> Iterator[tuple[str, nn.Module, Traced]]:
    """The largest modules that can be traced and hold a convolution to freeze."""
    pending = [("", model)]
    seen: set[int] = set()
    while pending:
        name, module = pending.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        if not any(why_not_frozen(m) is None for m in module.modules()):
            left_alone.update(_reasons(module, name))
            continue
        prefix = f"{name}." if name else ""
        inside = [(prefix + child_name, child) for child_name, child in module.named_children()]
        try:
            traced = trace(module)
        except Untraceable as why:
            if not isinstance(module, nn.ModuleList | nn.ModuleDict):
                left_alone[name] = f"not traced as a whole: {why}"
            pending += inside
            continue
        left_alone.update({prefix + inner: why for inner, why in traced.left_alone.items() if inner})
        pending += [(prefix + inner, module.get_submodule(inner)) for inner in traced.boundaries]
        if traced.chains:
            yield name, module, traced


def _reasons(module: nn.Module, name: str) -> dict[str, str]:
    prefix = f"{name}." if name else ""
    reasons = {inner: why_not_frozen(m) for inner, m in module.named_modules()}
    return {(prefix + inner if inner else name): why for inner, why in reasons.items() if why}


class _RefuseTraining:
    """The `train` of a frozen module."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def __call__(self, mode: bool = True) -> nn.Module:
        if mode:
            raise RuntimeError(_REFUSAL)
        return type(self._root).train(self._root, False)


class _FrozenForward:
    """The `forward` of a frozen module."""

    def __init__(
        self, root: nn.Module, name: str = "", remembered: dict[Any, str] | None = None, traced: Traced | None = None
    ) -> None:
        # `root` may still be empty here, while a copy of it is being made.
        self.root = root
        self.name = name
        self._remembered: dict[Any, str] = {} if remembered is None else remembered
        self._traced = traced
        self._lock = threading.RLock()
        self._plans = LRU(_PLANS)
        self._program: Program | None = None
        self._watch: Watch | None = None
        self._finite = True
        self._given_up = False
        self._required: list[str] = []
        self._structure: list[dict[str, Any]] = []
        self._saved_structure: list[dict[str, Any]] = []
        self._hooks: list[dict[Any, Any]] = []
        self._modes: list[nn.Module] = []

    def install(self) -> None:
        self.root.forward = self
        self.root.train = _RefuseTraining(self.root)  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        forward = type(self.root).forward.__get__(self.root) if name.startswith("__") and "root" in vars(self) else None
        if forward is not None and name == "__signature__":
            return inspect.signature(forward)
        if forward is not None and name in ("__code__", "__globals__"):  # exporters ask for them
            return getattr(forward, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    def __deepcopy__(self, memo: dict[int, Any]) -> _FrozenForward:
        return _FrozenForward(memo.get(id(self.root), self.root), self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_FrozenForward, (self.root, self.name))

    @property
    def chains(self) -> list[Any]:
        return [] if self._traced is None else self._traced.chains

    def full(self, name: str) -> str:
        return ".".join(part for part in (self.name, name) if part)

    def described(self) -> list[tuple[str, Plan]]:
        entries: dict[Any, Plan] = self._plans.entries
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
        if any(isinstance(a, Tensor) and a.requires_grad for a in (*args, *kwargs.values())):
            raise RuntimeError(f"an input requires a gradient, but {_REFUSAL}")
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
            raise RuntimeError(f"a module inside was set to training mode, but {_REFUSAL}")
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
        """Trace, fold, and remember what to watch. False where the module can no longer be traced."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._program is not None:
                return True
            if self._given_up:
                return False
            root = self.root
            if any(module.training for module in root.modules()):
                raise RuntimeError(f"it is in training mode, but {_REFUSAL}")
            replaced = vars(root).pop("forward", None)
            try:
                traced = self._traced if self._traced is not None else trace(root)
            except Untraceable as why:
                self._given_up = True
                warn_once(f"freeze:{id(self)}", f"convselect: {self.name or 'a frozen model'} runs as it was: {why}")
                return False
            finally:
                if replaced is not None:
                    vars(root)["forward"] = replaced
            self._traced = traced
            inside = list(_inside(root, {root.get_submodule(name) for name in traced.boundaries}))
            self._structure = [module._modules for module in inside if module._modules]
            self._saved_structure = [dict(children) for children in self._structure]
            self._hooks = [_nn_module._global_forward_hooks, _nn_module._global_forward_pre_hooks]
            for module in inside:
                if module is not root:
                    self._hooks += [module._forward_hooks, module._forward_pre_hooks]
            self._modes = [module for module in inside if not module._modules and type(module) not in _SAME_IN_TRAINING]
            self._required = ["input"] if isinstance(root, nn.Conv2d) else required_arguments(type(root).forward)
            self._plans.clear()
            program = Program(root, traced)
            self._watch = Watch([conv.sources() for conv in program.layers.values()])
            self._finite = program.finite
            self._program = program
            return True

    def _is_current(self) -> bool:
        """False where something changed; it has then been caught up with, if the module can still be frozen."""
        assert self._watch is not None
        same_modules = self._structure == self._saved_structure
        changed = self._watch.changed() if same_modules else set()
        if same_modules and not changed:
            return True
        with self._lock, torch.inference_mode(False), torch.no_grad():
            layers = [] if self._program is None else list(self._program.layers.values())
            if same_modules and self._watch.covers([layer.sources() for layer in layers]):
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
        """Plan for arguments of this kind; the model's own result for these."""
        with self._lock:
            found = self._plans.entries.get(key)
            if found is None:
                copies = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)
                result = self._original(*args)
                measured = [plan for plan in self._plans.entries.values() if plan.eager_us is not None]
                measure = len(measured) < _MEASURED_PLANS
                layouts: tuple[str, ...] = (CONTIGUOUS, CHANNELS_LAST)
                if not measure and measured[-1].layout is not None:
                    layouts = (measured[-1].layout,)
                assert self._program is not None
                with torch.inference_mode(False), torch.no_grad():
                    copies = tuple(a.clone() if isinstance(a, Tensor) else a for a in copies)
                    plan = make_plan(
                        self._program,
                        copies,
                        result,
                        self._original,
                        key[1],
                        self._remembered,
                        layouts,
                        measure,
                        list(self._plans.entries.values()),
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
