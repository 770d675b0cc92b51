"""ONNX Runtime and OpenVINO, as sides of a comparison: one forward pass in float32 on a fixed number of threads.

They take part if they are installed:

    pip install onnx onnxruntime openvino

Both get the network as ONNX. Inputs and outputs are bound beforehand, so that a call is the computation and little
else. The threads of their pools do not spin between calls, which would take time from the side that is timed next;
`onnxruntime_side(.., spin=True)` is for timing it by itself.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Side = Callable[[], Tensor]
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "openvino", "timm")
_OPSET = 17  # the newest that PyTorch's older exporter reaches without custom operators


class Absent(Exception):
    """Why a side cannot take part."""


@dataclass(frozen=True)
class Node:
    """One step of another runtime's program.

    Attributes:
        kind: its operator, as that runtime names it.
        how: the kernel that computes it, if the runtime tells.
        us: the least of its wall-clock times over some runs: other programs interrupt the others.
    """

    kind: str
    name: str
    how: str
    us: float


def versions() -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Absent(f"{package} is not installed")


def onnx_bytes(model: nn.Module, x: Tensor) -> bytes:
    """The network as ONNX: by the exporter that torch recommends if what it needs is installed, else by the older one.

    Raises:
        Absent: onnx is not installed.
    """
    _need("onnx")
    newer = importlib.util.find_spec("onnxscript") is not None
    file = io.BytesIO()
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constants traced, the exporter's age
        plain = x.detach().clone()
        if newer:
            program = torch.onnx.export(model, (plain,), dynamo=True, verbose=False)
            assert program is not None
            program.save(file)
        else:
            torch.onnx.export(model, (plain,), file, dynamo=False, opset_version=_OPSET, verbose=False)
    return file.getvalue()


# ---- ONNX Runtime ---------------------------------------------------------------------------------------------------


def _session(onnx: bytes, threads: int, **entries: str) -> Any:
    """With all graph optimisations. `entries`: options of its configuration, dots written as two underscores."""
    _need("onnxruntime")
    import onnxruntime  # type: ignore[import-not-found]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3  # errors only
    profile = entries.pop("profile", None)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, profile
    for name, value in entries.items():
        options.add_session_config_entry(name.replace("__", "."), value)
    return onnxruntime.InferenceSession(onnx, options, ["CPUExecutionProvider"])


def _bound(session: Any, x: Tensor) -> Side:
    import numpy as np

    (result,) = session.get_outputs()
    y = np.empty(result.shape, np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input(session.get_inputs()[0].name, x.numpy())
    binding.bind_output(result.name, "cpu", 0, np.float32, y.shape, y.ctypes.data)
    out = torch.from_numpy(y)

    def run() -> Tensor:
        session.run_with_iobinding(binding)
        return out

    return run


def onnxruntime_side(onnx: bytes, x: Tensor, threads: int, *, spin: bool = False) -> Side:
    """
    Args:
        x: float32, contiguous.

    Raises:
        Absent: it is not installed.
    """
    return _bound(_session(onnx, threads, session__intra_op__allow_spinning=str(int(spin))), x)


def onnxruntime_nodes(onnx: bytes, x: Tensor, threads: int, runs: int = 30) -> list[Node]:
    """What each node of ONNX Runtime's optimised graph takes, by its own profile, in whole microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        session = _session(onnx, threads, profile=str(Path(folder) / "profile"))
        run = _bound(session, x)
        for _ in range(runs):
            run()
        events = json.loads(Path(session.end_profiling()).read_text())
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            times[event["args"]["op_name"], event["name"].removesuffix("_kernel_time")].append(float(event["dur"]))
    return [Node(kind, name, "", min(us)) for (kind, name), us in times.items()]


# ---- OpenVINO -------------------------------------------------------------------------------------------------------


def _request(onnx: bytes, x: Tensor, threads: int, **more: Any) -> Any:
    _need("openvino")
    import openvino  # type: ignore[import-not-found]

    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",  # by default bfloat16 if the processor can
        "ENABLE_CPU_PINNING": False,  # it would bind the thread that calls, and so all sides
        **more,
    }
    core = openvino.Core()
    request = core.compile_model(core.read_model(onnx), "CPU", properties).create_infer_request()
    request.set_input_tensor(openvino.Tensor(x.numpy(), shared_memory=True))
    return request


def openvino_side(onnx: bytes, x: Tensor, threads: int) -> Side:
    """
    Args:
        x: float32, contiguous; must stay alive.

    Raises:
        Absent: it is not installed.
    """
    request = _request(onnx, x, threads)

    def run() -> Tensor:
        request.infer(share_outputs=True)
        return torch.from_numpy(request.get_output_tensor().data)

    return run


def openvino_nodes(onnx: bytes, x: Tensor, threads: int, runs: int = 30) -> list[Node]:
    """What each node of OpenVINO's program takes, by its own profile. `Node.how` tells the instruction set."""
    request = _request(onnx, x, threads, PERF_COUNT=True)
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for _ in range(runs):
        request.infer(share_outputs=True)
        for node in request.get_profiling_info():
            times[node.node_type, node.node_name, node.exec_type].append(node.real_time.total_seconds() * 1e6)
    return [Node(*key, min(us)) for key, us in times.items() if max(us) > 0]
