"""The `forward` of a frozen module: what a call does before its plan runs, and when it plans.

At the first call with inputs of a new kind the class's forward is captured (see `capture`), rewritten (see `algebra`),
cut into steps (see `chains`) and planned (see `plan`).
"""

from __future__ import annotations

import inspect
import operator
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _nn_module

from convselect.aten.strides import in_functorch
from convselect.base import settings as _settings
from convselect.base.lru import LRU, Entry
from convselect.base.warnings import warn_once
from convselect.freeze import refusals
from convselect.freeze.capture import Uncapturable, capture, is_recorded, runs_more
from convselect.freeze.chains import Layer
from convselect.freeze.parts import freeze_parts, not_whole
from convselect.freeze.plan import CHANNELS_LAST, CONTIGUOUS, Plan, make_plan
from convselect.freeze.program import Program
from convselect.freeze.registry import Registry
from convselect.freeze.remembered import Remembered
from convselect.freeze.watch import Watch
from convselect.freeze.words import Words, dictionaries_have_tags
from convselect.kernels import _library

_LAYOUTS: tuple[str, ...] = (CONTIGUOUS, CHANNELS_LAST)
_PLANS = 16
_MEASURED_PLANS = 8
_RENEWALS = 16

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


def freeze_in_parts(
    model: nn.Module, why_not_whole: str | None, around: tuple[str, ...], remembered: Remembered
) -> None:
    """See `freeze_parts`; they share what was chosen."""

    def install(module: nn.Module, near: tuple[str, ...], reason: str | None) -> None:
        FrozenForward(module, near, remembered, reason).install()

    freeze_parts(model, why_not_whole, around, install)


