"""`convselect report`: figures on the page are those of the data, and the page is whole, safe and self-contained."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from fake_model import use_fake
from race import GAINS, PREDICTED, QUICK, racing
from torch import nn
from typer.testing import CliRunner

import convselect
from convselect.base import settings
from convselect.base.problem import conv_problem
from convselect.choice.choose import Choice
from convselect.choice.outcome import Measured
from convselect.cli import main
from convselect.eager import resolve
from convselect.kernels.pool import BY_NAME
from convselect.machine import environment
from convselect.machine.environment import run_environment
from convselect.measure.rows import Row, environment_path, write_rows
from convselect.model import evaluate as ev
from convselect.model.inference import Predictor, artifact_path
from convselect.model.judging import judge_all
from convselect.model.train import Recipe, read_measured
from convselect.report import charts, of_data, of_model, page, render
from convselect.report.end_to_end import EndToEnd, Sides, Spread
from convselect.store import process
from convselect.store.store import Decision, Store

ARTIFACT = artifact_path("cpu-x86-avx512-c")
VOID = {"meta", "br", "line", "link", "img", "hr", "input"}
EVIL = '<script>alert("1")</script>&\''


class Page(HTMLParser):
    """What a browser would make of it: text by element, table rows, values of `data`; checks that elements nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.rows: list[list[str]] = []
        self.values: list[tuple[float, str]] = []
        self.text = ""
        self._value: float | None = None
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "data":
            self._value = float(dict(attrs)["value"])

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data
        if self._value is not None and self.open[-1] == "data":
            self.values.append((self._value, data))
            self._value = None

    def row(self, *starts: str) -> list[str]:
        """The one row whose cells begin with these."""
        cells = [[re.sub(r"[ \n]+", " ", cell).strip(" \n") for cell in row] for row in self.rows]
        (found,) = [row for row in cells if [c[: len(s)] for c, s in zip(row, starts, strict=False)] == [*starts]]
        return found


def is_self_contained(html: str) -> None:
    read = Page(html)
    assert not read.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not {name for _, name, _ in read.attributes} & {"src", "href", "onclick", "onload", "srcset", "action"}
    assert "http:" not in html
    assert "https:" not in html
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


class Own(nn.Conv2d):
    """Left alone, since its policy is none of ours."""

    policy = "of the house"


LEFT_ALONE = "It has an attribute `policy` of another kind."


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        Own(8, 4, 2, 2),
    )


X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


# ---- networks ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    """A report with both directions, everything timed; tests only read it."""
    with pytest.MonkeyPatch.context() as patch:
        torch.set_num_threads(1)
        use_fake(patch, "winograd4", gain=3.0)
        return of_model("small", small(), X, training=True, measure=True, seconds=0.2)


def test_layers_are_grouped_by_problem(measured):
    layers = {(layer.direction, layer.names): layer for layer in measured.layers}
    # The image needs no gradient, so the first layer poses two problems and not three.
    assert set(layers) == {
        ("forward", ("0",)), ("forward", ("2", "4")), ("backward_data", ("2", "4")), ("backward_weight", ("0",)),
        ("backward_weight", ("2", "4")),
    }  # fmt: skip
    assert layers["forward", ("2", "4")].calls == 2
    assert [layer.direction for layer in measured.layers] == sorted(
        (layer.direction for layer in measured.layers), key=["forward", "backward_data", "backward_weight"].index
    )
    assert measured.left_alone == {"5": LEFT_ALONE}


def test_a_shared_layer_is_called_twice():
    shared = nn.Conv2d(3, 3, 3, padding=1)
    report = of_model("shared", nn.Sequential(shared, shared), X, timed=False)
    (layer,) = report.layers
    assert layer.calls == 2
    assert layer.names == ("0",)


def test_a_transposed_layer_counts_for_inference():
    """Though its problem is that of a gradient, as the other layer's gradient is."""
    model = nn.Sequential(nn.ConvTranspose2d(3, 8, 2, 2), nn.Conv2d(8, 4, 3))
    report = of_model("decoder", model, X, training=True, seconds=0.1)
    assert {(one.direction, one.names, one.in_inference) for one in report.layers} == {
        ("backward_data", ("0",), True), ("backward_weight", ("0",), False), ("forward", ("1",), True),
        ("backward_data", ("1",), False), ("backward_weight", ("1",), False),
    }  # fmt: skip
    inference = next(end for end in report.end_to_end if end.mode == "inference")
    assert inference.layers_native_us == pytest.approx(sum(one.native_us for one in report.layers if one.in_inference))


