"""The pages: every block of Python runs, every command exists, every table of figures is that of its results."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import inspect
import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from markdown_it import MarkdownIt
from torchvision_stub import without_torchvision
from typer.main import get_command

import convselect
from benchmarks import _tables, _timm_tables, figures
from convselect.base import lru, settings
from convselect.cli.main import _app
from convselect.doctor import doctor
from convselect.kernels.pool import BY_NAME
from convselect.store import process

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "pycon", "bash", "text", "csv", "json"}
NOT_RUN = re.compile(r"<!-- not run: (?P<why>\S.*?) -->\s*$")
"""In Markdown right before a block of Python, which is then compiled only."""
NEEDS = re.compile(r"<!-- needs: (?P<names>\w+(?:, \w+)*) -->\s*$")
"""In Markdown right before a block of Python that runs if these packages are installed."""
IDS = [page.name for page in PAGES]


class Block(NamedTuple):
    """A fenced block. `not_run` is the reason if the page has one, `line` the first line of its text, from 1, `needs`
    the packages that it imports and that need not be there."""

    language: str
    text: str
    line: int
    not_run: str | None
    needs: tuple[str, ...] = ()


def blocks(page: Path) -> list[Block]:
    tokens = MarkdownIt().parse(page.read_text())
    found = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type in ("fence", "code_block"):
            comment = before.content if before is not None and before.type == "html_block" else ""
            mark, needs = NOT_RUN.search(comment), NEEDS.search(comment)
            names = tuple(needs["names"].split(", ")) if needs else ()
            found.append(
                Block(token.info.strip(), token.content, token.map[0] + 2, mark["why"] if mark else None, names)
            )
    return found


def of_language(page: Path, language: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == language]


@pytest.fixture
def sandbox(tmp_path, monkeypatch) -> Iterator[None]:
    """Files go to a folder of the test's own, and what a page sets for the process is taken back."""
    monkeypatch.chdir(tmp_path)
    before = settings.defaults()
    yield
    convselect.disable()
    settings.set_default_settings(before)
    process.configure(None)
    lru.clear()


def test_the_parser_of_this_file_sees_what_it_must(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n<!-- not run: needs a GPU -->\n```python\nx = 1\n```\n\n1. item\n\n   ```bash\n   ls\n   ```\n\n"
        "<!-- not run: -->\n```python\ny\n```\n\n<!-- needs: one, two -->\n```python\nz\n```\n"
    )
    assert blocks(page) == [
        Block("python", "x = 1\n", 5, "needs a GPU"),
        Block("bash", "ls\n", 11, None),
        Block("python", "y\n", 16, None),  # without a reason it runs
        Block("python", "z\n", 21, None, ("one", "two")),
    ]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_block_says_what_it_is(page):
    assert {block.language for block in blocks(page)} <= LANGUAGES


# ---- Python ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default::convselect.ConvselectWarning")  # there may be no trained model for this machine
@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_blocks_run(page, sandbox):
    """From top to bottom, in one namespace, as a reader would type them."""
    if not (of_language(page, "python") or of_language(page, "pycon")):
        return
    run_blocks(page, ())


LIBRARIES = [(page, needs) for page in PAGES for needs in dict.fromkeys(b.needs for b in blocks(page)) if needs]


@pytest.mark.filterwarnings("default")  # of other people's packages
@pytest.mark.parametrize(("page", "needs"), LIBRARIES, ids=[f"{page.name}-{'-'.join(n)}" for page, n in LIBRARIES])
def test_python_blocks_with_a_library_run(page, needs, sandbox):
    """After the page's blocks that need none. A page says so where a block needs a package that may be missing."""
    with without_torchvision() if "timm" in needs else contextlib.nullcontext():
        for name in needs:
            pytest.importorskip(name)
        run_blocks(page, needs)


