"""The properties of a machine that decide which artifact fits: device family and native 16-bit support."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from convselect.kernels import _library

SIXTEEN_BIT_FLAGS = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16", "amx_fp16")}
"""Processor features without which native emulates a 16-bit type, 5 to 30 times slower."""

_MACHINES = {"x86_64": "x86", "amd64": "x86", "aarch64": "arm", "arm64": "arm"}
_AVX512_ISAS = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10", "AVX512_CORE_AMX", "DEFAULT", "ALL")


def cpu_capability() -> str:
    """The instruction set that torch dispatches to: "AVX2", "AVX512", "DEFAULT", ... (honours ATEN_CPU_CAPABILITY)."""
    return str(torch.backends.cpu.get_cpu_capability())


def family_of_host(capability: str, machine: str | None = None, c_kernels: bool | None = None) -> str:
    """Name of a CPU's device family, for example "cpu-x86-avx2-c" or "cpu-arm-default".

    The suffix "-c" stands for the C kernels: without them the same algorithms run in PyTorch operations, whose times
    say nothing about the kernels.

    Args:
        capability: as `cpu_capability` returns it.
        machine: as `platform.machine` returns it; default: this machine's.
        c_kernels: whether they are loaded; default: as in this process.
    """
    machine = (machine or platform.machine()).lower()
    suffix = "-c" if (_library.available() if c_kernels is None else c_kernels) else ""
    return f"cpu-{_MACHINES.get(machine, machine)}-{capability.lower().replace(' ', '-')}{suffix}"


def has_c_kernels(family: str | None) -> bool:
    """Whether a device family's times are those of the C kernels."""
    return family is not None and family.endswith("-c")


def family_of_cuda(capability: tuple[int, int]) -> str:
    """Name of a GPU's device family by its compute capability, for example "cuda-sm90". Cards of one
    capability differ in size and bandwidth, but have the same fast paths."""
    major, minor = capability
    return f"cuda-sm{major}{minor}"


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, bool]:
    """The features that the kernel lists for the first processor, by the names that torch gives them, too; empty if
    there is no such list."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return {}
    listed = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return dict.fromkeys(listed.partition(":")[2].split(), True)


def host_flags(
    capability: str | None = None,
    capabilities: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, bool]:
    """Which native 16-bit instructions torch's convolutions can use here: flag of `SIXTEEN_BIT_FLAGS` -> whether.

    All are False if `ATEN_CPU_CAPABILITY` or `ONEDNN_MAX_CPU_ISA` restricts torch to an older instruction set, or if
    neither torch nor the kernel can tell.

    Args:
        capability: as `cpu_capability` returns it; default: of this process.
        capabilities: as `torch.cpu.get_capabilities` returns them; default: of this process.
        environment: environment variables; default: of this process.
    """
    capability = cpu_capability() if capability is None else capability
    environment = os.environ if environment is None else environment
    if capabilities is None:
        ask = getattr(torch.cpu, "get_capabilities", processor_flags)  # torch 2.9 has no such function
        capabilities = ask()
    isa = environment.get("ONEDNN_MAX_CPU_ISA", environment.get("DNNL_MAX_CPU_ISA", "ALL")).upper()
    allowed = capability.upper() not in ("AVX2", "DEFAULT", "NO AVX") and isa.startswith(_AVX512_ISAS)
    amx = isa.startswith(("AVX512_CORE_AMX", "DEFAULT", "ALL")) or "AMX" in isa
    fp16 = amx or not isa.startswith("AVX512_CORE_BF16")
    return {
        flag: allowed
        and bool(capabilities.get(flag, False))
        and (amx or not flag.startswith("amx"))
        and (fp16 or not flag.endswith("fp16"))
        for flags in SIXTEEN_BIT_FLAGS.values()
        for flag in flags
    }
