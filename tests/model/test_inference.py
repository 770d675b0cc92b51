from __future__ import annotations

import ast
import dataclasses
import io
import json
import math
import os
import random
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from convselect.base.problem import Direction, conv_problem
from convselect.kernels import _library
from convselect.machine import host
from convselect.model import artifact as model_file
from convselect.model import inference, volumes
from convselect.model.artifact import ArtifactError, Card, save
from convselect.model.features import FEATURE_NAMES, features
from convselect.model.inference import ARTIFACTS, Prediction, Predictor, artifact_path
from convselect.model.reformer import Reformer, fold

D = len(FEATURE_NAMES)
PROBLEM = conv_problem(8, 64, 56, 56, 128, 3, 3, padding=1)
NAMES = ("im2col", "native", "winograd", "fft")
CARD = Card(
    "cpu-test", NAMES, 4.0, 0.05, ("bfloat16", "float32"), host_flags={"avx512_bf16": True, "amx_bf16": False},
    revisions={"native": 1}, versions={"torch": "2.13"}, figures={"top1": 0.5},
)  # fmt: skip


def arrays(widths=((6, 5), (4, 3)), classes: int = len(NAMES), seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {"mean": rng.normal(size=D), "scale": rng.uniform(0.2, 1, D)}
    made |= {"low": np.full(D, -50.0), "high": np.full(D, 50.0)}
    d = D
    for i, (hidden, out) in enumerate(widths):
        made[f"hidden_{i}"] = rng.normal(size=(hidden, d + 1)) / math.sqrt(d)
        made[f"out_{i}"] = rng.normal(size=(out, d + 1 + hidden)) / math.sqrt(d)
        d = out
    made["head"] = rng.normal(size=(classes, d + 1))
    return {name: array.astype(np.float32) for name, array in made.items()}


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    path = tmp_path / "cpu-test.npz"
    save(path, CARD, arrays())
    return path


def expected_logits(made: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """The folded network written out, in float64."""
    x = (np.clip(x.astype(np.float64), made["low"], made["high"]) - made["mean"]) * made["scale"]
    for i in range(sum(name.startswith("hidden_") for name in made)):
        t = np.maximum(made[f"hidden_{i}"] @ np.append(x, 1), 0)
        x = np.maximum(made[f"out_{i}"] @ np.concatenate([x, [1], t]), 0)
    return made["head"] @ np.append(x, 1)


# ---- running ----------------------------------------------------------------------------------------------------


def test_logits_are_those_of_the_network_written_out():
    made = arrays()
    predictor = Predictor(CARD, made)
    for seed in range(20):
        x = np.random.default_rng(seed).normal(3, 4, D).astype(np.float32)
        before = x.copy()
        np.testing.assert_allclose(predictor.logits(x), expected_logits(made, x), rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(x, before)


def test_float16_storage_moves_logits_by_little(tmp_path: Path):
    made, x = arrays(), features(PROBLEM)
    for half, bound in ((False, 1e-4), (True, 2e-2)):
        save(tmp_path / "a.npz", CARD, made, half=half)
        got = Predictor.load(tmp_path / "a.npz").logits(x)
        assert np.abs(got - expected_logits(made, x)).max() < bound


def test_a_prediction_is_ranked_and_its_gains_are_relative_to_native():
    prediction = Prediction(("a", "native", "b", "c"), [1.0, 2.0, 4.0, -1.0], alpha=4.0)
    assert list(prediction.ranked) == ["b", "native", "a", "c"]
    assert prediction.log_gain("native") == 0
    assert prediction.log_gain("b") == 0.5
    assert prediction.log_gain("a") == -0.25
    assert prediction.log_gain("never heard of") == -math.inf
    assert sum(prediction.probabilities) == pytest.approx(1)
    assert prediction.probability("b") / prediction.probability("native") == pytest.approx(math.exp(2))
    assert prediction.probability("never heard of") == 0
    assert "b, 1.65 x native" in repr(prediction)


def test_predict_uses_the_features_of_the_problem(artifact: Path):
    predictor = Predictor.load(artifact)
    prediction = predictor.predict(PROBLEM)
    assert prediction is not None
    np.testing.assert_array_equal(prediction.logits, predictor.logits(features(PROBLEM)))
    assert prediction.names == NAMES
    assert predictor.margin == 0.05


DILATED = PROBLEM._replace(dil_h=2, dil_w=2)
STRIDED = PROBLEM._replace(stride_h=2)


def test_the_word_of_an_artifact_does_not_count_for_what_it_had_no_times_of():
    """Left out is what was not measured on each kind that the problem belongs to; the others' gains stay."""
    timed = {"im2col": ("forward dilated", "forward plain", "forward strided"), "fft": ("forward dilated",)}
    predictor = Predictor(dataclasses.replace(CARD, timed=timed), arrays())

    def names(problem):
        return predictor.predict(problem).names

    assert names(PROBLEM) == ("im2col", "native")
    assert names(DILATED) == ("im2col", "native", "fft")
    assert names(DILATED._replace(stride_w=2)) == ("im2col", "native")
    assert names(PROBLEM.with_direction("backward_weight")) == ("native",)
    said, free = predictor.predict(DILATED), Predictor(dataclasses.replace(CARD), arrays())
    assert said.log_gain("winograd") == -math.inf
    assert said.probability("winograd") == 0
    assert "winograd" not in said.ranked
    logits = dict(zip(NAMES, free.logits(features(DILATED)), strict=True))
    assert said.log_gain("fft") == pytest.approx((logits["fft"] - logits["native"]) / CARD.alpha, rel=1e-6)
    assert Card.from_json(predictor.card.to_json()) == predictor.card
    for damaged in ([], {"fft": [""]}, {"fft": "forward plain"}):
        with pytest.raises(ArtifactError, match="timed"):
            Card.from_json(json.dumps({**json.loads(CARD.to_json()), "timed": damaged}))


def test_artifacts_without_that_record_are_older_than_what_algorithms_learnt_since():
    predictor = Predictor(CARD, arrays())
    assert CARD.timed is None
    assert predictor.predict(PROBLEM).names == NAMES
    assert predictor.predict(DILATED).names == ("im2col", "native", "fft")
    assert predictor.predict(STRIDED).names == ("im2col", "native")


@pytest.mark.parametrize("path", sorted(inference.ARTIFACTS.glob("cpu-*.npz")), ids=lambda path: path.stem)
def test_shipped_artifacts_rank_only_what_they_had_times_of(path):
    """Whatever an algorithm applies to by now: `benchmarks/results` has their times."""
    predictor = Predictor.load(path)
    knows = predictor.card.timed is not None  # those without the C kernels are older
    for problem, of in ((DILATED, "dilated"), (STRIDED, "strided")):
        for direction in ("forward", "backward_data", "backward_weight"):
            ranked = predictor.predict(problem.with_direction(direction)).ranked
            assert any(name.startswith("winograd") for name in ranked) == knows
            assert ("fft" in ranked) == (of == "dilated")
            assert "im2col_gemm" in ranked


def test_unmeasured_thread_counts_have_to_promise_more(artifact: Path):
    predictor = Predictor.load(artifact)
    most = max(predictor.card.threads)
    margins = [predictor.predict(PROBLEM._replace(threads=most * factor)).margin for factor in (1, 2, 8)]
    assert margins[0] == predictor.margin
    assert margins[1] - margins[0] == pytest.approx(math.log(1.5))
    assert margins[2] - margins[0] == pytest.approx(3 * math.log(1.5))


def test_margins_by_kind_take_the_place_of_the_one_for_all():
    by_kind = {"forward contiguous 3x3": {"im2col": 0.02, "fft": 0.5}, "elsewhere": {"fft": 0.4}}
    card = dataclasses.replace(CARD, margins=by_kind)
    assert Card.from_json(card.to_json()) == card
    predictor = Predictor(card, arrays())

    def margins(problem):
        return [predictor.predict(problem).margin_of(name) for name in ("im2col", "fft", "winograd")]

    one = PROBLEM._replace(threads=1)
    assert margins(one) == [0.02, 0.5, 0.05]
    for other in (one.with_direction("backward_data"), one._replace(R=5, S=5), one._replace(dtype="bfloat16")):
        predictor = Predictor(card, arrays(), {"avx512_bf16": True, "amx_bf16": False})
        assert margins(other) == [0.05, 0.4, 0.05]
    more = max(CARD.threads) * 2
    assert margins(one._replace(threads=more)) == pytest.approx(
        [margin + math.log(1.5) for margin in (0.05, 0.4, 0.05)]
    )
    without = Predictor(dataclasses.replace(card, margins={}), arrays())
    assert without.predict(one).margin_of("fft") == CARD.margin
    for damaged in ({"elsewhere": {"fft": -1}}, {"elsewhere": 0.3}, []):
        with pytest.raises(ArtifactError, match="margins"):
            Card.from_json(json.dumps({**json.loads(CARD.to_json()), "margins": damaged}))


def test_float32_computed_in_less_is_not_what_was_measured(artifact: Path):
    assert Predictor.load(artifact).predict(PROBLEM._replace(tf32=True)) is None


def test_eight_threads_get_the_same_answers(artifact: Path):
    predictor = Predictor.load(artifact)
    problems = [PROBLEM._replace(C=8 * c, H=h) for c in range(1, 11) for h in range(7, 27)]
    want = [Predictor.load(artifact).predict(problem).logits for problem in problems]
    barrier, wrong, finished = threading.Barrier(8), [], []

    def work(offset: int) -> None:
        barrier.wait()
        for i in range(2 * len(problems)):
            k = (i + 25 * offset) % len(problems)
            if predictor.predict(problems[k]).logits != want[k]:
                wrong.append(k)
        finished.append(offset)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished) == list(range(8))
    assert wrong == []


def test_the_matrix_products_allocate_nothing():
    predictor = Predictor(CARD, arrays(((4096, 512), (2048, 512))))
    x = features(PROBLEM)
    predictor._run(x)
    tracemalloc.start()
    predictor._run(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1500  # the smallest vector in between takes 2,048 bytes


def test_inference_does_not_import_torch():
    """`convselect.base.problem` does, for its dtypes; but no tensor and no training code may come near a prediction."""
    imported = set()
    for module in (inference, model_file, volumes):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert "numpy" in imported
    allowed = tuple(f"convselect.model.{name}" for name in ("artifact", "features", "volumes"))
    imported = {name for name in imported if not name.startswith(allowed)}
    assert not any(name.startswith(("torch", "convselect.model", "convselect.kernels")) for name in imported)


# ---- what it declines -------------------------------------------------------------------------------------------


def test_what_was_not_measured_is_declined(artifact: Path):
    predictor = Predictor.load(artifact, host_flags=CARD.host_flags)
    assert predictor.predict(PROBLEM) is not None
    assert predictor.predict(PROBLEM._replace(threads=64)) is not None
    assert predictor.predict(PROBLEM._replace(dtype="bfloat16")) is not None
    assert predictor.predict(PROBLEM._replace(dtype="float16")) is None
    assert predictor.predict(PROBLEM._replace(dtype="float64")) is None
    assert predictor.predict(PROBLEM._replace(device="cuda")) is None
    assert predictor.predict(PROBLEM._replace(N=0)) is None
    assert predictor.predict(PROBLEM._replace(R=99)) is None


class Told(Predictor):
    """Says this of every problem in float32: name -> how many times as fast as native."""

    def __init__(self, gains: dict[str, float], margin: float = 0.15) -> None:
        super().__init__(CARD, arrays())
        self.margin, self._said, self._said_margin = 0.15, {"native": 1.0, **gains}, margin

    def predict(self, problem):
        if problem.dtype == "float64":
            return super().predict(problem)
        assert problem.dtype == "float32"
        logits = [self.card.alpha * math.log(gain) for gain in self._said.values()]
        return Prediction(tuple(self._said), logits, self.card.alpha, self._said_margin)


LARGE = conv_problem(1, 64, 56, 56, 64, 7, 7, padding=3, dtype="float64")


def test_float64_is_derived_for_fourier_transforms_of_large_kernels():
    told = Told({"fft_tiled": 5.0, "fft": 1.5, "winograd7": 9.0, "direct": 3.0, "im2col_gemm": 1.2})
    said = told.predict(LARGE)
    assert said is not None
    assert list(said.ranked) == ["fft_tiled", "native", "fft"]  # nothing else
    assert math.exp(said.log_gain("fft_tiled")) == pytest.approx(5.0 / 2)
    assert math.exp(said.log_gain("fft")) == pytest.approx(1.5 / 2)
    assert said.margin == 0.0
    assert told.predict(LARGE._replace(R=5, S=5)) is None
    assert told.predict(LARGE._replace(C=4, K=4)) is None  # too small
    assert told.predict(LARGE._replace(device="cuda")) is None


def test_native_in_float64_is_as_slow_as_the_product_of_the_unfolded_image():
    said = Told({"fft_tiled": 1.6, "im2col_gemm": 0.5}).predict(LARGE)
    assert said is not None
    assert math.exp(said.log_gain("fft_tiled")) == pytest.approx(1.6 / 0.5 / 2)


def test_threads_that_were_not_measured_ask_for_more_in_float64_too():
    said = Told({"fft_tiled": 3.0}, margin=0.15 + math.log(1.5)).predict(LARGE)
    assert said is not None
    assert said.margin == pytest.approx(math.log(1.5))


@pytest.mark.parametrize(
    ("flags", "covered"),
    [
        (None, False),
        ({}, False),
        ({"avx512_bf16": True}, True),
        ({"avx512_bf16": True, "amx_bf16": True}, False),
        ({"avx512_bf16": True, "avx512_fp16": True}, True),  # says nothing about bfloat16
    ],
)
def test_16_bit_problems_need_the_measured_processor_features(artifact: Path, flags, covered: bool):
    predictor = Predictor.load(artifact, host_flags=flags)
    assert (predictor.predict(PROBLEM._replace(dtype="bfloat16")) is not None) == covered
    assert predictor.predict(PROBLEM) is not None


# ---- files ------------------------------------------------------------------------------------------------------


def test_a_file_is_read_back_from_path_and_bytes(artifact: Path):
    from_path, from_bytes = Predictor.load(str(artifact)), Predictor.load(artifact.read_bytes())
    assert from_path.card == from_bytes.card == CARD
    np.testing.assert_array_equal(from_path.logits(features(PROBLEM)), from_bytes.logits(features(PROBLEM)))
    assert json.loads(artifact.with_suffix(".json").read_text())["algorithm_names"] == list(NAMES)
    assert sorted(p.name for p in artifact.parent.iterdir()) == ["cpu-test.json", "cpu-test.npz"]
    assert artifact_path("cpu-test", artifact.parent) == artifact


def test_the_same_network_is_the_same_bytes(artifact: Path, tmp_path: Path):
    save(tmp_path / "again.npz", CARD, arrays())
    assert (tmp_path / "again.npz").read_bytes() == artifact.read_bytes()


def test_a_missing_file_is_an_artifact_error(tmp_path: Path):
    with pytest.raises(ArtifactError, match="there is no model file"):
        Predictor.load(tmp_path / "nothing.npz")
    with pytest.raises(ArtifactError, match="damaged"):
        Predictor.load(tmp_path)  # a folder


@pytest.mark.parametrize("content", [b"", b"PK", b"hello\n" * 100, os.urandom(4096)])
def test_what_is_no_artifact_is_an_artifact_error(content: bytes):
    with pytest.raises(ArtifactError, match="model file"):
        Predictor.load(content)


def test_a_plain_array_and_a_pickle_are_artifact_errors():
    for value in (np.zeros(3), np.array([{}], dtype=object)):
        buffer = io.BytesIO()
        np.save(buffer, value, allow_pickle=True)
        with pytest.raises(ArtifactError, match="not a model file"):
            Predictor.load(buffer.getvalue())
    buffer = io.BytesIO()
    np.savez(buffer, weights=np.zeros(3))
    with pytest.raises(ArtifactError, match="no card"):
        Predictor.load(buffer.getvalue())
    buffer = io.BytesIO()
    np.savez(buffer, card=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ArtifactError, match="damaged"):
        Predictor.load(buffer.getvalue())


def test_every_truncation_is_an_artifact_error(artifact: Path):
    content = artifact.read_bytes()
    for size in {*range(0, len(content), 37), *range(len(content) - 60, len(content))}:
        with pytest.raises(ArtifactError):
            Predictor.load(content[:size])


def test_a_flipped_byte_is_an_artifact_error_or_harmless(artifact: Path):
    """Names, times and attributes in the archive's directory may change without changing what is read."""
    content, x = artifact.read_bytes(), features(PROBLEM)
    want = Predictor.load(content).logits(x)
    refused = 0
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 0x55
        try:
            got = Predictor.load(bytes(damaged))
        except ArtifactError:
            refused += 1
        else:
            np.testing.assert_array_equal(got.logits(x), want)
            assert got.card == CARD
    assert refused > 0.8 * len(content) / 3


def load_with(card_changes: dict[str, object] | None = None, made: dict[str, np.ndarray] | None = None) -> Predictor:
    """Write without `save`'s checks, load."""
    values = {**json.loads(CARD.to_json()), **(card_changes or {})}
    buffer = io.BytesIO()
    np.savez(buffer, card=np.array(json.dumps(values)), **(arrays() if made is None else made))
    return Predictor.load(buffer.getvalue())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format_version": 2}, "has format 2; this version reads format 1"),
        ({"features_version": 0}, "trained on features of version 0, this is version 3"),
        ({"feature_names": list(FEATURE_NAMES[::-1])}, "trained on features"),
        ({"feature_names": list(FEATURE_NAMES[:-1])}, "trained on features"),
        ({"algorithm_names": ["a", "b", "c", "d"]}, "lack 'native'"),
        ({"algorithm_names": ["native", "b", "b", "d"]}, "not unique"),
        ({"algorithm_names": ["native", "b", "d"]}, "do not fit"),
        ({"alpha": 0.0}, "alpha"),
        ({"margin": -1.0}, "margin"),
        ({"margin": float("nan")}, "not readable"),
        ({"margin": "much"}, "damaged"),
        ({"novel_field": 1}, "a field too many"),
        ({"dtypes": None}, "damaged"),
        ({"threads": [0]}, "threads"),
        ({"threads": []}, "threads"),
        ({"revisions": {"native": 1.5}}, "revisions"),
    ],
)
def test_a_foreign_card_is_named(changes: dict[str, object], match: str):
    with pytest.raises(ArtifactError, match=match):
        load_with(changes)


def test_a_card_that_is_nested_too_deeply_is_named():
    # Deeper than any limit that a library in this process has set (some raise it and leave it so).
    depth = 2 * sys.getrecursionlimit()
    nested = '{"a":' * depth + "{}" + "}" * depth
    written = json.dumps({**json.loads(CARD.to_json()), "figures": "HERE"}).replace('"HERE"', nested)
    buffer = io.BytesIO()
    np.savez(buffer, card=np.array(written), **arrays())
    with pytest.raises(ArtifactError, match=r"card is (damaged|not readable)"):
        Predictor.load(buffer.getvalue())


def test_the_unchanged_card_and_arrays_do_load():
    assert load_with().card == CARD


@pytest.mark.parametrize(
    ("name", "replacement", "match"),
    [
        ("head", None, "lacks a matrix"),
        ("out_1", None, "lacks a matrix"),
        ("extra", np.zeros(3, np.float32), "one too many"),
        ("mean", np.zeros(D - 1, np.float32), "do not fit"),
        ("hidden_0", np.zeros((6, D), np.float32), "do not fit"),
        ("hidden_1", np.zeros(4, np.float32), "do not fit"),
        ("out_0", np.zeros((), np.float32), "do not fit"),
        ("head", np.full((4, 4), np.nan, np.float32), "not finite"),
        ("scale", np.full(D, np.inf, np.float32), "not finite"),
        ("head", np.zeros((4, 4), np.int32), "not floating point"),
    ],
)
def test_arrays_that_do_not_fit_are_named(name: str, replacement: np.ndarray | None, match: str):
    made = arrays()
    made.pop(name, None)
    if replacement is not None:
        made[name] = replacement
    with pytest.raises(ArtifactError, match=match):
        load_with(made=made)


def test_no_block_at_all_is_an_artifact_error():
    made = {name: array for name, array in arrays().items() if not name.startswith(("hidden", "out"))}
    with pytest.raises(ArtifactError, match="lacks a matrix"):
        load_with(made=made)


def test_save_refuses_what_load_would(tmp_path: Path):
    made = arrays()
    made["head"] = made["head"] * np.float32(1e6)  # overflows float16
    with np.errstate(over="ignore"), pytest.raises(ArtifactError, match="not finite"):
        save(tmp_path / "a.npz", CARD, made)
    assert list(tmp_path.iterdir()) == []


# ---- the host ---------------------------------------------------------------------------------------------------


def test_families_are_named_by_processor_and_instruction_set():
    assert host.family_of_host("AVX2", "x86_64", c_kernels=False) == "cpu-x86-avx2"
    assert host.family_of_host("AVX512", "AMD64", c_kernels=False) == "cpu-x86-avx512"
    assert host.family_of_host("DEFAULT", "aarch64", c_kernels=False) == "cpu-arm-default"
    assert host.family_of_host("NO AVX", "x86_64", c_kernels=False) == "cpu-x86-no-avx"
    assert host.family_of_host("DEFAULT", "riscv64", c_kernels=False) == "cpu-riscv64-default"
    assert host.family_of_host(host.cpu_capability()).startswith("cpu-")
    assert [host.family_of_cuda(c) for c in ((8, 0), (9, 0), (12, 0))] == ["cuda-sm80", "cuda-sm90", "cuda-sm120"]


def test_a_family_with_the_c_kernels_is_another_family(monkeypatch):
    assert host.family_of_host("AVX512", "x86_64", c_kernels=True) == "cpu-x86-avx512-c"
    for loaded, want in ((True, "cpu-x86-avx2-c"), (False, "cpu-x86-avx2")):
        monkeypatch.setattr(host._library, "available", lambda loaded=loaded: loaded)
        assert host.family_of_host("AVX2", "x86_64") == want


ALL_FLAGS = {"avx512_bf16": True, "amx_bf16": True, "avx512_fp16": True, "amx_fp16": True}
NO_FLAGS = dict.fromkeys(ALL_FLAGS, False)


@pytest.mark.parametrize(
    ("capability", "environment", "want"),
    [
        ("AVX512", {}, ALL_FLAGS),
        ("AVX512", {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}, ALL_FLAGS),
        ("AVX512", {"ONEDNN_MAX_CPU_ISA": "avx512_core_amx_fp16"}, ALL_FLAGS),
        ("AVX2", {}, NO_FLAGS),
        ("DEFAULT", {}, NO_FLAGS),
        ("AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, NO_FLAGS),
        ("AVX512", {"DNNL_MAX_CPU_ISA": "avx2"}, NO_FLAGS),
        ("AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, NO_FLAGS),
        ("AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, NO_FLAGS | {"avx512_bf16": True}),
        (
            "AVX512",
            {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"},
            NO_FLAGS | {"avx512_bf16": True, "avx512_fp16": True},
        ),
    ],
)
def test_16_bit_flags_honour_the_limits_set_by_environment(capability: str, environment, want):
    assert host.host_flags(capability, ALL_FLAGS, environment) == want


def test_a_processor_without_the_features_has_no_flags():
    assert host.host_flags("AVX512", {}, {}) == NO_FLAGS
    assert set(host.host_flags()) == set(ALL_FLAGS)


def test_a_torch_that_cannot_tell_leaves_it_to_the_kernel(monkeypatch, tmp_path):
    """torch 2.9 has no `get_capabilities`; "no flags" would make 16-bit types look slow where they are not."""
    here = host.host_flags("AVX512", environment={})
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert host.host_flags("AVX512", environment={}) == here
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nflags\t\t: fpu avx512_fp16 amx_tile\n\nprocessor\t: 1\nflags\t\t: amx_bf16\n"
    )
    assert host.processor_flags(tmp_path / "cpuinfo") == {"fpu": True, "avx512_fp16": True, "amx_tile": True}
    assert host.processor_flags(tmp_path / "none") == {}


@pytest.mark.skipif(not _library.available(), reason="the C kernels are not built here")
@pytest.mark.parametrize("level", range(3))
def test_c_and_numpy_say_the_same(level: int, monkeypatch: pytest.MonkeyPatch):
    """Layers of odd sizes, so that vectors end in the middle; at every instruction set this machine has."""
    if level > _library.library().cs_best_isa():
        pytest.skip("not on this machine")
    monkeypatch.setattr(_library, "isa", lambda: level)
    torch.manual_seed(0)
    for widths in (((64, 128), (216, 64), (64, 32)), ((7, 13), (33, 1), (1, 17))):
        model = Reformer(len(FEATURE_NAMES), 19, widths).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.fit_input(torch.randn(50, len(FEATURE_NAMES)))
        names = ("native", *(f"a{i}" for i in range(18)))
        card = Card("test", names, 4.0, 0.1, ("float32",))
        in_c = Predictor(card, fold(model))
        with monkeypatch.context() as patch:
            patch.setattr(_library, "available", lambda: False)
            in_numpy = Predictor(card, fold(model))
            want = [in_numpy.logits(x) for x in np.random.default_rng(0).normal(0, 3, (20, len(FEATURE_NAMES)))]
        got = [in_c.logits(x) for x in np.random.default_rng(0).normal(0, 3, (20, len(FEATURE_NAMES)))]
        assert isinstance(in_c._local.program[1], _library.Network)
        assert isinstance(in_numpy._local.program[1], list)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.skipif(not _library.available(), reason="the C kernels are not built here")
@pytest.mark.parametrize("path", sorted(ARTIFACTS.glob("*.npz")), ids=lambda path: path.stem)
def test_c_sees_the_features_that_python_computes(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Bit for bit; and the whole prediction is numpy's."""
    in_c = Predictor.load(path, {})
    with monkeypatch.context() as patch:
        patch.setattr(_library, "available", lambda: False)
        in_numpy = Predictor.load(path, {})
        in_numpy._thread_program()
    source = random.Random(0)
    for _ in range(300):
        groups, kernel = source.choice((1, 1, 2, 8)), source.choice((1, 2, 3, 5, 7))
        problem = conv_problem(
            source.randint(1, 9), groups * source.randint(1, 300), source.randint(14, 99), source.randint(14, 99),
            groups * source.randint(1, 300), kernel, source.choice((1, kernel)), direction=source.choice([*Direction]),
            stride=(source.randint(1, 3), source.randint(1, 3)), dilation=source.choice((1, 1, 2)), groups=groups,
            padding=tuple(source.randint(0, 3) for _ in range(4)), dtype=source.choice(in_c.card.dtypes),
            layout=source.choice(("contiguous", "channels_last", "strided")), threads=source.randint(1, 9),
            weight_layout=source.choice(("contiguous", "channels_last", "strided")),
            deterministic=source.random() < 0.5, frozen=source.random() < 0.5,
        )  # fmt: skip
        said, want = in_c.predict(problem), in_numpy.predict(problem)
        if want is None or said is None:
            assert said is want
            continue
        x, network, _ = in_c._local.program
        assert network.predict(problem)
        assert x.tolist() == features(problem).tolist()
        assert said.names == want.names
        np.testing.assert_allclose(said.logits, want.logits, rtol=2e-4, atol=2e-4)


@pytest.mark.skipif(not _library.available(), reason="the C kernels are not built here")
def test_c_declines_what_has_no_features():
    predictor = Predictor.load(max(ARTIFACTS.glob("cpu-*.npz")), {})
    fits = conv_problem(1, 8, 9, 9, 8, 3, 3)
    assert predictor.predict(fits) is not None
    for change in ({"N": 0}, {"H": 2}, {"W": 1, "pad_left": 1}, {"K": 0}):
        assert predictor.predict(fits._replace(**change)) is None
    # Numbers that 64 bits do not hold are Python's.
    assert predictor.predict(fits._replace(N=2**62, C=2**40, K=2**40)) is not None
