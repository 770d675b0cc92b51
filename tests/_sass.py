"""What a compiled Triton kernel holds: registers, spills, instructions. Read with the tools that Triton ships."""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class Usage(NamedTuple):
    """Per thread, per thread, per program."""

    registers: int
    spill_bytes: int
    shared_bytes: int


def _tool(name: str, *arguments: str, cubin: bytes) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *arguments, file.name], capture_output=True, text=True, check=True).stdout


def usage(compiled: Any) -> Usage:
    text = _tool("cuobjdump", "--dump-resource-usage", cubin=compiled.asm["cubin"])
    registers = int(re.search(r"REG:(\d+)", text)[1])
    local = int(re.search(r"LOCAL:(\d+)", text)[1])
    stack = int(re.search(r"STACK:(\d+)", text)[1])
    return Usage(registers, local + stack, compiled.metadata.shared)


def instructions(compiled: Any) -> collections.Counter[str]:
    """How often each opcode occurs, with all its suffixes: "HGMMA.64x128x16.F32", "LDG.E.128"."""
    text = _tool("nvdisasm", "-c", cubin=compiled.asm["cubin"])
    return collections.Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.M))
