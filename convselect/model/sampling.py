"""The problems to measure: lists of layers, a model's own calls, and variations on both.

Selection has to be right for networks, so most problems are their layers, unchanged or perturbed (another resolution,
another width). Layers of log-uniform sizes fill the gaps, and add tiny problems, whose time is mostly the overhead of a
call.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from convselect.aten.arguments import problem_of
from convselect.base.problem import (
    CHANNELS_LAST,
    CONTIGUOUS,
    TORCH_DTYPES,
    ConvProblem,
    Direction,
    conv_problem,
    layout_of,
)
from convselect.base.volumes import image_of
from convselect.machine.host import SIXTEEN_BIT_FLAGS, host_flags
from convselect.measure.rows import KERNEL_CLASSES, kernel_class, read_text

Layer = tuple[str, ConvProblem]
"""(the model it comes from, its forward problem)."""

FLOPS_CAP = 2e9  # about 25 ms per call on one thread; larger problems take more time than they are worth
# Native runs these at a fraction of the dense rate; the cap is on time.
_CAP_DIVISOR = {"depthwise": 12, "grouped": 4, "large": 2}
_EMULATED_DIVISOR = 8  # 16-bit types that the processor does not compute in
BYTES_CAP = 2**28
RANDOM_SIZE = 64  # of images and channels of random layers, at most
RANDOM_DEPTH = 24
_UNEVEN_DIVISOR = 6  # volumes with a part of 16 channels, for which oneDNN has no kernels of its own

_CLASS_WEIGHTS = dict(zip(KERNEL_CLASSES, (0.22, 0.20, 0.16, 0.16, 0.08, 0.12, 0.06), strict=True))
BATCHES = (1, 2, 8, 32)
BATCHES_OF_VOLUMES = (1, 1, 1, 2, 4)
DTYPES = ("float32", "bfloat16", "float16")


# ---- lists ------------------------------------------------------------------------------------------------------


def read_layers(path: str | Path) -> list[Layer]:
    """(model, forward problem) of each line of a CSV file of layers.

    Columns: `model` (or `source`), N C H W K R S, stride_h/w, pad_h/w, dil_h/w, groups; of volumes also D T, stride_d,
    pad_d, dil_d; others are ignored. Volumes that are computed as images (`image_of`) are left out.

    Raises:
        ValueError: if a column is missing or a cell is not a number, with the file and the line; if there is no layer.
    """
    layers = []
    reader = csv.DictReader(io.StringIO(read_text(path)))
    for line in reader:
        try:
            sizes = [int(line[name]) for name in ("N", "C", "H", "W", "K", "R", "S")]
            stride, padding, dilation = ((int(line[f"{a}_h"]), int(line[f"{a}_w"])) for a in ("stride", "pad", "dil"))
            groups, name = int(line["groups"]), line["model"] if "model" in line else line["source"]
            depth = [int(line[name]) for name in ("D", "T", "stride_d", "pad_d", "dil_d")] if "D" in line else None
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {reader.line_num}: {type(error).__name__}: {error}") from None
        problem = conv_problem(*sizes, stride=stride, padding=padding, dilation=dilation, groups=groups)
        if depth is not None:
            D, T, stride_d, pad_d, dil_d = depth
            problem = problem._replace(D=D, T=T, stride_d=stride_d, pad_front=pad_d, pad_back=pad_d, dil_d=dil_d)
            if image_of(problem) is not None:
                continue
        if min(problem.O, problem.P, problem.Q) > 0 and not problem.is_oversized:
            layers.append((name, problem))
    if not layers:
        raise ValueError(f"{path} holds no layer: a line of columns N, C, H, W, K, R, S, ... and a line per layer")
    return layers


def random_layers(count: int, seed: int = 0, *, volumes: bool = False) -> list[Layer]:
    """`count` layers of log-uniform sizes, most of them tiny: networks have few of those, and their time is mostly the
    overhead of a call. Their names make ten families: they are not related, so that splits may separate them."""
    rng = np.random.default_rng(seed)

    def size(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    layers: list[Layer] = []
    while len(layers) < count:
        R = int(rng.choice([1, 1, 3, 3, 3, 5, 7]))
        C, K = size(1, RANDOM_SIZE), size(1, RANDOM_SIZE)
        groups = C if rng.random() < 0.15 else 1
        problem = conv_problem(
            1, C, size(R, RANDOM_SIZE), size(R, RANDOM_SIZE), C if groups > 1 else K, R, R,
            stride=int(rng.choice([1, 1, 1, 2])), padding=R // 2, groups=groups,
        )  # fmt: skip
        if volumes:
            T = int(rng.choice([R, R, R, 1, 3]))
            stride_d = int(rng.choice([1, problem.stride_h]))
            problem = problem._replace(
                D=size(T, RANDOM_DEPTH), T=T, stride_d=stride_d, pad_front=T // 2, pad_back=T // 2
            )
            if image_of(problem) is not None:
                continue
        layers.append((f"loguniform{'abcdefghij'[len(layers) % 10]}", problem))
    return layers


def perturbed(problem: ConvProblem, rng: np.random.Generator) -> ConvProblem:
    """A variation of a layer: its resolution times 1/2 to 2 (1/4 to 1.26 of volumes), its width times 1/4 to 2, both
    log-uniform.

    Channels stay multiples of 8 if they were, and of the number of groups; groups keep their width if there are
    several channels in each, and depthwise stays depthwise. The image stays large enough for the kernel.
    """
    p = problem
    zoom, width = 2.0 ** (rng.uniform(-2, 1 / 3) if p.is_volume else rng.uniform(-1, 1)), 2.0 ** rng.uniform(-2, 1)
    least_h = max(1, p.kernel_extent[0] - p.pad_top - p.pad_bottom)
    least_w = max(1, p.kernel_extent[1] - p.pad_left - p.pad_right)
    H, W = max(least_h, round(p.H * zoom)), max(least_w, round(p.W * zoom))
    if p.H == p.R == 1:  # of one dimension, and stays so
        H = 1
    if p.is_volume:
        # Slices are fewer than rows in some networks and as many in others: the ratio varies by as much again.
        least_d = max(1, p.depth_extent - p.pad_front - p.pad_back)
        p = p._replace(D=max(least_d, round(p.D * zoom * 2.0 ** rng.uniform(-0.5, 0.5))))

    def scaled(channels: int, step: int) -> int:
        steps: int = max(1, round(channels * width / step))
        return steps * step

    if p.groups == 1:
        # Networks of any width have three input channels.
        C = p.C if p.C <= 4 else scaled(p.C, 8 if p.C % 8 == 0 else 1)
        return p._replace(H=H, W=W, C=C, K=scaled(p.K, 8 if p.K % 8 == 0 else 1))
    per_group = p.C // p.groups
    groups = scaled(p.groups, 8 if per_group == 1 and p.groups % 8 == 0 else 1)
    return p._replace(H=H, W=W, C=groups * per_group, K=groups * (p.K // p.groups), groups=groups)


# ---- a model's calls --------------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):
    """Records the problem of every convolution that aten computes, from any caller."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[ConvProblem] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            x, weight, _, *geometry = args
            self._note(x, weight, *geometry, streamed={Direction.FORWARD: x})
        elif func is torch.ops.aten.convolution_backward.default:
            grad_y, x, weight, _, *geometry, mask = args
            streamed = {Direction.BACKWARD_DATA: grad_y, Direction.BACKWARD_WEIGHT: x}
            self._note(
                x, weight, *geometry, streamed={d: t for (d, t), on in zip(streamed.items(), mask, strict=False) if on}
            )
        return func(*args, **(kwargs or {}))

    def _note(self, x: Tensor, weight: Tensor, *geometry: Any, streamed: Mapping[Direction, Tensor]) -> None:
        stride, padding, dilation, transposed, _, groups = geometry
        problem = (
            None if transposed else problem_of(x, weight, (tuple(stride), tuple(padding), tuple(dilation), groups))
        )
        if problem is not None:
            self.problems += [
                problem._replace(direction=direction, layout=layout_of(t)) for direction, t in streamed.items()
            ]


