"""Models that are compared, but not shipped."""

from __future__ import annotations

from places import ROOT

from convselect.base.problem import conv_problem
from convselect.model import inference
from convselect.model.inference import ARTIFACTS


def test_the_model_of_other_peoples_times_is_sound_and_predicts_nothing_here():
    path = ROOT / "benchmarks" / "artifacts" / "mi100-families.npz"
    predictor = inference.Predictor.load(path)
    assert path.stat().st_size < 200_000
    assert predictor.card.algorithm_names == ("gemm", "direct", "fft", "winograd", "implicit_gemm")
    assert predictor.card.data["parameters"] <= 80_978
    assert predictor.card.figures["held_out"]["best_of_2"]["fraction_of_oracle_mean"] > 0.9995
    problem = conv_problem(1, 64, 56, 56, 64, 3, 3, padding=1)
    assert predictor.predict(problem) is None
    assert predictor.predict(problem._replace(device="cuda")) is None


def test_the_package_ships_artifacts_of_cpus_only():
    assert {path.stem.partition("-")[0] for path in ARTIFACTS.iterdir()} == {"cpu", "volumes"}
