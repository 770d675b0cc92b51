"""timm wants torchvision for image transforms only: a stub for environments that leave it out, since it brings a torch
of its own."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator


class _AnyName(type):
    """A class that has every attribute: its own name of it."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Stub(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any torchvision module."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


def loaded_torchvision() -> types.ModuleType | None:
    """The package, or None if it is missing or does not load: one made for another torch fails as it is imported, with
    "operator torchvision::nms does not exist" (RuntimeError) or in the dynamic linker (OSError)."""
    try:
        import torchvision
    except (ImportError, RuntimeError, OSError):
        _forget()
        return None
    return torchvision  # type: ignore[no-any-return]


def _forget() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
        del sys.modules[name]


@contextlib.contextmanager
def without_torchvision() -> Iterator[None]:
    """If no torchvision loads, its modules can be imported in this context, and hold nothing."""
    if loaded_torchvision() is not None:
        yield
        return
    finder = _StubFinder()
    sys.meta_path.insert(0, finder)  # before the one that finds a torchvision that does not load
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget()
