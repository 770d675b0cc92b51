"""Cached calls outside Python: which plans `cached_calls.cpp` may run by itself, described to it.

The dispatch function in Python knows everything; the compiled one in front of it knows the calls that need no decision
any more: aten's own, and settled choices of C kernels on ordinary tensors. Without it every call goes through Python,
with the same results. It is built for one version of PyTorch and of Python, by `convselect build`.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from convselect.base import settings
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, canonical_strides
from convselect.base.warnings import warn_once
from convselect.choice.choose import Choice
from convselect.eager import checks
from convselect.eager.execute import failures
from convselect.eager.live_trial import LiveTrial
from convselect.eager.plan import Plan, is_native, plans
from convselect.kernels import _library
from convselect.kernels._c_algorithm import CAlgorithm
from convselect.kernels._native_ops import overruns_in_channels_last
from convselect.kernels.pool import BY_NAME
from convselect.measure import plan_cost
from convselect.model.loaded import idle
from convselect.store import extension

ALWAYS = -1


def refill(made: int) -> int:
    """Count calls that were made outside Python; how many may follow before the next has to be made here."""
    checks.due.left -= made
    idle.left -= made
    return max(0, min(checks.due.left, idle.left))


def describe(plan: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any) -> Any:
    """What calls of this plan's kind do from now on: None if they are Python's business; (calls, None) if so many are
    aten's own; (calls, plan, recipe, needs_grad, watches) for a plan. `ALWAYS`: until the cache is cleared."""
    plan = plans.entries.get(plan.key)
    if plan is None:
        return None
    if plan.native is True:
        return ALWAYS, None
    if plan.native:
        calls, plan.native = plan.native, 0
        return calls, None
    if plan.unbatched or plan.cast is not None or failures:
        return None
    if plan.one_row:
        x, weight = x.contiguous().unsqueeze(2), weight.unsqueeze(2)
    recipe = _recipe(plan, plan.found, plan.problem, x, weight, plan.strides.y, bias)
    if recipe is None or (plan.needs_grad and not plan.problem.symmetric_padding):
        return None
    return ALWAYS, plan, recipe, plan.needs_grad, plan.watches


def describe_backward(plan: Plan, grad_y: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Any:
    """(recipe of grad_x, recipe of grad_weight), None if not needed; None if they are Python's business."""
    if not plan._judged or failures or (needed[1] and overruns_in_channels_last(plan.problem)):
        return None
    if plan.one_row:
        grad_y, x, weight = grad_y.unsqueeze(2), x.contiguous().unsqueeze(2), weight.unsqueeze(2)
    of_x, (a, b) = Direction.BACKWARD_DATA, (x, grad_y)
    if plan.transposes:
        of_x, (a, b) = Direction.FORWARD, (grad_y, x)
    asked = (
        (needed[0], of_x, grad_y, weight, plan.strides.grad_x),
        (needed[1], Direction.BACKWARD_WEIGHT, a, b, plan.strides.grad_weight),
    )
    recipes = []
    for wanted, direction, a, b, strides in asked:
        recipe = None
        if wanted:
            key = (direction, a.stride(), torch.get_num_threads(), torch._C._get_deterministic_algorithms())  # type: ignore[attr-defined]
            problem, found = plan._backward.get(key, (plan.problem, None))
            recipe = _recipe(plan, found, problem, a, b, strides, None)
            if recipe is None:
                return None
        recipes.append(recipe)
    return tuple(recipes)


def _recipe(
    plan: Plan,
    found: Any,
    problem: ConvProblem,
    a: Tensor,
    b: Tensor,
    strides: tuple[int, ...],
    bias: Tensor | None,
) -> Any:
    """How a C kernel is called on such operands, or (strides,) for aten; None if it is Python's business."""

    def lowered(of_image: tuple[int, ...]) -> tuple[int, ...]:
        return (*of_image[:2], *of_image[3:]) if plan.one_row else of_image

    if isinstance(found, LiveTrial):
        found = found.final
    if not isinstance(found, Choice) or found.per_image is not None:
        return None
    if is_native(found):
        return (lowered(strides),) if problem.symmetric_padding else None
    algorithm = BY_NAME[found.algorithm]
    own: Any = algorithm.run_checked  # somebody's own, an attribute of the instance included, is called
    if getattr(own, "__func__", None) is not CAlgorithm.run_checked or algorithm.may_be_unready:
        return None
    assert isinstance(algorithm, CAlgorithm)
    if bias is not None and not (bias.dtype == torch.float32 and bias.is_contiguous()):
        return None
    leading = algorithm._in_c(problem, found.params)
    if leading is None:
        return None
    preferred = problem.layout if problem.layout in _library.LAYOUTS else CONTIGUOUS  # of copies of what is neither
    tune = () if found.params is None else algorithm._tune(problem, found.params)
    of_weight = problem.direction == Direction.BACKWARD_WEIGHT
    a_layout, b_layout = _layout(a, preferred), _layout(b, preferred if of_weight else CONTIGUOUS)
    if plan.one_row and CHANNELS_LAST in (a_layout, b_layout):
        return None  # an image of one row in that order is no tensor without it
    call = _library._prepared(
        algorithm.kernel, len(leading), problem, a_layout, b_layout, torch.get_num_threads(), _library.isa(), tune
    )
    if call.large:
        return None  # in huge pages, which Python asks for: its time is nothing beside such a call's
    return (
        ctypes.cast(call.function, ctypes.c_void_p).value,
        leading,
        bytes(call.conv._obj),
        lowered(call.result_shape),
        lowered(canonical_strides(call.result_shape, CONTIGUOUS if of_weight else a_layout)),
        lowered(strides),
        a_layout == CHANNELS_LAST,
        b_layout == CHANNELS_LAST,
        found.source != "forced",
        problem.direction == Direction.FORWARD,
    )


def _layout(t: Tensor, otherwise: str) -> str:
    """The layout that `_library.dense` gives this operand."""
    if t.is_contiguous():
        return CONTIGUOUS
    return CHANNELS_LAST if t.is_contiguous(memory_format=torch.channels_last) else otherwise


# ---- loading ------------------------------------------------------------------------------------------------------


def in_front_of(dispatch: Any, dimensions: int, *, transposed: bool = False) -> Any:
    """The compiled function in front of this one; this one itself if there is none."""
    if _loaded is None:
        return dispatch
    cache = _loaded.Cache(dispatch, describe, settings.CACHE_ENTRIES, dimensions, transposed)
    plans.followers.append(cache.clear)
    return cache


def gradients(plan: Plan, grad_y: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool, bool]) -> Any:
    return plan.gradients(plan, grad_y, x, weight, needed)


def is_live() -> bool:
    """Whether cached calls run outside Python."""
    return _loaded is not None


def _load() -> Any:
    path = extension.found()
    if path is None:
        return None
    try:
        loader = importlib.machinery.ExtensionFileLoader("_cached_calls", str(path))
        spec = importlib.util.spec_from_file_location("_cached_calls", str(path), loader=loader)
        assert spec is not None
        module: Any = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        module.set_up(
            torch.nn.Parameter, settings._override, vars(settings), vars(forward_ad),
            torch._C._get_fp32_precision_getter, refill, describe_backward, gradients,
        )  # fmt: skip
    except Exception as error:
        warn_once("extension", f"convselect: {path} cannot be loaded ({error}); cached calls go through Python.")
        return None
    plan_cost.outside_python = True
    return module


_loaded = _load()
