"""One run on an NVIDIA GPU: are the kernels right, how fast is every algorithm, and what does a call cost.

    python -m benchmarks.gpu_run --out results                 # under nine minutes
    python -m benchmarks.gpu_run --out results --minutes 4     # continues the same run
    python -m benchmarks.gpu_run --out results --phases times
    python -m benchmarks.gpu_run --out /tmp/dry --dry-run      # no GPU: TRITON_INTERPRET=1, tiny, times mean nothing

Phases, each with a share of the time; unused time goes to the next ones:

    compile    every launch of the phases after it, in parallel, into Triton's cache on disk (`TRITON_CACHE_DIR`)
    numerics   Triton's algorithms, directions and configurations against float64   -> numerics.csv
    bandwidth  of a copy                                                            -> results.json
    cost       host time per call, CUDA graphs, torch.compile                       -> results.json
    times      all algorithms on some 250 layers in three directions                -> times.csv
    report     speed-ups against their targets, shares of bandwidth, questions      -> results.json

Results are written at once. `convselect train results/times.csv --family cuda-sm90 --out DIR` makes a model of
the times. Exit status: 0; 1 if a result was wrong or failed; 2 if it could not run; 3 if a kernel made the
device unusable; the same command, run again, continues after that kernel.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks import _gpu_compile, _gpu_cost, _gpu_device, _gpu_numerics, _gpu_problems, _gpu_report, _gpu_times
from benchmarks._gpu_device import ContextLost, Device
from benchmarks._rows import append_rows
from convselect.base import timing
from convselect.base.problem import ConvProblem, conv_problem
from convselect.kernels.pool import ALL
from convselect.kernels.triton.launch import Launch, TritonAlgorithm, interpreting
from convselect.measure.rows import environment_path, read_rows

PHASES = ("compile", "numerics", "bandwidth", "cost", "times", "report")
UNTIL = {"compile": 0.26, "numerics": 0.40, "bandwidth": 0.42, "cost": 0.50, "times": 0.96, "report": 1.0}
"""The share of the whole time at which each phase ends at the latest."""
SECONDS_PER_PROBLEM = 0.35
DRY_LAYERS = (
    ("drynet_a", conv_problem(1, 8, 6, 6, 8, 3, 3, padding=1, groups=8)),
    ("drynet_b", conv_problem(1, 8, 5, 4, 6, 1, 1, dtype="float16")),
    ("otherdry", conv_problem(2, 4, 6, 6, 4, 3, 3, padding=1, groups=2)),
)


class Run:
    """The state shared by the phases: the device, the folder, the deadline of the run, and the compiled launches."""

    def __init__(self, device: Device, out: Path, minutes: float, count: int, checks: int | None, workers: int | None):
        self.device, self.out, self.workers = device, out, workers
        self.seconds = 60 * minutes
        self.whole = timing.Deadline(self.seconds)
        self.algorithms = _gpu_compile.algorithms()
        self.pool = [*(a for a in ALL if not isinstance(a, TritonAlgorithm)), *self.algorithms]
        self.compiled: set[Launch] | None = None
        self.console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
        self.checks = _gpu_numerics.plan(self.algorithms, device)[:checks]
        if device.dry:
            layers = [(model, p) for model, p in DRY_LAYERS][:count]
        else:
            layers = [(case.model, case.problem) for case in _gpu_problems.plan(count)]
        self.items = [(model, p) for model, layer in layers for p in _directions(layer)]

    def deadline(self, phase: str) -> timing.Deadline:
        return timing.Deadline(max(0.0, UNTIL[phase] * self.seconds - self.whole.elapsed_s))

    def note(self, phase: str, found: Any) -> None:
        """Put into results.json under the phase's name."""
        path = self.out / "results.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        known[phase] = found
        path.write_text(json.dumps(known, indent=1) + "\n")

    def say(self, text: str) -> None:
        self.console.print(f"[{self.whole.elapsed_s:5.0f} s] {text}", markup=False, soft_wrap=True)


def _directions(layer: ConvProblem) -> list[ConvProblem]:
    return _gpu_problems.directions(_gpu_problems.Case(0, "", layer))


