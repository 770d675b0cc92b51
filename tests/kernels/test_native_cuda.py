"""Algorithms for CUDA that call libraries: their arithmetic on CPU tensors, and the operators they name by schema."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from problems import PROBLEMS, operands_of, random_operands, relative_error
from tolerances import NATIVE_16_BIT_FACTOR, tolerance

from convselect.base.problem import CHANNELS_LAST, ConvProblem, Direction, conv_problem, layout_of
from convselect.eager import dispatch
from convselect.graph import run as graph_run
from convselect.kernels import _cuda_flags, native_cuda
from convselect.kernels._native_ops import unsound_in_16_bit
from convselect.kernels.native_cuda import CudnnBenchmark, SplitBatch
from convselect.kernels.pool import BY_NAME
from convselect.kernels.reference import Reference

every_direction = pytest.mark.parametrize("direction", list(Direction), ids=str)
every_layout = pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])


def run(algorithm, problem: ConvProblem, layout: str = "contiguous") -> float | None:
    """The relative error of one problem said to be on CUDA, on CPU tensors; None if it does not apply."""
    x, weight, grad_y = random_operands(problem, layout, layout)
    streamed = grad_y if problem.direction == Direction.BACKWARD_DATA else x
    p = problem._replace(layout=layout_of(streamed), weight_layout=layout_of(weight), device="cuda")
    reason = algorithm.why_not(p)
    if reason is not None:
        assert reason.strip()
    if reason is not None or unsound_in_16_bit(p._replace(device="cpu")):
        return None
    operands = operands_of(p, x, weight, grad_y)
    got = algorithm.run(*operands, p)
    assert got.shape == p.result_shape
    assert got.dtype == p.torch_dtype
    want = Reference().run(*(t.double() for t in operands), p._replace(dtype="float64"))
    error, bound = relative_error(got, want), tolerance(algorithm, p)
    if p.element_bytes == 2 and algorithm.name in ("padded_channels", "split_batch"):
        bound *= NATIVE_16_BIT_FACTOR  # the CPU's native convolution does the arithmetic here
    assert error <= bound, (algorithm.name, p, error)
    assert algorithm.workspace_bytes(p) >= 0
    return error


class Operators:
    """The operators of `torch.ops.aten` that need a GPU, computed on the CPU; arguments are held against the schema."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict]] = []

    def _note(self, name, arguments):
        schema = getattr(torch.ops.aten, name).default._schema
        assert len(arguments) == len(schema.arguments), schema
        for value, argument in zip(arguments, schema.arguments, strict=True):
            kind = str(argument.type)
            if kind == "Tensor":
                assert isinstance(value, torch.Tensor), argument
            elif kind == "bool":
                assert type(value) is bool, argument
            elif "int" in kind.lower():
                assert all(type(n) is int for n in (value if isinstance(value, tuple | list) else [value])), argument
        named = {argument.name: value for argument, value in zip(schema.arguments, arguments, strict=True)}
        self.calls.append((name, named))
        return named

    def cudnn_convolution(self, *arguments):
        a = self._note("cudnn_convolution", arguments)
        return F.conv2d(a["self"], a["weight"], None, a["stride"], a["padding"], a["dilation"], a["groups"])

    def cudnn_convolution_transpose(self, *arguments):
        a = self._note("cudnn_convolution_transpose", arguments)
        # F.conv_transpose2d refuses what is left over by a stride larger than the kernel; the gradient does not.
        g, w, groups = a["self"], a["weight"], a["groups"]
        sizes = [
            (g.shape[2 + i] - 1) * a["stride"][i] - 2 * a["padding"][i]
            + a["dilation"][i] * (w.shape[2 + i] - 1) + 1 + a["output_padding"][i]
            for i in (0, 1)
        ]  # fmt: skip
        assert all(0 <= over < stride for over, stride in zip(a["output_padding"], a["stride"], strict=True))
        x = torch.empty(g.shape[0], w.shape[1] * groups, *sizes, dtype=g.dtype)
        return torch.ops.aten.convolution_backward(
            g, x, w, None, a["stride"], a["padding"], a["dilation"], False, [0, 0], groups, [True, False, False]
        )[0]

    def _conv_depthwise2d(self, *arguments):
        a = self._note("_conv_depthwise2d", arguments)
        assert tuple(a["weight"].shape[2:]) == tuple(a["kernel_size"])
        return F.conv2d(a["self"], a["weight"], None, a["stride"], a["padding"], a["dilation"], a["self"].shape[1])


