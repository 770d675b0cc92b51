"""What the doctor looks at, piece by piece: versions, other processes, the C kernels, the model's card, an algorithm's
small convolution. Nothing here judges."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from convselect.base.problem import ConvProblem
from convselect.kernels import _library
from convselect.kernels._contract import Algorithm
from convselect.kernels.pool import ALL
from convselect.machine.environment import run_environment
from convselect.measure import plan_cost
from convselect.measure.self_test import PROBES
from convselect.store import extension

BUSY_PERCENT = 40.0
"""Share of one processor from which another process is said to be busy."""
LOOK_S = 0.15
"""How long other processes are looked at."""


def versions() -> dict[str, Any]:
    here = run_environment()
    told: dict[str, Any] = {"convselect": here["convselect"], "from": str(Path(__file__).parents[1])}
    told |= {"python": platform.python_version(), "torch": torch.__version__, "oneDNN": here["onednn"]}
    told |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    told["cudnn"] = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    for name in ("numpy", "triton", "platformdirs", "rich", "typer", "psutil"):
        try:
            told[name] = importlib.metadata.version(name)  # without importing it
        except importlib.metadata.PackageNotFoundError:
            told[name] = None
    return told


def busy_processes() -> list[str]:
    """Other processes that take a good part of a processor just now, busiest first."""
    import psutil

    found = []
    # The first look at each only starts its clock.
    watched = [process for process in psutil.process_iter(["name"]) if process.pid != os.getpid()]
    for process in watched:
        _share_of(process)
    psutil.cpu_percent(interval=LOOK_S)
    for process in watched:
        share = _share_of(process)
        if share >= BUSY_PERCENT:
            found.append((share, f"{process.info['name']} {process.pid} at {share:.0f} %"))
    return [text for _, text in sorted(found, reverse=True)[:5]]


def _share_of(process: Any) -> float:
    import psutil

    try:
        return float(process.cpu_percent())
    except psutil.Error:
        return 0.0


def assigned(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def library_path() -> str:
    return os.environ.get("CONVSELECT_LIBRARY") or str(Path(_library.__file__).with_name("_csrc.so"))


def why_no_library() -> tuple[str, str]:
    """(why, what to do about it)."""
    import ctypes

    if os.environ.get("CONVSELECT_NO_NATIVE", "").strip() not in ("", "0"):
        return f"CONVSELECT_NO_NATIVE={os.environ['CONVSELECT_NO_NATIVE']} switches them off", "Unset it to have them."
    path = library_path()
    again = "Install convselect again with a C compiler on the machine."
    if not os.path.exists(path):
        return f"there is no {path}, so they were not built", again
    try:
        abi = ctypes.CDLL(path).cs_abi()
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded: {error}", again
    return f"{path} is of another version ({abi}, not {_library.ABI})", again


def why_in_python() -> str | None:
    """Why cached calls go through Python, and what to do; None if they do not."""
    if plan_cost.outside_python:
        return None
    if extension.is_off():
        return "CONVSELECT_NO_EXTENSION is set"
    if extension.found() is not None:
        return "what was compiled for them could not be loaded; `convselect build` compiles it again"
    has = "" if extension.compiler() else ", once there is a C++ compiler"
    return f"nothing is compiled for torch {torch.__version__}; `convselect build` does that in half a minute{has}"


def moved_revisions(card: Any) -> dict[str, tuple[int, int]]:
    """Algorithm -> (revision that was measured, revision now), if they differ."""
    now = {algorithm.name: algorithm.revision for algorithm in ALL}
    return {name: (then, now[name]) for name, then in card.revisions.items() if name in now and now[name] != then}


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def described(card: Any) -> dict[str, Any]:
    held_out = _part(card.figures, "held_out")
    overall = _part(held_out, "overall")
    wanted = (
        "fraction_of_oracle_mean",
        "fraction_of_oracle_p10",
        "top1",
        "speedup_geomean",
        "slower_than_native_share",
    )
    return {
        "trained_for": card.family,
        "trained_on": {
            "device": card.data.get("device"),
            "problems": card.data.get("problems"),
            "times": card.data.get("times"),
            "dtypes": list(card.dtypes),
            "threads": list(card.threads),
            "torch": card.versions.get("torch"),
        },
        "held_out": {"split": held_out.get("split"), **{name: overall.get(name) for name in wanted}},
        "margin": card.margin,
        "features_version": card.features_version,  # loading has compared it with this version's
        "moved_revisions": {name: f"{then} -> {now}" for name, (then, now) in moved_revisions(card).items()},
    }


def probe_for(algorithm: Algorithm) -> tuple[ConvProblem | None, str | None]:
    """(a probe that this algorithm does here, None), or (None, why there is none)."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    here = [device for device in devices if device in algorithm.devices]
    if not here:
        return None, f"{algorithm.name} needs {' or '.join(sorted(algorithm.devices))}; this machine has none."
    why = None
    for device in here:
        for probe in PROBES:
            problem = probe._replace(device=device)
            reason = algorithm.why_not(problem) or algorithm.same_as_native(problem)
            if reason is None:
                return problem, None
            why = why or reason
    return None, why
