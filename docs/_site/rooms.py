"""An extension of Griffe, which reads the package for the reference, and skips folders without `__init__.py`."""

from __future__ import annotations

from typing import Any

import griffe


class Rooms(griffe.Extension):
    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        if mod.path != "convselect":
            return
        for folder in sorted(mod.filepath.parent.iterdir()):
            if any(folder.glob("*.py")) and not (folder / "__init__.py").exists():
                mod.set_member(folder.name, griffe.Module(folder.name, filepath=folder))
