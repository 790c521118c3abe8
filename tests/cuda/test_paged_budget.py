"""Budgets on pages: pools within them, and steps beyond them that change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from caches import SPEC, TORCH_DEVICE, feed, live, no_attention, paged, storage_of

from kvcore.backends import Backend, load_backend
from kvcore.errors import CapacityError
from kvcore.layout import Cap
from kvcore.layout.footprint import bytes_needed, pages_needed
from kvcore.modes import MODES

ONE = replace(SPEC, num_layers=1)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return load_backend("cuda", TORCH_DEVICE)


@pytest.mark.parametrize("mode", ["fp16", "turbo3-asym", "turbo4-delegated"])
def test_pools_take_what_is_needed_and_no_more(backend: Backend, mode: str) -> None:
    """Prefill, hand-over and decode to 640 tokens without growth, in exactly the bytes that were reckoned."""
    spec = replace(ONE, mode=MODES[mode], capacity=640, batch=2)
    needed = bytes_needed(spec.shape(), 640, "paged")
    cache = paged(backend, replace(spec, budget=needed), attend=no_attention)
    assert cache.stats().kv_bytes_allocated == needed
    for count in (512, 120):
        feed(backend, cache, count)
    cache.begin_decode()
    for _ in range(8):
        feed(backend, cache, 1)
    assert cache.tokens == 640
    assert cache.stats().kv_bytes_allocated == needed


@pytest.mark.parametrize("mode", ["fp16", "turbo4", "turbo4-delegated"])
def test_a_step_beyond_the_budget_changes_nothing(backend: Backend, mode: str) -> None:
    spec = replace(ONE, mode=MODES[mode], capacity=300)
    cache = paged(backend, replace(spec, budget=bytes_needed(spec.shape(), 300, "paged")), attend=no_attention)
    feed(backend, cache, 300)
    before = live(cache)
    with pytest.raises(CapacityError, match=r"bytes with the others, the budget is .* give a larger --kv-cache-budget"):
        feed(backend, cache, 600)
    assert live(cache) == before
    cache.trim(100)
    feed(backend, cache, 80)
    cache.begin_decode()
    assert cache.tokens == 280


@pytest.mark.parametrize("mode", ["fp16", "int8", pytest.param("turbo4-delegated", marks=pytest.mark.full)])
def test_a_capped_cache_never_needs_more(backend: Backend, mode: str) -> None:
    """Chunks, single rows and holes among raw rows, in pools that may not grow."""
    spec = replace(ONE, mode=MODES[mode], capacity=1 << 40, cap=Cap(400))
    needed = bytes_needed(spec.shape(), 1 << 40, "paged")
    cache = paged(backend, replace(spec, budget=needed), attend=no_attention)
    for count in (300, 396, 17, 396):
        cache.begin_step(count)
        feed(backend, cache, count)
    cache.begin_decode()
    for count in (*[1] * 9, 396, 1):
        cache.begin_step(count)
        feed(backend, cache, count)
    assert cache.tokens == 400
    assert cache.stats().kv_bytes_allocated == needed
    assert sum(pages_needed(spec.shape(), 1 << 40)) <= 30
    assert storage_of(cache).tables.width < 100
