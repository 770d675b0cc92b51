"""Choice -> output: the eager path, and the only file that joins problem, choice, algorithms and autograd.

A call is recognised by a key of everything that may change the answer. The key leads to a plan by one dictionary
look-up: either "all native", and the call is `torch.conv2d`, or a `Plan` that runs the chosen algorithms. Plans are
made at the first call of a kind and kept in a bounded cache, and so are the choices, one per problem.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from convselect import settings as _settings
from convselect.aten.arguments import (
    are_ints,
    autocast_dtype,
    bias_fits,
    cast_like_autocast,
    problem_of,
    valid,
    y_layout,
)
from convselect.aten.autograd import Conv2dFunction, in_functorch
from convselect.aten.strides import ResultStrides, result_strides, with_strides
from convselect.choice.choose import NATIVE, Choice, forced
from convselect.eager.execution import choice_for, eager_choice
from convselect.eager.execution import execute as _execute
from convselect.eager.execution import without_autocast as _without_autocast
from convselect.eager.live_trial import OnTrial
from convselect.kernels import _cuda_flags
from convselect.kernels._contract import Algorithm, NotApplicable
from convselect.kernels._native_ops import native_backward, native_forward, overruns_in_channels_last
from convselect.kernels.pool import BY_NAME
from convselect.lru import LRU, Entry, on_clear
from convselect.problem import DTYPE_NAMES, ConvProblem, Direction, layout_of
from convselect.settings import CACHE_ENTRIES, Settings

# Looked up once: each of these is read on every call.
_grad_enabled = torch.is_grad_enabled
_threads = torch.get_num_threads
_any_autocast: Any = torch._C._is_any_autocast_enabled
_deterministic: Any = torch._C._get_deterministic_algorithms
_mkldnn_enabled: Any = torch._C._get_mkldnn_enabled
_fp32_precision: Any = torch._C._get_fp32_precision_getter
_conv2d: Any = torch.conv2d
_current_settings = _settings.current

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
# A layout or two per direction is what happens; more means strides that never repeat.
_BACKWARD_PLANS = 16


class _Native(Entry):
    """The plan of a call that is native in every direction."""

    __slots__ = ()
    native: bool = True


plans = LRU(CACHE_ENTRIES)
on_clear(plans.clear)
_plan_entries = plans.entries


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
    policy: str | None = None,
) -> Tensor:
    """As `torch.nn.functional.conv2d`; see `convselect.conv2d`, which is this with its documentation."""
    settings = _current_settings()
    if policy is not None:
        settings = _settings.with_policy(settings, policy)
    if type(x) not in _PLAIN or type(weight) not in _PLAIN or (bias is not None and type(bias) not in _PLAIN):
        return _not_ours(settings, "tensor subclasses", x, weight, bias, stride, padding, dilation, groups)
    plan: Any
    try:
        key = (
            x.shape, x.stride(), x.dtype, x.device, x.requires_grad,
            weight.shape, weight.stride(), weight.dtype, weight.requires_grad,
            None if bias is None else bias.requires_grad,
            stride, padding, dilation, groups,
            _grad_enabled(), _any_autocast() and autocast_dtype(x), _threads(), _deterministic(), _mkldnn_enabled(),
            _fp32_precision("mkldnn", "conv") if x.is_cpu else _cuda_flags.state(), settings,
        )  # fmt: skip
        plan = _plan_entries.get(key)
    except TypeError:  # lists, which nn.Conv2d's attributes may hold as well
        geometry = tuple(map(_hashable, (stride, padding, dilation)))
        if all(a is b for a, b in zip(geometry, (stride, padding, dilation), strict=True)):
            return _conv2d(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
        return conv2d(x, weight, bias, geometry[0], geometry[1], geometry[2], groups, policy)
    except RuntimeError:  # nested tensors have no shape
        return _conv2d(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
    if plan is None:
        if settings.chooses and torch._C._get_tracing_state() is not None:
            # Sizes are tensors here, and the trace is to hold aten's convolution in any case.
            return _conv2d(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
        plan = _make_plan(x, weight, bias, stride, padding, dilation, groups, settings)
        if plan is None:
            return _conv2d(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
        if not plan.native:
            plan.key = key
        plans.put(key, plan)
    else:
        plan.age = plans.clock
    if plan.native:
        return _conv2d(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
    return plan(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]


def _not_ours(settings: Settings, what: str, *arguments: Any) -> Tensor:
    """PyTorch's own convolution, unless an algorithm was asked for by name."""
    x, weight, bias, *_ = arguments
    tensors = isinstance(x, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
    if tensors and not (settings.chooses or settings.policy == NATIVE):
        raise NotApplicable(f"{settings.policy} cannot do this convolution: {what} are left to PyTorch")
    return _conv2d(*arguments)  # type: ignore[no-any-return]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | torch.Size) else value


# ---- plans ------------------------------------------------------------------------------------------------------


def _make_plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    settings: Settings,
) -> Plan | _Native | None:
    """The plan for a call of this kind; None where the call is aten's alone: it will raise, or has nothing to do."""
    if x.dim() == 3 and weight.dim() == 4:
        inner = _make_plan(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups, settings)
        if isinstance(inner, Plan):
            inner.unbatched = True
        return inner
    cast = _any_autocast() and autocast_dtype(x)
    if cast:
        x, weight = cast_like_autocast(x, cast), cast_like_autocast(weight, cast)
    problem = problem_of(x, weight, stride, padding, dilation, groups)
    if problem is None or not valid(problem, x, weight, bias, padding, cast=bool(cast)):
        _refuse_dtype(settings, x)
        return None
    plan = Plan(problem, settings, result_strides(x, weight, problem))
    plan.cast = cast if isinstance(cast, torch.dtype) else None
    plan.choice = eager_choice(problem, settings)
    plan.needs_grad = _grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if plan.choice.algorithm != NATIVE or settings.batch_invariant:
        return plan  # aten's own call goes by the whole batch
    if plan.needs_grad and weight.requires_grad and overruns_in_channels_last(problem):
        return plan  # whose native backward steps around it
    if settings.policy == NATIVE or not plan.needs_grad:
        return _Native()
    # Forward is native; a Plan is worth its overhead only if a backward direction is expected not to be.
    directions = [d for d, t in ((Direction.BACKWARD_DATA, x), (Direction.BACKWARD_WEIGHT, weight)) if t.requires_grad]
    layout = y_layout(x, weight, problem)
    for direction in directions:
        expected = problem.with_direction(direction)
        if direction == Direction.BACKWARD_DATA:
            expected = expected._replace(layout=layout)
        if eager_choice(expected, settings).algorithm != NATIVE:
            return plan
    return _Native()