def test_what_is_timed_is_not_watched(monkeypatch):
    posed = []
    explain = sys.modules["convselect.explain"]
    found = explain.problems_of
    monkeypatch.setattr(explain, "problems_of", lambda layer, x: posed.append(1) or found(layer, x))
    of_model("small", small(), X, seconds=0.05)
    assert len(posed) == 3


def test_candidates_are_timed_and_the_sums_are_theirs(measured):
    for layer in measured.layers:
        timed = {c.algorithm: c for c in layer.candidates}
        assert {c.kind for c in layer.candidates} == {"measured"}
        assert all(c.time_us.p20 <= c.time_us.median <= c.time_us.p80 for c in layer.candidates)
        assert layer.native_us == timed["native"].time_us.median
        assert layer.chosen_us == timed[layer.algorithm].time_us.median
        assert layer.algorithm == "winograd4"
        assert layer.source == "model"
        assert [c.algorithm for c in layer.candidates if c.chosen] == ["winograd4"]
        gains = [c.gain for c in layer.candidates]
        assert gains == sorted(gains, reverse=True)
        # Everything of the pool is accounted for, once.
        left_out = [name for names in layer.left_out.values() for name in names]
        assert sorted([*timed, *left_out]) == sorted(BY_NAME)
    inference, training = measured.end_to_end
    assert (inference.mode, training.mode) == ("inference", "training step")
    forward = [layer for layer in measured.layers if layer.direction == "forward"]
    assert inference.layers_native_us == pytest.approx(sum(one.calls * one.native_us for one in forward))
    assert training.layers_chosen_us == pytest.approx(sum(one.calls * one.chosen_us for one in measured.layers))
    for end in measured.end_to_end:
        assert end.cpu is not None
        assert end.rounds >= 2
        assert end.native_error < 1e-5
        assert end.converted_error < 1e-4
        assert end.distance <= end.native_error + end.converted_error


def test_the_page_has_the_figures(measured):
    html = render(measured)
    is_self_contained(html)
    read = Page(html)
    # What is written is what was found, to three digits.
    for value, text in read.values:
        number, unit = re.fullmatch(r"([\d.,]+)\u202f?(µs|ms|s|×|%)", text).groups()
        scale = {"µs": 1, "ms": 1e3, "s": 1e6, "×": 1, "%": 0.01}[unit]
        assert float(number.replace(",", "")) * scale == pytest.approx(value, rel=6e-3, abs=6e-3 * scale)
    values = [value for value, _ in read.values]
    for layer in measured.layers:
        assert {layer.native_us, layer.chosen_us, layer.gain} <= set(values)
        assert str(layer.problem) in read.text
        assert all(c.gain in values and c.time_us.median in values for c in layer.candidates)
    for end in measured.end_to_end:
        for sides in (end.wall, end.cpu):
            assert {sides.native.median, sides.converted.median, sides.gain.median} <= set(values)
        assert {end.layers_native_us, end.layers_chosen_us} <= set(values)
    two = measured.layers[1]
    times = [page.duration(us) for us in (two.native_us, two.chosen_us)]
    assert read.row("2 and 1 more", "2x8x16x16 -> 8, 3x3 p1", "2", times[0], "winograd4", times[1])
    assert read.row("5", LEFT_ALONE)
    assert read.row("all calls", "", "3", page.duration(measured.end_to_end[0].layers_native_us))
    assert measured.environment["device"] in read.text


def test_what_nobody_timed_is_called_predicted(monkeypatch):
    use_fake(monkeypatch, "winograd4", gain=3.0)
    report = of_model("small", small(), X, timed=False)
    assert report.end_to_end == ()
    for layer in report.layers:
        assert (layer.kind, layer.native_us, layer.chosen_us) == ("predicted", None, None)
        assert layer.gain == pytest.approx(3.0)
        assert {c.kind for c in layer.candidates} == {"predicted"}
    html = render(report)
    read = Page(html)
    assert "nothing was timed" in read.text
    assert "µs" not in read.text
    assert read.row("2 and 1 more")[6] == "3.00×predicted"
    assert ["direct", "–", "3.00×", "predicted", "3.00×"] in [row[:5] for row in read.rows]


