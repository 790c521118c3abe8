"""Servers over the real engine with a tiny model, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from live import Live, running

import kvcore
from kvcore.engine import Engine, EngineConfig
from kvcore.server.load import start
from kvcore.server.metrics import Metrics
from kvcore.server.served import Defaults
from kvcore.server.state import HttpSettings, ServerState


@contextmanager
def serving(model: kvcore.Model, **config: Any) -> Iterator[Live]:
    """``config`` is the engine's. Greedy unless a request says otherwise."""
    state = ServerState(HttpSettings(shutdown_timeout=5), Metrics())
    served = start(
        model,
        EngineConfig(**config),
        requested_mode=model.mode.name,
        names=("tiny", "tiny-alias"),
        defaults=Defaults(temperature=0.0),
    )
    state.served = served
    state.metrics.follow("tiny", served.engine.stats)
    try:
        with running(state) as live:
            yield live
    finally:
        served.engine.stop(timeout=5)
        assert not any(thread.name == "kvcore-engine" and thread.is_alive() for thread in _own(served.engine))


def slow(live: Live, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.003) -> None:
    """A pause in each step, as a larger model would make: an answer is under way while somebody looks."""
    step = live.engine.step

    def paused() -> bool:
        time.sleep(seconds)
        return bool(step())

    monkeypatch.setattr(live.engine, "step", paused)


def _own(engine: Any) -> list[threading.Thread]:
    assert isinstance(engine, Engine)
    return [] if engine._thread is None else [engine._thread]


def words(count: int, seed: int) -> str:
    """About ``count`` tokens of the tiny tokenizer, which spells with single bytes; no two seeds share a beginning."""
    letters = "abcdefghijklmnop"
    state, text = seed * 2654435761 % 2**32 or 1, []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        text.append(letters[(state >> 16) % len(letters)])
    return "".join(text)
