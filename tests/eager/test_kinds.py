"""1-D and transposed convolutions against PyTorch's, function by function: what `test_functional.py` and
`test_parity.py` ask of the 2-D one, for every kind."""

from __future__ import annotations

import functools
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from _parity import OTHER, algorithms_of, assert_same, assert_same_run, bound, favouring, run
from kinds import CASES, CONV1D, KINDS, NEW, TRANSPOSED1D, TRANSPOSED2D
from pairs import pairs, pairwise
from test_parity import transforms
from torch.autograd import gradcheck, gradgradcheck

import convselect
from convselect import NotApplicable
from convselect.aten.arguments import one_row, transposed_problem
from convselect.aten.strides import transposed_strides
from convselect.base.problem import Direction
from convselect.eager import resolve
from convselect.eager.plan import plans
from convselect.kernels.pool import BY_NAME

GEMM = "im2col_gemm"
AS_IMAGES = {"an image", "pointwise", "along the depth", "along the depth, same", "one slice", "unbatched slice"}
"""Cases of volumes that are computed as images."""
every_case = pytest.mark.parametrize(("kind", "case"), CASES, ids=lambda value: str(value))
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture(autouse=True)
def _empty_caches():
    """And no predictor, unless a test brings its own."""
    with favouring(None):
        yield


def forced(kind, name):
    return lambda *operands, **arguments: kind.ours(*operands, policy=name, **arguments)


# ---- values, strides, gradients -------------------------------------------------------------------------------------


@every_case
def test_values_gradients_and_strides(kind, case):
    """With a predictor that prefers each of three; of operands that are contiguous, and that are not."""
    combinations = pairs(
        (None, GEMM, OTHER), (torch.float32, torch.float64), ("plain", "x moved", "weight moved"), (True, False),
        ("sum", "square"),
    )  # fmt: skip
    for favourite, dtype, how, with_bias, consumer in combinations:
        (x, weight, bias), arguments = kind.operands(case, dtype)
        channels = x.dim() - kind.dimensions - 1
        if how == "x moved":
            x = x.movedim(channels, -1).contiguous().movedim(-1, channels)
        elif how == "weight moved":
            weight = weight.transpose(0, 1).contiguous().transpose(0, 1)
        operands, mask = (x, weight, bias if with_bias else None), (True, True, with_bias)
        want = run(kind.native, operands, mask, consumer, **arguments)
        with favouring(favourite):
            for _ in range(2):
                got = run(kind.ours, operands, mask, consumer, **arguments)
                assert_same_run(got, want, 4 * bound(dtype, GEMM), f"{favourite} {kind} {case} {dtype} {how}")
            with torch.no_grad():
                y = kind.ours(*operands, **arguments)
            assert_same(y, want.y, 4 * bound(dtype, GEMM), f"{favourite} without gradients")
            assert not y._is_view() or case.startswith("unbatched")


@every_case
def test_every_algorithm_that_applies_computes_it(kind, case):
    operands, arguments = kind.operands(case)
    want = kind.native(*operands, **arguments)
    ran = 0
    for name, algorithm in BY_NAME.items():
        if "cpu" not in algorithm.devices:
            continue
        try:
            assert algorithms_of(lambda name=name: forced(kind, name)(*operands, **arguments)) in ([name], [])
            got = forced(kind, name)(*operands, **arguments)
        except NotApplicable:
            continue
        ran += 1
        assert_same(got, want, bound(torch.float32, name), f"{name} {kind} {case}")
    assert ran >= 3


@every_kind
def test_what_is_native_is_pytorchs_own_call(kind):
    """Bit for bit, and in the graph of autograd."""
    for case in kind.cases:
        (x, weight, bias), arguments = kind.operands(case)
        y = kind.ours(x, weight.requires_grad_(), bias, **arguments)
        want = kind.native(x, weight, bias, **arguments)
        assert torch.equal(y, want)
        assert y.grad_fn.name() == want.grad_fn.name()
        with torch.no_grad():
            assert torch.equal(forced(kind, "native")(x, weight, bias, **arguments), want)


