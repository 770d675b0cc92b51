"""The C library touches no memory but its operands' and its result's: beside guard pages, and under sanitizers."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import _guarded
import pytest
from test_csrc import CC, ENTRIES, KERNELS, NOT_INLINE, ROOT, SHARED, command, current_library

from convselect.kernels import _library

pytestmark = [
    pytest.mark.timeout(900),  # the first of them may compile
    pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="an installed package cannot be built from here"),
    pytest.mark.skipif(shutil.which(CC[0]) is None, reason=f"there is no C compiler ({CC[0]})"),
]


def compiled(
    folder: Path, *extra: str, without: tuple[str, ...] = (), of: Mapping[str, Sequence[str]] | None = None
) -> Path:
    """The library, compiled with setup.py's flags but for some, each source by a process of its own.

    Args:
        of: name of a source, without its suffix -> further flags for it alone.
    """
    of = of or {}
    assignments = {
        node.targets[0].id: node.value for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }  # fmt: skip
    flags = [flag for flag in ast.literal_eval(assignments["FLAGS"]) if flag not in without]
    flags += ["-fPIC", *extra]
    compilers = [
        subprocess.Popen([*CC, *flags, *of.get(path.stem, ()), "-c", str(path), "-o", str(folder / f"{path.stem}.o")])
        for path in sorted(_guarded.CSRC.glob("*.c"))
    ]
    assert [compiler.wait() for compiler in compilers] == [0] * len(compilers)
    command(*CC, *flags, "-shared", *folder.glob("*.o"), "-o", folder / "library.so")
    return folder / "library.so"


@pytest.fixture(scope="session")
def current(tmp_path_factory) -> Path:
    return current_library(tmp_path_factory.mktemp("current"))


STRASSEN = "cs_strassen_frozen"  # it takes few of the listed problems
PRODUCTS = ["cs_product_frozen", STRASSEN]


def assert_ran(ran: dict[str, int], names: Iterable[str]) -> None:
    """Every kernel ran in some direction, and at every instruction set alike."""
    for name in names:
        for before in ENTRIES[name]:
            counts = {case: n for case, n in ran.items() if case.startswith(f"{name}{before or ''} ")}
            assert counts, f"{name}{before or ''} ran nowhere"
            by_isa: dict[str, set[tuple[str, int]]] = {}
            for case, n in counts.items():
                what, isa = case.rsplit(" isa=")
                by_isa.setdefault(isa, set()).add((what, n))
            assert len({frozenset(cases) for cases in by_isa.values()}) == 1, f"instruction sets differ: {counts}"


@pytest.mark.sanitizer
def test_no_byte_beside_an_operand_or_result_is_touched(current):
    """All in one process: what a result should be takes as long to compute as a kernel's share of the calls."""
    environment = {"CONVSELECT_LIBRARY": str(current)}
    ran = _guarded.run(environment, kernels=list(ENTRIES), sides=[True, False], random=60, seed=6, listed="all layouts")
    assert_ran(ran, ENTRIES.keys() - {STRASSEN})


# Runs that take little longer than their process takes to start.
OTHERS = {
    "products": dict(kernels=PRODUCTS, random=0, seed=6, listed="", pointwise=150),
    "patches": dict(kernels=["cs_patches"], random=0, seed=10, listed="", patches=150),
    "volumes": dict(volumes=True, random=100, seed=5),
    "blocks": dict(blocks=True, random=80, seed=4),
    "steps": dict(steps=True, random=132, seed=8),
    "spots": dict(spots=True, random=100, seed=6),
}
SPOTS = 2 * 3 * 4 * 2  # layouts, directions, dtypes, right and wrong


def assert_others_ran(ran: dict[str, dict[str, int]]) -> None:
    levels = _library.library().cs_best_isa() + 1
    assert_ran(ran["products"], PRODUCTS)
    assert_ran(ran["patches"], ["cs_patches"])
    assert len(ran["patches"]) == 3 * levels
    assert len(ran["volumes"]) == len(_guarded.volume_kernels()) * 3 * 3 * levels  # directions, dtypes
    assert len(ran["blocks"]) == 2 * levels
    assert len(ran["steps"]) == 13 * levels
    assert len(ran["spots"]) == SPOTS


