"""Volumes, beyond what `test_kinds.py` asks of every kind: strides, and calls that are images."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from _parity import algorithms_of, favouring

import convselect
from convselect.aten.volumes import transposed_volume, transposed_volume_strides, volume_of, volume_strides
from convselect.base.problem import conv_problem
from convselect.base.volumes import image_of, volume_again, volume_problem
from convselect.eager import resolve
from convselect.eager.plan import plans
from convselect.kernels._contract import NotApplicable
from convselect.tune import tuning

HOW = ("plain", "channels_last", "slice", "transposed", "expanded", "moved")


def made(shape, how, dtype, generator):
    t = torch.randn(shape, generator=generator).to(dtype)
    if how == "channels_last":
        return t.contiguous(memory_format=torch.channels_last_3d)
    if how == "slice":
        wide = torch.randn(shape[0], 2 * shape[1] + 1, *shape[2:], generator=generator).to(dtype)
        return wide.contiguous(memory_format=torch.channels_last_3d)[:, 1 : shape[1] + 1]
    if how == "transposed":
        return t.transpose(2, 4).contiguous().transpose(2, 4)
    if how == "moved":
        return t.movedim(1, 0).contiguous().movedim(0, 1)
    return t[:1, :1].expand(shape) if how == "expanded" else t


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("transposed", [False, True])
def test_strides_of_many_random_calls(transposed):
    """One voxel, one channel a group, and steps that change nothing among them: aten goes by all of it."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    compared = 0
    while compared < 700:
        G, N = rng.choice([1, 1, 2, 3, 4]), rng.randint(1, 3)
        C, K = G * rng.randint(1, 3), G * rng.randint(1, 3)
        size = tuple(rng.choice([1, 1, 2, 3, 5]) for _ in range(3))
        kernel = rng.choice([(3, 3, 3), (1, 1, 1), (2, 2, 2), (1, 3, 3), (3, 1, 1), (2, 1, 3)])
        stride, padding = (tuple(rng.choice(of) for _ in range(3)) for of in ((1, 1, 2), (0, 1, 2)))
        dilation = rng.choice([(1, 1, 1), (1, 1, 1), (2, 1, 1), (2, 2, 2)])
        dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        if dtype == torch.bfloat16 and max(stride) > 1:  # where oneDNN 3.12 may crash
            continue
        if not transposed and rng.random() < 0.15:
            stride, padding = (1, 1, 1), "same"
        weight = made((K, C // G, *kernel), rng.choice(HOW), dtype, generator)
        x = made((N, K if transposed else C, *size), rng.choice(HOW), dtype, generator)
        if transposed:
            more = tuple(rng.choice([0, 1]) if step > 1 else 0 for step in stride)
            arguments = (stride, padding, more, G, dilation)
            of, strides, call = transposed_volume, transposed_volume_strides, F.conv_transpose3d
        else:
            arguments = (stride, padding, dilation, G)
            of, strides, call = volume_of, volume_strides, F.conv3d
        problem = of(x, weight, arguments)
        if problem is None or min(problem.O, problem.P, problem.Q) < 1:
            continue
        compared += 1
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        y = call(*leaves, None, *arguments)
        want = y.stride(), *(g.stride() for g in torch.autograd.grad((y * y).sum(), leaves))
        assert tuple(strides(x, weight, problem)) == want, (str(problem), x.stride(), weight.stride())


# ---- images ---------------------------------------------------------------------------------------------------------


def test_the_image_of_a_kernel_along_the_depth_and_back():
    volume = volume_problem(
        2, 4, 9, 5, 7, 6, 3, 1, 1, padding=(2, 0, 0), stride=(2, 1, 1), dilation=(2, 1, 1), groups=2
    )
    image = image_of(volume)
    assert image == conv_problem(2, 4, 9, 35, 6, 3, 1, padding=(2, 0), stride=(2, 1), dilation=(2, 1), groups=2)
    assert volume_again(image, (5, 7)) == volume
    assert (volume.O, volume.flops, volume.bytes) == (image.P, image.flops, image.bytes)
    flat = conv_problem(2, 4, 5, 7, 6, 3, 3)
    assert image_of(flat) == flat == volume_again(flat, None)


@pytest.mark.parametrize(
    "change",
    [
        dict(R=3),
        dict(S=2),
        dict(stride_h=2),
        dict(pad_left=1),
        dict(dil_w=2),
        dict(D=1, T=1),
        dict(T=1, pad_front=0, pad_back=0, stride_d=9),
    ],
)
def test_others_are_no_images(change):
    volume = volume_problem(2, 4, 9, 5, 7, 6, 3, 1, 1, padding=(1, 0, 0))
    assert image_of(volume) is not None
    assert image_of(volume._replace(**change)) is None


def test_a_call_and_that_of_its_image_share_a_choice():
    x, weight = torch.randn(2, 4, 9, 5, 7), torch.randn(6, 4, 3, 1, 1)
    with favouring("im2col_gemm"):
        y = convselect.conv3d(x, weight, padding=(1, 0, 0))
        found = set(resolve.choices.entries)
        again = convselect.conv2d(x.flatten(3), weight.flatten(3), padding=(1, 0))
        assert set(resolve.choices.entries) == found
        assert torch.equal(y.flatten(3), again)


def test_along_the_depth_pytorchs_conv2d_runs_if_nothing_else_does():
    """And conv3d without a model, with a stride, or if native is asked for."""
    x, weight = torch.randn(2, 4, 9, 5, 7), torch.randn(6, 4, 3, 1, 1)
    with favouring("native"), torch.no_grad():
        for _ in range(3):
            assert algorithms_of(lambda: convselect.conv3d(x, weight, padding=(1, 0, 0), policy="auto")) == ["native"]
        assert [plan.native for plan in plans.entries.values()] == [0]
        assert algorithms_of(lambda: convselect.conv3d(x, weight, stride=(2, 1, 1), policy="auto")) == []
        assert algorithms_of(lambda: convselect.conv3d(x, weight, policy="native")) == []
    with favouring(None), torch.no_grad():
        assert algorithms_of(lambda: convselect.conv3d(x, weight, padding=(1, 0, 0))) == []


def test_volumes_are_not_searched():
    volume, image = volume_problem(1, 4, 5, 6, 7, 8, 3, 3, 3), conv_problem(1, 4, 6, 7, 8, 3, 3)
    settings = convselect.Settings()
    assert [programs.problem for programs, _, _ in tuning.problems_of([(volume, {}), (image, {})], settings)] == [image]


def test_a_named_algorithm_is_refused_on_other_devices():
    """Volumes are aten's there; images are refused in the same way."""
    x, weight = torch.empty(1, 4, 5, 6, 7, device="meta"), torch.empty(4, 4, 3, 3, 3, device="meta")
    for call in (convselect.conv3d, convselect.conv_transpose3d):
        for given in (x, x[0]):
            with pytest.raises(NotApplicable, match="CPU"):
                call(given, weight, policy="winograd4")
            for policy in ("auto", "native"):
                assert call(given, weight, policy=policy).device.type == "meta"
