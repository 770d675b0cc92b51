"""What is said while a plan is made and nobody can be shown a bar."""

from __future__ import annotations

from convselect.freeze import progress


def test_long_work_says_so_in_a_log(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 1e6)
    with progress.bar(5, "freezing") as tick:
        for _ in range(5):
            tick()
    assert capsys.readouterr().err == "convselect: freezing, 1 of 5\n"


def test_short_work_says_nothing(capsys):
    for total in (1, 5):
        with progress.bar(total, "freezing") as tick:
            for _ in range(total):
                tick()
    assert capsys.readouterr().err == ""