class FrozenForward:
    """The `forward` of a frozen module.

    Args:
        root: the module.
        around: why each of the modules around it was not frozen as a whole, the innermost first; "" if there is no
            reason to tell.
        remembered: candidates chosen so far, shared between the parts of one model.
        why_original: why the module runs as it was, for good: it cannot be captured. What is inside may be frozen, and
            runs without gradients.
    """

    def __init__(
        self,
        root: nn.Module,
        around: tuple[str, ...] = (),
        remembered: Remembered | None = None,
        why_original: str | None = None,
    ) -> None:
        # `root` may still be empty here, while a copy of it is being made.
        self.root = root
        self.around = around
        self.why_original = why_original
        self._remembered: Remembered = Remembered() if remembered is None else remembered
        self._lock = threading.RLock()
        self._plans = LRU(_PLANS)
        self._met_once = LRU(_PLANS)
        self._registry: Registry | None = None
        self._watch: Watch | None = None
        self._finite = True
        self._structure: list[dict[str, Any]] = []
        self._saved_structure: list[dict[str, Any]] = []
        self._hooks: list[dict[Any, Any]] = []
        self._has_hooks = self._may_be_recorded = self._met_containers = False
        self._modes: list[nn.Module] = []
        self._words: Words | None = None  # the same: nothing of these three has changed
        self._renewals = _RENEWALS

    def install(self) -> None:
        self._note_modules()
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
        return FrozenForward(memo.get(id(self.root), self.root), self.around, None, self.why_original)

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenForward, (self.root, self.around, None, self.why_original))

    def layers(self) -> list[Layer]:
        """The layers of all programs made so far, each once."""
        programs = [plan.program for _, plan in self.plans() if plan.program is not None]
        found = {program.layers[step]: step.target for program in programs for step in program.layers}
        return list(found.values())

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
        if self.why_original is not None or (self._registry is None and not self._prepare()):
            return self._original(*args, **kwargs)
        if kwargs:
            bound = self._bound(args, kwargs)
            if bound is None:
                return self._original(*args, **kwargs)
            args = bound
        settings = _current_settings()
        words = self._words
        as_before = words is not None and words.same()
        renewed = None if as_before else self._present_words()  # before looking, for what is written meanwhile
        if not as_before:
            self._may_be_recorded = any(self._hooks)
            self._has_hooks = self._may_be_recorded and any(map(runs_more, self._hooks))
        if not settings.chooses or settings.batch_invariant or self._has_hooks:
            return self._original(*args)
        if self._may_be_recorded and is_recorded():
            return self._original(*args)
        key: list[Any] = [_threads(), settings, _mkldnn_enabled()]
        tensors = args
        for a in args:
            if type(a) in _PLAIN:
                if not a.is_cpu or a.layout is not torch.strided or a.is_neg():
                    return self._original(*args)
                key += (a.shape, a.stride(), a.dtype)
            elif a is None or isinstance(a, int | float | str) or _are_sizes(a):
                key += (type(a), a)
                tensors = ()
            elif isinstance(a, list | tuple | dict):
                return self._of_containers(type(a).__name__, args)
            else:
                return self._original(*args)
        if tensors is not args:
            tensors = tuple(a for a in args if isinstance(a, Tensor))
        if not as_before and any(map(_training, self._modes)):
            refusals.refuse_training(self.root)
        if not self._is_current(as_before):
            if self._registry is None:
                return self._original(*args)
        elif not as_before:
            self._words = renewed
        if not self._finite:
            return self._original(*args)
        frozen_key = tuple(key)
        plan = self._plans.entries.get(frozen_key)
        if plan is None:
            return self._plan(frozen_key, args)
        plan.age = self._plans.clock
        return plan.run(tensors, lambda: self._original(*args))

    def _of_containers(self, kind: str, args: tuple[Any, ...]) -> Any:
        """A call with tensors in containers, which no plan takes: if that is how the module is called, what is inside
        is frozen."""
        with self._lock:
            if self._met_containers and self.why_original is None and not self._plans.entries:
                self.why_original = f"an argument of its forward is a {kind}"
                freeze_in_parts(self.root, not_whole(self.why_original), self.around, self._remembered)
            self._met_containers = True
        return self._original(*args)

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.root).forward(self.root, *args, **kwargs)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """The arguments in order; None if some can only be given by name."""
        try:
            bound = inspect.signature(type(self.root).forward).bind(self.root, *args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        return None if bound.kwargs else bound.args[1:]

    # ---- preparation --------------------------------------------------------------------------------------------

    def _prepare(self) -> bool:
        """Look at the modules inside, and start to watch weights. False if the module cannot be frozen now."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._registry is not None:
                return True
            refusals.refuse_training(self.root)
            if not self._is_on_cpu():
                return False  # it was moved since
            self._note_modules()
            self._plans.clear()
            self._registry = Registry()
            self._look()
            return True

    def _look(self) -> None:
        """Watch the weights that are folded."""
        assert self._registry is not None
        self._watch = Watch([entry.sources() for entry in self._registry.entries.values()])
        self._finite = self._registry.finite

    def _is_on_cpu(self) -> bool:
        return all(t.is_cpu for t in (*self.root.parameters(), *self.root.buffers()))

    def _note_modules(self) -> None:
        """Remember what to ask the modules inside at every call: whether one was replaced, got a hook, or was set to
        training."""
        inside = list(self.root.modules())
        self._words, self._renewals = None, _RENEWALS
        self._structure = [module._modules for module in inside if module._modules]
        self._saved_structure = [dict(children) for children in self._structure]
        self._hooks = [_nn_module._global_forward_hooks, _nn_module._global_forward_pre_hooks]
        for module in inside[1:]:
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        self._modes = [module for module in inside if not module._modules and refusals.may_depend_on_training(module)]

    def _present_words(self) -> Words | None:
        if not dictionaries_have_tags() or self._renewals == 0:
            return None
        self._renewals -= 1
        return Words([*self._structure, *self._hooks, *map(vars, self._modes)])

    def _is_current(self, same_modules: bool) -> bool:
        """False if something changed; what was derived from it is then made anew, if the module can still be frozen.

        Args:
            same_modules: whether that is known of the modules inside.
        """
        assert self._watch is not None
        same_modules = same_modules or self._structure == self._saved_structure
        changed = self._watch.changed() if same_modules else set()
        if same_modules and not changed:
            return True
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._registry is not None and same_modules and self._watch.is_comparable():
                entries = list(self._registry.entries.values())
                changed |= self._watch.changed_anywhere()
                self._watch.accept()
                refolded = [entries[i].refold() for i in changed]
                if all(refolded):
                    self._finite = self._registry.finite
                    return False
            self._registry = None
            self._prepare()
            return False

    def _plan(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        """The first call with arguments of this kind: the model's own result, and a plan for the next ones."""
        with self._lock:
            found = self._plans.entries.get(key)
            if found is not None:
                return found.run(tuple(a for a in args if isinstance(a, Tensor)), lambda: self._original(*args))
            in_use: list[Plan] = list(self._plans.entries.values())
            measured = [plan for plan in in_use if plan.eager_us is not None]
            measure = len(measured) < _MEASURED_PLANS
            if not measure and key not in self._met_once.entries:
                self._met_once.put(key, Entry())  # a plan takes about a second even without measuring
                return self._original(*args)
            copies = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)
            result = self._original(*args)
            try:
                plan = self._made_plan(key, copies, result, in_use, measure)
            except Uncapturable as why:
                self._fall_apart(str(why), copies)
                return result
            if self._finite:  # else the weights may be finite later
                self._plans.put(key, plan)
                assert self._registry is not None
                programs = [plan.program for _, plan in self.plans() if plan.program is not None]
                self._registry.keep(entry for program in programs for entry in program.entries())
            self._look()
            _library.give_back()  # planning held results and weights of many layers, and packed ones of many candidates
            return result

    def _made_plan(
        self, key: tuple[Any, ...], args: tuple[Any, ...], result: Any, in_use: list[Plan], measure: bool
    ) -> Plan:
        """Raises Uncapturable if the forward is not a fixed list of operations."""
        layouts = _LAYOUTS
        if not measure:
            chosen = [plan.layout for plan in in_use if plan.eager_us is not None]
            layouts = layouts if chosen[-1] is None else (chosen[-1],)
        assert self._registry is not None
        with torch.inference_mode(False), torch.no_grad():
            given = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
            captured = capture(self.root, given)
            try:
                program = Program(captured, self._registry)
                self._finite = self._registry.finite
                tensors = tuple(a for a in given if isinstance(a, Tensor))
                if not program.layers or not self._finite:
                    return Plan()
                return make_plan(
                    program, tensors, result, lambda: self._original(*given), key[1], self._remembered, layouts,
                    measure, in_use,
                )  # fmt: skip
            except Exception as error:  # the model itself has just computed its result: a call must not fail now
                text = f"planning raised {type(error).__name__}: {str(error) or 'no message':.200}"
                warn_once(f"freeze:{type(self.root).__qualname__}", f"convselect: a frozen model runs in parts: {text}")
                raise Uncapturable(text) from error

    def _fall_apart(self, why: str, args: tuple[Any, ...]) -> None:
        """Freeze what is inside, since the whole cannot be, and let it plan."""
        self.why_original = why
        freeze_in_parts(self.root, not_whole(why), self.around, self._remembered)
        self._original(*args)


def _are_sizes(a: Any) -> bool:
    return isinstance(a, tuple) and all(type(part) is int for part in a)


def _describe(key: tuple[Any, ...]) -> str:
    threads, _, _, *rest = key
    shapes = [str(tuple(part)) for part in rest if isinstance(part, torch.Size)]
    dtypes = sorted({str(part).removeprefix("torch.") for part in rest if isinstance(part, torch.dtype)})
    return f"{', '.join(shapes)} {', '.join(dtypes)}, {threads} thread{'s' if threads > 1 else ''}"
