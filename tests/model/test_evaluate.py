"""Targets, figures, splits, comparison selectors, the wide format, and `convselect evaluate`."""

from __future__ import annotations

import gzip
import json
import math

import fresh
import numpy as np
import pytest
import torch
from synthetic import QUICK, synthetic, write

from convselect.base.problem import CHANNELS_LAST, Direction, conv_problem
from convselect.measure.measure import threads
from convselect.measure.rows import Row
from convselect.model import evaluate, judging, selectors, targets, train
from convselect.model.dataset import Table, is_wide, read_wide
from convselect.model.inference import Predictor

NAN = float("nan")
WIDE = """arch,dtype,layout,direction,N,C,H,W,K,R,S,stride_h,stride_w,pad_h,pad_w,dil_h,dil_w,groups,gemm_ms,direct_ms
gfx908,FP16,NHWC,backward_data,16,2,3,3,4,3,3,1,1,0,0,1,1,1,,0.5
gfx908,BF16,NHWC,backward_weight,16,2,5,3,4,3,3,2,1,1,0,1,1,2,0.25,0.5
gfx908,FP32,NCHW,forward,8,2,5,3,4,3,3,2,1,1,0,1,1,2,0.75,0.5
"""


# ---- targets ----------------------------------------------------------------------------------------------------

TIMES = np.array([[4.0, 1.0, 2.0, NAN], [3.0, 9.0, NAN, 3.0], [5.0, NAN, 5.5, 50.0]])


@pytest.mark.parametrize("name", targets.TARGETS)
def test_every_target_ranks_by_time_at_its_optimum_and_leaves_the_inapplicable_alone(name):
    applicable = torch.from_numpy(np.isfinite(TIMES))
    p = torch.from_numpy(targets.probabilities(name, TIMES, 2.0)).float()
    log_t = torch.from_numpy(np.log(np.where(np.isfinite(TIMES), TIMES, 1.0))).float()
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-6)
    assert (p[~applicable] == 0).all()
    loss = targets.loss_of(name, 2.0)
    logits = torch.zeros(3, 4, requires_grad=True)
    optimiser = torch.optim.Adam([logits], 0.05)
    with threads(1):
        for _ in range(400):
            optimiser.zero_grad()
            loss(logits, p, log_t, applicable).backward()
            assert (logits.grad[~applicable] == 0).all()
            optimiser.step()
    found = np.where(np.isfinite(TIMES), logits.detach().numpy(), -np.inf)
    fastest = np.nanmin(TIMES, 1, keepdims=True) == TIMES
    assert fastest[np.arange(3), found.argmax(1)].all()
    if name in ("ratio", "log_time"):  # differences of logits over alpha are log ratios of times
        gains = (found - found[:, :1]) / 2.0
        np.testing.assert_allclose(gains[applicable], np.log(TIMES[:, :1] / TIMES)[applicable], atol=0.02)


def test_targets_of_the_papers_table():
    times_us = np.array([[3.6, 57.6]])
    assert targets.probabilities("softmax", times_us, 1.0)[0, 0] / targets.probabilities("softmax", times_us, 1.0)[
        0, 1
    ] == pytest.approx(math.exp(0.054))
    np.testing.assert_array_equal(targets.probabilities("one_hot", np.array([[2.0, 2, 3]]), 1.0), [[0.5, 0.5, 0]])
    with pytest.raises(ValueError, match="target must be one of"):
        targets.loss_of("nonsense", 1.0)


# ---- figures ----------------------------------------------------------------------------------------------------


def test_figures_without_a_native():
    times = np.array([[4.0, 2.0], [1.0, 3.0], [1.0, 1.04]])
    found = evaluate.judge(np.array([1, 1, 1]), times, None)
    assert found["top1"] == pytest.approx(1 / 3)
    assert found["top1_within_5_percent"] == pytest.approx(2 / 3)
    assert "speedup_geomean" not in found
    assert evaluate.best_margin(np.zeros((3, 2)), times, None) == 0
    assert evaluate.chosen(np.array([[0.1, 0.0]]), times[:1], 5.0, None)[0] == 0


