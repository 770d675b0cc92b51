"""Whether an environment ended on what it was asked for, and whether that loads: run by its Python,

    python .ci/check_torch.py torch==2.14.1 torchvision==0.29.1

The arguments are requirements, or wheels; none asks only that torch loads. torchvision is looked at wherever it is
installed: one that was made for another torch is found by pip, and fails when it is imported.
"""

import importlib
import importlib.metadata
import sys

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename


def wanted(asked: str) -> Requirement:
    """A requirement, or the version that a wheel's name says.

    Raises:
        InvalidRequirement, InvalidWheelFilename: it is neither.
    """
    if not asked.endswith(".whl"):
        return Requirement(asked)
    name, version, *_ = parse_wheel_filename(asked.rpartition("/")[2])
    return Requirement(f"{name}=={version}")


def wrong(asked: str) -> str | None:
    """A sentence, if it is not what is installed."""
    try:
        requirement = wanted(asked)
    except (InvalidRequirement, InvalidWheelFilename) as error:
        return f"{asked!r} is no requirement with a version, nor a wheel: {error}"
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{asked} was asked for; no {requirement.name} is installed"
    if not requirement.specifier.contains(found, prereleases=True):
        return f"{asked} was asked for; {requirement.name} {found} is installed"
    return None


def unusable(name: str) -> str | None:
    """A sentence, if an import of the package fails."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever it is
        advice = (
            "" if name == "torch" else f" (ask for one that fits torch as well, or uninstall it: pip uninstall {name})"
        )
        return f"{name} {importlib.metadata.version(name)} does not load: {type(error).__name__}: {error}{advice}"
    here, listed = module.__version__, importlib.metadata.version(name)
    if here.partition("+")[0] != listed.partition("+")[0]:
        return f"{name} says that it is {here}, and is listed as {listed}"
    return None


def main() -> None:
    asked = sys.argv[1:]
    found = {canonicalize_name(one.name) for one in importlib.metadata.distributions()}
    reasons = [wrong(one) for one in asked]
    reasons += [unusable(name) for name in ("torch", "torchvision") if name == "torch" or name in found]
    if any(reasons):
        sys.exit("\n".join(reason for reason in reasons if reason))


if __name__ == "__main__":
    main()
