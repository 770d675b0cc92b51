"""Nothing that a file, a row, a variable or an argument holds makes a convolution raise: it is loaded as it is meant,
or refused in one sentence. `malformed.py` has the mutations."""

from __future__ import annotations

import math
import os
import random
import sqlite3
import sys
import textwrap
import warnings

import fresh
import malformed
import numpy as np
import pytest
import torch

import convselect
from convselect.base import lru, settings
from convselect.base import warnings as _warnings
from convselect.eager import log
from convselect.model import inference
from convselect.model.artifact import ArtifactError, Calibration, Card
from convselect.store import exchange, find_db, process
from convselect.store.store import Store, is_store
from convselect.tune import records

QUICK, MANY = 40, 500


@pytest.fixture(autouse=True)
def _own_process(monkeypatch):
    for name in ("CONVSELECT_STORE", "CONVSELECT_SYSTEM_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_warnings, "_given", set())
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
    assert [ascii(one) for one in wrong[:5]] == []
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
    done = fresh.run(["-c", textwrap.dedent(code)], env=environment)
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


# ---- what once raised, one by one -------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    malformed._store(tmp_path / "s.sqlite")
    return tmp_path / "s.sqlite"


def forged(path, column, value):
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(f"update choice set {column} = ?", (value,))
    malformed._right(db, "choice")
    db.close()
    convselect.set_store(path)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("params", text) for text in ("5", "true", "NaN", "[]", '{"column_bytes": 32768.0}', "", DEEP)),
        ("params", '{"column_bytes": true}'), ("params", '{"column_bytes": null}'), ("params", b"{}"),
        ("gain", "fast"), ("gain", math.inf), ("gain", -1.0), ("samples", 0.5), ("samples", 2**62), ("source", b"x"),
        ("used", 5), ("used", ""), ("made", "yesterday"),
    ],
)  # fmt: skip
def test_a_choice_that_no_version_writes_is_left_out_with_one_warning(column, value, store):
    forged(store, column, value)
    assert malformed.attempt(malformed.used) == "refused"
    (row,) = convselect.explain_problem(malformed.PROBLEM)
    assert row.source != "store"
    convselect.set_store("off")
    assert not list(store.parent.glob("*.damaged*"))  # it is no damage: another version may know better
    malformed.commands(("verify", store), ("list", store), ("show", store))


def test_the_warning_says_which_choice_and_why(store):
    forged(store, "gain", "fast")
    with pytest.warns(convselect.ConvselectWarning, match=r"choice for forward N=1 .* `gain`.*convselect store verify"):
        assert process.look_up(malformed.PROBLEM, settings.current().budgets) is None
    convselect.set_store("off")
    with Store(store, read_only=True) as opened:
        assert any("`gain`" in fault for fault in exchange.verify(opened)["rows"])


WITHIN = '{"format": "convselect choices", "version": 1, "environments": [{"fingerprint": "a", "description": {"x": '


@pytest.mark.parametrize("text", [WITHIN + DEEP, DEEP, '{"format": ' + DEEP, "{" + '"a":{' * 50_000])
def test_lists_in_lists_are_an_error_of_their_own_kind(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    (tmp_path / "x.programs.jsonl").write_text(text + "\n")
    with Store(tmp_path / "s.sqlite") as opened, pytest.raises(ValueError, match="not a file of choices"):
        exchange.import_choices(opened, tmp_path / "x.json")
    with pytest.raises(ValueError, match="not settings"):
        settings.parse(text)
    assert records.Log(tmp_path / "x.programs.jsonl", "mark", {}).read() == {}
    for kind in (Card, Calibration):
        with pytest.raises(ArtifactError):
            kind.from_json(text)


def test_a_model_of_huge_numbers_is_refused_or_its_predictions_are():
    card = Card("cpu-test", malformed._NAMES, 4.0, 0.0, ("float32",))
    made = malformed._arrays(random.Random(0))
    inference.Predictor(card, made)
    with pytest.raises(ArtifactError, match="too large"):
        inference.Predictor(card, {name: array * np.float32(1e8) for name, array in made.items()})
    wild = inference.Predictor(card, {**made, "head": made["head"] * np.float32(60_000)})
    with pytest.warns(convselect.ConvselectWarning, match="make no sense"):
        assert wild.predict(malformed.PROBLEM) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKSPACE", "1e400"), ("WORKSPACE", "1e99GiB"), ("WORKSPACE", "1.2.3"), ("WORKSPACE", "101%"),
        ("AUDIT", "often"), ("AUDIT", "-1"), ("BATCH_INVARIANT", "maybe"), ("PRECISION", "exactly"),
    ],
)  # fmt: skip
def test_a_variable_that_cannot_be_had_is_named(name, value, monkeypatch):
    monkeypatch.setenv(f"CONVSELECT_{name}", value)
    if value == "1e99GiB":  # more than there is anywhere: no bound
        assert settings._from_environment().workspace_bytes == 2**63 - 1
        return
    with pytest.raises(ValueError, match=f"CONVSELECT_{name}='{value}': .*"):
        settings._from_environment()


@pytest.mark.parametrize("value", ["many", "-1", "1e3", "9" * 5000])
def test_the_size_of_the_cache_is_a_whole_number(value, monkeypatch):
    monkeypatch.setenv("CONVSELECT_CACHE_ENTRIES", value)
    with pytest.raises(ValueError, match="CONVSELECT_CACHE_ENTRIES="):
        settings._cache_entries()
