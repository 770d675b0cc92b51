"""`model/train.py` and the tables of `model/dataset.py`."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import FAMILIES, MACHINE, QUICK, synthetic, write

from benchmarks._rows import append_rows
from convselect.base.problem import CHANNELS_LAST, ConvProblem, Direction, conv_problem
from convselect.base.settings import Settings
from convselect.base.volumes import volume_problem
from convselect.choice.choose import choose
from convselect.kernels._contract import GRADE_OF_PRECISION
from convselect.kernels.pool import BY_NAME
from convselect.measure import rows
from convselect.measure.rows import HEADER, Row, read_rows, write_rows
from convselect.model import evaluate, targets, train
from convselect.model.dataset import Table, family_of, folds, ratio_target
from convselect.model.features import FEATURE_NAMES
from convselect.model.inference import Predictor
from convselect.model.reformer import PAPER_PARAMETERS

NAN = float("nan")
PROBLEM = conv_problem(1, 8, 9, 9, 8, 3, 3, padding=1)


# ---- targets ----------------------------------------------------------------------------------------------------


def test_ratio_targets_preserve_ratios():
    times = np.array([[0.0036, 0.0576, 0.02]])  # E, D and another of the paper's table 2, ms
    p = ratio_target(times)
    assert p[0, 0] / p[0, 1] == pytest.approx(0.0576 / 0.0036)
    assert p[0, 0] / p[0, 2] == pytest.approx(0.02 / 0.0036)
    assert p.sum() == pytest.approx(1)


@pytest.mark.parametrize("alpha", [1.0, 4.0, 60.0])
def test_ratio_targets_do_not_depend_on_the_unit(alpha: float):
    times = np.exp(np.random.default_rng(0).normal(3, 2, (20, 7)))
    np.testing.assert_allclose(ratio_target(1e6 * times, alpha), ratio_target(times, alpha), rtol=1e-9)
    np.testing.assert_allclose(ratio_target(times, alpha).sum(1), 1)


def test_the_exponent_sharpens_ratios():
    p = ratio_target(np.array([[1.0, 2.0]]), alpha=4)
    assert p[0, 0] / p[0, 1] == pytest.approx(16)


def test_what_does_not_apply_gets_nothing():
    p = ratio_target(np.array([[2.0, NAN, 4.0], [NAN, 5.0, NAN]]))
    np.testing.assert_allclose(p, [[2 / 3, 0, 1 / 3], [0, 1, 0]])


@pytest.mark.parametrize(("times", "match"), [([[NAN, NAN]], "no applicable"), ([[1.0, 0.0]], "not positive")])
def test_impossible_times_are_refused(times: list[list[float]], match: str):
    with pytest.raises(ValueError, match=match):
        ratio_target(np.array(times))


def test_masked_cross_entropy_ignores_what_does_not_apply():
    logits = torch.tensor([[1.0, 50.0, 0.0]], requires_grad=True)
    applicable = torch.tensor([[True, False, True]])
    loss = targets.masked_cross_entropy(logits, torch.tensor([[0.75, 0.0, 0.25]]), applicable)
    y = math.e / (math.e + 1)
    assert loss.item() == pytest.approx(-0.75 * math.log(y) - 0.25 * math.log(1 - y))
    loss.backward()
    assert logits.grad[0, 1] == 0
    assert logits.grad.isfinite().all()


# ---- rows and tables --------------------------------------------------------------------------------------------


def test_rows_survive_a_file(tmp_path: Path):
    strange = ConvProblem(
        Direction.BACKWARD_WEIGHT, 2, 6, 9, 8, 4, 3, 2, 2, 1, 1, 0, 2, 1, 1, 2, 2, "bfloat16", CHANNELS_LAST,
        CHANNELS_LAST, "cpu", 3, True, False, True,
    )  # fmt: skip
    rows = [
        Row("resnet50", PROBLEM, "native", 1, "ok", "wall", 1.5, 2.25, 1.75, 3.125, 2.5, 9),
        Row("resnet50", PROBLEM, "fft", 3, "wrong"),
        Row("tf, odd", strange, "native", 1, "censored", "thread", 1.0, 2.0, 3.0, 4.0, 5.0, 2),
    ]
    write_rows(tmp_path / "t.csv", rows)
    assert [str(row) for row in read_rows(tmp_path / "t.csv")] == [str(row) for row in rows]  # NaN != NaN
    assert read_rows(tmp_path / "t.csv")[2] == rows[2]
    (tmp_path / "t.csv").write_bytes((tmp_path / "t.csv").read_bytes()[:-20])
    assert len(read_rows(tmp_path / "t.csv")) == 2  # an unfinished line is left out


def test_rows_of_volumes_have_columns_of_their_own(tmp_path: Path):
    """Behind those of images, whose files have the columns that they always had."""
    image = Row("resnet50", PROBLEM, "native", 1, "ok", "wall", 1.5, 2.25, 1.75, 3.125, 2.5, 9, 1)
    p = volume_problem(1, 4, 8, 9, 7, 6, 3, 3, 2, stride=(2, 1, 2), padding=(1, 0, 2, 2, 1, 1), dilation=(2, 1, 1))
    rows = [image, image._replace(problem=p), image._replace(problem=p._replace(dil_d=1, stride_d=3), repeat=0)]
    write_rows(tmp_path / "volumes.csv", rows)
    assert read_rows(tmp_path / "volumes.csv") == rows
    write_rows(tmp_path / "images.csv", rows[:1])
    header, line, _ = (tmp_path / "images.csv").read_text().split("\n")
    assert header.endswith("threads,deterministic,tf32,frozen,algorithm,revision,status,clock,min_us,median_us,p20_us,"
                           "p80_us,wall_us,rounds,repeat")  # fmt: skip
    assert (tmp_path / "volumes.csv").read_text().startswith(f"{header},D,T,stride_d,pad_front,pad_back,dil_d\n{line},")
    with pytest.raises(ValueError, match="no columns"):
        append_rows(tmp_path / "images.csv", rows[1:])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a,b\n1,2\n", "header differs"),
        ("", "header differs"),
        (",".join(HEADER) + "\n1,2\n", "line 2: 2 fields"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, text: str, match: str):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=match):
        read_rows(tmp_path / "t.csv")


def test_an_unknown_status_is_refused(tmp_path: Path):
    write_rows(tmp_path / "t.csv", [Row("m", PROBLEM, "native", 1, "splendid")])
    with pytest.raises(ValueError, match="splendid"):
        read_rows(tmp_path / "t.csv")


def timed(problem: ConvProblem, name: str, us: float, status: str = "ok", revision: int = 1) -> Row:
    return Row("m", problem, name, revision, status, "thread", us, us, us, us, us, 9)


def test_a_table_holds_what_can_be_chosen():
    second, third, fourth = (PROBLEM._replace(C=C) for C in (1, 2, 3))
    table = Table.from_rows([
        timed(PROBLEM, "zeta", 3), timed(PROBLEM, "native", 2), timed(PROBLEM, "alpha", 9, "censored"),
        timed(PROBLEM, "zeta", 2.5), timed(PROBLEM, "bad", NAN, "wrong"),
        timed(second, "native", 5), timed(second, "zeta", NAN, "failed"), timed(second, "alpha", 4),
        timed(third, "native", 1),  # nothing to choose from
        timed(fourth, "alpha", 1), timed(fourth, "zeta", 2),  # nothing to compare with
    ])  # fmt: skip
    assert table.names == ("native", "alpha", "zeta")
    assert table.problems == [PROBLEM, second]
    np.testing.assert_array_equal(table.times_us, [[2, 9, 2.5], [5, 4, NAN]])


def test_a_result_once_wrong_is_never_a_time():
    rows = [timed(PROBLEM, "native", 2), timed(PROBLEM, "a", 1), timed(PROBLEM, "b", 1)]
    rows.append(timed(PROBLEM, "a", NAN, "wrong"))
    assert Table.from_rows(rows).names == ("native", "b")


def test_only_the_latest_revision_counts():
    other = PROBLEM._replace(C=4)
    rows = [timed(PROBLEM, "native", 2), timed(PROBLEM, "a", 1, revision=1), timed(PROBLEM, "b", 3)]
    rows += [timed(other, "native", 2), timed(other, "a", 5, revision=2)]
    table = Table.from_rows(rows)
    assert table.revisions == {"native": 1, "a": 2, "b": 1}
    np.testing.assert_array_equal(table.times_us, [[2, NAN, 3], [2, 5, NAN]])


def test_an_artifact_records_the_kinds_of_problems_that_it_had_times_of():
    dilated = PROBLEM._replace(dil_h=2)
    rows = []
    for n in range(1, train.LEAST_TIMES + 1):
        for problem in (PROBLEM, dilated, dilated.with_direction(Direction.BACKWARD_WEIGHT)):
            rows += [timed(problem._replace(N=n), "native", 2), timed(problem._replace(N=n), "a", 1)]
        if n > 1:
            rows.append(timed(dilated._replace(N=n), "b", 3))
        rows.append(timed(PROBLEM._replace(N=n), "b", 3))
    everything = ("backward_weight dilated", "forward dilated", "forward plain")
    assert train.timed(Table.from_rows(rows)) == {"native": everything, "a": everything, "b": ("forward plain",)}


def test_a_table_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no problem was measured"):
        Table.from_rows([timed(PROBLEM, "native", 2)])


def test_families_are_the_letters_a_name_begins_with():
    names = {"resnet50d": "resnet", "tf_efficientnet_b0": "efficientnet", "test_vit": "vit", "ViT-L": "vit"}
    assert {name: family_of(name) for name in names} == names
    assert family_of("123") == "123"


def test_folds_keep_families_together_and_are_even():
    models = [f"{FAMILIES[i % 7]}{i}" for i in range(700)]
    fold, kept_apart = folds(models, 5)
    assert kept_apart == "family"
    assert set(fold) == set(range(5))
    for family in FAMILIES:
        assert len({fold[i] for i in range(700) if family_of(models[i]) == family}) == 1
    assert folds(models, 5)[0].tolist() == fold.tolist()
    assert len(set(folds(["a1", "b1", "a2"], 5)[0])) == 2
    alone, kept_apart = folds(["a1"] * 10, 5)
    assert kept_apart == "problem"
    assert np.bincount(alone).tolist() == [2] * 5


@pytest.mark.parametrize(
    ("problem", "want"),
    [
        (conv_problem(1, 8, 9, 9, 8, 1, 1), "1x1"),
        (conv_problem(1, 8, 9, 9, 8, 3, 3), "3x3"),
        (conv_problem(1, 8, 9, 9, 8, 3, 3, stride=(1, 2)), "strided"),
        (conv_problem(1, 8, 9, 9, 8, 3, 3, groups=8), "depthwise"),
        (conv_problem(1, 8, 9, 9, 8, 3, 3, groups=2), "grouped"),
        (conv_problem(1, 8, 9, 9, 8, 7, 7, groups=8), "large"),
        (conv_problem(1, 8, 9, 9, 8, 1, 9), "large"),
        (conv_problem(1, 8, 9, 9, 8, 3, 3, dilation=2), "other"),
        (conv_problem(1, 8, 9, 9, 8, 5, 5), "other"),
        (conv_problem(1, 8, 9, 9, 8, 1, 3), "other"),
    ],
)
def test_kernel_classes(problem: ConvProblem, want: str):
    assert rows.kernel_class(problem) == want


# ---- judging ----------------------------------------------------------------------------------------------------


def test_figures_of_known_choices():
    times = np.array([[4.0, 2.0, NAN], [4.0, 8.0, 1.0], [3.0, 3.03, 6.0], [2.0, NAN, 4.0]])
    figures = evaluate.judge(np.array([1, 1, 1, 0]), times)
    assert figures["fraction_of_oracle_mean"] == pytest.approx((1 + 1 / 8 + 3 / 3.03 + 1) / 4)
    assert figures["fraction_of_oracle_min"] == pytest.approx(1 / 8)
    assert figures["speedup_geomean"] == pytest.approx((2 * 0.5 * 3 / 3.03 * 1) ** 0.25)
    assert figures["oracle_speedup_geomean"] == pytest.approx((2 * 4 * 1 * 1) ** 0.25)
    assert figures["speedup_total_time"] == pytest.approx(13 / (2 + 8 + 3.03 + 2))
    assert figures["slower_than_native_share"] == 0.25  # 1 % slower is noise
    assert figures["worst_slowdown"] == 2
    assert figures["top1"] == 0.5


def test_choices_are_those_of_choose():
    """`chosen` decides on matrices what `choose` decides on one problem: same masking, same margin, same ties."""
    rng, names = np.random.default_rng(0), ("native", "im2col_gemm", "upcast")
    settings = Settings("auto", "native", 2**40)
    problems = [PROBLEM, PROBLEM._replace(dtype="bfloat16"), PROBLEM._replace(K=3, N=2)]
    taken = set()
    for i in range(120):
        problem, gains = problems[i % 3], rng.normal(0, 0.2, (1, 3)) * [0, 1, 1]
        margins = np.array([[0.0, 0.1, 0.1 if i % 2 else 0.25]])
        applies = [name == "native" or BY_NAME[name].why_not(problem) is None for name in names]

        class Fixed:
            ranked = tuple(names[k] for k in np.argsort(-gains[0], kind="stable"))
            log_gain = staticmethod(dict(zip(names, gains[0], strict=True)).__getitem__)
            margin_of = staticmethod(dict(zip(names, margins[0], strict=True)).__getitem__)
            probability = staticmethod(lambda name: 0.5)

            def predict(self, problem):
                return self

        choice = choose(problem, BY_NAME, settings, predictor=Fixed())
        matrix = evaluate.chosen(gains, np.where(applies, 1.0, NAN)[None], 0.1 if i % 2 else margins)
        assert choice.algorithm == names[matrix[0]]
        taken.add(choice.algorithm)
    assert taken == set(names)


def test_figures_count_what_the_default_precision_admits():
    problem = PROBLEM._replace(dtype="float32")
    loose = next(a for a in BY_NAME.values() if a.error_grade(problem) > GRADE_OF_PRECISION["native"])
    rows = [timed(problem, "native", 4), timed(problem, loose.name, 1), timed(problem, "unheard of", 2)]
    table = Table.from_rows(rows)
    assert table.names == ("native", "unheard of", loose.name)
    np.testing.assert_array_equal(evaluate.admitted(table), [[4, 2, NAN]])
    np.testing.assert_array_equal(evaluate.admitted(table, "fast"), [[4, 2, 1]])
    np.testing.assert_array_equal(table.times_us, [[4, 2, 1]])


def test_the_margin_stops_harm_that_buys_nothing():
    rng = np.random.default_rng(0)
    n = 400
    times = np.ones((n, 2))
    gains = np.zeros((n, 2))
    # Half is predicted and is 2x faster; the rest is predicted 1.25x faster and is, at random, 5 % faster or slower.
    times[: n // 2, 1], gains[: n // 2, 1] = 0.5, math.log(2)
    times[n // 2 :, 1], gains[n // 2 :, 1] = np.exp(0.05 * rng.choice([-1, 1], n // 2)), 0.22
    margin = evaluate.best_margin(gains, times)
    assert margin == 0.25
    assert evaluate.judge(evaluate.chosen(gains, times, margin), times)["slower_than_native_share"] == 0
    # If all predictions hold, the smallest margin suffices.
    times[n // 2 :, 1] = 0.96
    assert evaluate.best_margin(gains, times) == evaluate.MARGINS[0]


# ---- training ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_known_rule_is_learnt_and_holds_on_unseen_families():
    table = Table.from_rows(synthetic(600))
    _, figures = train.cross_validate(table, QUICK)
    held_out = figures["overall"]
    assert figures["split"] == "5 folds by family"
    assert held_out["top1"] > 0.9
    assert held_out["fraction_of_oracle_mean"] > 0.95
    assert held_out["speedup_geomean"] > 0.9 * held_out["oracle_speedup_geomean"]
    assert held_out["slower_than_native_share"] < 0.05


@pytest.mark.slow
def test_logit_differences_are_predicted_log_ratios():
    table = Table.from_rows(synthetic(500))
    x = train.design(table.problems)
    for alpha in (1.0, 4.0):
        model = train.fit(x, table.times_us, train.Recipe(alpha=alpha, steps=250, dropout=0.0))
        predicted = train.log_gains(model, x, alpha)
        actual = np.log(table.times_us[:, :1] / table.times_us)
        gemm = table.names.index("gemm")
        assert np.median(np.abs(predicted - actual)[:, gemm]) < 0.15
        assert np.corrcoef(predicted[:, gemm], actual[:, gemm])[0, 1] > 0.9


def test_training_is_repeatable_and_leaves_the_generator_and_threads_alone():
    table = Table.from_rows(synthetic(60))
    x, recipe = train.design(table.problems), train.Recipe(steps=5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first, second = (train.fit(x, table.times_us, recipe) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.equal(first(x), second(x))
    assert not torch.equal(first(x), train.fit(x, table.times_us, train.Recipe(steps=5, seed=1))(x))


@pytest.mark.slow
def test_from_measured_files_to_an_artifact_that_predicts(tmp_path: Path):
    rows = synthetic(300)
    cut = next(i for i, row in enumerate(rows) if row.problem == rows[-1].problem) // 2
    few = [row._replace(problem=row.problem._replace(dtype="bfloat16")) for row in rows[:20]]
    files = [write(tmp_path / "a.csv", rows[:cut] + few), write(tmp_path / "b.csv", rows[cut:])]
    card = train.train(files, "cpu-x86-avx2", tmp_path / "out", QUICK, n_folds=3)
    assert card.algorithm_names == ("native", "gemm", "tiles")
    assert card.dtypes == ("float32",)
    assert card.data["parameters"] <= PAPER_PARAMETERS
    assert card.margin in evaluate.MARGINS
    overall = card.figures["held_out"]["overall"]
    assert overall["problems"] == card.data["problems"]
    for title in ("by_direction", "by_source"):
        assert sum(f["problems"] for f in card.figures["held_out"][title].values()) == overall["problems"]
    assert train.report(card)[0][:2] == ["overall", str(overall["problems"])]
    assert card.limits
    assert card.sharpness > 0
    assert set(card.timed) == set(card.algorithm_names)
    assert "forward plain" in card.timed["gemm"]

    path = tmp_path / "out" / "cpu-x86-avx2.npz"
    predictor = Predictor.load(path)
    assert predictor.card == card
    assert path.stat().st_size <= 170_000
    pointwise = conv_problem(2, 60, 28, 28, 100, 1, 1)
    assert predictor.predict(pointwise).ranked[0] == "gemm"
    assert predictor.predict(pointwise).log_gain("gemm") == pytest.approx(math.log(1.6), abs=0.25)
    assert predictor.predict(conv_problem(2, 60, 28, 28, 100, 5, 5, padding=2)).log_gain("gemm") < 0
    assert predictor.predict(pointwise._replace(dtype="bfloat16")) is None


def test_times_of_different_machines_are_not_mixed(tmp_path: Path):
    rows = synthetic(20)
    here = write(tmp_path / "a.csv", rows)
    there = write(tmp_path / "b.csv", rows, {**MACHINE, "device": "another"})
    with pytest.raises(ValueError, match=r"b\.csv was measured on"):
        train.train([here, there], "cpu-x86-avx2", tmp_path, QUICK)
    with pytest.raises(ValueError, match="not on cpu-arm-default"):
        train.train([here], "cpu-arm-default", tmp_path, QUICK)
    with pytest.raises(ValueError, match="no element type has 30"):
        train.train([here], "cpu-x86-avx2", tmp_path, QUICK)


def test_ignored_features_have_no_say():
    table = Table.from_rows(synthetic(40))
    x = train.design(table.problems)
    model = train.fit(x, table.times_us, train.Recipe(steps=30, ignored=("waste_gemm", "twos_C/G")))
    changed = x.clone()
    columns = [i for i, name in enumerate(FEATURE_NAMES) if name.startswith(("waste_gemm", "twos_C/G"))]
    changed[:, columns] = torch.rand(len(x), len(columns))
    assert len(columns) == 15
    assert torch.equal(model(x), model(changed))
    changed[:, FEATURE_NAMES.index("twos_C")] += 1
    assert not torch.equal(model(x), model(changed))


def test_more_algorithms_than_the_parameter_bound_admits_are_refused():
    x = torch.zeros(4, len(FEATURE_NAMES))
    with pytest.raises(ValueError, match="the bound is 80978"):
        train.fit(x, np.ones((4, 90)), QUICK)
    with pytest.raises(ValueError, match="too few"):
        train.fit(x[:1], np.ones((1, 3)), QUICK)