def test_only_native_and_the_choice_are_timed_without_measure(monkeypatch):
    use_fake(monkeypatch, "winograd4", gain=3.0)
    report = of_model("small", small(), X, seconds=0.1)
    kinds = {c.algorithm: c for c in report.layers[1].candidates}
    assert {name for name, c in kinds.items() if c.kind == "measured"} == {"native", "winograd4"}
    direct = kinds["direct"]
    # Nobody timed it: native's measured time and the prediction together say what it should be.
    assert direct.kind == "predicted"
    assert direct.time_us.median == pytest.approx(kinds["native"].time_us.median / direct.gain)
    assert Page(render(report)).row("direct", f"≈ {page.duration(direct.time_us.median)}", "3.00×", "predicted")


def stored_row(problem, name: str, us: float) -> Row:
    return Row("m", problem, name, BY_NAME[name].revision, "ok", "thread", us, us, us, us, us, 9)


def test_stored_times_are_used(monkeypatch, tmp_path):
    use_fake(monkeypatch, "winograd4", gain=3.0)
    problem = of_model("small", small(), X, timed=False).layers[1].problem
    rows = [stored_row(problem, name, us) for name, us in (("native", 400.0), ("winograd4", 100.0), ("direct", 0.5))]
    with Store(tmp_path / "times.sqlite") as store:
        store.add(store.environment(environment.choice_environment("cpu")[1]), rows, pool="p")
    report = of_model("small", small(), X, timed=False, times=tmp_path / "times.sqlite")
    layer = report.layers[1]
    assert (layer.kind, layer.native_us, layer.chosen_us, layer.gain) == ("stored", 400.0, 100.0, 4.0)
    assert layer.faster.algorithm == "direct"
    html = render(report)
    assert "direct was faster when timed: 0.500\u202fµs" in html
    # What is timed now stands beside what was timed before, and is not compared with it.
    layer = of_model("small", small(), X, seconds=0.1, times=tmp_path / "times.sqlite").layers[1]
    kinds = {c.algorithm: (c.kind, c.gain) for c in layer.candidates}
    assert kinds["native"][0] == kinds["winograd4"][0] == "measured"
    assert kinds["direct"] == ("stored", 800.0)
    assert layer.faster is None or layer.faster.algorithm != "direct"
    # Of a tuned choice nothing is known from times of the defaults.
    params = BY_NAME["winograd4"].space(problem).sample(problem, random.Random(0))
    tuned = Choice("winograd4", "store", params, measured=Measured(9, 2.5))
    with monkeypatch.context() as patch:
        patch.setattr(resolve, "found_for", lambda problem, used: tuned)
        layer = of_model("small", small(), X, timed=False, times=tmp_path / "times.sqlite").layers[1]
    assert (layer.native_us, layer.chosen_us, layer.gain, layer.kind) == (400.0, None, 2.5, "stored")
    assert layer.predicted == pytest.approx(3.0)
    # CSV says the same; another machine's times say nothing here.
    path = tmp_path / "times.csv.gz"
    write_rows(path, rows)
    environment_path(path).write_text(json.dumps({"machine": environment.choice_environment("cpu")[1]}))
    assert of_model("small", small(), X, timed=False, times=path).layers == report.layers
    environment_path(path).write_text(
        json.dumps({"machine": {**environment.choice_environment("cpu")[1], "device": "abacus"}})
    )
    with pytest.raises(ValueError, match="no times of this machine, but of abacus"):
        of_model("small", small(), X, timed=False, times=path)


def test_a_choice_of_the_store_says_who_made_it(monkeypatch, tmp_path):
    use_fake(monkeypatch)
    process.configure(tmp_path / "own.sqlite")
    try:
        problem = of_model("small", small(), X, timed=False).layers[1].problem
        name = "winograd4"
        params = BY_NAME[name].space(problem).sample(problem, random.Random(0))
        decision = Decision(problem, settings.current().budgets, name, params, "tune", 2.5, BY_NAME[name].revision, 9)
        process.remember(decision)
        use_fake(monkeypatch)
        layer = of_model("small", small(), X, timed=False).layers[1]
        assert (layer.algorithm, layer.source, layer.gain, layer.kind) == (name, "store (tune)", 2.5, "stored")
        process.flush()
        report = of_data(tmp_path / "own.sqlite")
        assert report.problems == 0
        assert [(c.problem, c.algorithm, c.source, c.gain) for c in report.choices] == [(problem, name, "tune", 2.5)]
        read = Page(render(report))
        assert "only choices" in read.text
        assert read.row("2x8x16x16 -> 8, 3x3 p1", "forward", name, "2.50×", "tune")
    finally:
        process.configure()


