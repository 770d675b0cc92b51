"""What users get wrong on the command line: one sentence, the right exit status, no traceback. And a sign of life from
what takes long, where no bar can be drawn."""

from __future__ import annotations

import csv
import errno
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import convselect
from convselect.cli import console, main, model, report, tools, tune
from convselect.demo import demo
from convselect.doctor.bench import LARGEST_SIZE, parse

SHORT = "1x8x12x12 8 3x3 p1"


def run(*arguments):
    return CliRunner().invoke(main._app(), [str(one) for one in arguments])


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder to work in, with the files of all kinds that people name by mistake, and no store of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVSELECT_STORE", str(tmp_path / "own.sqlite"))
    convselect.set_store(None)
    monkeypatch.setattr(demo, "restart_with_tuned_malloc", lambda: None)  # it would replace the process of the tests
    (tmp_path / "folder").mkdir()
    for suffix in ("sqlite", "csv", "json", "csv.gz"):
        (tmp_path / f"text.{suffix}").write_text("hello,\nI am text\n")
        (tmp_path / f"empty.{suffix}").touch()
        (tmp_path / f"folder.{suffix}").mkdir()
        (tmp_path / f"bytes.{suffix}").write_bytes(b"\x1f\x8b\x08\x00\xff\xfe\x00\n" * 9)
    yield tmp_path
    monkeypatch.undo()
    convselect.set_store(None)


NAMES = ("none.csv", "text.sqlite", "text.csv", "empty.json", "folder.csv", "bytes.csv", "bytes.csv.gz", "bytes.json")
ON_FILES = [
    *(("store", name, "{file}") for name in ("list", "show", "verify")),
    ("store", "export", "{file}", "out.json"),
    ("store", "import", "{file}"),
    ("store", "import", "--find-db", "{file}"),
    ("store", "merge", "{file}"),
    ("store", "prune", "{file}", "--rows", "3"),
    ("report", "{file}"),
    ("train", "{file}", "--family", "cpu-x86", "--out", "trained"),
    ("evaluate", "{file}"),
    ("evaluate", "{file}", "--artifact", "{file}"),
    ("collect", "{file}", "--out", "times.sqlite", "--no-malloc-tuning"),
    ("tune", "{file}"),
]


@pytest.mark.parametrize("command", ON_FILES, ids=" ".join)
def test_a_file_that_is_not_what_it_should_be(command, files):
    for name in NAMES:
        told = run(*(word.format(file=name) for word in command))
        assert told.exception is None or isinstance(told.exception, SystemExit), (name, told.exception)
        assert told.exit_code == 2 or (told.exit_code in (0, 1) and name != "none.csv"), (name, told.output)
        assert "Errno" not in told.output, told.output
        if told.exit_code == 2:
            assert told.stderr.startswith(f"convselect {' '.join(command[: 1 + (command[0] == 'store')])}: ")
            assert told.stderr.count("\n") == 1, told.stderr
            assert name in told.stderr, told.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("store", "list"), ("store", "show"), ("store", "verify"), ("store", "export", "out.json"),
        ("store", "prune", "--rows", "3"), ("report", "store"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_without_a_store_of_ones_own(command, files):
    told = run(*command)
    assert told.exit_code == 2
    assert "there is no store yet" in told.stderr
    assert "own.sqlite is made as soon as" in told.stderr
    assert "convselect tune" in told.stderr
    assert not (files / "own.sqlite").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("report", "resnet5"), "resnet18, resnet50"),
        (("tune", "resnet5"), "resnet18, resnet50"),
        (("demo", "--no-malloc-tuning", "--only", "resnet5"), "resnet18, resnet50"),
        (("report", "os:getcwd", "--input", "1,3,8,8"), "not a torch.nn.Module"),
        (("report", "os:nothing", "--input", "1,3,8,8"), "no function 'nothing'"),
        (("report", "nothing_at_all:f", "--input", "1,3,8,8"), "cannot import"),
        (
            ("bench", SHORT, "--directions", "forward,sideways"),
            "backward_data, backward_weight, not 'sideways'",
        ),
        (("tune", SHORT, "--directions", "sideways"), "backward_data, backward_weight, not 'sideways'"),
        (("explain", f"1x8x12x12 8 3x3 p{10**20}"), "no size may be larger"),
        (("report", "resnet18", "--out", "none/x.html"), "--out: there is no directory"),
        (("report", "resnet18", "--input", "1,3,32,32", "--no-timing", "--times", "none.csv"), "there is no none.csv"),
        (("report", "resnet18", "--out", "folder"), "--out: folder is a folder"),
        (("demo", "--no-malloc-tuning", "--json", "folder"), "--json: folder is a folder"),
        (("demo", "--no-malloc-tuning", "--json", "none/x.json"), "--json: there is no directory"),
        (("evaluate", "text.csv", "--json", "none/x.json"), "--json: there is no directory"),
        (("train", "text.csv", "--family", "f", "--out", "text.csv"), "--out: text.csv is no folder"),
        (("store", "import", "text.json", "--store", "folder"), "folder is a folder, not a store"),
    ],
)
def test_other_mistakes(arguments, said, files):
    told = run(*arguments)
    assert told.exit_code == 2, told.output
    assert said in told.stderr
    assert told.stderr.count("\n") == 1


