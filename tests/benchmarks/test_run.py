"""The benchmark's own logic: what it draws, what it refuses to time, and how it sums up."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from benchmarks import _classes, _kernels, _networks, run
from benchmarks import compile as compiling
from benchmarks._classes import CLASSES
from benchmarks._kernels import Measured
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, Direction, conv_problem
from convselect.base.timing import SYSTEM_CLOCK
from convselect.kernels._contract import Algorithm, Grade
from convselect.kernels.pool import BY_NAME
from convselect.summary import summary

# Not every machine these tests run on has a trained artifact; what is chosen does not matter here.
pytestmark = pytest.mark.filterwarnings("ignore::convselect.ConvselectWarning")

NATIVE = BY_NAME["native"]
TINY = conv_problem(1, 4, 6, 6, 4, 3, 3, padding=1)
BOTH = (CONTIGUOUS, CHANNELS_LAST)


class Fake(Algorithm):
    """Native with something done to its result; counts its calls."""

    def __init__(self, name, change=lambda y: y, refusal=None):
        self.name, self.change, self.refusal, self.calls = name, change, refusal, 0

    def why_not(self, problem):
        return self.refusal

    def workspace_bytes(self, problem):
        return 0

    def error_grade(self, problem):
        return Grade.DIRECT

    def forward(self, x, weight, problem, params=None):
        self.calls += 1
        return self.change(NATIVE.forward(x, weight, problem))

    backward_data = backward_weight = forward


def test_every_class_has_problems_and_none_is_over_its_cap():
    problems = _classes.read_problems()
    assert len(problems) == len(set(problems))
    for kernel_class in CLASSES:
        members = [p for p in problems if kernel_class.holds(p)]
        assert len(members) >= 10, kernel_class.name
        if not kernel_class.dtypes:
            assert max(p.flops for p in members) <= kernel_class.flops_cap


@pytest.mark.parametrize(
    ("problem", "names"),
    [
        (conv_problem(8, 64, 7, 7, 64, 3, 3, padding=1), {"3x3-7x7"}),
        (conv_problem(1, 64, 7, 7, 64, 3, 3, padding=1), set()),
        (conv_problem(1, 64, 14, 14, 64, 3, 3, padding=1), {"3x3"}),
        (conv_problem(1, 3, 64, 64, 64, 3, 3, padding=1), {"stem"}),
        (conv_problem(1, 64, 28, 28, 64, 7, 7, padding=3, groups=64), {"depthwise", "depthwise-7"}),
        (conv_problem(1, 64, 28, 28, 128, 7, 7, padding=3, groups=64), set()),
        (conv_problem(1, 64, 28, 28, 64, 13, 13, padding=6, groups=64), {"depthwise-11+"}),
        (conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1, groups=8), {"grouped"}),
        (conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1, groups=2), set()),
        (conv_problem(1, 3, 224, 224, 768, 16, 16, stride=16), {"patches"}),
        (conv_problem(1, 3, 224, 224, 96, 4, 4, stride=4), {"patches", "stem"}),
        (conv_problem(1, 64, 28, 28, 64, 3, 3, padding=2, dilation=2), {"dilated"}),
        (conv_problem(1, 64, 28, 28, 64, 3, 3, stride=2, padding=2, dilation=2), set()),
        (conv_problem(1, 64, 28, 28, 64, 5, 5, stride=2, padding=2), {"strided"}),
        (conv_problem(1, 8, 64, 64, 64, 3, 3, padding=1), {"thin"}),
        (conv_problem(1, 1, 300, 300, 1, 31, 1, padding=(15, 0)), {"thin", "one-row"}),
        (conv_problem(1, 64, 28, 28, 64, 1, 21, padding=(0, 10), groups=64), {"one-row"}),
        (conv_problem(1, 16, 28, 28, 16, 1, 21, padding=(0, 10)), set()),
        (conv_problem(1, 32, 32, 32, 32, 9, 9, padding=4), {"dense-9+"}),
        (conv_problem(1, 64, 28, 28, 64, 3, 3, stride=2, padding=1), {"3x3-s2", "strided"}),
        (conv_problem(1, 64, 28, 28, 64, 1, 1), {"1x1"}),
    ],
    # A set prints in another order in each process, and test processes compare the names of their tests.
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_classes(problem, names):
    assert {c.name for c in CLASSES if c.holds(problem)} == names | {"16-bit"}


def test_spread_takes_both_ends_and_the_middle():
    problems = [conv_problem(1, 4, 8, 8, K, 1, 1) for K in range(9, 0, -1)]
    assert [p.K for p in _classes.spread(problems, 3)] == [1, 5, 9]
    assert [p.K for p in _classes.spread(problems + problems, 1)] == [5]
    assert len(_classes.spread(problems, 100)) == 9
    with pytest.raises(ValueError, match="at least 1"):
        _classes.spread(problems, 0)


def test_drawn_keeps_to_class_cap_and_dtypes():
    problems = _classes.read_problems()
    of_name = _classes.BY_NAME
    assert {p.dtype for p in _classes.drawn(of_name["3x3"], problems, 3, "bfloat16")} == {"bfloat16"}
    sixteen = _classes.drawn(of_name["16-bit"], problems, 4, "float32")
    assert [p.dtype for p in sixteen] == ["bfloat16", "float16"] * 4
    assert max(p.flops for p in sixteen) <= of_name["16-bit"].flops_cap


def test_the_list_comes_from_layers_by_class_at_both_batches(tmp_path):
    layers = {
        conv_problem(1, 64, 14, 14, 64, 3, 3, padding=1): "a",
        conv_problem(1, 512, 56, 56, 512, 3, 3, padding=1): "b",  # over the cap at batch 8
        conv_problem(1, 64, 14, 14, 64, 5, 5, padding=2): "of no class",
    }
    selected = _classes.select(layers)
    small = [(model, p.N) for model, p in selected if not model.startswith("large")]
    assert sorted(small) == [("a", 1), ("a", 8), ("b", 1)]
    _classes.write_problems(selected, tmp_path / "list.csv")
    assert _classes.read_problems(tmp_path / "list.csv") == [p for _, p in selected]


def test_what_is_wrong_is_never_timed_and_a_wrong_choice_is_no_number():
    wrong, failing = Fake("wrong", lambda y: 1.01 * y), Fake("failing", lambda y: 1 / 0)
    other, right = Fake("refused", refusal="no"), Fake("right")
    m = _kernels.measure(TINY, rounds=2, algorithms=(wrong, failing, other, right), choose=lambda p: "wrong")
    assert wrong.calls == failing.calls == 2  # once per layout: the check
    assert other.calls == 0
    assert right.calls > 2
    assert m.wrong.keys() == {f"{name}, {layout}" for name in ("wrong", "failing") for layout in BOTH}
    assert "error of 1.0e-02" in m.wrong["wrong, contiguous"]
    assert "ZeroDivisionError" in m.wrong["failing, contiguous"]
    assert all(math.isnan(value) for value in m.chosen.values())
    assert all(value > 0 for value in m.best.values())
    assert set(m.best_name.values()) <= {"native", "right"}


def spin(y):
    end = SYSTEM_CLOCK.thread_ns() + 10_000_000
    while SYSTEM_CLOCK.thread_ns() < end:
        pass
    return y


def test_a_slow_choice_is_timed_though_it_is_no_rival():
    slow = Fake("slow", spin)
    m = _kernels.measure(TINY, layouts=[CONTIGUOUS], rounds=2, algorithms=[slow], choose=lambda p: "slow")
    assert m.best_name == {CONTIGUOUS: "native"}
    assert m.best[CONTIGUOUS] == 1.0
    assert 0 < m.chosen[CONTIGUOUS] < 0.5
    assert m.native == {CONTIGUOUS: 1.0}


def test_all_directions_dtypes_and_the_real_pool():
    for direction in Direction:
        for dtype in ("float32", "bfloat16"):
            m = _kernels.measure(TINY._replace(direction=direction, dtype=dtype), rounds=1)
            assert not m.wrong
            assert m.problem.direction == direction
            assert m.chosen_name.keys() == m.best_name.keys() == set(BOTH)


def _measured(direction, best, chosen, name):
    problem = TINY.with_direction(direction)
    return Measured(problem, 1.0, 1, {CONTIGUOUS: 1.0}, {CONTIGUOUS: best}, {CONTIGUOUS: name}, {CONTIGUOUS: chosen})


def test_summary():
    group = [_measured(Direction.FORWARD, *rest) for rest in ((4.0, 1.0, "a"), (1.0, 1.0, "native"), (2.0, 1.0, "a"))]
    s = _kernels.summary(group, CONTIGUOUS)
    assert s.best == pytest.approx(2.0)
    assert s.best_p10 == pytest.approx(1.2)
    assert s.chosen == s.native == 1.0
    assert s.names == (("a", 2), ("native", 1))
    assert math.isnan(_kernels.summary([_measured(Direction.FORWARD, 2.0, math.nan, "a")], CONTIGUOUS).chosen)


def test_rows_count_a_problem_in_all_its_classes():
    problem = conv_problem(1, 64, 28, 28, 64, 7, 7, padding=3, groups=64, direction="backward_weight")
    classes = [_classes.BY_NAME[name] for name in ("depthwise", "depthwise-7")]
    planned = run.plan([problem.with_direction(Direction.FORWARD)], classes, [problem.direction], 5, "float32")
    assert planned == {"depthwise": [problem], "depthwise-7": [problem]}
    measured = {problem: _measured(problem.direction, 5.0, 1.0, "depthwise")}
    rows = run.rows(planned, measured, [CONTIGUOUS])
    assert [(row[0].name, row[2]) for row in rows] == [("depthwise", 2.0), ("depthwise-7", 8.0)]
    assert run.as_json(rows[0])["layouts"][CONTIGUOUS]["names"] == {"depthwise": 1}
    assert [table.row_count for table in run.tables(rows)] == [2]


def _layers(tmp_path):
    path = tmp_path / "layers.csv"
    _classes.write_problems([("x", conv_problem(1, 32, 14, 14, 32, 3, 3, padding=1))], path)
    return str(path)


def test_main_writes_what_it_prints(tmp_path, capsys):
    out = tmp_path / "run.json"
    arguments = ["--no-malloc-tuning", "--layers", _layers(tmp_path), "--classes", "3x3", "grouped", "--rounds", "1"]
    assert run.main([*arguments, "--directions", "forward", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["environment"]["threads"] == 1
    assert [row["class"] for row in written["rows"]] == ["3x3"]  # no problem, no row
    assert len(written["problems"]) == 1
    text = capsys.readouterr().out
    assert "channels_last operands" in text
    assert "3x3" in text


def test_main_fails_where_a_result_is_wrong(tmp_path, capsys, monkeypatch):
    def measure(problem, **_):
        m = _measured(problem.direction, 2.0, math.nan, "a")
        m.wrong = {"b, contiguous": "a relative error of 1.0e+00"}
        return m

    monkeypatch.setattr(_kernels, "measure", measure)
    arguments = ["--no-malloc-tuning", "--layers", _layers(tmp_path), "--classes", "3x3", "--layout", CONTIGUOUS]
    assert run.main(arguments) == 1
    assert "a relative error of 1.0e+00" in capsys.readouterr().out


# ---- whole networks -------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_network(monkeypatch):
    def build(name):
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
        return nn.Sequential(*layers).eval(), torch.randn(1, 3, 8, 8)

    monkeypatch.setattr(_networks, "build", build)
    monkeypatch.setattr(_networks, "onnx_bytes", lambda *_: b"")
    for package in ("onnxruntime", "openvino"):  # whether they are there is the machine's business
        monkeypatch.setattr(_networks, f"{package}_side", _absent)


def _absent(*_):
    raise _networks.Absent("not here")


def test_sharing_copy_shares_parameters_and_not_modules():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    other = _networks.converted(model)
    assert [p.data_ptr() for p in other.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert not summary(model).converted
    assert list(summary(other).converted) == ["0"]


def test_inference(tiny_network):
    result = _networks.inference("tiny", threads=1, seconds=0.05, compile=False)
    ours = {f"{kind}{layout}" for kind in ("eager", "converted", "frozen") for layout in ("", " channels_last")}
    assert result.gain.keys() == ours
    assert result.missing["openvino"] == "not here"
    assert result.gain["eager"] == 1.0
    assert result.best_rival in _networks.RIVALS
    assert result.over_rival("converted") == result.gain["converted"] / result.gain[result.best_rival]
    assert max(result.error.values()) < 1e-5
    assert _networks.table([result]).row_count == 1


def test_a_wrong_network_is_not_timed(tiny_network, monkeypatch):
    monkeypatch.setattr(_networks, "converted", lambda model: lambda x: 1.001 * model(x))
    result = _networks.inference("tiny", threads=1, seconds=0.05, compile=False)
    assert "converted" not in result.gain
    assert result.missing["converted"] == "wrong: its relative error is 1.0e-03"


def test_training(tiny_network):
    result = _networks.training("tiny", seconds=0.05)
    assert result.gain.keys() == result.error.keys()
    assert {"eager", "converted", "eager channels_last", "converted channels_last"} == result.gain.keys()
    assert max(result.error.values()) < 1e-5
    assert not result.missing


# ---- compiled -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_compiled(tiny_network, monkeypatch):
    """Networks "compiled" by marking them: what a compiler makes of them is not this test's business."""
    monkeypatch.setattr(compiling, "build", _networks.build)
    monkeypatch.setattr(torch, "compile", lambda model: nn.Sequential(model))


