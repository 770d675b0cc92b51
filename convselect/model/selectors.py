"""Other ways to choose an algorithm, for comparison: all learn from the same table and predict gains, so that
`evaluate` can judge them alike. None of them ships.

    gbdt          gradient-boosted trees per algorithm, log of time relative to native (LightGBM)
    lambdarank    trees that rank the algorithms of a problem (LightGBM)
    mlp           per-algorithm runtime regression: standard scaler, MLP 100-50-1, log time (scikit-learn), the scheme
                  of runtime models per kernel pair
    resnet18      the 1-D ResNet-18 that ICLR 2025 submission 13039 compares with, on the same target
    neighbour     the five nearest problems in the space of z-scored features
    native, best_single, always:<name>   rules without learning
    rules         what is expected of volumes without a model (`volumes.gains`)

LightGBM and scikit-learn come with `pip install 'convselect[compare]'`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from convselect.measure.measure import threads
from convselect.model.dataset import Table
from convselect.model.evaluate import Fit, Floats, fixed_order
from convselect.model.targets import masked_cross_entropy, probabilities

NAMES = ("gbdt", "lambdarank", "mlp", "resnet18", "neighbour", "native", "best_single", "rules")
_FAR = 3.0  # predicted ln of slowness for an algorithm that was never seen to apply
_LEAST_TIMES = 20  # fewest times of an algorithm to learn from
NEIGHBOURS = 5
RANKS = 16


class Missing(RuntimeError):
    """A package that a selector needs is not installed; the message says what to install."""


def _package(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise Missing(f"{name} is not installed: pip install 'convselect[compare]'") from None


def _x(table: Table) -> np.ndarray:  # type: ignore[type-arg]
    from convselect.model.train import design

    return design(table.problems).numpy()


def relative_log_times(table: Table) -> Floats:
    """ln t (n, c) relative to native's or, without native, to the mean over the problem's algorithms."""
    log_t: Floats = np.log(table.times_us)
    native = table.native
    base = np.nanmean(log_t, 1, keepdims=True) if native is None else log_t[:, native : native + 1]
    return log_t - base


# ---- trees ------------------------------------------------------------------------------------------------------


def gbdt(seed: int = 0, trees: int = 300, leaves: int = 31) -> Fit:
    def fit(table: Table) -> Callable[[Table], Floats]:
        lightgbm = _package("lightgbm")
        x, y = _x(table), relative_log_times(table)
        models = []
        for column in range(len(table.names)):
            known = np.isfinite(y[:, column])
            model = None
            if known.sum() >= _LEAST_TIMES and column != table.native:
                model = lightgbm.LGBMRegressor(
                    n_estimators=trees, num_leaves=leaves, learning_rate=0.06, random_state=seed, n_jobs=1, verbose=-1
                ).fit(x[known], y[known, column])
            models.append(model)

        def predict(other: Table) -> Floats:
            x = _x(other)
            return _gains([None if m is None else m.predict(x) for m in models], len(x), table.native)

        return predict

    return fit


def _gains(log_times: list[Any], n: int, native: int | None) -> Floats:
    """(n, c) gains from predicted relative log times of each algorithm; native's is 0, an unknown one's is very low."""
    columns = [
        np.zeros(n) if i == native else np.full(n, _FAR) if log_t is None else log_t
        for i, log_t in enumerate(log_times)
    ]
    return -np.stack(columns, 1)


def lambdarank(seed: int = 0, trees: int = 300, leaves: int = 63) -> Fit:
    def pairs(table: Table) -> tuple[Any, Any, Any]:
        """(features with the algorithm's number, index (problem, algorithm) of each line, lines per problem)."""
        x, known = _x(table), np.isfinite(table.times_us)
        index = np.argwhere(known)
        one_hot = np.eye(len(table.names), dtype=np.float32)[index[:, 1]]
        return np.hstack([x[index[:, 0]], one_hot]), index, known.sum(1)

    def fit(table: Table) -> Callable[[Table], Floats]:
        lightgbm = _package("lightgbm")
        x, index, sizes = pairs(table)
        slowness = np.log(table.times_us / np.nanmin(table.times_us, 1, keepdims=True))[index[:, 0], index[:, 1]]
        label = np.clip(np.round((RANKS - 1) * np.exp(-2 * slowness)), 0, RANKS - 1).astype(int)
        model = lightgbm.LGBMRanker(
            n_estimators=trees, num_leaves=leaves, learning_rate=0.06, random_state=seed, n_jobs=1, verbose=-1,
            label_gain=[r * r for r in range(RANKS)],
        ).fit(x, label, group=sizes)  # fmt: skip

        def predict(other: Table) -> Floats:
            x, index, _ = pairs(other)
            gains = np.full(other.times_us.shape, -_FAR)
            gains[index[:, 0], index[:, 1]] = model.predict(x)
            if other.native is not None:
                gains -= gains[:, [other.native]]
            return gains

        return predict

    return fit


# ---- networks ---------------------------------------------------------------------------------------------------


def mlp(seed: int = 0) -> Fit:
    def fit(table: Table) -> Callable[[Table], Floats]:
        models = runtime_models(table, seed)

        def predict(other: Table) -> Floats:
            x = _x(other)
            log_t = np.stack([np.full(len(x), 1e3) if m is None else m.predict(x) for m in models], 1)
            native = other.native
            base = log_t.min(1, keepdims=True) if native is None else log_t[:, native : native + 1]
            gains: Floats = base - log_t
            return gains

        return predict

    return fit


def runtime_models(table: Table, seed: int = 0) -> list[Any]:
    """A regression of ln t (us) per algorithm; None if there are too few times."""
    neural, preprocessing, pipeline = map(
        _package, ("sklearn.neural_network", "sklearn.preprocessing", "sklearn.pipeline")
    )
    x, log_t = _x(table), np.log(table.times_us)
    models: list[Any] = []
    for column in range(len(table.names)):
        known = np.isfinite(log_t[:, column])
        if known.sum() < _LEAST_TIMES:
            models.append(None)
            continue
        network = neural.MLPRegressor(
            hidden_layer_sizes=(100, 50),
            batch_size=min(256, int(known.sum())),
            learning_rate_init=1e-3,
            max_iter=200,
            random_state=seed,
        )
        models.append(
            pipeline.make_pipeline(preprocessing.StandardScaler(), network).fit(x[known], log_t[known, column])
        )
    return models


def r_squared(table: Table, held: Table, seed: int = 0) -> dict[str, dict[str, float]]:
    """Algorithm -> R² of its held-out runtimes, of the logarithm and of the time itself, and the median relative error.
    Such models are usually judged by these, but they say little about the quality of choices."""
    found = {}
    for name, model, log_t in zip(held.names, runtime_models(table, seed), np.log(held.times_us).T, strict=True):
        known = np.isfinite(log_t)
        if model is None or known.sum() < 2:
            continue
        said, true = model.predict(_x(held)[known]), log_t[known]

        def of(said: Any, true: Any) -> float:
            return float(1 - ((said - true) ** 2).sum() / ((true - true.mean()) ** 2).sum())

        found[name] = {
            "r2_log": of(said, true),
            "r2_linear": of(np.exp(said), np.exp(true)),
            "median_relative_error": float(np.median(np.abs(np.expm1(said - true)))),
        }
    return found


class _Block1d(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm1d(c_out), nn.ReLU(),
            nn.Conv1d(c_out, c_out, 3, 1, 1, bias=False), nn.BatchNorm1d(c_out),
        )  # fmt: skip
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.skip = nn.Sequential(nn.Conv1d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm1d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016) over the feature vector as a signal of one channel: (n, d) -> (n, n_classes)."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(1, 64, 7, 2, 3, bias=False), nn.BatchNorm1d(64), nn.ReLU(),
                                   nn.MaxPool1d(3, 2, 1)]  # fmt: skip
        c_in = 64
        for c_out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers += [_Block1d(c_in, c_out, stride), _Block1d(c_out, c_out, 1)]
            c_in = c_out
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(512, n_classes))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x[:, None])
        return y


