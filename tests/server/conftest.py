"""Servers on a port of their own: over a fake engine, and over the real one with a tiny model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

from kvcore.text import Tokenizer

if TYPE_CHECKING:
    from live import Live, Servers  # which skips where the server's packages are missing


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVCORE_") or name.endswith("_PROXY")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A server that ran in this process may have sent its log to a stderr that is gone."""
    loggers = [logging.getLogger(name) for name in ("kvcore", "uvicorn", "uvicorn.error")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, 256 tokens, with a chat template; text begins with a BOS."""
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=CHAT_TEMPLATE)
    return Tokenizer.from_folder(folder)


@pytest.fixture
def serve_fake(tokenizer: Tokenizer) -> Iterator[Servers]:
    """``serve_fake(text, engine={...}, served={...}, **http_settings)`` starts a server of the test's own."""
    from live import Servers

    servers = Servers(tokenizer)
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def _shared(tokenizer: Tokenizer) -> Iterator[Live]:
    from live import Servers

    servers = Servers(tokenizer)
    yield servers()
    servers.stop()


@pytest.fixture
def fake(_shared: Live) -> Live:
    """A server that answers `TEXT` to everything; tests share it one after the other."""
    assert _shared.idle()
    _shared.engine.submitted.clear()
    _shared.engine.cancelled.clear()
    return _shared
