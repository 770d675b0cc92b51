"""An environment that sees the packages of the Python that runs this, and has some of its own instead:

    python .ci/beside.py FOLDER ARGUMENT...     # the arguments are pip's: what to install

Saves another copy of everything that is the same in both, torch above all.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def fresh(folder: Path) -> Path:
    """Make an empty environment in the folder, whatever was there; return its Python."""
    venv.create(folder, clear=True, symlinks=True)
    return folder / "bin" / "python"


def see_outer(python: Path) -> None:
    """Let an environment see the packages of the Python that runs this, after its own. (They are named by a line of a
    .pth file: links to editable packages, in .pth files there, are not followed.)"""
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    site.joinpath("outer.pth").write_text(sysconfig.get_path("purelib") + "\n")


def main() -> None:
    folder, *arguments = sys.argv[1:]
    python = fresh(Path(folder))
    # Before anything else is seen: what pip finds, it does not install again.
    words = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *arguments]
    subprocess.run(words, check=True)
    see_outer(python)


if __name__ == "__main__":
    main()