def resnet18(seed: int = 0, steps: int = 600, batch: int = 256, alpha: float = 4.0) -> Fit:
    def fit(table: Table) -> Callable[[Table], Floats]:
        x = torch.from_numpy(_x(table))
        deviation, mean = torch.std_mean(x, 0)
        scale = torch.where(deviation > 1e-6, 1 / deviation.clamp_min(1e-6), torch.zeros_like(deviation))
        applicable = torch.from_numpy(np.isfinite(table.times_us))
        target = torch.from_numpy(probabilities("ratio", table.times_us, alpha)).float()
        with torch.random.fork_rng(devices=[]), threads(torch.get_num_threads()):
            torch.manual_seed(seed)
            model = ResNet18(len(table.names))
            optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.02)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
            for _ in range(steps):
                members = torch.randperm(len(x))[:batch]
                logits = model((x[members] - mean) * scale)
                loss = masked_cross_entropy(logits, target[members], applicable[members])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                schedule.step()
            model.eval()

        def predict(other: Table) -> Floats:
            z = (torch.from_numpy(_x(other)) - mean) * scale
            with torch.no_grad():
                logits = torch.cat([model(part) for part in z.split(4096)]).double().numpy()
            base = logits.mean(1, keepdims=True) if other.native is None else logits[:, [other.native]]
            gains: Floats = (logits - base) / alpha
            return gains

        return predict

    return fit


