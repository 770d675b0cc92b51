from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from convselect.kernels import BY_NAME, Algorithm, Grade
from convselect.model import measure
from convselect.model.dataset import KERNEL_CLASSES, kernel_class, read_rows
from convselect.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, conv_problem, layout_of

NATIVE = BY_NAME["native"]
TINY = (
    conv_problem(2, 4, 6, 6, 4, 3, 3, padding=1),
    conv_problem(2, 4, 6, 5, 6, 1, 1, direction="backward_data"),
    conv_problem(2, 4, 6, 5, 4, 3, 3, groups=4, direction="backward_weight", dtype="bfloat16"),
)
MODELS = ("anet1", "bnet2", "cnet3")
LAYERS = [
    ("anet", conv_problem(1, 64, 28, 28, 64, 1, 1)),
    ("anet", conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1)),
    ("bnet", conv_problem(1, 64, 28, 28, 64, 3, 3, stride=2, padding=1)),
    ("bnet", conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1, groups=64)),
    ("cnet", conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1, groups=4)),
    ("cnet", conv_problem(1, 64, 28, 28, 64, 7, 7, padding=3, groups=64)),
    ("dnet", conv_problem(1, 64, 28, 28, 64, 5, 5, padding=2)),
    ("huge", conv_problem(1, 512, 224, 224, 512, 3, 3, padding=1)),
]


class Like(Algorithm):
    """Native with something done to its result; counts its calls."""

    def __init__(self, name: str, change=lambda y: y, **attributes) -> None:
        self.name, self.change, self.calls = name, change, 0
        for attribute, value in attributes.items():
            setattr(self, attribute, value)

    refusal: str | None = None
    needs: int = 0

    def why_not(self, problem):
        return self.refusal

    def workspace_bytes(self, problem):
        return self.needs

    def error_grade(self, problem):
        return Grade.DIRECT

    def _run(self, direction, *args):
        self.calls += 1
        return self.change(getattr(NATIVE, direction)(*args))

    def forward(self, x, weight, problem, params=None):
        return self._run("forward", x, weight, problem)

    def backward_data(self, grad_y, weight, problem, params=None):
        return self._run("backward_data", grad_y, weight, problem)

    def backward_weight(self, x, grad_y, problem, params=None):
        return self._run("backward_weight", x, grad_y, problem)


def one_nan(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y.view(-1)[-1] = math.nan
    return y


def raises(y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no luck")


# ---- checking before timing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", TINY, ids=str)
@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda y: y * 1.1, "wrong"),
        (one_nan, "wrong"),
        (lambda y: y[:1], "wrong"),
        (lambda y: y.double(), "wrong"),
        (raises, "failed"),
    ],
    ids=["10 % off", "one NaN", "shape", "dtype", "raises"],
)
def test_a_wrong_algorithm_is_recorded_and_never_timed(problem: ConvProblem, change, status: str):
    bad = Like("bad", change)
    rows = {row.algorithm: row for row in measure.measure_problem("m", problem, [NATIVE, bad])}
    assert rows["bad"].status == status
    assert bad.calls == 1
    assert math.isnan(rows["bad"].min_us)
    assert rows["bad"].rounds == 0
    assert rows["native"].status == "ok"
    assert rows["native"].min_us > 0


def test_one_wrong_element_among_thousands_is_wrong():
    def nudge(y):
        y = y.clone()
        y.view(-1)[5] += 0.5
        return y

    problem = conv_problem(2, 8, 28, 28, 16, 3, 3, padding=1)
    assert measure.measure_problem("m", problem, [NATIVE, Like("bad", nudge)])[1].status == "wrong"


def test_what_is_excluded_is_never_run():
    others = [
        Like("forced only", automatic=False),
        Like("refuses", refusal="it does not like squares"),
        Like("hungry", needs=1001),
    ]
    frugal = Like("frugal", needs=1000)
    rows = measure.measure_problem("m", TINY[0], [NATIVE, *others, frugal], workspace_bytes=1000)
    assert [row.algorithm for row in rows] == ["native", "frugal"]  # native whatever it needs
    assert [algorithm.calls for algorithm in others] == [0, 0, 0]


# ---- timing -----------------------------------------------------------------------------------------------------


def test_times_are_ordered_and_rounds_are_complete():
    for row in measure.measure_problem("m", TINY[0], [NATIVE, Like("same")]):
        assert row.status == "ok"
        assert row.clock == "thread"
        assert 0 < row.min_us <= row.p20_us <= row.median_us <= row.p80_us
        assert row.wall_us > 0
        assert row.rounds == 9


