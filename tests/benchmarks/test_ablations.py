"""`python -m benchmarks.ablations` and `python -m benchmarks.calibration` on synthetic times."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from synthetic import MACHINE, QUICK, synthetic, write

from benchmarks import ablations, calibration
from convselect.model import train
from convselect.model.dataset import Table
from convselect.model.features import FEATURE_NAMES

pytestmark = pytest.mark.slow


def test_feature_sets_leave_out_what_they_say():
    x = train.design(Table.from_rows(synthetic(20)).problems)
    index = {name: i for i, name in enumerate(FEATURE_NAMES)}
    assert torch.equal(ablations.columns(ablations.FEATURE_SETS[3], x), x)
    plain = ablations.columns("log2", x)
    assert (plain[:, [index["flops"], index["twos_C"], index["waste_7"]]] == 0).all()
    assert torch.equal(plain[:, index["H"]], x[:, index["H"]])
    derived = ablations.columns("log2 + derived", x)
    assert torch.equal(derived[:, index["flops"]], x[:, index["flops"]])
    assert (derived[:, index["waste_4"]] == 0).all()
    raw = ablations.columns("raw, z-scored", x)
    np.testing.assert_allclose(raw[:, index["H"]], 2 ** x[:, index["H"]], rtol=1e-5)


def test_ablations_are_a_row_per_setting(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablations, "TARGETS", (("one_hot", 1.0), ("ratio", 4.0)))
    monkeypatch.setattr(ablations, "WIDTHS", {1: ((32, 16),), 2: ((32, 16), (16, 16))})
    times, out = write(tmp_path / "times.csv", synthetic(150)), tmp_path / "out.json"
    assert ablations.main([str(times), "--seeds", "2", "--steps", "60", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert len(found["rows"]) == 2 * 2 + len(ablations.FEATURE_SETS)
    assert found["arguments"]["times"] == ["times.csv"]
    by_name = {row["setting"]: row for row in found["rows"]}
    row = by_name["ratio a=4, 2 blocks"]
    assert row["fraction_of_oracle"] > 0.8
    assert row["inference_us"] > 0
    assert row["parameters"] > by_name["ratio a=4, 1 blocks"]["parameters"]
    assert "over native" in capsys.readouterr().out


def test_a_calibration_helps_where_the_machines_differ(tmp_path):
    home = write(tmp_path / "times-cpu-x86-avx2.csv", synthetic(300))
    train.train([home], "cpu-x86-avx2", tmp_path, QUICK, n_folds=2)
    slower = [
        row._replace(min_us=row.min_us * (2.2 if row.algorithm == "tiles" else 1)) for row in synthetic(300, seed=1)
    ]
    away = write(tmp_path / "times-cpu-x86-other.csv", slower, {**MACHINE, "family": "cpu-x86-other"})
    train.train([away], "cpu-x86-other", tmp_path, QUICK, n_folds=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "COUNTS", (0, 40, 100))
        found = calibration.measure(tmp_path / "cpu-x86-avx2.npz", away)
    assert found["0 problems"]["slower_than_native_share"] > 0.15
    assert found["40 problems"]["slower_than_native_share"] < 0.5 * found["0 problems"]["slower_than_native_share"]
    assert found["40 problems"]["fraction_of_oracle_mean"] > found["0 problems"]["fraction_of_oracle_mean"]
    assert found["at home (trained on these)"]["fraction_of_oracle_mean"] > 0.9
