"""Choice at trace time: what a call becomes in the graph that torch.compile or torch.export makes of it.

Sizes and strides are numbers while a graph with static shapes is traced, so the choice is made there and then, for the
forward and both backward directions; the graph holds aten's own convolution if all of them are native, and the
operator of `ops` with the names chosen if one is not. A symbolic size stands for sizes to come: then the sizes at
hand decide between aten's convolution and the operator that chooses when it runs.

Dynamo calls `_look` and `_verdict` while it traces and compiles neither. This module is imported by the first trace,
since it needs dynamo.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import trace_rules
from torch._dynamo.comptime import comptime
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from convselect.aten.arguments import autocast_dtype, cast_like_autocast, one_row, valid
from convselect.aten.layers import OF
from convselect.aten.strides import in_functorch, result_strides
from convselect.aten.volumes import folded_strides, rows_of, volume_of, volume_strides
from convselect.base import settings as _settings
from convselect.base.problem import DTYPE_NAMES, ConvProblem, Direction, pair, triple
from convselect.base.warnings import warn_once
from convselect.choice.choose import NATIVE
from convselect.eager.resolve import choice_for
from convselect.eager.volumes import FoldedPlan
from convselect.graph import ops
from convselect.kernels._contract import NotApplicable
from convselect.kernels.pool import BY_NAME

ops.register_flop_formulas()
# What runs between two graphs is not to be traced either: dynamo would spend seconds on each function of ours, and 2.14
# fails on our autograd functions.
_UNTRACED = (
    "choice",
    "eager",
    "kernels",
    "machine",
    "measure",
    "model",
    "store",
    "aten.autograd",
    "aten.strides",
    "aten.volumes",
)
for _module in list(sys.modules):
    if _module.startswith(tuple(f"convselect.{room}" for room in _UNTRACED)):
        trace_rules.add(_module)

# ("native",); ("refused", why); ("unknown", why), of a policy's name; or ("operator", the dtype to cast to or None,
# the operator's geometry, the three names, settings); or ("image", one of those of the image that a volume is, the
# geometry of its conv2d).
Verdict = tuple[Any, ...]
_NATIVE: Verdict = ("native",)
# Dimensions, and whether transposed; aten's function; and our operator: that of two dimensions for one.
_KINDS = {f"conv{way}{n}d": (n, bool(way)) for n in (1, 2, 3) for way in ("", "_transpose")}
_ATEN: dict[str, Any] = {kind: getattr(torch, kind) for kind in _KINDS}
_OURS: dict[str, Any] = {kind: ops.OPERATORS[kind.replace("1d", "2d")] for kind in _KINDS}
LEAST_GAIN = 1.6
"""Predicted times faster than native from which an operator of ours is put into a graph. It has to make up for what
Inductor does for native convolutions only: fusing what follows, and one layout for all. In MobileNetV2 and ConvNeXt-T,
whose depthwise layers are predicted at 1.2 to 1.6, mixed graphs ran at 0.85 and 0.99 of all-native ones; ResNet-18
and U-Net, whose layers are predicted at 1.7 to 2.7, at 1.8 and 2.2 (`python -m benchmarks.compile`)."""
_seen = threading.local()


def call(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, policy: Any) -> Tensor:
    """As the eager function of this name. Dynamo traces this; an export that runs the code on fake tensors calls it."""
    if torch.compiler.is_dynamo_compiling():
        comptime(_look)
        found = _verdict()
    else:
        found = verdict(x, weight, bias, geometry, policy, kind=kind)
    if found[0] == "native":
        return _ATEN[kind](x, weight, bias, *geometry)  # type: ignore[no-any-return]
    if found[0] == "refused":
        raise NotApplicable(found[1])
    if found[0] == "unknown":
        raise ValueError(found[1])
    dimensions, _ = _KINDS[kind]
    unbatched = x.dim() == dimensions + 1
    if unbatched:
        x = x.unsqueeze(0)
    if found[0] == "image":
        y = _by_image(found, x, weight, bias)
    elif dimensions == 1:  # an image of one row, in memory as aten takes it
        y = _by_operator(kind, found, x.contiguous().unsqueeze(2), weight.unsqueeze(2), bias).squeeze(2)
    else:
        y = _by_operator(kind, found, x, weight, bias)
    return y.squeeze(0) if unbatched else y


def _by_operator(kind: str, found: Verdict, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _, cast, numbers, names, settings = found
    if cast is not None:
        x, weight = cast_like_autocast(x, cast), cast_like_autocast(weight, cast)
        bias = None if bias is None else cast_like_autocast(bias, cast)
    return _OURS[kind](x, weight, bias, *numbers, *names, settings)  # type: ignore[no-any-return]


def _by_image(found: Verdict, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A volume whose kernel reaches along the depth, as an image of D rows and H * W columns."""
    _, of_image, geometry = found
    size = x.shape[3:]
    x, weight = x.flatten(3), weight.flatten(3)
    if of_image[0] == "native":
        y = torch.conv2d(x, weight, bias, *geometry)
    else:
        y = _by_operator("conv2d", of_image, x, weight, bias)
    return y.unflatten(3, size)  # type: ignore[no-any-return]


