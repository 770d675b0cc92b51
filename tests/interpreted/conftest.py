"""Triton kernels in Triton's interpreter, on the CPU. The variable is read when kernels are decorated, so these tests
have a process of their own: `TRITON_INTERPRET=1 python -m pytest tests/interpreted`. In any other run they are not
collected."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