def recorded(model: nn.Module, x: Tensor, *, training: bool = True) -> list[ConvProblem]:
    """The problems of every 2-D convolution in `model(x)`, functional ones included, and with `training` of the
    backward pass, in the order of the calls; transposed convolutions are not among them.

    The model is left as it was: mode and gradients are restored, buffers (running statistics) too.
    """
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = [(p, p.grad) for p in model.parameters()]
    was_training = model.training
    recorder = _Recorder()
    try:
        model.train(training)
        with torch.set_grad_enabled(training), recorder:
            result = model(x)
            if training:
                # Squares: the gradient of a plain sum is one expanded value, a layout that no real loss has.
                total = sum(t.float().square().sum() for t in _tensors(result) if t.requires_grad)
                if isinstance(total, Tensor):
                    total.backward()
    finally:
        model.train(was_training)
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return recorder.problems


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, list | tuple):
        for value in result:
            yield from _tensors(value)


# ---- drawing ----------------------------------------------------------------------------------------------------


def flops_cap(problem: ConvProblem, flags: Mapping[str, bool]) -> float:
    """FLOPs up to which one native call of this kind of problem is expected to stay below about 25 ms."""
    cap = FLOPS_CAP / _CAP_DIVISOR.get(kernel_class(problem), 1)
    if problem.is_volume and problem.groups == 1 and (problem.C % 16 or problem.K % 16):
        cap /= _UNEVEN_DIVISOR
    needed = SIXTEEN_BIT_FLAGS.get(problem.dtype)
    return cap if needed is None or any(flags.get(f, False) for f in needed) else cap / _EMULATED_DIVISOR


