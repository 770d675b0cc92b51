"""Whose file decides what runs here: owners, modes, links and what is no file. Checked before SQLite opens anything."""

from __future__ import annotations

import json
import os
import socket
import stat
import types

import pytest
from process_store import BUDGETS, Saying, again, decided, filled, numbered

import convselect
from convselect.base import warnings as _warnings
from convselect.doctor.doctor import examine
from convselect.machine import ownership
from convselect.machine.environment import cpu_fingerprint
from convselect.machine.ownership import examined
from convselect.model import inference, loaded
from convselect.model.artifact import ArtifactError
from convselect.store import process as store_process
from convselect.store.store import Store

pytestmark = pytest.mark.usefixtures("fresh_process")
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives files away")
OTHER, THIRD = 65534, 65533


@pytest.fixture
def place(tmp_path, monkeypatch):
    """above/folder/file, as only their owner can write them; the user's home is somewhere else."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "above" / "folder").mkdir(parents=True, mode=0o700)
    file = tmp_path / "above" / "folder" / "file"
    file.write_bytes(b"")
    for one in (file, file.parent, file.parent.parent):
        one.chmod(0o600 if one is file else 0o700)
    return types.SimpleNamespace(file=file, folder=file.parent, above=file.parent.parent)


def accepted(path, **how):
    try:
        return examined(path, **how) == path
    except PermissionError:
        return False


# (what, its mode, by default, if the user has named the file)
MODES = [
    ("file", 0o600, True, True), ("file", 0o644, True, True), ("file", 0o664, False, True),
    ("file", 0o666, False, False), ("file", 0o602, False, False),
    ("folder", 0o755, True, True), ("folder", 0o775, False, True), ("folder", 0o2775, False, True),
    ("folder", 0o777, False, False), ("folder", 0o1777, False, False),
    ("above", 0o755, True, True), ("above", 0o775, False, True), ("above", 0o777, False, False),
    ("above", 0o1777, True, True),
]  # fmt: skip


@pytest.mark.parametrize(("what", "mode", "default", "named"), MODES)
def test_modes(what, mode, default, named, place):
    getattr(place, what).chmod(mode)
    assert accepted(place.file) == default
    assert accepted(place.file, named=True) == named
    assert accepted(place.file, named=True, any_owner=True) == named
    if what != "file":  # the same before there is a file
        place.file.unlink()
        assert accepted(place.file) == default
        assert accepted(place.file, named=True) == named


@as_root
@pytest.mark.parametrize(
    ("owners", "default", "named", "read_only"),
    [
        ({}, True, True, True),
        ({"file": OTHER}, False, False, True),
        ({"folder": OTHER}, False, True, True),
        ({"file": OTHER, "folder": OTHER}, False, True, True),
        ({"file": THIRD, "folder": OTHER}, False, False, True),
        ({"above": OTHER}, False, True, True),
    ],
    ids=str,
)
def test_owners(owners, default, named, read_only, place):
    for what, uid in owners.items():
        os.chown(getattr(place, what), uid, -1)
    assert accepted(place.file) == default
    assert accepted(place.file, named=True) == named
    assert accepted(place.file, named=True, any_owner=True) == read_only


@as_root
def test_roots_files_are_as_good_as_the_users_own(place, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert accepted(place.file)
    os.chown(place.file, OTHER, -1)
    os.chown(place.folder, OTHER, -1)
    assert accepted(place.file)
    os.chown(place.folder, THIRD, -1)
    assert not accepted(place.file)


@as_root
def test_somebody_elses_folder_in_one_where_everybody_may_make_folders(place):
    place.above.chmod(0o1777)
    os.chown(place.folder, OTHER, -1)
    with pytest.raises(PermissionError, match="everybody may make folders"):
        examined(place.file, named=True)


def test_what_is_above_the_home_is_the_systems_affair(place, monkeypatch):
    place.above.chmod(0o777)
    assert not accepted(place.file)
    monkeypatch.setenv("HOME", str(place.folder))
    assert accepted(place.file)
    assert not accepted(place.file, named=True)  # which need not be below the home


@pytest.mark.parametrize(
    ("uid", "user", "gid", "group", "members", "private"),
    [
        (1000, "ada", 1000, "ada", [], True),
        (1000, "ada", 1000, "ada", ["ada"], True),
        (1000, "ada", 1000, "ada", ["ada", "bob"], False),
        (1000, "ada", 1000, "users", [], False),
        (1000, "ada", 7, "ada", [], False),
        (0, "root", 1000, "root", [], False),
    ],
)
def test_a_group_of_the_users_own_may_write(uid, user, gid, group, members, private, place, monkeypatch):
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    own = place.folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: types.SimpleNamespace(pw_uid=uid, pw_gid=gid, pw_name=user))
    monkeypatch.setattr(grp, "getgrgid", lambda _: types.SimpleNamespace(gr_name=group, gr_mem=members))
    assert ownership._is_private(1000) == private
    monkeypatch.setattr(os, "geteuid", lambda: own)
    monkeypatch.setattr(ownership, "_is_private", lambda _: private)
    place.folder.chmod(0o775)
    assert accepted(place.file) == private
    place.folder.chmod(0o777)
    assert not accepted(place.file)


def test_without_users_only_the_kind_of_file_counts(place, monkeypatch):
    monkeypatch.delattr(os, "geteuid")
    place.folder.chmod(0o777)
    assert accepted(place.file)
    with pytest.raises(OSError, match="not a regular file"):
        examined(place.folder)


def make(path, what):
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "link to nothing":
        path.symlink_to(path.with_name("nothing"))
    elif what == "link to itself":
        path.symlink_to(path.name)
    else:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(os.path.relpath(path))  # short enough


NO_FILES = ("pipe", "folder", "device", "socket", "link to nothing", "link to itself")


@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused_at_once_and_choices_are_in_memory(what, path, monkeypatch):
    monkeypatch.chdir(path.parent)
    make(path, what)
    before = os.lstat(path)
    with pytest.raises(OSError, match=r"regular file|to nothing|Too many levels"):
        examined(path)
    with pytest.raises(OSError, match=r"regular file|to nothing|Too many levels|no file"):
        Store(path)
    again(path)
    with Saying() as warned:
        assert store_process.look_up(numbered(0), BUDGETS) is None
        store_process.remember(decided(0))
        store_process.flush()
        assert store_process.look_up(numbered(0), BUDGETS) == decided(0)
    assert len(warned.said) == 1, warned.said
    assert os.lstat(path).st_ino == before.st_ino
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("what", NO_FILES)
@pytest.mark.timeout(20)
def test_a_model_or_calibration_that_is_no_file_is_refused_at_once(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "x", what)
    for name in ("CONVSELECT_ARTIFACT", "CONVSELECT_CALIBRATION"):
        with monkeypatch.context() as changed:
            changed.setenv(name, str(tmp_path / "x"))
            changed.setattr(_warnings, "_given", set())
            loaded.unload()
            with pytest.warns(convselect.ConvselectWarning, match="native from now on"):
                assert loaded.get() is None
    loaded.unload()
    why = (
        "not a regular file"
        if what in ("pipe", "folder", "device")
        else "there is no model file|No such device|Too many levels"
    )
    with pytest.raises(ArtifactError, match=why):
        inference.Predictor.load(tmp_path / "x")


def test_a_link_leads_to_the_real_file_whatever_becomes_of_the_link(place, tmp_path):
    filled(place.file.with_name("s.sqlite"))
    real, link = place.file.with_name("s.sqlite"), tmp_path / "link"
    link.symlink_to(real)
    found = examined(link)
    link.unlink()
    link.symlink_to(place.file)
    assert found == real
    tmp_path.chmod(0o777)  # what can be written by others is where the link is: and the link is not followed again
    link.unlink()
    link.symlink_to(real)
    place.above.chmod(0o700)
    assert not accepted(real, named=True)
    tmp_path.chmod(0o700)
    again(link)
    assert store_process.look_up(numbered(0), BUDGETS) == decided(0)


@pytest.mark.parametrize(("what", "mode"), [("folder", 0o777), ("file", 0o666), ("above", 0o777)])
@pytest.mark.parametrize("how", ["named", "cache", "system"])
def test_a_store_that_others_can_write_is_not_opened(how, what, mode, place, monkeypatch):
    path = place.folder / "store.sqlite"
    filled(path)
    convselect.set_store("off")
    (path if what == "file" else getattr(place, what)).chmod(mode)
    before = sorted((one.name, one.read_bytes()) for one in place.folder.iterdir())
    name = {"named": "CONVSELECT_STORE", "cache": "CONVSELECT_CACHE", "system": "CONVSELECT_SYSTEM_STORE"}[how]
    monkeypatch.setenv(name, str(place.folder if how == "cache" else path))
    if how == "system":
        monkeypatch.setenv("CONVSELECT_STORE", str(place.above.parent / "own" / "s.sqlite"))
    again(None)
    with Saying() as warned:
        assert store_process.look_up(numbered(0), BUDGETS) is None
        store_process.remember(decided(0))
        store_process.flush()
        assert store_process.look_up(numbered(0), BUDGETS) == decided(0)
    assert len(warned.said) == 1, warned.said
    assert "everybody can write" in warned.said[0]
    assert "`chmod go-w" in warned.said[0]
    assert sorted((one.name, one.read_bytes()) for one in place.folder.iterdir()) == before
    if how != "system":
        advice = "\n".join(one.text for one in examine().advice)
        assert "everybody can write" in advice
        assert "`chmod go-w" in advice
    (path if what == "file" else getattr(place, what)).chmod(0o600 if what == "file" else 0o700)
    again(None)
    assert store_process.look_up(numbered(0), BUDGETS) == decided(0)


@as_root
def test_a_store_of_somebody_else_is_named_with_its_owner(path):
    filled(path)
    convselect.set_store("off")
    os.chown(path, OTHER, -1)
    again(path)
    with Saying() as warned:
        assert store_process.look_up(numbered(0), BUDGETS) is None
    assert len(warned.said) == 1
    assert "belongs to another user" in warned.said[0]
    os.environ["CONVSELECT_SYSTEM_STORE"] = str(path)  # to be read only, it may be a colleague's
    try:
        again(path.with_name("x.sqlite"))
        assert store_process.look_up(numbered(0), BUDGETS) == decided(0)
    finally:
        del os.environ["CONVSELECT_SYSTEM_STORE"]


def test_what_is_made_under_any_umask_is_accepted_later(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVSELECT_CACHE", str(tmp_path / "a" / "b" / "cache"))
    before = os.umask(0)
    try:
        again(None)
        store_process.remember(decided(0))
        store_process.flush()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "b" / "cache").stat().st_mode) == 0o700
    with Saying() as warned:
        again(None)
        assert store_process.look_up(numbered(0), BUDGETS) == decided(0)
    assert warned.said == []


def test_a_calibration_that_others_can_write_is_left_out_and_the_model_is_used(tmp_path, monkeypatch):
    model = sorted(inference.ARTIFACTS.glob("cpu-*.npz"))[0]
    monkeypatch.setattr(loaded, "path_for_host", lambda: model)
    monkeypatch.setenv("CONVSELECT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "cache").mkdir(mode=0o700)
    path = loaded.calibration_path()
    bias = {"im2col_gemm": 0.5}
    path.write_text(
        json.dumps(
            dict(fingerprint=cpu_fingerprint(), artifact=model.stem, digest=loaded.digest(model), bias=bias, problems=9)
        )
    )
    plain = inference.Predictor.load(model).identity
    for mode, corrected in ((0o600, True), (0o666, False)):
        path.chmod(mode)
        loaded.unload()
        with Saying() as warned:
            assert (loaded.get().identity != plain) == corrected
        assert len(warned.said) == (not corrected), warned.said
    loaded.unload()
    advice = "\n".join(one.text for one in examine().advice)
    assert "calibration is left out: everybody can write" in advice
    loaded.unload()
