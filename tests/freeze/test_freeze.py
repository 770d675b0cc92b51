"""`freeze`: the same outputs as the model in evaluation mode, no stale weight, nothing left behind by `unfreeze`."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import os
import pickle

import fresh
import pytest
import torch
from fake_model import use_fake
from networks import (
    CONV,
    TOLERANCE,
    Flagged,
    Residual,
    conv_bn,
    distance,
    eager,
    frozen_outputs,
    randomised,
    unfrozen,
    use_forced,
)
from torch import nn

import convselect
from convselect.demo.architectures import ARCHITECTURES, calibrate_batch_norm, he_initialise, vgg16

# ---- whole networks ------------------------------------------------------------------------------------------------


# VGG-16 without its linear layers, nine tenths of its weights.
BUILDERS = {name: architecture.build for name, architecture in ARCHITECTURES.items()} | {
    "vgg16": functools.partial(vgg16, classifier="pooled")
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_networks_compute_the_same(name):
    model = he_initialise(BUILDERS[name]()).eval()
    calibrate_batch_norm(model, torch.randn(4, 3, 64, 64))
    keys, state = list(model.state_dict()), {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(1, 3, 64, 64)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < TOLERANCE
    assert got.stride() == want.stride()
    assert not got.requires_grad
    assert report.frozen == ("",)
    n_norms = sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert len(report.folded) == n_norms
    assert list(model.state_dict()) == keys
    assert unfrozen(model) == 1
    with torch.no_grad():
        assert torch.equal(model(x), want)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


# ---- training ------------------------------------------------------------------------------------------------------


def test_refuses_to_train():
    model = randomised(nn.Sequential(conv_bn(3, 4), nn.ReLU()))
    x = torch.randn(1, 3, 6, 6)
    convselect.freeze(model, x)
    for enter in (model.train, lambda: model.train(True), lambda: nn.Sequential(model).train()):
        with pytest.raises(RuntimeError, match="unfreeze"):
            enter()
    assert model.eval() is model
    with pytest.raises(RuntimeError, match="unfreeze"):
        model(x.clone().requires_grad_())
    with torch.no_grad():
        model(x.clone().requires_grad_())
    assert not model(x).requires_grad  # parameters do require gradients; results of a frozen model do not
    assert torch.is_grad_enabled()
    model[0][1].train()
    with pytest.raises(RuntimeError, match="unfreeze"):
        model(x)
    model[0][1].eval()
    model(x)
    convselect.unfreeze(model)
    model.train()
    model(x).sum().backward()
    assert model[0][0].weight.grad is not None


def test_takes_modules_in_evaluation_mode():
    with pytest.raises(RuntimeError, match="eval"):
        convselect.freeze(nn.Conv2d(1, 1, 1))
    with pytest.raises(TypeError):
        convselect.freeze(lambda x: x)
    with pytest.raises(TypeError):
        convselect.unfreeze("model")


def test_dropout_in_training_mode_is_refused():
    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.5)))
    convselect.freeze(model, torch.randn(1, 3, 4, 4))
    model[1].train()
    with pytest.raises(RuntimeError, match="unfreeze"):
        model(torch.randn(1, 3, 4, 4))


@use_forced
def test_inference_mode():
    model = randomised(Residual())
    x = torch.randn(1, 8, 7, 7)
    with torch.inference_mode():
        convselect.freeze(model, x)
        inside = model(x)
    assert distance(model(x), eager(model, x)) < CONV
    assert distance(inside, eager(model, x)) < CONV
    model.body[0][0].weight.data.mul_(2)
    assert distance(model(x), eager(model, x)) < CONV


def test_parameters_made_in_inference_mode():
    with torch.inference_mode():
        model = randomised(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
        x = torch.randn(1, 3, 8, 8)
        convselect.freeze(model, x)
        assert distance(model(x), eager(model, x)) < CONV


# ---- unfreeze, copies ----------------------------------------------------------------------------------------------


def snapshot(model):
    return {
        name: {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()}
        for name, module in model.named_modules()
    }


def test_unfreeze_restores_every_attribute():
    model = randomised(nn.Sequential(Residual("shortcut"), nn.Dropout(), Flagged(), nn.Conv2d(8, 4, 1)))
    model[3].register_forward_hook(lambda *_: None)
    before, ids = snapshot(model), [id(t) for t in model.state_dict(keep_vars=True).values()]
    x = torch.randn(1, 8, 7, 7)
    want = eager(model, x)
    convselect.freeze(model, x)
    model(x)
    assert unfrozen(model) > 1
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name in before:
        assert after[name].keys() == before[name].keys()
        for key, value in before[name].items():
            same = after[name][key] == value if isinstance(value, dict) and not value else after[name][key] is value
            if isinstance(value, dict) and value:
                same = all(after[name][key][k] is v for k, v in value.items())
            assert same or after[name][key] == value, (name, key)
    assert [id(t) for t in model.state_dict(keep_vars=True).values()] == ids
    assert torch.equal(model(x), want)
    assert unfrozen(model) == 0


def test_freezing_again_starts_anew():
    model = randomised(Residual())
    x = torch.randn(1, 8, 7, 7)
    convselect.freeze(model, x)
    convselect.freeze(model, x)
    assert distance(model(x), eager(model, x)) < CONV
    assert unfrozen(model) == 1


@use_forced
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy])
def test_copies_are_frozen_and_independent(copied):
    model = randomised(Residual())
    x = torch.randn(1, 8, 7, 7)
    convselect.freeze(model, x)
    want = eager(model, x)
    other = copied(model)
    assert distance(other(x), want) < CONV
    assert distance(other(x), want) < CONV
    with pytest.raises(RuntimeError, match="unfreeze"):
        other.train()
    if copied is not copy.copy:
        with torch.no_grad():
            other.body[0][0].weight.mul_(3)
        assert distance(other(x), want) > 1e-2
        assert distance(other(x), eager(other, x)) < CONV
        assert distance(model(x), want) < CONV
    assert unfrozen(other) == 1
    assert torch.equal(other(x), eager(other, x))


@use_forced
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_what_changes_between_freezing_and_the_first_call_is_noticed(called, asked):
    """`asked`: a summary in between has traced the copy already."""
    model = randomised(Residual())
    x = torch.randn(1, 8, 7, 7)
    other = copy.deepcopy(convselect.freeze(model, *([x] if called else [])))
    seen = []
    for frozen in (model, other):
        if asked:
            assert convselect.summary(frozen).frozen == ("",)
        frozen.body[0][0] = randomised(nn.Sequential(nn.Conv2d(8, 8, 1)), seed=5)[0]
        assert distance(frozen(x), eager(frozen, x)) < CONV
        assert convselect.summary(frozen).fused["body.0.0"] == ("batch norm", "bias", "relu")
    other = copy.deepcopy(convselect.freeze(model))
    for frozen in (model, other):
        if asked:
            convselect.summary(frozen)
        frozen.body[1].register_forward_hook(lambda *_: seen.append(1))
        frozen(x)
        assert len(seen) >= 1
        seen.clear()


def test_saved_and_loaded_whole():
    model = randomised(Residual())
    x = torch.randn(1, 8, 7, 7)
    convselect.freeze(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert distance(loaded(x), eager(model, x)) < CONV
    assert unfrozen(loaded) == 1


def test_state_dict_of_a_frozen_model():
    model = randomised(Residual("shortcut"))
    keys = list(model.state_dict())
    convselect.freeze(model, torch.randn(1, 8, 7, 7))
    assert list(model.state_dict()) == keys
    fresh = Residual("shortcut").eval()
    fresh.load_state_dict(model.state_dict())
    x = torch.randn(1, 8, 7, 7)
    assert distance(model(x), fresh(x)) < CONV


def test_a_dropped_model_is_freed():
    model = randomised(Residual())
    convselect.freeze(model, torch.randn(1, 8, 7, 7))
    gone = []
    torch.utils.weak.weakref.finalize(model, gone.append, True)
    del model
    gc.collect()
    assert gone == [True]


# ---- hooks ---------------------------------------------------------------------------------------------------------


@use_forced
@pytest.mark.parametrize("which", ["", "0", "0.body", "0.body.0.0", "0.body.0.2", "1"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_run(which, when):
    model = randomised(nn.Sequential(Residual(), nn.Conv2d(8, 4, 1)))
    x = torch.randn(1, 8, 7, 7)
    seen = []

    def hook(module, args, output):
        seen.append(output)
        return output * 2

    if when == "before":
        handle = model.get_submodule(which).register_forward_hook(hook)
    convselect.freeze(model, x)
    if when == "after":
        handle = model.get_submodule(which).register_forward_hook(hook)
    seen.clear()
    got = model(x)
    assert len(seen) == 1
    kept = seen[0].clone()
    model(torch.randn(1, 8, 7, 7))
    assert torch.equal(seen[0], kept)  # what a hook keeps is not overwritten
    handle.remove()
    plain = model(x)
    assert len(seen) == 2
    convselect.unfreeze(model)
    assert distance(plain, eager(model, x)) < CONV
    model.get_submodule(which).register_forward_hook(hook)
    assert distance(got, model(x)) < CONV


def test_pre_hooks_and_global_hooks_run():
    model = randomised(nn.Sequential(conv_bn(4, 4, activation=nn.ReLU()), nn.Conv2d(4, 4, 1)))
    x = torch.randn(1, 4, 6, 6)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    want = eager(model, x)
    convselect.freeze(model, x)
    assert distance(model(x), want) < CONV
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        model(x)
    finally:
        handle.remove()
    assert {"Conv2d", "BatchNorm2d", "ReLU"} <= set(seen)


def test_report_names_what_has_hooks():
    model = randomised(nn.Sequential(conv_bn(4, 4), nn.Conv2d(4, 4, 1)))
    model[0][0].register_forward_hook(lambda *_: None)
    report = convselect.summary(convselect.freeze(model))
    whole = "It was not captured as a whole: "
    assert report.not_fused == {"": f"{whole}0.0 has hooks.", "0": f"{whole}0 has hooks."}
    assert report.frozen == ("0.0", "1")


# ---- together with the rest ----------------------------------------------------------------------------------------


@use_forced
def test_converted_models(monkeypatch):
    use_fake(monkeypatch)
    model = randomised(nn.Sequential(conv_bn(3, 8, activation=nn.ReLU()), Residual()))
    x = torch.randn(1, 3, 12, 12)
    convselect.convert(model)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert len(report.folded) == 3
    assert len(report.converted) == 3
    with convselect.use(policy="native"):
        assert torch.equal(model(x), eager(model, x))


def test_autocast_and_functional_transforms_run_the_original():
    model = randomised(nn.Sequential(conv_bn(3, 4)))
    x = torch.randn(2, 3, 8, 8)
    convselect.freeze(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        assert not model(x).requires_grad
    with torch.no_grad():
        assert distance(torch.func.vmap(model)(x.unsqueeze(1)).squeeze(1), eager(model, x)) < CONV
    assert distance(torch.jit.trace(model, x, check_trace=False)(x), eager(model, x)) < CONV
    assert distance(torch.compile(model, backend="eager", fullgraph=True)(x), eager(model, x)) < CONV
    assert distance(torch.export.export(model, (x,)).module()(x), eager(model, x)) < CONV
    assert str(inspect.signature(model.forward)).startswith("(input")


def test_without_the_c_library():
    code = (
        "import torch, convselect; from torch import nn; torch.manual_seed(0);"
        "model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()).eval();"
        "x = torch.randn(1, 16, 20, 20); want = model(x); convselect.freeze(model, x);"
        "assert torch.allclose(model(x), want, atol=1e-5);"
        "print(*(c for row in convselect.summary(model).inputs for c in row.chosen.values()))"
    )
    environment = {**os.environ, "CONVSELECT_NO_NATIVE": "1"}
    out = fresh.run(["-c", code], check=True, env=environment)
    assert set(out.stdout.split()) <= {"native", "onednn_packed", "gemm"}