@pytest.mark.sanitizer
def test_no_byte_beside_the_operands_of_the_others_is_touched(current):
    """Products, patches, volumes, blocks, steps; a spot check reads nothing beside its operands."""
    specs = {name: {**spec, "sides": [True, False]} for name, spec in OTHERS.items()}
    ran = _guarded.run_all(specs, {"CONVSELECT_LIBRARY": str(current)})
    assert_others_ran(ran)
    assert max(ran["products"].values()) == 600
    least = {"products": 40, "patches": 50, "blocks": 20, "steps": 10}
    assert {name for name, least in least.items() if min(ran[name].values()) <= least} == set()


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory) -> dict[str, str]:
    """The environment for a process that uses a library with the address and undefined-behaviour sanitizers."""
    if "clang" in command(*CC, "--version").stdout:
        pytest.skip("clang links its sanitizers into the program, which here is Python")
    runtimes = [command(*CC, f"-print-file-name={name}").stdout.strip() for name in ("libasan.so", "libubsan.so")]
    if not all(os.path.isabs(path) for path in runtimes):
        pytest.skip("the compiler has no sanitizer runtime")
    # -Og compiles in half the time of -O1, and inlining would compile, and check, the same lines again and again.
    # Null pointers and ends of objects are the address sanitizer's as well. The units are one source for three widths
    # of vectors: arithmetic is looked at in one of them.
    undefined = ("-fsanitize=undefined", "-fno-sanitize=null,object-size")
    library = compiled(
        tmp_path_factory.mktemp("sanitized"),
        "-Og", "-g1", "-fno-inline", NOT_INLINE, "-fsanitize=address", "-fno-sanitize-recover=all",
        without=("-O3", "-g0"), of=dict.fromkeys((*SHARED, "isa_base"), undefined),
    )  # fmt: skip
    return {
        "CONVSELECT_LIBRARY": str(library),
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep what they have until the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


@pytest.mark.sanitizer
def test_sanitizers_have_nothing_to_say(sanitized):
    grouped = ["cs_grouped_frozen"]  # it takes few problems
    specs = {
        "all": dict(kernels=list(ENTRIES), random=40, seed=2, listed="one layout"),
        "grouped": dict(kernels=grouped, random=60, seed=7, listed=""),
        **OTHERS,
        "products": {**OTHERS["products"], "seed": 3, "pointwise": 60},
        "patches": {**OTHERS["patches"], "seed": 3, "patches": 60},
        "blocks": {**OTHERS["blocks"], "seed": 5, "random": 40},
        "spots": {**OTHERS["spots"], "seed": 7, "random": 60},
        "steps": {**OTHERS["steps"], "seed": 9, "random": 176},
        "volumes": {**OTHERS["volumes"], "seed": 6, "random": 60},
    }
    ran = _guarded.run_all({name: {**spec, "sides": [None]} for name, spec in specs.items()}, sanitized)
    assert_ran(ran["all"], ENTRIES.keys() - grouped - {STRASSEN})
    assert_ran(ran["grouped"], grouped)
    assert_others_ran(ran)
    assert min(ran["blocks"].values()) > 20
    assert min(ran["steps"].values()) > 10


BUGS = {
    "reads past an operand": ("float value = ((const float *)a)[{a}]; (void)*(volatile float *)&value;", "SIGSEGV"),
    "reads ahead of an operand": ("float value = ((const float *)b)[-1]; (void)*(volatile float *)&value;", "SIGSEGV"),
    "writes past its result": ("((float *)out)[{out}] = 1;", "SIGSEGV"),
    "writes ahead of its result": ("((float *)out)[-1] = 1;", "wrote beside its result|SIGSEGV"),
    "writes to an operand": ("*(volatile float *)a = *(const float *)a;", "SIGSEGV"),
    "leaves the result unwritten": ("", "relative error nan"),
}


@pytest.mark.sanitizer
@pytest.mark.parametrize("bug", BUGS)
def test_the_guards_notice(bug, tmp_path):
    """A kernel with one fault each, in place of every other."""
    code, how = BUGS[bug]
    x, y = "conv->N * conv->C * conv->H * conv->W", "conv->N * conv->K * conv->P * conv->Q"
    w = "conv->K * (conv->C / conv->groups) * conv->R * conv->S"
    a, out = (f"(conv->direction == {i} ? {y} : {x})" for i in (1, 0))
    out = f"(conv->direction == 2 ? {w} : {out})"
    for name in ("convselect.h", "kernels.h"):
        shutil.copy(_guarded.CSRC / name, tmp_path)
    (tmp_path / "faulty.c").write_text(
        '#include "convselect.h"\n#include "kernels.h"\n'
        "int32_t cs_abi(void) { return CS_ABI; }\nint32_t cs_best_isa(void) { return 0; }\n"
        "void cs_free_scratch(void) {}\nint64_t cs_scratch_bytes(void) { return 0; }\n"
        "#define FAULTY(name, parameters, arguments) CS_EXPORT int32_t name parameters {"
        " (void)b; (void)out; if (conv->dtype != CS_F32) return CS_UNSUPPORTED; "
        + code.format(a=a, out=out)
        + " return CS_OK; }\nCS_KERNELS(FAULTY)\n"
    )
    command(*CC, "-std=gnu11", "-O0", "-fPIC", "-shared", tmp_path / "faulty.c", "-o", tmp_path / "faulty.so")
    with pytest.raises(AssertionError, match=how):
        _guarded.run(
            {"CONVSELECT_LIBRARY": str(tmp_path / "faulty.so")},
            kernels=[next(iter(KERNELS))], sides=[True, False], random=10, seed=3, listed="",
        )  # fmt: skip
