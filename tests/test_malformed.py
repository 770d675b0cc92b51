"""Nothing that a file, a row, a variable or an argument holds makes a convolution raise: it is loaded as it is meant,
or refused in one sentence. `malformed.py` has the mutations."""

from __future__ import annotations

import random
import warnings

import malformed
import pytest
import torch

import convselect
from convselect.base import lru
from convselect.store import process

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
