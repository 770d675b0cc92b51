"""Where problems come from: lists, perturbed and random layers, the calls of a model; and how they are drawn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import convselect
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, Direction, conv_problem
from convselect.base.volumes import image_of, volume_problem
from convselect.measure.rows import KERNEL_CLASSES, kernel_class
from convselect.model import sampling

LISTED = Path(__file__).parents[2] / "benchmarks" / "problems_3d.csv"
LAYERS = [
    ("anet", conv_problem(1, 64, 28, 28, 64, 1, 1)),
    ("anet", conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1)),
    ("bnet", conv_problem(1, 64, 28, 28, 64, 3, 3, stride=2, padding=1)),
    ("bnet", conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1, groups=64)),
    ("cnet", conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1, groups=4)),
    ("cnet", conv_problem(1, 64, 28, 28, 64, 7, 7, padding=3, groups=64)),
    ("dnet", conv_problem(1, 64, 28, 28, 64, 5, 5, padding=2)),
    ("huge", conv_problem(1, 512, 224, 224, 512, 3, 3, padding=1)),
]


# ---- drawing ----------------------------------------------------------------------------------------------------


def test_draws_are_repeatable_distinct_and_cover_all_classes():
    drawn = list(sampling.draw(LAYERS, 150, seed=3))
    assert drawn == list(sampling.draw(LAYERS, 150, seed=3))
    assert drawn != list(sampling.draw(LAYERS, 150, seed=4))
    problems = [problem for _, problem in drawn]
    assert len(set(problems)) == 150
    assert {kernel_class(p) for p in problems} == set(KERNEL_CLASSES)
    assert {p.direction for p in problems} == set(Direction)
    assert {p.N for p in problems} == {1, 2, 8, 32}
    assert {p.dtype for p in problems} == {"float32", "bfloat16", "float16"}
    assert Counter(p.dtype for p in problems)["float32"] > 75
    layouts = Counter(p.layout for p in problems)
    assert layouts[CONTIGUOUS] > layouts[CHANNELS_LAST] > 0
    assert all(p.threads == 1 for p in problems)


def test_draws_stay_below_the_caps():
    emulated, native = {}, {"avx512_bf16": True}
    for flags in (emulated, native):
        for model, problem in sampling.draw(LAYERS, 150, flags=flags):
            assert model != "huge"
            assert problem.flops <= sampling.flops_cap(problem, flags)
    half = LAYERS[1][1]._replace(dtype="bfloat16")
    assert sampling.flops_cap(half, native) == sampling.FLOPS_CAP == 8 * sampling.flops_cap(half, emulated)
    assert sampling.flops_cap(LAYERS[3][1], native) < sampling.FLOPS_CAP / 2


def test_draws_end_when_there_are_no_more():
    only = [("m", conv_problem(1, 1, 5, 5, 1, 3, 3))]
    drawn = list(sampling.draw(only, 50, dtypes=["float32"]))
    assert len(drawn) == 12  # 3 directions x 4 batches; one channel has one layout
    assert list(sampling.draw([], 5)) == []
    assert list(sampling.draw([LAYERS[-1]], 5)) == []


def test_layers_are_read_from_either_kind_of_file(tmp_path: Path):
    head = "N,C,H,W,K,R,S,stride_h,stride_w,pad_h,pad_w,dil_h,dil_w,groups\n"
    (tmp_path / "a.csv").write_text("model,calls," + head + "resnet18,2,1,6,9,8,4,3,2,2,1,1,0,1,2,2\n")
    lines = "lib:a,1,6,9,8,4,3,2,2,1,1,0,1,2,2\nlib:b,1,1,2,2,1,9,9,1,1,0,0,1,1,1\n"
    (tmp_path / "b.csv").write_text("source," + head + lines)
    want = conv_problem(1, 6, 9, 8, 4, 3, 2, stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)
    assert sampling.read_layers(tmp_path / "a.csv") == [("resnet18", want)]
    assert sampling.read_layers(tmp_path / "b.csv") == [("lib:a", want)]  # the other has no output


def test_layers_of_volumes_are_read(tmp_path: Path):
    """What is computed as an image is left out: a kernel along the depth, and a single slice."""
    head = "model,N,C,D,H,W,K,T,R,S,stride_d,stride_h,stride_w,pad_d,pad_h,pad_w,dil_d,dil_h,dil_w,groups\n"
    whole = "m,1,6,5,9,8,4,3,3,2,1,2,1,1,1,0,2,1,2,2\n"
    images = "m,1,6,5,9,8,4,3,1,1,2,1,1,1,0,0,1,1,1,1\nm,1,6,1,9,8,4,1,3,3,1,1,1,0,1,1,1,1,1,1\n"
    (tmp_path / "a.csv").write_text(head + whole + images)
    want = volume_problem(1, 6, 5, 9, 8, 4, 3, 3, 2, stride=(1, 2, 1), padding=(1, 1, 0), dilation=(2, 1, 2), groups=2)
    assert sampling.read_layers(tmp_path / "a.csv") == [("m", want)]


def test_draws_of_volumes():
    """Volumes stay volumes, in other depths too, with small batches."""
    layers = sampling.read_layers(LISTED)
    assert len(layers) > 400
    drawn = sampling.from_lists([LISTED], 300, random=0.2, perturb=0.7, dtypes=["float32"])
    problems = [problem for _, problem in drawn]
    assert all(p.is_volume and image_of(p) is None and p.O >= 1 for p in problems)
    assert len(set(problems)) == len(problems) > 290
    assert {p.N for p in problems if p.flops < 1e7} >= {1, 2, 4}
    assert {p.direction for p in problems} == set(Direction)
    assert {p.layout for p in problems} == {CONTIGUOUS, CHANNELS_LAST}
    listed = {p.D / p.H for _, p in layers}
    assert sum(p.D / p.H not in listed for p in problems) > 100
    assert any(name.startswith("loguniform") for name, _ in drawn)
    assert all(p.flops <= sampling.flops_cap(p, {}) for p in problems)
    even = volume_problem(1, 32, 8, 16, 16, 32, 3, 3, 3)
    assert sampling.flops_cap(even._replace(C=20), {}) < sampling.flops_cap(even, {}) / 2


def test_a_line_that_is_no_layer_is_named(tmp_path: Path):
    path = tmp_path / "layers.csv"
    path.write_text(
        "model,N,C,H,W,K,R,S,stride_h,stride_w,pad_h,pad_w,dil_h,dil_w,groups\nm,1,2,3,3,x,1,1,1,1,0,0,1,1,1\n"
    )
    with pytest.raises(ValueError, match=r"layers.csv, line 2: .*'x'"):
        sampling.read_layers(path)
    path.write_text("model,N,C\nm,1,2\n")
    with pytest.raises(ValueError, match="line 2: KeyError: 'H'"):
        sampling.read_layers(path)


@given(
    st.sampled_from([layer for _, layer in LAYERS] + [conv_problem(1, 3, 224, 224, 64, 7, 7, stride=2, padding=3)]),
    st.integers(0, 10**6),
)
def test_relatives_of_a_layer_are_layers(layer, seed):
    p = sampling.perturbed(layer, np.random.default_rng(seed))
    assert p.C % p.groups == 0 == p.K % p.groups
    assert p.P >= 1 and p.Q >= 1  # noqa: PT018
    assert kernel_class(p) == kernel_class(layer) or p.groups == 1 < layer.groups
    assert p.C // p.groups == layer.C // layer.groups or layer.groups == 1
    assert layer.C > 4 or p.C == layer.C
    assert 0.45 <= p.H / layer.H <= 2.1
    assert p.C % 8 == 0 or layer.C % 8 != 0 or layer.groups > 1
    assert p == sampling.perturbed(layer, np.random.default_rng(seed))


def test_a_share_of_the_draws_is_perturbed():
    originals = {p._replace(N=1) for _, p in LAYERS}

    def strangers(share):
        drawn = sampling.draw(LAYERS, 100, perturb=share, dtypes=["float32"])
        plain = [conv_problem(1, *p[2:8], stride=p.stride, padding=p.padding, groups=p.groups) for _, p in drawn]
        return sum(p not in originals for p in plain)

    assert strangers(0.0) == 0
    assert 30 < strangers(0.5) < 70
    assert strangers(1.0) > 95


def test_streams_are_mixed_and_none_is_lost():
    many, few = [("m", i) for i in range(200)], [("f", i) for i in range(50)]
    mixed = list(sampling.mixed(iter(many), iter(few), 0.3, seed=1))
    assert [item for item in mixed if item[0] == "m"] == many
    assert [item for item in mixed if item[0] == "f"] == few
    assert 15 < sum(name == "f" for name, _ in mixed[:100]) < 45


# ---- a model's calls --------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Convolutions as layers, as functions, shared, transposed, strided, and one whose input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.shared = nn.Conv2d(8, 8, 3, padding="same", groups=4)
        self.kernel = nn.Parameter(torch.randn(4, 8, 1, 1))
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)

    def forward(self, x):
        x = self.norm(self.stem(x))
        x = self.shared(self.shared(x))
        return {"y": [self.up(F.conv2d(x, self.kernel))]}


@pytest.mark.parametrize("converted", [False, True])
def test_what_a_model_computes_is_recorded(converted):
    model, x = Mixed().eval(), torch.randn(2, 3, 16, 12)
    if converted:
        convselect.convert(model)
    stem = conv_problem(2, 3, 16, 12, 8, 3, 3, stride=2, padding=1, threads=torch.get_num_threads())
    shared = conv_problem(2, 8, 8, 6, 8, 3, 3, padding=1, groups=4, threads=torch.get_num_threads())
    last = conv_problem(2, 8, 8, 6, 4, 1, 1, threads=torch.get_num_threads())
    before = {name: value.clone() for name, value in model.state_dict().items()}

    assert sampling.recorded(model, x, training=False) == [stem, shared, shared, last]
    found = sampling.recorded(model, x)
    assert found[:4] == [stem, shared, shared, last]
    of = Counter((p.direction, p.K, p.R) for p in found[4:])
    both = (Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT)
    assert of == {
        (Direction.BACKWARD_WEIGHT, 8, 3): 3,  # the picture needs no gradient
        (Direction.BACKWARD_DATA, 8, 3): 2,
        **{(direction, 4, 1): 1 for direction in both},
    }
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_layouts_and_types_are_recorded_as_they_are():
    model = nn.Conv2d(8, 8, 3, bias=False).to(torch.bfloat16).to(memory_format=torch.channels_last)
    x = torch.randn(1, 8, 9, 9, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last).requires_grad_()
    found = sampling.recorded(model, x)
    assert {p.direction for p in found} == set(Direction)
    assert {(p.layout, p.weight_layout, p.dtype) for p in found} == {(CHANNELS_LAST, CHANNELS_LAST, "bfloat16")}