def _look(context: Any) -> None:
    """Note the verdict for the call that dynamo is tracing."""
    _seen.verdict = _NATIVE
    try:
        x, weight = context.get_local("x").as_fake(), context.get_local("weight").as_fake()
        bias = None if _is_none(context.get_local("bias")) else context.get_local("bias").as_fake()
        policy = context.get_local("policy").as_python_constant()
        kind = context.get_local("kind").as_python_constant()
    except Exception:
        return  # no tensors: what is wrong with that is for aten to say
    try:
        geometry = context.get_local("geometry").as_python_constant()
    except Exception:
        _seen.verdict = _left_to_pytorch(_in_force(policy), "strides and paddings of symbolic size")
        return
    _seen.verdict = verdict(x, weight, bias, geometry, policy, kind=kind)


def _is_none(variable: Any) -> bool:
    return bool(variable.python_type() is type(None))


def _verdict() -> Verdict:
    return _seen.verdict  # type: ignore[no-any-return]


_verdict = torch.compiler.assume_constant_result(_verdict)


def called_by_convselect() -> bool:
    """While dynamo traces: whether this package makes the call that a torch-function mode has intercepted, and which is
    therefore settled. For the mode's own use, two calls below it; other modes in between are passed over."""
    comptime(_look_at_the_caller)
    return _settled()


def _look_at_the_caller(context: Any) -> None:
    frame = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().parent  # the mode
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.parent
    _seen.settled = frame is not None and str(frame.f_globals.get("__name__", "")).startswith("convselect.")


def _settled() -> bool:
    return _seen.settled  # type: ignore[no-any-return]


_settled = torch.compiler.assume_constant_result(_settled)


# ---- the verdict ----------------------------------------------------------------------------------------------------


def verdict(x: Any, weight: Any, bias: Any, geometry: Any, policy: str | None, *, kind: str) -> Verdict:
    """What this call becomes; reads sizes, strides, dtypes and who requires a gradient, and guards on nothing."""
    settings = _in_force(policy)
    if settings.policy == NATIVE and not settings.batch_invariant:
        return _NATIVE
    tensors = [x, weight] if bias is None else [x, weight, bias]
    if any(type(t) not in (FakeTensor, FunctionalTensor, Tensor, torch.nn.Parameter) for t in tensors):
        return _left_to_pytorch(settings, "tensor subclasses")
    if in_functorch() or forward_ad._current_level >= 0:
        return _left_to_pytorch(settings, "torch.func transforms inside a compiled graph")
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        return _left_to_pytorch(settings, "exports to ONNX, which knows no other operators,")
    numbers = [found for t in tensors if (found := _numbers(t)) is not None]
    if len(numbers) < len(tensors):
        return _left_to_pytorch(settings, "sizes that depend on data")
    dynamic = any(symbolic for _, _, symbolic in numbers)
    if any(symbolic for _, _, symbolic in numbers[1:]):
        return _left_to_pytorch(settings, "weights of symbolic size")
    needs = [torch.is_grad_enabled() and t.requires_grad and not torch.compiler.is_exporting() for t in tensors]
    with _disable_current_modes(), FakeTensorMode():
        stand_ins = [
            torch.empty_strided(size, strides, dtype=t.dtype, device=t.device)
            for t, (size, strides, _) in zip(tensors, numbers, strict=True)
        ]
        if _KINDS[kind][0] == 1:
            raised = one_row(stand_ins[0], stand_ins[1], geometry)
            if raised is None:
                return _NATIVE
            stand_ins[:2], geometry = raised[:2], raised[2]
        answer = _of_stand_ins(kind, stand_ins, needs, geometry, settings, dynamic=dynamic)
    ours = answer[0] == "operator" or (answer[0] == "image" and answer[1] != _NATIVE)
    if ours and torch.compiler.is_exporting() and policy is None and not _settings.in_use():
        warn_once(
            "export",
            f"an exported program has the operator {_OURS[kind]._schema.name} where that is expected to be faster. It "
            "needs `import convselect`, and quantisation of exported programs, converters and other runtimes look for "
            f'aten.{kind}: for those, export under convselect.use("native"). To have it without this warning, export '
            'under convselect.use("auto").',
        )
    return answer


def _in_force(policy: str | None) -> _settings.Settings:
    settings = _settings.current()
    return settings if policy is None else _settings.with_policy(settings, policy)


def _left_to_pytorch(settings: _settings.Settings, what: str) -> Verdict:
    if settings.chooses or settings.policy == NATIVE:
        return _NATIVE
    return ("refused", f"{settings.policy} cannot do this convolution: {what} are left to PyTorch")


def _numbers(t: Any) -> tuple[list[int], list[int], bool] | None:
    """(sizes, strides, whether any is symbolic), with the numbers at hand for symbolic ones; None if there are
    none."""
    numbers: list[int] = []
    symbolic = False
    for n in (*t.shape, *t.stride()):
        if type(n) is not int:
            symbolic = True
            n = _hint(n)
            if n is None:
                return None
        numbers.append(n)
    return numbers[: t.dim()], numbers[t.dim() :], symbolic


