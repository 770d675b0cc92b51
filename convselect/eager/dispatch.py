"""The eager path: a call is recognised by a key of everything that may change the answer.

The key leads to a plan by one dictionary look-up: either "all native", and the call is aten's own, or a `Plan` that
runs the chosen algorithms. Plans are made at the first call of a kind and kept in a bounded cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from convselect.aten.arguments import autocast_dtype, problem_of
from convselect.base import settings as _settings
from convselect.base.settings import Settings
from convselect.base.shortage import is_out_of_memory
from convselect.choice.choose import NATIVE
from convselect.eager import cached
from convselect.eager.execute import give_back
from convselect.eager.plan import ALL_NATIVE, make_plan, plans
from convselect.kernels import _cuda_flags
from convselect.kernels._contract import NotApplicable
from convselect.kernels._native_ops import native_forward_in_bands

# Looked up once: each of these is read on every call.
_grad_enabled = torch.is_grad_enabled
_threads = torch.get_num_threads
_any_autocast: Any = torch._C._is_any_autocast_enabled
_deterministic: Any = torch._C._get_deterministic_algorithms
_mkldnn_enabled: Any = torch._C._get_mkldnn_enabled
_fp32_precision: Any = torch._C._get_fp32_precision_getter
_tracing_state: Any = torch._C._get_tracing_state
_current_settings = _settings.current
_plan_entries = plans.entries

_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def settings_for(policy: str | None) -> Settings:
    """The settings in force, with this policy; None: with theirs."""
    current = _current_settings()
    return current if policy is None else _settings.with_policy(current, policy)


Call = Callable[..., Tensor]
# (x, weight, bias, geometry, settings) -> the plan
Maker = Callable[[Tensor, Tensor, Tensor | None, Any, Settings], Any]


def dispatcher(native: Call, make: Maker) -> Any:
    """The function that dispatches one kind of convolution, by `native`'s arguments up to the bias and its geometry.

    Keys need not name the kind: the shape of the weight and the length of the geometry do. Each kind has its own
    function in place of an argument, which would cost every call its look-ups.

    Args:
        native: aten's own, which computes what is left to it.
        make: makes the plan for a new kind of call; None if the call is aten's alone.

    The function takes a list as `seen`, too, to which it appends the plan that it goes by.
    """

    def dispatch(
        x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, policy: str | None = None, seen: Any = None
    ) -> Tensor:
        settings = _current_settings()
        if policy is not None:
            settings = _settings.with_policy(settings, policy)
        plan: Any = ALL_NATIVE
        if type(x) in _PLAIN and type(weight) in _PLAIN and (bias is None or type(bias) in _PLAIN):
            try:
                key = (
                    x.shape, x.stride(), x.dtype, x.device, x.requires_grad,
                    weight.shape, weight.stride(), weight.dtype, weight.device, weight.requires_grad,
                    bias is not None and (bias.shape, bias.dtype, bias.device, bias.layout, bias.requires_grad),
                    geometry, _grad_enabled(), _any_autocast() and autocast_dtype(x), _threads(), _deterministic(),
                    _mkldnn_enabled(), _fp32_precision("mkldnn", "conv") if x.is_cpu else _cuda_flags.state(), settings,
                )  # fmt: skip
                plan = _plan_entries.get(key)
            except (TypeError, RuntimeError):
                # No key: lists, which a layer's attributes may hold as well, or nested tensors, which have no shape and
                # are aten's.
                plain: Any = tuple(tuple(v) if isinstance(v, list | torch.Size) else v for v in geometry)
                if all(a is b for a, b in zip(plain, geometry, strict=True)):
                    return native(x, weight, bias, *geometry)
                return dispatch(x, weight, bias, plain, policy, seen)
            if plan is None:
                plan = _new_plan(make, key, x, weight, bias, geometry, settings)
            else:
                plan.age = plans.clock
        else:
            _refuse_subclasses(settings, x, weight, bias)
        if seen is not None:
            seen.append(plan)
        left = plan.native
        if left:
            if left is not True:
                plan.native = left - 1
            try:
                return native(x, weight, bias, *geometry)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            return _with_less_memory(native, x, weight, bias, geometry)
        return plan(x, weight, bias, geometry)  # type: ignore[no-any-return]

    return dispatch


def _with_less_memory(native: Call, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any) -> Tensor:
    """aten's call once more, after it ran out of memory: what PyTorch alone would have had enough for has enough."""
    give_back()
    try:
        return native(x, weight, bias, *geometry)
    except RuntimeError as error:
        problem = problem_of(x, weight, geometry) if native is torch.conv2d and x.dim() == 4 and x.is_cpu else None
        wanted = _grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
        if not is_out_of_memory(error) or problem is None or problem.is_oversized or wanted or _any_autocast():
            raise
    return native_forward_in_bands(x, weight, problem, bias)


def _new_plan(
    make: Maker, key: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, settings: Settings
) -> Any:
    """The plan for this kind of call, cached; not cached if aten refuses such a call, or a trace is made: sizes are
    tensors then, and the trace is to hold aten's convolution in any case."""
    if settings.chooses and _tracing_state() is not None:
        return ALL_NATIVE
    plan = make(x, weight, bias, geometry, settings)
    if plan is None:
        return ALL_NATIVE
    plan.key = key
    plans.put(key, plan)
    return plan


def _refuse_subclasses(settings: Settings, x: Any, weight: Any, bias: Any) -> None:
    """Tensor subclasses are PyTorch's, unless an algorithm was asked for by name."""
    tensors = isinstance(x, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
    if tensors and not (settings.chooses or settings.policy == NATIVE):
        raise NotApplicable(f"{settings.policy} cannot do this convolution: tensor subclasses are left to PyTorch")


conv2d = cached.in_front_of(dispatcher(torch.conv2d, make_plan), 2)
"""As `torch.conv2d(x, weight, bias, *geometry)`; see `convselect.conv2d`, which is this with its documentation."""

__all__ = ["conv2d", "dispatcher", "settings_for"]
