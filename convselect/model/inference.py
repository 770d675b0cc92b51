"""`Predictor`: one artifact file, run in numpy, or in C if the kernels are loaded. No torch, no training code, no
allocation in the matrix products.

An artifact is one `.npz` file without pickles: the folded matrices of a Reformer (`reformer.fold`), possibly stored in
float16, and one JSON text, its `Card`. The card is checked against the arrays on loading. A predictor declines problems
of kinds that it was not trained for, and the caller stays with native.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convselect.base.problem import ConvProblem
from convselect.base.warnings import warn_once
from convselect.machine.host import SIXTEEN_BIT_FLAGS
from convselect.measure import plan_cost
from convselect.model import artifact
from convselect.model.artifact import MOST_LOG_GAIN, NATIVE, WHAT, Array, ArtifactError, Card, checked
from convselect.model.features import VOLUME_FEATURE_NAMES, features_of, kinds, margins_for

OF_VOLUMES = "volumes-"
"""What the families of artifacts begin with that know volumes, and no images."""
ARTIFACTS = Path(__file__).parent / "artifacts"

LOG_GAIN_PER_UNSEEN_DOUBLING = math.log(1.5)
"""Added to the margin for each doubling of threads beyond those measured."""

UNTIMED = {"dilated": ("winograd",), "strided": ("winograd", "fft")}
"""Kind of problem -> beginnings of the names of algorithms that took none of it when artifacts without `Card.timed`
were trained. An algorithm that is taught a kind of problem belongs here."""
IN_FLOAT64 = ("fft", "fft_tiled")
"""What may be predicted in float64, of which no artifact has times. Winograd and im2col are left out: their C kernels
and oneDNN compute in float32 only, and in PyTorch's operations they gain little or lose."""
FLOAT64_TAPS = 49
"""Fewest taps of such a kernel. With 25 or 9 what the artifact tells of a transform is the C kernel's speed, up to four
times that of the operations that compute float64."""
FLOAT64_FLOPS = 3e7
"""Fewest operations: below, native takes 1 ms or two, and the transform's many PyTorch operations half of that."""
FLOAT64_DOUBT = math.log(2.0)
"""Taken off each gain that is predicted for float64."""

_Program = tuple[Any, Any, Array]


class Prediction:
    """The ranking of all names an artifact knows, for one problem. The caller checks which of them apply.

    Attributes:
        names, logits: the artifact's names and their logits.
        ranked: all names, fastest predicted first.
        margin: predicted ln(t_native / t) up to which native should be kept, for algorithms without one of their own.
    """

    __slots__ = ("_alpha", "_by_name", "_margins", "_temperature", "logits", "margin", "names", "ranked")

    def __init__(
        self,
        names: tuple[str, ...],
        logits: Sequence[float],
        alpha: float,
        margin: float = 0.0,
        sharpness: float | None = None,
        margins: Mapping[str, float] | None = None,
    ) -> None:
        self.margin = margin
        self._margins = margins
        self._temperature = 1.0 if sharpness is None else alpha / sharpness
        self.names = names
        self.logits = tuple(logits)
        self._by_name = by_name = dict(zip(names, logits, strict=True))
        self.ranked: Sequence[str] = sorted(names, key=by_name.__getitem__, reverse=True)
        self._alpha = alpha

    def log_gain(self, name: str) -> float:
        """Predicted ln(t_native / t_name); -inf for a name that the artifact does not know, so that it never wins."""
        return (self._by_name.get(name, -math.inf) - self._by_name[NATIVE]) / self._alpha

    def margin_of(self, name: str) -> float:
        """Predicted ln(t_native / t_name) up to which native should be kept."""
        return self.margin if self._margins is None else self._margins.get(name, self.margin)

    @property
    def probabilities(self) -> tuple[float, ...]:
        """How likely each of `names` is the fastest: a softmax of the logits at the calibrated temperature."""
        top = max(self.logits)
        exponentials = [math.exp((logit - top) / self._temperature) for logit in self.logits]
        total = sum(exponentials)
        return tuple(e / total for e in exponentials)

    def probability(self, name: str) -> float:
        """Probability of one name, 0 for one the artifact does not know."""
        return self.probabilities[self.names.index(name)] if name in self._by_name else 0.0

    def __repr__(self) -> str:
        best = self.ranked[0]
        return f"<prediction {best}, {math.exp(self.log_gain(best)):.2f} x native>"


