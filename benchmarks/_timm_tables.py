"""Tables of networks that nobody here wrote: what `benchmarks.timm_networks` and `benchmarks.clients` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._markdown import geometric_mean, table

TIMM = {"AVX-512": "timm-avx512-1-thread.json", "AVX2": "timm-avx2-1-thread.json"}


def timm_ratios(run: Mapping[str, Any], threads: int = 1) -> dict[str, dict[str, float]]:
    """Network -> "onnxruntime", "openvino" and "frozen" over eager PyTorch, and "best", frozen over the faster rival.

    Args:
        run: what `python -m benchmarks.timm_networks` wrote. Networks in which a side is wrong or failed are left out.
    """
    found: dict[str, dict[str, float]] = {}
    for r in run["results"]:
        sides, over = r["over_eager"], r["frozen_over"]
        rivals = [side for side in ("onnxruntime", "openvino") if side in over]
        if (r["mode"], r["threads"]) == ("inference", threads) and "frozen" in sides and rivals:
            found[r["network"]] = {side: float(sides[side][0]) for side in (*rivals, "frozen")}
            found[r["network"]]["best"] = min(float(over[side][0]) for side in rivals)
    return dict(sorted(found.items(), key=lambda item: item[1]["best"]))


def timm_table(measured: Mapping[str, Mapping[str, Any]], threads: int = 1) -> str:
    """`measured`: instruction set -> what `python -m benchmarks.timm_networks` wrote."""
    of_isa = {isa: timm_ratios(run, threads) for isa, run in measured.items()}
    networks = list(dict.fromkeys(network for found in of_isa.values() for network in found))
    sides = ("onnxruntime", "openvino", "frozen")

    def cells(of: Sequence[Mapping[str, float]]) -> list[str]:
        means = {side: [r[side] for r in of if side in r] for side in (*sides, "best")}
        shown = {side: f"{geometric_mean(values):.2f}" if values else "-" for side, values in means.items()}
        return [" / ".join(shown[side] for side in sides), shown["best"]]

    header = [part for isa in of_isa for part in (f"{isa}: ONNX Runtime / OpenVINO / frozen", "frozen / best rival")]
    rows = [
        [name, *(cell for found in of_isa.values() for cell in cells([found[name]] if name in found else []))]
        for name in networks
    ]
    whole = [cell for found in of_isa.values() for cell in cells(list(found.values()))]
    return table(("network", *header), [*rows, ["geometric mean", *whole]])


def converted_ratios(run: Mapping[str, Any], threads: int = 1) -> dict[str, dict[str, float]]:
    """Network -> times eager PyTorch in NCHW: "inference", converted; "training" and "training NHWC", steps of the
    converted network in the two layouts; "frozen"; and "best", frozen over the faster of ONNX Runtime and OpenVINO.

    Args:
        run: what `python -m benchmarks.timm_networks --training` wrote.
    """
    found: dict[str, dict[str, float]] = {}
    for r in run["results"]:
        if r["threads"] != threads:
            continue
        sides, of = r["over_eager"], found.setdefault(r["network"], {})
        if r["mode"] == "training":
            names = {"training": "converted", "training NHWC": "converted channels_last"}
        else:
            names = {"inference": "converted", "frozen": "frozen"}
        of |= {name: float(sides[side][0]) for name, side in names.items() if side in sides}
    for name, of in timm_ratios(run, threads).items():
        found[name]["best"] = of["best"]
    return found


def _over(values: Sequence[float]) -> str:
    """The geometric mean, and the least."""
    return f"{geometric_mean(values):.2f}, least {min(values):.2f}" if values else "-"


def converted_table(run: Mapping[str, Any], threads: int = 1) -> str:
    columns = ("inference", "training", "training NHWC")
    found = converted_ratios(run, threads)
    of_all = [[of[c] for of in found.values() if c in of] for c in columns]
    rows = [
        [name, *(f"{of[c]:.2f}" if c in of else "-" for c in columns)]
        for name, of in sorted(found.items(), key=lambda item: item[1].get("inference", 0.0))
    ]
    header = ("network", "inference, batch 1", "training step, batch 8", "the same in channels_last")
    return table(header, [*rows, ["geometric mean", *map(_over, of_all)]])


SHOWN = (
    "resnet50", "vgg16", "densenet121", "efficientnet_b0", "efficientnetv2_rw_s", "mobilenetv3_large_100",
    "convnext_tiny", "hrnet_w18_small",
)  # fmt: skip
"""Networks of README's first table, of those that most people know."""


def record_table(run: Mapping[str, Any], threads: int = 1) -> str:
    """README's first: a few networks, and all of them together."""
    columns = ("inference", "training NHWC", "frozen", "best")
    found = converted_ratios(run, threads)
    of_all = [[of[c] for of in found.values() if c in of] for c in columns]
    rows = [[name, *(f"{found[name][c]:.2f}" for c in columns)] for name in SHOWN]
    header = (
        "network of timm", "converted: inference", "training step, channels_last", "frozen: inference",
        "frozen over the faster of ONNX Runtime and OpenVINO",
    )  # fmt: skip
    return table(header, [*rows, [f"all {len(found)}, geometric mean", *map(_over, of_all)]])


def clients_table(run: Mapping[str, Any]) -> str:
    """`run`: what `python -m benchmarks.clients` wrote, of one number of threads."""
    sides = ("converted", "frozen")
    rows, gains = [], {side: [float(r["over_eager"][side][0]) for r in run["results"]] for side in sides}
    for i, r in enumerate(run["results"]):
        errors = " / ".join(f"{r['error'][side]:.1e}" for side in ("eager", "frozen"))
        name = r["network"].rpartition(":")[2]
        rows.append([name, *(f"{gains[side][i]:.2f}" for side in sides), errors])
    means = [f"{geometric_mean(gains[side]):.2f}" for side in sides]
    return table(("network", *sides, "error: stock / frozen"), [*rows, ["geometric mean", *means, ""]])
