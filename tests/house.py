"""Counts the structure of the package: `python -m tests.house` prints what `test_house.py` asserts.

Imports are read off the source, lazy ones too; only those for type checkers are left out, which never run. A room is a
folder of the package, or a module beside them. Calls are counted by `sys.setprofile`: frames and files of the package
that the first call of a converted layer, and a later one, pass through.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "convselect"

ORDER = (
    "cli > demo report > doctor > convselect > convert distributed enabled explain summary > freeze > layer >"
    " functional > graph > eager > tune > model > store > choice measure > aten machine > kernels > base"
)
"""A room imports only what stands to the right of it."""


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("convselect", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    """The first part of a name below the package; the package itself for its own `__init__`."""
    return module.split(".")[1] if "." in module else module


@functools.cache
def imports() -> set[tuple[str, str]]:
    """(module, module that it imports), anywhere in its source."""
    files = modules()
    return {(name, found) for name, path in files.items() for found in _imported(path) & files.keys() - {name}}


def _imported(path: Path) -> set[str]:
    tree, files = ast.parse(path.read_text()), modules()
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in files else node.module)
    return found


def arrows() -> set[tuple[str, str]]:
    """(room, room that it imports)."""
    return {(room(a), room(b)) for a, b in imports() if room(a) != room(b)}


def backwards() -> list[str]:
    """Imports between rooms that do not point to the right in `ORDER`, and rooms that have no place there."""
    place = {name: level for level, names in enumerate(ORDER.split(" > ")) for name in names.split()}
    homeless = sorted({room(name) for name in modules()} - place.keys())
    wrong = sorted(f"{a} imports {b}" for a, b in arrows() if place.get(a, -1) >= place.get(b, 99))
    return homeless + wrong


def circles() -> list[list[str]]:
    """Groups of modules that import each other, by whatever detours."""
    edges: dict[str, set[str]] = {name: set() for name in modules()}
    for a, b in imports():
        edges[a].add(b)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for following in edges[todo.pop()] - seen:
                seen.add(following)
                todo.append(following)
        return seen

    reach = {name: reached(name) for name in edges}
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in edges}
    return sorted(list(group) for group in groups if group)


# ---- calls ----------------------------------------------------------------------------------------------------------

_CALLS = """
import json, sys, torch, convselect
folder = convselect.__path__[0]
torch.set_num_threads(1)
layer = convselect.convert(torch.nn.Conv2d(64, 64, 3, padding=1), policy="auto")
x = torch.randn(1, 64, 56, 56)
def passed():
    seen = []
    def look(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            seen.append(frame.f_code.co_filename[len(folder) + 1:])
    sys.setprofile(look)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return {"files": len(set(seen)), "frames": len(seen), "names": sorted(set(seen))}
with torch.no_grad():
    first = passed()
    layer(x)
    print(json.dumps({"first": first, "cached": passed()}))
"""


def calls() -> dict[str, dict[str, object]]:
    """{"first", "cached"} -> files and frames of the package that a call passes, in a fresh process."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "CONVSELECT_CACHE": cache, "PYTHONPATH": str(PACKAGE.parent)}
        done = subprocess.run(
            [sys.executable, "-c", _CALLS], env=environment, capture_output=True, text=True, check=True
        )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def _lines() -> Iterator[str]:
    files = modules()
    yield f"files at the root of the package: {len(list(PACKAGE.glob('*.py')))}"
    yield f"modules: {len(files)}, lines: {sum(len(p.read_text().splitlines()) for p in files.values())}"
    yield f"rooms: {len({room(name) for name in files})}, imports between them: {len(arrows())}"
    yield f"imports backwards: {len(backwards())}, circles of modules: {len(circles())}"
    for name, found in calls().items():
        yield f"a {name} call: {found['files']} files, {found['frames']} frames"


if __name__ == "__main__":
    print("\n".join(_lines()))
