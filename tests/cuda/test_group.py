"""Caches that share pools of pages, and step together whatever their lengths."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from caches import SPEC, TORCH_DEVICE, no_attention, storage_of
from oracle import gaussian, relative_error
from paging import to_numpy

from kvcore.backends import Backend, load_backend
from kvcore.backends.cuda.group import PagedGroup
from kvcore.backends.cuda.kernels.fold import Fold
from kvcore.backends.cuda.paged import PagedStorage
from kvcore.backends.cuda.pools import PagePools, pools_in_budget
from kvcore.cache import Cache, CacheGroup, CacheSpec, group_key
from kvcore.errors import CapacityError
from kvcore.modes import MODES

each_mode = pytest.mark.parametrize("mode", MODES)
some_modes = pytest.mark.parametrize(
    "mode", ["int8", *(pytest.param(mode, marks=pytest.mark.full) for mode in MODES if mode != "int8")]
)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return load_backend("cuda", TORCH_DEVICE)


def spec_of(mode: str, **changes: Any) -> CacheSpec:
    return replace(SPEC, mode=MODES[mode], **changes)


def pools(backend: Backend, spec: CacheSpec, pages: tuple[int, int] = (24, 12)) -> PagePools:
    return PagePools.create(spec.shape(), backend.device, Fold.create, pages, fixed=True)


def member(backend: Backend, spec: CacheSpec, shared: PagePools, **settings: Any) -> Cache:
    return Cache(backend.ops, spec, PagedStorage(spec.shape(), backend.device, pools=shared, **settings))


def rows(spec: CacheSpec, count: int, seed: int) -> list[Any]:
    """q, k and v of ``count`` new rows of one sequence."""
    heads = spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads
    return [gaussian(1, n, count, spec.head_dim, seed=3 * seed + i, dtype=spec.dtype) for i, n in enumerate(heads)]


def step(backend: Backend, unit: Any, parts: list[np.ndarray], layers: int) -> list[np.ndarray]:
    unit.begin_step(parts[0].shape[2])
    out = [
        unit.layers[layer].step(*(backend.ops.asarray(part) for part in parts), 0.125).cpu().float().numpy()
        for layer in range(layers)
    ]
    unit.commit()
    return out


def in_use(shared: PagePools) -> list[int]:
    return [used for _, _, used, _ in shared.counts()]


@pytest.mark.parametrize(
    ("mode", "lengths"),
    [
        ("turbo4", (255, 0)),
        *(pytest.param(mode, (1, 130, 255, 0), marks=pytest.mark.full) for mode in ("fp16", "int8", "turbo3-asym")),
    ],
)
def test_a_group_computes_what_its_members_compute_alone(backend: Backend, mode: str, lengths: tuple[int, ...]) -> None:
    """Sequences of unequal length, over a fold; members leave, and one steps alone. The rows are equal; how many
    splits attention makes depends on the batch, so that its sums differ by rounding."""
    spec = spec_of(mode, num_layers=1)
    shared, apart = pools(backend, spec), pools(backend, spec)
    together, alone = ([member(backend, spec, each) for _ in lengths] for each in (shared, apart))
    for i, count in enumerate(lengths):
        for cache in (together[i], alone[i]):
            if count:
                step(backend, cache, rows(spec, count, i), 1)
    for turn, members in enumerate((range(len(lengths)), range(1, len(lengths)), range(len(lengths)))):
        if turn and len(lengths) == 2:
            break
        new = [rows(spec, 1, 10 * turn + i) for i in members]
        group = CacheGroup([together[i] for i in members])
        assert group.offsets == [together[i].offset for i in members]
        got = step(backend, group, [np.concatenate(parts) for parts in zip(*new, strict=True)], 1)
        for at, i in enumerate(members):
            (want,) = step(backend, alone[i], new[at], 1)
            assert relative_error(got[0][at : at + 1], want) < 2e-3
        if turn == 1:
            for cache in (together[0], alone[0]):
                step(backend, cache, rows(spec, 1, 99), 1)
    for a, b in zip(together, alone, strict=True):
        assert (a.offset, a.rows_folded, a.stats()) == (b.offset, b.rows_folded, b.stats())
        for x, y in zip(a.dense(0), b.dense(0), strict=True):
            np.testing.assert_array_equal(to_numpy(x), to_numpy(y))
    assert in_use(shared) == in_use(apart)


@some_modes
def test_pages_go_back_when_members_go(backend: Backend, mode: str) -> None:
    spec = spec_of(mode)
    shared = pools(backend, spec)
    caches = [member(backend, spec, shared, attend=no_attention) for _ in range(3)]
    for i, cache in enumerate(caches):
        step(backend, cache, rows(spec, 300, i), 2)
        cache.begin_decode()
    held = [storage_of(cache).pages_held for cache in caches]
    assert in_use(shared) == [sum(pages) for pages in zip(*held, strict=True)][: len(in_use(shared))]
    fork = caches[0].fork()
    assert in_use(shared) == [sum(pages) for pages in zip(*held, strict=True)][: len(in_use(shared))]
    assert [each for *_, each in shared.counts()] == list(held[0])[: len(in_use(shared))]
    del caches, cache, fork
    gc.collect()  # compiling a kernel leaves a cycle with the frames that asked for it
    assert in_use(shared) == [0] * len(in_use(shared))


def test_a_pool_of_a_fixed_size_does_not_grow(backend: Backend) -> None:
    spec = spec_of("int8")
    shared = pools(backend, spec, (3, 2))
    first, second = (member(backend, spec, shared, attend=no_attention) for _ in range(2))
    step(backend, first, rows(spec, 250, 0), 2)
    with pytest.raises(CapacityError, match="out of raw KV pages: 2 needed, 1 of 3 free"):
        step(backend, second, rows(spec, 200, 0), 2)
    assert (second.offset, in_use(shared)) == (0, [2, 0])
    step(backend, second, rows(spec, 100, 0), 2)
    assert in_use(shared) == [3, 0]


def test_a_group_that_finds_no_page_leaves_every_member_as_it_was(backend: Backend) -> None:
    spec = spec_of("fp16")
    shared = pools(backend, spec, (3, 0))
    caches = [member(backend, spec, shared, attend=no_attention) for _ in range(3)]
    for i, cache in enumerate(caches):
        step(backend, cache, rows(spec, 128 - (i == 0), i), 2)
    group = CacheGroup(caches)
    undo = group.checkpoint()
    new = [np.concatenate(parts) for parts in zip(*(rows(spec, 1, i) for i in range(3)), strict=True)]
    with pytest.raises(CapacityError, match="out of raw KV pages"):
        step(backend, group, new, 2)
    undo()
    assert [cache.offset for cache in caches] == [127, 128, 128]
    step(backend, caches[0], rows(spec, 1, 0), 2)


def test_what_does_not_share_pools_does_not_step_together(backend: Backend) -> None:
    spec = spec_of("fp16")
    shared = pools(backend, spec)
    own = Cache(backend.ops, spec, PagedStorage(spec.shape(), backend.device))
    cache = member(backend, spec, shared)
    assert group_key(own) is None
    assert group_key(cache) is shared
    with pytest.raises(ValueError, match="pages of one pool"):
        PagedGroup([storage_of(cache), storage_of(own)])


@each_mode
def test_a_budget_is_what_the_pools_take_together(backend: Backend, mode: str) -> None:
    """Half of it at most for raw pages in a mode that quantizes; the rest of a page is lost."""
    spec = spec_of(mode)
    raw_size, size = pools(backend, spec).page_bytes()
    budget = 40 * raw_size + 3
    made = pools_in_budget(spec.shape(), backend.device, Fold.create, budget, raw_pages=7)
    allocated = sum(pool.allocated_bytes for pool in made.all())
    assert budget - max(raw_size, size) < allocated <= budget
    assert made.raw.pages == (40 if mode == "fp16" else 20 if MODES[mode].delegated else 7)
    with pytest.raises(
        CapacityError, match=f"a KV budget of 100 bytes holds no page: a raw one takes {raw_size} bytes"
    ):
        pools_in_budget(spec.shape(), backend.device, Fold.create, 100, raw_pages=7)