# ---- phases -----------------------------------------------------------------------------------------------------


def compile_launches(run: Run) -> bool:
    if interpreting():
        run.say("compile: nothing to do in the interpreter")
        return True
    measured = _measured(run.out)
    times = _gpu_compile.launches_of((p for _, p in run.items if p not in measured), run.algorithms)
    checks = (launch for check in run.checks for launch in _launches(check))
    # The large ones of the times are more than the checks: a cut must not leave either without any.
    queue = _alternating(checks, times)
    done, failed = _gpu_compile.compile_all(queue, run.device.arch, run.deadline("compile"), workers=run.workers)
    run.compiled = done
    run.note("compile", {"compiled": len(done), "failed": {str(launch): reason for launch, reason in failed.items()}})
    run.say(f"compile: {len(done)} launches compiled, {len(failed)} failed")
    for launch, reason in list(failed.items())[:5]:
        run.say(f"  {launch.kernel} {dict(launch.constants)}: {reason[:300]}")
    return not failed


def _launches(check: _gpu_numerics.Check) -> Iterable[Launch]:
    try:
        return check.launches
    except Exception:  # it fails when it is run, and is then on record
        return ()


def _alternating(*sources: Iterable[Launch]) -> Iterable[Launch]:
    waiting = [iter(source) for source in sources]
    while waiting:
        for source in list(waiting):
            launch = next(source, None)
            if launch is None:
                waiting.remove(source)
            else:
                yield launch


def numerics(run: Run) -> bool:
    path = run.out / "numerics.csv"
    checks = run.checks
    if run.compiled is not None:  # what is not compiled comes last, if there is time
        compiled = run.compiled
        checks = sorted(checks, key=lambda check: not all(launch in compiled for launch in _launches(check)))
    found = _gpu_numerics.run(checks, run.device, path, run.deadline("numerics"))
    run.note("numerics", {"counts": found, "summary": _gpu_numerics.summary(path)})
    run.say(f"numerics: {found}")
    _show(run.console, "Triton's results against float64", _gpu_numerics.summary(path))
    return found["wrong"] == found["failed"] == 0


def bandwidth(run: Run) -> bool:
    found = _gpu_cost.copy_bandwidth(run.device)
    run.note("bandwidth", found)
    run.say("bandwidth: " + ", ".join(f"{name} {value / 1e12:.2f}e12" for name, value in found.items()))
    return True


def cost(run: Run) -> bool:
    found: dict[str, Any] = {"host": _gpu_cost.host_cost(run.algorithms, run.device)}
    run.note("cost", found)
    found["ways"] = _gpu_cost.graph_and_compile(run.algorithms, run.device)
    run.note("cost", found)
    _show(run.console, "Host time per call, us", [{"call": n, **t} for n, t in found["host"]["us_per_call"].items()])
    for way, result in found["ways"].items():
        run.say(f"cost: {way}: {result}")
    return all(result.startswith(("ok", "not tried")) for result in found["ways"].values())


def times(run: Run) -> bool:
    path, deadline = run.out / "times.csv", run.deadline("times")
    measured = _measured(run.out)
    new, right = 0, True
    for model, problem in run.items:
        if problem in measured:
            continue
        if deadline.passed:
            break
        try:
            rows = _gpu_times.measure(
                model, problem, run.device, algorithms=run.pool, compiled=run.compiled, seconds=SECONDS_PER_PROBLEM
            )
        except ContextLost:
            raise
        except RuntimeError as error:  # out of memory, as a rule: the others are still to be measured
            run.say(f"times: not {problem}: {str(error)[:200]}")
            run.device.assert_alive()
            if not run.device.dry:
                torch.cuda.empty_cache()
            continue
        append_rows(path, rows)
        new += 1
        for row in rows:
            if row.status in ("wrong", "failed"):
                right = False
                run.say(f"times: {row.status}: {row.algorithm} on {problem}")
    left = sum(p not in _measured(run.out) for _, p in run.items)
    run.note("times", {"measured": len(_measured(run.out)), "left": left})
    run.say(f"times: {new} problems measured, {left} left")
    return right