def draw(
    layers: Sequence[Layer],
    count: int,
    *,
    seed: int = 0,
    threads: int = 1,
    dtypes: Sequence[str] = DTYPES,
    flags: Mapping[str, bool] | None = None,
    batches: Sequence[int] = BATCHES,
    perturb: float = 0.0,
) -> Iterator[Layer]:
    """`count` different problems: stratified by kernel class, all three directions, all batches, 70 % contiguous.

    The first of `dtypes` gets 85 % (all, if it is the only one). Problems over the caps are drawn again with a
    smaller batch. Ends early if the layers do not yield as many. The same arguments give the same problems.

    Args:
        flags: which 16-bit types the processor computes in (`host.host_flags`); the others have lower caps.
        perturb: share of the problems that are `perturbed` variations of the layer drawn.
    """
    flags = flags or {}
    rng = np.random.default_rng(seed)
    of_class: dict[str, list[Layer]] = {}
    for layer in layers:
        of_class.setdefault(kernel_class(layer[1]), []).append(layer)
    classes = sorted(of_class)
    weights = np.array([_CLASS_WEIGHTS[name] for name in classes])
    if all(problem.is_volume for _, problem in layers):  # their classes are filled otherwise, some nearly empty
        weights = np.sqrt([len(of_class[name]) for name in classes])
    seen: set[ConvProblem] = set()
    for _ in range(100 * count):
        if len(seen) == count or not classes:
            return
        candidates = of_class[classes[rng.choice(len(classes), p=weights / weights.sum())]]
        model, problem = candidates[rng.integers(len(candidates))]
        of_volumes = problem.is_volume
        if perturb and rng.random() < perturb:
            problem = perturbed(problem, rng)
        direction = list(Direction)[rng.integers(3)]
        dtype = dtypes[0] if len(dtypes) == 1 or rng.random() < 0.85 else dtypes[int(rng.integers(1, len(dtypes)))]
        of_kind = BATCHES_OF_VOLUMES if of_volumes and batches is BATCHES else batches
        batch = int(rng.choice(of_kind))
        channels_last, weight_follows = rng.random() < 0.3, rng.random() < 0.85
        problem = problem._replace(direction=direction, dtype=dtype, threads=threads)
        fitting = [n for n in sorted(of_kind) if n <= batch and _fits(problem._replace(N=n), flags)]
        if not fitting:
            continue
        problem = problem._replace(N=fitting[-1])
        problem = with_layouts(problem, channels_last, channels_last and weight_follows)
        if problem not in seen and not (of_volumes and image_of(problem) is not None):
            seen.add(problem)
            yield model, problem


def _fits(problem: ConvProblem, flags: Mapping[str, bool]) -> bool:
    return problem.flops <= flops_cap(problem, flags) and problem.bytes <= BYTES_CAP


def mixed(first: Iterator[Layer], second: Iterator[Layer], share: float, seed: int = 0) -> Iterator[Layer]:
    """Both streams in random order, `share` from the second while it lasts: an interrupted collection has both."""
    rng = np.random.default_rng(seed)
    streams: list[Iterator[Layer] | None] = [first, second]
    while any(stream is not None for stream in streams):
        wanted = int(rng.random() < share)
        index = wanted if streams[wanted] is not None else 1 - wanted
        stream = streams[index]
        assert stream is not None
        try:
            yield next(stream)
        except StopIteration:
            streams[index] = None


def from_lists(
    paths: Iterable[str | Path],
    count: int,
    *,
    random: float = 0.3,
    perturb: float = 0.5,
    threads: Sequence[int] = (1,),
    dtypes: Sequence[str] = DTYPES,
    seed: int = 0,
) -> list[Layer]:
    """`count` problems for this machine per number of threads, in random order: `draw`n from CSV files of layers and,
    for a share of `random`, from layers of log-uniform sizes.

    Raises:
        ValueError: if a dtype is unknown. ValueError, OSError: if a file cannot be read.
    """
    for dtype in dtypes:
        if dtype not in TORCH_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(TORCH_DTYPES)}, not {dtype!r}")
    layers = [layer for path in paths for layer in read_layers(path)]
    fill, flags, volumes = round(count * random), host_flags(), all(problem.is_volume for _, problem in layers)
    found: list[Layer] = []
    for t in threads:
        listed = draw(layers, count - fill, seed=seed, threads=t, flags=flags, perturb=perturb, dtypes=dtypes)
        others = random_layers(fill, seed, volumes=volumes)
        filling = draw(others, fill, seed=seed, threads=t, flags=flags, dtypes=dtypes)
        found += mixed(listed, filling, share=random, seed=seed)
    return found


def with_layouts(problem: ConvProblem, channels_last: bool, weight_channels_last: bool) -> ConvProblem:
    """The problem with these memory layouts, as `layout_of` names them: with one channel or one pixel, contiguous."""
    streamed = problem.y_shape if problem.direction == Direction.BACKWARD_DATA else problem.x_shape
    layouts = []
    for wanted, shape in ((channels_last, streamed), (weight_channels_last, problem.weight_shape)):
        distinct = shape[1] > 1 and math.prod(shape[2:]) > 1
        layouts.append(CHANNELS_LAST if wanted and distinct else CONTIGUOUS)
    return problem._replace(layout=layouts[0], weight_layout=layouts[1])
