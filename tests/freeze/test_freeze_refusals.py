"""A frozen model in other hands: tracers, scripting, quantisation, replaced modules, another device. Each works, or is
refused in a sentence that says what to do instead."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from networks import CONV, Flagged, conv_bn, distance, eager, randomised
from torch import nn
from torch.fx.experimental import optimization
from torch.nn.utils import parametrizations
from torch.nn.utils.fusion import fuse_conv_bn_eval

import convselect

X = (1, 8, 6, 6)


def frozen(*, used: bool, more=()):
    model = randomised(nn.Sequential(*conv_bn(8, 8, activation=nn.ReLU()), nn.Flatten(), nn.Linear(8 * 36, 4), *more))
    return convselect.freeze(model, *([torch.randn(X)] if used else []))


@pytest.fixture(params=[False, True], ids=["fresh", "used"])
def model(request):
    """Frozen, before and after its first call."""
    return frozen(used=request.param)


@pytest.fixture(autouse=True)
def _old_parts_of_pytorch():
    """torch.jit and torch.ao warn that they are going away."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential], ids=["itself", "inside"])
def test_scripting_is_refused_with_the_ways_round_it(model, wrap):
    outer, x = wrap(model), torch.randn(X)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script.*unfreeze\(model\) first.*torch\.jit\.trace"):
        torch.jit.script(outer)
    assert convselect.summary(model).frozen == ("",)  # refused before anything was touched
    assert distance(torch.jit.trace(outer, x, check_trace=False)(x), eager(model, x)) < CONV
    convselect.unfreeze(model)
    assert distance(torch.jit.script(outer)(x), model(x)) < CONV
    assert not {"forward", "train", "__prepare_scriptable__"} & vars(model).keys()


def test_scripting_a_model_of_which_only_parts_are_frozen():
    model = convselect.freeze(randomised(Flagged()), torch.rand(1, 8, 6, 6))
    assert convselect.summary(model).frozen == ("a", "b")
    with pytest.raises(RuntimeError, match="unfreeze"):
        torch.jit.script(model)


def test_symbolic_tracing_takes_the_models_own_forward(model):
    x = torch.randn(X)
    for traced in (torch.fx.symbolic_trace(model), optimization.fuse(model)):
        assert distance(traced(x), eager(model, x)) < CONV
        assert convselect.summary(traced).frozen == ()


def test_quantised_linear_layers_in_a_frozen_model(model):
    """PyTorch makes quantised layers in training mode; it changes nothing in them."""
    x = torch.randn(X)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert any(part.training for part in quantised.modules())
    assert convselect.summary(quantised).frozen == ("",)
    want = eager(quantised, x)
    assert 0 < distance(want, eager(model, x)) < 0.05
    for _ in range(2):
        assert distance(quantised(x), want) < 0.01  # the input's last digits may move a rounding


def test_a_module_that_was_put_in_and_does_not_depend_on_its_mode(model):
    x = torch.randn(X)
    want = eager(model, x)
    model[0], model[1] = fuse_conv_bn_eval(model[0], model[1]), nn.Identity()
    assert model[1].training
    for _ in range(2):
        assert distance(model(x), want) < CONV


def observed(model):
    model.qconfig = torch.ao.quantization.default_qconfig
    return torch.ao.quantization.prepare(model)


def reparametrised(model):
    parametrizations.spectral_norm(model[0])
    return model


def with_dropout(model):
    model[2] = nn.Sequential(nn.Dropout(0.5))
    return model


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (observed, "Observer '0.activation_post_process'"),
        (reparametrised, "ParametrizationList '0.parametrizations.weight'"),
        (with_dropout, "Dropout '2.0'"),
    ],
)
def test_a_module_that_was_put_in_and_depends_on_its_mode_is_named(model, change, named):
    x = torch.randn(X)
    changed = change(model)
    with pytest.raises(RuntimeError, match=rf"{named} inside is in training mode.*unfreeze.*eval\(\)"):
        changed(x)
    changed.eval()
    for _ in range(2):
        assert distance(changed(x), eager(changed, x)) < CONV


def test_training_for_quantisation_is_refused(model):
    model.qconfig = torch.ao.quantization.default_qat_qconfig
    with pytest.raises(RuntimeError, match="unfreeze"):
        torch.ao.quantization.prepare_qat(model.train())


class Packed(torch.Tensor):
    """As the weights of a quantisation library: a linear layer runs, and nothing else."""

    @staticmethod
    def __new__(cls, t):
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype)

    def __init__(self, t):
        self.plain = t

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return function(args[0], args[1].plain, *args[2:])
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].plain)
        raise NotImplementedError(f"{function} on packed weights")


def packed(model):
    model[4].weight = nn.Parameter(Packed(model[4].weight.detach() * 2), requires_grad=False)
    return model


@pytest.mark.parametrize("when", ["before", "fresh", "used"])
def test_weights_of_another_kind(when):
    """Quantised before freezing, after it, or after the first call of the frozen model."""
    x = torch.randn(X)
    model = frozen(used=when == "used")
    if when == "before":
        convselect.freeze(packed(convselect.unfreeze(model)), x)
    else:
        packed(model)
    stock = eager(model[:4], x) @ model[4].weight.plain.T + model[4].bias
    for _ in range(2):
        assert distance(model(x), stock) < CONV
    assert "0" in convselect.summary(model).fused
    assert "4" not in convselect.summary(model).fused


def test_a_model_that_was_moved_to_another_device_runs_as_it_is_there(model):
    x = torch.randn(X)
    state, want = copy.deepcopy(model.state_dict()), eager(model, x)
    model.to("meta")
    got = model(x.to("meta"))
    assert (got.device.type, got.shape) == ("meta", want.shape)
    with pytest.raises(RuntimeError, match="meta"):  # PyTorch's own error
        model(x)
    model.to_empty(device="cpu").load_state_dict(state)
    for _ in range(2):
        assert distance(model(x), want) < CONV
    assert convselect.summary(model).frozen == ("",)
