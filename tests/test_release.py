"""What a release is made of: one version everywhere, and everything that belongs to it in the source distribution."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

import convselect

ROOT = Path(convselect.__file__).parent.parent
# Made by git or by setuptools, and no part of the other.
OF_GIT = {".gitignore", "kernels", "model"}
OF_SETUPTOOLS = re.compile(r"PKG-INFO|setup\.cfg|convselect\.egg-info/.*")

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="an installed package has no repository")


def test_one_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == convselect.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == convselect.__version__
    assert re.search(r"^version\b.*\d\.\d", (ROOT / "pyproject.toml").read_text(), re.MULTILINE) is None


def test_the_citation_has_what_the_format_requires():
    """Citation File Format 1.2.0: required keys, and the kinds of the values that are used here."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert cited["license"] == "MIT"
    for work in (cited, *cited["references"]):
        assert work["title"]
        assert all("name" in author or {"given-names", "family-names"} <= author.keys() for author in work["authors"])
        assert work["type"] in ("software", "article", "conference-paper", "unpublished")
        assert isinstance(work.get("year", 2000), int)
        assert {one["type"] for one in work.get("identifiers", ())} <= {"doi", "url", "swh", "other"}
    assert isinstance(cited["message"], str)
    authors = re.search(r'^authors = \[\{ name = "(.*?)" \}\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert authors is not None
    assert [author["name"] for author in cited["authors"]] == [authors[1]]


def test_the_installed_version_is_the_sources():
    try:
        installed = importlib.metadata.version("convselect")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from the sources, not installed")
    assert installed == convselect.__version__


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """The files of the repository, those included that are not committed yet."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git repository")
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"git does not answer: {done.stderr}")
    return {name for name in done.stdout.split("\0") if name and os.path.lexists(ROOT / name)}


def test_the_source_distribution_is_the_repository(tracked, tmp_path):
    pytest.importorskip("setuptools")
    tree = tmp_path / "tree"
    for name in tracked:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    done = subprocess.run([sys.executable, "setup.py", "sdist"], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (sdist,) = tree.glob("dist/*.tar.gz")
    assert sdist.name == f"convselect-{convselect.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    assert {name for name in names if not OF_SETUPTOOLS.fullmatch(name)} == tracked - OF_GIT
