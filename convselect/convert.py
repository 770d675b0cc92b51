"""`convert(model)`: every convolution chooses its algorithms from now on, in place; `revert` undoes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from convselect.layer import SELECTED, check_module, check_policy, mark, unmark, why_not_converted

M = TypeVar("M", bound=nn.Module)


def convert(model: M, *, policy: str | None = None, where: Callable[[str, nn.Module], bool] | None = None) -> M:
    """Make every `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d` of `model`, and their transposes, choose their algorithms. In
    place: each layer gets a mark and an attribute `policy`, and nothing else changes. Its type is still `nn.Conv2d`, or
    whichever it was, so that tools which ask for it find it, and parameters, buffers, hooks, names, references,
    parametrizations and optimizers remain valid. Copies, replicas and pickles are converted too; a pickle names no
    class of this package, so a process that has not imported it loads plain layers.

    Subclasses are converted as well. One with a forward of its own still runs it, and the convolutions that this calls
    choose: padding, standardised weights, norms behind the convolution remain what they are. The method of the class
    is exchanged for one that looks for the mark.

    Layers that come later are plain: call `convert` again after adding or replacing some (adapters, a
    re-parametrisation for deployment). It leaves converted ones as they are.

    Not converted: lazy layers that have no weight yet; quantised layers; subclasses with an attribute `policy` of their
    own, and those whose forward is no Python function or was replaced in the layer. `convselect.summary(model)` lists
    them with the reasons.

    Args:
        model: any module, a single convolution included.
        policy: a policy for the layers converted now; None: the context's policy.
        where: `where(name, layer)` says which layers to convert; all by default.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `policy` names no algorithm.
    """
    check_module(model, "convert")
    if policy is not None:
        check_policy(policy)
    for name, module in model.named_modules():
        if why_not_converted(module) is None and (where is None or where(name, module)):
            mark(module, policy)
    return model


def revert(model: M) -> M:
    """Undo `convert`, and make every `SelectedConv2d` a plain `nn.Conv2d`, and so on. Subclasses of these stay.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module.
    """
    check_module(model, "revert")
    for module in model.modules():
        unmark(module)
        if (plain := _plain_class(type(module))) is not None:
            module.__dict__.pop("policy", None)
            module.__class__ = plain
    return model


def _plain_class(kind: type) -> type | None:
    for plain, selected in SELECTED.items():
        if kind is selected:
            return plain  # type: ignore[no-any-return]
        if kind.__bases__ == (selected,) and kind.__name__ == f"Parametrized{selected.__name__}":
            # A parametrized layer's class has the properties of its parametrizations: the same class on the other base.
            members = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
            return type(f"Parametrized{plain.__name__}", (plain,), members)
    return None
