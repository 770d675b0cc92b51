"""Artifacts and stores are data: reading one, whatever is in it, runs no code, and leads to no result that is wrong."""

from __future__ import annotations

import ast
import io
import pickle
import re
import sqlite3
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import convselect
from convselect.base import lru, settings
from convselect.base import warnings as _warnings
from convselect.base.problem import conv_problem
from convselect.kernels._contract import Grade
from convselect.kernels.pool import BY_NAME
from convselect.machine.environment import choice_environment
from convselect.model.artifact import ArtifactError
from convselect.model.inference import ARTIFACTS, Predictor
from convselect.store import choices, process
from convselect.store import file as store_file
from convselect.store.exchange import import_choices
from convselect.store.store import Decision, Store

PACKAGE = Path(convselect.__file__).parent
PROBLEM = conv_problem(1, 8, 20, 20, 8, 3, 3, padding=1)
# module -> functions that would turn bytes into code or objects
DANGEROUS = {
    "pickle": {"load", "loads", "Unpickler"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "joblib": {"load"},
    "yaml": {"load", "unsafe_load", "full_load"},
    "pd": {"read_pickle"},
    "os": {"system", "popen"},
}
# What is let through, and why it is safe.
KNOWN = {
    ("model/loaded.py", "pickle.loads"),  # bytes that `give` made in this very process
    (
        "freeze/program.py",
        "exec",
    ),  # statements written there about a graph traced there; names come from a counter
}


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def bomb(tmp_path):
    """An object whose pickle works: it goes off once here."""
    one = Bomb(tmp_path / "gone off")
    pickle.loads(pickle.dumps(one))
    assert one.mark.exists()
    one.mark.unlink()
    yield one
    assert not one.mark.exists()


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A store of this process's own, with nothing chosen and nothing warned of yet."""
    monkeypatch.delenv("CONVSELECT_SYSTEM_STORE", raising=False)
    monkeypatch.setattr(_warnings, "_given", set())
    monkeypatch.setattr(store_file, "_checked", set())
    yield tmp_path / "s.sqlite"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convselect.set_store("off")
    process._process = None
    lru.clear()


def suspicious(source: str) -> set[str]:
    """Calls that could run what is in a file."""
    found = set()
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        module, _, function = name.rpartition(".")
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if (
            function in DANGEROUS.get(module, ())
            or name in ("eval", "exec")
            or (name in ("np.load", "numpy.load") and given.get("allow_pickle") != "False")
            or (name == "torch.load" and given.get("weights_only") != "True")
            or given.get("shell") == "True"
        ):
            found.add(name)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "pickle.loads(x)",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "torch.load(f)",
        "eval(x)",
        "run(x, shell=True)",
    ],
)
def test_the_search_below_finds_what_it_looks_for(line):
    assert suspicious(line)
    assert not suspicious(
        "np.load(f, allow_pickle=False); torch.load(f, weights_only=True); json.loads(x); model.eval()"
    )


def test_nothing_in_the_package_reads_pickles_or_runs_what_it_read():
    found = {
        (str(file.relative_to(PACKAGE)), name)
        for file in PACKAGE.rglob("*.py")
        for name in suspicious(file.read_text())
    }
    assert found == KNOWN


