"""What trials teach about the model: the corrections against a normal posterior computed with matrices, and the rules
that say who needs no trial."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from fake_model import FakePrediction

from convselect.base.problem import Direction, conv_problem
from convselect.base.volumes import volume_problem
from convselect.choice import learnt as module
from convselect.choice.learnt import (
    ALGORITHM_SD,
    KNOWN_LAYERS,
    LAYER_SD,
    MOST_RESIDUAL,
    NEAR,
    SIZE_SD,
    Corrected,
    Estimate,
    Learnt,
    is_settled,
    layer_of,
)

P = conv_problem(1, 8, 14, 14, 8, 3, 3, padding=1)
D = P.direction
ALONE = math.sqrt(ALGORITHM_SD**2 + LAYER_SD**2 + SIZE_SD**2)


def posterior(residuals: list[tuple[object, float]], layer: object) -> tuple[float, float]:
    """(mean, standard deviation) of another problem's residual in this layer: all unknowns are normal, and so is what
    is left of them once the residuals are known."""
    layers = [*dict.fromkeys([*(name for name, _ in residuals), layer])]
    # Unknowns: b_algorithm, b_layer of every layer, e of every residual; and e of the new problem.
    count = 1 + len(layers) + len(residuals) + 1
    prior = np.diag([ALGORITHM_SD**2, *[LAYER_SD**2] * len(layers), *[SIZE_SD**2] * (len(residuals) + 1)])
    seen = np.zeros((len(residuals), count))
    for row, (name, _) in enumerate(residuals):
        seen[row, [0, 1 + layers.index(name), 1 + len(layers) + row]] = 1
    asked = np.zeros(count)
    asked[[0, 1 + layers.index(layer), count - 1]] = 1
    gain = asked @ prior @ seen.T @ np.linalg.inv(seen @ prior @ seen.T)
    mean = gain @ np.array([residual for _, residual in residuals])
    return float(mean), float(asked @ prior @ asked - gain @ seen @ prior @ asked) ** 0.5


@pytest.mark.parametrize("seed", range(12))
def test_the_closed_form_is_the_posterior(seed):
    source, learnt = random.Random(seed), Learnt()
    residuals = [(source.randrange(6), source.uniform(-1, 1)) for _ in range(source.randrange(1, 25))]
    for layer, residual in residuals:
        learnt.add("a", D, layer, residual)
    for layer in (*range(6), "new"):
        found = learnt.estimate("a", D, layer)
        assert (found.shift, found.sd) == pytest.approx(posterior(residuals, layer), abs=1e-12)
        assert found.of_layer == sum(name == layer for name, _ in residuals)
        assert found.of_algorithm == len({name for name, _ in residuals})


def test_nothing_learnt_is_no_correction():
    assert Learnt().estimate("a", D, "layer") == Estimate(0.0, pytest.approx(ALONE), 0, 0)
    learnt = Learnt()
    learnt.add("b", D, "layer", 1.0)
    assert learnt.estimate("a", D, "layer") == Estimate(0.0, pytest.approx(ALONE), 0, 0)
    learnt.put("a", D, "layer", 0, 5.0)
    assert len(learnt) == 1


def test_one_problem_teaches_most_about_its_layer_and_something_about_the_algorithm():
    learnt = Learnt()
    assert learnt.add("a", D, "layer", -0.8) == (1, -0.8)
    same, other = learnt.estimate("a", D, "layer"), learnt.estimate("a", D, "other")
    assert -0.8 < same.shift < other.shift < 0
    assert same.sd < other.sd < ALONE
    assert (same.of_layer, other.of_layer) == (1, 0)


def test_many_problems_leave_the_spread_of_sizes():
    learnt = Learnt()
    for layer in range(400):
        learnt.put("a", D, layer, 1000, 0.5)
    found = learnt.estimate("a", D, 7)
    assert found.shift == pytest.approx(0.5, abs=0.01)
    assert found.sd == pytest.approx(SIZE_SD, rel=0.01)
    assert learnt.estimate("a", D, "new").sd == pytest.approx(math.hypot(SIZE_SD, LAYER_SD), rel=0.01)


def test_sums_that_are_kept_equal_those_computed_anew():
    source, learnt = random.Random(3), Learnt()
    for _ in range(2000):
        layer = source.randrange(50)
        if source.random() < 0.2:
            learnt.put("a", D, layer, source.randrange(1, 9), source.uniform(-1, 1))
        else:
            learnt.add("a", D, layer, source.uniform(-2, 2))
    kept = learnt._by_direction[D]["a"]
    weights = {layer: module._weight(n) for layer, (n, _) in kept.layers.items()}
    assert kept.weight == pytest.approx(sum(weights.values()))
    assert kept.weighted == pytest.approx(sum(weights[layer] * mean for layer, (_, mean) in kept.layers.items()))
    fresh = Learnt()
    for layer, (n, mean) in kept.layers.items():
        fresh.put("a", D, layer, n, mean)
    assert fresh.estimate("a", D, 5) == pytest.approx(learnt.estimate("a", D, 5))


def test_put_is_what_add_returned():
    """A later process knows as much as this one."""
    here, later = Learnt(), Learnt()
    for i, residual in enumerate((0.3, -0.2, 0.5, 0.1)):
        later.put("a", D, i % 2, *here.add("a", D, i % 2, residual))
    for layer in (0, 1, 2):
        assert later.estimate("a", D, layer) == pytest.approx(here.estimate("a", D, layer))


def test_residuals_are_limited():
    for residual in (1e9, -1e9, math.inf, -math.inf):
        learnt = Learnt()
        assert learnt.add("a", D, "layer", residual) == (1, math.copysign(MOST_RESIDUAL, residual))


def test_the_oldest_layers_are_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MOST_LAYERS", 3)
    learnt = Learnt()
    for layer in "abc":
        learnt.add("x", D, layer, 0.5)
    learnt.add("x", D, "a", 0.5)  # the newest again
    learnt.add("x", D, "d", 0.5)
    assert list(learnt._by_direction[D]["x"].layers) == ["c", "a", "d"]
    assert learnt.estimate("x", D, "b").of_layer == 0
    assert learnt._by_direction[D]["x"].weight == pytest.approx(2 * module._weight(1) + module._weight(2))
    learnt.add("y", D, "e", 0.5)
    assert len(learnt) == 4


# ---- problems and predictions ---------------------------------------------------------------------------------------


def test_a_layer_is_all_but_batch_and_image_size():
    assert layer_of(P) == layer_of(P._replace(N=8, H=28, W=30))
    volume = volume_problem(1, 8, 4, 14, 14, 8, 3, 3, 3)
    assert layer_of(volume) == layer_of(volume._replace(N=8, D=9, H=28, W=30)) != layer_of(volume._replace(T=1))
    assert layer_of(P).endswith("False False False")  # nothing of depth: stores keep the text
    others = (
        P._replace(C=16), P._replace(K=16), P._replace(R=1), P._replace(groups=2), P._replace(threads=2),
        P._replace(stride_h=2), P._replace(dtype="bfloat16"), P._replace(layout="channels_last"),
    )  # fmt: skip
    assert len({layer_of(p) for p in (P, *others)}) == 1 + len(others)


class Predicts(FakePrediction):
    def __init__(self, **gains: float) -> None:
        self.gains = {"native": 0.0} | gains
        super().__init__(sorted(self.gains, key=self.gains.__getitem__, reverse=True), 1.0)

    def log_gain(self, name: str) -> float:
        return self.gains[name]


def corrected(learnt: Learnt, problem=P, **gains: float) -> Corrected:
    return Corrected(Predicts(**gains), learnt, problem)


def teach(learnt: Learnt, name: str, residual: float, problem=P, layers: int = 1) -> None:
    """Of this problem's layer, or of others."""
    for i in range(layers):
        layer = layer_of(problem) if layers == 1 else f"another {i}"
        learnt.add(name, problem.direction, layer, residual)


