"""Host time per call, whether a converted layer works in a CUDA graph and under torch.compile, and the device's copy
bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import convselect
from benchmarks._gpu_clock import on_device
from benchmarks._gpu_device import Device
from convselect.base import timing
from convselect.base.problem import CHANNELS_LAST, ConvProblem, conv_problem
from convselect.kernels.triton.launch import TritonAlgorithm

CALLS = 50
ROUNDS = 40
COPY_BYTES = 1 << 28


def copy_bandwidth(device: Device) -> dict[str, float]:
    """Bytes read and written per second by a copy of 256 MB, the median; and by one of half the last-level cache."""
    found = {}
    for name, n_bytes in (("memory", COPY_BYTES if not device.dry else 1 << 12), ("cache", device.cache_bytes // 4)):
        source = torch.empty(n_bytes // 4, dtype=torch.float32, device=device.kind).normal_()
        target = torch.empty_like(source)
        target.copy_(source)
        t = on_device({"copy": lambda _, a=target, b=source: a.copy_(b)}, 15, events=device.events, clock=device.clock)
        found[f"{name}_bytes_per_s"] = 2 * source.numel() * 4 / (t["copy"].median_us * 1e-6)
    return found


def _layer(problem: ConvProblem, device: Device, policy: str | None) -> nn.Conv2d:
    p = problem
    layer = nn.Conv2d(
        p.C, p.K, (p.R, p.S), p.stride, (p.pad_top, p.pad_left), p.dilation, p.groups, bias=False,
        device=device.kind, dtype=p.torch_dtype,
    ).to(memory_format=torch.channels_last)  # fmt: skip
    if policy is not None:
        convselect.convert(layer, policy=policy)
    return layer


CANDIDATES = (
    conv_problem(8, 64, 14, 14, 64, 3, 3, padding=1, groups=64, dtype="float16"),
    conv_problem(8, 64, 14, 14, 64, 3, 3, padding=1, dtype="float16"),
    conv_problem(2, 16, 6, 6, 16, 1, 1, dtype="float16"),
)


def example(pool: Sequence[TritonAlgorithm], device: Device) -> tuple[TritonAlgorithm, ConvProblem] | None:
    """A Triton algorithm and a small layer for it; None if no algorithm applies."""
    for problem in reversed(CANDIDATES) if device.dry else CANDIDATES:
        p = problem._replace(device=device.kind, layout=CHANNELS_LAST, weight_layout=CHANNELS_LAST)
        for algorithm in pool:
            if algorithm.why_not(p) is None:
                return algorithm, p
    return None


def _input(problem: ConvProblem, device: Device) -> Tensor:
    x = torch.empty(problem.x_shape, dtype=problem.torch_dtype, device=device.kind).normal_()
    return x.contiguous(memory_format=torch.channels_last)


def host_cost(pool: Sequence[TritonAlgorithm], device: Device) -> dict[str, Any]:
    """Microseconds of the host per call, without waiting for the device: nn.Conv2d, a converted layer that is native,
    and one whose plan runs a Triton kernel; with and without a gradient to record."""
    found = example(pool, device)
    policies: dict[str, str | None] = {"nn.Conv2d": None, "converted, native": "native"}
    problem = CANDIDATES[0]._replace(device=device.kind)
    if found is not None:
        policies[f"converted, {found[0].name}"] = found[0].name
        problem = found[1]
    x = _input(problem, device)
    leaf = x.clone().requires_grad_()
    calls = 2 if device.dry else CALLS
    functions: dict[str, Callable[[], object]] = {}
    for name, policy in policies.items():
        layer = _layer(problem, device, policy)
        functions[name] = _repeated(_without_gradient(layer, x), calls)
        functions[f"{name}, recording"] = _repeated(lambda layer=layer: layer(leaf), calls)
    times = timing.interleaved(
        functions, 2 if device.dry else ROUNDS, clock=device.clock, on_round=lambda _: device.synchronise()
    )
    return {
        "problem": str(problem),
        "us_per_call": {
            name: {"median": t.median_us / calls, "p20": t.p20_us / calls, "p80": t.p80_us / calls}
            for name, t in times.items()
        },
    }


def _repeated(call: Callable[[], object], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            call()

    return run


def _without_gradient(layer: nn.Module, x: Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return layer(x)

    return call


def graph_and_compile(pool: Sequence[TritonAlgorithm], device: Device) -> dict[str, str]:
    """What happened to a converted layer in a CUDA graph and under torch.compile: "ok", or what went wrong."""
    found = example(pool, device)
    results = {}
    ours = (found[0].name,) if found is not None else ()
    for policy in (ours or ("native",)) if device.dry else ("native", *ours, "cudnn_benchmark", "auto"):
        problem = found[1] if found is not None else CANDIDATES[0]._replace(device=device.kind)
        layer, x = _layer(problem, device, policy), _input(problem, device)
        for what, function in (("graph", _graph), ("compile", _compile)):
            try:
                results[f"{what}, {policy}"] = function(layer, x, device)
            except Exception as raised:  # the other ways are still to be tried
                results[f"{what}, {policy}"] = f"{type(raised).__name__}: {raised}"[:300]
                device.assert_alive()
    return results


def _graph(layer: nn.Module, x: Tensor, device: Device) -> str:
    """Captured once, replayed on other values, and compared bit by bit with the same call outside the graph."""
    if device.dry:
        return "not tried: no CUDA device"
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                layer(x)
        torch.cuda.current_stream().wait_stream(side)
        device.synchronise()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.normal_()
        graph.replay()
        same = torch.equal(y, layer(x))
    return "ok" if same else "the replay's result differs"


def _compile(layer: nn.Module, x: Tensor, device: Device) -> str:
    compiled = torch.compile(layer, backend="eager" if device.dry else "inductor")
    with torch.no_grad():
        got, want = compiled(x), layer(x)
    if got.stride() != want.stride():
        return f"strides {got.stride()} instead of {want.stride()}"
    close = torch.allclose(got.float(), want.float(), rtol=2e-2, atol=2e-2)
    return "ok" if close else "the compiled result differs"
