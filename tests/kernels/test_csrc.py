"""The C library: portable, and built as it should be. Built anew from the sources beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections import defaultdict
from pathlib import Path

import _guarded
import fresh
import pytest
from problems import PROBLEMS, VOLUMES, operands_of, random_operands

import convselect
from convselect.base.problem import Direction, layout_of
from convselect.kernels import _library
from convselect.kernels._c_algorithm import CAlgorithm
from convselect.kernels.pool import ALL

ROOT = Path(convselect.__file__).parent.parent
CC = os.environ.get("CC", sysconfig.get_config_var("CC") or "cc").split()
KERNELS = _guarded.kernels()
ENTRIES = {**KERNELS, **_guarded.packed_kernels()}
SHARED = ("features", "runner", "runtime", "spot_check")  # compiled once
X86 = os.uname().machine in ("x86_64", "amd64")
# Functions stay functions, of which compilers make a tenth of the code in a tenth of the time.
NOT_INLINE = "-DCS_INLINE=static"

pytestmark = [
    pytest.mark.timeout(900),  # the first of them compiles
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="an installed package cannot be built from here"),
    pytest.mark.skipif(shutil.which(CC[0]) is None, reason=f"there is no C compiler ({CC[0]})"),
]
needs_binutils = pytest.mark.skipif(
    not all(map(shutil.which, ("objdump", "nm", "readelf"))), reason="binutils are not installed"
)


def command(*words: object, cwd: Path | None = None, check: bool = True, **environment: str):
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def copy_of_sources(to: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    shutil.copytree(ROOT / "convselect", to / "convselect", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return to


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """A copy of the sources in which the library has been built: build/lib*/, objects in build/temp*/."""
    pytest.importorskip("setuptools")
    tree = copy_of_sources(tmp_path_factory.mktemp("tree"))
    done = command(sys.executable, "setup.py", "build_ext", cwd=tree, CSRC_CFLAGS=f"-O0 {NOT_INLINE}")
    assert list(tree.glob("build/lib*/convselect/kernels/_csrc.so")), done.stdout + done.stderr
    assert "warning:" not in done.stderr, done.stderr
    return tree


@pytest.fixture(scope="session")
def built(tree) -> Path:
    (library,) = tree.glob("build/lib*/convselect/kernels/_csrc.so")
    return library


@pytest.fixture(scope="session")
def objects(tree) -> dict[str, Path]:
    return {path.stem: path for path in tree.glob("build/temp*/**/*.o")}


def current_library(folder: Path) -> Path:
    """The library that is installed, with all its symbols; built in `folder` if a source is newer."""
    installed = _guarded.CSRC.parent / "_csrc.so"
    sources = [ROOT / "setup.py", *_guarded.CSRC.iterdir()]
    if installed.exists() and installed.stat().st_mtime >= max(path.stat().st_mtime for path in sources):
        return installed
    copy_of_sources(folder)
    command(sys.executable, "setup.py", "build_ext", "--inplace", cwd=folder)
    return folder / "convselect" / "kernels" / "_csrc.so"


# ---- what the algorithms ask for --------------------------------------------------------------------------------


def test_no_kernel_declines_what_its_algorithm_asks_for_and_each_is_asked(monkeypatch):
    """An algorithm that applies also computes, with a kernel or without: a kernel that declines then is an error."""
    if not _library.available():
        pytest.skip("the library is not installed")
    asked: set[str] = set()
    declined: list[str] = []
    real = _library.call

    def call(name, a, b, problem, *rest, **options):
        asked.add(name)
        try:
            return real(name, a, b, problem, *rest, **options)
        except NotImplementedError:
            declined.append(f"{name}: {problem}")
            raise

    monkeypatch.setattr(_library, "call", call)
    users = [a for a in ALL if isinstance(a, CAlgorithm)]
    for listed in (*PROBLEMS.values(), *VOLUMES.values()):
        for direction in Direction:
            for dtype, layout in (("float32", "contiguous"), ("float32", "channels_last"), ("bfloat16", "contiguous")):
                p = listed._replace(direction=direction, dtype=dtype)
                operands = operands_of(p, *random_operands(p, layout, layout))
                p = p._replace(layout=layout_of(operands[0]), weight_layout=layout)
                for algorithm in users:
                    if algorithm.why_not(p) is None:
                        algorithm.run(*operands, p)
    assert not declined, declined[:10]
    assert asked == {*KERNELS, *_guarded.volume_kernels()}


# ---- instructions and symbols -----------------------------------------------------------------------------------


def units_of(library: Path) -> dict[str, str]:
    """Address of a function -> the source it is from: named ahead of its static functions, or as a suffix."""
    found, unit = {}, ""
    for line in command("readelf", "-sW", library).stdout.splitlines():
        words = line.split()
        if words[3:4] == ["FILE"]:
            unit = words[7].removesuffix(".c") if len(words) > 7 else ""
        elif words[3:4] == ["FUNC"] and words[6] != "UND":
            suffix = re.search(r"_(base|avx2|avx512)(\.|$)", words[7])
            # The linker lists functions that others may call without their source.
            own = unit if words[4] == "LOCAL" and unit.startswith(("isa", *SHARED)) else "runtime"
            found[words[1]] = f"isa_{suffix[1]}" if suffix else own
    return found


def instructions(library: Path) -> dict[str, list[str]]:
    """Source -> disassembled lines, mnemonic and operands."""
    units, found, unit = units_of(library), defaultdict(list), ""
    for line in command("objdump", "-d", "--no-show-raw-insn", library).stdout.splitlines():
        if function := re.match(r"([0-9a-f]{16}) <", line):
            unit = units.get(function[1], "runtime")  # what the linker adds
        elif re.match(r"\s+[0-9a-f]+:\t", line):
            found[unit].append(line.split("\t", 1)[1].strip())
    return found


@pytest.mark.compile
@needs_binutils
@pytest.mark.skipif(not X86, reason="one instruction set only")
def test_no_unit_holds_instructions_beyond_its_set(tmp_path):
    found = instructions(current_library(tmp_path))
    expected = {*SHARED, "isa_base", "isa_avx2", "isa_avx512"}
    # All of the runner may be in its one exported function, and those count as the runtime's.
    assert expected - {"runner"} <= set(found) <= expected
    forbidden = {
        # Every AVX mnemonic begins with v, whatever its registers.
        **dict.fromkeys(SHARED, r"^v(?!er[rw])|%[yz]mm|%k[0-7]"),
        "isa_base": r"^v(?!er[rw])|%[yz]mm|%k[0-7]",
        # AVX-512 shows in its registers: zmm, masks, and those from 16 on.
        "isa_avx2": r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])|\{(z|1to\d+|r.-sae)\}",
        # What F, BW, DQ and VL do not have.
        "isa_avx512": r"^v(pdp|dpbf16|cvtne|4fma|p4dpw|pmadd52|popcnt|pcompress[bw]|pexpand[bw]|gf2p8)|^tile|%tmm",
    }
    for unit in set(found):
        pattern = forbidden[unit]
        assert len(found[unit]) > (10_000 if unit.startswith("isa") else 20)
        beyond = [line for line in found[unit] if re.search(pattern, line)]
        assert not beyond, f"{unit}: {beyond[:10]}"
    assert any("%zmm" in line for line in found["isa_avx512"])
    assert any("%ymm" in line for line in found["isa_avx2"])


@pytest.mark.compile
@needs_binutils
def test_units_share_no_function(objects):
    """A function that two units define and the linker merges would run with one unit's instructions in both."""
    assert set(objects) == {*SHARED, "isa_base", "isa_avx2", "isa_avx512"}
    for unit, path in objects.items():
        for line in command("nm", "--defined-only", path).stdout.splitlines():
            kind, symbol = line.split()[-2:]
            assert kind not in "WwVvuCi", f"{unit} defines {symbol} for the linker to merge"
            if kind.isupper() and unit not in SHARED:
                assert symbol.endswith(unit.removeprefix("isa")), f"{unit} defines {symbol}"


