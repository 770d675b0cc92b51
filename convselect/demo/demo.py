"""The demonstration: what is chosen for real networks, how far from float64 the results are, and how long it takes.

The baseline is an unconverted copy of the model with its plain `nn.Conv2d` layers, not a converted one that runs
natively: that would charge the baseline for convselect's own bookkeeping. Results are compared with the same model in
float64 before anything is timed. All numbers are printed, including slow-downs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import convselect
from convselect.demo import tables as show
from convselect.demo.architectures import ARCHITECTURES, calibrate_batch_norm, he_initialise, vgg16
from convselect.demo.tables import ChoiceGroup, Errors, ModelResult, Speed
from convselect.doctor.compare import Times, distance, infer, tensors, time_both, train_but_dropout
from convselect.machine.environment import MALLOC_VARIABLES, run_environment

DEFAULT_MODELS = ("resnet18", "vgg16", "unet", "replknet_small")
QUICK_SHAPE = (2, 3, 64, 64)

# Above every activation here. Older glibc ignores an mmap threshold over 32 MiB and then behaves as untuned.
_TUNED_MALLOC = dict(zip(MALLOC_VARIABLES, (str(2**30), str(2**30), str(2**26)), strict=True))


class DemoError(Exception):
    """The user's model or arguments cannot be demonstrated; the message is one line that says why."""


class Subject(NamedTuple):
    """A network and its input."""

    name: str
    model: nn.Module
    x: Tensor


# ---- what to run ----------------------------------------------------------------------------------------------------


def built_in(name: str, quick: bool = False) -> Subject:
    """A network of `architectures`, He-initialised and calibrated on the standard normal input it comes with.

    VGG-16 gets a pooled classifier: the published one is 124 million parameters without a single convolution.

    Raises:
        DemoError: for an unknown name.
    """
    if name not in ARCHITECTURES:
        raise DemoError(f"unknown network {name!r}; known are {', '.join(ARCHITECTURES)}")
    build, shape = ARCHITECTURES[name]
    model = he_initialise(vgg16(classifier="pooled") if name == "vgg16" else build()).eval()
    x = torch.randn(QUICK_SHAPE if quick else shape, generator=torch.Generator().manual_seed(0))
    return Subject(name, calibrate_batch_norm(model, x), x)


def parse_shape(text: str) -> tuple[int, ...]:
    """ "1,3,224,224" as four positive ints.

    Raises:
        DemoError: for anything else.
    """
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if len(shape) != 4 or min(shape) < 1:
        raise DemoError(f"--input must be four positive numbers N,C,H,W, not {text!r}")
    return shape


