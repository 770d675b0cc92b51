"""What is expected of algorithms on volumes, and that it is acted on."""

from __future__ import annotations

import math

import pytest
import torch
from problems import relative_error
from torch import nn

import convselect
from convselect.base.problem import Direction, conv_problem
from convselect.base.settings import Settings
from convselect.base.volumes import volume_problem
from convselect.choice.choose import choose
from convselect.kernels import _library
from convselect.kernels.pool import BY_NAME
from convselect.model import loaded, volumes
from convselect.model.features import features
from convselect.model.inference import ARTIFACTS, Predictor

KINDS = {
    "plain": (volume_problem(1, 32, 16, 32, 32, 32, 3, 3, 3, padding=1), {"winograd4", "winograd5", "winograd6"}),
    "slices": (volume_problem(1, 32, 16, 32, 32, 32, 1, 3, 3, padding=(0, 1, 1)), {"winograd4"}),
    "strided": (volume_problem(1, 32, 16, 32, 32, 64, 3, 3, 3, stride=2, padding=1), {"winograd4", "winograd3"}),
    "depthwise": (volume_problem(1, 32, 16, 32, 32, 32, 3, 3, 3, padding=1, groups=32), {"depthwise"}),
    "stem": (volume_problem(1, 1, 32, 64, 64, 32, 3, 3, 3, padding=1), {"direct"}),
    "thin": (volume_problem(1, 4, 16, 32, 32, 4, 3, 3, 3, padding=1), {"direct"}),
    "uneven": (volume_problem(1, 24, 8, 16, 16, 20, 3, 3, 3, padding=1), {"winograd4", "winograd6"}),
    "head": (volume_problem(1, 16, 8, 32, 32, 2, 3, 3, 3, padding=1), {"direct", "winograd6"}),
    "halving": (volume_problem(1, 16, 8, 32, 32, 32, 2, 2, 2, stride=2), {"patches"}),
    "groups": (volume_problem(1, 32, 8, 16, 16, 32, 3, 3, 3, padding=1, groups=2), {"winograd4"}),
}
UNTRAINED = {
    "dilated": (volume_problem(1, 32, 8, 16, 16, 32, 3, 3, 3, padding=2, dilation=2), {"winograd4"}),
    "5x5x5": (volume_problem(1, 16, 8, 16, 16, 16, 5, 5, 5, padding=2), {"winograd4"}),
    "7x7x7": (volume_problem(1, 16, 8, 16, 16, 16, 7, 7, 7, padding=3), {"winograd2"}),
    "small": (volume_problem(1, 16, 8, 8, 8, 16, 3, 3, 3, padding=1), {"winograd4"}),
    "tiny": (volume_problem(1, 64, 4, 4, 4, 64, 3, 3, 3, padding=1), {"winograd2"}),
    "subsampled": (volume_problem(1, 64, 8, 56, 56, 128, 1, 1, 1, stride=2), {"im2col_gemm"}),
    "last": (volume_problem(1, 32, 16, 32, 32, 32, 3, 3, 3, padding=1, layout="channels_last"), {"winograd4"}),
    "16 bits": (volume_problem(1, 32, 16, 32, 32, 32, 3, 3, 3, padding=1, dtype="bfloat16"), {"winograd4"}),
    "groups of 4": (volume_problem(1, 64, 8, 16, 16, 64, 3, 3, 3, padding=1, groups=16), {"direct"}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
needs_library = pytest.mark.skipif(not _library.available(), reason="algorithms of the C library")


def with_rules():
    """As where no model of volumes is shipped."""
    found = Predictor.load(ARTIFACTS / "cpu-x86-avx512-c.npz", host_flags={})
    found._looked_for_volumes = True
    return found


@pytest.fixture(scope="module")
def predictor():
    return with_rules()


@needs_library
@pytest.mark.parametrize("kind", [*KINDS, *UNTRAINED])
@pytest.mark.parametrize("direction", Direction, ids=str)
def test_what_is_expected_takes_the_problem_and_is_chosen(kind, direction, predictor):
    layer, names = (KINDS | UNTRAINED)[kind]
    p = layer._replace(direction=direction)
    expected = volumes.gains(p)
    assert expected is not None
    assert names <= expected.keys() <= BY_NAME.keys()
    assert all(BY_NAME[name].why_not(p) is None for name in names)
    said = predictor.predict(p)
    best = max(expected, key=expected.__getitem__)
    assert said.ranked[0] == (best if expected[best] > 1 else "native")
    assert said.log_gain(best) == pytest.approx(math.log(expected[best]))
    choice = choose(p, BY_NAME, Settings(policy="auto"), predictor=predictor)
    assert choice.algorithm in expected or choice.algorithm == "native"
    assert (choice.algorithm == "native") == all(
        math.log(gain) <= said.margin or _refused(name, p) for name, gain in expected.items()
    )


def _refused(name, p):
    from convselect.choice.budgets import refusal

    return refusal(BY_NAME[name], p, Settings()) is not None


@pytest.mark.parametrize(
    "change", [dict(dtype="float16"), dict(dtype="float64"), dict(layout="strided"), dict(device="cuda"),
               dict(D=1, H=4, W=4), dict(dil_h=2, stride_w=2), dict(dil_d=2, groups=2),
               dict(groups=16, layout="channels_last"), dict(R=5), dict(R=7, S=7), dict(stride_d=3), dict(T=9),
               dict(dtype="bfloat16", layout="channels_last")]
)  # fmt: skip
def test_what_was_not_measured_is_left_to_native(change, predictor):
    p = KINDS["plain"][0]._replace(**change)
    assert volumes.gains(p) is None
    assert predictor.predict(p) is None


def test_the_waste_of_tiles_counts():
    """14 columns are four tiles of 4, with two columns over, but seven of 2."""
    even, odd = (KINDS["plain"][0]._replace(H=size, W=size) for size in (32, 14))
    at_32, at_14 = volumes.gains(even), volumes.gains(odd)
    assert at_14["winograd2"] == at_32["winograd2"]
    assert at_14["winograd4"] == pytest.approx(at_32["winograd4"] * (14 / 16) ** 2)
    assert volumes.gains(UNTRAINED["dilated"][0])["winograd4"] > 4  # 16 columns are two phases of 8


def test_more_threads_and_other_machines_need_more(predictor):
    p = KINDS["plain"][0]
    assert predictor.predict(p._replace(threads=4)).margin > predictor.predict(p).margin == predictor.margin


def test_images_are_predicted_as_they_were_and_volumes_have_no_features(predictor):
    image = conv_problem(1, 32, 32, 32, 32, 3, 3, padding=1)
    assert len(predictor.predict(image).ranked) > 5
    with pytest.raises(ValueError, match="depth"):
        features(KINDS["plain"][0])
    with pytest.raises(ValueError, match="depth"):
        features(image._replace(pad_front=1))


def test_what_is_learnt_of_volumes_does_not_correct_images():
    loaded.override(Predictor.load(ARTIFACTS / "cpu-x86-avx512-c.npz", host_flags={}))
    try:
        image = conv_problem(1, 32, 32, 32, 32, 3, 3, padding=1)
        names = {loaded.identity(p) for p in (image, image._replace(dtype="float64"), KINDS["plain"][0])}
        assert len(names) == 3
    finally:
        loaded.use_local()


@needs_library
@every_kind
@pytest.mark.filterwarnings("ignore::convselect.ConvselectWarning")
def test_a_converted_layer_trains_by_it(kind):
    """End to end."""
    p, _ = KINDS[kind]
    stock = nn.Conv3d(p.C, p.K, (p.T, p.R, p.S), (p.stride_d, *p.stride), (p.pad_front, p.pad_top, p.pad_left),
                      groups=p.groups)  # fmt: skip
    mine = nn.Conv3d(p.C, p.K, (p.T, p.R, p.S), (p.stride_d, *p.stride), (p.pad_front, p.pad_top, p.pad_left),
                     groups=p.groups)  # fmt: skip
    mine.load_state_dict(stock.state_dict())
    convselect.convert(mine, policy="auto")
    loaded.override(with_rules())
    try:
        results = []
        for layer in (stock, mine):
            torch.manual_seed(1)
            x = torch.randn(p.x_shape, requires_grad=True)
            y = layer(x)
            grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
            results.append((y, *grads))
        assert "convselect" not in type(results[0][0].grad_fn).__module__
        assert results[1][0].grad_fn.name() != results[0][0].grad_fn.name()
        for want, got in zip(*results, strict=True):
            assert got.stride() == want.stride()
            assert relative_error(got, want) < 2e-5
        chosen = {choice.algorithm for choice in convselect.summary(nn.Sequential(mine)).predicted}
        assert chosen & KINDS[kind][1]
    finally:
        loaded.use_local()
        convselect.clear()
