"""Thirty networks of timm, frozen and converted, against eager PyTorch, torch.compile, ONNX Runtime and OpenVINO.

    python -m benchmarks.timm_networks --out run.json                  # all, one thread: about an hour
    python -m benchmarks.timm_networks --models resnet50 convnext_tiny --threads 1 2
    python -m benchmarks.timm_networks --isa avx2 --out run.json       # as on a processor without AVX-512
    python -m benchmarks.timm_networks --out run.json --resume         # what is not in run.json yet
    python -m benchmarks.timm_networks --again                         # planning: in the first and in a second process

Batch 1, each network's own image size, float32, random weights in which every branch matters (`_timm.enliven`). Each
output is compared with the same network in float64 before anything is timed. Sides are timed interleaved, in one
process per network: a crash or a network that takes too long does not lose the others, and results are written as they
come. Each timed call follows an untimed one of the same side. "Converted" is what `convselect.convert(model)` gives
after its trials; in training steps, of which few are made, by the model's own choices (policy "auto"). On one thread
the clock is the CPU time of the process, otherwise wall-clock time. malloc keeps freed memory, for all sides.

`--isa avx2` limits PyTorch, oneDNN (also OpenVINO's) and this package. ONNX Runtime's kernels (MLAS) and some of
OpenVINO's own cannot be limited: on a processor with AVX-512 they use it all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import convselect
from benchmarks import _against, _rivals, _timm
from benchmarks._against import Result
from benchmarks._tables import geometric_mean
from benchmarks._trials_machine import restart
from convselect.base.timing import Deadline
from convselect.cli.console import progress
from convselect.demo.tables import print_environment
from convselect.machine.environment import run_environment

_SAME = ("device", "isa", "torch", "convselect", "isa_limits", "packages")
"""Parts of the environment in which results of one file must agree."""


def measure(network: str, mode: str, options: argparse.Namespace) -> Result:
    """In this process, on as many threads as torch has."""
    model, x = _timm.build(network, reparameterised=options.reparameterised)
    arguments = dict(threads=torch.get_num_threads(), rounds=options.rounds, seconds=options.seconds)
    if mode == "training":
        return _against.training(network, model, x, **arguments)
    return _against.inference(network, model, x, compile=options.compile, **arguments)


def measure_apart(network: str, mode: str, threads: int, options: argparse.Namespace) -> Result | str:
    """In a process of its own; a sentence if it did not come to an end."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.timm_networks", "--models", network, "--threads", str(threads)]
        command += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
        command += ["--one", mode, "--out", str(out)]
        command += [f"--{name}" for name in ("compile", "reparameterised") if getattr(options, name)]
        if options.again:
            command += ["--store", str(Path(folder) / "store.db")]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=options.timeout)
            if not out.exists():
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                return f"ended with status {done.returncode}: {last}"
            found = Result.from_json(json.loads(out.read_text()))
            if options.again and mode == "inference":
                out.unlink()
                command[command.index(mode)] = "again"
                subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=options.timeout, check=True)
                found.seconds["frozen again"] = json.loads(out.read_text())
        except subprocess.TimeoutExpired:
            return f"took more than {options.timeout:.0f} s"
        return found


def planned_again(network: str, options: argparse.Namespace) -> float:
    """Seconds that `freeze` and the first call take, all that they import included, with the choices of another process
    in the store."""
    model, x = _timm.build(network, reparameterised=options.reparameterised)
    began = Deadline(None)
    with torch.inference_mode():
        convselect.freeze(model, x)(x)
    return began.elapsed_s


# ---- the file -------------------------------------------------------------------------------------------------------


