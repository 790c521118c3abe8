"""Tiny models whose heads divide, and the environment that a launcher would set."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tiny and tiny_tokenizer

from tiny import write_tiny_llama
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer


@pytest.fixture(scope="session")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with 8 query and 4 KV heads, a tokenizer and a chat template."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("four"), heads=8, kv_heads=4, head_dim=32)
    return write_tiny_tokenizer(folder, chat_template=CHAT_TEMPLATE)
