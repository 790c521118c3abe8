"""Driving an engine step by step, and hearing what it says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.engine import Engine, EngineConfig, Output, Request
from kvcore.engine.engine import Running
from kvcore.modes import MODES

FAST = ("fp16", "turbo4")
some_modes = pytest.mark.parametrize(
    "mode", [*FAST, *(pytest.param(mode, marks=pytest.mark.full) for mode in MODES if mode not in FAST)]
)


class Heard:
    """A listener: the pieces of one request, and at which step of the engine they came."""

    def __init__(self, engine: Engine) -> None:
        self.outputs: list[Output] = []
        self.steps: list[int] = []
        self._engine = engine

    def __call__(self, output: Output) -> None:
        assert not self.done, "a piece came after the last one"
        self.outputs.append(output)
        self.steps.append(self._engine.stats().steps)

    @property
    def done(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def last(self) -> Output:
        return self.outputs[-1]

    @property
    def reason(self) -> str | None:
        return self.last.finish_reason


def ids(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(5, 256, count).tolist())


def request(name: str, prompt: Sequence[int], max_tokens: int = 16, **settings: Any) -> Request:
    own = {key: settings.pop(key) for key in ("mode", "logprobs", "echo_logprobs") if key in settings}
    return Request(name, tuple(prompt), kvcore.SamplingParams(max_tokens=max_tokens, **settings), **own)


def new_engine(model: kvcore.Model, **settings: Any) -> Engine:
    settings.setdefault("kv_cache_budget", 64 << 20)
    return Engine(model, EngineConfig(**settings))


def submit(engine: Engine, *requests: Request) -> list[Heard]:
    heard = [Heard(engine) for _ in requests]
    for each, listener in zip(requests, heard, strict=True):
        engine.submit(each, listener)
    return heard


def finish(engine: Engine, heard: Iterable[Heard], most: int = 5000) -> None:
    """Step until all are done."""
    heard = list(heard)
    for _ in range(most):
        if all(each.done for each in heard):
            return
        engine.step()
    raise AssertionError(f"not done after {most} steps: {engine.stats()}")


def alone(model: kvcore.Model, each: Request, **settings: Any) -> Heard:
    """The request on an engine of its own."""
    engine = new_engine(model, **settings)
    (heard,) = submit(engine, each)
    finish(engine, [heard])
    return heard


def running_of(engine: Engine, name: str) -> Running:
    """The engine's own record of a request."""
    return engine._open[name]
