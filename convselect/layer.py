"""`SelectedConv2d`: an `nn.Conv2d` in everything but the clock."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from convselect.choice.choose import check_policy
from convselect.eager import dispatch

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_exporting = torch.compiler.is_exporting
_PLAIN_CONV = nn.Conv2d(1, 1, 1, device="meta")


class SelectedConv2d(nn.Conv2d):
    """Drop-in `torch.nn.Conv2d` that picks its algorithm per shape and direction.

    Same arguments, parameters, state_dict keys, hooks, results and strides. `policy` (None, "auto", "verify",
    "measure", "native" or an algorithm's name) overrides the context's for this layer; it is an attribute and may be
    changed at any time.

    Raises:
        ValueError: `policy` names no algorithm.
    """

    # On the class, so that converting a layer is a change of class and nothing else.
    policy: str | None = None

    def __init__(  # written out, because torch.nn.utils.skip_init and others read the signature
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, bias: bool = True, padding_mode: Any = "zeros", device: Any = None,
        dtype: Any = None, *, policy: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        if policy is not None:
            check_policy(policy)
            self.policy = policy

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # TorchScript compiles this branch, which is nn.Conv2d's own, and skips the rest.
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            if self.padding_mode != "zeros":
                padded = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
                return F.conv2d(padded, weight, bias, self.stride, (0, 0), self.dilation, self.groups)
            return F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        else:  # an else branch, because TorchScript skips nothing else
            if isinstance(input, Proxy):
                return self._as_leaf(input, weight, bias)
            padding = self.padding
            if self.padding_mode != "zeros":
                input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
                padding = (0, 0)
            geometry = (self.stride, padding, self.dilation, self.groups)
            if _is_dynamo_compiling() or _is_exporting():
                from convselect.graph import traced  # needs dynamo

                return traced.conv2d(input, weight, bias, geometry, self.policy)
            return dispatch.conv2d(input, weight, bias, geometry, self.policy)

    def _as_leaf(self, input: Any, *parameters: Any) -> Any:
        """Symbolic tracing: where the tracer would keep an nn.Conv2d whole, keep this layer whole. (The default tracer
        tells leaves by where their class is defined, so that it traces into ours and arrives here.)"""
        tracer = input.tracer
        path = tracer.path_of_module(self)
        if not tracer.is_leaf_module(_PLAIN_CONV, path):
            return nn.Conv2d._conv_forward(self, input, *parameters)
        for parameter in parameters:  # nobody will use what nn.Conv2d.forward has just fetched
            if isinstance(parameter, Proxy) and not parameter.node.users:
                tracer.graph.erase_node(parameter.node)
        return tracer.create_proxy("call_module", path, (input,), {})

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.policy is None else f"{text}, policy={self.policy!r}"
