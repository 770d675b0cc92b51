"""What the parity tests share: forcing an algorithm, favouring one, and comparing a call with native's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import relative_error
from tolerances import FORWARD, NATIVE_16_BIT_FACTOR, WEIGHT_GRADIENT_FACTOR

import convselect
from convselect.aten import arguments as aten_arguments
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, DTYPE_NAMES, STRIDED, ConvProblem, Direction
from convselect.eager import cached
from convselect.eager import plan as eager_plan
from convselect.kernels._contract import Grade
from convselect.kernels.pool import ALL, BY_NAME
from convselect.model import loaded

NAMES = tuple(a.name for a in ALL if "cpu" in a.devices)
# The slowest for last: if one algorithm other than native is enough, this one converts layouts in every direction.
OTHER = "native_channels_last"
_numbers = itertools.count()


@dataclass(frozen=True)
class Favourite:
    """A predictor (and its own prediction) that ranks one algorithm first, by far."""

    name: str
    gain: float = 3.0
    margin: float = 0.05
    identity: str = "favourite"
    ranked: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranked", (self.name, "native"))

    def predict(self, problem: ConvProblem) -> Favourite:
        return self

    def log_gain(self, name: str) -> float:
        return self.gain if name == self.name else 0.0

    def margin_of(self, name: str) -> float:
        return self.margin

    def probability(self, name: str) -> float:
        return 0.9 if name == self.name else 0.1


@contextmanager
def favouring(name: str | None) -> Iterator[None]:
    """Automatic choices prefer this algorithm wherever it may be chosen; None: there is no predictor."""
    with pytest.MonkeyPatch.context() as patch:
        convselect.clear()
        identity = f"favourite {next(_numbers)}"  # nothing learnt leaks into the next test
        patch.setattr(loaded, "get", lambda: None if name is None else Favourite(name, identity=identity))
        yield
    convselect.clear()


def problem_of(x: torch.Tensor, weight: torch.Tensor, stride=1, padding=0, dilation=1, groups=1) -> ConvProblem | None:
    """The forward problem that dispatch sees; None if it leaves the call to aten."""
    if x.dim() == 3:
        x = x.unsqueeze(0)
    return aten_arguments.problem_of(x, weight, (stride, padding, dilation, groups))


def refusals(name: str, problem: ConvProblem, direction: Direction) -> set[str]:
    """Every sentence with which the algorithm may refuse this direction, whatever the layout of what streams in."""
    layouts = (problem.layout,) if direction == Direction.FORWARD else (CONTIGUOUS, CHANNELS_LAST, STRIDED)
    answers = {BY_NAME[name].why_not(problem._replace(direction=direction, layout=layout)) for layout in layouts}
    return {a for a in answers if a is not None}


def bound(dtype: torch.dtype, name: str = "native") -> float:
    """How far apart two correct answers may be: the sum of what either may differ from float64, at any grade."""
    if dtype not in DTYPE_NAMES:
        return 0.0 if not dtype.is_complex else 1e-5
    grade = Grade.LOOSE if name not in ("native", "native_channels_last", "native_contiguous") else Grade.DIRECT
    one = FORWARD[DTYPE_NAMES[dtype], grade] * WEIGHT_GRADIENT_FACTOR
    return one * (1 + NATIVE_16_BIT_FACTOR) if dtype in (torch.float16, torch.bfloat16) else 2 * one


@dataclass
class Run:
    """What a call gave: y and the gradients of x, weight and bias (None if there is none)."""

    y: torch.Tensor
    grads: tuple[torch.Tensor | None, ...]


Consumer = Callable[[torch.Tensor], torch.Tensor]
CONSUMERS: dict[str, Consumer] = {
    # An expanded gradient: every stride is zero.
    "sum": lambda y: y.sum(),
    # A complex y: the gradient of its real part.
    "real": lambda y: torch.view_as_real(y)[..., 0].sum() if y.is_complex() else y.sum(),
    # A gradient in the layout of y.
    "square": lambda y: (y * y).sum(),
    # A channels_last gradient, whatever y is.
    "channels_last": lambda y: _weighed(y.contiguous(memory_format=torch.channels_last)) if y.dim() == 4 else y.sum(),
    # A gradient that is a slice of something larger.
    "cat": lambda y: _weighed(torch.cat([y, y[..., :1, :, :], y], dim=-3)),
}


def _weighed(y: torch.Tensor) -> torch.Tensor:
    """A sum with weights that have y's memory layout, so that the gradient has it, too."""
    ramp = torch.arange(1, y.numel() + 1, device=y.device).remainder(7).sub(2).view(y.shape)
    return (y * torch.empty_like(y).copy_(ramp)).sum()


