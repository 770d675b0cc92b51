"""`Plan`: one kind of eager call with its chosen algorithms, and the autograd that runs them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from convselect.aten.arguments import (
    Geometry,
    are_ints,
    autocast_dtype,
    cast_like_autocast,
    gradients_of,
    problem_of,
    valid,
    wants_direct_sums,
)
from convselect.aten.autograd import Conv2dFunction, gradients
from convselect.aten.strides import ResultStrides, result_strides, with_strides
from convselect.base.lru import LRU, Entry, on_clear
from convselect.base.problem import DTYPE_NAMES, ConvProblem, Direction, layout_of
from convselect.base.settings import CACHE_ENTRIES, Settings, exactly
from convselect.choice.choose import NATIVE, Choice
from convselect.eager.execute import execute, without_autocast
from convselect.eager.live_trial import LiveTrial
from convselect.eager.resolve import Found, choice_for, eager_choice, found_for
from convselect.kernels._contract import NotApplicable
from convselect.kernels._native_ops import native_backward, native_forward, overruns_in_channels_last
from convselect.kernels.pool import BY_NAME
from convselect.measure.plan_cost import step_cost_us

# Looked up once: each of these is read on every call.
_grad_enabled = torch.is_grad_enabled
_threads = torch.get_num_threads
_any_autocast: Any = torch._C._is_any_autocast_enabled
_deterministic: Any = torch._C._get_deterministic_algorithms
_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
_tracing_state: Any = torch._C._get_tracing_state
_functorch_level: Any = torch._C._functorch.peek_interpreter_stack
_dispatch_keys: Any = torch._C._dispatch_keys
_LEGACY_BATCHED = torch._C._dispatch_key_parse("Batched")

_BACKWARD_PLANS = 16
"""A layout or two per direction is what happens; more means strides that never repeat."""


class _Native(Entry):
    """The plan of a call that is native in every direction."""

    __slots__ = ("key",)
    native: bool = True

    def __init__(self) -> None:
        super().__init__()
        self.key: Any = None


ALL_NATIVE = _Native()
plans = LRU(CACHE_ENTRIES)
on_clear(plans.clear)


def make_plan(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, settings: Settings
) -> Plan | _Native | None:
    """The plan for a call of this kind; None if the call is aten's alone: it will raise, or has nothing to do.

    Raises:
        NotApplicable, ValueError: a policy that names an algorithm which cannot do this, or does not exist.
    """
    if x.dim() == 3 and weight.dim() == 4:
        return as_unbatched(make_plan(x.unsqueeze(0), weight, bias, geometry, settings))
    return plan_for(Plan, problem_of, x, weight, bias, geometry, settings)


def as_unbatched(plan: Plan | _Native | None) -> Plan | _Native | None:
    """The plan, for calls without a batch."""
    if isinstance(plan, Plan):
        plan.unbatched = True
    return plan


def plan_for(
    kind: type[Plan],
    problem_of: Callable[[Tensor, Tensor, Any], ConvProblem | None],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Any,
    settings: Settings,
) -> Plan | _Native | None:
    """As `make_plan`, for any kind of plan and its problem; x (N, C, H, W) and weight (K, C/groups, R, S)."""
    cast = _any_autocast() and autocast_dtype(x)
    if cast:
        x, weight = cast_like_autocast(x, cast), cast_like_autocast(weight, cast)
    problem = problem_of(x, weight, geometry)
    if problem is None or not valid(problem, x, weight, bias, geometry, cast=bool(cast)):
        if x.dtype not in DTYPE_NAMES and settings.policy in BY_NAME and settings.policy != NATIVE:
            raise NotApplicable(f"{settings.policy} cannot do this convolution: it computes floats, not {x.dtype}")
        return None
    found = eager_choice(problem, settings)
    needs_grad = _grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if not _leaves_native(kind, problem, settings, found, x, weight, needs_grad):
        return _Native()
    plan = kind(problem, settings, kind.strides_of(x, weight, problem))
    plan.cast = cast if isinstance(cast, torch.dtype) else None
    plan.found, plan.needs_grad = found, needs_grad
    if settings.chooses and settings.precision != "exact" and x.is_cpu:
        wanted = _grad_enabled() and weight.requires_grad
        plan.watches = not wanted and _may_transform(problem, settings, found, _grad_enabled() and x.requires_grad)
    plan._judged = not needs_grad or problem.device != "cpu"  # a GPU's queue hides what a step costs the host
    return plan


def _leaves_native(
    kind: type[Plan],
    problem: ConvProblem,
    settings: Settings,
    found: Found,
    x: Tensor,
    weight: Tensor,
    needs_grad: bool,
) -> bool:
    """Whether a plan is worth its overhead: unless everything is native, aten's own call does the same."""
    if not is_native(found) or settings.batch_invariant or kind.beats_aten(problem, settings):
        return True  # aten's own call goes by the whole batch
    if not needs_grad:
        return False
    if weight.requires_grad and problem.direction == Direction.FORWARD and overruns_in_channels_last(problem):
        return True  # its native backward steps around it
    if settings.policy == NATIVE:
        return False
    expected = kind.expected(x, weight, problem)
    return any(not is_native(eager_choice(gradient, settings)) for gradient in expected)


