"""The compiled part of the eager path in the user's cache: what is loaded, and what is said if it cannot be built."""

from __future__ import annotations

import os

import pytest
import torch

from convselect.store import extension


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A file in place of a build, in a cache of its own."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("CONVSELECT_CACHE", str(cache))
    monkeypatch.delenv("CONVSELECT_NO_EXTENSION", raising=False)
    path = cache / extension.name()
    path.write_bytes(b"")
    path.chmod(0o700)
    return path


def test_a_build_is_for_one_pytorch_one_python_and_one_source():
    name = extension.name()
    assert torch.__version__ in name
    assert name.startswith("cached-calls-")


def test_what_others_can_write_is_not_loaded(built):
    assert extension.found() == built.resolve()
    built.chmod(0o777)
    assert extension.found() is None
    built.chmod(0o700)
    built.parent.chmod(0o777)
    assert extension.found() is None


def test_it_can_be_left_out(built, monkeypatch):
    monkeypatch.setenv("CONVSELECT_NO_EXTENSION", "1")
    assert extension.is_off()
    assert extension.found() is None
    monkeypatch.setenv("CONVSELECT_NO_EXTENSION", "0")
    assert extension.found() == built.resolve()


def test_nothing_is_found_where_nothing_was_built(built):
    built.unlink()
    assert extension.found() is None


def test_without_a_compiler_or_headers_the_error_says_what_to_install(built, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(extension.BuildError, match="no C\\+\\+ compiler"):
        extension.build()
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho this does not compile >&2\nexit 1\n")
    failing.chmod(0o700)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(extension.BuildError, match="this does not compile"):
        extension.build()
    assert built.read_bytes() == b""  # what was there stays
    monkeypatch.setattr(extension.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(extension.BuildError, match="Python's headers"):
        extension.build()


def test_a_build_replaces_what_was_there_at_once(built, monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    assert extension.build() == built
    assert built.read_text() == "made\n"
    assert os.listdir(built.parent) == [built.name]
