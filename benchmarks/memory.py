"""What a frozen network keeps in memory, beside what eager needs.

    python -m benchmarks.memory                         # the thirty networks of timm
    python -m benchmarks.memory --models resnet50

Batch 1, each network's own image size, float32, one thread. *Between layers*: for eager, the most bytes of results that
are alive at a time (oneDNN's own memory is not counted), inputs and parameters not included; for the frozen network the
memory that is laid out for them. *Weights*: the model's parameters; what freezing keeps beside them. *RSS*: by how much
more memory is resident when the network is frozen and was called than when it had run eagerly, malloc's free memory
given back before both. Each network has a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import convselect
from benchmarks import _timm
from benchmarks._tables import geometric_mean
from convselect.cli.console import progress
from convselect.kernels import _library

_MIB = 2**20


class Live(TorchDispatchMode):
    """Counts the bytes of results that are alive at a time: `peak` is the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in pytree.tree_leaves(result):
            if isinstance(t, Tensor):
                self._note(t.untyped_storage(), read)
        return result

    def _note(self, storage: Any, read: set[int]) -> None:
        at = storage.data_ptr()
        if at in self._alive or at in read:
            return
        self._alive[at] = storage.nbytes()
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._dropped, at)

    def _dropped(self, at: int) -> None:
        self._now -= self._alive.pop(at, 0)


@dataclass
class Memory:
    """Of one network, in bytes: see the module."""

    network: str
    parameters: int
    kept_weights: int
    eager_intermediates: int
    frozen_intermediates: int
    more_resident: int


def measure(network: str) -> Memory:
    model, x = _timm.build(network)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    with torch.inference_mode():
        with Live() as live:
            model(x)
        before = _resident(model, x)
        convselect.freeze(model, x)
        after = _resident(model, x)
    rows = convselect.summary(model).inputs
    return Memory(
        network, parameters, sum(r.weights_bytes for r in rows), live.peak, sum(r.intermediates_bytes for r in rows),
        after - before,
    )  # fmt: skip


def _resident(model: torch.nn.Module, x: Tensor) -> int:
    model(x)
    gc.collect()
    _library.give_back()
    return int(psutil.Process().memory_info().rss)


def measure_apart(network: str) -> Memory:
    command = [sys.executable, "-m", "benchmarks.memory", "--one", network]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Memory(**json.loads(done.stdout.splitlines()[-1]))


def table(found: Sequence[Memory]) -> Table:
    made = Table(title="MiB", title_justify="left", box=SIMPLE_HEAD)
    made.add_column("network")
    for heading in (
        "parameters", "kept\nbeside", "between layers\neager", "between layers\nfrozen", "frozen /\neager",
        "more\nresident",
    ):  # fmt: skip
        made.add_column(heading, justify="right")
    for m in found:
        sizes = (m.parameters, m.kept_weights, m.eager_intermediates, m.frozen_intermediates)
        cells = [f"{n / _MIB:.1f}" for n in sizes]
        made.add_row(m.network, *cells, f"{_ratio(m):.2f}", f"{m.more_resident / _MIB:.0f}")
    return made


def _ratio(m: Memory) -> float:
    return m.frozen_intermediates / m.eager_intermediates


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a frozen network needs more memory between layers than eager."""
    parser = argparse.ArgumentParser(prog="benchmarks.memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=_timm.NAMES, metavar="NAME", help="of timm, or module:function")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    convselect.set_store("off")
    if options.one:
        print(json.dumps(asdict(measure(options.one))))
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    found = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress(*columns) as bar:
        task = bar.add_task("", total=len(options.models))
        for network in options.models:
            bar.update(task, description=escape(network))
            found.append(measure_apart(network))
            bar.advance(task)
    console.print(table(found))
    ratios = [_ratio(m) for m in found if m.frozen_intermediates]
    if ratios:
        console.print(f"between layers, frozen over eager: {geometric_mean(ratios):.2f}, at most {max(ratios):.2f}")
    return int(any(ratio > 1 for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
