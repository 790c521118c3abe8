"""What the integration tests share: SmolLM2 as folders that transformers and mlx-lm load, and prompts for it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest
import triton_device  # noqa: F401  (before transformers brings Triton in)

import kvcore
from kvcore.cli import run
from kvcore.errors import ModelError
from kvcore.weights import resolve_model

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return resolve_model(None).path
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def text(smollm2_path: Path) -> str:
    return (TESTS / "data" / "jargon.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def native(smollm2_path: Path) -> kvcore.Model:
    """SmolLM2 by kvcore itself, on torch."""
    pytest.importorskip("torch")
    return kvcore.load(smollm2_path, backend="cuda", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def prompts(native: kvcore.Model, text: str) -> list[list[int]]:
    """Token ids of four chats, the first longer than the 256 tokens from which rows fold, the others short."""
    questions = (
        f"{text[2000:3250]}\n\nWhat is this text about?",
        "Count from one to ten.",
        "Name three rivers.",
        "And?",
    )
    chats = [native.tokenizer.encode_chat([{"role": "user", "content": each}]) for each in questions]
    assert 256 < len(chats[0]) < 384
    return chats


@pytest.fixture(scope="session")
def hf_folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(smollm2_path, tmp_path_factory.mktemp("smollm2") / "hf", "hf", "float32")


@pytest.fixture(scope="session")
def mlx_folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(smollm2_path, tmp_path_factory.mktemp("smollm2") / "mlx", "mlx", "float32")


def convert(model: Path, out: Path, to: str, dtype: str) -> Path:
    """`kvcore convert`, quietly."""
    words = ["convert", "--model", str(model), "--to", to, "--dtype", dtype, "--out", str(out)]
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(words) == 0
    assert (out / "config.json").is_file()
    return out


def sure_steps(scores: np.ndarray) -> int:
    """Greedy tokens may differ from the first step on whose raw top-1 margin is below 0.05: its number.

    ``scores`` float32 [steps, vocab] are the raw model's.
    """
    best = np.partition(scores, -2, axis=-1)
    unsure = np.flatnonzero(best[:, -1] - best[:, -2] < 0.05)
    return int(unsure[0]) if len(unsure) else len(scores)
