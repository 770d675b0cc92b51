"""The cost model: gradient-boosted trees that predict a program's speed relative to the fastest known of its problem.

The target is throughput normalised to the problem's best, t_best / t in (0, 1]. The loss is the squared error weighted
by the target, since it matters little how slow a slow program is. The model is retrained from scratch before every
round, on all measurements of all problems so far: that takes a fraction of a second and needs no rule for dropping old
data. It uses LightGBM, or scikit-learn's histogram trees if LightGBM is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convselect.base.problem import ConvProblem
from convselect.tune.features import ProgramFeatures
from convselect.tune.programs import Floats, Program

TREES, LEAVES, RATE, LEAST_IN_LEAF = 150, 15, 0.1, 4
LEAST_PROGRAMS = 8
"""With fewer measured programs than this the model stays untrained."""

Times = Mapping[ConvProblem, Mapping[Program, float]]
"""Problem -> measured program -> its time in us."""


class Missing(RuntimeError):
    """Neither LightGBM nor scikit-learn is installed; the message says what to install."""


class CostModel:
    """Predicts normalised throughput. An untrained model predicts 1 for every program.

    Args:
        backend: "lightgbm", "sklearn", or None: the first that is installed.

    Raises:
        Missing: if neither is installed.
    """

    def __init__(self, seed: int = 0, backend: str | None = None, trees: int = TREES) -> None:
        self.backend = backend or _installed()
        self._seed, self._trees = seed, trees
        self._features: ProgramFeatures | None = None
        self._model: Any = None

    def fit(self, times: Times) -> None:
        """Train from scratch. With fewer than `LEAST_PROGRAMS` programs the model is (again) untrained."""
        measured = {problem: of for problem, of in times.items() if of}
        if sum(map(len, measured.values())) < LEAST_PROGRAMS:
            self._model = None
            return
        self._features = ProgramFeatures(program for of in measured.values() for program in of)
        x = np.concatenate([self._features(problem, list(of)) for problem, of in measured.items()])
        y = np.concatenate([throughput(np.array(list(of.values()))) for of in measured.values()])
        if self.backend == "lightgbm":
            self._model = _lightgbm(x, y, self._seed, self._trees)
        else:
            self._model = _sklearn(x, y, self._seed, self._trees)

    def predict(self, problem: ConvProblem, programs: Sequence[Program]) -> Floats:
        """(n,) predicted t_best / t, none below 0; ones if the model is untrained."""
        if self._model is None or self._features is None or not programs:
            return np.ones(len(programs))
        said: Floats = np.asarray(self._model.predict(self._features(problem, programs)), dtype=np.float64)
        return np.maximum(said, 0.0)


def throughput(times_us: Floats) -> Floats:
    """t_best / t of one problem's programs, (n,)."""
    normalised: Floats = times_us.min() / times_us
    return normalised


def _installed() -> str:
    import importlib.util

    for package, name in (("lightgbm", "lightgbm"), ("sklearn", "sklearn")):
        if importlib.util.find_spec(package) is not None:
            return name
    raise Missing("tuning needs LightGBM or scikit-learn: pip install 'convselect[tune]'")


def _lightgbm(x: Any, y: Floats, seed: int, trees: int) -> Any:
    import lightgbm

    few = len(y) < 20 * LEAST_IN_LEAF
    options = {
        "objective": "regression", "learning_rate": RATE, "num_leaves": LEAVES, "seed": seed, "verbosity": -1,
        "min_data_in_leaf": 1 if few else LEAST_IN_LEAF, "min_data_in_bin": 1, "deterministic": True,
        "force_row_wise": True, "num_threads": 1, "lambda_l2": 0.1, "feature_fraction": 0.7,
    }  # fmt: skip
    return lightgbm.train(options, lightgbm.Dataset(x, y, weight=y), num_boost_round=trees)


def _sklearn(x: Any, y: Floats, seed: int, trees: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor  # type: ignore[import-untyped]

    few = len(y) < 20 * LEAST_IN_LEAF
    model = HistGradientBoostingRegressor(
        learning_rate=RATE, max_iter=trees, max_leaf_nodes=LEAVES, min_samples_leaf=1 if few else LEAST_IN_LEAF,
        l2_regularization=0.1, early_stopping=False, random_state=seed,
    )  # fmt: skip
    return model.fit(x, y, sample_weight=y)