def run_blocks(page: Path, needs: tuple[str, ...]) -> None:
    """Run the blocks that need no package, or these, and compile the others."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            # Errors name the line of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
            if block.not_run is None and block.needs in ((), needs):
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(code, names)
        elif block.language == "pycon":
            test = doctest.DocTestParser().get_doctest(block.text, names, page.name, str(page), block.line - 1)
            flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
            said = io.StringIO()
            failed, tried = doctest.DocTestRunner(optionflags=flags).run(test, out=said.write, clear_globs=False)
            names.update(test.globs)
            assert tried, f"line {block.line} of {page.name}: no example in it"
            assert not failed, said.getvalue()


def test_blocks_that_import_another_package_say_so():
    """Otherwise the tests would fail where it is not installed."""
    installed_with_us = {"torch", "convselect", "numpy", *sys.stdlib_module_names}
    for page in PAGES:
        for block in of_language(page, "python"):
            found = re.findall(r"^(?:import|from) (\w+)", block.text, re.MULTILINE)
            assert block.not_run or set(found) <= {*installed_with_us, *block.needs}, f"{page.name}, line {block.line}"


# ---- commands -------------------------------------------------------------------------------------------------------


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without comments, variables set for it and the text around it."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        for stop in ("&&", "|", ";"):
            assert stop not in words, "one command a line"
        if words:
            yield words


def check_convselect(words: list[str]) -> None:
    """Parses the words as the command line would, and runs nothing."""
    command = get_command(_app())
    with contextlib.ExitStack() as stack:
        context = None
        while hasattr(command, "commands"):
            assert words[0] in command.commands, f"there is no command {words[0]}"
            command, words = command.commands[words[0]], words[1:]
        context = command.make_context(command.name, list(words))
        stack.enter_context(context)


def check_command(words: list[str]) -> None:
    """Knows every command that the pages use: one that it does not know is an error of this test or of the page."""
    head, *rest = words
    if head == "convselect":
        check_convselect(rest)
    elif head == "python" and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]) is not None, f"there is no module {rest[1]}"
    elif head == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {rest[0]}"
    elif head == "pip":
        extras = re.findall(r"[\[,]([a-z]+)(?=[\],])", " ".join(rest))
        known = re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert rest[0] == "install"
        assert set(extras) <= set(known), f"not all of these extras exist: {extras}"
    elif head == "python" and rest[0] != "your_program.py":
        script = ROOT / rest[0]
        assert script.is_file(), f"there is no script {rest[0]}"
        for option in (word.partition("=")[0] for word in rest[1:] if word.startswith("--")):
            assert f'"{option}"' in script.read_text(), f"{rest[0]} has no option {option}"
    else:
        assert head == "python", f"not a known command: {shlex.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_exist(page):
    for block in of_language(page, "bash"):
        for words in commands(block):
            try:
                check_command(words)
            except Exception as error:
                raise AssertionError(f"{page.name}, line {block.line} on: {shlex.join(words)}: {error}") from error


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("convselect tunes x", "no command tunes"),
        ("convselect tune x --trial-count 3", "No such option"),
        ("convselect tune x --trials many", "valid integer"),
        ("convselect store show --nothing", "No such option"),
        ("convselect train x", "(?i)missing"),
        ("python -m benchmarks.nothing", "no module"),
        ("python nothing.py", "no script"),
        ("python setup.py --nothing", "no option"),
        ("make nothing", "no target"),
        ("pip install '.[nothing]'", "extras"),
        ("curl somewhere", "not a known command"),
    ],
)
def test_what_does_not_exist_is_noticed(line, why):
    with pytest.raises(Exception, match=why):
        check_command(shlex.split(line))


def _of_the_site(name: str) -> Any:
    """A module of those that build the site; they need no Sphinx."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        spec.loader.exec_module(module)
    return module


