"""`convert(model)`: every `nn.Conv2d` becomes a `SelectedConv2d`, in place and by class; `revert` takes it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from convselect.choice.choose import check_policy
from convselect.layer import SelectedConv2d


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did.

    Attributes:
        converted: names of the layers that now choose.
        left_alone: name -> reason, for every convolution that does not.
    """

    converted: tuple[str, ...] = ()
    left_alone: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} convolutions converted, {len(self.left_alone)} left alone"]
        lines += [f"  {name or '(the model itself)'}: {reason}" for name, reason in self.left_alone.items()]
        return "\n".join(lines)


def convert(
    model: nn.Module, *, policy: str | None = None, where: Callable[[str, nn.Module], bool] | None = None
) -> ConversionReport:
    """Make every `nn.Conv2d` of `model` choose its algorithms. In place: only the class of each layer changes, so
    parameters, buffers, hooks, names, references, parametrizations and optimizers stay what they are.

    Args:
        model: any module, a single convolution included.
        policy: a policy for the converted layers; None leaves it to the context.
        where: `where(name, layer)` says which layers to convert; all by default.

    Returns:
        What was converted and what was not, and why: subclasses with a forward of their own, lazy layers that have no
        weight yet, quantised layers, transposed and 1-D or 3-D convolutions.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `policy` names no algorithm.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes an nn.Module, not {type(model).__name__}")
    if policy is not None:
        check_policy(policy)
    converted: list[str] = []
    left_alone: dict[str, str] = {}
    for name, module in model.named_modules():
        reason = _why_left_alone(module)
        if reason is None and where is not None and not where(name, module):
            reason = "`where` left it out"
        if reason is None:
            module.__class__ = _selected_class(type(module))
            if policy is not None:
                module.policy = policy  # type: ignore[assignment]
            converted.append(name)
        elif reason:
            left_alone[name] = reason
    return ConversionReport(tuple(converted), left_alone)


def revert(model: nn.Module) -> int:
    """Undo `convert`: every `SelectedConv2d` becomes the plain class it was. Returns how many.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"revert takes an nn.Module, not {type(model).__name__}")
    count = 0
    for module in model.modules():
        if isinstance(module, SelectedConv2d):
            plain = _plain_class(type(module))
            if plain is not None:
                module.__dict__.pop("policy", None)
                module.__class__ = plain
                count += 1
    return count


def _why_left_alone(module: nn.Module) -> str | None:
    """None: convert it. "": no convolution. Otherwise the reason to leave this convolution alone."""
    kind = type(module)
    if kind is nn.Conv2d or _is_parametrized_conv2d(kind):
        return None
    if isinstance(module, SelectedConv2d):
        return "chooses already"
    if isinstance(module, nn.LazyConv2d):
        return "lazy: it has no weight before its first call; convert after that"
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return "a transposed convolution"
    if isinstance(module, nn.Conv1d | nn.Conv3d):
        return f"{kind.__name__}: only 2-D convolutions choose"
    if isinstance(module, nn.Conv2d):
        return f"{kind.__module__}.{kind.__qualname__} is a subclass of nn.Conv2d and may compute something else"
    if "Conv" in kind.__name__ and "quantized" in kind.__module__:
        return "quantised"
    return ""


def _is_parametrized_conv2d(kind: type) -> bool:
    """`torch.nn.utils.parametrize` gives each module a class of its own on top of nn.Conv2d."""
    return (
        kind.__bases__ == (nn.Conv2d,)
        and getattr(kind, "parametrizations", None) is None
        and (
            kind.__name__ == "ParametrizedConv2d" and "forward" not in vars(kind) and "_conv_forward" not in vars(kind)
        )
    )


def _selected_class(kind: type) -> type:
    if kind is nn.Conv2d:
        return SelectedConv2d
    # A parametrized layer's class carries the properties of its parametrizations: same class on the other base.
    members = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
    return type(kind.__name__.replace("Conv2d", "SelectedConv2d"), (SelectedConv2d,), members)


def _plain_class(kind: type) -> type | None:
    if kind is SelectedConv2d:
        return nn.Conv2d
    if kind.__bases__ == (SelectedConv2d,) and kind.__name__ == "ParametrizedSelectedConv2d":
        members = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
        return type("ParametrizedConv2d", (nn.Conv2d,), members)
    return None