def test_corrected_predictions_are_ranked_anew():
    learnt = Learnt()
    teach(learnt, "a", -0.9)
    found = corrected(learnt, a=0.7, b=0.3, c=-0.1)
    shift = found.estimate("a").shift
    assert shift < -0.4
    assert found.log_gain("a") == pytest.approx(0.7 + shift)
    assert found.raw_log_gain("a") == 0.7
    assert (found.log_gain("b"), found.log_gain("native")) == (0.3, 0.0)
    assert found.ranked == ["b", *(("a", "native") if 0.7 + shift > 0 else ("native", "a")), "c"]
    assert found.margin_of("a") == 0.08
    assert found.probability("a") == 1 / 4
    assert found.estimate("unknown").of_layer == 0


def test_what_is_far_behind_is_not_corrected():
    learnt = Learnt()
    teach(learnt, "a", 1.0)
    found = corrected(learnt, a=NEAR, b=0.1)
    assert (found.log_gain("a"), found.log_gain("b"), found.log_gain("native")) == (NEAR, 0.1, 0.0)
    assert corrected(learnt, a=NEAR + 0.01).log_gain("a") > NEAR + 0.3


def test_where_nothing_was_learnt_the_prediction_stays_as_it_is():
    found = corrected(Learnt(), a=0.5, b=0.1)
    assert (found.ranked, found.log_gain("a"), found.log_gain("native")) == (["a", "b", "native"], 0.5, 0.0)
    assert found.estimate("a") == module.NOTHING


