"""One line per choice, with the command that reproduces it: the standard logger "convselect".

    CONVSELECT_LOG=info       a line per choice, and per trial that begins or has ended, to the standard error
    CONVSELECT_LOG=debug      and why each other algorithm was not taken
    CONVSELECT_LOG=run.log    as info, appended to a file whose name ends in .log

Without the variable nothing is installed, and the logger is a library's as usual: a program that has configured logging
gets these lines by its own levels and handlers. Nothing here is on the path of a call whose choice is remembered.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys

from convselect.base.problem import ConvProblem
from convselect.base.settings import Settings
from convselect.base.warnings import warn_once
from convselect.choice.choose import NATIVE, Choice, Prediction
from convselect.choice.outcome import Outcome
from convselect.choice.reasons import reasons, rounds, times, with_spread
from convselect.eager.live_trial import LiveTrial
from convselect.eager.standing import gains, told

LEVELS = {"info": logging.INFO, "1": logging.INFO, "debug": logging.DEBUG}
OFF = ("", "0", "off")
logger = logging.getLogger("convselect")
INFO = logging.INFO


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """To the standard error of the moment, unless the program's own handlers are shown the record anyway."""

    def emit(self, record: logging.LogRecord) -> None:
        place: logging.Logger | None = logger
        while place is not None:
            if any(handler is not self and handler.level <= record.levelno for handler in place.handlers):
                return
            place = place.parent if place.propagate else None
        self.stream = sys.stderr
        super().emit(record)


def why_wrong(value: str) -> str | None:
    """One sentence if this is no value of CONVSELECT_LOG, else None."""
    if value.lower() in LEVELS or value.lower() in OFF or value.endswith(".log"):
        return None
    return f"CONVSELECT_LOG={value} is neither info, debug nor the name of a file that ends in .log"


def install(value: str) -> logging.Handler | None:
    """Do as this value of CONVSELECT_LOG says; returns the handler, None if none was wanted or could be had (then one
    warning has said why)."""
    wrong = why_wrong(value)
    if wrong is not None:
        warn_once("log", f"convselect: {wrong}; nothing is logged.")
        return None
    if value.lower() in OFF:
        return None
    handler: logging.Handler
    if value.lower() in LEVELS:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("convselect: %(message)s"))
    else:
        try:
            path = os.path.expanduser(value)
            if os.path.exists(path) and not os.path.isfile(path):  # to open a pipe is to wait for a reader
                raise OSError(f"{path} is not a regular file")
            handler = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            warn_once("log", f"convselect: nothing is logged: {error}")
            return None
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(LEVELS.get(value.lower(), logging.INFO))
    return handler


# ---- what is said -----------------------------------------------------------------------------------------------


def chosen(problem: ConvProblem, found: Choice | LiveTrial, settings: Settings, prediction: Prediction | None) -> None:
    """A choice was made under these settings, or a trial begins that is to make it, by or beside this prediction. Ask
    `logger.isEnabledFor(INFO)` first."""
    choice, trial = told(found)
    held = found.trial if isinstance(found, LiveTrial) else None
    command = reproduce(problem, settings)
    if trial is not None:
        names = ", ".join(f"{name} (predicted {times(gain)})" for name, gain in trial.predicted.items())
        logger.info("trial of %s: %s", names, command)
    else:
        params = "".join(f" {name}={value}" for name, value in (choice.params or {}).items())
        logger.info("%s%s from %s%s: %s", choice.algorithm, params, choice.source, gains(choice), command)
    if logger.isEnabledFor(logging.DEBUG):
        for name, reason in reasons(problem, choice, settings, prediction, held).items():
            if trial is None or name not in (NATIVE, *trial.candidates):
                logger.debug("  not %s: %s", name, reason)


def settled(problem: ConvProblem, choice: Choice, outcome: Outcome) -> None:
    """A trial on real calls has ended, or an audit has given its choice up."""
    if logger.isEnabledFor(logging.INFO):
        what = f"{choice.algorithm} settled after {rounds(outcome.rounds)}{gains(choice)}"
        logger.info("%s (%s): %s", what, outcome.reason, reproduce(problem))
        for name, one in outcome.measured.items():
            if name != choice.algorithm:
                found = with_spread(one.gain, one.spread)
                logger.debug("  not %s: measured %s in %s", name, found, rounds(one.rounds))


def reproduce(problem: ConvProblem, settings: Settings | None = None) -> str:
    """The shell command that checks and times this problem, under the same settings if they are given."""
    parts = [] if settings is None else [f"{name}={shlex.quote(value)}" for name, value in _variables(settings).items()]
    command = " ".join([*parts, f'convselect bench "{problem}"'])
    # Bytes of the environment that are no text: a log in UTF-8 could not be written with them.
    return command.encode("utf-8", "backslashreplace").decode()


def _variables(settings: Settings) -> dict[str, str]:
    """The environment variables that give these settings, if they are not the defaults."""
    usual = Settings()
    workspace = f"{settings.workspace_bytes}"
    if settings.workspace_share != usual.workspace_share:
        workspace += f",{settings.workspace_share * 100:g}%"
    written = {
        "CONVSELECT_POLICY": (settings.policy, usual.policy),
        "CONVSELECT_PRECISION": (settings.precision, usual.precision),
        "CONVSELECT_WORKSPACE": (workspace, f"{usual.workspace_bytes}"),
        "CONVSELECT_BATCH_INVARIANT": (f"{settings.batch_invariant:d}", f"{usual.batch_invariant:d}"),
        "CONVSELECT_DISABLE": (",".join(settings.disabled), ""),
        "CONVSELECT_AUDIT": (f"{settings.audit}", f"{usual.audit}"),
    }
    return {name: value for name, (value, default) in written.items() if value != default}


if "CONVSELECT_LOG" in os.environ:
    install(os.environ["CONVSELECT_LOG"])
