"""Tiny models for the tests of prompt-cache files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import write_tiny_llama
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

import kvcore


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_tiny_llama(tmp_path_factory.mktemp("tiny"), eos_token_id=None)
    return write_tiny_tokenizer(made, chat_template=CHAT_TEMPLATE, eos="<end>")


@pytest.fixture(scope="session")
def model(folder: Path) -> kvcore.Model:
    return kvcore.load(folder, backend="reference")
