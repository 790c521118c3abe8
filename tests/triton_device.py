"""Where Triton's kernels run in tests: compiled on a GPU where there is one, else in the interpreter on CPU tensors.

Triton decides when a kernel's module is imported, so the variable is set here, before any test module is: a conftest
imports this first. What needs compiled kernels without a GPU runs in a process of its own (cuda/test_compile.py).
"""

from __future__ import annotations

import importlib.util
import os


def _device() -> str:
    if os.environ.get("TRITON_INTERPRET") == "1" or importlib.util.find_spec("torch") is None:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


DEVICE = _device()
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
