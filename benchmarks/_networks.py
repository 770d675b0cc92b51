"""Whole networks: a converted and a frozen one against eager PyTorch, torch.compile, ONNX Runtime and OpenVINO.

Every side's output is compared with the same network in float64 before anything is timed; a training step's gradients
too. All sides run float32 on the same number of threads and are timed interleaved, by the wall clock, since some
compute on threads of their own. ONNX Runtime and OpenVINO take part if they are installed:

    pip install onnx onnxruntime openvino
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

import convselect
from benchmarks._rivals import Absent, Side, onnx_bytes, onnxruntime_side, openvino_side
from benchmarks.models import MODELS, build
from convselect.base import timing

CONVERTED_TARGETS = {"vgg16": 2.3, "unet": 2.2, "resnet18": 1.5, "resnet50": 1.2}
"""Converted over eager, both in NCHW, inference at batch 1."""
FROZEN_TARGETS = {
    "vgg16": 2.0, "unet": 1.8, "resnet18": 1.3, "resnet50": 1.15, "mobilenet_v2": 1.0, "convnext_tiny": 1.0,
}  # fmt: skip
"""Frozen over the best rival, inference at batch 1."""
TRAINING_TARGETS = {"vgg16": 2.0, "unet": 2.0, "resnet18": 1.6}
"""Converted over eager, a whole training step at batch 8."""
TRAINING_BATCH = 8
RIVALS = ("eager", "eager channels_last", "torch.compile", "onnxruntime", "openvino")
OUTPUT_BOUND = 1e-4
OUTPUT_FACTOR = 20.0
"""Allowed error relative to eager PyTorch's, for ill-conditioned networks, which multiply all rounding errors. It is
the ratio of the default precision budget, 1e-5, to native's 5e-7 per convolution."""
GRADIENT_BOUND = 2e-2  # one ReLU in a million that rounding switches is 1e-3
MAX_ROUNDS = 100


@dataclass
class NetworkResult:
    """One network in one mode. `gain`: median of eager's time over each side's within a round; `best_rival` is the
    fastest side that is not ours, `missing` says why a side did not take part."""

    network: str
    mode: str
    rounds: int
    median_us: dict[str, float]
    gain: dict[str, float]
    error: dict[str, float]
    best_rival: str
    missing: dict[str, str] = field(default_factory=dict)

    def over_rival(self, side: str) -> float:
        return self.gain[side] / self.gain[self.best_rival]


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules on the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(t): t for t in tensors})


def converted(model: nn.Module) -> nn.Module:
    return convselect.convert(sharing_copy(model), policy="auto")