@pytest.mark.compile
@needs_binutils
def test_the_library_exports_its_interface_and_needs_neither_torch_nor_python(built):
    exported = {line.split()[-1] for line in command("nm", "-D", "--defined-only", built).stdout.splitlines()}
    assert {*ENTRIES, "cs_spot_check", "cs_abi", "cs_best_isa", "cs_free_scratch", "cs_scratch_bytes"} <= exported
    assert "cs_run" in exported
    assert not [symbol for symbol in exported if not re.fullmatch(r"cs_\w+(?<!_base)(?<!_avx2)(?<!_avx512)", symbol)]
    missing = {line.split()[-1] for line in command("nm", "-D", "--undefined-only", built).stdout.splitlines()}
    assert not [symbol for symbol in missing if symbol.startswith(("Py", "_Py", "_Z"))]
    needed = set(re.findall(r"NEEDED.*\[(.*?)\.so", command("readelf", "-d", built).stdout))
    assert needed <= {"libgomp", "libomp", "libm", "libc", "libpthread", "libgcc_s", "ld-linux-x86-64"}


# ---- installing -------------------------------------------------------------------------------------------------


def test_source_and_binary_distributions_hold_the_sources(tree):
    sources = {path.name for path in _guarded.CSRC.iterdir()}
    command(sys.executable, "setup.py", "sdist", "bdist_wheel", cwd=tree)
    (sdist,), (wheel,) = tree.glob("dist/*.tar.gz"), tree.glob("dist/*.whl")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"setup.py", "pyproject.toml", *(f"convselect/kernels/csrc/{name}" for name in sources)} <= names
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("convselect/")}
    files = {str(path.relative_to(tree)) for path in (tree / "convselect").rglob("*") if path.is_file()}
    assert packed == {"convselect/kernels/_csrc.so", *(name for name in files if not name.endswith(".pyc"))}
    # For any Python, and for this platform only.
    assert wheel.stem.split("-")[2:] == ["py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")]


