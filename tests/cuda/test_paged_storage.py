"""Paged storage by itself: growth, memory that lacks, errors, and any history against contiguous storage."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle import exact_attention, gaussian, relative_error

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from caches import SPEC, TORCH_DEVICE, feed, give, live, no_attention, paged, storage_of

from kvcore.attention import make_cache
from kvcore.backends import Backend, load_backend
from kvcore.backends.cuda.pool import PagePool
from kvcore.cache import Cache
from kvcore.errors import InputError, KvcoreError
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

# All rows raw, folded as they come, and folded at the hand-over.
each_way = pytest.mark.parametrize("mode", ["fp16", "int8", "turbo4-delegated"])

ONE = replace(SPEC, num_layers=1)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return load_backend("cuda", TORCH_DEVICE)


def pages_in_use(cache: Cache) -> int:
    pools = [pool for pool in (storage_of(cache).raw, storage_of(cache).native) if pool is not None]
    return sum(pool.pages - pool.free_pages for pool in pools)


def test_rows_of_another_shape_are_refused(backend: Backend) -> None:
    cache = paged(backend, SPEC)
    q, k, v = (backend.ops.zeros((1, heads, 3, 64), "float16") for heads in (2, 1, 1))
    with pytest.raises(InputError, match=r"V rows of shape \(1, 1, 2, 64\): this layer takes \(1, 1, 3, 64\)"):
        cache.layers[0].step(q, k, v[:, :, :2], 1.0)
    with pytest.raises(InputError, match="cannot trim 1 rows: the cache holds 0"):
        cache.trim(1)
    assert cache.offset == 0


def test_a_layer_may_not_get_fewer_rows_than_another(backend: Backend) -> None:
    cache = paged(backend, SPEC, attend=no_attention)
    q, k, v = (backend.ops.zeros((1, heads, 3, 64), "float16") for heads in (2, 1, 1))
    cache.layers[0].step(q, k, v, 1.0)
    with pytest.raises(ValueError, match="layer 1 is 3 rows behind, and gets 2"):
        cache.layers[1].step(q[:, :, :2], k[:, :, :2], v[:, :, :2], 1.0)
    cache.shorten(0)
    assert [layer.tokens for layer in cache.layers] == [0, 0]


@each_way
def test_pages_and_tables_grow_and_keep_what_they_hold(backend: Backend, mode: str) -> None:
    spec = replace(ONE, mode=MODES[mode], batch=2)
    small, large = (paged(backend, replace(spec, capacity=n), attend=no_attention) for n in (10, 4000))
    for seed, count in enumerate((100, 300)):
        feed(backend, small, count, seed)
        feed(backend, large, count, seed)
    for cache in (small, large):
        cache.begin_decode()
    assert live(small) == live(large)
    assert small.stats().kv_bytes_allocated < large.stats().kv_bytes_allocated
    for got, want in zip(small.dense(0), large.dense(0), strict=True):
        assert torch.equal(got, want)


@each_way
def test_a_reservation_is_enough_for_a_generation(backend: Backend, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Prefill in chunks of 512, then tokens one by one: nothing grows."""
    cache = paged(backend, replace(ONE, mode=MODES[mode], capacity=1027), attend=no_attention)
    monkeypatch.setattr(PagePool, "grow", lambda *_: pytest.fail("a pool has grown"))
    for count in (512, 512):
        feed(backend, cache, count)
    cache.begin_decode()
    for _ in range(3):
        feed(backend, cache, 1)
    assert cache.stats().rows_folded == (896 if MODES[mode].quantized else 0)


@each_way
def test_no_page_is_left_when_all_rows_are_gone(backend: Backend, mode: str) -> None:
    cache = paged(backend, replace(ONE, mode=MODES[mode], batch=2), attend=no_attention)
    feed(backend, cache, 400)
    cache.begin_decode()
    feed(backend, cache, 130)
    cache.trim(330)
    feed(backend, cache, 300)
    cache.trim(cache.offset)
    assert pages_in_use(cache) == 0
    feed(backend, cache, 200, seed=1)
    assert cache.stats().tokens == 200


def test_the_memory_of_a_cache_goes_with_it(backend: Backend) -> None:
    """At once, not when the garbage collector comes by."""
    cache = paged(backend, ONE, attend=no_attention)
    feed(backend, cache, 300)
    planes = [weakref.ref(plane) for plane in cache.arrays()]
    gc.disable()
    try:
        del cache
        assert [plane() for plane in planes] == [None] * 7  # K, V, raw K, raw V, two scales and the centres
    finally:
        gc.enable()


