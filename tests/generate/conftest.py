"""What the tests of generation share: a tiny model with its tokenizer, and SmolLM2's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import write_tiny_llama
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

import kvcore
from kvcore.errors import ModelError
from kvcore.text import Tokenizer, load_tokenizer
from kvcore.weights import open_checkpoint


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"), eos_token_id=None)
    return write_tiny_tokenizer(folder, chat_template=CHAT_TEMPLATE, eos="<end>")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> kvcore.Model:
    return kvcore.load(tiny_folder, backend="reference")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder)


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Tokenizer:
    try:
        return load_tokenizer(open_checkpoint(None).tokenizer)
    except ModelError as error:
        pytest.skip(str(error))
