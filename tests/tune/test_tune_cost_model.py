"""The cost model: features, training on times made by hand, without packages of trees."""

from __future__ import annotations

import random

import numpy as np
import pytest
from _toy_space import problems, recorded

from benchmarks._quality import quality
from convselect.base.problem import conv_problem
from convselect.tune import cost_model
from convselect.tune.cost_model import CostModel, throughput
from convselect.tune.features import ProgramFeatures, caches, estimate
from convselect.tune.programs import Program


def test_throughput_is_normalised_to_the_best():
    assert throughput(np.array([2.0, 1.0, 4.0])).tolist() == [0.5, 1.0, 0.25]


@pytest.mark.parametrize("backend", ["lightgbm", "sklearn"])
def test_it_ranks_programs_that_it_has_not_seen(backend):
    pairs, learnt, asked = [], {}, []
    for i, problem in enumerate(problems()[:4]):
        times = recorded(problem, 220, seed=i).times_us
        programs = list(times)
        random.Random(i).shuffle(programs)
        learnt[problem] = {p: times[p] for p in programs[55:]}
        asked.append((problem, {p: times[p] for p in programs[:55]}))
    model = CostModel(0, backend)
    assert set(model.predict(asked[0][0], list(asked[0][1]))) == {1.0}  # untrained
    model.fit(learnt)
    for problem, of in asked:
        said = model.predict(problem, list(of))
        assert (said >= 0).all()
        pairs.append((min(learnt[problem].values()) / np.array(list(of.values())), said))
    told = quality(pairs, 10)
    assert told.pairwise > 0.88
    assert told.r2 > 0.8
    # what is learnt is the order, not the mean
    shuffled = [(true, np.random.default_rng(0).permutation(said)) for true, said in pairs]
    assert quality(shuffled, 10).pairwise < 0.6


def test_training_is_repeatable_and_from_scratch():
    problem, other = problems()[:2]
    times = recorded(problem, 60).times_us
    a, b = CostModel(1), CostModel(1)
    a.fit({other: recorded(other, 100).times_us})
    for model in (a, b):
        model.fit({problem: times})
    assert a.predict(problem, list(times)).tolist() == b.predict(problem, list(times)).tolist()
    a.fit({problem: dict(list(times.items())[:3])})  # too few
    assert set(a.predict(problem, list(times))) == {1.0}
    assert CostModel().predict(problem, []).shape == (0,)


def test_without_a_package_of_trees(monkeypatch):
    missing = {"lightgbm"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, find=__import__: None if name in missing else name)
    assert CostModel().backend == "sklearn"
    missing.add("sklearn")
    with pytest.raises(cost_model.Missing, match=r"convselect\[tune\]"):
        CostModel()


def test_features():
    problem = conv_problem(2, 32, 28, 28, 64, 3, 3, padding=1)
    programs = [Program("winograd4", (("tiles", 16),)), Program("direct", (("rows", 6),)), Program("native")]
    of = ProgramFeatures(programs)
    values = of(problem, programs)
    assert values.shape == (3, len(of.names))
    assert len(set(of.names)) == len(of.names)
    row = dict(zip(of.names, values[0], strict=True))
    assert row["winograd4"] == 1
    assert row["direct"] == 0
    assert row["tiles:log_value"] == 5
    assert np.isnan(row["rows:log_value"])
    assert np.isnan(values[2][list(of.names).index("tiles:log_value")])
    # 64 output channels and 98 tiles of 4 x 4, in blocks of 16
    assert row["tiles:log_blocks_of_K"] == 2
    assert row["tiles:rest_of_tiles"] == pytest.approx((7 * 16 - 98) / 16)
    # what was not among the columns is taken, without a column of its own
    assert ProgramFeatures(programs[2:])(problem, programs).shape[0] == 3


def test_estimates():
    problem = conv_problem(1, 32, 28, 28, 64, 3, 3, padding=1)
    plain, transformed = estimate(problem, "direct"), estimate(problem, "winograd4")
    assert plain.flops == problem.flops
    assert transformed.tiles == 49
    assert transformed.taps == 36
    assert plain.flops / transformed.flops == pytest.approx(4)  # 4 x 4 results for 36 instead of 144 products
    assert transformed.traffic_bytes > plain.traffic_bytes
    row = conv_problem(1, 32, 28, 28, 64, 1, 3, padding=(0, 1))
    assert estimate(row, "winograd4").taps == 6
    assert 0 < caches().l1 < caches().l2 <= caches().l3