def test_the_best_of_the_predicted_top_k():
    times = np.array([[4.0, 2.0, 1.0, NAN]])
    gains = np.array([[0.0, 2.0, 1.0, 9.0]])
    assert evaluate.best_of(gains, times, 1)[0] == 1
    assert evaluate.best_of(gains, times, 2)[0] == 2
    assert evaluate.best_of(np.array([[3.0, 2.0, 1.0, 9.0]]), times, 2)[0] == 1


def test_the_best_single_rule_is_an_order():
    times = np.array([[4.0, 2.0, NAN], [4.0, 3.0, NAN], [4.0, NAN, 1.0], [1.0, NAN, NAN]])
    order = evaluate.fixed_order(times)
    assert order == [1, 0, 2]
    np.testing.assert_array_equal(evaluate.best_single(times, order), [1, 1, 0, 0])


def test_confidence_is_calibrated_on_what_happened():
    rng = np.random.default_rng(0)
    gains = rng.normal(0, 0.3, (4000, 3))
    # The truth is drawn from a softmax five times as sharp as the gains.
    p = np.exp(5 * gains)
    p /= p.sum(1, keepdims=True)
    winner = (p.cumsum(1) > rng.random((4000, 1))).argmax(1)
    times = np.where(np.arange(3) == winner[:, None], 1.0, 2.0)
    sharpness = evaluate.best_sharpness(gains, times)
    assert sharpness == pytest.approx(5, rel=0.25)
    best = gains.argmax(1)
    found = evaluate.reliability(evaluate.confidence(gains, times, sharpness), winner == best)
    assert found["ece"][0] < 0.03
    assert sum(found["problems"]) == 4000
    overconfident = evaluate.reliability(evaluate.confidence(gains, times, 50.0), winner == best)
    assert overconfident["ece"][0] > 0.2


@pytest.mark.parametrize("how", evaluate.SPLITS)
def test_splits_keep_together_what_they_say(how):
    table = Table.from_rows(synthetic(300))
    fold, kept = evaluate.split(table, how, 4)
    assert len(fold) == len(table.problems)
    assert len(set(fold.tolist())) > 1
    assert kept == how
    key = {
        "family": lambda i: table.models[i].split("_")[0],
        "class": lambda i: table.problems[i].R,
        "batch": lambda i: table.problems[i].N,
        "problem": lambda i: table.problems[i][1:17],
        "random": lambda i: i,
    }[how]
    sides = {}
    for i, k in enumerate(fold):
        sides.setdefault(key(i), set()).add(int(k))
    assert all(len(side) == 1 for side in sides.values())
    with pytest.raises(ValueError, match="split must be one of"):
        evaluate.split(table, "moon phase")


def test_a_problem_is_on_one_side_in_all_directions_and_types():
    p = conv_problem(1, 8, 9, 9, 8, 3, 3)
    relatives = [p._replace(direction=d, dtype=t) for d in Direction for t in ("float32", "float16")]
    table = Table(relatives, ["m"] * 6, ("native", "a"), np.ones((6, 2)), {})
    assert len(set(evaluate.split(table, "problem")[0].tolist())) == 1


def test_held_out_problems_are_never_learned_from():
    table = Table.from_rows(synthetic(200))
    fold, _ = evaluate.split(table, "family", 3)
    families = []

    def fit(part):
        seen = {m.split("_")[0] for m in part.models}

        def predict(other):
            assert not seen & {m.split("_")[0] for m in other.models}
            families.append(seen)
            return np.zeros(other.times_us.shape)

        return predict

    gains, found = evaluate.cross_validated(table, fit, fold)
    assert len(families) == 3
    assert gains.shape == table.times_us.shape
    assert found["overall"]["native_kept_share"] == 1
    gains, found = evaluate.cross_validated(table, fit, fold, only=[1])
    assert len(gains) == found["overall"]["problems"] == (fold == 1).sum()