TWO_LINES = """
from torch import nn
class Net(nn.Module):
    def forward(self, x):
        raise RuntimeError("two\\nlines")
"""


@pytest.mark.parametrize(
    "command",
    [("report", "--no-timing"), ("tune",), ("collect", "--out", "o.sqlite", "--no-malloc-tuning", "--model")],
    ids=" ".join,
)
def test_a_model_that_does_not_run(command, files, monkeypatch):
    (files / "two_lines.py").write_text(TWO_LINES)
    monkeypatch.syspath_prepend(str(files))
    told = run(*command, "two_lines:Net", "--input", "1,3,8,8")
    assert told.exit_code == 2, told.output
    assert told.stderr.endswith("RuntimeError: two lines\n")
    assert "two_lines:Net on an input of 1,3,8,8" in told.stderr
    assert told.stderr.count("\n") == 1
    told = run(*command, "torch.nn:Identity", "--input", f"1,1,{10**8},{10**8}")
    assert told.exit_code == 2, told.output
    assert "cannot be made" in told.stderr


def test_a_search_goes_on_where_its_log_cannot_be_written(files, monkeypatch):
    (files / "text").write_text("a file where a folder should be")
    monkeypatch.setenv("CONVSELECT_STORE", str(files / "text" / "own.sqlite"))
    convselect.set_store(None)
    said = convselect.ConvselectWarning
    with pytest.warns(said, match="in memory only"), pytest.warns(said, match="not kept for later searches"):
        told = run("tune", SHORT, "--trials", 1, "--strategy", "random", "--threads", 1)
    assert told.exit_code == 0, told.output
    assert "geometric mean" in told.stdout


def test_a_file_that_may_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for a user who is not root
    with pytest.raises(ValueError, match=r"--out: .*x may not be written"):
        console.check_writable(tmp_path / "x", "--out")
    assert "--out" in run("train", "x", "--family", "f", "--out", tmp_path).stderr


def test_sizes_at_the_limit_are_read():
    assert parse(f"1x1x1x{LARGEST_SIZE} 1 1x1").W == LARGEST_SIZE
    for text in (f"1x1x1x{LARGEST_SIZE} 1 1x1 p1", f"1x1x{LARGEST_SIZE + 1}x1 1 1x1", f"{2**40}x1x1x1 1 1x1"):
        with pytest.raises(ValueError, match="no size may be larger"):
            parse(text)


