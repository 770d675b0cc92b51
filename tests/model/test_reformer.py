from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from convselect.model.artifact import Card
from convselect.model.features import FEATURE_NAMES
from convselect.model.inference import Predictor
from convselect.model.reformer import PAPER_PARAMETERS, GammaBlock, Reformer, fold, paper


class Counting(TorchDispatchMode):
    """Counts the operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def longest_path(node, kind: str) -> int:
    """Most nodes of a kind on one path through the autograd graph."""
    below = [longest_path(following, kind) for following, _ in node.next_functions if following is not None]
    return max(below, default=0) + (node.name() == kind)


def lively(model: nn.Module) -> nn.Module:
    """Random normalisation parameters and statistics, so that folding has something to fold."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.LayerNorm):
            nn.init.uniform_(module.weight, -1.5, 1.5)
            nn.init.normal_(module.bias)
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.1, 3.0)
    return model.eval()


# ---- the block --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
def test_a_block_is_equation_1_with_the_outer_norm_and_relu(norm: str):
    block = lively(GammaBlock(5, 7, 3, norm=norm))
    x = torch.randn(11, 5)
    hidden = x @ block.hidden.weight.T + block.hidden.bias
    t = block.hidden_norm(hidden).clamp_min(0)
    total = x @ block.direct.weight.T + block.direct.bias + t @ block.back.weight.T + block.back.bias
    torch.testing.assert_close(block(x), block.out_norm(total).clamp_min(0))


def test_a_block_has_three_linear_layers_and_no_path_through_more_than_two():
    block = GammaBlock(5, 7, 3)
    assert sum(isinstance(module, nn.Linear) for module in block.modules()) == 3
    x = torch.randn(4, 5, requires_grad=True)
    with Counting() as counting:
        y = block(x)
    products = {name: n for name, n in counting.calls.items() if name in ("mm", "addmm", "bmm", "matmul", "linear")}
    assert products == {"addmm": 3}
    assert longest_path(y.grad_fn, "AddmmBackward0") == 2


def test_dropout_acts_on_the_transformed_path_in_training_only():
    block = GammaBlock(5, 7, 3, norm="none", dropout=1.0)
    x = torch.randn(4, 5)
    without_t = torch.relu(block.direct(x) + block.back.bias)
    torch.testing.assert_close(block.train()(x), without_t)
    assert not torch.allclose(block.eval()(x), without_t)


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="batch, layer, none"):
        GammaBlock(2, 2, 2, norm="group")


# ---- the network ------------------------------------------------------------------------------------------------


def test_the_papers_network_has_exactly_its_parameters():
    assert paper().n_parameters() == paper("layer").n_parameters() == PAPER_PARAMETERS == 80_978
    assert paper("none").n_parameters() == 79_762  # the file that MIOpen ships


def test_the_papers_blocks_have_the_parameters_of_its_file():
    blocks = [sum(p.numel() for p in block.parameters()) for block in paper("none").blocks]
    assert blocks == [13_120, 57_728, 8_320]


def test_ours_stays_within_the_papers_parameters_for_up_to_40_algorithms():
    assert Reformer(len(FEATURE_NAMES), 40).n_parameters() <= PAPER_PARAMETERS
    assert Reformer(len(FEATURE_NAMES), 16).n_parameters() > 0.95 * PAPER_PARAMETERS


def test_three_blocks_take_nine_products_and_the_head_one():
    model = Reformer(6, 4).eval()
    with Counting() as counting, torch.no_grad():
        assert model(torch.randn(2, 6)).shape == (2, 4)
    assert counting.calls["addmm"] == 10


def test_the_input_is_z_scored_by_the_training_set():
    x = torch.randn(200, 3) * torch.tensor([1.0, 5.0, 0.2]) + 4.0
    model = Reformer(3, 2)
    model.fit_input(x)
    seen = []
    model.blocks.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(x)
    torch.testing.assert_close(seen[0].mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen[0].std(0, correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_a_feature_that_never_varied_has_no_say_and_others_are_clipped_to_what_was_seen():
    x = torch.rand(50, 3)
    x[:, 1] = 2.0
    model = lively(Reformer(3, 4))
    model.fit_input(x)
    probe = torch.tensor([[0.5, 2.0, 0.5]])
    other = torch.tensor([[0.5, 64.0, 0.5]])
    torch.testing.assert_close(model(probe), model(other))
    beyond, edge = torch.tensor([[99.0, 2.0, -99.0]]), torch.stack([x[:, 0].max(), x[0, 1], x[:, 2].min()])[None]
    torch.testing.assert_close(model(beyond), model(edge))
    assert not torch.allclose(model(probe), model(edge))


# ---- folding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_folding_changes_nothing(norm: str):
    d = len(FEATURE_NAMES)
    model = lively(Reformer(d, 19, norm=norm, dropout=0.2))
    x = torch.randn(64, d) * 3 + 2
    model.fit_input(x)
    names = ("native", *(f"a{i}" for i in range(18)))
    predictor = Predictor(Card("cpu-test", names, 4.0, 0.0, ("float32",)), fold(model))
    with torch.no_grad():
        want = model(x).numpy()
    got = np.stack([predictor.logits(row) for row in x.numpy()])
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, atol=1e-5 * max(1.0, np.abs(want).max()))


def test_a_folded_block_is_two_products():
    arrays = fold(Reformer(6, 4, ((5, 7), (3, 2))).eval())
    shapes = {name: array.shape for name, array in arrays.items() if array.ndim == 2}
    assert shapes == {"hidden_0": (5, 7), "out_0": (7, 12), "hidden_1": (3, 8), "out_1": (2, 11), "head": (4, 3)}


def test_layer_norm_cannot_be_folded():
    with pytest.raises(ValueError, match="LayerNorm depends on its input"):
        fold(paper("layer"))
