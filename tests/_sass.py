"""What is in a compiled Triton kernel: registers, spills, shared memory and instructions, read with the disassemblers
that come with Triton. No GPU is needed."""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


@dataclass(frozen=True)
class Usage:
    """One compiled kernel's registers per thread, bytes of stack per thread, shared bytes per program."""

    registers: int
    spill_bytes: int
    shared_bytes: int


def usage(compiled: Any) -> Usage:
    """What the driver would reserve. A kernel of ours has no other use for a stack than spilled registers.

    Raises:
        RuntimeError: the disassembler prints something else than expected.
    """
    text = _tool(compiled, "cuobjdump", "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"no resource usage in {text!r}")
    registers, stack, _static, local = map(int, found.groups())
    return Usage(registers, stack + local, compiled.metadata.shared)


def instructions(compiled: Any) -> collections.Counter[str]:
    """How often each instruction is in the code, by its full name without predicate and cache hints:
    "FFMA", "LDG.E.128", "HMMA.16816.F32"."""
    counts: collections.Counter[str] = collections.Counter()
    for line in _tool(compiled, "nvdisasm", "-c").splitlines():
        found = _INSTRUCTION.match(line)
        if found:
            counts[_plain(found[1])] += 1
    return counts


def _plain(name: str) -> str:
    """LDG.E.LTC128B.128.CONSTANT -> LDG.E.128"""
    parts = name.split(".")
    dropped = {"CONSTANT", "STRONG", "GPU", "SYS", "SM", "EF", "EL", "EN", "EU", "LU", "NA"}
    return ".".join(part for part in parts if part not in dropped and not part.startswith("LTC"))


def _tool(compiled: Any, tool: str, *options: str) -> str:
    from triton.backends import nvidia

    binary = Path(nvidia.__file__).parent / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        result = subprocess.run([binary, *options, file.name], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{tool} failed: {result.stderr}")
    return result.stdout
