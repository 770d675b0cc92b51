"""Graphs of ATen operators for the tests of rewriting."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from convselect.freeze.algebra.constants import constant_nodes
from convselect.freeze.algebra.rewrite import rewrite


def traced(f, *inputs):
    """A function as a graph; tensors that it captures become `get_attr` nodes."""
    with torch.no_grad():
        f(*inputs)
        return make_fx(torch.func.functionalize(lambda *x: f(*x)), tracing_mode="real")(*inputs)


def operators(graph):
    """Operator -> how often it is called on what is not constant."""
    constants = constant_nodes(graph)
    calls = [n for n in graph.nodes if n.op == "call_function" and n not in constants]
    names = (str(n.target).removeprefix("aten.").partition(".")[0] for n in calls)
    return Counter("getitem" if "getitem" in name else name for name in names)


def rewritten(f, *inputs, rtol=1e-10):
    """(operators left, rules applied), after checking that results, their types and strides are the same.

    In float64: float32 would not show a small mistake.
    """
    module = traced(f, *inputs)
    with torch.no_grad():
        want = module(*inputs)
        applied = rewrite(module.graph)
        module.recompile()
        got = module(*inputs)
    want, got = ((t,) if isinstance(t, torch.Tensor) else t for t in (want, got))
    assert len(want) == len(got)
    for a, b in zip(want, got, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        largest = a.double().abs().max().item() if a.numel() else 0
        torch.testing.assert_close(b, a, rtol=rtol, atol=rtol * (1 + largest))
    assert rewrite(module.graph) == {}, "a second pass finds nothing"
    return operators(module.graph), applied


def randomised_norms(model, seed=0):
    """In evaluation mode, with statistics, affine parameters and layer scales that make every term matter."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.uniform_(-0.3, 0.3)
                module.running_var.uniform_(0.5, 2)
                if module.affine:
                    module.weight.uniform_(0.5, 1.5)
                    module.bias.uniform_(-0.5, 0.5)
        for name, parameter in model.named_parameters():
            if "gamma" in name or "gain" in name or "layer_scale" in name:
                parameter.uniform_(0.3, 1)
    return model.eval()