# ---- without learning, or hardly any ----------------------------------------------------------------------------


def neighbour(seed: int = 0) -> Fit:
    def fit(table: Table) -> Callable[[Table], Floats]:
        neighbours = _package("sklearn.neighbors")
        x, y = _x(table), relative_log_times(table)
        mean, deviation = x.mean(0), x.std(0)
        scale = np.where(deviation > 1e-6, 1 / np.maximum(deviation, 1e-6), 0)
        index = neighbours.NearestNeighbors(n_neighbors=min(NEIGHBOURS, len(x))).fit((x - mean) * scale)

        def predict(other: Table) -> Floats:
            _, near = index.kneighbors((_x(other) - mean) * scale)
            of_those = y[near]  # (n, neighbours, c)
            known = np.isfinite(of_those)
            count = known.sum(1)
            total = np.where(known, of_those, 0.0).sum(1)
            gains: Floats = -np.where(count > 0, total / np.maximum(count, 1), _FAR)
            return gains

        return predict

    return fit


def always(column: int, then: int | None = None) -> Callable[[Table], Floats]:
    """Always chooses one algorithm, or `then` if that does not apply."""

    def predict(table: Table) -> Floats:
        gains = np.zeros(table.times_us.shape)
        gains[:, column] = 2.0
        if then is not None:
            gains[:, then] = 1.0
        return gains

    return predict


def fixed(name: str) -> Fit:
    def fit(table: Table) -> Callable[[Table], Floats]:
        if name == "best_single":
            order = fixed_order(table.times_us)
            rank = np.empty(len(order))
            rank[order] = np.arange(len(order), 0, -1)
            return lambda other: np.broadcast_to(rank, other.times_us.shape).copy()
        if name not in table.names:
            raise ValueError(f"there is no {name!r} among {', '.join(table.names)}")
        return always(table.names.index(name), table.native)

    return fit


def rules() -> Fit:
    """Learns nothing. What has no rule is predicted far behind native."""
    from convselect.model import volumes

    def fit(table: Table) -> Callable[[Table], Floats]:
        def predict(other: Table) -> Floats:
            gains = np.full(other.times_us.shape, -_FAR)
            for row, problem in zip(gains, other.problems, strict=True):
                expected = {"native": 1.0, **(volumes.gains(problem) or {})}
                for column, name in enumerate(other.names):
                    if name in expected:
                        row[column] = np.log(expected[name])
            return gains

        return predict

    return fit


def named(name: str, seed: int = 0) -> Fit:
    """The selector with a name from `NAMES`, or with "always:" and an algorithm's name.

    Raises:
        ValueError: if the name is neither.
    """
    learned = {"gbdt": gbdt, "lambdarank": lambdarank, "mlp": mlp, "resnet18": resnet18, "neighbour": neighbour}
    if name in learned:
        return learned[name](seed)
    if name in ("native", "best_single"):
        return fixed(name)
    if name == "rules":
        return rules()
    if name.startswith("always:"):
        return fixed(name.removeprefix("always:"))
    raise ValueError(f"unknown selector {name!r}; known are reformer, {', '.join(NAMES)} and always:<algorithm>")