def test_sentences():
    assert console.sentence(FileNotFoundError(errno.ENOENT, "No such file", "a.csv")) == "there is no a.csv"
    assert console.sentence(IsADirectoryError(errno.EISDIR, "Is a directory", "a")) == "a is a folder, not a file"
    assert console.sentence(OSError(errno.ENOSPC, "No space left on device", "a")) == "a: No space left on device"
    assert console.sentence(OSError("the store is switched off")) == "the store is switched off"
    assert console.sentence(ValueError("x")) == "x"
    with pytest.raises(convselect.cli.console.typer.Exit), console.refusing("store list"):
        raise csv.Error("field larger than field limit")
    with pytest.raises(BrokenPipeError), console.refusing("store list"):  # `| head -1`: for typer, which ends quietly
        raise BrokenPipeError


# ---- signs of life ------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """rich's clock; tests move it."""
    from rich import progress

    now = [0.0]
    init = progress.Progress.__init__
    monkeypatch.setattr(
        progress.Progress, "__init__", lambda self, *a, **k: init(self, *a, **{**k, "get_time": lambda: now[0]})
    )
    return now


def test_lines_in_place_of_a_bar(clock, capsys):
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    with console.progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    ) as bar:
        task = bar.add_task("layers", total=300)
        for second in range(25):
            clock[0] = float(second)
            bar.update(task, completed=second)
        bar.update(task, description="end to end", completed=0)
        bar.update(task, completed=1)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "layers 0/300 0:00:00", "layers 10/300 0:00:10", "layers 20/300 0:00:20", "end to end 0/300 0:00:24",
    ]  # fmt: skip


def test_lines_of_what_cannot_say_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.01)
    seen = ""
    with console.at_work("training"):
        while seen.count("\n") < 3:
            seen += capsys.readouterr().err
    assert set(seen.split()) == {"training", "0:00:00"}
    capsys.readouterr()
    assert capsys.readouterr().err == ""


def test_a_bar_where_one_can_be_drawn(monkeypatch):
    from rich.progress import Progress, TextColumn

    real = console.console
    for dumb, drawn in ((False, True), (True, False)):
        out = real(stderr=True)
        monkeypatch.setattr(type(out), "is_terminal", property(lambda _: True))
        monkeypatch.setattr(type(out), "is_dumb_terminal", property(lambda _, dumb=dumb: dumb))
        bar = console.progress(TextColumn("x"))
        assert (type(bar) is Progress, not bar.disable) == (drawn, drawn)


@pytest.mark.parametrize("module", [model, report, tune])
def test_commands_that_take_long_use_it(module):
    """No other bar of rich's, which would be silent where it cannot be drawn."""
    source = Path(module.__file__).read_text()
    assert " progress(" in source
    assert "Progress(" not in source.replace(" progress(", "")
    assert "track" not in source


def test_tune_says_how_far_it_is(files):
    told = run("tune", SHORT, "--trials", 1, "--strategy", "random", "--json", "--threads", 1)
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)
    assert told.stderr.splitlines()[0] == "1 problems 0/1 0:00:00 first times"
    assert any(line.startswith("comparing with what runs now 0/1") for line in told.stderr.splitlines())


def test_an_interruption_of_the_final_comparison_is_one(files, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("convselect.tune.tuning.Tuning.confirm", stop)
    told = run("tune", SHORT, "--trials", 1, "--strategy", "random", "--threads", 1)
    assert told.exit_code == 130, told.output
    assert "interrupted: what was found is kept" in told.stdout


def test_output_that_cannot_be_written(files, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tools.typer, "echo", full)
    monkeypatch.setattr("sys.argv", ["convselect", "explain", SHORT])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 1
    assert capsys.readouterr().err == "convselect: the output cannot be written: No space left on device\n"


def test_without_standard_output(monkeypatch):
    """As `>&-` starts a program."""
    monkeypatch.setattr("sys.stdout", None)
    console.console().print("nowhere")
