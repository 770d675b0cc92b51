"""The model in use: found, missing, damaged, of another version, unloaded."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch

import convselect
from convselect.base import lru, warnings
from convselect.base.problem import conv_problem
from convselect.eager import resolve
from convselect.machine import host
from convselect.model import inference, loaded
from convselect.model.artifact import save
from convselect.model.inference import ARTIFACTS, artifact_path

X, W = torch.randn(1, 8, 12, 12), torch.randn(8, 8, 3, 3)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(warnings, "_given", set())
    loaded.unload()
    lru.clear()
    yield
    loaded.unload()
    lru.clear()


def some_artifact():
    return next(iter(sorted(ARTIFACTS.glob("cpu-*.npz"))))


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "noise", "another format", "a directory"])
def test_without_a_sound_artifact_there_is_one_warning_and_native_from_then_on(damage, tmp_path, monkeypatch):
    path = tmp_path / "model.npz"
    whole = some_artifact().read_bytes()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "noise":
        path.write_bytes(bytes(range(256)) * 100)
    elif damage == "another format":
        import json

        import numpy as np

        arrays = dict(np.load(some_artifact()))
        card = json.loads(str(arrays.pop("card")))
        card["format_version"] += 1
        np.savez(path, card=json.dumps(card), **arrays)
    elif damage == "a directory":
        path.mkdir()
    monkeypatch.setenv("CONVSELECT_ARTIFACT", str(path))
    with pytest.warns(convselect.ConvselectWarning, match="native from now on") as caught:
        for size in (8, 9, 10):
            convselect.conv2d(torch.randn(1, 8, size, size), W, padding=1)
    assert len(caught) == 1
    assert {entry.found.algorithm for entry in resolve.choices.entries.values()} == {"native"}


def test_the_shipped_artifacts_load_and_speak():
    shipped = sorted(ARTIFACTS.glob("cpu-*.npz"))
    without_c_kernels = {"cpu-x86-avx2", "cpu-x86-avx512"}
    with_them = {f"{name}-c" for name in without_c_kernels}
    assert without_c_kernels <= {p.stem for p in shipped} <= without_c_kernels | with_them
    from convselect.kernels.pool import ALL
    from convselect.model.inference import Predictor

    for path in shipped:
        predictor = Predictor.load(path)
        assert "native" in predictor.card.algorithm_names
        assert set(predictor.card.algorithm_names) <= {a.name for a in ALL if a.automatic}
        assert predictor.card.family == path.stem
        prediction = predictor.predict(conv_problem(1, 64, 56, 56, 64, 3, 3, padding=1))
        assert prediction is not None
        assert path.stat().st_size < 200_000
        assert path.with_suffix(".json").exists()


@pytest.mark.parametrize("c_kernels", [True, False])
def test_a_family_without_an_artifact_is_native_after_one_warning(c_kernels, monkeypatch):
    """Times of the C kernels and of PyTorch's formulations say nothing about each other: neither artifact stands in."""
    monkeypatch.delenv("CONVSELECT_ARTIFACT", raising=False)
    monkeypatch.setattr(host._library, "available", lambda: c_kernels)
    name = host.family_of_host(host.cpu_capability())
    assert name.endswith("-c") == c_kernels
    assert loaded.path_for_host() == artifact_path(name)
    monkeypatch.setattr(inference, "artifact_path", lambda family: ARTIFACTS / f"{family}-of-another-machine.npz")
    with pytest.warns(convselect.ConvselectWarning, match="no trained model for this machine") as caught:
        for size in (8, 9, 10):
            convselect.conv2d(torch.randn(1, 8, size, size), W, padding=1)
    assert len(caught) == 1
    assert {entry.found.algorithm for entry in resolve.choices.entries.values()} == {"native"}


def test_unload_releases_the_weights_and_a_new_problem_loads_them_again(monkeypatch):
    monkeypatch.setenv("CONVSELECT_ARTIFACT", str(some_artifact()))
    convselect.conv2d(X, W, padding=1)
    alive = weakref.ref(loaded.get())
    assert alive() is not None
    before = dict(resolve.choices.entries)
    convselect.unload()
    gc.collect()
    assert alive() is None
    convselect.conv2d(X, W, padding=1)  # remembered: nothing is loaded for it
    assert loaded._loaded is None
    assert resolve.choices.entries == before
    convselect.conv2d(torch.randn(1, 8, 13, 13), W, padding=1)
    assert loaded._loaded is not None