def test_more_threads_are_used_and_judged_by_wall_time():
    seen = []

    def look(y):
        seen.append(torch.get_num_threads())
        return y

    before = torch.get_num_threads()
    for count, clock in ((1, "thread"), (2, "wall")):
        rows = measure.measure_problem("m", TINY[0]._replace(threads=count), [NATIVE, Like("same", look)])
        assert {row.clock for row in rows} == {clock}
        assert set(seen) == {count}
        seen.clear()
    assert torch.get_num_threads() == before


def test_the_hopeless_are_dropped_after_the_warm_rounds_and_native_never():
    problem = conv_problem(1, 16, 28, 28, 16, 3, 3, padding=1)

    def slowly(y):
        for _ in range(20):
            NATIVE.run(*measure.operands(problem), problem)
        return y

    pool = [NATIVE, Like("slow", slowly), Like("same")]
    rows = {row.algorithm: row for row in measure.measure_problem("m", problem, pool)}
    assert (rows["slow"].status, rows["slow"].rounds) == ("censored", 2)
    assert rows["slow"].min_us > 2.5 * rows["native"].min_us
    assert [(rows[name].status, rows[name].rounds) for name in ("native", "same")] == [("ok", 9)] * 2

    zero = torch.zeros(problem.y_shape)
    calls = {"native": lambda: slowly(zero), "quick": lambda: zero}
    status = dict.fromkeys(calls, "ok")
    with measure.threads(1):
        samples = measure._timed(calls, 0, 60.0, status, wall=False)
    assert status["native"] == "ok"
    assert len(samples["native"][0]) == len(samples["quick"][0]) == 9


def test_restoring_natives_strides_is_part_of_the_time():
    problem = conv_problem(2, 8, 6, 6, 4, 3, 3)
    a, b = measure.operands(problem)
    native_format = measure._format(NATIVE.run(a, b, problem))
    other = Like("other strides", lambda y: y.contiguous(memory_format=torch.channels_last))
    assert not other.run(a, b, problem).is_contiguous()
    restored = measure._call(other, a, b, problem, native_format)()
    assert restored.stride() == NATIVE.run(a, b, problem).stride()


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("layout", [CONTIGUOUS, CHANNELS_LAST])
def test_operands_are_what_the_problem_says(direction: Direction, layout: str):
    problem = conv_problem(2, 6, 9, 8, 4, 3, 2, direction=direction, groups=2, dtype="float16")
    problem = measure.with_layouts(problem, layout == CHANNELS_LAST, layout == CHANNELS_LAST)
    a, b = measure.operands(problem)
    shapes = {
        Direction.FORWARD: (problem.x_shape, problem.weight_shape),
        Direction.BACKWARD_DATA: (problem.y_shape, problem.weight_shape),
        Direction.BACKWARD_WEIGHT: (problem.x_shape, problem.y_shape),
    }
    assert (a.shape, b.shape) == shapes[direction]
    assert a.dtype == b.dtype == torch.float16
    assert layout_of(a) == problem.layout == layout
    if direction != Direction.BACKWARD_WEIGHT:
        assert layout_of(b) == problem.weight_layout == layout
    assert all(torch.equal(t, u) for t, u in zip(measure.operands(problem), (a, b), strict=True))


# ---- drawing ----------------------------------------------------------------------------------------------------


def test_draws_are_repeatable_distinct_and_cover_all_classes():
    drawn = list(measure.draw(LAYERS, 150, seed=3))
    assert drawn == list(measure.draw(LAYERS, 150, seed=3))
    assert drawn != list(measure.draw(LAYERS, 150, seed=4))
    problems = [problem for _, problem in drawn]
    assert len(set(problems)) == 150
    assert {kernel_class(p) for p in problems} == set(KERNEL_CLASSES)
    assert {p.direction for p in problems} == set(Direction)
    assert {p.N for p in problems} == {1, 2, 8}
    assert {p.dtype for p in problems} == {"float32", "bfloat16", "float16"}
    assert Counter(p.dtype for p in problems)["float32"] > 75
    layouts = Counter(p.layout for p in problems)
    assert layouts[CONTIGUOUS] > layouts[CHANNELS_LAST] > 0
    assert all(p.threads == 1 for p in problems)


def test_draws_stay_below_the_caps():
    emulated, native = {}, {"avx512_bf16": True}
    for flags in (emulated, native):
        for model, problem in measure.draw(LAYERS, 150, flags=flags):
            assert model != "huge"
            assert problem.flops <= measure.flops_cap(problem, flags)
    half = LAYERS[1][1]._replace(dtype="bfloat16")
    assert measure.flops_cap(half, native) == measure.FLOPS_CAP == 8 * measure.flops_cap(half, emulated)
    assert measure.flops_cap(LAYERS[3][1], native) < measure.FLOPS_CAP / 2