class OutOfMemory:
    """A device that has no room for more than ``pages`` pages in a pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
        self.pages, allocate = pages, PagePool._allocate

        def limited(pool: PagePool, pages: int) -> Any:
            if pages > self.pages:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")
            return allocate(pool, pages)

        monkeypatch.setattr(PagePool, "_allocate", limited)


@each_way
def test_a_lack_of_memory_is_one_line_and_leaves_the_cache_usable(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    memory = OutOfMemory(monkeypatch, pages=3)
    cache, fresh = (
        paged(backend, replace(SPEC, mode=MODES[mode], capacity=128), attend=no_attention) for _ in range(2)
    )
    feed(backend, cache, 250)
    before = live(cache), pages_in_use(cache)
    with pytest.raises(KvcoreError) as caught:
        feed(backend, cache, 400, seed=1)
    wanted = 2 * 650 * MODES[mode].layout(64).bytes_per_token("float16")
    assert str(caught.value) == (
        f"out of memory on {backend.device}: the pages of 650 tokens in mode {mode} take about {wanted} bytes, "
        "and they grow by a copy; use a smaller cache mode or a shorter context"
    )
    assert caught.value.exit_code == 1
    assert (live(cache), pages_in_use(cache)) == before
    memory.pages = 1000
    feed(backend, fresh, 250)
    for each in (cache, fresh):
        feed(backend, each, 400, seed=1)
        each.begin_decode()
    assert live(cache) == live(fresh)
    assert all(torch.equal(*pair) for pair in zip(cache.dense(0), fresh.dense(0), strict=True))


def test_memory_that_lacks_at_the_hand_over_leaves_it_to_be_made(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = paged(backend, replace(SPEC, mode=MODES["turbo4-delegated"]), attend=no_attention)
    feed(backend, cache, 700)
    memory = OutOfMemory(monkeypatch, pages=2)
    with pytest.raises(KvcoreError, match="mode turbo4-delegated"):
        cache.begin_decode()
    assert cache.stats().rows_folded == 0
    feed(backend, cache, 1)
    assert cache.stats().rows_folded == 0
    memory.pages = 100
    cache.begin_decode()
    assert cache.stats().rows_folded == 512


def test_memory_that_lacks_from_the_start(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    OutOfMemory(monkeypatch, pages=10)
    with pytest.raises(KvcoreError, match="the pages of 5000 tokens in mode fp16 take about"):
        paged(backend, replace(SPEC, mode=MODES["fp16"], capacity=5000))


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_nobody_attends_to_dropped_rows(backend: Backend, mode: str) -> None:
    """Holes within a page, over pages and in the raw tail: a step of one row and one of many see what is left."""
    cache = paged(backend, replace(ONE, mode=MODES[mode], capacity=1000))
    feed(backend, cache, 420)
    storage, (layer,) = storage_of(cache), cache.layers
    for first, count in ((4, 60), (100, 100), (150, 5)):
        storage.tables.drop(0, first, count)
    storage.shorten(storage.tokens)
    assert storage.tables.rows_folded(0) == (100 if mode == "turbo4" else 0)
    for seed, count in ((7, 1), (8, 40)):
        q, k, v = (gaussian(1, heads, count, 64, seed=seed + i, dtype="float16") for i, heads in enumerate((2, 1, 1)))
        out = layer.step(*map(backend.ops.asarray, (q, k, v)), 0.125)
        want = exact_attention(backend, layer, q, 0.125)
        assert layer.tokens == layer.view().tokens
        assert relative_error(backend.ops.to_numpy(out), want) <= 2e-3
    cache.commit()
    assert cache.offset == 420 - 165 + 41


@pytest.mark.parametrize("mode", [mode for mode in MODES if MODES[mode].quantized])
def test_rows_that_are_not_finite_are_counted(backend: Backend, mode: str) -> None:
    spec = replace(SPEC, mode=MODES[mode])
    caches = paged(backend, spec, attend=no_attention), make_cache(backend, spec, kernels="graph")
    k, v = (gaussian(1, 1, 300, 64, seed=seed, dtype="float16") for seed in range(2))
    k[0, 0, [2, 50, 290]] = np.nan  # of which the last stays raw
    v[0, 0, [7, 8]] = np.inf
    v[0, 0, 9] = 0
    for cache in caches:
        give(backend, cache, backend.ops.asarray(k), backend.ops.asarray(v))
        cache.commit()
        cache.begin_decode()
    assert live(caches[0]) == live(caches[1])
    assert caches[0].stats().nonfinite_rows == 2 * (2 * MODES[mode].k.startswith(("int8", "turbo")) + 2)


class Histories(RuleBasedStateMachine):
    """Appends, commits, trims, holes, forks, the hand-over, on pages and on contiguous rows: one layer, the same rows
    in both."""

    backend: Backend

    @initialize(mode=st.sampled_from(sorted(MODES)), recent=st.sampled_from([0, 40, 128]), sinks=st.integers(0, 5))
    def create(self, mode: str, recent: int, sinks: int) -> None:
        spec = replace(SPEC, mode=MODES[mode], num_layers=1, window=WindowPolicy(sinks, recent))
        self.pages = paged(self.backend, spec, attend=no_attention)
        self.contiguous = make_cache(self.backend, spec, kernels="graph")
        self.idle: list[tuple[Cache, list[Any]]] = []
        self.pending = self.seed = 0

    @property
    def caches(self) -> tuple[Cache, Cache]:
        return self.pages, self.contiguous

    @rule(count=st.sampled_from([1, 5, 16, 100, 128, 200, 300]))
    def append(self, count: int) -> None:
        self.seed += 1
        for cache in self.caches:
            feed(self.backend, cache, count, self.seed, commit=False)
        self.pending += count

    @rule()
    def commit(self) -> None:
        for cache in self.caches:
            cache.commit()
        self.pending = 0

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        accepted = data.draw(st.integers(0, self.pending))
        for cache in self.caches:
            cache.commit(accepted, self.pending)
        self.pending = 0

    @rule(share=st.floats(0, 1))
    def trim(self, share: float) -> None:
        count = int(share * self.pages.tokens)
        for cache in self.caches:
            cache.trim(count)
        self.pending = max(0, self.pending - count)

    @precondition(lambda self: not storage_of(self.pages).tables.due)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Of rows that are folded already: a hole in raw pages lets fewer rows fold at a time than elsewhere."""
        folded = self.contiguous.layers[0].rows_folded
        first = data.draw(st.integers(0, folded))
        count = data.draw(st.integers(0, folded - first))
        for cache in self.caches:
            cache.drop(first, count)

    @precondition(lambda self: not storage_of(self.pages).tables.due)
    @rule(keep_old=st.booleans())
    def fork(self, keep_old: bool) -> None:
        """Go on with one of two that share pages; the other is looked at in the end."""
        forks = [cache.fork() for cache in self.caches]
        idle = self.pages if not keep_old else forks[0]
        self.idle.append((idle, [rows.clone() for rows in idle.dense(0)]))
        if not keep_old:
            self.pages, self.contiguous = forks

    def teardown(self) -> None:
        if not hasattr(self, "pages"):
            return
        for cache, rows in self.idle:
            assert all(torch.equal(*pair) for pair in zip(cache.dense(0), rows, strict=True))
            cache.trim(cache.tokens)
        self.pages.trim(self.pages.tokens)
        assert pages_in_use(self.pages) == 0

    @rule()
    def begin_decode(self) -> None:
        for cache in self.caches:
            cache.begin_decode()

    @invariant()
    def both_hold_the_same(self) -> None:
        if not hasattr(self, "pages"):
            return
        assert live(self.pages) == live(self.contiguous)
        for got, want in zip(self.pages.dense(0), self.contiguous.dense(0), strict=True):
            assert got.shape == want.shape
            differs = ((got - want).norm(dim=-1) > 0.2 * want.norm(dim=-1)).sum()
            assert int(differs) == 0


def test_any_history_leaves_the_rows_that_contiguous_storage_holds(backend: Backend) -> None:
    machine = type("Machine", (Histories,), {"backend": backend})
    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=12, deadline=None))


@pytest.mark.timeout(600)  # a GPU compiles a kernel for each kind of row count and mode
@pytest.mark.full
def test_many_histories_leave_the_rows_that_contiguous_storage_holds(backend: Backend) -> None:
    machine = type("Machine", (Histories,), {"backend": backend})
    run_state_machine_as_test(machine, settings=settings(max_examples=200, stateful_step_count=20, deadline=None))
