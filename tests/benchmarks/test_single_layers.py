"""Single layers against other runtimes: what is timed, what is refused, how rows are summed up."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest
import torch

from benchmarks import _rivals, _tables, single_layers
from benchmarks.single_layers import CALL, LAYERS, Layer, Row, kinds, measure

TINY = Layer("3x3", 4, 8, 6, 3)


@pytest.fixture
def one_rival(monkeypatch):
    """A rival that is eager PyTorch, and one that is not installed: what is installed is the machine's business."""

    def absent(*_):
        raise _rivals.Absent("not here")

    model, _ = single_layers.build(TINY)
    monkeypatch.setattr(_rivals, "onnx_bytes", lambda *_: b"")
    monkeypatch.setattr(_rivals, "onnxruntime_side", lambda onnx, x, threads: lambda: model(x))
    monkeypatch.setattr(
        _rivals, "onnxruntime_nodes", lambda *_: [_rivals.Node("Conv", "a", "", 2.0), _rivals.Node("Relu", "b", "", 9)]
    )
    monkeypatch.setattr(_rivals, "openvino_side", absent)


def test_layers_are_of_the_kind_they_stand_under():
    assert len(LAYERS) == len({(layer.kind, str(layer)) for layer in LAYERS})
    for layer in LAYERS:
        p = layer.problem
        if layer.kind == CALL:
            continue
        assert ("depthwise" in layer.kind) == (p.groups == p.C > 1)
        assert ("grouped" in layer.kind) == (1 < p.groups < p.C)
        assert ("s2" in layer.kind or layer.kind in ("stem", "patches")) <= (p.stride[0] > 1)
        assert (layer.kind == "dilated") == (p.dilation[0] > 1)
        assert layer.kind.startswith("1x1") == (p.R == 1)
        assert p.P == p.Q == -(-layer.size // layer.stride)  # "half" padding, or patches that fit
    assert {p.C // p.groups for p in (la.problem for la in LAYERS if la.kind == "grouped, 24 each")} == {24}


def test_a_layer_is_timed_on_every_side(one_rival):
    row = measure(TINY, threads=1, rounds=2, seconds=0.05)
    assert row.us.keys() == row.error.keys() == {"eager", "frozen", "frozen channels_last", "onnxruntime"}
    assert max(row.error.values()) < 1e-5
    assert row.missing == {"openvino": "not here"}
    assert row.over.keys() == {"onnxruntime"}
    assert row.alone_us == {"onnxruntime": 2.0}  # the convolution, not what else the profile has
    assert row.over_alone == 2.0 / row.least_us[row.fastest]
    assert row.least_us[row.fastest] <= row.frozen_us
    assert row.chosen.keys() == set(single_layers.FROZEN)
    assert row.frozen_us == min(row.us["frozen"], row.us["frozen channels_last"])
    assert row.gflops == pytest.approx(2 * 8 * 36 * 4 * 9 / row.frozen_us / 1e3)


def test_a_ratio_is_of_single_calls(monkeypatch):
    """Samples have several calls of a fast side, and one of a slow one."""
    monkeypatch.setattr(single_layers, "_repeats", lambda side: side.count)

    def timed(repeated, *_):
        us = {"eager": 50.0, "frozen": 100.0, "onnxruntime": 60.0}
        return {name: single_layers.timing.Timing((us[name],) * 2) for name in repeated}, {}, "cpu"

    monkeypatch.setattr(single_layers, "clocked", timed)
    sides = {}
    for name, count in (("eager", 1), ("frozen", 10), ("onnxruntime", 3)):
        sides[name] = lambda: None
        sides[name].count = count
    row = Row("3x3", "a", "p", 1, alone_us={"onnxruntime": 30.0, "openvino": 5.0})
    single_layers._time(sides, row, 1, 2, 0.05)
    assert row.alone_us == {"onnxruntime": 20.0, "openvino": 5.0}  # a convolution takes no longer than its call
    assert row.us == {"eager": 50.0, "frozen": 10.0, "onnxruntime": 20.0}
    assert row.over == {"onnxruntime": pytest.approx(2.0)}


def test_a_wrong_side_is_not_timed(one_rival, monkeypatch):
    monkeypatch.setattr(_rivals, "onnxruntime_side", lambda onnx, x, threads: lambda: torch.zeros(1, 8, 6, 6))
    row = measure(TINY, threads=1, rounds=2, seconds=0.05)
    assert "onnxruntime" not in row.us
    assert row.missing["onnxruntime"] == "wrong: its relative error is 1.0e+00"
    assert row.over == {}


def test_means_by_kind():
    alone = {"least_us": {"frozen": 2.0}, "alone_us": {"onnxruntime": 1.0, "openvino": 5.0}}
    rows = [
        Row("a", "1", "p", 1, us={"frozen": 1.0}, over={"onnxruntime": 2.0, "openvino": 8.0}),
        Row("a", "2", "p", 1, us={"frozen": 1.0}, over={"onnxruntime": 8.0, "openvino": 2.0}),
        Row("b", "3", "p", 1, us={"frozen": 3.0}, over={"onnxruntime": 0.5}, **alone),
        Row(CALL, "4", "p", 1, us={"frozen": 1.0}, over={"onnxruntime": 0.001}),
    ]
    found = kinds(rows)
    assert list(found) == ["a", "b", CALL, "all"]
    assert found["a"] == pytest.approx({"onnxruntime": 4, "openvino": 4, "best": 2, "alone": math.nan}, nan_ok=True)
    assert found["b"]["alone"] == 0.5
    assert found["all"]["onnxruntime"] == pytest.approx(2.0)  # without what a call costs
    assert single_layers.layers_table(rows).row_count == 4
    assert single_layers.kinds_table(rows).row_count == 4


def test_the_table_of_the_pages():
    rows = [Row("a", "1", "p", 1, us={"frozen": 1.0}, over={"onnxruntime": 2.0, "openvino": 8.0})]
    run = {"kinds": kinds(rows)}
    *_, a, whole = _tables.layers_table({"AVX2": run, "AVX-512": run}).splitlines()
    assert a == "| a | 2.00 / 8.00 / nan | 2.00 / 8.00 / nan |"
    assert whole == "| all | 2.00 / 8.00 / nan | 2.00 / 8.00 / nan |"


def test_main(tmp_path, monkeypatch, capsys):
    def row(layer, **_):
        return Row(layer.kind, str(layer), "p", 2000, us={"frozen": 1.0}, over={"openvino": 2.0}, missing=missing)

    missing: dict[str, str] = {}
    monkeypatch.setattr(single_layers, "measure", row)
    out, chosen = tmp_path / "run.json", ["--no-malloc-tuning", "--kinds", "dilated"]
    assert single_layers.main([*chosen, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [r["layer"] for r in found["rows"]] == [str(layer) for layer in LAYERS if layer.kind == "dilated"]
    assert found["kinds"]["all"]["openvino"] == pytest.approx(2.0)
    missing["onnxruntime"] = "not here"
    assert single_layers.main(chosen) == 0
    missing["frozen"] = "wrong: its relative error is 1.0e+00"
    assert single_layers.main(chosen) == 1
    assert "frozen: wrong" in capsys.readouterr().out


# ---- the runtimes themselves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["onnxruntime", "openvino"])
def test_other_runtimes_compute_the_layer(package):
    for needed in ("onnx", package):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    model, x = single_layers.build(TINY)
    onnx = _rivals.onnx_bytes(model, x)
    run = getattr(_rivals, f"{package}_side")(onnx, x, 1)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(), model(x), rtol=1e-4, atol=1e-5)
            x.neg_()  # the input is bound, not copied
    nodes = getattr(_rivals, f"{package}_nodes")(onnx, x, 1, runs=3)
    assert sum(node.kind in single_layers._CONVOLUTIONS for node in nodes) == 1
    assert package in _rivals.versions()


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "openvino"])
def test_what_is_not_installed_is_named(package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    model, x = single_layers.build(TINY)
    made = {
        "onnx": lambda: _rivals.onnx_bytes(model, x),
        "onnxruntime": lambda: _rivals.onnxruntime_side(b"", x, 1),
        "openvino": lambda: _rivals.openvino_side(b"", x, 1),
    }
    with pytest.raises(_rivals.Absent, match=f"{package} is not installed"):
        made[package]()
