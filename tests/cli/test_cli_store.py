"""`convselect store ...`: every command, on a path and on the user's own store, for people and as JSON."""

from __future__ import annotations

import json

import pytest
from stores import HERE, LINES, P1, A, B, numbered, rows_of
from typer.testing import CliRunner

import convselect
from convselect.cli.store import app
from convselect.kernels.pool import BY_NAME
from convselect.store import process
from convselect.store.store import Store

GOOD = A._replace(algorithm="im2col_gemm", revision=BY_NAME["im2col_gemm"].revision)


def run(*arguments, status=0):
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The path of the user's store, with two choices and a measurement in it."""
    path = tmp_path / "own" / "store.sqlite"
    monkeypatch.setenv("CONVSELECT_STORE", str(path))
    convselect.set_store(None)
    path.parent.mkdir()
    with Store(path) as store:
        here = store.environment(HERE)
        store.put_choices(here, [GOOD, B._replace(revision=BY_NAME["native"].revision)])
        store.add(here, rows_of(P1, "native"), pool="p")
    yield path
    monkeypatch.undo()
    convselect.set_store(None)


def test_list(own, tmp_path):
    whole = json.loads(run("list", "--json"))
    assert whole["path"] == str(own)
    (one,) = whole["environments"]
    assert (one["number"], one["choices"], one["measurements"]) == (1, 2, 1)
    assert one["description"]["device"] == "a processor"
    assert "a processor" in run("list", own)
    assert json.loads(run("list", own, "--json")) == whole
    assert "there is no" in run("list", tmp_path / "none", status=2)


def test_show_one_problem_or_environment(own):
    (one,) = json.loads(run("show", "--problem", P1, "--json"))
    assert [choice["algorithm"] for choice in one["choices"]] == ["im2col_gemm"]
    assert one["choices"][0]["params"] == A.params
    assert [row["min_us"] for row in one["measurements"]] == [10]
    assert len(json.loads(run("show", "--environment", 1, "--json"))[0]["choices"]) == 2
    assert json.loads(run("show", "--problem", numbered(30), "--json")) == []
    text = run("show", "--problem", P1)
    assert "im2col_gemm" in text
    assert "a processor" in text
    assert "environment 7" in run("show", "--environment", 7, status=2)
    assert "convselect store show" in run("show", "--problem", "sideways", status=2)


def test_export_and_import(own, tmp_path):
    for name, more in (("c.json", ()), ("c.csv", ("--choices",))):
        assert json.loads(run("export", tmp_path / name, *more, "--json"))["choices"] == 2
        into = tmp_path / f"{name}.sqlite"
        assert json.loads(run("import", tmp_path / name, "--store", into, "--json"))[0]["choices"] == 2
        assert json.loads(run("import", tmp_path / name, "--store", into, "--json"))[0]["choices_kept"] == 2
        assert json.loads(run("list", into, "--json"))["environments"][0]["choices"] == 2
    assert "1 measurements" in run("export", own, tmp_path / "m.csv")
    assert "1 measurements" in run("import", tmp_path / "m.csv", "--store", tmp_path / "m.sqlite")
    assert "no choices" in run("export", tmp_path / "m.sqlite", tmp_path / "x.json", status=2)
    assert "merge" in run("import", own, "--store", tmp_path / "m.sqlite", status=2)
    assert "name a file" in run("import", status=2)
    run("import", tmp_path / "none.json", "--store", tmp_path / "never.sqlite", status=2)
    assert not (tmp_path / "never.sqlite").exists()


def test_import_of_a_find_db(own, tmp_path, monkeypatch):
    path = tmp_path / "gfx90a68.HIP.fdb.txt"
    path.write_text(LINES)
    (told,) = json.loads(run("import", "--find-db", path, "--json"))
    assert (told["problems"], told["measurements"]) == (4, 5)
    assert told["environment"] == "gfx90a, 104 compute units"
    assert told["skipped"]["three spatial dimensions"] == 1
    assert "left out 1: three spatial dimensions" in run("import", "--find-db", path)
    counts = [one["measurements"] for one in json.loads(run("list", "--json"))["environments"]]
    assert counts == [1, 5]  # the second time replaced the first
    monkeypatch.setattr(process, "ROWS", 3)
    assert "keeps 3 rows of these 8" in run("import", "--find-db", path)
    assert "keeps" not in run("import", "--find-db", path, "--store", tmp_path / "all.sqlite")
    path.rename(tmp_path / "x.txt")
    assert "which GPU" in run("import", "--find-db", tmp_path / "x.txt", status=2)


def test_merge(own, tmp_path):
    other = tmp_path / "other.sqlite"
    with Store(other) as store:
        store.put_choices(store.environment(HERE), [GOOD._replace(problem=numbered(i)) for i in range(3)])
    assert json.loads(run("merge", other, "--json"))[0]["choices"] == 3
    assert json.loads(run("list", "--json"))["environments"][0]["choices"] == 5
    assert "0 choices" in run("merge", other)
    assert "the store itself" in run("merge", own, status=2)


def test_prune(own):
    assert json.loads(run("prune", "--rows", 2, "--json"))["forgotten"] == 1
    assert json.loads(run("prune", "--older-than", 1, "--json"))["forgotten"] == 0
    assert json.loads(run("prune", "--bytes", "1MiB", "--json"))["forgotten"] == 0
    assert "2 forgotten, 0 left" in run("prune", "--environment", 1)
    assert "say what to keep" in run("prune", status=2)
    assert "environment 1" in run("prune", "--environment", 1, status=2)
    assert "512MiB" in run("prune", "--bytes", "much", status=2)


def test_verify(own):
    assert json.loads(run("verify", "--json")) == {"healthy": True, "faults": {}, "choices": 2}
    assert "nothing wrong" in run("verify")
    with Store(own) as store:
        store.put_choices(1, [GOOD._replace(algorithm="gone")])
    assert json.loads(run("verify", "--json", status=1))["faults"] == {"unknown algorithms": ["gone"]}
    assert "gone" in run("verify", status=1)


def test_a_store_that_is_switched_off_or_broken_is_said_to_be(own, monkeypatch):
    own.write_bytes(b"noise" * 1000)
    for command in ("list", "show"):
        assert "not a readable store" in run(command, status=2)
    assert "not a readable store" in json.loads(run("verify", "--json", status=1))["faults"]["pages"][0]
    monkeypatch.setenv("CONVSELECT_STORE", "off")
    convselect.set_store(None)
    assert "switched off" in run("list", status=2)