def test_a_forced_policy_loads_nothing(monkeypatch):
    monkeypatch.setattr(loaded, "_load", lambda: pytest.fail("the model was loaded"))
    convselect.conv2d(X, W, padding=1, policy="im2col_gemm")
    convselect.conv2d(X, W, padding=1, policy="native")


def test_the_model_goes_by_itself_when_no_new_problem_comes(monkeypatch):
    monkeypatch.setattr(loaded, "IDLE_CALLS", 10)

    def forced_calls(count):
        for _ in range(count):
            convselect.conv2d(X, W, padding=1, policy="im2col_gemm")

    with torch.no_grad():
        convselect.conv2d(X, W, padding=1)
        forced_calls(8)
        assert loaded._loaded is not None
        convselect.conv2d(torch.randn(1, 8, 13, 12), W, padding=1)  # a new problem: the count begins again
        assert loaded.idle.left >= 8  # 8 if the new problem's own algorithm ran and was counted
        forced_calls(8)
        assert loaded._loaded is not None
        forced_calls(2)
        assert loaded._loaded is None
        convselect.conv2d(torch.randn(1, 8, 14, 12), W, padding=1)
        assert loaded._loaded is not None


# ---- GPUs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


ON_CUDA = conv_problem(8, 64, 56, 56, 64, 3, 3, padding=1, dtype="float32", device="cuda", tf32=True, threads=16)


def test_a_gpu_without_a_model_is_native_without_a_word(a_gpu, tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(inference, "artifact_path", lambda family: tmp_path / f"{family}.npz")
    for size in (8, 9, 10):
        problem = ON_CUDA._replace(H=size)
        choice = resolve.choice_for(problem, convselect.base.settings.current())
        assert (choice.algorithm, choice.source) == ("native", "fallback")
    assert loaded._of_gpu == {"cuda-sm90": None}
    assert not [w for w in recwarn if issubclass(w.category, convselect.ConvselectWarning)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loaded.get_for(ON_CUDA) is None


def test_a_gpu_is_asked_of_its_own_model(a_gpu, tmp_path, monkeypatch):
    other = inference.Predictor.load(some_artifact())
    card = dataclasses.replace(
        other.card, family="cuda-sm90", device="cuda", tf32=True, host_flags={}, dtypes=("bfloat16", "float32")
    )
    save(tmp_path / "cuda-sm90.npz", card, other._arrays)
    monkeypatch.setattr(inference, "artifact_path", lambda family: tmp_path / f"{family}.npz")
    found = loaded.get_for(ON_CUDA)
    assert found is not None
    assert found.card.family == "cuda-sm90"
    prediction = found.predict(ON_CUDA)
    assert prediction.margin == card.margin  # the host's threads do not count
    assert list(prediction.ranked) == list(found.predict(ON_CUDA._replace(threads=1)).ranked)
    assert found.predict(ON_CUDA._replace(dtype="bfloat16", tf32=False)) is not None
    assert found.predict(ON_CUDA._replace(device="cpu")) is None
    plain = inference.Predictor(dataclasses.replace(card, tf32=False), dict(found._arrays), {})
    assert plain.predict(ON_CUDA) is None
    assert plain.predict(ON_CUDA._replace(tf32=False)) is not None
    convselect.unload()
    assert not loaded._of_gpu


def test_a_damaged_model_of_a_gpu_is_native_after_one_warning(a_gpu, tmp_path, monkeypatch):
    (tmp_path / "cuda-sm90.npz").write_bytes(b"no model")
    monkeypatch.setattr(inference, "artifact_path", lambda family: tmp_path / f"{family}.npz")
    with pytest.warns(convselect.ConvselectWarning, match="on this GPU") as caught:
        assert loaded.get_for(ON_CUDA) is None
        assert loaded.get_for(ON_CUDA._replace(H=8)) is None
    assert len(caught) == 1
