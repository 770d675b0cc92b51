"""Operators for compiled and exported graphs: the three maps of a convolution, by an algorithm that is named.

    convselect::conv2d              y = conv2d(input, weight) + bias
    convselect::conv2d_grad_input   gradient of input, which has this size and these strides
    convselect::conv2d_grad_weight  gradient of weight, likewise

and the same of conv3d, conv_transpose2d and conv_transpose3d. input is (N, C, H, W), weight (K, C / groups, R, S), y
and grad_output (N, K, P, Q), bias (K,); of volumes with a depth before the height; of transposed convolutions weight is
(C, K / groups, R, S), as in PyTorch. `padding` is per side, (top, bottom, left, right), of volumes after (front, back);
of transposed convolutions per dimension.

`algorithm` names what runs; "" leaves the choice to the run. A convolution also carries the names for its gradients.
`settings` are policy and budgets as `str(settings)` writes them; "" means those in force when the operator runs. An
algorithm that is named but fails, or does not apply on the machine that runs the graph, is one warning and a native
result, unless the policy names it: then its error is raised.

A transposed convolution is the grad-input map of the convolution the other way round, and its gradients are that one's
other maps. It has operators of its own all the same: aten gives its results other strides, and readers of a graph know
its name.

Results have aten's strides, and so have the fakes. The operators are closed under differentiation (see "autograd"); if
one is native, autograd emits aten's own operator instead of ours. They are registered through `torch.library.Library`
because `torch.library.custom_op` costs several times as much per call.

FLOP formulas are registered once `torch.utils.flop_counter` is loaded, as compiling and exporting do: importing it here
would import triton.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from convselect.base.problem import Direction
from convselect.choice.choose import NATIVE
from convselect.graph.run import (
    AnyGeometry,
    OpGeometry,
    Sizes,
    Target,
    TransposedOpGeometry,
    aten,
    aten_backward,
    outline,
    plans,
    run,
)

FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT = Direction.FORWARD, Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT

_library = torch.library.Library("convselect", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_NAMES = 'str algorithm="", str grad_input="", str grad_weight="", str settings=""'
_NAME = 'str algorithm="", str settings=""'


def _texts(given: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The texts at the end of a call: kernels in Python do not get those that are left at their defaults."""
    return (*given, *("",) * (count - len(given)))