def _may_transform(problem: ConvProblem, settings: Settings, found: Found, needs_grad_x: bool) -> bool:
    """Whether something that is no direct sum may run: by what was found, unless choices are still to come."""
    if needs_grad_x or settings.batch_invariant:
        return problem.stride == (1, 1) and problem.R * problem.S > 1
    names = [found.algorithm] if isinstance(found, Choice) else [found.current.algorithm, *found.trial.priors]
    return not all(BY_NAME[name].direct_sums for name in names)


def is_native(found: Found | None) -> bool:
    """Whether this is settled, and native."""
    return isinstance(found, Choice) and found.algorithm == NATIVE


class Plan(Entry):
    """One kind of call with its chosen algorithms; the `ConvOps` of the autograd functions.

    The forward choice is made with the plan, the backward choices when a backward runs, by the layout its gradient
    comes in.
    """

    __slots__ = (
        "_backward", "_checked", "_judged", "cast", "found", "groups", "key", "native", "needs_grad", "problem",
        "settings", "strides", "unbatched", "watches", "weight_shape", "x_shape",
    )  # fmt: skip

    def __init__(self, problem: ConvProblem, settings: Settings, strides: ResultStrides) -> None:
        super().__init__()
        self.native = 0
        """Number of next calls that are aten's own, while a trial waits."""
        self.problem = problem
        self.settings = settings
        self.strides = strides
        self.found: Found | None = None
        self.groups = problem.groups
        self.x_shape = problem.x_shape
        self.weight_shape = problem.weight_shape
        self.needs_grad = False
        self.unbatched = False
        self.watches = False
        """Whether to look at every weight: some may run by direct sums only."""
        self.cast: torch.dtype | None = None
        self.key: Any = None
        self._checked: Geometry = (None, None, None, 0)
        self._backward: dict[Any, tuple[ConvProblem, Found]] = {}
        self._judged = True
        """False until it is known whether a training step gains by what its trials have found."""

    # What kinds of convolutions differ in.
    aten: Any = torch.conv2d
    function: Any = Conv2dFunction
    gradients: Any = staticmethod(gradients)
    one_row = False
    transposes = False
    make: Any = staticmethod(make_plan)
    strides_of: Any = staticmethod(result_strides)

    @staticmethod
    def beats_aten(problem: ConvProblem, settings: Settings) -> bool:
        """Whether a plan of this kind is better than aten's own call even if all it runs is native."""
        return False

    @staticmethod
    def expected(x: Tensor, weight: Tensor, problem: ConvProblem) -> list[ConvProblem]:
        """The problems of the gradients that these operands require, in the layouts that are to be expected."""
        return gradients_of(x, weight, problem)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any) -> Tensor:
        # Modes and tracers count, record or replay aten's convolution. And the key does not tell 1 from 1.0 from True:
        # what aten would refuse is aten's.
        watched = _dispatch_modes() > 0 or _tracing_state() is not None
        if (watched and self.settings.chooses) or not self._takes(geometry):
            return self.aten(x, weight, bias, *geometry)  # type: ignore[no-any-return]
        if self.watches and wants_direct_sums(weight):
            return self._by_direct_sums(x, weight, bias, geometry)
        if self.cast is not None:
            x, weight = cast_like_autocast(x, self.cast), cast_like_autocast(weight, self.cast)
            bias = None if bias is None else cast_like_autocast(bias, self.cast)
        if self.unbatched:
            x = x.unsqueeze(0)
        if self.needs_grad or _functorch_level() is not None or forward_ad._current_level >= 0:
            y: Tensor = self.function.apply(x, weight, bias, self)
        else:
            y = self.run(x, weight, bias)
        return y.squeeze(0) if self.unbatched else y

    def _by_direct_sums(self, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any) -> Tensor:
        """This call under precision "exact". What one weight of this shape asks for, another need not."""
        settings = exactly(self.settings)
        key = self.key and (*self.key[:-1], settings)
        plan: Any = plans.entries.get(key)
        if plan is None:
            plan = self.make(x, weight, bias, geometry, settings) or ALL_NATIVE
            if key is not None and plan is not ALL_NATIVE:
                plan.key = key
                plans.put(key, plan)
        plan.age = plans.clock
        if not plan.native:
            return plan(x, weight, bias, geometry)  # type: ignore[no-any-return]
        if plan.native is not True:
            plan.native -= 1
        return self.aten(x, weight, bias, *geometry)  # type: ignore[no-any-return]

    def _takes(self, geometry: Geometry) -> bool:
        """Whether all numbers are ints. The same layer hands over the same objects, which are looked at once."""
        before = self._checked
        if all(map(operator.is_, geometry, before)):
            return True
        if not are_ints(geometry):
            return False
        self._checked = geometry
        return True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y with aten's strides; no autograd."""
        if is_legacy_batched(x, weight):
            y = native_forward(x, weight, self.problem)
            return y if bias is None else y + bias.view(-1, 1, 1)
        found = self.found
        if found is None:  # made by vmap: other sizes than the user's, of which a trial would learn nothing
            found = self.found = choice_for(self.problem, self.settings)
        elif type(found) is LiveTrial and found.final is not None:
            found = self.found = found.final
            self._forget_if_native(found)
        y = execute(found, x, weight, self.problem, self.strides.y, bias)
        if type(found) is LiveTrial and found.waits > 0 and not self.needs_grad:
            # Until the trial goes on, the next calls are aten's own.
            self.native, found.waits = found.waits, 0
        return y

    run = forward
    """What a call of this kind computes."""

    def backward(
        self, grad_y: Tensor, x: Tensor | None, weight: Tensor | None, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(grad_x, grad_weight, grad_bias) with aten's strides, None if not needed; no autograd. x is not needed for
        grad_x. grad_bias is None, too, if aten does not compute it on the way; then it is a sum over grad_y."""
        if is_legacy_batched(grad_y, x, weight):
            # Lone operands: aten wants the third for its shape only.
            whole_x = grad_y.new_empty(self.x_shape) if x is None else x
            whole_weight = grad_y.new_empty(self.weight_shape) if weight is None else weight
            return native_backward(grad_y, whole_x, whole_weight, self.problem, needed)
        grad_x: Tensor | None = None
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        todo_x, todo_weight, _ = needed
        if needed[0] and weight is not None:
            problem, found = self._backward_choice(Direction.BACKWARD_DATA, grad_y)
            per_image = isinstance(found, Choice) and found.per_image is not None
            if not is_native(found) or x is None or per_image:
                grad_x, todo_x = execute(found, grad_y, weight, problem, self.strides.grad_x), False
        if needed[1] and x is not None:
            problem, found = self._backward_choice(Direction.BACKWARD_WEIGHT, x)
            if not is_native(found) or weight is None:
                grad_weight, todo_weight = execute(found, x, grad_y, problem, self.strides.grad_weight), False
        if todo_x or todo_weight:
            assert x is not None
            assert weight is not None
            # One call for what is native: aten shares work between the two.
            native_x, native_weight, grad_bias = without_autocast(
                native_backward, grad_y, x, weight, self.problem, (todo_x, todo_weight, todo_weight and needed[2])
            )
            if native_x is not None:
                grad_x = with_strides(native_x, self.strides.grad_x)
            if native_weight is not None:
                grad_weight = with_strides(native_weight, self.strides.grad_weight)
        if not self._judged:
            self._judge_step()
        return grad_x, grad_weight, grad_bias

    def _backward_choice(self, direction: Direction, streamed: Tensor) -> tuple[ConvProblem, Found]:
        key = (direction, streamed.stride(), _threads(), _deterministic())
        entry = self._backward.get(key)
        if entry is None:
            # On a GPU the forward problem also knows what cuDNN was told.
            settled = _deterministic() or (streamed.is_cuda and self.problem.deterministic)
            problem = self.problem._replace(
                direction=direction, layout=layout_of(streamed), threads=_threads(), deterministic=settled
            )
            entry = (problem, eager_choice(problem, self.settings))
            if len(self._backward) >= _BACKWARD_PLANS:
                self._backward.clear()
            self._backward[key] = entry
        found = entry[1]
        if isinstance(found, LiveTrial) and found.final is not None:
            entry = self._backward[key] = (entry[0], found.final)
            self._forget_if_native(found.final)
        return entry

    def _judge_step(self) -> None:
        """Once the trials of all directions are over: native everywhere after all, if what they save together is less
        than what leaving native costs a training step. Each of them alone has counted its own direction's share of it.
        """
        chosen = [(self.problem, self.found), *self._backward.values()]
        if any(isinstance(found, LiveTrial) for _, found in chosen):
            return
        self._judged = True
        left = [problem for problem, found in chosen if not is_native(found)]
        held = {problem: found_for(problem, self.settings) for problem, _ in chosen}
        trials = [found for problem in left if isinstance(found := held[problem], LiveTrial)]
        if not left or len(trials) < len(left):
            return  # what has no trial here is known to gain from elsewhere
        slowest_us = max(found.trial.native_us or 0.0 for found in held.values() if isinstance(found, LiveTrial))
        names = [trial.current.algorithm for trial in trials]
        if sum(trial.saved_us for trial in trials) < step_cost_us(slowest_us, names):
            for trial in trials:
                trial.leave_to_native("a training step gains less than leaving native costs it")
            plans.remove(self.key)

    def _forget_if_native(self, choice: Choice) -> None:
        """After a trial that native won, the plan is native's all through; with gradients the next call finds out."""
        if choice.algorithm != NATIVE:
            return
        if self.needs_grad or self.settings.batch_invariant or self.unbatched:
            plans.remove(self.key)
        elif plans.entries.get(self.key) is self:
            plans.entries[self.key] = native = _Native()
            native.key, native.age = self.key, plans.clock

    def refold(self, x_shape: tuple[int, ...], weight_shape: tuple[int, ...], groups: int, like: Tensor) -> Plan:
        """A plan for the same geometry on other sizes: what vmap makes of a batch of convolutions."""
        N, C, H, W = x_shape
        problem = self.problem._replace(N=N, C=C, H=H, W=W, K=weight_shape[0], groups=groups, layout="contiguous")
        x = torch.empty((1,), dtype=like.dtype, device=like.device).expand(x_shape)
        weight = torch.empty((1,), dtype=like.dtype, device=like.device).expand(weight_shape)
        return type(self)(problem, self.settings, result_strides(x, weight, problem))


def is_legacy_batched(*tensors: Tensor | None) -> bool:
    """Whether autograd's own vmap is at work (`is_grads_batched`, `jacobian(vectorize=True)`): its tensors cannot be
    unwrapped, and only aten's operators loop over them."""
    for t in tensors:  # noqa: SIM110  a generator would cost more than what it asks
        if t is not None and _dispatch_keys(t).has(_LEGACY_BATCHED):
            return True
    return False


__all__ = ["ALL_NATIVE", "Plan", "as_unbatched", "is_legacy_batched", "is_native", "make_plan", "plan_for", "plans"]