class Predictor:
    """A loaded artifact. Safe to call from any thread: working buffers are per thread, the matrices are read-only."""

    def __init__(self, card: Card, arrays: Mapping[str, Array], host_flags: Mapping[str, bool] | None = None) -> None:
        self.card = card
        self.margin = card.margin
        self._arrays = checked(card, arrays)
        self._n_blocks = sum(name.startswith("hidden_") for name in arrays)
        self._covered = frozenset(
            dtype
            for dtype in card.dtypes
            if dtype not in SIXTEEN_BIT_FLAGS
            or (
                host_flags is not None
                and all(host_flags.get(f, False) == card.host_flags.get(f, False) for f in SIXTEEN_BIT_FLAGS[dtype])
            )
        )
        self._threads = max(card.threads)
        self._host_flags = host_flags
        self._identity: str | None = None
        self._volumes: Predictor | None = None
        self._looked_for_volumes = False
        self._with_times: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._local = threading.local()

    @classmethod
    def load(cls, source: str | os.PathLike[str] | bytes, host_flags: Mapping[str, bool] | None = None) -> Predictor:
        """Read an artifact from a path or from a file's bytes.

        `host_flags` are this machine's processor features (`host.host_flags()`); if those of `SIXTEEN_BIT_FLAGS`
        differ from the measuring machine's, or are not given, 16-bit problems are declined.

        Raises:
            ArtifactError: if the file is missing, damaged, or made for another version.
        """
        text, arrays = artifact.read(source, WHAT)
        found = cls(Card.from_json(text), arrays, host_flags)
        try:
            _ = found.identity  # which is needed soon, and cannot be had of lists in lists, or thousands of digits
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"the model file's card is damaged: {error!s:.200}") from None
        return found

    def corrected(self, bias: Mapping[str, float], host_flags: Mapping[str, bool] | None = None) -> Predictor:
        """The same model with `bias` added to the algorithms' predicted log gains; native's stays 0."""
        arrays = dict(self._arrays)
        head = arrays["head"].copy()
        for i, name in enumerate(self.card.algorithm_names):
            if name != NATIVE:
                head[i, -1] += self.card.alpha * bias.get(name, 0.0)
        return Predictor(self.card, {**arrays, "head": head}, host_flags)

    @property
    def identity(self) -> str:
        """16 hexadecimal digits of the model's numbers and card: the same for equal models only."""
        if self._identity is None:
            digest = hashlib.sha256(self.card.to_json().encode())
            for name in sorted(self._arrays):
                digest.update(self._arrays[name].tobytes())
            self._identity = digest.hexdigest()[:16]
        return self._identity

    def predict(self, problem: ConvProblem) -> Prediction | None:
        """The predicted ranking, without algorithms that had no times of such problems (`has_times`); None for
        problems that were not measured for this artifact at all (device kind, element type, 16-bit support of the
        processor, TF32) and for problems with nothing to compute. Any thread count is accepted. In float64 gains are
        derived from those in float32: `_in_float64`; volumes have a model of their own, or rules: `_of_volume`."""
        card = self.card
        if problem.is_volume != self._knows_volumes:
            return self._of_volume(problem) if problem.is_volume and card.family.startswith("cpu-x86") else None
        if problem.dtype == "float64" and problem.device == card.device == "cpu" and not problem.is_volume:
            return self._in_float64(problem)
        if problem.device != card.device or problem.dtype not in self._covered or (problem.tf32 and not card.tf32):
            return None
        if problem.device != "cpu":
            problem = problem._replace(threads=1)  # host threads do not matter on a GPU
        line = () if plan_cost.outside_python else card.native_line
        found = self._outputs(problem, line)
        if found is None:
            return None
        logits, ln_native_us = found
        more = 0.0
        if problem.threads > self._threads:
            # Native scales with threads; algorithms made of many small operations do not always. For each doubling of
            # threads beyond those measured, the required gain is half as large again.
            more = math.log2(problem.threads / self._threads) * LOG_GAIN_PER_UNSEEN_DOUBLING
        if not max(logits) - min(logits) <= MOST_LOG_GAIN * card.alpha:
            warn_once(
                "artifact", "convselect: the model's predictions make no sense; where they do not, native is chosen."
            )
            return None
        if line:
            logits = plan_cost.charged(problem, card.algorithm_names, logits, card.alpha, ln_native_us)
        names, known = card.algorithm_names, self._known(kinds(problem))
        if len(known) < len(names):
            names, logits = tuple([names[i] for i in known]), [logits[i] for i in known]
        margins = margins_for(problem, card.margins) if card.margins else None
        if margins and more:
            margins = {name: own + more for name, own in margins.items()}
        return Prediction(names, logits, card.alpha, self.margin + more, card.sharpness, margins)

    def _outputs(self, problem: ConvProblem, line: Sequence[float]) -> tuple[list[float], float] | None:
        """The logits, and the estimate of ln(native's time in us) if there is a line for it; None for problems with
        nothing to compute."""
        program = self._thread_program()
        x, steps, result = program
        if isinstance(steps, list) or problem.is_oversized or self._knows_volumes:
            try:
                x = features_of(problem)
            except ValueError:
                return None
            ln_native_us = float(np.dot(x, line[:-1])) + line[-1] if line else 0.0  # before the network overwrites x
            return self._run(x).tolist(), ln_native_us
        if not steps.predict(problem):
            return None
        return result.tolist(), float(np.dot(x, line[:-1])) + line[-1] if line else 0.0

    @property
    def _knows_volumes(self) -> bool:
        return len(self.card.feature_names) == len(VOLUME_FEATURE_NAMES)

    @property
    def of_volumes(self) -> Predictor | None:
        """The model for volumes that is shipped for the same family, loaded when it is first asked for; None if there
        is none, or it cannot be read."""
        if not self._looked_for_volumes:
            self._looked_for_volumes, path = True, artifact_path(OF_VOLUMES + self.card.family)
            try:
                self._volumes = Predictor.load(path, self._host_flags) if path.exists() else None
            except ArtifactError as error:
                warn_once("artifact of volumes", f"convselect: {error}; for volumes there are rules only.")
        return self._volumes

    def _of_volume(self, problem: ConvProblem) -> Prediction | None:
        from convselect.model import volumes  # one file less for whoever has none

        if volumes.is_measured(problem) and self.of_volumes is not None:
            said = self.of_volumes.predict(problem)
            if said is not None:
                return said
        expected = volumes.gains(problem)
        if expected is None:
            return None
        logits = {NATIVE: 0.0} | {name: math.log(gain) for name, gain in expected.items()}
        margin = self.margin + math.log2(problem.threads) * LOG_GAIN_PER_UNSEEN_DOUBLING  # measured on one thread
        return Prediction(tuple(logits), tuple(logits.values()), 1.0, margin)

    def _known(self, of: tuple[str, ...]) -> tuple[int, ...]:
        """The logits that count for problems of these kinds."""
        known = self._with_times.get(of)
        if known is None:
            names = self.card.algorithm_names
            known = self._with_times[of] = tuple(i for i, name in enumerate(names) if has_times(self.card, name, of))
        return known

    def _in_float64(self, problem: ConvProblem) -> Prediction | None:
        """Of large kernels, how much faster a Fourier transform is than native in float64; None of others.

        Vectors are half as wide there and elements twice as large, so that an algorithm takes twice its time in
        float32. Native does not: oneDNN has no float64, and native unfolds the image and multiplies, as `im2col_gemm`
        does in both, wherever that is slower than oneDNN. So t_native / t in float64 is t_im2col_gemm / t in float32,
        and that is divided by 2, since it was never measured (`FLOAT64_DOUBT`). What it exceeds 1 by is the gain, and
        native's margin is 0.
        """
        if problem.R * problem.S < FLOAT64_TAPS or problem.flops < FLOAT64_FLOPS:
            return None
        said = self.predict(problem._replace(dtype="float32"))
        if said is None:
            return None
        names = (NATIVE, *(name for name in IN_FLOAT64 if name in said.names))
        slower = min(0.0, said.log_gain("im2col_gemm")) if "im2col_gemm" in said.names else 0.0
        gains = [said.log_gain(name) - slower - FLOAT64_DOUBT for name in names[1:]]
        margin = max(0.0, said.margin - self.margin)  # what threads that were not measured ask for
        logits = [0.0, *(gain * self.card.alpha for gain in gains)]
        return Prediction(names, logits, self.card.alpha, margin, self.card.sharpness)

    def logits(self, x: Array) -> Array:
        """Logits (n_classes,) of a raw feature vector (n_features,), float32."""
        return self._run(np.array(x, np.float32)).copy()

    def _run(self, x: Array) -> Array:
        """Overwrites x; the result is this thread's buffer."""
        normalise, steps, result = self._thread_program()
        if not isinstance(steps, list):
            normalise[:] = x
            steps.run()
            return result
        low, high, mean, scale, z = normalise
        np.maximum(x, low, out=x)
        np.minimum(x, high, out=x)
        np.subtract(x, mean, out=x)
        np.multiply(x, scale, out=z)
        for matrix, source, target, floor in steps:
            np.dot(matrix, source, out=target)
            np.maximum(target, floor, out=target)
        return result

    def _thread_program(self) -> _Program:
        program: _Program | None = getattr(self._local, "program", None)
        if program is None:
            program = self._local.program = self._program()
        return program

    def _program(self) -> _Program:
        """Buffers of one thread, and the matrix products over views of them.

        The buffer of a block is (x, 1, t): `hidden` reads (x, 1) and writes t, `out` reads all of it and writes the
        next block's x, so that nothing is copied and biases cost no call.
        """
        a = self._arrays
        zero, minus_infinity = np.zeros((), np.float32), np.full((), -np.inf, np.float32)
        result = np.empty(len(a["head"]), np.float32)
        widths = [a[f"hidden_{i}"].shape for i in range(self._n_blocks)]
        buffers = [np.ones(columns + rows, np.float32) for rows, columns in widths]
        buffers.append(np.ones(a["head"].shape[1], np.float32))
        steps = []
        for i, (rows, columns) in enumerate(widths):
            buffer, following = buffers[i], buffers[i + 1]
            steps.append((a[f"hidden_{i}"], buffer[:columns], buffer[columns : columns + rows], zero))
            out = a[f"out_{i}"]
            steps.append((out, buffer, following[: len(out)], zero))
        steps.append((a["head"], buffers[-1], result, minus_infinity))
        in_c = _in_c((a["low"], a["high"], a["mean"], a["scale"], buffers[0][: len(a["mean"])]), steps)
        if in_c is not None:
            return *in_c, result
        return (a["low"], a["high"], a["mean"], a["scale"], buffers[0][: len(a["mean"])]), steps, result


def has_times(card: Card, algorithm: str, of: Sequence[str]) -> bool:
    """Whether `algorithm` was measured on problems of each of these kinds. If not, a prediction of its time is an
    extrapolation, which no choice may be made on."""
    if algorithm == NATIVE:
        return True
    if card.timed is not None:
        return set(of) <= set(card.timed.get(algorithm, ()))
    return not any(algorithm.startswith(UNTIMED.get(kind.split()[-1], ())) for kind in of)


def _in_c(normalise: Sequence[Array], steps: Sequence[tuple[Array, Array, Array, Array]]) -> Any:
    """(a vector for the input, the same chain on it as one call of the C library); None if the library is missing, or
    not loaded yet, since loading it needs torch."""
    library = sys.modules.get("convselect.kernels._library")
    if library is None or not library.available():
        return None
    x = np.empty(len(normalise[0]), np.float32)
    chain = [(m, source, target, bool(floor == 0)) for m, source, target, floor in steps]
    return x, library.Network(x, normalise, chain)


def artifact_path(family: str, directory: str | os.PathLike[str] = ARTIFACTS) -> Path:
    """Path of the artifact of a device family; the file may not exist."""
    return Path(directory) / f"{family}.npz"