class Family:
    """The three operators of one kind of convolution. Attributes `forward`, `grad_input`, `grad_weight`."""

    def __init__(self, dimensions: int, *, transposed: bool) -> None:
        n = dimensions
        self.name = f"conv{'_transpose' if transposed else ''}{n}d"
        self.dimensions, self.transposed = n, transposed
        self._of: Any = TransposedOpGeometry if transposed else OpGeometry
        self._count = len(self._of._fields)
        pads, more = (n, f", int[{n}] output_padding") if transposed else (2 * n, "")
        geometry = f"int[{n}] stride, int[{pads}] padding, int[{n}] dilation, int groups{more}"
        target = f"SymInt[{n + 2}]"
        self.forward = self._define("", f"Tensor input, Tensor weight, Tensor? bias, {geometry}, {_NAMES}")
        self.grad_input = self._define(
            "_grad_input",
            f"Tensor grad_output, Tensor weight, {target} input_size, {target} input_stride, {geometry}, {_NAME}",
        )
        self.grad_weight = self._define(
            "_grad_weight",
            f"Tensor input, Tensor grad_output, {target} weight_size, {target} weight_stride, {geometry}, {_NAME}",
        )
        self._register(self.forward, self._run, self._fake, self._vmap)
        self._register(
            self.grad_input,
            lambda *a: self._run_gradient(BACKWARD_DATA, *a),
            lambda *a: self._fake_gradient(BACKWARD_DATA, *a),
            self._vmap_grad_input,
        )
        self._register(
            self.grad_weight,
            lambda *a: self._run_gradient(BACKWARD_WEIGHT, *a),
            lambda *a: self._fake_gradient(BACKWARD_WEIGHT, *a),
            self._vmap_grad_weight,
        )
        _library.impl(self.name, self._autograd, "Autograd", with_keyset=True)
        for op, backward in (
            (self.grad_input, self._grad_input_backward),
            (self.grad_weight, self._grad_weight_backward),
        ):
            torch.library.register_autograd(op._schema.name, backward, setup_context=self._keep, lib=_library)

    def _define(self, suffix: str, arguments: str) -> Any:
        _library.define(f"{self.name}{suffix}({arguments}) -> Tensor", tags=_TAGS)
        return getattr(torch.ops.convselect, self.name + suffix).default

    def _register(self, op: Any, values: Any, fake: Any, vmap: Any) -> None:
        name = op._schema.name.split("::")[1]
        for device in ("CPU", "CUDA"):
            _library.impl(name, values, device)
        torch.library.register_fake(op._schema.name, fake, lib=_library)
        torch.library.register_vmap(op._schema.name, vmap, lib=_library)

    def _parted(self, arguments: tuple[Any, ...], texts: int) -> tuple[Any, tuple[str, ...]]:
        """(geometry, the texts behind it)."""
        return self._of(*arguments[: self._count]), _texts(arguments[self._count :], texts)

    # ---- values and fakes -------------------------------------------------------------------------------------------

    def _run(self, input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
        geometry, (algorithm, _, _, settings) = self._parted(arguments, 4)
        return run(FORWARD, input, weight, None, geometry, algorithm, settings, bias)

    def _run_gradient(
        self, direction: Direction, a: Tensor, b: Tensor, size: Sizes, stride: Sizes, *arguments: Any
    ) -> Tensor:
        geometry, (algorithm, settings) = self._parted(arguments, 2)
        return run(direction, a, b, Target(size, stride), geometry, algorithm, settings)

    def _fake(self, input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
        return outline(FORWARD, input, weight, None, self._parted(arguments, 4)[0], bias)

    def _fake_gradient(
        self, direction: Direction, a: Tensor, b: Tensor, size: Sizes, stride: Sizes, *arguments: Any
    ) -> Tensor:
        return outline(direction, a, b, Target(size, stride), self._parted(arguments, 2)[0])

    # ---- autograd ---------------------------------------------------------------------------------------------------

    def _autograd(self, keyset: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
        geometry, names = self._parted(arguments, 4)
        tensors = (input, weight) if bias is None else (input, weight, bias)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return _Convolution.apply(self, keyset, input, weight, bias, geometry, *names)  # type: ignore[no-any-return]
        with torch._C._AutoDispatchBelowAutograd():
            return self.forward.redispatch(  # type: ignore[no-any-return]
                keyset & torch._C._after_autograd_keyset, input, weight, bias, *geometry, *names
            )

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        a, b, _, _, *arguments = inputs
        ctx.geometry, (_, ctx.settings) = self._parted(tuple(arguments), 2)
        ctx.save_for_backward(a, b)

    def _grad_input_backward(self, ctx: Any, gg: Tensor) -> tuple[Tensor | None, ...]:
        grad_y, weight = ctx.saved_tensors
        need_y, need_weight, *rest = ctx.needs_input_grad
        return (
            self.forward(gg, weight, None, *ctx.geometry, settings=ctx.settings) if need_y else None,
            self.grad_weight(gg, grad_y, weight.shape, weight.stride(), *ctx.geometry, settings=ctx.settings)
            if need_weight
            else None,
            *(None for _ in rest),
        )

    def _grad_weight_backward(self, ctx: Any, gg: Tensor) -> tuple[Tensor | None, ...]:
        x, grad_y = ctx.saved_tensors
        need_x, need_y, *rest = ctx.needs_input_grad
        return (
            self.grad_input(grad_y, gg, x.shape, x.stride(), *ctx.geometry, settings=ctx.settings) if need_x else None,
            self.forward(x, gg, None, *ctx.geometry, settings=ctx.settings) if need_y else None,
            *(None for _ in rest),
        )

    # ---- vmap: a batch of inputs goes into N, one of weights into the groups. The folded problem is another one: what
    # was chosen does not speak for it, so that the choice is left to the run.

    def _vmap(
        self, info: Any, in_dims: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any
    ) -> tuple[Tensor, int]:
        x_dim, weight_dim, bias_dim, *_ = in_dims
        B = info.batch_size
        geometry, (*_, settings) = self._parted(arguments, 4)
        if weight_dim is None and x_dim is not None:
            folded = input.movedim(x_dim, 0).flatten(0, 1)
            y = self.forward(folded, weight, None, *geometry, settings=settings).unflatten(0, (B, -1))
        elif weight_dim is not None:
            wide = geometry._replace(groups=B * geometry.groups)
            weight = weight.movedim(weight_dim, 0).flatten(0, 1)
            y = self.forward(_batch_into_channels(input, x_dim, B), weight, None, *wide, settings=settings)
            y = y.unflatten(1, (B, -1)).movedim(1, 0)
        else:
            y = self.forward(input, weight, None, *geometry, settings=settings).unsqueeze(0)
        if bias is None:
            return y, 0
        size = (1,) * self.dimensions
        bias = bias.movedim(bias_dim, 0).unsqueeze(1) if bias_dim is not None else bias
        return y + bias.reshape(*bias.shape, *size), 0

    def _vmap_grad_input(
        self, info: Any, in_dims: Any, grad_output: Tensor, weight: Tensor, size: Sizes, stride: Sizes, *arguments: Any
    ) -> tuple[Tensor, int]:
        y_dim, weight_dim, *_ = in_dims
        B = info.batch_size
        N, C, *image = size
        geometry, (_, settings) = self._parted(arguments, 2)
        if weight_dim is None:
            size = (B * N, C, *image)
            folded = grad_output.movedim(y_dim, 0).flatten(0, 1)
            result = self.grad_input(folded, weight, size, _contiguous(size), *geometry, settings=settings)
            return result.unflatten(0, (B, N)), 0
        size = (N, B * C, *image)
        wide = geometry._replace(groups=B * geometry.groups)
        weight = weight.movedim(weight_dim, 0).flatten(0, 1)
        grad_output = _batch_into_channels(grad_output, y_dim, B)
        result = self.grad_input(grad_output, weight, size, _contiguous(size), *wide, settings=settings)
        return result.unflatten(1, (B, C)).movedim(1, 0), 0

    def _vmap_grad_weight(
        self, info: Any, in_dims: Any, input: Tensor, grad_output: Tensor, size: Sizes, stride: Sizes, *arguments: Any
    ) -> tuple[Tensor, int]:
        x_dim, y_dim, *_ = in_dims
        B = info.batch_size
        first, *rest = size
        size = (B * first, *rest)
        geometry, (_, settings) = self._parted(arguments, 2)
        wide = geometry._replace(groups=B * geometry.groups)
        input, grad_output = _batch_into_channels(input, x_dim, B), _batch_into_channels(grad_output, y_dim, B)
        result = self.grad_weight(input, grad_output, size, _contiguous(size), *wide, settings=settings)
        return result.unflatten(0, (B, first)), 0


class _Convolution(torch.autograd.Function):
    """As `torch.library.register_autograd` would make it, but for a native forward: that is aten's own operator, so
    that compilers see a convolution."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, family: Family, keyset: Any, input: Tensor, weight: Tensor, bias: Tensor | None,
        geometry: AnyGeometry, algorithm: str, grad_input: str, grad_weight: str, settings: str,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(input, weight)
        ctx.family, ctx.geometry, ctx.names, ctx.settings = family, geometry, (grad_input, grad_weight), settings
        with torch._C._AutoDispatchBelowAutograd():
            if algorithm == NATIVE:
                return aten(FORWARD, input, weight, None, geometry, bias)
            return family.forward.redispatch(  # type: ignore[no-any-return]
                keyset & torch._C._after_autograd_keyset,
                input, weight, bias, *geometry, algorithm, grad_input, grad_weight, settings,
            )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        _, _, need_input, need_weight, need_bias, *_ = ctx.needs_input_grad
        name_input, name_weight = ctx.names
        grad_input: Tensor | None = None
        grad_weight: Tensor | None = None
        if need_input and name_input != NATIVE:
            grad_input = ctx.family.grad_input(
                grad_y, weight, input.shape, input.stride(), *ctx.geometry, name_input, ctx.settings
            )
        if need_weight and name_weight != NATIVE:
            grad_weight = ctx.family.grad_weight(
                input, grad_y, weight.shape, weight.stride(), *ctx.geometry, name_weight, ctx.settings
            )
        native = need_input and name_input == NATIVE, need_weight and name_weight == NATIVE
        if any(native):  # one call for both: aten shares work between the two
            native_input, native_weight = aten_backward(grad_y, input, weight, ctx.geometry, native)
            grad_input = native_input if native[0] else grad_input
            grad_weight = native_weight if native[1] else grad_weight
        grad_bias = grad_y.sum((0, *range(2, grad_y.dim()))) if need_bias else None
        return None, None, grad_input, grad_weight, grad_bias, *(None,) * 5


def _batch_into_channels(t: Tensor, dim: int | None, B: int) -> Tensor:
    """(N, C, ...) with a batch somewhere, or the same for all -> (N, B * C, ...), the batch outermost."""
    t = t.movedim(dim, 1) if dim is not None else t.unsqueeze(1).expand(-1, B, *t.shape[1:])
    return t.flatten(1, 2)


def _contiguous(size: Sizes) -> Sizes:
    """Strides of a fresh tensor of this size: a folded batch has no layout of its own to keep."""
    return torch.empty(tuple(size), device="meta").stride()


FAMILIES = tuple(Family(n, transposed=transposed) for n in (2, 3) for transposed in (False, True))
OPERATORS: dict[str, Any] = {family.name: family.forward for family in FAMILIES}
"""Name of PyTorch's function -> our operator."""

conv2d: Any = torch.ops.convselect.conv2d.default
conv2d_grad_input: Any = torch.ops.convselect.conv2d_grad_input.default
conv2d_grad_weight: Any = torch.ops.convselect.conv2d_grad_weight.default


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


def register_flop_formulas() -> None:
    """Let `torch.utils.flop_counter.FlopCounterMode` count these operators as it counts aten's. Counters made before
    this do not know them."""
    from torch.utils.flop_counter import flop_registry

    if torch.ops.convselect.conv2d not in flop_registry:
        for family in FAMILIES:
            _register_formulas_of(family)


def _register_formulas_of(family: Family) -> None:
    from torch.utils.flop_counter import conv_flop_count, flop_registry, register_flop_formula

    backward: Any = flop_registry[torch.ops.aten.convolution_backward]
    rest = (None, None, None, None, family.transposed, None, None)  # from bias to groups: none of the others counts

    @register_flop_formula(family.forward.overloadpacket)
    def _flops(x: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return conv_flop_count(x, weight, out_shape, transposed=family.transposed)

    @register_flop_formula(family.grad_input.overloadpacket)
    def _grad_input_flops(y: Any, weight: Any, x: Any, *_: Any, out_shape: Any = None, **__: Any) -> Any:
        return backward(y, x, weight, *rest, [True, False, False], out_val=[out_shape, None, None])

    @register_flop_formula(family.grad_weight.overloadpacket)
    def _grad_weight_flops(x: Any, y: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> Any:
        return backward(y, x, weight, *rest, [False, True, False], out_val=[None, out_shape, None])


if "torch.utils.flop_counter" in sys.modules:
    register_flop_formulas()

__all__ = [
    "FAMILIES", "OPERATORS", "conv2d", "conv2d_grad_input", "conv2d_grad_weight", "plans", "register_flop_formulas",
]  # fmt: skip