USE = """
import torch, convselect
from convselect.kernels import _library
from convselect.machine.host import cpu_capability, family_of_host
assert not _library.available()
assert not family_of_host(cpu_capability()).endswith("-c")
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, groups=8))
x = torch.randn(2, 3, 12, 12)
want = model(x)
convselect.convert(model)
torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
model(x).sum().backward()
w, d = torch.randn(8, 3, 3, 3), torch.randn(3, 1, 3, 3)
for policy, weight, groups in (("winograd4", w, 1), ("im2col_gemm", w, 1), ("depthwise", d, 3)):
    got = convselect.conv2d(x, weight, padding=1, groups=groups, policy=policy)
    torch.testing.assert_close(got, torch.conv2d(x, weight, padding=1, groups=groups), rtol=1e-4, atol=1e-4)
print(convselect.__file__)
"""


def test_without_a_working_compiler_the_package_installs_and_works(tmp_path):
    pytest.importorskip("setuptools")
    tree = copy_of_sources(tmp_path)
    done = command(sys.executable, "setup.py", "build_ext", "--inplace", cwd=tree, CC="false", LDSHARED="false")
    assert "failed" in done.stdout + done.stderr
    assert not list(tree.rglob("*.so"))
    command(sys.executable, "setup.py", "bdist_wheel", cwd=tree, CC="false", LDSHARED="false")
    assert [path.stem.split("-")[2:] for path in tree.glob("dist/*.whl")] == [["py3", "none", "any"]]
    environment = {"PYTHONPATH": str(tree), "CONVSELECT_LIBRARY": ""}
    done = fresh.run(
        ["-W", "error::UserWarning:convselect", "-c", USE], cwd=tree, env={**os.environ, **environment}, check=True
    )
    assert Path(done.stdout.strip()).is_relative_to(tree)


def test_switched_off_the_package_works(built):
    environment = {"CONVSELECT_NO_NATIVE": "1", "CONVSELECT_LIBRARY": str(built), "PYTHONPATH": str(ROOT)}
    fresh.run(["-c", USE], env={**os.environ, **environment}, check=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_makefile_builds_what_changed(tmp_path):
    def asked(*changed: str) -> str:
        options = [option for name in changed for option in ("-W", name)]
        return command("make", "-n", *options, "setup", f"VENV={tmp_path}", cwd=ROOT).stdout

    assert "pip install" in asked()
    (tmp_path / ".convselect-ready").touch()
    assert "setup.py" not in asked()
    assert "pip install" not in asked()
    for name in ("runtime.c", "simd.inc", "kernels.h"):
        edited = asked(f"convselect/kernels/csrc/{name}")
        assert "setup.py --quiet build_ext --inplace" in edited
        assert "pip install" not in edited
    assert "pip install" in asked("pyproject.toml")