class Record:
    """Results and failures, written to a file after each network.

    Raises:
        SystemExit: an older file was measured under other conditions, or exists and is not to be continued.
    """

    def __init__(self, path: Path | None, environment: dict[str, Any], resume: bool) -> None:
        self.path, self.environment = path, environment
        self.results: list[Result] = []
        self.failed: dict[str, str] = {}
        if path is None or not path.exists():
            return
        if not resume:
            raise SystemExit(f"{path} exists: --resume adds what is missing in it")
        found = json.loads(path.read_text())
        differing = [name for name in _SAME if found["environment"].get(name) != environment.get(name)]
        if differing:
            raise SystemExit(f"{path} was measured with another {differing[0]}")
        self.environment = found["environment"]
        self.results = [Result.from_json(r) for r in found["results"]]

    def holds(self, network: str, mode: str, threads: int) -> bool:
        return (network, mode, threads) in {(r.network, r.mode, r.threads) for r in self.results}

    def write(self) -> None:
        if self.path is None:
            return
        whole = {
            "environment": self.environment, "summary": summary(self.results), "failed": self.failed,
            "results": [asdict(r) for r in self.results],
        }  # fmt: skip
        written = self.path.with_name(f"{self.path.name}.part")
        written.write_text(json.dumps(whole, indent=1) + "\n")
        os.replace(written, self.path)


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Per mode and number of threads: geometric means, and how many networks the frozen side wins."""
    found = []
    for mode, threads in sorted({(r.mode, r.threads) for r in results}):
        group = [r for r in results if (r.mode, r.threads) == (mode, threads)]
        frozen = {rival: _against.over(group, rival) for rival in ("best", *_against.RIVALS)}
        found.append({
            "mode": mode, "threads": threads, "networks": len(group), "over_eager": _against.means(group),
            "frozen_over": {rival: geometric_mean(ratios) for rival, ratios in frozen.items() if ratios},
            "frozen_wins": {rival: sum(r > 1 for r in ratios) for rival, ratios in frozen.items() if ratios},
        })  # fmt: skip
    return found


# ---- tables ---------------------------------------------------------------------------------------------------------

_HEADINGS = {
    "eager channels_last": "eager\nNHWC", "torch.compile": "com-\npile", "onnxruntime": "onnx-\nrun.",
    "openvino": "open-\nvino", "converted": "conver-\nted", "frozen": "fro-\nzen",
    "converted channels_last": "conv.\nNHWC",
}  # fmt: skip


def table(results: Sequence[Result], mode: str, threads: int) -> Table:
    """One row per network, the frozen side's worst first."""
    group = [r for r in results if (r.mode, r.threads) == (mode, threads)]
    trains = mode == "training"
    sides = _against.TRAINING_SIDES[1:] if trains else _against.SIDES[1:]
    batch = _against._networks.TRAINING_BATCH if trains else 1
    made = Table(
        title=f"{mode}, batch {batch}, {threads} thread{'s' if threads > 1 else ''}: times faster than eager in NCHW",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    made.add_column("network", no_wrap=True)
    more = () if trains else ("frozen /\nbest", "p20-p80\n", "planned\ns", "error\neager", "error\nfrozen")
    for heading in ("eager\nms", *(_HEADINGS[side] for side in sides), *more, "rounds\n"):
        made.add_column(heading, justify="right", no_wrap=True)
    for r in sorted(group, key=lambda r: r.over_best or (0.0,)):
        row = [r.network.rpartition(":")[2], f"{r.median_us['eager'] / 1e3:.1f}"]
        row += [_cell(r, side) for side in sides]
        if not trains:
            best, planned = r.over_best, r.seconds.get("frozen")
            row += ["-", "-"] if best is None else [_coloured(best.median), f"{best.p20:.2f}-{best.p80:.2f}"]
            again = r.seconds.get("frozen again")
            row += ["-" if planned is None else f"{planned:.1f}" + ("" if again is None else f" / {again:.1f}")]
            row += [f"{r.error[side]:.0e}" if side in r.error else "-" for side in ("eager", "frozen")]
        made.add_row(*row, str(r.rounds))
    means = _against.means(group)
    row = ["geometric mean", "", *(f"{means[side]:.2f}" if side in means else "-" for side in sides)]
    made.add_section()
    made.add_row(*row, *([] if trains else [_coloured(geometric_mean(_against.over(group, "best")))]))
    return made


def _cell(r: Result, side: str) -> str:
    if side in r.over_eager:
        return f"{r.over_eager[side].median:.2f}"
    return "wrong" if side in r.error else "failed" if r.missing.get(side, "").startswith("failed") else "-"


def _coloured(value: float) -> str:
    return f"[{'green' if value >= 1 else 'red'}]{value:.2f}[/]"


def show(record: Record, console: Console) -> None:
    for group in summary(record.results):
        console.print(table(record.results, group["mode"], group["threads"]))
        for rival, mean in group["frozen_over"].items():
            won = f"faster on {group['frozen_wins'][rival]}"
            console.print(f"frozen over {rival}: {mean:.3f}, {won} of {group['networks']}", soft_wrap=True)
    for r in record.results:
        if r.spinning_us is not None and "onnxruntime" in r.wall_us:
            gain = r.wall_us["onnxruntime"] / r.spinning_us
            console.print(f"{r.network}: ONNX Runtime by itself, with spinning threads, {gain:.2f} times as fast")
        for side, reason in r.missing.items():
            console.print(escape(f"{r.network}, {r.mode}, {side}: {reason}"), soft_wrap=True)
    for name, reason in record.failed.items():
        console.print(f"[red]{escape(name)}[/]: {escape(reason)}", soft_wrap=True)


# ---- the command ----------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="benchmarks.timm_networks", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    made.add_argument("--models", nargs="+", default=_timm.NAMES, metavar="NAME", help="of timm, or module:function")
    made.add_argument("--threads", nargs="+", type=int, default=[1])
    made.add_argument("--rounds", type=int, default=30, help="at most, of each network")
    made.add_argument("--seconds", type=float, default=60.0, help="bound on the timing of each network")
    made.add_argument("--timeout", type=float, default=1800.0, help="seconds for a network, everything included")
    made.add_argument("--training", action="store_true", help="training steps too, converted against eager")
    made.add_argument("--compile", action="store_true", help="torch.compile with freezing too: a minute or two each")
    made.add_argument("--reparameterised", action="store_true", help="merge parallel branches first, for all sides")
    made.add_argument("--isa", choices=["avx2"], help="do as if the processor had no more than this")
    made.add_argument("--out", type=Path, help="JSON file, written after each network")
    made.add_argument("--resume", action="store_true", help="keep what --out has, and measure the rest")
    made.add_argument("--together", action="store_true", help="all networks in this process")
    made.add_argument("--no-malloc-tuning", action="store_true", help="leave malloc as it is")
    made.add_argument("--again", action="store_true", help="plan in a second process too, with the first one's store")
    made.add_argument("--one", choices=["inference", "training", "again"], help=argparse.SUPPRESS)
    made.add_argument("--store", default="off", help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a result of ours was wrong or a network failed."""
    options = parser().parse_args(argv)
    convselect.set_store(options.store)
    if options.one:  # in a process of `measure_apart`
        torch.set_num_threads(options.threads[0])
        network, again = options.models[0], options.one == "again"
        found = planned_again(network, options) if again else asdict(measure(network, options.one, options))
        options.out.write_text(json.dumps(found))
        return 0
    if not options.no_malloc_tuning:
        restart(options.isa)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    environment = {**run_environment(), "threads": options.threads, "packages": _rivals.versions()}
    print_environment(console, {**environment, "threads": " and ".join(map(str, options.threads))})
    console.print(", ".join(f"{name} {version}" for name, version in _rivals.versions().items()))
    if options.isa:
        console.print("ONNX Runtime's kernels and some of OpenVINO's use AVX-512 all the same: they cannot be limited.")
    record = Record(options.out, environment, options.resume)
    modes = ["inference", "training"] if options.training else ["inference"]
    todo = [(n, mode, t) for t in options.threads for mode in modes for n in options.models]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Redrawn between networks only: a thread that draws would take time from what is measured.
    with progress(*columns, auto_refresh=False) as bar:
        task = bar.add_task("", total=len(todo))
        for network, mode, threads in todo:
            bar.update(task, description=escape(network), refresh=True)
            if not record.holds(network, mode, threads):
                found = _measured(network, mode, threads, options)
                if isinstance(found, Result):
                    record.results.append(found)
                else:
                    record.failed[f"{network}, {mode}, threads {threads}"] = found
                record.write()
            bar.advance(task)
    show(record, console)
    return 1 if record.failed or any(r.wrong for r in record.results) else 0


def _measured(network: str, mode: str, threads: int, options: argparse.Namespace) -> Result | str:
    if not options.together:
        return measure_apart(network, mode, threads, options)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return measure(network, mode, options)
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    sys.exit(main())
