"""Whether dist/ can be installed: `python .ci/check_dist.py`, by a Python that has torch and setuptools.

The wheel, which was built from the source distribution by a compiler, goes into one fresh environment, and the source
distribution, with no compiler to be found, into another; `check_install.py` looks at both. The environments see the
packages of the Python that runs this, which saves a torch each, but not convselect itself.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from beside import fresh, see_outer

HERE = Path(__file__).resolve().parent
DIST = HERE.parent / "dist"


def install(what: Path, python: Path, environment: dict[str, str]) -> None:
    # --ignore-installed: the outer environment may have an editable one. Nothing is looked for in an index.
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir", "--ignore-installed"]
    words = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(what)]
    subprocess.run(words, check=True, env=environment, cwd=python.parent)


def main() -> None:
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "CC", "LDSHARED") and not name.startswith("CONVSELECT_")
    }
    with tempfile.TemporaryDirectory() as folder:
        for expected, what in (("kernels", wheel), ("no-kernels", sdist)):
            python = fresh(Path(folder) / expected)
            see_outer(python)
            environment = inherited if what is wheel else {**inherited, "PATH": str(python.parent)}
            install(what, python, environment)
            print(f"{what.name}:", flush=True)
            subprocess.run([python, HERE / "check_install.py", expected], check=True, env=environment, cwd=folder)


if __name__ == "__main__":
    main()