def test_label_noise_is_what_a_second_measurement_says():
    p, q = conv_problem(1, 8, 9, 9, 8, 3, 3), conv_problem(1, 8, 9, 9, 9, 3, 3)

    def row(problem, name, us, repeat):
        return Row("m", problem, name, 1, "ok", "thread", us, us, us, us, us, 9, repeat)

    rows = [row(p, "native", 10, 0), row(p, "a", 9, 0), row(p, "native", 8, 1), row(p, "a", 10, 1)]
    rows += [row(q, "native", 10, 0), row(q, "a", 5, 0), row(q, "native", 10, 1), row(q, "a", 5, 1)]
    found = evaluate.label_noise(rows)
    assert found["problems"] == 2
    assert found["winner_changes_share"] == 0.5
    assert found["fraction_of_oracle_mean"] == pytest.approx((0.8 + 1) / 2)
    assert evaluate.label_noise(rows[:2]) is None
    # Second measurements judge the first, they are not training data.
    assert Table.from_rows(rows).times_us.tolist() == [[10, 9], [10, 5]]


# ---- other people's times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["times.csv", "times.csv.gz"])
def test_wide_files_are_read(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(WIDE.encode()) if name.endswith(".gz") else WIDE.encode())
    assert is_wide(path)
    table = read_wide(path)
    assert table.names == ("gemm", "direct")
    assert table.native is None
    np.testing.assert_array_equal(table.times_us, [[250, 500], [750, 500]])  # one time leaves nothing to choose
    assert table.problems[0] == conv_problem(
        16, 2, 5, 3, 4, 3, 3, stride=(2, 1), padding=(1, 0), groups=2, direction="backward_weight", dtype="bfloat16",
        layout=CHANNELS_LAST, weight_layout=CHANNELS_LAST,
    )  # fmt: skip
    assert table.models == ["gfx908"] * 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("N,C\n1,2\n", "no column of times"),
        ("N,a_ms,b_ms\n1,2,3\n", "line 2: KeyError"),
        (WIDE.replace("0.25", "fast"), r"line 3: ValueError.*'fast'"),
        (WIDE.replace("FP32", "INT4"), "line 4: ValueError: unknown dtype 'INT4'"),
        ("".join(WIDE.splitlines(keepends=True)[:2]), "no problem with two times"),
    ],
)
def test_wide_files_that_are_wrong_are_named(tmp_path, text, match):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        read_wide(path)


def foreign(tmp_path, n=300):
    """A wide file whose fastest algorithm follows a rule."""
    rng = np.random.default_rng(0)
    lines = [WIDE.splitlines()[0]]
    for _ in range(n):
        C, K = (int(2 ** rng.uniform(2, 9)) for _ in range(2))
        fast = 1.0 if C >= 32 else 3.0
        noise = rng.normal(1, 0.02)
        lines.append(f"gfx,FP32,NCHW,forward,4,{C},16,16,{K},3,3,1,1,1,1,1,1,1,{fast * noise:.4f},2.0")
    path = tmp_path / "foreign.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_network_learns_other_peoples_algorithms_and_never_speaks_here(tmp_path):
    path = foreign(tmp_path)
    card = train.train([path], "gfx-families", tmp_path / "out", QUICK, how="problem")
    assert card.algorithm_names == ("gemm", "direct")
    found = card.figures["held_out"]["overall"]
    assert found["top1"] > 0.9
    assert found["problems"] + card.data["problems"] == len(read_wide(path).problems)
    predictor = Predictor.load(tmp_path / "out" / "gfx-families.npz")
    assert predictor.predict(conv_problem(4, 64, 16, 16, 64, 3, 3, padding=1)) is None
    gains = judging.artifact_gains(predictor, read_wide(path))
    assert gains.shape == (len(read_wide(path).problems), 2)


# ---- selectors --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gbdt", "lambdarank", "mlp", "resnet18", "neighbour"])
def test_selectors_learn_a_rule(name):
    pytest.importorskip("lightgbm")
    pytest.importorskip("sklearn")
    table = Table.from_rows(synthetic(500))
    fold, _ = evaluate.split(table, "random", 4)
    learn = {"resnet18": selectors.resnet18(steps=25, batch=48)}.get(name) or selectors.named(name)
    with threads(1):
        gains, found = evaluate.cross_validated(table, learn, fold, only=[0])
    assert np.isfinite(gains).all()
    np.testing.assert_allclose(gains[:, table.native], 0, atol=1e-9)
    assert found["without_margin"]["fraction_of_oracle_mean"] > 0.9
    assert found["without_margin"]["speedup_geomean"] > 1.15