def test_compiled_sides_are_measured_in_both_modes(tiny_compiled):
    for measure in (compiling.inference, compiling.training):
        result = measure("tiny", size=6, seconds=0.05)
        assert result.median_us.keys() == result.error.keys() == set(compiling.SIDES)
        assert max(result.error.values()) < 1e-5
        assert result.rounds > 0
        median, p20, p80 = result.over_compiled
        assert p20 <= median <= p80
        assert compiling.table([result]).row_count == 1


def test_a_wrong_compiled_network_is_not_timed(tiny_compiled, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: lambda x: 1.001 * model(x))
    result = compiling.inference("tiny", size=None, seconds=0.05)
    assert set(result.median_us) == {"eager", "converted"}
    assert set(result.missing) == {"compiled", "compiled converted"}
    assert result.over_compiled is None
    assert compiling.table([result]).row_count == 1


def test_the_compile_benchmark_writes_json(tiny_compiled, monkeypatch, tmp_path):
    from typer.testing import CliRunner

    monkeypatch.setitem(compiling.MODELS, "tiny", None)
    out = tmp_path / "run.json"
    arguments = ["tiny", "--seconds", "0.05", "--no-training", "--no-malloc-tuning", "--out", str(out)]
    threads = torch.get_num_threads()
    done = CliRunner().invoke(compiling.app, arguments)
    torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    assert [r["network"] for r in written["results"]] == ["tiny"]
    assert written["arguments"]["networks"] == ["tiny"]
    assert "device" in written["environment"]
    assert CliRunner().invoke(compiling.app, ["no_such_network"]).exit_code == 2
