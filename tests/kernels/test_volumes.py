"""Volumes: who takes them, and every algorithm that does, in every direction, against PyTorch and float64."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from _memory import peak_extra_bytes
from problems import LAYOUTS, PROBLEMS, VOLUMES, operands_of, random_operands, relative_error
from tolerances import tolerance

from convselect.base.problem import ConvProblem, Direction, conv_problem, layout_of
from convselect.kernels._contract import Algorithm
from convselect.kernels._native_ops import native_forward_in_bands
from convselect.kernels.pool import ALL, BY_NAME
from convselect.kernels.reference import Reference

TAKE_VOLUMES = [a for a in ALL if 3 in a.dimensions and "cpu" in a.devices]
NEVER = {("upcast", "float32"), ("upcast", "float64")}
every_direction = pytest.mark.parametrize("direction", list(Direction), ids=str)
every_algorithm = pytest.mark.parametrize("algorithm", TAKE_VOLUMES, ids=lambda a: a.name)


@pytest.mark.parametrize("algorithm", ALL, ids=lambda a: a.name)
def test_who_does_not_list_volumes_refuses_them_in_words(algorithm):
    """An image whose numbers it takes, with a depth."""
    taken = [
        p._replace(direction=direction, device=device, dtype=dtype)
        for p in PROBLEMS.values()
        for direction in Direction
        for device in algorithm.devices
        for dtype in ("float32", "bfloat16")
        if algorithm.why_not(p._replace(direction=direction, device=device, dtype=dtype)) is None
    ]
    for problem in taken:
        for volume in (problem._replace(D=5), problem._replace(D=4, T=3, pad_front=1), problem._replace(pad_back=1)):
            reason = algorithm.why_not(volume)
            if 3 not in algorithm.dimensions:
                assert reason is not None
                assert reason.startswith(algorithm.name)
                assert reason.endswith(".")


def test_of_those_that_take_volumes_native_and_the_reference_take_all():
    assert {"native", "reference"} <= {a.name for a in TAKE_VOLUMES}
    for p in VOLUMES.values():
        for direction in Direction:
            assert BY_NAME["native"].why_not(p.with_direction(direction)) is None
            assert BY_NAME["reference"].why_not(p.with_direction(direction)) is None


def test_an_algorithm_of_a_subclass_is_asked_about_its_own_dimensions():
    class Images(type(BY_NAME["native"])):
        dimensions = frozenset({2})

        def why_not(self, problem):
            return super().why_not(problem)

    volume = VOLUMES["3x3x3"]
    assert Images().why_not(volume) is not None
    assert Images().why_not(PROBLEMS["3x3"]) is None
    assert type(BY_NAME["native"])().why_not(volume) is None


# ---- the reference -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VOLUMES)
def test_the_reference_is_pytorchs_convolution_and_its_gradients(name):
    p = VOLUMES[name]._replace(dtype="float64")
    x, weight, grad_y = random_operands(p)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    padded = F.pad(leaves[0], (p.pad_left, p.pad_right, p.pad_top, p.pad_bottom, p.pad_front, p.pad_back))
    y = F.conv3d(padded, leaves[1], None, (p.stride_d, *p.stride), 0, (p.dil_d, *p.dilation), p.groups)
    y.backward(grad_y)
    for direction, want in zip(Direction, (y.detach(), leaves[0].grad, leaves[1].grad), strict=True):
        problem = p.with_direction(direction)
        got = Reference().run(*operands_of(problem, x, weight, grad_y), problem)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_direct_count_of_one_result():
    """By indices, as the formula has them."""
    p = VOLUMES["3x3x3 uneven padding"]._replace(stride_d=2, dtype="float64")
    x, weight, _ = random_operands(p)
    y = Reference().run(x, weight, p)
    n, k, o, i, j = 1, 2, 1, 3, 0
    total = 0.0
    for c in range(p.C):
        for t in range(p.T):
            for r in range(p.R):
                for s in range(p.S):
                    at = (o * p.stride_d - p.pad_front + t, i - p.pad_top + r, j - p.pad_left + s)
                    if all(0 <= a < size for a, size in zip(at, (p.D, p.H, p.W), strict=True)):
                        total += float(x[(n, c, *at)] * weight[k, c, t, r, s])
    assert float(y[n, k, o, i, j]) == pytest.approx(total)


# ---- the pool ----------------------------------------------------------------------------------------------------


def prepared(problem: ConvProblem, layout: str, weight_layout: str):
    """(problem with the layouts as they are, its two operands)."""
    x, weight, grad_y = random_operands(problem, layout, weight_layout)
    streamed = grad_y if problem.direction == Direction.BACKWARD_DATA else x
    problem = problem._replace(layout=layout_of(streamed), weight_layout=layout_of(weight))
    return problem, operands_of(problem, x, weight, grad_y)


@functools.lru_cache(maxsize=1024)
def expected(problem: ConvProblem, layout: str, weight_layout: str) -> torch.Tensor:
    _, operands = prepared(problem, layout, weight_layout)
    return Reference().run(*(t.double() for t in operands), problem._replace(dtype="float64"))


def check(algorithm: Algorithm, problem: ConvProblem, layout: str, weight_layout: str) -> bool:
    """Run one problem and compare; False if the algorithm does not apply."""
    asked = problem
    problem, operands = prepared(problem, layout, weight_layout)
    if algorithm.why_not(problem) is not None:
        return False
    copies = [t.clone() for t in operands]
    got = algorithm.run(*operands, problem)
    assert got.shape == problem.result_shape
    assert got.dtype == problem.torch_dtype
    error, bound = relative_error(got, expected(asked, layout, weight_layout)), tolerance(algorithm, problem)
    assert error <= bound, f"{algorithm.name} {problem}: relative error {error:.2e} over {bound:.1e}"
    assert all(torch.equal(t, c) for t, c in zip(operands, copies, strict=True)), "an operand was modified"
    if problem.direction != Direction.BACKWARD_WEIGHT:
        bias = torch.randn(problem.result_shape[1], dtype=problem.torch_dtype)
        if problem.direction == Direction.FORWARD or problem.symmetric_padding:
            biased = algorithm.run_checked(*operands, problem, None, bias)
            if biased is not None:
                want = expected(asked, layout, weight_layout) + bias.double().view(-1, 1, 1, 1)
                assert relative_error(biased, want) <= 2 * bound, "with a bias"
    return True


@every_direction
@every_algorithm
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_agrees_with_the_reference(algorithm, direction, dtype, nan_memory):
    ran = [
        check(algorithm, problem._replace(direction=direction, dtype=dtype), layout, layout)
        for problem in VOLUMES.values()
        for layout in ("contiguous", "channels_last")
    ]
    if dtype == "float32":
        assert any(ran) == ((algorithm.name, dtype) not in NEVER)


@every_direction
@every_algorithm
def test_any_strides(algorithm, direction, nan_memory):
    dtype = "bfloat16" if algorithm.name == "upcast" else "float32"
    names = ("3x3x3", "3x3x3 stride 2", "1x3x3", "3x1x1", "1x1x1", "2x2x2 stride 2", "depthwise 3x3x3",
             "3x3x3 one channel", "3x3x3 one slice", "3x3x3 groups 2")  # fmt: skip
    ran = [
        check(algorithm, VOLUMES[name]._replace(direction=direction, dtype=dtype), layout, weight_layout)
        for name in names
        for layout in LAYOUTS
        for weight_layout in ("contiguous", layout)
    ]
    assert any(ran)


@every_direction
@every_algorithm
def test_the_workspace_is_a_bound(algorithm, direction):
    for name in ("3x3x3", "3x3x3 uneven padding", "3x3x3 stride 2", "depthwise 3x3x3", "1x1x1", "patch 2x4x4"):
        small = VOLUMES[name]._replace(direction=direction)
        problem, operands = prepared(
            small._replace(H=2 * small.H, W=2 * small.W, D=small.D + 3), "contiguous", "contiguous"
        )
        if algorithm.why_not(problem) is not None:
            continue
        algorithm.run(*operands, problem)
        peak = peak_extra_bytes(lambda o=operands, p=problem: algorithm.run(*o, p))
        assert peak <= algorithm.workspace_bytes(problem) + 65536, f"{algorithm.name} {name}"


def test_images_of_one_slice_are_the_same_problem_to_native():
    p = conv_problem(2, 4, 9, 8, 6, 3, 3, padding=1)
    x, weight, _ = random_operands(p)
    native = BY_NAME["native"]
    assert torch.equal(native.run(x, weight, p), F.conv2d(x, weight, None, 1, 1))


@pytest.mark.parametrize("name", VOLUMES)
def test_native_in_bands_of_slices_is_native(name):
    """What runs for want of memory."""
    p = VOLUMES[name]
    x, weight, _ = random_operands(p)
    bias = torch.randn(p.K)
    want = BY_NAME["native"].run_checked(x, weight, p, None, bias)
    assert relative_error(native_forward_in_bands(x, weight, p, bias), want) < 2e-6
