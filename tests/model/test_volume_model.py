"""The model of volumes: its features, how it is trained and found, and that what ships is better than the rules."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from convselect.base.problem import Direction, conv_problem
from convselect.base.volumes import volume_problem
from convselect.kernels.pool import BY_NAME
from convselect.measure.rows import Row, write_rows
from convselect.model import evaluate, inference, loaded, volumes
from convselect.model.dataset import Table
from convselect.model.features import VOLUME_FEATURE_NAMES, features, features_of, kinds, volume_features
from convselect.model.inference import ARTIFACTS, OF_VOLUMES, Predictor
from convselect.model.reformer import PAPER_PARAMETERS
from convselect.model.selectors import named
from convselect.model.train import Recipe, read_measured, train

P = volume_problem(2, 20, 9, 14, 11, 24, 3, 5, 3, stride=(2, 1, 1), padding=(1, 2, 2), dilation=(1, 1, 2), groups=4)
PLAIN = volume_problem(1, 32, 16, 32, 32, 32, 3, 3, 3, padding=1)
SHIPPED = sorted(ARTIFACTS.glob(f"{OF_VOLUMES}*.npz"))
shipped = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)


# ---- features ---------------------------------------------------------------------------------------------------


@given(
    st.builds(
        lambda N, C, D, H, K, T, R, stride, pad, direction: volume_problem(
            N, 2 * C, D + T, H + R, 2 * H + R, 2 * K, T, R, R, stride=stride, padding=pad, groups=2, direction=direction
        ),
        *(st.integers(1, n) for n in (3, 20, 9, 20, 20, 4, 5, 2, 1)), st.sampled_from(list(Direction)),
    )
)  # fmt: skip
def test_work_and_traffic_are_the_problems(p):
    x = dict(zip(VOLUME_FEATURE_NAMES, volume_features(p).tolist(), strict=True))
    want = {
        "flops": p.flops, "bytes": p.bytes, "intensity": p.flops / p.bytes, "gemm_m": p.gemm.m, "gemm_n": p.gemm.n,
        "gemm_k": p.gemm.k, "D": p.D, "T": p.T, "O": p.O, "taps": p.T * p.R * p.S, "stride_d": p.stride_d,
        "pad_d": 1 + 2 * p.pad_front, "C/G": p.C // 2, "Q": p.Q,
    }  # fmt: skip
    assert {name: x[name] for name in want} == pytest.approx({name: math.log2(n) for name, n in want.items()}, abs=1e-4)
    assert x["is_patch"] == p.is_patch
    assert x["is_pointwise"] == p.is_pointwise


def test_features_of_either_kind():
    image = conv_problem(1, 8, 9, 9, 8, 3, 3)
    assert len(features_of(P)) == len(VOLUME_FEATURE_NAMES) == len(set(VOLUME_FEATURE_NAMES))
    np.testing.assert_array_equal(features_of(image), features(image))
    x = dict(zip(VOLUME_FEATURE_NAMES, features_of(P).tolist(), strict=True))
    # 11 columns: two phases of 6 and 5, in tiles of 4 as 16; 14 rows as 16
    assert x["waste_phases_4"] == pytest.approx(math.log2(16 * 16 / (14 * 11)), abs=1e-5)
    assert x["waste_C/G_16"] == pytest.approx(math.log2(16 / 5), abs=1e-5)
    assert (x["is_dilated"], x["is_strided"], x["is_thin"], x["is_3x3x3"]) == (1, 1, 0, 0)
    assert dict(zip(VOLUME_FEATURE_NAMES, features_of(PLAIN).tolist(), strict=True))["is_3x3x3"] == 1
    with pytest.raises(ValueError, match="not positive"):
        volume_features(P._replace(D=0))


def test_kinds_count_the_depth():
    assert kinds(PLAIN) == ("forward plain",)
    assert kinds(PLAIN._replace(dil_d=2, direction=Direction.BACKWARD_DATA)) == ("backward_data dilated",)
    assert kinds(PLAIN._replace(stride_d=2)) == ("forward strided",)


# ---- training ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def times(tmp_path_factory):
    """Made-up times in which `direct` is three times as fast as native where there are few channels, else half."""
    path = tmp_path_factory.mktemp("volumes") / "times.csv"
    rows = []
    for i, C in enumerate((2, 3, 4, 32, 48, 64)):
        for size in range(8, 20):
            for direction in Direction:
                p = volume_problem(1, C, size, 12, 12, C, 3, 3, 3, padding=1, direction=direction)
                for name, us in (("native", 9e3), ("direct", 3e3 if C < 16 else 18e3)):
                    rows.append(Row(f"{'abc'[i % 3]}net", p, name, 1, "ok", "thread", us, us, us, us, us, 9))
    write_rows(path, rows)
    Path(f"{path}.env.json").write_text(
        '{"machine": {"family": "cpu-x86-avx512-c", "host_flags": {}, "device": "this one", "torch": "2.13.0"}}'
    )
    return path


def test_an_artifact_of_its_own(times, tmp_path):
    card = train([times], "volumes-cpu-x86-avx512-c", tmp_path, Recipe(steps=60), n_folds=3)
    assert card.feature_names == VOLUME_FEATURE_NAMES
    assert card.native_line == ()
    predictor = Predictor.load(tmp_path / "volumes-cpu-x86-avx512-c.npz")
    thin, wide = (volume_problem(1, C, 13, 12, 12, C, 3, 3, 3, padding=1) for C in (3, 40))
    assert predictor.predict(thin).ranked[0] == "direct"
    assert predictor.predict(wide).ranked[0] == "native"
    assert predictor.predict(conv_problem(1, 3, 12, 12, 3, 3, 3, padding=1)) is None
    assert predictor.predict(thin._replace(dtype="float64")) is None
    with pytest.raises(ValueError, match="measured on volumes-cpu-x86-avx512-c"):
        train([times], "cpu-x86-avx512-c", tmp_path, Recipe(steps=60))


def test_calls_of_volumes_cost_what_they_cost_in_python(times):
    table, _ = read_measured([times])
    row = next(i for i, p in enumerate(table.problems) if p.direction == Direction.FORWARD and p.C == 2)
    assert table.times_us[row, table.names.index("direct")] == 3e3 + 25
    assert table.times_us[row, table.names.index("native")] == 9e3


def test_a_file_of_both_is_of_images(times, tmp_path):
    image = conv_problem(1, 8, 9, 9, 8, 3, 3)
    rows = [Row("net", image, name, 1, "ok", "thread", 1.0, 1.0, 1.0, 1.0, 1.0, 9) for name in ("native", "direct")]
    write_rows(tmp_path / "images.csv", rows)
    (tmp_path / "images.csv.env.json").write_text(Path(f"{times}.env.json").read_text())
    table, _ = read_measured([times, tmp_path / "images.csv"])
    assert table.problems == [image]


# ---- in use -----------------------------------------------------------------------------------------------------


def test_volumes_have_the_model_that_is_shipped_for_the_family(times, tmp_path, monkeypatch):
    train([times], "volumes-cpu-x86-avx512-c", tmp_path, Recipe(steps=60), n_folds=3)
    monkeypatch.setattr(inference, "artifact_path", lambda family: tmp_path / f"{family}.npz")
    predictor = Predictor.load(ARTIFACTS / "cpu-x86-avx512-c.npz", host_flags={})
    said = predictor.predict(PLAIN)
    assert set(said.ranked) == {"native", "direct"}
    assert predictor.predict(PLAIN._replace(threads=4)).margin > said.margin
    # what the model has no times of is the rules': 16 bits here, and calls too short to be worth a look are nobody's
    half = PLAIN._replace(dtype="bfloat16")
    assert set(predictor.predict(half).ranked) == {"native", *volumes.gains(half)}
    assert predictor.predict(PLAIN._replace(C=1, K=1, D=4, H=4, W=4)) is None
    assert predictor.predict(PLAIN._replace(layout="strided")) is None
    again = pickle.loads(pickle.dumps(predictor))
    assert again.predict(PLAIN).logits == said.logits


def test_what_trials_teach_is_kept_for_each_model(times, tmp_path, monkeypatch):
    train([times], "volumes-cpu-x86-avx512-c", tmp_path, Recipe(steps=60), n_folds=3)
    names = []
    for directory in (tmp_path, tmp_path / "none"):
        monkeypatch.setattr(inference, "artifact_path", lambda family, at=directory: at / f"{family}.npz")
        loaded.override(Predictor.load(ARTIFACTS / "cpu-x86-avx512-c.npz", host_flags={}))
        try:
            names.append(loaded.identity(PLAIN))
        finally:
            loaded.use_local()
    assert len(set(names)) == 2
    assert names[1].endswith(" volumes")


def test_a_damaged_model_of_volumes_leaves_the_rules(tmp_path, monkeypatch):
    (tmp_path / "volumes-cpu-x86-avx512-c.npz").write_bytes(b"nonsense")
    monkeypatch.setattr(inference, "artifact_path", lambda family: tmp_path / f"{family}.npz")
    predictor = Predictor.load(ARTIFACTS / "cpu-x86-avx512-c.npz", host_flags={})
    with pytest.warns(Warning, match="rules only"):
        said = predictor.predict(PLAIN)
    assert set(said.ranked) == {"native", *volumes.gains(PLAIN)}


# ---- what ships -------------------------------------------------------------------------------------------------


@shipped
def test_what_ships_is_small_and_names_the_pool(path):
    card = Predictor.load(path).card
    assert card.family == path.stem
    assert card.data["parameters"] <= PAPER_PARAMETERS
    assert set(card.algorithm_names) <= BY_NAME.keys()
    assert {name: BY_NAME[name].revision for name in card.revisions} == card.revisions
    assert (ARTIFACTS / f"{path.stem.removeprefix(OF_VOLUMES)}.npz").exists()


@shipped
def test_what_ships_is_better_than_the_rules(path):
    """On families of networks that it was not trained on, in every figure that counts."""
    card = Predictor.load(path).card
    table, machine = read_measured([ROOT / "benchmarks" / "results" / file for file in card.data["files"]])
    assert isinstance(table, Table)
    assert f"{OF_VOLUMES}{machine['family']}" == card.family
    fold, _ = evaluate.split(table, "family", 5)
    _, ruled = evaluate.cross_validated(table, named("rules"), fold)
    mine, rules = card.figures["held_out"]["overall"], ruled["overall"]
    assert mine["problems"] == rules["problems"]
    assert mine["fraction_of_oracle_mean"] > rules["fraction_of_oracle_mean"] + 0.03
    assert mine["fraction_of_oracle_p10"] > rules["fraction_of_oracle_p10"] + 0.1
    assert mine["slower_than_native_share"] < rules["slower_than_native_share"]
    assert mine["speedup_geomean"] > rules["speedup_geomean"]


@shipped
def test_what_ships_is_used(path):
    family = path.stem.removeprefix(OF_VOLUMES)
    predictor = Predictor.load(ARTIFACTS / f"{family}.npz", host_flags={})
    for direction in Direction:
        said = predictor.predict(PLAIN.with_direction(direction))
        assert said.ranked[0].startswith("winograd")
        assert len(said.ranked) > len(volumes.gains(PLAIN)) + 1
