"""Nothing that a file, a row, a variable or an argument holds makes a convolution raise: it is loaded as it is meant,
or refused in one sentence. `malformed.py` has the mutations."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import warnings

import malformed
import pytest
import torch

import convselect
from convselect.base import lru
from convselect.eager import log
from convselect.store import find_db, process
from convselect.store.store import is_store

QUICK, MANY = 40, 2000


@pytest.fixture(autouse=True)
def _own_process(monkeypatch):
    for name in ("CONVSELECT_STORE", "CONVSELECT_SYSTEM_STORE"):
        monkeypatch.delenv(name, raising=False)
    convselect.set_store("off")
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convselect.set_store("off")
    process._process = None
    convselect.unload()
    lru.clear()


@pytest.mark.parametrize("count", [QUICK, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("kind", malformed.KINDS)
def test_what_is_malformed_is_refused_in_one_sentence(kind, count, tmp_path):
    """The seeds differ, so that the many do not begin with the few."""
    counts, wrong = malformed.run(kind, tmp_path, count, seed=count)
    assert wrong == [], wrong[:5]
    assert sum(counts.values()) == count
    assert counts["loaded"] > 0
    # MIOpen's lines and those of a log are passed over one by one: the file is never refused.
    assert counts["refused"] > 0 or kind in ("find_dbs", "program_logs")


def test_an_attempt_tells_errors_and_warnings_apart():
    def fails(error):
        raise error

    def warns(times):
        for i in range(times):
            warnings.warn(str(i), convselect.ConvselectWarning, stacklevel=1)

    assert malformed.attempt(lambda: None) == "loaded"
    assert malformed.attempt(lambda: warns(1)) == "refused"
    assert malformed.attempt(lambda: warns(2)).startswith("2 warnings")
    assert malformed.attempt(lambda: warnings.warn("x", RuntimeWarning, stacklevel=1)).startswith("warned otherwise")
    assert malformed.attempt(lambda: fails(ValueError("a long sentence"))).startswith("raised")
    assert malformed.attempt(lambda: fails(ValueError("a long sentence")), sentences=True) == "refused"
    assert malformed.attempt(lambda: fails(ValueError("")), sentences=True).startswith("says nothing")
    assert malformed.attempt(lambda: fails(TypeError("a long sentence")), sentences=True).startswith("raised")


def test_mutations_change_things_and_are_the_same_every_time():
    value = {"a": [1, 2, {"b": None}], "c": "x"}
    drawn = [malformed.as_json(malformed.tree(value, random.Random(i))) for i in range(100)]
    assert drawn == [malformed.as_json(malformed.tree(value, random.Random(i))) for i in range(100)]
    assert len(set(drawn)) > 60
    assert value == {"a": [1, 2, {"b": None}], "c": "x"}
    assert len({malformed.raw(b"some bytes", random.Random(i)) for i in range(100)}) > 60


def test_what_is_right_is_used(tmp_path):
    """Or else what is refused would show nothing: the very same store, model and calibration without a mutation."""
    convselect.set_store("off")
    malformed._store(tmp_path / "s.sqlite")
    convselect.set_store(tmp_path / "s.sqlite")
    assert malformed.attempt(malformed.used) == "loaded"
    (row,) = convselect.explain_problem(malformed.PROBLEM)
    assert (row.algorithm, row.source, row.params) == ("im2col_gemm", "store", {"column_bytes": 2**15})
    assert torch.equal(malformed._RIGHT, torch.conv2d(malformed._X, malformed._W, padding=1))


def test_without_msgspec_nothing_is_read_and_nothing_raises(tmp_path):
    """A broken installation: one warning for the store, one for the model, and native."""
    malformed._store(tmp_path / "s.sqlite")
    code = """
        import sys, warnings
        sys.modules["msgspec"] = None
        import torch, convselect
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for size in (20, 20, 21):
                x = torch.ones(1, 8, size, size)
                assert torch.equal(
                    convselect.conv2d(x, torch.ones(8, 8, 3, 3), padding=1),
                    torch.conv2d(x, torch.ones(8, 8, 3, 3), padding=1),
                )
            (row,) = convselect.explain_problem(convselect.ConvProblem.parse("forward N=1 C=8 H=9 W=9 K=8 R=3 S=3"))
        said = [str(one.message) for one in caught if issubclass(one.category, convselect.ConvselectWarning)]
        assert len(said) == 2 and all("msgspec" in one for one in said), said
        assert (row.algorithm, row.source) == ("native", "fallback"), row
    """
    environment = {
        **os.environ, "CONVSELECT_STORE": str(tmp_path / "s.sqlite"), "CONVSELECT_POLICY": "verify",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("ending", ["_ciA" * 100 + "!", "_ci" * 160, "-" * 400, "1" * 480])
def test_a_long_key_of_a_find_db_is_passed_over_at_once(ending):
    found = find_db.parse([f"64-56-56-3x3-128-28-28-8-1x1-2x2-1x1-0-NCHW-FP32-F{ending}=A:1,0,a"] * 50, {})
    assert not found.rows
    assert found.skipped.total() == 50


def test_what_a_pipe_would_hold_up_is_refused(tmp_path, monkeypatch):
    for name in ("x.log", "x.csv"):
        os.mkfifo(tmp_path / name)
    assert malformed.attempt(lambda: log.install(str(tmp_path / "x.log"))) == "refused"
    malformed.commands(("import", tmp_path / "x.csv", "--store", tmp_path / "s"), ("list", tmp_path / "x.csv"))
    with pytest.raises(OSError, match="not a regular file"):
        is_store(tmp_path / "x.csv")
