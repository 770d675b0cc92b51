"""Tests of a process's view of its store begin without one."""

from __future__ import annotations

import warnings

import pytest

import convselect
from convselect.base import warnings as _warnings
from convselect.store import file
from convselect.store import process as store_process


@pytest.fixture
def fresh_process(monkeypatch):
    """No store but the test's, no warnings given yet, no file checked yet."""
    for name in ("CONVSELECT_STORE", "CONVSELECT_SYSTEM_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_warnings, "_given", set())
    monkeypatch.setattr(file, "_checked", set())
    yield
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convselect.set_store("off")
    store_process._process = None


@pytest.fixture
def path(tmp_path, fresh_process):
    """A file that does not exist yet, set as the store."""
    convselect.set_store(tmp_path / "s.sqlite")
    return tmp_path / "s.sqlite"
