"""The log: lines that name what was chosen and how to reproduce it, only if logging is enabled."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import replace

import fresh
import pytest
from fake_model import use_fake
from race import racing

from convselect.base import lru, settings
from convselect.base.problem import conv_problem
from convselect.base.settings import Settings
from convselect.choice.choose import Choice
from convselect.choice.outcome import Measured, Outcome
from convselect.doctor import bench
from convselect.eager import log, resolve
from convselect.kernels.pool import ALL

PROBLEM = conv_problem(1, 8, 12, 12, 8, 3, 3, padding=1, threads=2)
CHOOSE = """
    import torch, convselect

    with torch.no_grad():
        for _ in range(3):
            convselect.conv2d(torch.randn(1, 32, 28, 28), torch.randn(32, 32, 3, 3), padding=1)
"""


def run(code: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CONVSELECT_")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "CONVSELECT_STORE": "off", **variables}
    return fresh.run(["-c", textwrap.dedent(code)], env=environment, check=True)


def said(caplog, level):
    lru.clear()
    with caplog.at_level(level, "convselect"):
        caplog.clear()
        resolve.choice_for(PROBLEM, settings.current())
        resolve.choice_for(PROBLEM, settings.current())  # remembered: nothing to say
    return [record.getMessage() for record in caplog.records if record.name == "convselect"]


def test_a_line_names_the_choice_and_its_command_runs(monkeypatch, caplog):
    use_fake(monkeypatch, "winograd4", gain=3.0)
    (line,) = said(caplog, "INFO")
    assert line.startswith("winograd4 from model, predicted 3.00x: ")
    command = shlex.split(line.partition(": ")[2])
    if command[0] == "CONVSELECT_POLICY=auto":  # these tests' own, and not the default
        command.pop(0)
    assert command[:2] == ["convselect", "bench"]
    problem = bench.parse(command[2])
    assert problem == PROBLEM
    assert "winograd4" in {row.algorithm for row in bench.bench(problem, seconds=0.01).rows}


def test_settings_that_are_not_the_defaults_are_part_of_the_command(monkeypatch):
    with settings.use(
        "native", precision="fast", workspace_bytes=2**20, workspace_share=0.25, disable="fft,wino"
    ) as used:
        words = shlex.split(log.reproduce(PROBLEM, used))
    variables = dict(word.split("=", 1) for word in words[: words.index("convselect")])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert settings._from_environment() is used
    assert "CONVSELECT" not in log.reproduce(PROBLEM, Settings())


def test_debug_says_why_the_others_were_not_taken(monkeypatch, caplog):
    use_fake(monkeypatch, "winograd4")
    lines = said(caplog, "DEBUG")
    assert {line.split()[1].rstrip(":") for line in lines if line.startswith("  not ")} == {
        algorithm.name for algorithm in ALL
    } - {"winograd4"}
    assert not any(line.startswith("  not ") for line in said(caplog, "INFO"))


MEASURED = {"fft": Measured(12, 1.5, 1.4, 1.6), "direct": Measured(4, 0.9, 0.85, 0.95)}


def test_a_settled_trial_is_a_line(caplog):
    won = Choice("fft", "verify", None, 2.5, measured=MEASURED["fft"])
    with caplog.at_level("INFO", "convselect"):
        log.settled(PROBLEM, won, Outcome("fft", 1.5, 12, "clearly best", False, MEASURED))
        log.settled(PROBLEM, replace(won, measured=None), Outcome("fft", None, 1, "its cost", True, {}))
        log.settled(PROBLEM, Choice("native", "verify", None, 1.0), Outcome("native", 1.0, 4, "lost", False, MEASURED))
    lines = [record.getMessage() for record in caplog.records]
    command = f'convselect bench "{PROBLEM}"'
    assert lines == [
        f"fft settled after 12 rounds, measured 1.50x (1.40 to 1.60), predicted 2.50x (clearly best): {command}",
        f"fft settled after 1 round, predicted 2.50x (its cost): {command}",
        f"native settled after 4 rounds (lost): {command}",
    ]
    caplog.clear()
    with caplog.at_level("DEBUG", "convselect"):
        log.settled(PROBLEM, won, Outcome("fft", 1.5, 12, "clearly best", False, MEASURED))
    assert caplog.records[1].getMessage() == "  not direct: measured 0.90x (0.85 to 0.95) in 4 rounds"


def test_a_choice_of_the_store_has_a_measured_gain(caplog):
    stored = Choice("fft", "store", measured=Measured(9, 1.5))
    with caplog.at_level("INFO", "convselect"):
        log.chosen(PROBLEM, stored, Settings(), None)
    assert caplog.messages == [f'fft from store, measured 1.50x: convselect bench "{PROBLEM}"']


def test_a_trial_that_begins_is_no_choice(caplog):
    with racing():
        lines = said(caplog, "INFO")
        assert len(lines) == 1
        assert lines[0].startswith("trial of im2col_gemm (predicted 2.40x), winograd4 (predicted 2.00x): convselect ")
        lines = said(caplog, "DEBUG")
    assert not any(line.startswith(("  not winograd4:", "  not im2col_gemm:", "  not native:")) for line in lines)
    assert any(line.startswith("  not fft:") for line in lines)


def test_nothing_is_made_where_nobody_listens(monkeypatch, caplog):
    caplog.set_level("WARNING", logger=log.logger.name)  # whatever libraries have set for all loggers
    monkeypatch.setattr(log, "reproduce", lambda *_: pytest.fail("a line was made"))
    lru.clear()
    resolve.choice_for(PROBLEM, settings.current())
    log.settled(PROBLEM, Choice("fft", "verify"), Outcome("fft", 1.5, 12, "clearly best", False, MEASURED))


def test_the_variable_installs_one_handler(tmp_path):
    line = re.compile(r'^convselect: (\w+ from \w+|trial of \w+).*: convselect bench "forward N=1 C=32 .*"$')
    assert run(CHOOSE).stderr == ""
    (told,) = run(CHOOSE, CONVSELECT_LOG="info").stderr.splitlines()  # three calls, one choice
    assert line.match(told)
    assert "  not reference: reference runs only when asked for by name." in run(CHOOSE, CONVSELECT_LOG="debug").stderr
    path = tmp_path / "run.log"
    assert run(CHOOSE, CONVSELECT_LOG=str(path)).stderr == ""
    run(CHOOSE, CONVSELECT_LOG=str(path))
    assert len(path.read_text().splitlines()) == 2


def test_a_program_that_logs_gets_each_line_once():
    own = "import logging; logging.basicConfig(level=logging.{}, format='own %(name)s %(message)s')\n"
    for level, variables in (("WARNING", {"CONVSELECT_LOG": "info"}), ("INFO", {})):
        (told,) = run(own.format(level) + textwrap.dedent(CHOOSE), **variables).stderr.splitlines()
        assert told.startswith("own convselect ")
    # A handler that lets nothing of the kind through is none.
    deaf = "import logging; h = logging.StreamHandler(); h.setLevel(logging.ERROR); logging.root.addHandler(h)\n"
    (told,) = run(deaf + textwrap.dedent(CHOOSE), CONVSELECT_LOG="info").stderr.splitlines()
    assert told.startswith("convselect: ")


def test_what_cannot_be_done_is_one_warning(tmp_path):
    before = list(log.logger.handlers)
    for value in ("loud", str(tmp_path / "missing" / "run.log")):
        told = run("import convselect", CONVSELECT_LOG=value).stderr
        assert told.count("ConvselectWarning") == 1
        assert "nothing is logged" in told
    assert log.install("off") is None
    assert log.logger.handlers == before


def test_a_command_can_be_written_whatever_the_environment_holds():
    problem = conv_problem(1, 1, 4, 4, 1, 1, 1)
    command = log.reproduce(problem, Settings(disabled=("\udcff",)))
    assert b"\\udcff" in command.encode()
