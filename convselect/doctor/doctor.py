"""`examine()`: what is installed, what is live, whether results are right, and what to do next.

It looks at the process as it is (environment variables, versions, kernels, model, store) and runs one small convolution
per algorithm and direction. Nothing is changed: no choice is made, and no file is begun.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from convselect.base import settings, timing
from convselect.base.problem import ConvProblem, Direction
from convselect.choice.budgets import is_disabled
from convselect.doctor import findings
from convselect.doctor.report import LEVELS, Advice, Report
from convselect.eager import log
from convselect.kernels import _library
from convselect.kernels.pool import ALL, BY_NAME
from convselect.machine import host
from convselect.machine.environment import cpu_fingerprint, run_environment
from convselect.machine.ownership import examined
from convselect.measure import measure
from convselect.measure.self_test import Case, case, tried
from convselect.model import loaded

PREFIX = "CONVSELECT_"
VARIABLES = {
    "CONVSELECT_POLICY": "auto, verify, measure, native, or the name of an algorithm",
    "CONVSELECT_PRECISION": "exact, native, fast",
    "CONVSELECT_WORKSPACE": 'bytes ("512MiB"), a share of free memory ("25%"), or both',
    "CONVSELECT_BATCH_INVARIANT": "1: results do not depend on the batch size",
    "CONVSELECT_DISABLE": "algorithms that may not be chosen",
    "CONVSELECT_AUDIT": "one call in this many checks that a choice still pays",
    "CONVSELECT_CACHE_ENTRIES": "problems remembered per process",
    "CONVSELECT_ARTIFACT": "another trained model",
    "CONVSELECT_CALIBRATION": "another calibration",
    "CONVSELECT_CACHE": "the folder of calibrations and the store",
    "CONVSELECT_STORE": "the store, or off",
    "CONVSELECT_SYSTEM_STORE": "a store that is only read",
    "CONVSELECT_LOG": "info, debug, or a file that ends in .log",
    "CONVSELECT_NO_NATIVE": "1: without the C kernels",
    "CONVSELECT_LIBRARY": "another build of the C kernels",
    "CONVSELECT_NO_EXTENSION": "1: every call goes through Python",
    "CONVSELECT_DEMO_MALLOC": "set by the demo for itself",
}
"""Every environment variable that is read, and what it may be."""


class _Examination:
    """Collects advice while it looks."""

    def __init__(self) -> None:
        self.advice: list[Advice] = []

    def say(self, level: str, text: str) -> None:
        self.advice.append(Advice(level, text))

    # ---- what is there ------------------------------------------------------------------------------------------

    def machine(self) -> dict[str, Any]:
        here = run_environment()
        cpus, threads, load = here["cpus"], here["threads"], here["load_average"]
        told: dict[str, Any] = {
            "processor": here["device"],
            "torch_uses": here["isa"],
            "sixteen_bit": {name: flag for name, flag in host.host_flags().items() if flag},
            "cpus": cpus,
            "threads": threads,
            "load_average": load,
            "busy_processes": findings.busy_processes(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        }
        limits = {name: value for name, value in here["isa_limits"].items() if value}  # type: ignore[attr-defined]
        if limits:
            told["isa_limits"] = limits
            self.say(
                "note", f"{findings.assigned(limits)} keeps PyTorch from instructions that the processor may have."
            )
        if isinstance(cpus, int) and isinstance(threads, int) and threads > cpus:
            self.say(
                "slower",
                f"PyTorch computes on {threads} threads and may use {cpus} processors: call "
                f"torch.set_num_threads({cpus}), or set OMP_NUM_THREADS={cpus}.",
            )
        if told["busy_processes"]:
            names = ", ".join(told["busy_processes"])
            self.say("note", f"Other processes are busy ({names}): calls take longer, and times say less.")
        elif isinstance(load, float) and isinstance(cpus, int) and load > cpus + 0.5:
            self.say("note", f"The load is {load:.1f} on {cpus} processors: calls take longer, and times say less.")
        return told

    def library(self) -> dict[str, Any]:
        if _library.available():
            names = {number: name for name, number in _library.ISAS.items()}
            library = _library.library()
            assert library is not None
            used, best = names[_library.isa()], names[library.cs_best_isa()]
            told = {"loaded": True, "path": findings.library_path(), "instruction_set": used, "processor_has": best}
            why = findings.why_in_python()
            told["cached_calls"] = "outside Python" if why is None else "in Python"
            if why is not None:
                self.say("note", f"Cached calls go through Python, 4 to 60 us each: {why}.")
            if used != best:
                self.say("note", f"The C kernels run for {used}, since PyTorch does, on a processor that has {best}.")
            return told
        why, todo = findings.why_no_library()
        self.say("slower", f"The C kernels are not loaded: {why}. {todo}")
        return {"loaded": False, "why_not": why}

    # ---- the model ----------------------------------------------------------------------------------------------

    def model(self, live: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the model, its calibration); `live` are the algorithms that run here."""
        from convselect.model.artifact import ArtifactError
        from convselect.model.inference import Predictor

        own = loaded.path_for_host()
        named = "CONVSELECT_ARTIFACT" in os.environ
        family = host.family_of_host(host.cpu_capability())
        told: dict[str, Any] = {"family": family, "usable": False, "path": str(own)}
        path = own
        if named:
            told["why"] = "CONVSELECT_ARTIFACT names it"
        elif os.path.exists(own):
            told["why"] = f"it is shipped for {family}"
        else:
            try:
                path = loaded.nearest_artifact()
            except ArtifactError as error:
                self.say("slower", f"There is no trained model at all ({error}): every automatic choice is native.")
                return {**told, "path": None, "why": str(error)}, {"path": None, "in_use": False}
            told |= {"path": str(path), "why": f"none is shipped for {family}; this is the nearest"}
        try:
            card = Predictor.load(path, host_flags=host.host_flags()).card
        except (ArtifactError, OSError) as error:
            todo = "Unset CONVSELECT_ARTIFACT, or name another file." if named else "Install convselect again."
            self.say("broken", f"The model {path} cannot be used: {error}; every automatic choice is native. {todo}")
            return {**told, "why_not": str(error)}, self._calibration(path, usable=False, foreign=False)
        calibration = self._calibration(path, usable=True, foreign=path != own)
        told |= {
            "usable": path == own or calibration["in_use"],
            "digest": loaded.digest(path),
            **findings.described(card),
        }
        self._compare(card, family, named, live)
        return told, calibration

    def _compare(self, card: Any, family: str, named: bool, live: Collection[str]) -> None:
        if named and card.family != family:
            self.say(
                "note",
                f"CONVSELECT_ARTIFACT is a model of {card.family} and this machine is {family}: `convselect calibrate` "
                f"fits it to what runs here.",
            )
        moved = findings.moved_revisions(card)
        if moved:
            changes = ", ".join(f"{name} (trained on r{then}, now r{now})" for name, (then, now) in moved.items())
            self.say(
                "slower",
                f"Algorithms have changed since the model was trained: {changes}. Its times for them are old: "
                "`convselect calibrate` corrects the worst, `convselect collect` and `convselect train` all of it.",
            )
        unknown = [a.name for a in ALL if a.automatic and a.name in live and a.name not in card.algorithm_names]
        if unknown and card.device == "cpu":
            self.say("note", f"The model does not know {', '.join(unknown)}: without timing they are never chosen.")

    def gpu_model(self) -> str | None:
        """What is used on this GPU, in words; None without a GPU."""
        from convselect.model.inference import artifact_path

        if not torch.cuda.is_available() or torch.version.hip is not None:
            return None
        path = artifact_path(host.family_of_cuda(torch.cuda.get_device_capability()))
        if path.exists():
            return str(path)
        self.say("note", f"No model is shipped for this GPU ({path.stem}): there, automatic choices are native.")
        return f"none for {path.stem}"

    def _calibration(self, artifact: Path, *, usable: bool, foreign: bool) -> dict[str, Any]:
        from convselect.model.artifact import ArtifactError

        try:
            path = loaded.calibration_path()
        except OSError as error:
            return {"path": None, "in_use": False, "why_not": str(error)}
        told: dict[str, Any] = {"path": str(path), "in_use": False}
        if not os.path.lexists(path):
            told["why_not"] = "there is none"
            if foreign:
                self.say(
                    "slower",
                    f"No model is shipped for this machine, so every automatic choice is native: `convselect "
                    f"calibrate` fits {artifact.stem}, the nearest, in half a minute.",
                )
            elif usable:
                self.say("note", "`convselect calibrate` fits the model to this very machine, in half a minute.")
            return told
        try:
            found = loaded.read_calibration(examined(path, named="CONVSELECT_CALIBRATION" in os.environ))
            told |= {"problems": found.problems, "artifact": found.artifact}
            why = None
            if found.fingerprint != cpu_fingerprint():
                why = "it is of another machine, or of another version of PyTorch"
            elif usable and (found.artifact, found.digest) != (artifact.stem, loaded.digest(artifact)):
                why = "it is of another model"
            elif not usable:
                why = "the model it is for cannot be used"
        except PermissionError as error:
            why = str(error)
            self.say("slower", f"The calibration is left out: {error}.")
        except (ArtifactError, OSError) as error:
            why = str(error)
            self.say("broken", f"The calibration {path} cannot be used: {error}. Run `convselect calibrate` again.")
        else:
            if why is not None and usable:
                self.say("slower", f"The calibration is left out: {why}. Run `convselect calibrate` again.")
        return {**told, "in_use": why is None, **({} if why is None else {"why_not": why})}

    # ---- settings -----------------------------------------------------------------------------------------------

    def variables(self) -> dict[str, str]:
        told = {}
        for name, value in sorted(os.environ.items()):
            if not name.startswith(PREFIX):
                continue
            if name in VARIABLES:
                told[name] = value
                continue
            near = difflib.get_close_matches(name[len(PREFIX) :], [known[len(PREFIX) :] for known in VARIABLES], 1, 0.6)
            meant = f" Do you mean {PREFIX}{near[0]} ({VARIABLES[PREFIX + near[0]]})?" if near else " Unset it."
            self.say("slower", f"Nothing reads the variable {name}.{meant}")
        wrong_log = log.why_wrong(os.environ.get("CONVSELECT_LOG", ""))
        if wrong_log is not None:
            self.say("slower", f"{wrong_log}: nothing is logged.")
        used = settings.defaults()
        if not used.chooses and used.policy not in BY_NAME:
            near = difflib.get_close_matches(used.policy, [*settings.CHOOSING, *BY_NAME], 1)
            meant = f" Do you mean {near[0]}?" if near else ""
            self.say("broken", f"The policy {used.policy} names no algorithm: every convolution raises.{meant}")
        elif not used.chooses:
            self.say("slower", f"The policy is {used.policy}: nothing is chosen. With CONVSELECT_POLICY=auto it is.")
        for name in used.disabled:
            if not any(is_disabled(known, (name,)) for known in BY_NAME):
                self.say("slower", f"CONVSELECT_DISABLE names {name}, and no algorithm is called that.")
        return told

    def store(self) -> dict[str, Any]:
        from convselect.store import process

        told = process.status()
        if not told.get("enabled"):
            why = told.get("why_off") or "nobody knows why"
            level = "note" if os.environ.get("CONVSELECT_STORE") == "off" else "slower"
            self.say(
                level, f"The store is off ({why}): every process finds out for itself. CONVSELECT_STORE=file names one."
            )
        elif not told.get("healthy"):
            self.say(
                "broken",
                f"The store {told.get('path')} is not healthy: `convselect store verify` says what is wrong; move it "
                "away to begin a new one.",
            )
        return told

    # ---- running something --------------------------------------------------------------------------------------

    def algorithms(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """(what is live, the self-test)."""
        told: dict[str, dict[str, Any]] = {}
        checked, wrong, worst = 0, dict[str, str](), dict[str, float]()
        watch = timing.Deadline(None)
        cases: dict[ConvProblem, Case] = {}
        with torch.no_grad(), measure.threads(1):
            for algorithm in ALL:
                probe, why = findings.probe_for(algorithm)
                told[algorithm.name] = {"revision": algorithm.revision, "live": probe is not None, "why_not": why}
                if probe is None:
                    continue
                for direction in Direction:
                    problem = probe.with_direction(direction)
                    if algorithm.why_not(problem) is not None or not algorithm.ready(problem):
                        continue
                    if problem not in cases:
                        cases[problem] = case(problem)
                    error, what = tried(algorithm, problem, cases[problem])
                    checked += 1
                    worst[problem.dtype] = max(worst.get(problem.dtype, 0.0), error)
                    if what is not None:
                        wrong[f"{algorithm.name} {direction}"] = what
        if wrong:
            names = ",".join(sorted({label.split()[0] for label in wrong}))
            self.say(
                "broken",
                f"Wrong results: {'; '.join(f'{label}: {what}' for label, what in wrong.items())}. Set "
                f"CONVSELECT_DISABLE={names}, and report it with `convselect doctor --json`.",
            )
        return told, {"checked": checked, "wrong": wrong, "worst_error": worst, "seconds": watch.elapsed_s}


def examine() -> Report:
    """Look at everything; takes a second or two. Raises nothing of its own: what fails is advice."""
    patient = _Examination()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        variables = patient.variables()
        algorithms, self_test = patient.algorithms()
        library = patient.library()
        model, calibration = patient.model([name for name, found in algorithms.items() if found["live"]])
        gpu = patient.gpu_model()
        model |= {} if gpu is None else {"gpu": gpu}
        store = patient.store()
        machine = patient.machine()
    for warning in said:
        if str(warning.message).startswith("convselect: "):
            patient.say("slower", str(warning.message).removeprefix("convselect: "))
    if not model["usable"] and not any(advice.level != "note" and "native" in advice.text for advice in patient.advice):
        patient.say("slower", "No model is in use: every automatic choice is native.")
    order = sorted(patient.advice, key=lambda advice: -LEVELS.index(advice.level))
    return Report(
        findings.versions(),
        machine,
        library,
        algorithms,
        model,
        calibration,
        variables,
        store,
        self_test,
        tuple(order),
    )


__all__ = ["LEVELS", "VARIABLES", "Advice", "Report", "examine"]
