"""Budgets: what a cache needs at most, checked against what storage allocates, and what happens beyond it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from oracle import SMALL, gaussian

from kvcore.attention import make_cache
from kvcore.backends import Backend
from kvcore.cache import Cache, CacheSpec
from kvcore.errors import CapacityError
from kvcore.layout import Cap, WindowPolicy
from kvcore.layout.footprint import bytes_needed, live_bytes, peak_live_bytes, tokens_in
from kvcore.modes import MODES

each_mode = pytest.mark.parametrize("mode", MODES)
BOUNDARY = WindowPolicy(recent_tokens=32, page_size=32, boundary_layers=1)


def spec(mode: str, **settings: object) -> CacheSpec:
    return replace(CacheSpec(MODES[mode], 3, 4, 2, 64, "float16", SMALL), **settings)


def step(backend: Backend, cache: Cache, count: int) -> int:
    """One step with random rows; bytes that are allocated after it."""
    cache.begin_step(count)
    rows = backend.ops.asarray(gaussian(cache.spec.batch, 2, count, 64, dtype="float16"))
    for layer in cache.layers:
        layer.append(rows, rows)
    cache.commit()
    return cache.stats().kv_bytes_allocated


@pytest.mark.parametrize("window", [WindowPolicy(), SMALL, BOUNDARY], ids=["128", "32", "boundary"])
@pytest.mark.parametrize("cap", [None, Cap(300), Cap(100, 0)], ids=str)
@each_mode
def test_no_history_allocates_more_than_is_needed(
    reference: Backend, mode: str, cap: Cap | None, window: WindowPolicy
) -> None:
    """Prefill in chunks of up to 512, hand-over, decode, trims into pages: to 900 tokens and not beyond."""
    limited = spec(mode, window=window, cap=cap, capacity=900, batch=2)
    needed = bytes_needed(limited.shape(), 900, "contiguous")
    cache = make_cache(reference, replace(limited, budget=needed))
    assert cache.limit is None or cache.limit >= 900
    sizes = [step(reference, cache, min(count, cache.step_limit or count)) for count in (512, 200)]
    cache.begin_decode()
    sizes += [step(reference, cache, 1) for _ in range(9)]
    cache.trim(min(cache.tokens, 401) // 2)
    sizes += [step(reference, cache, 16) for _ in range(9)]
    assert max(sizes) <= needed
    assert 0.2 * needed < max(sizes)


@each_mode
def test_the_limit_is_the_last_number_of_tokens_that_fits(mode: str) -> None:
    shape = spec(mode).shape()
    for storage in ("contiguous", "paged"):
        for budget in (400_000, 1_234_567, 50_000_000):
            limit = tokens_in(shape, budget, storage)
            assert limit is not None
            assert bytes_needed(shape, limit, storage) <= budget < bytes_needed(shape, limit + 1, storage)


@pytest.mark.parametrize("storage", ["contiguous", "paged"])
@each_mode
def test_what_is_needed_is_what_lives_and_little_more(mode: str, storage: str) -> None:
    """At 32k tokens within 10%, but for a delegated mode on pages: its raw pages stay when the prompt is folded."""
    shape = spec(mode, window=WindowPolicy()).shape()
    needed, peak = bytes_needed(shape, 32768, storage), peak_live_bytes(shape, 32768)
    assert live_bytes(shape, 32768) <= peak <= needed
    assert needed <= (1.9 if mode == "turbo4-delegated" else 1.1) * peak


def test_a_capped_cache_needs_no_more_however_long_it_runs() -> None:
    for mode in MODES:
        shape = spec(mode, cap=Cap(1000)).shape()
        for storage in ("contiguous", "paged"):
            assert bytes_needed(shape, 1 << 35, storage) == bytes_needed(shape, 5000, storage)
            assert tokens_in(shape, bytes_needed(shape, 5000, storage), storage) is None


def test_beyond_the_budget_nothing_has_changed(backend: Backend) -> None:
    limited = spec("int8", dtype="float32")
    cache = make_cache(backend, replace(limited, budget=bytes_needed(limited.shape(), 150, "contiguous")))
    assert cache.limit is not None
    assert 150 <= cache.limit < 160
    with pytest.raises(CapacityError) as caught:
        cache.require(1000)
    needed = bytes_needed(limited.shape(), 1000, "contiguous")
    assert str(caught.value).startswith(
        f"1000 tokens take {needed} bytes of cache in mode int8, the budget is {cache.spec.budget} bytes and holds "
        f"{cache.limit} tokens: give a larger --kv-cache-budget"
    )
    assert caught.value.exit_code == 1
    rows = backend.ops.asarray(np.zeros((1, 2, cache.limit, 64), np.float32))
    cache.begin_step(cache.limit)
    for layer in cache.layers:
        layer.append(rows, rows)
    cache.commit()
    with pytest.raises(CapacityError):
        cache.begin_step(1)
    assert cache.tokens == cache.limit
    cache.trim(20)
    cache.begin_step(20)


def test_a_budget_for_nothing(reference: Backend) -> None:
    with pytest.raises(
        CapacityError, match="a KV budget of 100 bytes holds no token: in mode fp16 the first takes 153"
    ):
        make_cache(reference, spec("fp16", budget=100))


@pytest.mark.parametrize("change", [lambda c: c.fork(), lambda c: c], ids=["fork", "itself"])
def test_a_cache_that_is_loaded_is_within_its_budget(reference: Backend, change: Callable[[Cache], Cache]) -> None:
    source = make_cache(reference, spec("int8"))
    step(reference, source, 200)
    for tokens, fits in ((200, True), (150, False)):
        target = make_cache(reference, spec("int8", budget=bytes_needed(spec("int8").shape(), tokens, "contiguous")))
        if fits:
            target.load(source.export())
            assert change(target).limit == target.limit
            assert target.stats().kv_bytes_allocated <= target.spec.budget
        else:
            with pytest.raises(CapacityError, match="200 tokens take"):
                target.load(source.export())
