"""Break the package on purpose, one random line at a time, and see which tests notice.

    python -m tests.mutations --of 'convselect/kernels/*fft*.py' -- tests/kernels/test_fft.py

A mutant is a copy of the repository with one change: + and - swapped, < and <= swapped, a `not` dropped, an integer
raised by one, or a `return` that returns None; C is compiled again. The same seed and sources give the same mutants.
Those that no test notices are equivalent to the original, or show what the tests miss.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SWAPPED = {"+": "-", "-": "+", "<": "<=", "<=": "<", ">": ">=", ">=": ">"}
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


class Mutant(NamedTuple):
    path: str
    begin: int  # bytes
    end: int
    new: bytes


def of_python(path: str, source: bytes) -> list[Mutant]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []

    def add(begin: tuple[int, int], end: tuple[int, int], new: str, old: str = "") -> None:
        """Replace `old`, or everything, between two (line, column) places."""
        first, last = starts[begin[0] - 1] + begin[1], starts[end[0] - 1] + end[1]
        if old:
            first = source.find(old.encode(), first, last)
            last = first + len(old)
        if first >= 0:
            found.append(Mutant(path, first, last, new.encode()))

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.BinOp, ast.Compare)):
            operands = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.left, *node.comparators)
            operators = [node.op] if isinstance(node, ast.BinOp) else node.ops
            for a, operator, b in zip(operands, operators, operands[1:], strict=False):
                if old := OPERATORS.get(type(operator)):
                    add((a.end_lineno, a.end_col_offset), (b.lineno, b.col_offset), SWAPPED[old], old)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            add((node.lineno, node.col_offset), (node.operand.lineno, node.operand.col_offset), "", "not")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            add((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), str(node.value + 1))
        elif isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
            value = node.value
            add((value.lineno, value.col_offset), (value.end_lineno, value.end_col_offset), "None")
    return found


def of_c(path: str, source: bytes) -> list[Mutant]:
    # Comments, directives and strings become blanks of the same length.
    text = re.sub(
        rb'/\*.*?\*/|//[^\n]*|^[ \t]*#[^\n]*|"[^"\n]*"', lambda m: b" " * len(m[0]), source, flags=re.S | re.M
    )
    numbers = [Mutant(path, *m.span(), b"%d" % (int(m[0]) + 1)) for m in re.finditer(rb"(?<![\w.])\d+(?![\w.])", text)]
    signs = [Mutant(path, *m.span(1), SWAPPED[m[1].decode()].encode()) for m in re.finditer(rb" (\+|-|<=?|>=?) ", text)]
    return numbers + signs


def mutants(patterns: list[str], seed: int, count: int) -> list[Mutant]:
    """Every place for a change is as likely as any other."""
    found = []
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        make = of_python if path.suffix == ".py" else of_c
        found += make(str(path.relative_to(ROOT)), path.read_bytes())
    return random.Random(seed).sample(found, min(count, len(found)))


def noticed_by(mutant: Mutant, tests: list[Path], arguments: list[str], seconds: float) -> list[str]:
    """For each folder of tests, which of them fail; "-" if none does."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "dist", "tests"))
        file = copy / mutant.path
        source = file.read_bytes()
        file.write_bytes(source[: mutant.begin] + mutant.new + source[mutant.end :])
        options = {"cwd": copy, "env": {**os.environ, "PYTHONPATH": str(copy)}, "capture_output": True, "text": True}
        if file.suffix != ".py":
            library = copy / "convselect/kernels/_csrc.so"
            library.unlink(missing_ok=True)
            subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], **options)
            if not library.exists():
                return ["the compiler"] * len(tests)
        answers = []
        for one in tests:
            shutil.rmtree(copy / "tests", ignore_errors=True)
            shutil.copytree(one, copy / "tests")
            pytest = [sys.executable, "-m", "pytest", "-q", "--maxfail=3", "-p", "no:cacheprovider", *arguments]
            try:
                result = subprocess.run(pytest, **options, timeout=seconds)
            except subprocess.TimeoutExpired:
                answers.append("the time limit")
                continue
            failed = dict.fromkeys(re.findall(r"^(?:FAILED|ERROR) (?:.*::)?([^\s\[]+)", result.stdout, flags=re.M))
            answers.append(", ".join(failed) or (f"exit status {result.returncode}" if result.returncode else "-"))
        return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", default=["convselect/**/*.py"], metavar="GLOB", help="files to break")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1200, help="a mutant that takes longer has been noticed")
    parser.add_argument("--tests", type=Path, nargs="+", default=[ROOT / "tests"], help="folders; to compare versions")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()
    for mutant in mutants(options.of, options.seed, options.count):
        source = (ROOT / mutant.path).read_bytes()
        line = source.count(b"\n", 0, mutant.begin) + 1
        change = f"{source[mutant.begin : mutant.end].decode()!r} -> {mutant.new.decode()!r}"
        answers = noticed_by(mutant, [one.resolve() for one in options.tests], options.pytest, options.seconds)
        print(f"{mutant.path}:{line} {change}", *answers, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