@pytest.mark.parametrize("kind", NEW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_native_in_a_plan_gives_the_bits_of_pytorchs_own_call(kind, dtype):
    """Where one direction is native and another is not, and in a trial. PyTorch copies what is not contiguous in one
    dimension."""
    for case in kind.cases:
        (x, weight, own_bias), arguments = kind.operands(case, dtype)
        moved = x.movedim(-1, 0).contiguous().movedim(0, -1)
        for operand, bias in ((x, own_bias), (x, None), (moved, own_bias)):
            with favouring(OTHER):
                y = kind.ours(operand, weight, bias, **arguments)
                for plan in plans.entries.values():
                    if not plan.native:
                        plan.found = resolve.Choice("native", "model", None, 1.0)
                got = kind.ours(operand, weight, bias, **arguments)
            assert y.shape == got.shape
            want = kind.native(operand, weight, bias, **arguments)
            if case in AS_IMAGES:  # by conv2d, whose sums have another order
                assert_same(got, want, 2 * bound(dtype), case)
            else:
                assert torch.equal(got, want), case


@pytest.mark.slow
def test_strides_of_many_random_transposed_calls():
    """Strides alone are cheap to compare: a thousand calls, with one pixel or one channel a group among them."""
    from test_functional import LAYOUTS, made

    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    compared = 0
    while compared < 1000:
        G, N = rng.choice([1, 1, 2, 3, 4]), rng.randint(1, 3)
        C, K = G * rng.randint(1, 3), G * rng.randint(1, 3)
        P, Q = rng.choice([1, 1, 2, 3, 5, 8]), rng.choice([1, 1, 2, 3, 5, 8])
        R, S = rng.choice([(3, 3), (1, 1), (2, 2), (2, 3), (1, 3), (4, 4), (3, 1)])
        stride, padding, dilation = rng.choice([1, 2, 2, 3]), rng.choice([0, 0, 1, 2]), rng.choice([1, 1, 2])
        more = rng.choice([0, 0, 1]) if stride > 1 else 0
        dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
        if stride > 1 and dtype.itemsize == 2:  # where oneDNN 3.12 may crash
            continue
        x = made((N, K, P, Q), rng.choice(LAYOUTS), dtype, generator)
        weight = made((K, C // G, R, S), rng.choice(LAYOUTS), dtype, generator)
        problem = transposed_problem(x, weight, (stride, padding, more, G, dilation))
        if problem is None:
            continue
        compared += 1
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        y = F.conv_transpose2d(*leaves, None, stride, padding, more, G, dilation)
        grads = torch.autograd.grad((y * y).sum(), leaves)
        assert y.shape == problem.x_shape
        want = y.stride(), *(g.stride() for g in grads)
        assert tuple(transposed_strides(x, weight, problem)) == want, (str(problem), x.stride(), weight.stride())


@every_kind
@pytest.mark.parametrize("favourite", [None, GEMM])
def test_output_may_be_changed_in_place_and_every_mask_gives_its_gradients(kind, favourite):
    operands, arguments = kind.operands("plain")
    with favouring(favourite):
        for bits in range(8):
            mask = (bool(bits & 1), bool(bits & 2), bool(bits & 4))
            want, got = (
                run(lambda *o, f=f: f(*o, **arguments).relu_(), operands, mask) for f in (kind.native, kind.ours)
            )
            assert [g is None for g in got.grads] == [not m for m in mask]
            assert_same_run(got, want, 4 * bound(torch.float32, GEMM), f"{mask}")


@every_kind
@pytest.mark.parametrize("favourite", [None, GEMM])
def test_autocast(kind, favourite):
    operands, arguments = kind.operands("plain")
    with favouring(favourite):
        results = []
        for function in (kind.native, kind.ours):
            leaves = [t.clone().requires_grad_() for t in operands]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = function(*leaves, **arguments)
            results.append((y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)))
    for want, got in zip(*results, strict=True):
        assert_same(got, want, 0.03, "autocast")


@every_kind
def test_what_autograds_own_vmap_does(kind):
    (x, weight, bias), arguments = kind.operands("plain", torch.float64)
    cotangents = torch.randn(3, *kind.native(x, weight, bias, **arguments).shape, dtype=torch.float64)
    results = []
    for function, favourite in ((kind.native, None), (kind.ours, GEMM)):
        with favouring(favourite):
            leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
            y = function(*leaves, **arguments)
            results.append(torch.autograd.grad(y, leaves, cotangents, is_grads_batched=True))
    torch.testing.assert_close(*results)


# ---- derivatives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "case"), [(k, c) for k in NEW for c in ("plain", "groups", "unbatched")], ids=str)
def test_derivatives(kind, case):
    operands, arguments = kind.operands(case, torch.float64)
    small = tuple((t[..., :6] if t is operands[0] else t).clone().requires_grad_() for t in operands)
    with favouring(GEMM):
        call = lambda *o: kind.ours(*o, **arguments)  # noqa: E731
        assert gradcheck(call, small, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
        assert gradgradcheck(call, small, fast_mode=True)


@pairwise({"kind": NEW, "transform": list(transforms()), "case": ["plain", "groups"]})
def test_transforms_of_torch_func(kind, transform, case):
    operands, arguments = kind.operands(case, torch.float64)
    operands = (operands[0][..., :6], *operands[1:])
    results = []
    for function, favourite in ((kind.native, None), (kind.ours, GEMM)):
        with favouring(favourite), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(transforms()[transform](functools.partial(function, **arguments), *operands))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)


# ---- what is left to PyTorch, and its errors -------------------------------------------------------------------------


def wrong_calls(kind):
    """What is wrong, and the arguments, positional: the text of an error says which were."""
    (x, weight, bias), _ = kind.operands("plain")
    yield "channels", (x[:, :3], weight, bias)
    yield "dtypes", (x.double(), weight, bias)
    yield "bias", (x, weight, bias[:2])
    yield "dimensions", (x, weight.unsqueeze(-1), bias)
    yield "flat", (x.flatten(), weight, bias)
    yield "stride 0", (x, weight, bias, 0)
    yield "three strides", (x, weight, bias, (1,) * max(3, kind.dimensions + 1))
    yield "padding", (x, weight, bias, 1, -1)
    rest = (0, 0, 1, 1) if kind.transposed else (0, 1, 1)
    yield "float", (x, weight, bias, 1.5, *rest)
    yield "no tensor", ([1.0], weight, bias, 1, *rest)
    yield "nothing", (x, None, bias, 1, *rest)
    if kind.transposed:
        yield "output padding", (x, weight, bias, 1, 0, 3)
        yield "negative output padding", (x, weight, bias, 1, 0, -1)
        yield "groups", (x, weight, bias, 1, 0, 0, 5)
        yield "too small", (x, weight, bias, 1, 40)
        yield "text", (x, weight, bias, 1, "same")
    else:
        yield "same", (x, weight, bias, 2, "same")
        yield "groups", (x, weight, bias, 1, 0, 1, 5)
        yield "too small", (x[..., :1], weight, bias)
        yield "text", (x, weight, bias, 1, "full")


@every_kind
def test_errors_are_pytorchs_own(kind):
    for what, arguments in wrong_calls(kind):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as stock:
            kind.native(*arguments)
        for policy in ("auto", GEMM):
            with pytest.raises(stock.type) as raised:
                kind.ours(*arguments, policy=policy)
            assert str(raised.value) == str(stock.value), what


@pytest.mark.parametrize("kind", [TRANSPOSED1D, TRANSPOSED2D], ids=str)
def test_an_output_padding_that_no_convolution_has_is_left_to_pytorch(kind):
    """A dilation allows more than the stride does."""
    operands, _ = kind.operands("plain")
    arguments = {"stride": 2, "dilation": 3, "output_padding": 2}
    with favouring(GEMM):
        assert algorithms_of(lambda: kind.ours(*operands, **arguments)) == []
        assert torch.equal(kind.ours(*operands, **arguments), kind.native(*operands, **arguments))
        with_one = {**arguments, "output_padding": 1}
        assert algorithms_of(lambda: kind.ours(*operands, **with_one)) == [GEMM]


@every_kind
def test_subclasses_integers_empty_tensors_and_meta_tensors_are_pytorchs(kind):
    class Mine(torch.Tensor):
        pass

    (x, weight, bias), arguments = kind.operands("plain")
    integers = [(4 * t).long() for t in (x, weight, bias)]
    with favouring(GEMM):
        kind.ours(x, weight, bias, **arguments)  # a plan for the same shapes
        assert type(kind.ours(x.as_subclass(Mine), weight, bias, **arguments)) is Mine
        assert torch.equal(kind.ours(*integers, **arguments), kind.native(*integers, **arguments))
        assert kind.ours(x[:0], weight, bias, **arguments).shape == kind.native(x[:0], weight, bias, **arguments).shape
        assert kind.ours(*(t.to("meta") for t in (x, weight, bias)), **arguments).device.type == "meta"
        for refused in ((x.as_subclass(Mine), weight, bias), integers):
            with pytest.raises(NotApplicable):
                kind.ours(*refused, **arguments, policy=GEMM)


@every_kind
def test_dispatch_modes_and_tracers_see_aten(kind):
    from torch.utils.flop_counter import FlopCounterMode

    operands, arguments = kind.operands("plain")
    counts = []
    with favouring(GEMM):
        kind.ours(*operands, **arguments)
        for function in (kind.native, kind.ours):
            with FlopCounterMode(display=False) as counter:
                function(*operands, **arguments)
            counts.append(counter.get_total_flops())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(lambda x: kind.ours(x, *operands[1:], **arguments), operands[0])
    assert counts[0] == counts[1] > 0
    assert "aten::_convolution" in str(traced.graph) or f"aten::{kind}" in str(traced.graph)


@every_kind
def test_a_transform_leaves_infinities_where_they_belong_and_weights_that_count_run_direct_sums(kind):
    (x, weight, bias), arguments = kind.operands("plain" if kind.dimensions < 3 else "an image")
    x = torch.cat([x, x.flip(-1)] * 24)  # enough work for a transform to be chosen
    with favouring("fft"):
        spoilt = x.clone()
        spoilt[0, 0, ..., 2] = float("inf")
        got, want = kind.ours(spoilt, weight, bias, **arguments), kind.native(spoilt, weight, bias, **arguments)
        assert torch.equal(got.isfinite(), want.isfinite())
        for kernel, taken in ((weight, ["fft"]), (torch.ones_like(weight), [])):
            ran = algorithms_of(lambda w=kernel: kind.ours(x, w, bias, **arguments))
            assert [name for name in ran if name == "fft"] == taken


# ---- choices --------------------------------------------------------------------------------------------------------


def test_the_problem_is_that_of_an_image_of_one_row():
    (x, weight, bias), arguments = CONV1D.operands("stride")
    with favouring(GEMM):
        CONV1D.ours(x, weight, bias, **arguments)
        made = set(resolve.choices.entries)
        convselect.conv2d(x.unsqueeze(2), weight.unsqueeze(2), bias, (1, 3), (0, 2))
        assert set(resolve.choices.entries) == made
        assert len(plans) == 2


def test_a_transposed_convolution_is_a_gradient_of_the_mirrored_one():
    (x, weight, bias), arguments = TRANSPOSED2D.operands("stride")
    with favouring(GEMM):
        y = TRANSPOSED2D.ours(x, weight.requires_grad_(), bias, **arguments)
        (forward,) = {problem for problem, _ in resolve.choices.entries}
        assert forward.direction == Direction.BACKWARD_DATA
        y.sum().backward()
        made = {problem for problem, _ in resolve.choices.entries}
        convselect.clear()
        image = torch.zeros_like(y).requires_grad_()
        again = convselect.conv2d(image, weight, None, arguments["stride"], arguments["padding"])
        again.backward(x)
        assert forward in {problem for problem, _ in resolve.choices.entries}
    assert {p.direction for p in made} == {Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT}


def test_one_plan_for_every_spelling():
    for kind in NEW:
        (x, weight, bias), _ = kind.operands("plain")
        convselect.clear()
        for stride in (1, (1,) * kind.dimensions, [1] * kind.dimensions):
            for padding in (1, (1,) * kind.dimensions, [1] * kind.dimensions):
                kind.ours(x, weight, bias, stride, padding)
        assert len(plans) == 1
        assert len(resolve.choices) == 1


def test_arguments_that_are_none_in_one_dimension():
    (x, weight, _), _ = CONV1D.operands("plain")
    assert one_row(x, weight, ((1, 1), (0,), (1,), 1))[2][0] is None
    assert one_row(x.unsqueeze(2), weight, ((1,), (0,), (1,), 1)) is None


@every_kind
def test_batch_invariance(kind):
    (x, weight, bias), arguments = kind.operands("plain")
    with convselect.use(batch_invariant=True), favouring(GEMM):
        whole = kind.ours(x, weight, bias, **arguments)
        for n in range(2):
            assert torch.equal(whole[n : n + 1], kind.ours(x[n : n + 1], weight, bias, **arguments))
        assert_same(whole, kind.native(x, weight, bias, **arguments), bound(torch.float32, GEMM), "invariant")


@every_kind
def test_trials_and_stored_choices(kind, race):
    """Trials on real calls, with their checks and the store, and what they find serves a later process."""
    operands, arguments = kind.operands("plain")
    want = kind.native(*operands, **arguments)
    ran = set()
    with torch.no_grad():
        for _ in range(120):
            before = len(resolve.choices.entries)
            ran |= set(algorithms_of_trial(lambda: assert_same(kind.ours(*operands, **arguments), want, 1e-5, "trial")))
            assert len(resolve.choices.entries) >= before
    assert {"native", "quick"} <= ran
    convselect.clear()
    with torch.no_grad():
        kind.ours(*operands, **arguments)
    (entry,) = resolve.choices.entries.values()
    choice = entry.found if isinstance(entry.found, resolve.Choice) else entry.found.choice
    assert (choice.algorithm, choice.source) == ("quick", "store")


def algorithms_of_trial(call):
    """The names of the algorithms that ran, trials included."""
    ran = []
    with pytest.MonkeyPatch.context() as patch:
        for name, algorithm in BY_NAME.items():
            original = algorithm.run_checked
            patch.setattr(
                algorithm, "run_checked", lambda *a, name=name, original=original: (ran.append(name), original(*a))[1]
            )
        call()
    return ran
