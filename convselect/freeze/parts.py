"""The tree of modules: which parts of a model are frozen, and why the modules around them are not."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from convselect.freeze.capture import why_not_captured


def parents(name: str) -> list[str]:
    """Names of the modules around this one, the innermost first: "a.b.c" -> ["a.b", "a", ""]."""
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in reversed(range(len(parts)))]


def freeze_parts(
    model: nn.Module,
    why_not_whole: str | None,
    around: tuple[str, ...],
    install: Callable[[nn.Module, tuple[str, ...], str | None], None],
) -> None:
    """Give the largest modules of `model` that hold a layer to freeze, and that nothing forbids to capture, a frozen
    forward; and one that only calls the original to those around them.

    Args:
        why_not_whole: why `model` itself cannot be captured, if that is known.
        around: why each of the modules around it was not frozen as a whole, the innermost first.
        install: `install(module, around, reason)` gives one module its forward; `reason`, if it is not None, says why
            that calls the original.
    """
    reasons: dict[str, str] = {}
    pending = [("", model)]
    seen: set[int] = set()
    while pending:
        name, module = pending.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        if not any(map(_has_weight, module.modules())):
            continue
        reason = why_not_whole if module is model and why_not_whole else _why_not_frozen(module)
        if "forward" not in vars(module) and reason != "":
            install(module, tuple(reasons.get(other, "") for other in parents(name)) + around, reason)
        if reason is not None:
            reasons[name] = not_whole(reason)
            prefix = f"{name}." if name else ""
            pending += [(prefix + child_name, child) for child_name, child in module.named_children()]


def _has_weight(module: nn.Module) -> bool:
    """Whether this module by itself has a weight that looks like one of a layer to freeze."""
    if isinstance(module, nn.Linear):
        return True
    weights = (t for t in module._parameters.values() if t is not None and not nn.parameter.is_lazy(t))
    return any(t.dim() in (3, 4, 5) for t in weights)


def _why_not_frozen(module: nn.Module) -> str | None:
    if "forward" in vars(module):
        return "Its forward was replaced."
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return ""
    return why_not_captured(module)


def not_whole(reason: str) -> str:
    return reason if reason.startswith("It") or not reason else f"It was not captured as a whole: {reason.rstrip('.')}."
