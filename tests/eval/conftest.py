"""SmolLM2 and the bundled text."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

for folder in ("", "model"):  # tiny and tiny_tokenizer; llamas
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))

import kvcore
from kvcore.errors import ModelError
from kvcore.eval.text import SAMPLE_STARTS, sample_text
from kvcore.weights import resolve_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return resolve_model(None).path
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> kvcore.Model:
    """In float32: torch on the CPU where it is installed, else NumPy."""
    torch = importlib.util.find_spec("torch") is not None
    backend, device = ("cuda", "cpu") if torch else ("reference", None)
    return kvcore.load(smollm2_path, backend=backend, device=device, dtype="float32")


@pytest.fixture(scope="session")
def sample_ids(smollm2: kvcore.Model) -> np.ndarray:
    """The first window of the sample, 1,024 tokens, int64."""
    ids = smollm2.tokenizer.encode(sample_text())
    return np.asarray(ids[SAMPLE_STARTS[0] : SAMPLE_STARTS[0] + 1024])