@pytest.fixture
def operators(monkeypatch):
    made = Operators()
    monkeypatch.setattr(native_cuda, "_aten", made)
    return made


# ---- arithmetic -------------------------------------------------------------------------------------------------


@every_layout
@every_direction
@pytest.mark.parametrize("name", ["cudnn_benchmark", "cudnn_depthwise", "native_depthwise"])
def test_library_calls_agree_with_reference(name, direction, layout, operators, nan_memory):
    ran = [run(BY_NAME[name], p._replace(direction=direction), layout) for p in PROBLEMS.values()]
    if name != "cudnn_depthwise" or direction != Direction.BACKWARD_WEIGHT or layout == "channels_last":
        assert sum(error is not None for error in ran) >= 8


@every_layout
@every_direction
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_padded_channels(dtype, direction, layout, nan_memory):
    algorithm = BY_NAME["padded_channels"]
    ran = [run(algorithm, p._replace(direction=direction, dtype=dtype), layout) for p in PROBLEMS.values()]
    assert sum(error is not None for error in ran) > 20
    assert algorithm.why_not(conv_problem(1, 8, 9, 9, 16, 3, 3, dtype="float16", device="cuda")) is not None
    assert algorithm.why_not(conv_problem(1, 7, 9, 9, 16, 3, 3, device="cuda")) is not None


@every_layout
@every_direction
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_split_batch(dtype, direction, layout, nan_memory):
    algorithm = SplitBatch(limit=700)
    ran = [run(algorithm, p._replace(direction=direction, dtype=dtype, N=5), layout) for p in PROBLEMS.values()]
    assert sum(error is not None for error in ran) > 20


def test_split_batch_parts():
    p = conv_problem(7, 4, 5, 5, 2, 3, 3, device="cuda")
    parts = SplitBatch(limit=301)._parts(p)
    assert [(part.start, part.stop) for part in parts] == [(0, 3), (3, 6), (6, 7)]
    shipped = BY_NAME["split_batch"]
    assert "so large" in shipped.why_not(p)
    huge = conv_problem(64, 128, 513, 513, 128, 3, 3, stride=2, dtype="bfloat16", device="cuda")
    assert shipped.why_not(huge) is None
    assert len(shipped._parts(huge)) == 2
    assert "single image" in shipped.why_not(huge._replace(H=2**13, W=2**13))
    assert "single image" in shipped.why_not(huge._replace(N=1, H=2**13, W=2**13))
    assert shipped.why_not(huge._replace(device="cpu")) is not None
    for name in ("cudnn_benchmark", "native_depthwise", "cudnn_depthwise"):
        assert BY_NAME[name].why_not(huge) is not None


@pytest.mark.slow
@every_direction
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["im2col_gemm", "fft", "fft_tiled", "native_channels_last"])
def test_shared_algorithms_with_the_plans_of_a_gpu(name, dtype, layout, direction, nan_memory):
    ran = [run(BY_NAME[name], p._replace(direction=direction, dtype=dtype), layout) for p in PROBLEMS.values()]
    assert sum(error is not None for error in ran) > 20