def report(run: Run) -> bool:
    path, results = run.out / "times.csv", run.out / "results.json"
    if not path.exists():
        run.say("report: there are no times yet")
        return True
    found = _gpu_report.times_of(read_rows(path))
    copied = json.loads(results.read_text()).get("bandwidth") if results.exists() else None
    speedups = _gpu_report.speedups(found)
    shares = _gpu_report.bandwidth_shares(found, copied["memory_bytes_per_s"]) if copied else []
    questions = _gpu_report.questions(found, run.device.kind)
    run.note("report", {"speedups": speedups, "bandwidth_shares": shares, "questions": questions})
    _show(run.console, "Times faster than PyTorch's default (geometric means)", speedups)
    _show(run.console, "Depthwise of 50 MB and more: share of a copy's bandwidth", shares)
    for asked in questions:
        _show(run.console, asked["question"], asked["lines"])
    return True


RUN: dict[str, Callable[[Run], bool]] = dict(
    zip(PHASES, (compile_launches, numerics, bandwidth, cost, times, report), strict=True)
)


def _measured(out: Path) -> set[ConvProblem]:
    path = out / "times.csv"
    return {row.problem for row in read_rows(path)} if path.exists() else set()


def _show(console: Console, title: str, lines: list[dict[str, Any]]) -> None:
    if not lines:
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in lines[0]:
        table.add_column(name.replace("_", " "), justify="left" if isinstance(lines[0][name], str) else "right")
    for line in lines:
        table.add_row(*map(_cell, line.values()))
    console.print(table, markup=False)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return "-" if value is None else str(value)


# ---- the command ------------------------------------------------------------------------------------------------


def _environment(run: Run) -> None:
    """Write the environment, or check that the existing file has the same.

    Raises:
        ValueError: if the folder's times are of another machine or another version.
    """
    found = _gpu_device.environment(run.device)
    path = run.out / "env.json"
    if path.exists():
        known = json.loads(path.read_text())
        changed = [name for name in ("device", "torch", "cudnn", "triton") if known.get(name) != found[name]]
        if changed:
            raise ValueError(f"{run.out} holds results of another {', '.join(changed)}")
    path.write_text(json.dumps(found, indent=1) + "\n")
    environment_path(run.out / "times.csv").write_text(json.dumps({"machine": found}, indent=1) + "\n")


def main(
    out: Annotated[Path, typer.Option("--out", help="Folder for the results; a run continues in an existing one.")],
    minutes: Annotated[float, typer.Option(min=0, help="Time for everything.")] = 9.0,
    phases: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(PHASES))] = ",".join(PHASES),
    count: Annotated[int, typer.Option(min=1, help="Layers to time.")] = _gpu_problems.COUNT,
    checks: Annotated[int | None, typer.Option(min=1, help="Maximum number of numeric checks.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Compiling processes; default: one per CPU.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny problems on the CPU, with a fake clock.")] = False,
) -> None:
    """Numerics, times, costs and a report on one GPU."""
    chosen = [name.strip() for name in phases.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in PHASES]:
        raise typer.BadParameter(f"unknown phases {', '.join(unknown)}; there are {', '.join(PHASES)}")
    try:
        device = _gpu_device.dry() if dry_run else _gpu_device.cuda()
        out.mkdir(parents=True, exist_ok=True)
        run = Run(device, out, minutes, count, checks, workers)
        _environment(run)
    except (RuntimeError, ValueError, OSError) as error:
        typer.echo(f"benchmarks.gpu_run: {error}", err=True)
        raise typer.Exit(2) from error
    run.say(f"{len(run.checks)} checks and {len(run.items)} problems, {minutes:g} minutes")
    right = True
    try:
        for phase in PHASES:
            if phase in chosen:
                right &= RUN[phase](run)
    except ContextLost as error:
        typer.echo(f"benchmarks.gpu_run: {error}", err=True)
        raise typer.Exit(3) from error
    run.say("done" if right else "done; something was wrong, see above")
    raise typer.Exit(0 if right else 1)


if __name__ == "__main__":
    typer.run(main)