def _refuse_dtype(settings: Settings, x: Tensor) -> None:
    if x.dtype not in DTYPE_NAMES and settings.policy in BY_NAME and settings.policy != NATIVE:
        raise NotApplicable(f"{settings.policy} cannot do this convolution: it computes floats, not {x.dtype}")


def problems_of(layer: torch.nn.Conv2d, x: Tensor) -> list[ConvProblem]:
    """The problems a convolution layer poses for this input: forward, and under grad mode each gradient that would be
    computed. Empty where the call is aten's alone."""
    weight, bias, padding = layer.weight, layer.bias, layer.padding
    if layer.padding_mode != "zeros":
        x = torch.nn.functional.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = (0, 0)
    if x.dim() == 3:
        x = x.unsqueeze(0)
    cast = _any_autocast() and autocast_dtype(x)
    if cast:
        x, weight = cast_like_autocast(x, cast), cast_like_autocast(weight, cast)
    problem = problem_of(x, weight, layer.stride, padding, layer.dilation, layer.groups)
    if problem is None or not valid(problem, x, weight, bias, padding, cast=bool(cast)):
        return []
    problems = [problem]
    if _grad_enabled() and x.requires_grad:
        problems.append(problem._replace(direction=Direction.BACKWARD_DATA, layout=y_layout(x, weight, problem)))
    if _grad_enabled() and weight.requires_grad:
        problems.append(problem.with_direction(Direction.BACKWARD_WEIGHT))
    return problems


