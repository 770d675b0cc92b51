"""What a release is made of: one version and the same checks everywhere, everything in the source distribution."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import convselect
from convselect.cli.main import _app

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


# ---- environments ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def check_torch():
    spec = importlib.util.spec_from_file_location("check_torch", ROOT / ".ci" / "check_torch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_was_asked_for_is_what_is_installed(check_torch):
    version = importlib.metadata.version("torch")
    public = version.partition("+")[0]
    for asked in (
        "torch",
        f"torch=={version}",
        f"torch=={public}",
        f"torch>={public}",
        f"a/torch-{version}-py3-none-any.whl",
    ):
        assert check_torch.wrong(asked) is None, asked
    for asked in ("torch==0.1", "torch<0.1", "a/torch-0.1-py3-none-any.whl"):
        assert f"torch {version} is installed" in check_torch.wrong(asked)
    assert "no no-such-thing is installed" in check_torch.wrong("no-such-thing")
    assert "nor a wheel" in check_torch.wrong("a/folder")


def test_a_package_that_does_not_load_is_said(check_torch, monkeypatch):
    assert check_torch.unusable("torch") is None
    monkeypatch.setattr(check_torch.importlib.metadata, "version", lambda name: "0.1")
    assert "listed as 0.1" in check_torch.unusable("torch")

    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(check_torch.importlib, "import_module", broken)
    assert "torchvision::nms" in check_torch.unusable("torchvision")


def made(target: str, *variables: str) -> list[str]:
    """The commands that `make` would run, with these variables."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    ours = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TORCH", "VENV", "PYTHON", "WORKERS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    words = ["make", "--dry-run", "--no-print-directory", target, *variables]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return [line.partition("  #")[0] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("torch", ["torch==2.13.0", "torch==2.14.1 torchvision>=0.29"])
def test_every_install_asks_for_the_same_torch_and_the_last_command_looks(torch, tmp_path):
    commands = made("setup", f"VENV={tmp_path}", f"TORCH={torch}")
    quoted = " ".join(f"'{one}'" for one in torch.split())
    installs = [c for c in commands if " pip install " in c]
    looks = [c for c in commands if "check_torch.py" in c]
    assert commands.index(f"rm -f {tmp_path}/.convselect-ready {tmp_path}/.convselect-torch") < commands.index(
        installs[0]
    )
    assert len(installs) == 3
    assert all(c.endswith(quoted) or "--no-deps" in c for c in installs)
    assert len(looks) == 1
    assert looks[0].endswith(quoted)
    assert commands.index(looks[0]) > max(commands.index(c) for c in installs)


def test_another_torch_than_the_last_is_installed_and_the_same_is_not(tmp_path):
    """In an environment that is newer than everything it is made from."""
    (tmp_path / ".convselect-torch").write_text("torch==2.13.0\n")
    (tmp_path / ".convselect-ready").touch()
    assert not any("pip install" in c for c in made("setup", f"VENV={tmp_path}"))
    assert not any("pip install" in c for c in made("setup", f"VENV={tmp_path}", "TORCH=torch==2.13.0"))
    assert not any("pip install" in c for c in made("setup", f"VENV={tmp_path}", "TORCH="))
    for target in ("setup", "check", "test"):
        assert any(
            "pip install" in c and "'torch==2.14.1'" in c
            for c in made(target, f"VENV={tmp_path}", "TORCH=torch==2.14.1")
        )


def test_nothing_that_is_installed_beside_torch_pins_what_torch_pins():
    """Builds of torch for GPUs need one Triton, and pip would take another torch rather than fail."""
    extras = re.search(
        r"^\[project\.optional-dependencies\]\n(.*?)^\[", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert extras is not None
    pinned = re.findall(r'^[^#\n]*"((?:triton|numpy|torch|torchvision)\b[^"]*)"', extras[1], re.MULTILINE)
    assert pinned == ["triton>=3.4; platform_system == 'Linux'"]


def test_triton_has_an_environment_of_its_own():
    commands = made("test", "VENV=nowhere")
    (install,) = [c for c in commands if "beside.py" in c]
    assert install == "nowhere/bin/python .ci/beside.py nowhere/triton -r tests/interpreted/requirements.txt"
    runs = [c for c in commands if " -m pytest " in c]
    assert [c.partition(" -m pytest")[0] for c in runs] == [
        "nowhere/bin/python", "nowhere/triton/bin/python", "TRITON_INTERPRET=1 nowhere/triton/bin/python"
    ]  # fmt: skip
    # What is skipped without Triton has to run there.
    skipped = re.compile(r"""importorskip\("triton"\)|reason="Triton is not installed"|not launcher\.installed\(\)""")
    found = {
        p.name for p in (ROOT / "tests").rglob("test_*.py") if p != Path(__file__) and skipped.search(p.read_text())
    }
    assert found == set(re.findall(r"test_\w+\.py", runs[1]))


# ---- checks on GitHub and before commits ----------------------------------------------------------------------------


def recipe(target: str) -> list[str]:
    """Commands of a target of the Makefile, as they run if nothing is overridden."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None, f"the Makefile has no target {target}"
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in found[1].splitlines()]


def test_the_workflow_runs_what_everybody_can_run():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert "://" not in text  # the index of packages is a variable of the repository
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert runs == [".ci/run", "make check", "make check"]
    assert workflow["jobs"]["newest"]["env"] == {"TORCH": "torch torchvision"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert re.search("^check:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert workflow["jobs"]["check"]["strategy"]["matrix"]["python"] == classifiers


def test_pre_commit_runs_what_make_lint_runs():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert [hook["entry"] for hook in local["hooks"]] == recipe("lint")
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in local["hooks"])


FORMS = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]


@pytest.mark.parametrize("path", FORMS, ids=[path.stem for path in FORMS])
def test_forms_for_issues_ask_for_commands_that_exist(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    commands = get_command(_app()).commands
    asked = re.findall(r"convselect (\w+)[^`\n]*?(--[a-z-]+)?`", path.read_text())
    assert ("doctor", "--json") in asked
    for name, option in asked:
        assert not option or any(option in param.opts for param in commands[name].params), (name, option)


def test_there_are_forms_and_blank_issues():
    assert sorted(path.stem for path in FORMS) == ["bug", "slow"]
    assert yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml").read_text())["blank_issues_enabled"]
    assert len((ROOT / ".github" / "pull_request_template.md").read_text().splitlines()) == 5