def load_user_model(spec: str, shape: tuple[int, ...]) -> Subject:
    """Call `module:function`, also from the working directory, for a model; its weights are used as they are.

    Raises:
        DemoError: if it cannot be imported, found or called, or returns something else.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise DemoError(f"--model must be module:function, not {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise DemoError(f"cannot import {module_name!r}: {_one_line(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise DemoError(f"{module_name!r} has no function {attribute!r}")
    try:
        model = function()
    except Exception as error:
        raise DemoError(f"{spec}() failed: {_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise DemoError(f"{spec}() returned {type(model).__name__}, not a torch.nn.Module")
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return Subject(spec, model, _image(shape).to(parameter.device, parameter.dtype))


def subject_of(target: str, input_shape: str | None) -> Subject:
    """A built-in network, by default on the input it comes with, or a user's module:function.

    Args:
        input_shape: "N,C,H,W".

    Raises:
        DemoError: if there is no such network, or what it needs of an input is missing.
    """
    shape = None if input_shape is None else parse_shape(input_shape)
    if target in ARCHITECTURES:
        found = built_in(target)
        if shape is None:
            return found
        return found._replace(x=_image(shape))
    if shape is None:
        raise DemoError(f"{target} needs --input N,C,H,W")
    return load_user_model(target, shape)


def _image(shape: tuple[int, ...]) -> Tensor:
    try:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))
    except RuntimeError as error:
        raise DemoError(f"an input of {','.join(map(str, shape))} cannot be made: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


# ---- running one model ----------------------------------------------------------------------------------------------


def _make_loss(outputs: Sequence[Tensor]) -> Callable[[Any], Tensor]:
    """Cross entropy for logits (N, classes), else mean squared distance from fixed normal targets."""
    generator = torch.Generator().manual_seed(1)
    if len(outputs) == 1 and outputs[0].dim() == 2 and outputs[0].shape[1] > 1:
        rows, classes = outputs[0].shape
        labels = torch.randint(classes, (rows,), generator=generator).to(outputs[0].device)
        return lambda output: F.cross_entropy(tensors(output)[0], labels)
    targets = [torch.randn(t.shape, generator=generator).to(t.device) for t in outputs]

    def loss(output: Any) -> Tensor:
        pairs = zip(tensors(output), targets, strict=True)
        return torch.stack([F.mse_loss(t, target.to(t.dtype)) for t, target in pairs]).sum()

    return loss


def _step(model: nn.Module, x: Tensor, loss: Callable[[Any], Tensor]) -> None:
    """One training step without the optimiser: forward, loss, backward into fresh gradients."""
    model.zero_grad(set_to_none=True)
    loss(model(x)).backward()


def _gradient_errors(native: nn.Module, converted: nn.Module, exact: nn.Module) -> list[Errors]:
    sides = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (native, converted, exact)]
    if not sides[2]:
        return []
    for side in sides[:2]:
        if side.keys() != sides[2].keys():
            raise RuntimeError(f"different parameters got gradients: {sorted(side.keys() ^ sides[2].keys())}")
    exact_grads = sides[2]
    whole = [distance(side.values(), (exact_grads[n] for n in side)) for side in sides[:2]]
    # A gradient that is zero in exact arithmetic (a bias before batch normalisation) is only rounding on both sides.
    norms = {n: float(g.norm()) for n, g in exact_grads.items()}
    floor = 1e-6 * max(norms.values())
    worst = [max(distance([side[n]], [exact_grads[n]]) for n in norms if norms[n] >= floor) for side in sides[:2]]
    return [Errors("all gradients", *whole), Errors("worst parameter's gradient", *worst)]


def _group_choices(explanation: convselect.Explanation) -> tuple[ChoiceGroup, ...]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    gains: dict[tuple[Any, ...], tuple[float | None, float | None]] = {}
    for row in explanation.rows:
        key = (row.problem, row.algorithm, row.source)
        groups.setdefault(key, []).append(row.layer)
        gains[key] = (row.predicted_gain, row.measured_gain)
    return tuple(
        ChoiceGroup(tuple(layers), str(key[0].direction), str(key[0]), str(key[1]), str(key[2]), *gains[key])
        for key, layers in groups.items()
    )


def _speed(mode: str, times: Times) -> Speed:
    native, converted = times
    return Speed(
        mode, len(native.samples_us), native.median_us, converted.median_us, times.gain, times.on_thread_clock.gain
    )


@contextmanager
def blaming(subject: Subject, doing: str) -> Iterator[None]:
    """Report failures of the unconverted model in one line; convselect's own failures keep their traceback."""
    try:
        yield
    except Exception as error:
        shape = ",".join(map(str, subject.x.shape))
        raise DemoError(f"{subject.name} on an input of {shape}, {doing}: {_one_line(error)}") from error