def test_a_layers_own_policy_holds(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    model = small()
    convselect.convert(model[2], policy="direct")
    report = of_model("small", model, X, seconds=0.05)
    assert [(one.names, one.algorithm, one.source) for one in report.layers] == [
        (("0",), "winograd4", "model"), (("2",), "direct", "forced"), (("4",), "winograd4", "model"),
    ]  # fmt: skip
    assert report.left_alone == {"5": LEFT_ALONE}
    assert convselect.summary(model).converted == {"2": "direct"}


def test_a_model_without_convolutions():
    report = of_model("none", nn.Flatten(), X)
    html = render(report)
    is_self_contained(html)
    assert report.layers == ()
    assert "There is no convolution here" in Page(html).text


def test_names_are_escaped(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    model = nn.Sequential()
    model.add_module(EVIL.replace(".", ""), nn.Conv2d(3, 8, 3, padding=1))
    model.add_module(EVIL + "2", Own(8, 8, 2))
    report = of_model(EVIL, model, X, seconds=0.05)
    html = render(report)
    is_self_contained(html)
    assert "<script" not in html
    read = Page(html)
    assert read.row(EVIL, "2x3x16x16")
    assert read.row(EVIL + "2", LEFT_ALONE)
    assert EVIL in read.text


def test_verify_settles_by_real_calls(tmp_path):
    with racing(tmp_path / "own.sqlite"):
        report = of_model("small", small(), X, verify=True, timed=False, seconds=60.0)
    assert report.policy == "verify"
    assert {layer.source for layer in report.layers} == {"verify"}
    for layer in report.layers:
        assert (layer.algorithm, layer.kind) == (QUICK, "stored")
        assert (layer.gain, layer.predicted) == pytest.approx((GAINS[QUICK], PREDICTED[QUICK]))
        assert layer.spread[0] <= layer.gain <= layer.spread[1]
    read = Page(render(report))
    assert read.row("2 and 1 more")[6] == "1.82× 1.82×–1.82×storedpredicted 2.00×"
    assert "trials in this process" in read.text


def test_an_open_trial_is_called_one(monkeypatch):
    use_fake(monkeypatch, "winograd4", gain=3.0)
    report = of_model("small", small(), X, verify=True, timed=False, seconds=1e-9)
    for layer in report.layers:
        assert layer.source.startswith("trial: ")
        assert (layer.algorithm, layer.kind) == ("winograd4", "predicted")
    assert "of 60 calls" in Page(render(report)).text


# ---- measured times ---------------------------------------------------------------------------------------------


def rows_of(seed: int, count: int = 40) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        direction = ("forward", "backward_data")[i % 2]
        problem = conv_problem(1 + i % 2, 16, 10 + i, 12, 16, 3, 3, padding=1, stride=1 + i % 2, direction=direction)
        for name in ("native", "winograd4", "direct"):
            if name != "winograd4" or i % 2 == 0:
                rows.append(stored_row(problem, name, float(rng.uniform(200, 2000)))._replace(model=f"net{i % 3}"))
    return rows


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "times.csv.gz"
    write_rows(path, rows_of(0))
    machine = {"family": "cpu-x86-avx512-c", "host_flags": {}, "device": EVIL, "torch": "2.13"}
    environment_path(path).write_text(json.dumps({"machine": machine}))
    return path


def test_data_figures_are_those_of_evaluate(csv):
    report = of_data(csv)
    judged = judge_all([csv], ARTIFACT, [], "family", 5, False, Recipe())["judged"]["cpu-x86-avx512-c"]
    assert report.overall == judged["overall"]
    assert report.by["by_kernel_class"] == judged["by_kernel_class"]
    table, _ = read_measured([csv])
    best = table.times_us[:, 0] / np.nanmin(table.times_us, 1)
    assert report.gains_best == pytest.approx(best.tolist())
    assert report.problems == len(table.problems) == sum(one.wins for one in report.shares)
    wins = np.nanargmin(table.times_us, 1)
    for one in report.shares:
        assert one.wins == (wins == table.names.index(one.algorithm)).sum()
        assert one.share == pytest.approx(one.wins / 40)
    html = render(report)
    is_self_contained(html)
    assert "<script" not in html
    read = Page(html)
    assert EVIL in read.text
    for one in report.shares:
        assert read.row(one.algorithm, str(one.applies), str(one.wins), page.percent(one.share))
    strided = report.by["by_kernel_class"]["strided"]
    assert read.row("strided", "20", page.times(strided["oracle_speedup_geomean"]))
    assert page.times(ev.geomean(np.array(report.gains_chosen))) in read.text


def test_the_worst_cases_are_the_worst(csv):
    report = of_data(csv)
    regrets = [case.choice_us / case.best_us for case in report.worst]
    assert regrets == sorted(regrets, reverse=True)
    assert regrets[0] == pytest.approx(1 / report.overall["fraction_of_oracle_min"])
    losses = [case.choice_us / case.reference_us for case in report.slower]
    assert all(loss > ev.SLOWER for loss in losses)
    assert max(losses, default=1.0) == pytest.approx(max(1.0, report.overall["worst_slowdown"]))


def test_a_store_says_the_same_and_keeps_machines_apart(csv, tmp_path):
    machine = json.loads(environment_path(csv).read_text())["machine"]
    with Store(tmp_path / "times.sqlite") as store:
        store.add(store.environment(machine), rows_of(0), pool="p")
        store.add(store.environment({**machine, "device": "abacus"}), rows_of(1, 4), pool="p")
    found, wanted = of_data(tmp_path / "times.sqlite"), of_data(csv)
    # CSV has times to the nanosecond.
    assert found.overall == pytest.approx(wanted.overall, rel=1e-5)
    assert found.problems == wanted.problems
    assert found.other_machines == 1
    assert "1 more machine's times" in Page(render(found)).text


def test_an_empty_store(tmp_path):
    Store(tmp_path / "empty.sqlite").close()
    html = render(of_data(tmp_path / "empty.sqlite"))
    is_self_contained(html)
    assert "Nothing is in here yet" in Page(html).text


def test_other_peoples_times(tmp_path):
    path = tmp_path / "wide.csv"
    header = "N,C,H,W,K,R,S,stride_h,stride_w,pad_h,pad_w,dil_h,dil_w,groups,model,a_ms,b_ms\n"
    lines = [f"1,8,{8 + i},8,8,3,3,1,1,1,1,1,1,1,gpu,{1 + i % 3},{2}\n" for i in range(9)]
    path.write_text(header + "".join(lines))
    report = of_data(path)
    assert (report.reference, report.artifact) == ("the best single algorithm (a)", "")
    assert report.gains_best == pytest.approx([1.0, 1.0, 1.5] * 3)
    html = render(report)
    is_self_contained(html)
    assert "nn.Conv2d" not in html
    with pytest.raises(ValueError, match="knows none of the algorithms"):
        of_data(path, ARTIFACT)


def test_a_model_that_learned_from_the_file_says_so(csv):
    assert not of_data(csv).trained_on
    card = Predictor.load(ARTIFACT).card
    known = csv.with_name(card.data["files"][0])
    csv.rename(known)
    environment_path(csv).rename(environment_path(known))
    report = of_data(known)
    assert report.trained_on
    assert "its figures flatter" in Page(render(report)).text


# ---- numbers and charts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.1234, "0.123 µs"), (1, "1.00 µs"), (12.34, "12.3 µs"), (999.4, "999 µs"), (999.6, "1.00 ms"),
     (123456, "123 ms"), (2.5e6, "2.50 s"), (2.5e9, "2,500 s"), (0, "0 µs"), (None, "–"), (math.nan, "–"),
     (9.996, "10.0 µs")],
)  # fmt: skip
def test_durations(us, text):
    assert page.duration(us) == text.replace(" ", page.THIN)