class Plan(Entry):
    """One kind of call with its chosen algorithms; what the autograd functions are bound to.

    The forward choice is made with the plan, the backward choices when a backward runs, by the layout its gradient
    comes in.
    """

    __slots__ = (
        "_backward", "cast", "choice", "groups", "key", "needs_grad", "problem", "settings", "strides", "unbatched",
        "weight_shape", "x_shape",
    )  # fmt: skip
    native: bool = False

    def __init__(self, problem: ConvProblem, settings: Settings, strides: ResultStrides) -> None:
        super().__init__()
        self.problem = problem
        self.settings = settings
        self.strides = strides
        self.choice: Choice | OnTrial | None = None
        self.groups = problem.groups
        self.x_shape = problem.x_shape
        self.weight_shape = problem.weight_shape
        self.needs_grad = False
        self.unbatched = False
        self.cast: torch.dtype | None = None
        self._backward: dict[Any, tuple[ConvProblem, Choice | OnTrial]] = {}
        self.key: Any = None

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
    ) -> Tensor:
        watched = torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None
        if watched and self.settings.chooses:
            # Modes and tracers count, record or replay aten's convolution.
            return _conv2d(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
        # The key does not tell 1 from 1.0 from True, nor one bias from another: what aten would refuse is aten's.
        if not (
            (bias is None or bias_fits(bias, x, self.problem.K, cast=self.cast is not None))
            and weight.device == x.device
            and are_ints(stride, padding, dilation, groups)
        ):
            return _conv2d(x, weight, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]
        if self.cast is not None:
            x, weight = cast_like_autocast(x, self.cast), cast_like_autocast(weight, self.cast)
            bias = None if bias is None else cast_like_autocast(bias, self.cast)
        if self.unbatched:
            x = x.unsqueeze(0)
        if self.needs_grad or in_functorch() or forward_ad._current_level >= 0:
            y: Tensor = Conv2dFunction.apply(x, weight, bias, self)
        else:
            y = self.forward(x, weight, bias)
        return y.squeeze(0) if self.unbatched else y

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y with aten's strides; no autograd."""
        if _is_legacy_batched(x, weight):
            y = native_forward(x, weight, self.problem)
            return y if bias is None else y + bias.view(-1, 1, 1)
        choice = self.choice
        if choice is None:  # made by vmap: other sizes than the user's, of which a trial would learn nothing
            choice = self.choice = choice_for(self.problem, self.settings)
        elif choice.source == "trial" and choice.final is not None:  # type: ignore[union-attr]
            choice = self.choice = choice.final  # type: ignore[union-attr]
            self._forget_if_native(choice)
        return _execute(choice, x, weight, self.problem, self.strides.y, bias)

    def backward(
        self, grad_y: Tensor, x: Tensor | None, weight: Tensor | None, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """(grad_x, grad_weight) with aten's strides, None where not needed; no autograd. x is not needed for grad_x."""
        if _is_legacy_batched(grad_y, x, weight):
            # Lone operands: aten wants the third for its shape only.
            whole_x = grad_y.new_empty(self.x_shape) if x is None else x
            whole_weight = grad_y.new_empty(self.weight_shape) if weight is None else weight
            return native_backward(grad_y, whole_x, whole_weight, self.problem, needed)
        grad_x: Tensor | None = None
        grad_weight: Tensor | None = None
        todo_x, todo_weight = needed
        if needed[0] and weight is not None:
            problem, choice = self._backward_choice(Direction.BACKWARD_DATA, grad_y)
            if choice.algorithm != NATIVE or x is None or choice.alone is not None:
                grad_x, todo_x = _execute(choice, grad_y, weight, problem, self.strides.grad_x), False
        if needed[1] and x is not None:
            problem, choice = self._backward_choice(Direction.BACKWARD_WEIGHT, x)
            if choice.algorithm != NATIVE or weight is None:
                grad_weight, todo_weight = _execute(choice, x, grad_y, problem, self.strides.grad_weight), False
        if todo_x or todo_weight:
            assert x is not None
            assert weight is not None
            # One call for what is native: aten shares work between the two.
            native_x, native_weight = _without_autocast(
                native_backward, grad_y, x, weight, self.problem, (todo_x, todo_weight)
            )
            if native_x is not None:
                grad_x = with_strides(native_x, self.strides.grad_x)
            if native_weight is not None:
                grad_weight = with_strides(native_weight, self.strides.grad_weight)
        return grad_x, grad_weight

    def _backward_choice(self, direction: Direction, streamed: Tensor) -> tuple[ConvProblem, Choice | OnTrial]:
        key = (direction, streamed.stride(), _threads(), _deterministic())
        found = self._backward.get(key)
        if found is None:
            # On a GPU the forward problem also knows what cuDNN was told.
            settled = _deterministic() or (streamed.is_cuda and self.problem.deterministic)
            problem = self.problem._replace(
                direction=direction, layout=layout_of(streamed), threads=_threads(), deterministic=settled
            )
            found = (problem, eager_choice(problem, self.settings))
            if len(self._backward) >= _BACKWARD_PLANS:
                self._backward.clear()
            self._backward[key] = found
        choice = found[1]
        if choice.source == "trial" and choice.final is not None:  # type: ignore[union-attr]
            found = self._backward[key] = (found[0], choice.final)  # type: ignore[union-attr]
            self._forget_if_native(found[1])
        return found

    def _forget_if_native(self, choice: Choice | OnTrial) -> None:
        """After a trial that native won, the next call makes a new plan, which may be native's all through."""
        if choice.algorithm == NATIVE:
            plans.entries.pop(self.key, None)

    def refold(self, x_shape: tuple[int, ...], weight_shape: tuple[int, ...], groups: int, like: Tensor) -> Plan:
        """A plan for the same geometry on other sizes: what vmap makes of a batch of convolutions."""
        N, C, H, W = x_shape
        problem = self.problem._replace(N=N, C=C, H=H, W=W, K=weight_shape[0], groups=groups, layout="contiguous")
        x = torch.empty((1,), dtype=like.dtype, device=like.device).expand(x_shape)
        weight = torch.empty((1,), dtype=like.dtype, device=like.device).expand(weight_shape)
        return Plan(problem, self.settings, result_strides(x, weight, problem))


_dispatch_keys: Any = torch._C._dispatch_keys
_LEGACY_BATCHED = torch._C._dispatch_key_parse("Batched")


def _is_legacy_batched(*tensors: Tensor | None) -> bool:
    """Whether autograd's own vmap is at work (`is_grads_batched`, `jacobian(vectorize=True)`): its tensors cannot be
    unwrapped, and only aten's operators loop over them."""
    for t in tensors:  # noqa: SIM110  a generator would cost more than what it asks
        if t is not None and _dispatch_keys(t).has(_LEGACY_BATCHED):
            return True
    return False


def check_policy(policy: str) -> None:
    """Raises ValueError unless `policy` is one that chooses or the name of an algorithm."""
    if policy not in _settings.CHOOSING and policy not in BY_NAME:
        forced(ConvProblem(Direction.FORWARD, 1, 1, 1, 1, 1, 1, 1), policy, BY_NAME)


__all__ = ["Algorithm", "Plan", "check_policy", "choice_for", "conv2d"]