def test_the_command_line_page_has_every_command_and_option():
    text = _of_the_site("commands").command_reference()
    assert _of_the_site("conf").MARK in (ROOT / "docs" / "command-line.md").read_text()
    sections = dict(re.findall(r"^#+ `(convselect[^`]*)`\n(.*?)(?=^#+ `|\Z)", text, re.M | re.S))

    def walk(name: str, command: Any) -> Iterator[str]:
        yield name
        options = [option for param in command.params for option in (*param.opts, *param.secondary_opts)]
        missing = [option for option in options if option.startswith("--") and option not in sections[name]]
        assert not missing, f"{name} lacks {missing}"
        for inner, sub in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {inner}", sub)

    assert sorted(walk("convselect", get_command(_app()))) == sorted(sections)
    by_hand = (ROOT / "docs" / "command-line.md").read_text()
    for name in get_command(_app()).commands:
        assert f"`convselect {name}" in by_hand, f"docs/command-line.md does not say what {name} is for"


# ---- names and figures ----------------------------------------------------------------------------------------------


def test_the_page_of_variables_names_exactly_those_that_are_read():
    page = (ROOT / "docs" / "environment.md").read_text()
    rows = re.findall(r"^\| `(CONVSELECT_[A-Z_]+)", page, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == set(doctor.VARIABLES)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_variables_that_pages_speak_of_exist(page):
    assert set(re.findall(r"CONVSELECT_[A-Z_]*[A-Z]", page.read_text())) <= set(doctor.VARIABLES)


def test_every_algorithm_has_its_place():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    missing = [name for name in BY_NAME if f"`{name}`" not in page]
    assert not missing


def test_tables_of_figures_are_those_of_the_results():
    pages = [
        (ROOT / name).read_text() for name in ("README.md", "docs/algorithms.md", "docs/data-set.md", "docs/results.md")
    ]
    found = _tables.tables()
    assert len(found) == 15
    for name, text in found.items():
        assert any(text in page for page in pages), (
            f"the table {name} is not as `python -m benchmarks.figures` prints it"
        )


def test_winners_count_what_is_fastest():
    times = {
        "a": {"native": 4.0, "direct": 2.0, "fft": 8.0},
        "b": {"native": 8.0, "direct": 1.0},
        "c": {"native": 3.0, "fft": 5.0},
    }
    found = _tables.winners(times)
    assert list(found) == ["direct", "native", "fft"]
    assert found["direct"] == (2, 2, pytest.approx(4.0))
    assert found["native"] == (3, 1, 1.0)
    assert found["fft"][:2] == (2, 0)
    assert _tables.table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_figures_are_drawn(tmp_path):
    figures.draw_shares({"1x1": {"native": 0.5, "Winograd": 0.5}}, tmp_path / "shares.svg")
    figures.draw_classes(json.loads(_tables.KERNELS.read_text()), tmp_path / "classes.svg")
    figures.draw_networks(json.loads(_tables.NETWORKS.read_text()), tmp_path / "networks.svg")
    figures.draw_timm(json.loads((_tables.RESULTS / _timm_tables.TIMM["AVX2"]).read_text()), tmp_path / "timm.svg")
    for name in ("shares", "classes", "networks", "timm"):
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
    assert {p.name for p in figures.FIGURES.glob("*.svg")} == {"winners.svg", "classes.svg", "networks.svg", "timm.svg"}


# ---- links ----------------------------------------------------------------------------------------------------------


def _anchors(page: Path) -> set[str]:
    """As GitHub and Sphinx make them of headings in plain words."""
    tokens = MarkdownIt().parse(page.read_text())
    titles = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "DESIGN.md"])
def test_links_of_the_pages_outside_the_site(name):
    """Those inside are checked by `make docs`."""
    page = ROOT / name
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(found), f"{page.name} links to {target}"


def test_every_page_is_in_the_navigation():
    """Sphinx warns of it as well, but only if it is installed."""
    conf = _of_the_site("conf")
    listed = ["index", *(page for pages in conf.NAVIGATION.values() for page in pages)]
    assert sorted(listed) == sorted(page.stem for page in (ROOT / "docs").glob("*.md"))


def test_names_of_the_interface_are_documented():
    conf = _of_the_site("conf")
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert len(names) > 40
    for name in names:
        assert re.search(rf"auto(function|class|exception):: {re.escape(name)}\n", conf._documented(name))
        module, _, last = name.rpartition(".")
        assert inspect.getdoc(getattr(sys.modules[module], last)), name