def test_ratios():
    assert [page.times(v) for v in (None, 1.594, 9.994, 9.996, 12.34, 1234)] == [
        "–", "1.59×", "9.99×", "10.0×", "12.3×", "1,234×",
    ]  # fmt: skip


def test_ticks_and_bins():
    assert charts.nice_ticks(12300) == [0, 5000, 10000]
    assert charts.nice_ticks(0) == [0]
    assert charts.shortened("abcdefghijklmnop", 8) == "ab…lmnop"
    assert len(charts.bin_names()) == len(charts.BIN_EDGES) + 1
    counts = dict(zip(charts.bin_names(), charts.binned([0.5, 1.0, 1.02, 1.3, 40]), strict=True))
    assert {name: n for name, n in counts.items() if n} == {
        "slower": 1, "same (±2 %)": 1, "1.02–1.1×": 1, "1.25–1.5×": 1, "over 30×": 1,
    }  # fmt: skip


def test_bars_are_as_long_as_their_values(measured):
    chart, timed, left = page._layer_chart([one for one in measured.layers if one.direction == "forward"], "forward")
    assert (timed, left) == (True, 0)
    for layer, native, chosen in zip(measured.layers, chart.rects[::2], chart.rects[1::2], strict=False):
        assert native.width / chosen.width == pytest.approx(layer.native_us / layer.chosen_us, rel=1e-6)
    once, twice = measured.layers[:2]
    ratio = chart.rects[2].width / chart.rects[0].width
    assert ratio == pytest.approx(2 * twice.native_us / once.native_us, rel=1e-6)
    assert all(r.x + r.width <= charts.WIDTH for r in chart.rects)


