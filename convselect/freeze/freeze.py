"""`freeze(model)`: inference on a CPU with folded weights, fused epilogues and memory laid out beforehand; `unfreeze`.

The largest parts of a model that can be captured get a `forward` as an instance attribute (see `forward`), which
hides the class's without touching it: modules, parameters, buffers, hooks and state_dict stay what they are, and
`unfreeze` only removes the attribute.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from convselect.freeze import refusals
from convselect.freeze.forward import FrozenForward, freeze_in_parts
from convselect.freeze.remembered import Remembered
from convselect.layer import check_module

M = TypeVar("M", bound=nn.Module)


def freeze(model: M, *example: Any) -> M:
    """Make inference with `model` on a CPU as fast as measuring can make it. In place; `unfreeze` undoes it.

    The forward is captured as a graph of PyTorch's basic operations, so that any spelling of a layer comes out the
    same, and simplified: scales, shifts and batch normalisations go into the weights of convolutions and linear layers
    before or after them, weights that are computed from weights are computed once, parallel convolutions whose results
    are added become one. Bias, residual sum and activation run in a layer's epilogue, what is left of pointwise
    operations in one pass each, and weights are kept in the form each kernel wants. Then it measures: for every layer,
    the fastest candidate that agrees with PyTorch's operation; for the whole, NCHW or NHWC between the layers, or the
    model as it was if nothing is faster. Parameters, buffers, modules, hooks and state_dict are not touched.
    `convselect.summary(model)` says what was folded, fused and chosen, and what was left alone and why. Where a network
    multiplies rounding, tiles of Winograd are smaller: errors stay about within ten times those of the model itself.

    Capturing and measuring happen at the first call with inputs of a new shape, stride, dtype or thread count, and take
    from a second to some tens of seconds; the given example makes that first call now. What was chosen is kept in the
    store, so that a later process measures nothing again. After eight kinds of input, further ones take what was chosen
    before, from their second call on. Planning runs the model several times.

    What a call with a frozen model still does:

    - Replaced parameters, buffers and submodules, and everything that moves a tensor's version counter (loading a
      state_dict, any operation in place) are noticed at once, and folded and packed again before the call goes on.
      `.data = other` is noticed at once for weights and within eight calls for biases and statistics. Writes behind
      the counter (`.data.copy_`, NumPy) are noticed at once if they reach the one element per weight that each call
      samples, as whole-tensor updates do, within eight calls for biases and statistics, and otherwise when the 64 KiB
      that each call adds up in turn come to them. Other attributes (stride, eps) are read once.
    - Hooks: a module inside that has forward hooks, or a forward that was set and is no method of its own, is called
      as before, and so are the modules around it; the parts beside and within it are frozen by themselves. If hooks
      were added later, or global ones are set, calls run the original forward. Those by which transformers notes hidden
      states are captured; a forward around the frozen module that asks them for results gets the original.
    - So it is with control flow and sizes that depend on values of tensors, random numbers, side effects, and tensors
      given in a list, tuple or dictionary: the modules around them run as they were, without gradients, and the largest
      parts without all that are frozen.
    - Autocast, tracers, torch.compile, torch.func, dispatch modes, tensor subclasses, other devices, a forced policy
      and batch invariance run the original forward.
    - NaN and infinity, in inputs or weights, run the original forward if a kernel would spread or lose them.
    - Results never require gradients. An input that does, under grad mode, is an error, as are `train()` and
      `torch.jit.script`, and a module that was put in, is in training mode and may compute something else there.

    A deep copy or an unpickled copy of a frozen model is frozen and plans anew. Print statements and other side effects
    of a captured forward do not happen.

    Args:
        model: in evaluation mode.
        example: the arguments of one call.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module.
        RuntimeError: it, or a module inside, is in training mode.
    """
    check_module(model, "freeze")
    if any(module.training for module in model.modules()):
        raise RuntimeError("freeze takes a model in evaluation mode: call model.eval() first")
    unfreeze(model)
    freeze_in_parts(model, None, (), Remembered())
    if example:
        model(*example)
    return model


def unfreeze(model: M) -> M:
    """Undo `freeze`, exactly.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module.
    """
    check_module(model, "unfreeze")
    for module in model.modules():
        if isinstance(vars(module).get("forward"), FrozenForward):
            for name in refusals.ATTRIBUTES:
                vars(module).pop(name, None)
    return model


def frozen_forwards(model: nn.Module) -> dict[str, FrozenForward]:
    """Name of each module of `model` whose forward is frozen -> that forward; "" is the model itself."""
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    return {name: forward for name, forward in forwards.items() if isinstance(forward, FrozenForward)}
