"""Weights that count or average run by direct sums: eager, with gradients, under torch.func, frozen, explained."""

from __future__ import annotations

import pytest
import torch
from fake_model import use_fake
from torch import nn

import convselect
from convselect.aten import arguments
from convselect.aten.arguments import wants_direct_sums
from convselect.base import lru
from convselect.base.problem import conv_problem
from convselect.eager.plan import plans
from convselect.freeze import layer as frozen_layer
from convselect.freeze.freeze import frozen_forwards
from convselect.graph import ops
from convselect.kernels import _library

TRAINED = torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(1))
MASK = torch.ones(1, 8, 20, 20).index_fill(2, torch.arange(6, 14), 0.0).clone()
MASK[:, :, :6], MASK[:, :, 6:14, :6] = 1, 1


@pytest.fixture(autouse=True)
def winograd(monkeypatch):
    use_fake(monkeypatch, "winograd4", "fft")


def layer_of(weight: torch.Tensor, *, policy: str | None = "auto", grad: bool = False) -> convselect.SelectedConv2d:
    K, C, R, _ = weight.shape
    layer = convselect.SelectedConv2d(C, K, R, padding=R // 2, bias=False, policy=policy, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    return layer.requires_grad_(grad)


def is_exact(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    want = torch.conv2d(x.double(), weight.double(), padding=weight.shape[2] // 2)
    return torch.equal(y == 0, want == 0) and (bool((y >= 0).all()) or bool((want < 0).any()))


WEIGHTS = {
    "ones": torch.ones(8, 8, 3, 3),
    "mean": torch.full((8, 8, 3, 3), 1 / 72),
    "less than nothing": torch.full((8, 8, 3, 3), -1 / 72),
    "one value per filter": torch.arange(1.0, 9).mul(-0.3).view(8, 1, 1, 1).expand(8, 8, 3, 3),
    "whole": TRAINED.mul(40).round(),
    "eighths": TRAINED.mul(8).round() / 8,
    "blur": TRAINED.abs(),
    "nothing": torch.zeros(8, 8, 3, 3),
}
ORDINARY = {
    "trained": TRAINED,
    "trained, its first filters all ones": torch.cat([torch.ones(7, 8, 3, 3), TRAINED[:1]]),
    "one negative fraction at the end": torch.ones(8, 8, 3, 3).index_put((torch.tensor([7]),) * 2, torch.tensor(-0.1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_which_weights_ask_for_direct_sums(dtype):
    lru.clear()
    kept = []
    for arrange in (
        lambda w: w.contiguous(), lambda w: w.contiguous(memory_format=torch.channels_last),
        lambda w: torch.stack([w, w], -1)[..., 0], lambda w: w.transpose(2, 3),
    ):  # fmt: skip
        # All of them are alive at once: True for one is not yet out of date for the next at its address.
        special = {name: arrange(weight.to(dtype)) for name, weight in WEIGHTS.items()}
        ordinary = {name: arrange(weight.to(dtype)) for name, weight in ORDINARY.items()}
        kept += [special, ordinary]
        for _ in range(2):  # the second time by what the first has noted
            assert all(map(wants_direct_sums, special.values())), special
            assert not any(map(wants_direct_sums, ordinary.values())), ordinary
    assert not wants_direct_sums(torch.ones(1, 1, 1, 1, device="meta"))


@pytest.mark.parametrize("policy", ["auto", "verify"])
def test_layers_of_one_shape_each_get_what_they_ask_for(policy):
    trained, ones = layer_of(TRAINED, policy=policy), layer_of(WEIGHTS["ones"], policy=policy)
    for _ in range(40):
        assert is_exact(ones(MASK), MASK, ones.weight)
        trained(MASK)
    assert not is_exact(layer_of(WEIGHTS["ones"], policy="winograd4")(MASK), MASK, ones.weight)  # what is at stake
    assert not is_exact(layer_of(TRAINED)(MASK), MASK, trained.weight)  # a trained weight runs as before


def test_a_weight_may_change_in_any_way_after_the_plan_was_made():
    layer = layer_of(TRAINED)
    layer(MASK)
    for change in (
        lambda w: w.data.fill_(1), lambda w: w.detach().numpy().fill(2), lambda w: setattr(w, "data", WEIGHTS["blur"]),
        lambda w: w.detach().copy_(WEIGHTS["whole"]),
    ):  # fmt: skip
        change(layer.weight)
        assert is_exact(layer(MASK), MASK, layer.weight)
        layer.weight.data.copy_(TRAINED)
        assert not is_exact(layer(MASK), MASK, layer.weight)  # and back


def test_where_to_look_is_no_more_than_a_hint():
    lru.clear()  # of another weight at this address
    late = ORDINARY["one negative fraction at the end"].clone()
    assert not wants_direct_sums(late)
    late.data[7, 7] = 1.0  # behind the version counter
    assert wants_direct_sums(late)
    late[7, 7] = -0.1
    assert not wants_direct_sums(late)
    arguments._weights.update({(-i, 0): 0 for i in range(arguments._MOST_WEIGHTS)})
    assert wants_direct_sums(torch.ones(2, 8, 3, 5))
    assert len(arguments._weights) <= arguments._MOST_WEIGHTS


def test_a_trained_weight_is_not_read_through(monkeypatch):
    monkeypatch.setattr(arguments, "_looked_through", lambda *_: pytest.fail("read all of it"))
    layer_of(TRAINED)(MASK)


def test_gradients_and_training():
    x = MASK.clone().requires_grad_()
    ones = layer_of(WEIGHTS["ones"])
    y = ones(x)
    assert is_exact(y.detach(), MASK, ones.weight)
    (grad,) = torch.autograd.grad(y, x, MASK)
    assert is_exact(grad, MASK, ones.weight)
    learning = layer_of(WEIGHTS["ones"], grad=True)  # it will not stay like that
    assert not is_exact(learning(MASK).detach(), MASK, ones.weight)
    with torch.no_grad():
        assert is_exact(learning(MASK), MASK, ones.weight)


def test_functional_unbatched_autocast_and_without_versions():
    weight = WEIGHTS["ones"]
    with convselect.use(policy="auto"):
        assert is_exact(convselect.conv2d(MASK, weight, padding=1), MASK, weight)
        assert is_exact(convselect.conv2d(MASK[0], weight, padding=1)[None], MASK, weight)
        with torch.autocast("cpu", torch.bfloat16):
            assert is_exact(convselect.conv2d(MASK, weight, padding=1).float(), MASK, weight)
        with torch.inference_mode():
            assert is_exact(convselect.conv2d(MASK, weight.clone(), padding=1), MASK, weight)
        with convselect.enabled():
            assert is_exact(torch.conv2d(MASK, weight, padding=1), MASK, weight)
        with convselect.use(batch_invariant=True):
            assert is_exact(convselect.conv2d(MASK, weight, padding=1), MASK, weight)


def test_torch_func():
    weight = WEIGHTS["ones"]
    with convselect.use(policy="auto"):
        batched = torch.func.vmap(lambda x: convselect.conv2d(x, weight, padding=1))(MASK[:, None])[:, 0]
        assert is_exact(batched, MASK, weight)
        both = torch.stack([weight, 2 * weight])
        for y in torch.func.vmap(lambda w: convselect.conv2d(MASK, w, padding=1))(both):
            assert is_exact(y, MASK, weight)
        y, tangent = torch.func.jvp(lambda x: convselect.conv2d(x, weight, padding=1), (MASK,), (MASK,))
        assert is_exact(y, MASK, weight)
        assert is_exact(tangent, MASK, weight)


def test_it_is_the_plan_of_precision_exact_and_a_named_algorithm_runs():
    ones = layer_of(WEIGHTS["ones"])
    ones(MASK)
    before = len(plans)
    with convselect.use(precision="exact"):
        ones(MASK)
    assert len(plans) == before
    with convselect.use("fft"):
        assert not is_exact(layer_of(WEIGHTS["ones"], policy=None)(MASK), MASK, ones.weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_precision_exact_admits_no_transform_in_any_direction(dtype):
    for name in ("winograd2", "winograd3", "winograd6", "fft", "fft_tiled"):
        for direction in convselect.Direction:
            problem = conv_problem(2, 8, 20, 20, 8, 3, 3, padding=1, direction=direction, dtype=dtype)
            with convselect.use(policy="auto", precision="exact"):
                (row,) = convselect.explain_problem(problem)
            assert row.algorithm == "native"
            assert "precision 'exact'" in row.why_not[name] or "need the C kernels" in row.why_not[name]


def test_explain_says_so():
    model = nn.Sequential(layer_of(TRAINED), layer_of(WEIGHTS["ones"]))
    found = convselect.explain(model, MASK)
    assert [row.algorithm for row in found] == ["winograd4", "native"]
    assert "Direct sums only in 1:" in found.note
    assert "precision 'exact'" in found.rows[1].why_not["winograd4"]
    assert convselect.explain(model[0], MASK).note == ""


def test_frozen_layers_go_by_the_folded_weight(monkeypatch):
    """Whatever is fastest."""
    monkeypatch.setattr(frozen_layer, "fastest", lambda runs, *_: next((n for n in runs if "winograd" in n), "native"))
    conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
    conv.weight.data.copy_(TRAINED)
    model = nn.Sequential(conv, nn.BatchNorm2d(8)).eval()
    model[1].weight.data.copy_(torch.arange(1.0, 9))
    convselect.freeze(model)
    (forward,) = frozen_forwards(model).values()

    def chosen() -> set[str]:
        with torch.no_grad():
            model(MASK)
            model(MASK)
        plans = [plan for _, plan in forward.plans()]
        assert plans
        return {name for plan in plans for name in plan.chosen.values()}

    if _library.available():
        assert any("winograd" in name for name in chosen())
    conv.weight.data.fill_(1)  # times a positive number per channel
    assert not any("winograd" in name for name in chosen())
    conv.weight.data.copy_(TRAINED)
    if _library.available():
        convselect.freeze(model)
        (forward,) = frozen_forwards(model).values()
        assert any("winograd" in name for name in chosen())


# ---- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("winograd4", "winograd4", "native"), ("", "", "")], ids=["named", "at run time"])
def test_operators_of_graphs_look_at_the_weight_they_are_given(names):
    with convselect.use(policy="auto") as used:
        for weight in (WEIGHTS["ones"], TRAINED, WEIGHTS["whole"]):
            y = ops.conv2d(MASK, weight, None, (1, 1), (1, 1, 1, 1), (1, 1), 1, *names, str(used))
            assert is_exact(y, MASK, weight) == (weight is not TRAINED)
            x = MASK.clone().requires_grad_()
            y = ops.conv2d(x, weight, None, (1, 1), (1, 1, 1, 1), (1, 1), 1, *names, str(used))
            (grad,) = torch.autograd.grad(y, x, MASK)
            assert is_exact(grad, MASK, weight.transpose(0, 1).flip(2, 3)) == (weight is not TRAINED)
    with convselect.use("winograd4") as used:
        forced = ops.conv2d(
            MASK, WEIGHTS["ones"], None, (1, 1), (1, 1, 1, 1), (1, 1), 1, *("winograd4",) * 3, str(used)
        )
    assert not is_exact(forced, MASK, WEIGHTS["ones"])


@pytest.mark.compile
def test_a_compiled_layer_whose_weight_changes():
    layer = layer_of(TRAINED)
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        assert not is_exact(compiled(MASK), MASK, layer.weight)
        layer.weight.data.fill_(1)
        assert is_exact(compiled(MASK), MASK, layer.weight)
