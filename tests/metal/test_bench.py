"""The benchmark of attention on Metal: its table on MLX's CPU device, and one line where there is no Metal."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.backends import Backend
from kvcore.errors import KvcoreError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mlx") is None, reason="the package mlx is not installed")


@pytest.fixture
def mlx() -> Backend:
    from kvcore.backends import load_backend

    backend = load_backend("metal")
    if backend.device == "metal":
        pytest.skip("this machine has Metal: nox -s bench-metal runs the benchmark")
    return backend


def test_a_row_for_each_mode_and_kernel_and_one_for_mlx(mlx: Backend) -> None:
    from kvcore.bench.attention_metal import COLUMNS, run
    from kvcore.bench.shape import Shape

    modes = ["fp16", "int8", "turbo4", "turbo3-asym", "turbo4-delegated"]
    rows = run(mlx, [Shape(2, 400, 4, 2, 64)], modes, dtype="float32", repeats=3, layers=2)
    assert [(row["mode"], row["kernel"]) for row in rows] == [
        ("fp16", "mx.fast.sdpa"),
        *((mode, "attend-graph") for mode in modes),
    ]
    assert all(set(COLUMNS) <= set(row) and row["us"] > 0 and row["error"] <= 1e-5 for row in rows)
    assert rows[0]["speedup"] == 1.0
    assert {row["shape"] for row in rows} == {"2x400 4/2 D64"}


def test_a_wrong_kernel_is_not_timed(mlx: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore.bench import attention_metal
    from kvcore.bench.shape import Shape

    monkeypatch.setitem(attention_metal.LIMITS, "float32", 1e-12)
    with pytest.raises(KvcoreError, match=r"fp16, mx\.fast\.sdpa: error .* exceeds 1e-12: not timed"):
        attention_metal.run(mlx, [Shape(1, 64, 2, 1, 64)], ["fp16"], dtype="float32", layers=2)


@pytest.mark.skipif(sys.platform == "darwin", reason="this machine may have Metal")
def test_without_metal_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kvcore",
        "bench",
        "attention",
        "--backend",
        "metal",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "kvcore: error: bench attention --backend metal: MLX has no Metal here; run it on an Apple GPU"
    ]
    assert not (tmp_path / "out").exists()


def test_another_backend_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "kvcore", "bench", "attention", "--backend", "reference", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--backend reference: this benchmark knows cuda and metal" in done.stderr
    assert done.stdout == "" or json.loads(done.stdout)["error"]
