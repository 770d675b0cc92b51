"""The rules of DESIGN.md section 1, asserted from the source and in fresh processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import convselect
from convselect.kernels.pool import ALL, BY_NAME

PACKAGE = Path(convselect.__file__).parent
# Who may import whom, by the first part of the name below convselect. Helpers with an underscore belong to the file
# named in the comment.
ALLOWED = {
    "problem": set(),
    "settings": set(),
    "_warnings": set(),
    "_lru": set(),
    "timing": set(),
    "kernels": {"problem", "settings"},
    "features": {"problem"},
    "_free_memory": set(),  # choose
    "choose": {"_free_memory", "_warnings", "kernels", "problem", "settings"},
    "model": {"problem", "features", "kernels", "timing", "settings", "choose", "_calls", "store"},
    "_store_file": set(),  # store
    "_store_choices": {"_store_file", "problem"},  # store
    "_store_exchange": {"_store_choices", "kernels", "model", "problem", "store"},  # _cli_store
    "_find_db": {"model", "problem"},  # _cli_store
    "_store_aside": set(),  # _remembered
    "_here": {"model", "store", "timing"},  # _remembered
    "_remembered": {
        "_here",
        "_store_aside",
        "_store_file",
        "_warnings",
        "kernels",
        "problem",
        "store",
        "timing",
    },
    # rows, as the collector writes them and training reads them
    "store": {"_store_choices", "_store_file", "model", "problem"},
    "_predictor": {"_parameters", "model", "store", "_warnings"},
    "calibrate": {"_predictor", "choose", "kernels", "model", "problem", "timing"},
    "_parameters": {"_warnings", "kernels", "model", "problem", "settings"},  # _execution
    "_aten_strides": {"_autograd", "kernels", "problem"},  # dispatch
    "_autograd": set(),  # dispatch
    "_calls": {"_aten_strides", "_autograd", "problem"},  # dispatch
    "_batch": {"choose", "kernels", "problem", "settings"},  # _execution
    "_reasons": {"choose", "kernels", "problem", "settings"},  # explain, _log, bench
    "_log": {"_predictor", "_reasons", "_warnings", "choose", "problem", "settings"},
    "trial": set(),
    "_verify": {
        "_remembered",
        "_warnings",
        "choose",
        "kernels",
        "problem",
        "settings",
        "store",
        "timing",
        "trial",
    },  # _execution
    "_measure": {
        "_verify",
        "_warnings",
        "choose",
        "kernels",
        "model",
        "problem",
        "settings",
    },  # _execution
    "_execution": {
        "_aten_strides",
        "_batch",
        "_log",
        "_lru",
        "_measure",
        "_parameters",
        "_predictor",
        "_remembered",
        "_verify",
        "_warnings",
        "choose",
        "kernels",
        "problem",
        "settings",
        "trial",
    },
    "_run_ops": {
        "_aten_strides",
        "_calls",
        "_execution",
        "_lru",
        "_warnings",
        "choose",
        "kernels",
        "problem",
        "settings",
    },  # ops
    "ops": {"_run_ops", "choose", "problem"},
    "_traced": {"_autograd", "_calls", "_execution", "choose", "kernels", "ops", "problem", "settings"},  # dispatch
    "dispatch": {
        "_aten_strides",
        "_parameters",
        "_autograd",
        "_calls",
        "_execution",
        "_lru",
        "_run_ops",
        "_traced",
        "_verify",
        "choose",
        "kernels",
        "problem",
        "settings",
    },
    "functional": {"dispatch"},
    "enabled": {"_traced", "functional", "settings"},
    "distributed": {"_parameters", "_predictor", "_remembered", "_warnings", "dispatch", "kernels", "settings"},
    "layer": {"dispatch"},
    "convert": {"dispatch", "layer"},
    "_freeze_trace": {"layer", "settings"},  # freeze
    "_freeze_watch": {"kernels"},  # freeze
    "_freeze_block": {"choose", "kernels", "problem", "settings", "timing"},  # freeze
    "_freeze_conv": {"_calls", "_freeze_block", "_freeze_trace", "choose", "kernels", "problem", "settings"},  # freeze
    "_freeze_linear": {"_freeze_block", "_freeze_trace", "kernels", "problem", "settings"},  # freeze
    "_freeze_residual": {
        "_freeze_block",
        "_freeze_conv",
        "_freeze_trace",
        "choose",
        "kernels",
        "problem",
        "settings",
    },  # freeze
    "_freeze_pool": {"kernels"},  # freeze
    "_freeze_plan": {
        "_freeze_block",
        "_freeze_conv",
        "_freeze_linear",
        "_freeze_pool",
        "_freeze_residual",
        "_freeze_trace",
        "_lru",
        "problem",
        "settings",
    },  # freeze
    "freeze": {
        "_autograd",
        "_freeze_plan",
        "_freeze_trace",
        "_freeze_watch",
        "_lru",
        "_warnings",
        "layer",
        "settings",
    },
    "explain": {"dispatch", "_predictor", "_reasons", "choose", "kernels", "problem", "settings"},
    "bench": {"_predictor", "_reasons", "choose", "dispatch", "kernels", "model", "problem", "settings", "timing"},
    "tune": {
        "_here",
        "_predictor",
        "_remembered",
        "choose",
        "features",
        "kernels",
        "model",
        "problem",
        "settings",
        "store",
        "timing",
    },
    "report": {
        "_execution",
        "_here",
        "_predictor",
        "_remembered",
        "_verify",
        "bench",
        "choose",
        "convert",
        "dispatch",
        "explain",
        "kernels",
        "layer",
        "model",
        "problem",
        "settings",
        "store",
        "timing",
    },
    "_findings": {"kernels", "model", "problem", "timing"},  # doctor
    "doctor": {
        "_findings",
        "_log",
        "_predictor",
        "_remembered",
        "choose",
        "kernels",
        "model",
        "problem",
        "settings",
        "timing",
    },
}


def imports_of(path: Path) -> set[str]:
    """Full names of convselect modules that this file imports anywhere but for type checking."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("convselect")}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("convselect"):
            if node.module == "convselect":
                found |= {f"convselect.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


@pytest.mark.parametrize("name", ALLOWED)
def test_imports_go_one_way(name):
    path = PACKAGE / f"{name}.py"
    files = [path] if path.exists() else sorted((PACKAGE / name).rglob("*.py"))
    assert files
    for file in files:
        used = {module.split(".")[1] for module in imports_of(file) if module.count(".")}
        assert used - {name} <= ALLOWED[name], f"{file.name} imports {sorted(used - {name} - ALLOWED[name])}"


def test_every_module_is_under_the_rule():
    free = {"__init__", "__main__", "cli", "_cli_model", "_cli_params", "_cli_report", "_cli_store", "_cli_tools"}
    free |= {"_cli_tune"}
    free |= {"demo", "_demo_report", "_architectures"}
    modules = {p.stem for p in PACKAGE.glob("*.py")}
    modules |= {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert modules - free == set(ALLOWED)


def test_algorithms_never_import_each_other():
    stems = {p.stem for p in (PACKAGE / "kernels").glob("*.py") if not p.stem.startswith("_")}
    for file in (PACKAGE / "kernels").glob("*.py"):
        if file.stem == "__init__":
            continue
        used = {module.rsplit(".", 1)[-1] for module in imports_of(file)}
        assert not used & stems, f"{file.name} imports {used & stems}"


def test_only_timing_reads_a_clock():
    for file in PACKAGE.rglob("*.py"):
        if file.name == "timing.py":
            continue
        names = {
            alias.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import)
            for alias in node.names
        }  # fmt: skip
        assert not names & {"time", "timeit"}, file


def test_names_are_unique_and_native_is_first():
    assert len(BY_NAME) == len(ALL)
    assert ALL[0].name == "native"


def test_importing_is_light():
    code = (
        "import sys, convselect; "
        "heavy = {'triton', 'sklearn', 'matplotlib', 'scipy', 'pandas', 'typer', 'rich', 'lightgbm',"
        " 'sqlite3', 'platformdirs', 'convselect.store.store',"
        " 'torch.utils.cpp_extension', 'torch._inductor', 'convselect.model.train', 'convselect.model.inference',"
        " 'convselect.model.parameters', 'convselect.model.sequence',"
        " 'convselect.tune', 'convselect.report', 'jinja2'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["kernels", "model"])
def test_the_links_at_the_top_are_for_readers(name):
    link = PACKAGE.parent / name
    if not (PACKAGE.parent / "pyproject.toml").exists():
        pytest.skip("an installed package has no repository around it")
    assert link.is_symlink()
    assert link.resolve() == PACKAGE / name
    code = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import {name}"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode != 0
    assert f"import this package as convselect.{name}" in out.stderr