def test_columns_of_a_gpu_are_larger_and_within_the_budget():
    from convselect.base.settings import use
    from convselect.kernels import im2col_gemm

    p = conv_problem(128, 64, 56, 56, 64, 3, 3, padding=1, dtype="bfloat16", device="cuda")
    assert im2col_gemm._column_bytes(p) > 50 * im2col_gemm._column_bytes(p._replace(device="cpu"))
    assert len(list(im2col_gemm._chunks(p, None))) < 4
    with use(workspace_bytes=16 * 2**20):
        assert im2col_gemm._column_bytes(p) <= 8 * 2**20


# ---- when, and under which flags --------------------------------------------------------------------------------


def test_the_operators_take_what_they_are_given():
    # By name, as the fake above holds the calls against it: another version that changes them fails here.
    names = {
        "cudnn_convolution": "self weight padding stride dilation groups benchmark deterministic allow_tf32",
        "cudnn_convolution_transpose": "self weight padding output_padding stride dilation groups benchmark "
        "deterministic allow_tf32",
        "_conv_depthwise2d": "self weight kernel_size bias stride padding dilation",
    }
    for name, expected in names.items():
        assert " ".join(a.name for a in getattr(torch.ops.aten, name).default._schema.arguments) == expected


def test_tf32_and_determinism_are_passed_on(operators):
    p = conv_problem(1, 4, 6, 6, 4, 3, 3, device="cuda")
    x, weight, _ = random_operands(p)
    algorithm = BY_NAME["cudnn_benchmark"]
    algorithm.run(x, weight, p)
    algorithm.run(x, weight, p._replace(tf32=True))
    flags = [(a["benchmark"], a["deterministic"], a["allow_tf32"]) for _, a in operators.calls]
    assert flags == [(True, False, False), (True, False, True)]
    assert "deterministic" in algorithm.why_not(p._replace(deterministic=True))
    depthwise = conv_problem(1, 4, 6, 6, 4, 3, 3, groups=4, device="cuda", deterministic=True)
    BY_NAME["cudnn_depthwise"].run(x, torch.randn(4, 1, 3, 3), depthwise)
    assert operators.calls[-1][1]["deterministic"] is True


def test_no_search_while_a_graph_is_captured(operators, monkeypatch):
    p = conv_problem(1, 4, 6, 6, 4, 3, 3, device="cuda")
    x, weight, grad_y = random_operands(p)
    algorithm = CudnnBenchmark()
    seen = []
    monkeypatch.setattr(
        native_cuda, "native_backward_weight", lambda *_: seen.append(torch._C._get_cudnn_benchmark()) or weight
    )
    monkeypatch.setattr(_cuda_flags, "capturing", lambda: True)
    algorithm.run(x, weight, p)
    algorithm.run(x, grad_y, p.with_direction(Direction.BACKWARD_WEIGHT))
    monkeypatch.setattr(_cuda_flags, "capturing", lambda: False)
    algorithm.run(x, weight, p)
    algorithm.run(x, grad_y, p.with_direction(Direction.BACKWARD_WEIGHT))
    monkeypatch.setattr(_cuda_flags, "capturing", lambda: True)
    algorithm.run(x, weight, p)  # found before the capture: only looked up
    algorithm.run(x, grad_y, p.with_direction(Direction.BACKWARD_WEIGHT))
    assert [a["benchmark"] for _, a in operators.calls] == [False, True, True]
    assert seen == [False, True, True]

    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(algorithm._may_search(p, x, weight)))
    thread.start()
    thread.join()
    assert elsewhere == [False]  # PyTorch keeps what it found per thread


def test_flags_are_restored_and_held_by_one_thread_at_a_time():
    before = (torch._C._get_cudnn_benchmark(), torch._C._get_cudnn_enabled())
    with pytest.raises(ZeroDivisionError), _cuda_flags.benchmark(not before[0]):
        _ = 1 / (torch._C._get_cudnn_benchmark() is before[0])
    with _cuda_flags.cudnn_enabled(False):
        assert not torch._C._get_cudnn_enabled()
        inside = []
        other = threading.Thread(target=lambda: _cuda_flags.cudnn_enabled(True).__enter__() or inside.append(1))
        other.daemon = True
        other.start()
        other.join(0.05)
        assert not inside
        with _cuda_flags.cudnn_enabled(True):  # the same thread may nest
            assert torch._C._get_cudnn_enabled()
    other.join(5)
    assert inside
    assert (torch._C._get_cudnn_benchmark(), torch._C._get_cudnn_enabled()) == before


