"""Every kernel compiles for each architecture, fits its shared memory and adds up right; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

HERE = Path(__file__).parent
# Largest shared memory of a program, in bytes (CUDA C++ Programming Guide, technical specifications).
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
KERNELS = {
    "angles_kernel",
    "append_kernel",
    "attend_splits",
    "best_of_parts",
    "best_of_row",
    "combine_splits",
    "fold_kernel",
    "gate_kernel",
    "gather_kernel",
    "linear_rows",
    "linear_wide",
    "peak_kernel",
    "weight_rows_kernel",
}


@pytest.mark.full
@pytest.mark.parametrize("arch", SHARED_MEMORY, ids=lambda arch: f"sm_{arch}")
def test_kernels_compile_and_fit(arch: int) -> None:
    # The interpreter, where it is on for this process, would take the place of the compiler.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    command = [sys.executable, str(HERE / "compile_targets.py"), str(arch)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {x["kernel"] for x in kernels} == KERNELS
    assert [x for x in kernels if x["shared"] > SHARED_MEMORY[arch]] == []
    assert [x for x in kernels if x["split_sums"]] == []