def _hint(n: Any) -> int | None:
    hint = n.node.hint
    return None if hint is None else int(hint)


def _of_stand_ins(
    kind: str,
    stand_ins: Sequence[Tensor],
    needs: Sequence[bool],
    geometry: Any,
    settings: _settings.Settings,
    *,
    dynamic: bool,
) -> Verdict:
    x, weight, *rest = stand_ins
    bias = rest[0] if rest else None
    dimensions, transposed = _KINDS[kind]
    if x.dim() == dimensions + 1 and weight.dim() == dimensions + 2:
        x = x.unsqueeze(0)
    cast = autocast_dtype(x)
    if cast:
        x, weight = cast_like_autocast(x, cast), cast_like_autocast(weight, cast)
    problem_of, gradients_of = OF[dimensions == 3, transposed]
    problem = problem_of(x, weight, geometry)
    if problem is None or not valid(problem, x, weight, bias, geometry, cast=bool(cast)):
        if x.dtype not in DTYPE_NAMES and settings.policy in BY_NAME:
            return ("refused", f"{settings.policy} cannot do this convolution: it computes floats, not {x.dtype}")
        return _NATIVE
    for t, need in zip((x, weight), needs, strict=False):
        t.requires_grad_(need)
    try:
        names = _names(problem, gradients_of(x, weight, problem), settings)
    except NotApplicable as refusal:
        return ("refused", str(refusal))
    except ValueError as error:
        return ("unknown", str(error))
    native = all(name == NATIVE for name in names) and not settings.batch_invariant
    # Left to the run, which alone knows the images.
    if dynamic or settings.batch_invariant:
        names = ("", "", "")
    to = cast if isinstance(cast, torch.dtype) else None
    p = problem
    if kind == "conv3d" and _is_better_as_image(x, weight, p, settings):
        numbers = (p.stride, (p.pad_top, p.pad_bottom, 0, 0), p.dilation, p.groups)
        of_image = _NATIVE if native else ("operator", to, numbers, names, str(settings))
        return ("image", of_image, (p.stride, (p.pad_top, 0), p.dilation, p.groups))
    if native:
        return _NATIVE
    return ("operator", to, _numbers_of(kind, x, weight, p, geometry), names, str(settings))


def _is_better_as_image(x: Tensor, weight: Tensor, problem: ConvProblem, settings: _settings.Settings) -> bool:
    """Whether this volume's kernel reaches along the depth, aten's conv2d on views is worth more than its conv3d, and
    results have the same strides. The operator of volumes makes such views itself, but is no conv2d to a compiler."""
    rows = None if problem.is_volume else rows_of(x, weight)
    dense = x.is_contiguous() and weight.is_contiguous() and problem.symmetric_padding
    if rows is None or not dense or not FoldedPlan.beats_aten(problem, settings):
        return False
    of_volume = volume_strides(x, weight, problem)
    return [folded_strides(s, rows) for s in of_volume] == [*result_strides(x.flatten(3), weight.flatten(3), problem)]


def _numbers_of(kind: str, x: Tensor, weight: Tensor, problem: ConvProblem, geometry: Any) -> tuple[Any, ...]:
    """The geometry of a call as its operator takes it."""
    dimensions, transposed = _KINDS[kind]
    if transposed:
        each = triple if dimensions == 3 else pair
        stride, padding, more, groups, dilation = geometry
        return (each(stride), each(padding), each(dilation), groups, each(more))
    p = problem
    if dimensions == 3:
        p = volume_of(x, weight, geometry) or p  # which `problem` may be an image of
    sides = (p.pad_top, p.pad_bottom, p.pad_left, p.pad_right)
    if dimensions < 3:
        return (p.stride, sides, p.dilation, p.groups)
    return ((p.stride_d, *p.stride), (p.pad_front, p.pad_back, *sides), (p.dil_d, *p.dilation), p.groups)


def _names(
    problem: ConvProblem, gradients: Sequence[ConvProblem], settings: _settings.Settings
) -> tuple[str, str, str]:
    """The algorithms of the call and of each of its gradients; native for those that nobody needs."""
    forward = _name(problem, settings)
    grad_input = grad_weight = NATIVE
    for gradient in gradients:
        if gradient.direction == Direction.BACKWARD_WEIGHT:
            grad_weight = _name(gradient, settings)
        else:
            grad_input = _name(gradient, settings)
    return forward, grad_input, grad_weight


def _name(problem: ConvProblem, settings: _settings.Settings) -> str:
    choice = choice_for(problem, settings)
    # Gains that calls have shown are over native's eager calls, which Inductor's fusions beat just as well.
    too_little = choice.source != "forced" and (choice.gain or 1.0) < LEAST_GAIN
    return NATIVE if too_little else choice.algorithm


__all__ = ["call", "verdict"]