def test_the_switches_that_a_convolution_depends_on():
    """Eager calls and operators make a new plan if one of them changes."""
    assert dispatch._cuda_flags is graph_run._cuda_flags is _cuda_flags
    before = _cuda_flags.state()
    switches = (torch._C._set_cudnn_enabled, torch._C._set_cudnn_benchmark, torch._C._set_cudnn_deterministic)
    try:
        for i, switch in enumerate(switches):
            switch(not before[i])
            changed = [now != was for now, was in zip(_cuda_flags.state(), before, strict=True)]
            assert changed == [j <= i for j in range(4)]
    finally:
        for switch, value in zip(switches, before, strict=False):
            switch(value)
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    kept = [(what, get("cuda", what)) for what in ("conv", "rnn")]
    try:
        for conv, rnn in (("tf32", "ieee"), ("ieee", "tf32")):  # which `cudnn.allow_tf32` does not bear
            put("cuda", "conv", conv)
            put("cuda", "rnn", rnn)
            assert _cuda_flags.state()[3] == conv
            with pytest.raises(RuntimeError):
                _ = torch.backends.cudnn.allow_tf32
    finally:
        for what, value in kept:
            put("cuda", what, value)


def test_native_depthwise_gradients_run_without_cudnn(monkeypatch):
    p = conv_problem(2, 4, 6, 6, 4, 3, 3, groups=4, device="cuda", direction="backward_data", dtype="float16")
    assert BY_NAME["native_depthwise"].same_as_native(p._replace(layout=CHANNELS_LAST)) is None
    assert BY_NAME["native_depthwise"].same_as_native(p._replace(dtype="bfloat16")) is not None
    seen = []
    monkeypatch.setattr(
        native_cuda, "native_backward_data", lambda *_: seen.append(torch._C._get_cudnn_enabled()) or None
    )
    BY_NAME["native_depthwise"].run(torch.ones(2, 4, 4, 4), torch.ones(4, 1, 3, 3), p)
    assert seen == [False]
    assert torch._C._get_cudnn_enabled()


def test_none_of_them_is_for_a_cpu_and_none_for_another_library(monkeypatch):
    p = conv_problem(2, 4, 6, 6, 4, 3, 3, groups=4, dtype="float16")
    for algorithm in native_cuda.ALGORITHMS:
        assert algorithm.devices == {"cuda"}
        assert algorithm.why_not(p) is not None
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "NVIDIA" in BY_NAME["cudnn_benchmark"].why_not(p._replace(device="cuda"))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert "missing" in BY_NAME["cudnn_benchmark"].why_not(p._replace(device="cuda"))


def test_products_in_tf32_where_convolutions_may_not(monkeypatch):
    p = conv_problem(2, 4, 6, 6, 4, 3, 3, device="cuda")
    settings = {("cuda", "matmul"): "none", ("cuda", "conv"): "tf32"}
    fake = SimpleNamespace(_get_fp32_precision_getter=lambda *what: settings[what])
    monkeypatch.setattr(_cuda_flags.torch, "_C", fake)
    for name in ("im2col_gemm", "fft", "fft_tiled"):
        assert BY_NAME[name].ready(p)
    settings["cuda", "matmul"] = "tf32"
    for name in ("im2col_gemm", "fft", "fft_tiled"):
        assert not BY_NAME[name].ready(p)
        assert BY_NAME[name].ready(p._replace(tf32=True))
        assert BY_NAME[name].ready(p._replace(device="cpu"))