def test_directions_and_their_names_are_the_same_key():
    """The store keeps texts."""
    learnt = Learnt()
    for direction in Direction:
        learnt.add("a", str(direction), layer_of(P.with_direction(direction)), 0.5)
        assert corrected(learnt, P.with_direction(direction), a=0.1).log_gain("a") > 0.3
    assert [list(learnt.known(direction)) for direction in Direction] == [["a"]] * 3
    assert list(learnt.known("sideways")) == []


def test_what_was_learnt_holds_for_other_sizes_of_the_layer_and_for_its_direction_only():
    learnt = Learnt()
    teach(learnt, "a", -0.5)
    larger = P._replace(N=4, H=56, W=56)
    assert corrected(learnt, larger, a=0.5).log_gain("a") == corrected(learnt, a=0.5).log_gain("a")
    backward = P.with_direction(Direction.BACKWARD_DATA)
    assert corrected(learnt, backward, a=0.5).log_gain("a") == 0.5


# ---- who needs no trial ---------------------------------------------------------------------------------------------


def test_nothing_is_settled_before_anything_is_known():
    for gain in (2.0, 0.0, -0.09):
        assert is_settled(["a"], corrected(Learnt(), a=gain), 0.02) is None


def test_the_first_is_settled_if_its_gain_is_sure_and_its_layer_was_measured():
    learnt = Learnt()
    teach(learnt, "a", 0.0)
    sd = corrected(learnt, a=0.5).estimate("a").sd
    for gain, settled in ((1.645 * sd + 0.021, "a"), (1.645 * sd + 0.019, None)):
        assert is_settled(["a", "b"], corrected(learnt, a=gain, b=0.0), 0.02) == settled


def test_or_if_enough_other_layers_were():
    for layers, settled in ((KNOWN_LAYERS - 1, None), (KNOWN_LAYERS, "a")):
        learnt = Learnt()
        teach(learnt, "a", 0.0, layers=layers)
        assert is_settled(["a"], corrected(learnt, a=1.0), 0.02) == settled
    # But not native: no candidate was measured in this layer.
    learnt = Learnt()
    teach(learnt, "a", -1.0, layers=100)
    assert is_settled(["a"], corrected(learnt, a=0.0), 0.02) is None


def test_only_the_first_can_be_settled():
    learnt = Learnt()
    teach(learnt, "b", 0.0)
    assert is_settled(["a", "b"], corrected(learnt, a=1.1, b=1.0), 0.02) is None


def test_native_is_settled_if_its_layer_was_measured_and_none_was_faster():
    learnt = Learnt()
    teach(learnt, "a", -0.9)
    assert is_settled(["a"], corrected(learnt, a=0.3), 0.02) == "native"
    # Of the other candidate nothing is known.
    assert is_settled(["a", "b"], corrected(learnt, a=0.3, b=0.1), 0.02) is None
    teach(learnt, "b", -0.9)
    assert is_settled(["a", "b"], corrected(learnt, a=0.3, b=0.1), 0.02) == "native"


def test_one_problem_leaves_a_doubt_that_two_do_not():
    once, twice = Learnt(), Learnt()
    teach(once, "a", -0.5)
    for _ in range(2):
        teach(twice, "a", -0.5)
    shift = once.estimate("a", D, layer_of(P)).shift
    sd = once.estimate("a", D, layer_of(P)).sd
    gain = 0.0 - shift  # corrected: 0
    assert 0.5 * sd > 0.02
    assert is_settled(["a"], corrected(once, a=gain), 0.02) is None
    assert is_settled(["a"], corrected(twice, a=gain), 0.02) == "native"
    assert is_settled(["a"], corrected(once, a=gain - 0.5 * sd), 0.02) == "native"


def test_how_often_settling_is_wrong_if_the_model_of_residuals_holds():
    """Layers of one algorithm, drawn from the very distributions: another size of a measured layer is settled."""
    source, settled, wrong = random.Random(1), {"a": 0, "native": 0}, {"a": 0, "native": 0}
    for _ in range(600):
        learnt, b = Learnt(), source.gauss(0, ALGORITHM_SD)
        for i in range(6):
            layer, predicted = source.gauss(0, LAYER_SD), source.uniform(-0.1, 1.0)
            p = P._replace(C=8 + i)
            first, second = (predicted + b + layer + source.gauss(0, SIZE_SD) for _ in range(2))
            learnt.add("a", D, layer_of(p), first - predicted)
            found = is_settled(["a"], corrected(learnt, p, a=predicted), 0.02)
            if found is not None:
                settled[found] += 1
                wrong[found] += (second <= 0.02) if found == "a" else (second > 0.02)
    assert min(settled.values()) > 300
    assert wrong["a"] <= 0.05 * settled["a"]
    # Native costs nothing: a gain that is missed now and then, of at most a few percent on average.
    assert wrong["native"] <= 0.31 * settled["native"]
