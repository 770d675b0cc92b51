"""Operators for compiled and exported graphs: the three directions of a convolution, by an algorithm that is named.

    convselect::conv2d              y = conv2d(input, weight) + bias
    convselect::conv2d_grad_input   gradient of input, which has this size and these strides
    convselect::conv2d_grad_weight  gradient of weight, likewise

input is (N, C, H, W), weight (K, C / groups, R, S), y and grad_output (N, K, P, Q), bias (K,); `padding` is per side
(top, bottom, left, right). `algorithm` names what runs; "" leaves the choice to the run. `conv2d` also carries the
names for its two backward directions. `settings` are policy and budgets as `str(settings)` writes them; "" means those
in force when the operator runs. An algorithm that is named but fails, or does not apply on the machine that runs the
graph, is one warning and a native result, unless the policy names it: then its error is raised.

Results have aten's strides, and so have the fakes. The operators are closed under differentiation (see `_autograd`);
if a direction is native, autograd emits aten's own operator instead of ours. They are registered through
`torch.library.Library` because `torch.library.custom_op` costs several times as much per call.

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
from convselect.graph.run import OpGeometry, Sizes, Target, aten, aten_backward, outline, plans, run

__all__ = ["conv2d", "conv2d_grad_input", "conv2d_grad_weight", "plans", "register_flop_formulas"]

FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT = Direction.FORWARD, Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT

_library = torch.library.Library("convselect", "DEF")
_GEOMETRY = "int[2] stride, int[4] padding, int[2] dilation, int groups"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_NAMES = {
    "conv2d": f"Tensor input, Tensor weight, Tensor? bias, {_GEOMETRY}, "
    'str algorithm="", str grad_input="", str grad_weight="", str settings=""',
    "conv2d_grad_input": "Tensor grad_output, Tensor weight, SymInt[4] input_size, SymInt[4] input_stride, "
    f'{_GEOMETRY}, str algorithm="", str settings=""',
    "conv2d_grad_weight": "Tensor input, Tensor grad_output, SymInt[4] weight_size, SymInt[4] weight_stride, "
    f'{_GEOMETRY}, str algorithm="", str settings=""',
}
for _name, _arguments in _NAMES.items():
    _library.define(f"{_name}({_arguments}) -> Tensor", tags=_TAGS)

conv2d: Any = torch.ops.convselect.conv2d.default
conv2d_grad_input: Any = torch.ops.convselect.conv2d_grad_input.default
conv2d_grad_weight: Any = torch.ops.convselect.conv2d_grad_weight.default


# ---- values and fakes -----------------------------------------------------------------------------------------------


def _conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int,
    algorithm: str = "", grad_input: str = "", grad_weight: str = "", settings: str = "",
) -> Tensor:  # fmt: skip
    return run(FORWARD, input, weight, None, OpGeometry(stride, padding, dilation, groups), algorithm, settings, bias)


def _conv2d_grad_input(
    grad_output: Tensor, weight: Tensor, input_size: Sizes, input_stride: Sizes, stride: Sizes, padding: Sizes,
    dilation: Sizes, groups: int, algorithm: str = "", settings: str = "",
) -> Tensor:  # fmt: skip
    geometry = OpGeometry(stride, padding, dilation, groups)
    return run(BACKWARD_DATA, grad_output, weight, Target(input_size, input_stride), geometry, algorithm, settings)


def _conv2d_grad_weight(
    input: Tensor, grad_output: Tensor, weight_size: Sizes, weight_stride: Sizes, stride: Sizes, padding: Sizes,
    dilation: Sizes, groups: int, algorithm: str = "", settings: str = "",
) -> Tensor:  # fmt: skip
    geometry = OpGeometry(stride, padding, dilation, groups)
    return run(BACKWARD_WEIGHT, input, grad_output, Target(weight_size, weight_stride), geometry, algorithm, settings)


def _fake_conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int,
    *_: str,
) -> Tensor:  # fmt: skip
    return outline(FORWARD, input, weight, None, OpGeometry(stride, padding, dilation, groups), bias)


def _fake_grad_input(
    grad_output: Tensor, weight: Tensor, size: Sizes, strides: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes,
    groups: int, *_: str,
) -> Tensor:  # fmt: skip
    geometry = OpGeometry(stride, padding, dilation, groups)
    return outline(BACKWARD_DATA, grad_output, weight, Target(size, strides), geometry)


def _fake_grad_weight(
    input: Tensor, grad_output: Tensor, size: Sizes, strides: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes,
    groups: int, *_: str,
) -> Tensor:  # fmt: skip
    geometry = OpGeometry(stride, padding, dilation, groups)
    return outline(BACKWARD_WEIGHT, input, grad_output, Target(size, strides), geometry)


for _op, _run, _fake in (
    (conv2d, _conv2d, _fake_conv2d),
    (conv2d_grad_input, _conv2d_grad_input, _fake_grad_input),
    (conv2d_grad_weight, _conv2d_grad_weight, _fake_grad_weight),
):
    _name = _op._schema.name.split("::")[1]
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _run, _device)
    torch.library.register_fake(_op._schema.name, _fake, lib=_library)


# ---- autograd -------------------------------------------------------------------------------------------------------


class _Conv2d(torch.autograd.Function):
    """As `torch.library.register_autograd` would make it, but for a native forward: that is aten's own operator, so
    that compilers see a convolution."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, keyset: Any, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: OpGeometry,
        algorithm: str, grad_input: str, grad_weight: str, settings: str,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(input, weight)
        ctx.geometry, ctx.names, ctx.settings = geometry, (grad_input, grad_weight), settings
        with torch._C._AutoDispatchBelowAutograd():
            if algorithm == NATIVE:
                return aten(FORWARD, input, weight, None, geometry, bias)
            return conv2d.redispatch(  # type: ignore[no-any-return]
                keyset & torch._C._after_autograd_keyset,
                input, weight, bias, *geometry, algorithm, grad_input, grad_weight, settings,
            )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        _, need_input, need_weight, need_bias, *_ = ctx.needs_input_grad
        name_input, name_weight = ctx.names
        grad_input: Tensor | None = None
        grad_weight: Tensor | None = None
        if need_input and name_input != NATIVE:
            grad_input = conv2d_grad_input(
                grad_y, weight, input.shape, input.stride(), *ctx.geometry, name_input, ctx.settings
            )
        if need_weight and name_weight != NATIVE:
            grad_weight = conv2d_grad_weight(
                input, grad_y, weight.shape, weight.stride(), *ctx.geometry, name_weight, ctx.settings
            )
        native = need_input and name_input == NATIVE, need_weight and name_weight == NATIVE
        if any(native):  # one call for both: aten shares work between the two
            native_input, native_weight = aten_backward(grad_y, input, weight, ctx.geometry, native)
            grad_input = native_input if native[0] else grad_input
            grad_weight = native_weight if native[1] else grad_weight
        grad_bias = grad_y.sum((0, 2, 3)) if need_bias else None
        return None, grad_input, grad_weight, grad_bias, None, None, None, None, None, None


