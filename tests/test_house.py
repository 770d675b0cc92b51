"""The rules of DESIGN.md section 1, asserted from the source and in fresh processes; `house.py` counts."""

from __future__ import annotations

import ast
import subprocess
import sys

import house
import pytest
from house import PACKAGE

from convselect.kernels import _library
from convselect.kernels.pool import ALL, BY_NAME


def test_imports_point_right():
    assert house.backwards() == []


def test_no_modules_import_each_other():
    assert house.circles() == []


def test_few_imports_between_rooms():
    assert len(house.arrows()) <= 110
    assert len(list(PACKAGE.glob("*.py"))) <= 18


def test_a_call_passes_few_files():
    if not _library.available():
        pytest.skip("counted with the C kernels")
    found = house.calls()
    assert found["cached"]["files"] <= 8, found["cached"]
    assert found["cached"]["frames"] <= 25, found["cached"]
    assert found["first"]["files"] <= 25, found["first"]


def test_algorithms_never_import_each_other():
    stems = {p.stem for p in (PACKAGE / "kernels").glob("*.py") if not p.stem.startswith("_")}
    for a, b in house.imports():
        if a.startswith("convselect.kernels.") and not a.endswith((".pool", ".triton")):
            assert not (b.startswith("convselect.kernels.") and b.rsplit(".", 1)[1] in stems), f"{a} imports {b}"


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
        " 'sqlite3', 'platformdirs', 'msgspec', 'convselect.store.store',"
        " 'torch.utils.cpp_extension', 'torch._inductor', 'convselect.model.train', 'convselect.model.inference',"
        " 'convselect.tune', 'convselect.report', 'jinja2'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
