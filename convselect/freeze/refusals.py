"""What a frozen model refuses, each in a sentence that says what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor, nn

from convselect.layer import SELECTED

_FROZEN = "this model is frozen for inference; call convselect.unfreeze(model) to train it again"
_SCRIPTING = (
    "torch.jit.script cannot compile the forward of a frozen model; call convselect.unfreeze(model) first, or use "
    "torch.jit.trace or torch.export: each of them takes PyTorch's own convolutions, so nothing is lost by it"
)
_SAME_IN_TRAINING = frozenset({
    *SELECTED, *SELECTED.values(), nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.ReLU, nn.ReLU6, nn.SiLU,
    nn.GELU, nn.GLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Identity, nn.Upsample, nn.Sequential, nn.ModuleList,
    nn.ModuleDict,
})  # fmt: skip
ATTRIBUTES = ("forward", "train", "__prepare_scriptable__")
"""What `freeze` sets on a module and `unfreeze` removes."""


class RefuseTraining:
    """The `train` of a frozen module."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def __call__(self, mode: bool = True) -> nn.Module:
        if mode:
            raise RuntimeError(_FROZEN)
        return type(self._root).train(self._root, False)


class RefuseScripting:
    """What torch.jit.script calls for the module to compile instead of a frozen one, or of one inside."""

    def __call__(self) -> NoReturn:
        raise RuntimeError(_SCRIPTING)


def refuse_gradient(arguments: Iterable[Any]) -> None:
    """Raises RuntimeError if one of these arguments of a frozen forward requires a gradient."""
    if any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
        raise RuntimeError(f"an input requires a gradient, but {_FROZEN}")


def may_depend_on_training(module: nn.Module) -> bool:
    """Whether this module may compute something else in training mode, those inside it left out. Quantised layers do
    not, and PyTorch makes them in training mode."""
    kind = type(module)
    return kind not in _SAME_IN_TRAINING and "quantized" not in kind.__module__


def refuse_training(root: nn.Module) -> None:
    """Raises RuntimeError if a module of `root` is in training mode and may compute something else there."""
    for name, module in root.named_modules():
        if module.training and may_depend_on_training(module):
            kind = f"{type(module).__name__} {name!r} inside" if name else type(module).__name__
            raise RuntimeError(
                f"{kind} is in training mode, but {_FROZEN}. Also before modules inside are replaced or "
                "quantised, unfreeze it; then call .eval() and freeze it again."
            )