def leaf(t: torch.Tensor | None, requires_grad: bool = True) -> torch.Tensor | None:
    """A leaf over the same memory, strides kept."""
    return None if t is None else t.detach().requires_grad_(requires_grad)


def run(
    function: Callable[..., torch.Tensor],
    operands: tuple[torch.Tensor | None, ...],
    mask: tuple[bool, bool, bool] = (True, True, True),
    consumer: str = "square",
    **arguments: Any,
) -> Run:
    """One call and one backward; gradients raw, as the node returns them."""
    leaves = [leaf(t, m) for t, m in zip(operands, mask, strict=True)]
    y = function(*leaves, **arguments)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    grads: list[torch.Tensor | None] = [None, None, None]
    if wanted:
        for t, grad in zip(wanted, torch.autograd.grad(CONSUMERS[consumer](y), wanted), strict=True):
            grads[next(i for i, own in enumerate(leaves) if own is t)] = grad
    return Run(y.detach(), tuple(grads))


def assert_same(got: torch.Tensor | None, want: torch.Tensor | None, limit: float, what: str) -> None:
    """Same shape, dtype and strides to the last number; values within `limit` (relative L2)."""
    if want is None:
        assert got is None, f"{what}: native has none"
        return
    assert got is not None, f"{what} is missing"
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    assert got.stride() == want.stride(), (
        f"{what}: strides {got.stride()}, native's {want.stride()}, {tuple(got.shape)}"
    )
    assert got.layout == want.layout
    if want.dtype.is_complex or not want.dtype.is_floating_point:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 if want.dtype.is_complex else 0)
        return
    error = relative_error(got, want)
    assert error <= limit, f"{what}: {error:.2e} off native, {limit:.1e} allowed"


def assert_same_run(got: Run, want: Run, limit: float, what: str) -> None:
    assert_same(got.y, want.y, limit, f"{what}: y")
    for name, g, w in zip(("grad_x", "grad_weight", "grad_bias"), got.grads, want.grads, strict=True):
        assert_same(g, w, limit, f"{what}: {name}")


def run_or_refuse(
    name: str, problem: ConvProblem, direction: Direction, operands: tuple[torch.Tensor | None, ...], *rest, **arguments
) -> Run | None:
    """`run` under a forced algorithm; None if it refuses this direction, with its own sentence."""
    try:
        return run(lambda *o, **a: convselect.conv2d(*o, policy=name, **a), operands, *rest, **arguments)
    except convselect.NotApplicable as error:
        message = str(error)
    sentences = refusals(name, problem, direction)
    assert any(sentence in message for sentence in sentences), (message, sentences)
    return None


def native(x, weight, bias=None, **arguments):
    return F.conv2d(x, weight, bias, **arguments)


def ours(policy):
    return lambda *operands, **arguments: convselect.conv2d(*operands, policy=policy, **arguments)


class in_python:
    """Calls of this block go through Python: the compiled caches do not know them, and are not told."""

    def __enter__(self):
        cached.failures[("none", None)] = [0, 0]  # while something fails nothing is described
        self._forget()

    def __exit__(self, *_):
        cached.failures.pop(("none", None), None)
        self._forget()

    def _forget(self):
        for forget in eager_plan.plans.followers:
            forget()


def algorithms_of(call):
    """The names of the algorithms that really ran during `call`."""
    ran = []
    original = eager_plan.execute

    def spying(choice, *rest):
        ran.append(choice.algorithm)
        return original(choice, *rest)

    with in_python(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager_plan, "execute", spying)
        call()
    return ran
