"""Every script in examples/ is short and runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

pytestmark = pytest.mark.xdist_group("examples")


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) < 40


@pytest.mark.smollm2
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(script: Path, hf_folder: Path, tmp_path: Path) -> None:
    package = "mlx_lm" if script.stem.startswith("mlx_lm") else "transformers"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    words = [str(hf_folder), *([str(tmp_path / "cache.safetensors")] if "saved" in script.stem else [])]
    done = subprocess.run(
        [sys.executable, str(script), *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