def test_rules_choose_what_they_say():
    table = Table.from_rows(synthetic(100))
    native, gemm = table.names.index("native"), table.names.index("gemm")
    times = table.times_us
    for name, want in (("native", native), ("always:gemm", gemm)):
        gains = selectors.named(name)(table)(table)
        assert (evaluate.chosen(gains, times, 0.3) == want).all()
    tiles = evaluate.chosen(selectors.named("always:tiles")(table)(table), times, 0.3)
    applies = np.isfinite(times[:, table.names.index("tiles")])
    assert (tiles[~applies] == native).all()
    assert (tiles[applies] == table.names.index("tiles")).all()
    best = evaluate.chosen(selectors.named("best_single")(table)(table), times, -np.inf)
    np.testing.assert_array_equal(best, evaluate.best_single(times, evaluate.fixed_order(times)))
    with pytest.raises(ValueError, match="unknown selector 'magic'"):
        selectors.named("magic")
    with pytest.raises(ValueError, match="no 'magic' among"):
        selectors.named("always:magic")(table)


def test_runtime_models_report_what_they_are_usually_judged_by():
    pytest.importorskip("sklearn")
    table = Table.from_rows(synthetic(400))
    half = np.arange(len(table.problems)) % 2 == 0
    with threads(1):
        found = selectors.r_squared(table.part(half), table.part(~half))
    assert set(found) == set(table.names)
    assert all(0.7 < one["r2_log"] <= 1 for one in found.values())
    assert all(one["median_relative_error"] < 0.6 for one in found.values())


# ---- the command ------------------------------------------------------------------------------------------------


def command(*arguments):
    return fresh.run(["-m", "convselect.cli.main", "evaluate", *map(str, arguments)])


def test_the_command_judges_selectors_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    times = write(tmp_path / "times.csv", synthetic(200))
    done = command(
        times, "--selector", "reformer", "--selector", "best_single", "--steps", 60, "--folds", 3, "--learning-curve",
        "--figures", tmp_path / "plots", "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "reformer" in done.stdout
    assert "3 folds by family" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    reformer = found["judged"]["reformer"]
    assert reformer["overall"]["problems"] == 200
    assert reformer["best_of_2"]["fraction_of_oracle_mean"] >= reformer["without_margin"]["fraction_of_oracle_mean"]
    assert 0 < reformer["choice_us"] < 5000
    assert [int(n) for n in found["learning_curve"]] == sorted({int(n) for n in found["learning_curve"]})
    assert len(found["learning_curve"]) == 4
    assert f"trained on {max(map(int, found['learning_curve']))} problems, without a margin" in done.stdout
    names = {"chosen_against_native", "by_direction", "regret", "reliability", "learning_curve"}
    assert {p.stem for p in (tmp_path / "plots").glob("*.png")} == names


def test_the_command_says_how_well_runtimes_are_predicted(tmp_path):
    pytest.importorskip("sklearn")
    times = write(tmp_path / "times.csv", synthetic(120))
    done = command(times, "--selector", "mlp", "--one-fold", "--folds", 3, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["judged"]["mlp"]["r_squared"]
    assert set(found) == {"native", "gemm", "tiles"}
    assert all(one["r2_log"] <= 1 for one in found.values())
    assert done.stdout.count("mlp, runtime of ") == 3


def test_the_command_judges_an_artifact(tmp_path):
    times = write(tmp_path / "times.csv", synthetic(200))
    train.train([times], "cpu-x86-avx2", tmp_path, QUICK, n_folds=2)
    done = command(times, "--artifact", tmp_path / "cpu-x86-avx2.npz", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["judged"]["cpu-x86-avx2"]
    assert found["overall"]["fraction_of_oracle_mean"] > 0.9
    assert "trained on times.csv" in done.stdout
    assert command(times, "--artifact", tmp_path / "times.csv").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.csv"], "missing.csv"),
        (["times.csv", "--selector", "magic"], "unknown selector"),
        (["times.csv", "--split", "magic"], "split must be one of"),
        (["times.csv", "--one-fold", "--folds", "2"], "take three or more"),
    ],
)
def test_the_command_refuses_with_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "times.csv", synthetic(60))
    done = command(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
