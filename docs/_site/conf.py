"""Sphinx builds the pages from the Markdown in `docs/` (`make docs`); GitHub shows the same files."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from commands import command_reference  # noqa: E402

project = "convselect"
author = "the authors of convselect"
copyright = "MIT licence"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["_site/**"]
smartquotes = False  # "auto" is a value
nitpicky = False  # types of signatures have no page of their own

html_theme = "furo"
html_title = "convselect"
html_static_path = ["static"]
html_css_files = ["extra.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_heading_anchors = 4
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
highlight_language = "text"

default_role = "code"  # docstrings have names in single backticks, as Markdown has
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 88
napoleon_use_ivar = True
napoleon_use_rtype = False

NAVIGATION = {
    "First steps": ["getting-started", "how-a-choice-is-made", "algorithms", "examples", "with-other-libraries"],
    "Further": ["training", "tuning", "store"],
    "Look up": ["compatibility", "budgets", "exactness", "environment", "command-line", "api"],
    "Help": ["troubleshooting", "adding-an-algorithm"],
    "Evidence": ["results", "data-set", "case-study-gamma-block", "comparison"],
}
"""Caption -> pages, in the order in which they are read."""
MARK = "<!-- the commands -->"


def _read(app: Any, page: str, source: list[str]) -> None:
    """What pages hold that is no Markdown: the navigation, the commands, and names of the interface (`::: name`).

    Raises:
        ValueError: the page of commands has lost its mark.
    """
    if page == "index":
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
            for caption, pages in NAVIGATION.items()
        )
    elif page == "command-line":
        if MARK not in source[0]:
            raise ValueError(f"docs/command-line.md has no {MARK}")
        source[0] = source[0].replace(MARK, command_reference())
    source[0] = re.sub(r"^::: (\S+)$", lambda found: _documented(found[1]), source[0], flags=re.MULTILINE)


def _documented(name: str) -> str:
    module, _, last = name.rpartition(".")
    __import__(module)
    found = getattr(sys.modules[module], last)
    kind = "function"
    if inspect.isclass(found):
        kind = "exception" if issubclass(found, BaseException) else "class"
    members = "   :members:\n" if kind == "class" else ""
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}\n{members}```"


def _as_restructured(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Indented blocks of docstrings are verbatim, as in Markdown."""
    for i in range(len(lines) - 2):
        depth = [len(line) - len(line.lstrip()) for line in (lines[i], lines[i + 2])]
        if lines[i].endswith(":") and not lines[i + 1].strip() and depth[1] >= depth[0] + 4:
            lines[i] += ":"


def _skip(app: Any, what: str, name: str, found: Any, skip: bool, options: Any) -> bool | None:
    """Fields of named tuples that have no description but their position."""
    return True if (inspect.getdoc(found) or "").startswith("Alias for field number") else None


def setup(app: Any) -> None:
    app.connect("source-read", _read)
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-docstring", _as_restructured, priority=400)  # before napoleon
