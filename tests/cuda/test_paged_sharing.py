"""Rows that go into pages from elsewhere and back, and pages that several caches hold."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from caches import SPEC, TORCH_DEVICE, feed, live, no_attention, paged, storage_of
from paging import to_numpy

from kvcore.attention import make_cache
from kvcore.backends import Backend, load_backend
from kvcore.cache import Cache
from kvcore.modes import MODES

TWO = replace(SPEC, num_layers=2, batch=2)
each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return load_backend("cuda", TORCH_DEVICE)


def pages(backend: Backend, mode: str) -> Cache:
    return paged(backend, replace(TWO, mode=MODES[mode]), attend=no_attention)


def contiguous(backend: Backend, mode: str) -> Cache:
    return make_cache(backend, replace(TWO, mode=MODES[mode]), kernels="graph")


def rows(cache: Cache) -> list[np.ndarray]:
    return [to_numpy(x) for layer in range(2) for x in cache.dense(layer)]


def same(a: Cache, b: Cache) -> None:
    assert (a.offset, live(a)) == (b.offset, live(b))
    assert all(np.array_equal(*pair) for pair in zip(rows(a), rows(b), strict=True))


def in_use(cache: Cache) -> list[int]:
    return [pool.pages - pool.free_pages for pool in storage_of(cache)._pools()]


@pytest.mark.parametrize(
    ("mode", "tokens"), [("fp16", 300), ("int8", 3), ("int8", 300), ("turbo3-asym", 300), ("turbo4-delegated", 300)]
)
def test_canonical_rows_go_from_one_storage_to_the_other(backend: Backend, mode: str, tokens: int) -> None:
    """And on from there; trimmed in the end, dropped in the middle, handed over or not."""
    changes = [lambda _: None, lambda c: c.trim(min(c.tokens, 290)), lambda c: c.drop(2, 1), lambda c: c.drop(0, 1)]
    for change in changes:
        for make, other in ((pages, contiguous), (contiguous, pages)):
            source = make(backend, mode)
            feed(backend, source, tokens)
            if tokens != 300 or mode != "turbo4-delegated":
                source.begin_decode()
            change(source)
            target, twin = other(backend, mode), make(backend, mode)
            for cache in (target, twin):
                cache.load(source.export())
                same(cache, source)
            if make is contiguous:
                feed(backend, source, 260, seed=1)
                feed(backend, twin, 260, seed=1)
                same(twin, source)


@each_mode
def test_a_fork_shares_pages_until_one_writes(backend: Backend, mode: str) -> None:
    source = pages(backend, mode)
    feed(backend, source, 400)
    source.begin_decode()
    before, used = rows(source), in_use(source)
    fork = source.fork()
    assert in_use(source) == used
    same(fork, source)
    feed(backend, fork, 1, seed=3)
    assert in_use(source)[0] == used[0] + 2, "the open page of each sequence was copied"
    feed(backend, fork, 200, seed=1)
    feed(backend, source, 130, seed=2)
    twin = pages(backend, mode)
    feed(backend, twin, 400)
    twin.begin_decode()
    feed(backend, twin, 130, seed=2)
    same(source, twin)
    assert all(np.array_equal(a[:, :, :256], b[:, :, :256]) for a, b in zip(rows(fork), before, strict=True))
    assert fork.offset == 601
    fork.trim(fork.tokens)
    del fork
    source.trim(source.tokens)
    assert in_use(source) == [0] * len(used)


def test_the_pages_of_a_fork_go_back_with_it(backend: Backend) -> None:
    source = pages(backend, "int8")
    feed(backend, source, 400)
    used = in_use(source)
    gc.disable()
    try:
        fork = source.fork()
        feed(backend, fork, 300, seed=1)
        assert in_use(source) != used
        del fork
        assert in_use(source) == used
    finally:
        gc.enable()


def test_a_source_may_go_before_its_fork(backend: Backend) -> None:
    source = pages(backend, "turbo4")
    feed(backend, source, 400)
    before, fork = rows(source), source.fork()
    del source
    assert all(np.array_equal(*pair) for pair in zip(rows(fork), before, strict=True))
    feed(backend, fork, 600, seed=1)
    fork.trim(fork.tokens)
    assert in_use(fork) == [0, 0]
