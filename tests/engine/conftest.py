"""What the tests of the engine share: a tiny model on each backend, and a listener that keeps what it hears."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore
from kvcore.backends import Backend
from kvcore.layout import WindowPolicy

SMALL = WindowPolicy(recent_tokens=32, page_size=32)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"), eos_token_id=None)
    return write_tiny_tokenizer(folder)


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> kvcore.Model:
    """On the reference backend, with pages of 32 tokens."""
    return kvcore.load(tiny_folder, backend="reference", window=SMALL)


@pytest.fixture
def model_on(backend: Backend, tiny_folder: Path) -> kvcore.Model:
    """The same on each backend in turn, in float32."""
    device = None if backend.name == "metal" else backend.device
    return kvcore.load(tiny_folder, backend=backend.name, device=device, dtype="float32", window=SMALL)