def test_draws_end_when_there_are_no_more():
    only = [("m", conv_problem(1, 1, 5, 5, 1, 3, 3))]
    drawn = list(measure.draw(only, 50, dtypes=["float32"]))
    assert len(drawn) == 9  # 3 directions x 3 batches; one channel has one layout
    assert list(measure.draw([], 5)) == []
    assert list(measure.draw([LAYERS[-1]], 5)) == []


def test_layers_are_read_from_either_kind_of_file(tmp_path: Path):
    head = "N,C,H,W,K,R,S,stride_h,stride_w,pad_h,pad_w,dil_h,dil_w,groups\n"
    (tmp_path / "a.csv").write_text("model,calls," + head + "resnet18,2,1,6,9,8,4,3,2,2,1,1,0,1,2,2\n")
    lines = "lib:a,1,6,9,8,4,3,2,2,1,1,0,1,2,2\nlib:b,1,1,2,2,1,9,9,1,1,0,0,1,1,1\n"
    (tmp_path / "b.csv").write_text("source," + head + lines)
    want = conv_problem(1, 6, 9, 8, 4, 3, 2, stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)
    assert measure.read_layers(tmp_path / "a.csv") == [("resnet18", want)]
    assert measure.read_layers(tmp_path / "b.csv") == [("lib:a", want)]  # the other has no output


# ---- collecting -------------------------------------------------------------------------------------------------


def test_a_collection_is_written_resumed_and_described(tmp_path: Path):
    out, bad, same = tmp_path / "times.csv", Like("bad", lambda y: -y), Like("same", revision=3)
    pool, problems = [NATIVE, bad, same], list(zip(MODELS, TINY, strict=True))
    assert measure.collect(problems[:2], out, pool) == 2
    assert bad.calls == 2
    first = out.read_bytes()

    seen = []
    assert measure.collect(problems, out, pool, on_problem=lambda p, new: seen.append((p, new))) == 1
    assert seen == [(TINY[0], False), (TINY[1], False), (TINY[2], True)]
    assert bad.calls == 3
    assert out.read_bytes().startswith(first)
    rows = read_rows(out)
    assert [(row.model, row.problem, row.algorithm) for row in rows] == [
        (model, problem, name) for model, problem in problems for name in ("native", "bad", "same")
    ]
    assert {row.algorithm: row.status for row in rows} == {"native": "ok", "bad": "wrong", "same": "ok"}
    assert {row.algorithm: row.revision for row in rows} == {"native": 1, "bad": 1, "same": 3}

    record = json.loads(measure.environment_path(out).read_text())
    assert record["machine"] == measure.machine()
    assert record["algorithms"] == {"native": 1, "bad": 1, "same": 3}
    assert record["environment"]["torch"] == torch.__version__


def test_a_file_of_another_machine_is_not_continued(tmp_path: Path):
    out = tmp_path / "times.csv"
    measure.collect([("m", TINY[0])], out, [NATIVE])
    record = json.loads(measure.environment_path(out).read_text())
    record["machine"]["device"] = "another"
    measure.environment_path(out).write_text(json.dumps(record))
    before = out.read_bytes()
    with pytest.raises(ValueError, match="measure into a new file"):
        measure.collect([("m", TINY[1])], out, [NATIVE])
    assert out.read_bytes() == before


def test_the_time_limit_ends_a_collection(tmp_path: Path):
    assert measure.collect(zip(MODELS, TINY, strict=True), tmp_path / "t.csv", [NATIVE], minutes=0.0) == 0


def test_the_command_measures_the_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    layers, out = tmp_path / "layers.csv", tmp_path / "times.csv"
    layers.write_text(
        "model,N,C,H,W,K,R,S,stride_h,stride_w,pad_h,pad_w,dil_h,dil_w,groups\nresnet18,1,8,9,8,4,3,3,1,1,1,1,1,1,1\n"
    )
    arguments = ["--problems", str(layers), "--out", str(out), "--count", "3", "--dtypes", "float32"]
    measure.main(arguments)
    assert "3 problems measured" in capsys.readouterr().out
    rows = read_rows(out)
    assert len({row.problem for row in rows}) == 3
    assert {row.status for row in rows} <= {"ok", "censored"}
    assert sum(row.algorithm == "native" for row in rows) == 3
    measure.main(arguments)
    assert "0 problems measured" in capsys.readouterr().out
    assert json.loads(measure.environment_path(out).read_text())["problems"] == "layers.csv"