def test_the_security_note_names_tests_that_exist():
    note = PACKAGE.parent / "SECURITY.md"
    if not note.exists():
        pytest.skip("an installed package has no repository")
    here = Path(__file__)
    named = set(re.findall(r"`(test_\w+)`", note.read_text()))
    assert named <= set(re.findall(r"^def (test_\w+)", here.read_text(), re.MULTILINE))
    assert len(named) >= 6
    files = re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)`", note.read_text())
    assert files
    assert all(any(here.parent.rglob(name)) for name in files)


# ---- artifacts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["card", "head", "another"])
def test_an_object_in_an_artifact_is_refused_unread(where, bomb):
    path = next(ARTIFACTS.glob("cpu-*.npz"))
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    Predictor.load(path.read_bytes())
    assert where == "another" or where in arrays
    arrays[where] = np.array([bomb], dtype=object)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    with pytest.raises(ArtifactError, match="damaged"):
        Predictor.load(buffer.getvalue())


# ---- stores -----------------------------------------------------------------------------------------------------


def entered(path: Path, decision: Decision) -> None:
    """Into the store, as this machine would have written it."""
    mark, description = choice_environment("cpu")
    with Store(path) as store:
        store.put_choices(store.environment(description, mark), [decision])
    convselect.set_store(path)


def chosen() -> str:
    """What runs PROBLEM, and that its result is right."""
    lru.clear()
    x, weight = torch.randn(1, 8, 20, 20), torch.randn(8, 8, 3, 3)
    torch.testing.assert_close(
        convselect.conv2d(x, weight, padding=1), torch.conv2d(x, weight, padding=1), rtol=1e-4, atol=1e-4
    )
    (row,) = convselect.explain_problem(PROBLEM)
    return f"{row.algorithm} by {row.source}"


def decided(algorithm: str, **changes: object) -> Decision:
    revision = BY_NAME[algorithm].revision if algorithm in BY_NAME else 1
    budgets = settings.current().budgets
    return Decision(PROBLEM, budgets, algorithm, None, "verify", 1.5, revision, 9)._replace(**changes)


def test_a_choice_in_a_store_is_taken(path):
    """Or else what follows would show nothing."""
    entered(path, decided("im2col_gemm"))
    assert chosen() == "im2col_gemm by store"


@pytest.mark.parametrize("column", ["algorithm", "params", "source", "gain", "samples"])
def test_a_pickle_in_a_store_is_never_opened(column, path, bomb):
    """Even under a checksum that is right."""
    entered(path, decided("im2col_gemm"))
    convselect.set_store("off")
    columns = ("algorithm", "params", "source", "gain", "revision", "samples")
    db = sqlite3.connect(path)
    with db:
        db.execute(f"update choice set {column} = ?", (pickle.dumps(bomb),))
        (values,) = db.execute(f"select {', '.join(columns)} from choice")
        right = choices._checksum(str(PROBLEM), settings.current().budgets, values)
        db.execute("update choice set checksum = ?", (right,))
    db.close()
    store_file._checked.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", convselect.ConvselectWarning)
        convselect.set_store(path)
        assert "by store" not in chosen()


def test_a_forged_choice_stays_within_the_budgets(path):
    """Whoever can write the store can name any algorithm; what is too imprecise, switched off, unknown, or does not
    apply is not taken all the same."""
    for algorithm, used in (
        ("winograd7", dict(precision="exact")),
        ("im2col_gemm", dict(disable="im2col_gemm")),
        ("im2col_gemm", dict(workspace_bytes=1)),
        ("reference", {}),
        ("depthwise", {}),
        ("os.system", {}),
    ):
        with convselect.use(**used):
            entered(path, decided(algorithm))
            assert "by store" not in chosen(), algorithm
    assert BY_NAME["winograd7"].error_grade(PROBLEM) > Grade.DIRECT


def test_forged_parameters_are_not_taken(path):
    entered(path, decided("im2col_gemm", params={"column_bytes": 2**15}))
    assert chosen() == "im2col_gemm by store"
    for params in ({"column_bytes": -1}, {"column_bytes": "__import__('os')"}, {"nothing": 1}):
        entered(path, decided("im2col_gemm", params=params))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", convselect.ConvselectWarning)
            assert "by store" not in chosen(), params


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_a_pickle_in_place_of_exchanged_choices_is_an_error(suffix, tmp_path, bomb):
    path = tmp_path / f"choices.{suffix}"
    path.write_bytes(pickle.dumps(bomb))
    with Store(tmp_path / "s.sqlite") as store:
        with pytest.raises(ValueError, match="choices"):
            import_choices(store, path)
        assert not list(store.decisions())