def _autograd_conv2d(
    keyset: Any, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes,
    groups: int, algorithm: str = "", grad_input: str = "", grad_weight: str = "", settings: str = "",
) -> Tensor:  # fmt: skip
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        geometry = OpGeometry(stride, padding, dilation, groups)
        return _Conv2d.apply(  # type: ignore[no-any-return]
            keyset, input, weight, bias, geometry, algorithm, grad_input, grad_weight, settings
        )
    with torch._C._AutoDispatchBelowAutograd():
        return conv2d.redispatch(  # type: ignore[no-any-return]
            keyset & torch._C._after_autograd_keyset,
            input, weight, bias, stride, padding, dilation, groups, algorithm, grad_input, grad_weight, settings,
        )  # fmt: skip


_library.impl("conv2d", _autograd_conv2d, "Autograd", with_keyset=True)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, _, _, *geometry, _, ctx.settings = inputs
    ctx.save_for_backward(a, b)
    ctx.geometry = OpGeometry(*geometry)


def _grad_input_backward(ctx: Any, gg: Tensor) -> tuple[Tensor | None, ...]:
    grad_y, weight = ctx.saved_tensors
    need_y, need_weight, *rest = ctx.needs_input_grad
    return (
        conv2d(gg, weight, None, *ctx.geometry, settings=ctx.settings) if need_y else None,
        conv2d_grad_weight(gg, grad_y, weight.shape, weight.stride(), *ctx.geometry, settings=ctx.settings)
        if need_weight
        else None,
        *(None for _ in rest),
    )


def _grad_weight_backward(ctx: Any, gg: Tensor) -> tuple[Tensor | None, ...]:
    x, grad_y = ctx.saved_tensors
    need_x, need_y, *rest = ctx.needs_input_grad
    return (
        conv2d_grad_input(grad_y, gg, x.shape, x.stride(), *ctx.geometry, settings=ctx.settings) if need_x else None,
        conv2d(x, gg, None, *ctx.geometry, settings=ctx.settings) if need_y else None,
        *(None for _ in rest),
    )


for _op, _backward in ((conv2d_grad_input, _grad_input_backward), (conv2d_grad_weight, _grad_weight_backward)):
    torch.library.register_autograd(_op._schema.name, _backward, setup_context=_keep, lib=_library)


# ---- vmap -----------------------------------------------------------------------------------------------------------


def _batch_into_channels(t: Tensor, dim: int | None, B: int) -> Tensor:
    """(N, C, ...) with a batch somewhere, or the same for all -> (N, B * C, ...), the batch outermost."""
    t = t.movedim(dim, 1) if dim is not None else t.unsqueeze(1).expand(-1, B, *t.shape[1:])
    return t.flatten(1, 2)


def _contiguous(size: Sizes) -> Sizes:
    """Strides of a fresh tensor of this size: a folded batch has no layout of its own to keep."""
    return torch.empty(tuple(size), device="meta").stride()


