"""Many requests, some of which are cancelled: nothing is left behind, and nobody hears another's text."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from driving import Heard, alone, ids, new_engine, request, submit

import kvcore
from kvcore.engine import Engine
from kvcore.modes import MODES

BUDGET = 2 << 20


def soak(model: kvcore.Model, count: int, *, together: int = 16, seed: int = 0) -> tuple[Engine, list[Heard]]:
    """``count`` requests in all modes, ``together`` at a time, a fifth of them cancelled after some tokens."""
    rng = np.random.default_rng(seed)
    engine = new_engine(model, max_batch=together, kv_cache_budget=BUDGET, prefill_step=64, decode_reserve=8)
    heard: list[Heard] = []
    stop_after: dict[str, int] = {}
    modes = list(MODES)
    while len(heard) < count or engine.stats().running + engine.stats().waiting:
        while len(heard) < count and engine.stats().running + engine.stats().waiting < together:
            i = len(heard)
            prompt = (*ids(64, int(rng.integers(0, 3))), *ids(int(rng.integers(1, 60)), 100 + i))
            name = f"r{i}"
            each = request(name, prompt, int(rng.integers(1, 40)), mode=modes[int(rng.integers(0, 7))])
            heard += submit(engine, each)
            if rng.random() < 0.2:
                stop_after[name] = int(rng.integers(0, 10))
        engine.step()
        stats = engine.stats()
        assert sum(use.used for use in stats.kv.values()) <= BUDGET
        for name in [name for name, least in stop_after.items() if name in engine._open]:
            if len(engine._open[name].answer.tokens) >= stop_after[name]:
                engine.cancel(name)
                del stop_after[name]
    return engine, heard


def well_formed(engine: Engine, heard: list[Heard]) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.healthy) == (0, 0, True)
    assert sum(stats.finished.values()) == len(heard)
    assert set(stats.finished) == {"length", "stop", "cancelled"} or set(stats.finished) == {"length", "cancelled"}
    assert all(each.done for each in heard)
    assert stats.generated_tokens == sum(each.last.usage.completion_tokens for each in heard)
    assert stats.cached_tokens == sum(each.last.usage.cached_tokens for each in heard)
    assert stats.prefix_hits > 0


def test_60_requests(model: kvcore.Model) -> None:
    engine, heard = soak(model, 60)
    well_formed(engine, heard)
    engine.stop()
    assert sum(use.used for use in engine.stats().kv.values()) == 0


@pytest.mark.full
def test_500_requests_and_memory_stays_flat(model: kvcore.Model) -> None:
    tracemalloc.start()
    try:
        soak(model, 100)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        engine, heard = soak(model, 500, seed=1)
        well_formed(engine, heard)
        engine.stop()
        del heard  # what the test itself kept of 500 answers
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "mode", ["fp16", *(pytest.param(mode, marks=pytest.mark.full) for mode in MODES if mode != "fp16")]
)
def test_B40_sixteen_at_once_hear_their_own_text(model: kvcore.Model, mode: str) -> None:
    """16 prompts of their own, 5 rounds of one engine: 80 of 80 as alone."""
    requests = [request(f"r{i}", ids(24, i), 10, mode=mode) for i in range(16)]
    want = [alone(model, each).text for each in requests]
    engine = new_engine(model, prefix_reuse=False)
    for turn in range(5):
        heard = submit(engine, *(request(f"{turn}/{i}", ids(24, i), 10, mode=mode) for i in range(16)))
        while not all(each.done for each in heard):
            engine.step()
        assert [each.text for each in heard] == want


def test_S2_200_aborts_and_then_one_request(model: kvcore.Model) -> None:
    engine = new_engine(model, max_batch=8)
    for i in range(200):
        submit(engine, request(str(i), ids(12, i), 500))
        if i % 3:
            engine.step()
        engine.cancel(str(i))
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    (last,) = submit(engine, request("last", ids(12), 5))
    while not last.done:
        engine.step()
    assert last.text == alone(model, request("x", ids(12), 5)).text


def test_B159_cancelling_during_a_step_waits_for_its_end(model: kvcore.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it is asked for: before, within and after the products of a step, within a fold, within a donation."""
    want = {name: alone(model, request(name, ids(40, i), 30, mode="int8")).text for i, name in enumerate("abc")}
    for turn in range(12):
        engine = new_engine(model)
        heard = submit(engine, *(request(name, ids(40, i), 30, mode="int8") for i, name in enumerate("abc")))
        calls = [0]

        def count(inner: object, engine: Engine = engine, calls: list[int] = calls, turn: int = turn) -> object:
            def counted(*args: object, **settings: object) -> object:
                calls[0] += 1
                if calls[0] == 1 + 23 * turn:
                    engine.cancel("b")
                return inner(*args, **settings)  # type: ignore[operator]

            return counted

        with monkeypatch.context() as patched:
            patched.setattr(type(model.backend.ops), "silu", count(type(model.backend.ops).silu))
            patched.setattr(kvcore.Cache, "commit", count(kvcore.Cache.commit))
            patched.setattr(kvcore.Cache, "fork", count(kvcore.Cache.fork))
            while not all(each.done for each in heard):
                engine.step()
        assert heard[1].reason in ("cancelled", "length")
        assert want["b"].startswith(heard[1].text.rstrip("\ufffd")), "half a character at the end"
        assert [heard[0].text, heard[2].text] == [want["a"], want["c"]]
        assert engine.stats().kv["int8"].running == 0