def distance(got: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """Relative L2 distance of two lists of tensors, taken as one vector each."""
    off = norm = 0.0
    for a, b in zip(got, exact, strict=True):
        off += float((a.double() - b.double()).square().sum())
        norm += float(b.double().square().sum())
    return math.sqrt(off / norm)


# ---- sides ----------------------------------------------------------------------------------------------------------


def _frozen(model: nn.Module, x: Tensor) -> Side:
    ours = convselect.freeze(copy.deepcopy(model), x)
    return lambda: ours(x)


def _compiled(model: nn.Module, x: Tensor) -> Side:
    import torch._inductor.config as inductor

    own = copy.deepcopy(model)
    compiled = torch.compile(own, dynamic=False)
    with inductor.patch(freezing=True):
        compiled(x)
    return lambda: compiled(x)


def inference_sides(
    model: nn.Module, x: Tensor, threads: int, *, compile: bool
) -> tuple[dict[str, Side], dict[str, str]]:
    """(name -> one forward pass, name -> why it is missing). `eager` is the first side."""
    ours = converted(model)
    last, last_x = (
        copy.deepcopy(model).to(memory_format=torch.channels_last),
        x.contiguous(memory_format=torch.channels_last),
    )
    ours_last = converted(last)
    onnx = functools.cache(lambda: onnx_bytes(sharing_copy(model), x))
    makers: dict[str, Callable[[], Side]] = {
        "eager": lambda: lambda: model(x),
        "eager channels_last": lambda: lambda: last(last_x),
        "converted": lambda: lambda: ours(x),
        "converted channels_last": lambda: lambda: ours_last(last_x),
        "frozen": lambda: _frozen(model, x),
        "frozen channels_last": lambda: _frozen(last, last_x),
        "onnxruntime": lambda: onnxruntime_side(onnx(), x, threads),
        "openvino": lambda: openvino_side(onnx(), x, threads),
    }
    if compile:
        makers["torch.compile"] = lambda: _compiled(model, x)
    sides: dict[str, Side] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        try:
            sides[name] = make()
        except Absent as reason:
            missing[name] = str(reason)
    return sides, missing


# ---- measuring ------------------------------------------------------------------------------------------------------


def _timed(
    network: str,
    mode: str,
    sides: Mapping[str, Callable[[], object]],
    error: dict[str, float],
    missing: dict[str, str],
    seconds: float,
) -> NetworkResult:
    times = timing.interleaved(sides, MAX_ROUNDS, deadline_s=seconds)
    gain = {name: timing.ratio(times["eager"], t).median for name, t in times.items()}
    rival = max((name for name in gain if name in RIVALS), key=gain.__getitem__)
    medians = {name: t.median_us for name, t in times.items()}
    return NetworkResult(network, mode, len(times["eager"].samples_us), medians, gain, error, rival, missing)


def _split_wrong(
    sides: dict[str, Any], error: dict[str, float], bound: float, missing: dict[str, str]
) -> dict[str, Any]:
    """The sides whose error is within the bound; the others are named as missing, and never timed."""
    right = {}
    for name, side in sides.items():
        if error[name] <= bound:  # NaN is not
            right[name] = side
        else:
            missing[name] = f"wrong: its relative error is {error[name]:.1e}"
    return right


def inference(network: str, *, threads: int, seconds: float, compile: bool) -> NetworkResult:
    """One network at the batch size of its registry, which is 1."""
    model, x = build(network)
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(x.double())
        sides, missing = inference_sides(model, x, threads, compile=compile)
        error = {name: distance([side()], [exact]) for name, side in sides.items()}
        bound = max(OUTPUT_BOUND, OUTPUT_FACTOR * error["eager"])
        sides = _split_wrong(sides, error, bound, missing)
        return _timed(network, "inference N=1", sides, error, missing, seconds)


def _loss(output: Tensor) -> Tensor:
    """Cross entropy with fixed labels, per image or per pixel: class 0 for all of them."""
    labels = torch.zeros((output.shape[0], *output.shape[2:]), dtype=torch.long)
    return F.cross_entropy(output, labels)


class Training:
    """A network in training and its steps: forward, backward, and SGD with momentum at a rate too small to change
    results visibly."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model.train(), x
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()  # random masks would differ between the sides
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-8, momentum=0.9)

    def step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = _loss(self.model(self.x))
        loss.backward()
        self.optimizer.step()
        return loss

    def gradients(self) -> list[Tensor]:
        self.step()
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def training(network: str, *, seconds: float) -> NetworkResult:
    """A training step at `TRAINING_BATCH`."""
    model, x = build(network)
    x = torch.randn((TRAINING_BATCH, *x.shape[1:]), generator=torch.Generator().manual_seed(1))
    exact = [g.clone() for g in Training(copy.deepcopy(model).double(), x.double()).gradients()]
    last_x = x.contiguous(memory_format=torch.channels_last)
    models = {"eager": (copy.deepcopy(model), x), "converted": (copy.deepcopy(model), x)}
    for name in ("eager channels_last", "converted channels_last"):
        models[name] = (copy.deepcopy(model).to(memory_format=torch.channels_last), last_x)
    for name, (side, _) in models.items():
        if name.startswith("converted"):
            convselect.convert(side, policy="auto")
    sides = {name: Training(*both) for name, both in models.items()}
    error = {name: distance(side.gradients(), exact) for name, side in sides.items()}
    del exact
    missing: dict[str, str] = {}
    right = _split_wrong({name: side.step for name, side in sides.items()}, error, GRADIENT_BOUND, missing)
    return _timed(network, f"training N={TRAINING_BATCH}", right, error, missing, seconds)


# ---- reporting ------------------------------------------------------------------------------------------------------


def _number(result: NetworkResult, side: str, target: float | None = None) -> str:
    if side not in result.gain:
        return "wrong" if side in result.error else "-"
    return _coloured(result.gain[side], target)


def _coloured(value: float, target: float | None) -> str:
    if target is None:
        return f"{value:.2f}"
    return f"[{'green' if value >= target else 'red'}]{value:.2f}[/] ({target:.2f})"


def table(results: Iterable[NetworkResult]) -> Table:
    """One row per network and mode; targets in brackets."""
    made = Table(title="Times faster than eager PyTorch in NCHW (target)", title_justify="left", box=SIMPLE_HEAD)
    made.add_column("network", no_wrap=True)
    made.add_column("mode", no_wrap=True)
    for heading in (
        "eager\nms", "eager\nNHWC", "com-\npile", "onnx-\nrun.", "open-\nvino", "converted\n", "conv.\nNHWC",
        "frozen\n", "frozen\nNHWC", "frozen /\nbest rival", "rounds\n",
    ):  # fmt: skip
        made.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        trains = r.mode.startswith("training")
        ours = [side for side in ("frozen", "frozen channels_last") if side in r.gain]
        over = max((r.over_rival(side) for side in ours), default=None)
        made.add_row(
            r.network,
            r.mode,
            f"{r.median_us['eager'] / 1e3:.1f}",
            *(_number(r, side) for side in ("eager channels_last", "torch.compile", "onnxruntime", "openvino")),
            _number(r, "converted", (TRAINING_TARGETS if trains else CONVERTED_TARGETS).get(r.network)),
            *(_number(r, side) for side in ("converted channels_last", "frozen", "frozen channels_last")),
            "-" if over is None else _coloured(over, FROZEN_TARGETS.get(r.network)),
            str(r.rounds),
        )
    return made


def run_models(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], bool]:
    """(what to write as JSON, whether every result was right)."""
    names = options.models or list(dict.fromkeys([*CONVERTED_TARGETS, *FROZEN_TARGETS]))
    for name in names:
        if name not in MODELS:
            raise SystemExit(f"unknown network {name!r}; known are {', '.join(MODELS)}")
    results = []
    for name in names:
        console.print(f"{name}: inference")
        found = inference(name, threads=options.threads, seconds=options.seconds, compile=options.compile)
        results.append(found)
        if name in TRAINING_TARGETS and not options.no_training:
            console.print(f"{name}: training")
            results.append(training(name, seconds=options.seconds))
    console.print(table(results))
    wrong = False
    for r in results:
        for side, reason in r.missing.items():
            wrong |= side in r.error
            console.print(escape(f"{r.network}, {r.mode}, {side}: {reason}"), soft_wrap=True)
    return {"networks": [asdict(r) for r in results]}, not wrong