def test_the_whole_is_the_sum_of_its_parts(measured):
    one = Spread(1000.0, 900.0, 1100.0)
    sides = Sides(one, Spread(500.0, 400.0, 600.0), Spread(2.0))
    end = EndToEnd("inference", 5, sides, sides, 0.0, None, None, 600.0, 200.0)
    layer = dataclasses.replace(measured.layers[0], calls=2, native_us=300.0, chosen_us=100.0)
    spent = page._spent(end, [layer], {"winograd4": "c0"})
    assert spent.key == (("c0", "winograd4", 600.0, 200.0), ("rest", "everything else", 400.0, 300.0))
    widths = [r.width for r in spent.chart.rects]
    assert widths[0] / widths[1] == pytest.approx(1.5)
    assert sum(widths[:2]) / sum(widths[2:]) == pytest.approx(2.0)
    # What PyTorch computes has PyTorch's colour, whoever computes it afterwards.
    assert [r.kind for r in spent.chart.rects] == ["native", "rest", "c0", "rest"]
    assert not end.disturbed
    busy = dataclasses.replace(end, wall=Sides(Spread(1300.0), Spread(600.0), Spread(2.1)))
    assert busy.disturbed
    report = dataclasses.replace(measured, end_to_end=(busy,))
    assert "Something else had the processor" in render(report)
    # What leads the page is then the time that the neighbours had no part in.
    assert f"end to end, CPU time: {page.duration(1000.0)} → {page.duration(500.0)}" in Page(render(report)).text
    assert "does not run in float64" in render(report)


# ---- the command ------------------------------------------------------------------------------------------------


def run(*arguments: str):
    return CliRunner().invoke(main._app(), ["report", *arguments])


def test_the_command_writes_a_page(monkeypatch, tmp_path, csv):
    use_fake(monkeypatch, "winograd4")
    (tmp_path / "nets.py").write_text("from torch import nn\nbuild = lambda: nn.Sequential(nn.Conv2d(3, 4, 3))\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = run("nets:build", "--input", "1,3,9,9", "--no-timing", "--out", "net.html")
    assert done.exit_code == 0, done.output
    assert "wrote net.html" in done.output
    assert Page((tmp_path / "net.html").read_text(encoding="utf-8")).row("0", "1x3x9x9 -> 4, 3x3")
    done = run(str(csv), "--out", "data.html")
    assert done.exit_code == 0, done.output
    assert "times.csv.gz" in Page((tmp_path / "data.html").read_text(encoding="utf-8")).text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet99",), "neither a built-in network"),
        (("a:b",), "needs --input"),
        (("vgg16", "--input", "1,3"), "four positive numbers"),
        (("missing.sqlite",), "missing.sqlite"),
        (("store", "--out", "nowhere/report.html"), "no directory"),
        (("resnet18", "--no-timing", "--input", "1,4,32,32"), "resnet18 on an input of 1,4,32,32"),
    ],
)
def test_what_cannot_be_reported_is_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_report_is_made_somewhere(measured):
    assert measured.environment.keys() == run_environment().keys()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", measured.made)