def run_model(subject: Subject, seconds: float, on_stage: Callable[[str, float], object]) -> ModelResult:
    """Convert a copy, compare both with float64, collect the choices, then time both; `seconds` is for the timing.

    Raises:
        DemoError: if the unconverted model does not run forward, backward or in float64.
    """
    x = subject.x
    native = convselect.revert(copy.deepcopy(subject.model).eval())
    converted = convselect.convert(copy.deepcopy(native))
    # Earlier measurements belong to other models.
    conversion = str(dataclasses.replace(convselect.summary(converted), on_trial=(), measured=(), predicted=()))

    on_stage("comparing with float64", 0.0)
    with blaming(subject, "forward"):
        expected = tensors(infer(native, x))
    if not expected:
        raise DemoError(f"{subject.name} returned no floating-point tensor")
    with blaming(subject, "in float64"):
        exact = copy.deepcopy(native).double()
        truth = tensors(infer(exact, x.double()))
    sides = (expected, tensors(infer(converted, x)))
    errors = [Errors("output", *(distance(side, truth) for side in sides))]
    del sides, truth

    loss = _make_loss(expected)
    trainable = any(p.requires_grad for p in native.parameters())
    if trainable:
        for model in (native, converted, exact):
            train_but_dropout(model)
        on_stage("comparing with float64", 0.3)
        with blaming(subject, "backward"):
            _step(native, x, loss)
            _step(exact, x.double(), loss)
        _step(converted, x, loss)
        errors += _gradient_errors(native, converted, exact)
    del exact
    explanation = convselect.explain(converted, x)
    choices = _group_choices(explanation)

    def timed(mode: str, run: Callable[[nn.Module], object], share: float) -> Speed:
        times = time_both(run, native, converted, share, x.device, lambda done: on_stage(f"timing {mode}", done))
        return _speed(mode, times)

    native.eval()
    converted.eval()
    share = seconds / 3
    speeds = [timed("inference", lambda model: infer(model, x), share if trainable else seconds)]
    if trainable:
        train_but_dropout(native)
        train_but_dropout(converted)
        speeds.append(timed("training", lambda model: _step(model, x, loss), seconds - share))
    return ModelResult(
        subject.name, tuple(x.shape), conversion, explanation.note, choices, tuple(errors), tuple(speeds)
    )


# ---- the whole -------------------------------------------------------------------------------------------------------


def run_demo(
    models: Sequence[str] | None = None,
    user_model: Subject | None = None,
    *,
    seconds: float = 45.0,
    threads: int | None = None,
    quick: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run everything and print it; returns the same as JSON types: {"environment": ..., "models": [...]}.

    Args:
        models: names from `architectures.ARCHITECTURES`; default: `DEFAULT_MODELS`, or none if there is a `user_model`.
        seconds: time for all timing together, without the comparison with float64.
        threads: for PyTorch, while this runs.
        quick: tiny images.

    Raises:
        DemoError: if a network is unknown or does not run.
    """
    console = console or Console(highlight=False)
    names = list(models if models is not None else () if user_model is not None else DEFAULT_MODELS)
    makers: list[tuple[str, Callable[[], Subject]]]
    makers = [(name, functools.partial(built_in, name, quick)) for name in names]
    if user_model is not None:
        makers.append((user_model.name, functools.partial(Subject, *user_model)))
    threads_before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        env = run_environment()
        show.print_environment(console, env)
        bar = show.StageBar(console, [name for name, _ in makers])
        results = []
        # Use the model's choices from the first call on: trials on real calls would last for half of the timing.
        with bar.progress, convselect.use() as used, convselect.use("auto" if used.chooses else None):
            for index, (name, make) in enumerate(makers):
                on_stage = functools.partial(bar.stage, index, name)
                on_stage("building", 0.0)
                results.append(run_model(make(), seconds / len(makers), on_stage))
                show.print_choices(console, results[-1])
        show.print_numbers(console, results, env)
    finally:
        torch.set_num_threads(threads_before)
    return {"environment": env, "models": [show.plain(result) for result in results]}


def restart_with_tuned_malloc() -> None:
    """Restart this process with malloc variables that make glibc keep freed memory, unless they are set already or the
    system does not use glibc.

    glibc reads these variables once, at start. Variables that the user set are left unchanged. After the restart none
    is missing, so this happens only once.
    """
    missing = {name: value for name, value in _TUNED_MALLOC.items() if name not in os.environ}
    if platform.libc_ver()[0] != "glibc" or not missing or not Path(sys.executable).exists():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, sys.orig_argv, os.environ | missing | {show.TUNED_BY_US: "1"})