def _vmap_conv2d(
    info: Any, in_dims: Any, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes,
    dilation: Sizes, groups: int, algorithm: str = "", grad_input: str = "", grad_weight: str = "", settings: str = "",
) -> tuple[Tensor, int]:  # fmt: skip
    """A batch of inputs goes into N; a batch of weights into the groups. The folded problem is another one: what was
    chosen does not speak for it, so that the choice is left to the run."""
    x_dim, weight_dim, bias_dim, *_ = in_dims
    B = info.batch_size
    geometry = OpGeometry(stride, padding, dilation, groups)
    if weight_dim is None and x_dim is not None:
        folded = input.movedim(x_dim, 0).flatten(0, 1)
        y = conv2d(folded, weight, None, *geometry, settings=settings).unflatten(0, (B, -1))
    elif weight_dim is not None:
        wide = geometry._replace(groups=B * groups)
        weight = weight.movedim(weight_dim, 0).flatten(0, 1)
        y = conv2d(_batch_into_channels(input, x_dim, B), weight, None, *wide, settings=settings)
        y = y.unflatten(1, (B, -1)).movedim(1, 0)
    else:
        y = conv2d(input, weight, None, *geometry, settings=settings).unsqueeze(0)
    if bias is None:
        return y, 0
    bias = bias.movedim(bias_dim, 0)[:, None, :, None, None] if bias_dim is not None else bias.view(-1, 1, 1)
    return y + bias, 0


def _vmap_grad_input(
    info: Any, in_dims: Any, grad_output: Tensor, weight: Tensor, size: Sizes, strides: Sizes, stride: Sizes,
    padding: Sizes, dilation: Sizes, groups: int, algorithm: str = "", settings: str = "",
) -> tuple[Tensor, int]:  # fmt: skip
    y_dim, weight_dim, *_ = in_dims
    B = info.batch_size
    N, C, H, W = size
    geometry = OpGeometry(stride, padding, dilation, groups)
    if weight_dim is None:
        size = (B * N, C, H, W)
        folded = grad_output.movedim(y_dim, 0).flatten(0, 1)
        result = conv2d_grad_input(folded, weight, size, _contiguous(size), *geometry, settings=settings)
        return result.unflatten(0, (B, N)), 0
    size = (N, B * C, H, W)
    wide = geometry._replace(groups=B * groups)
    weight = weight.movedim(weight_dim, 0).flatten(0, 1)
    grad_output = _batch_into_channels(grad_output, y_dim, B)
    result = conv2d_grad_input(grad_output, weight, size, _contiguous(size), *wide, settings=settings)
    return result.unflatten(1, (B, C)).movedim(1, 0), 0


def _vmap_grad_weight(
    info: Any, in_dims: Any, input: Tensor, grad_output: Tensor, size: Sizes, strides: Sizes, stride: Sizes,
    padding: Sizes, dilation: Sizes, groups: int, algorithm: str = "", settings: str = "",
) -> tuple[Tensor, int]:  # fmt: skip
    x_dim, y_dim, *_ = in_dims
    B = info.batch_size
    K, *rest = size
    size = (B * K, *rest)
    wide = OpGeometry(stride, padding, dilation, B * groups)
    input, grad_output = _batch_into_channels(input, x_dim, B), _batch_into_channels(grad_output, y_dim, B)
    result = conv2d_grad_weight(input, grad_output, size, _contiguous(size), *wide, settings=settings)
    return result.unflatten(0, (B, K)), 0


for _op, _vmap in (
    (conv2d, _vmap_conv2d),
    (conv2d_grad_input, _vmap_grad_input),
    (conv2d_grad_weight, _vmap_grad_weight),
):
    torch.library.register_vmap(_op._schema.name, _vmap, lib=_library)


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


def register_flop_formulas() -> None:
    """Let `torch.utils.flop_counter.FlopCounterMode` count these operators as it counts aten's. Counters made before
    this do not know them."""
    from torch.utils.flop_counter import conv_flop_count, flop_registry, register_flop_formula

    packets = torch.ops.convselect
    if packets.conv2d in flop_registry:
        return
    backward: Any = flop_registry[torch.ops.aten.convolution_backward]
    rest = (None, None, None, None, False, None, None)  # from bias to groups: none of them counts

    @register_flop_formula(packets.conv2d)
    def _conv2d_flops(x: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return conv_flop_count(x, weight, out_shape, transposed=False)

    @register_flop_formula(packets.conv2d_grad_input)
    def _grad_input_flops(y: Any, weight: Any, x: Any, *_: Any, out_shape: Any = None, **__: Any) -> Any:
        return backward(y, x, weight, *rest, [True, False, False], out_val=[out_shape, None, None])

    @register_flop_formula(packets.conv2d_grad_weight)
    def _grad_weight_flops(x: Any, y: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> Any:
        return backward(y, x, weight, *rest, [False, True, False], out_val=[None, out_shape, None])


if "torch.utils.flop_counter" in sys.modules:
    register_flop_formulas()
