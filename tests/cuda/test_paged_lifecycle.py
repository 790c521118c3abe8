"""The same histories on pages: rows, positions, bytes and reference counts agree, and no page leaks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from lifecycle import DIM, Lifecycle, run

pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from caches import TORCH_DEVICE, give, no_attention, paged, storage_of

from kvcore.attention import convert_cache
from kvcore.backends import load_backend
from kvcore.backends.cuda.pool import PagePool
from kvcore.cache import Cache, CacheSpec
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

PAGE = 128


class PagedLifecycle(Lifecycle):
    """Steps are committed at once or in part, and never attend. Pages with holes among their raw rows fold as they are:
    how many rows that are is read from the cache then, until its rows are stored anew."""

    @initialize(
        mode=st.sampled_from(sorted(set(MODES) - {"turbo3-asym"})),  # whose pages need wider heads
        recent=st.sampled_from([0, 5, 128]),
        sinks=st.sampled_from([0, 3]),
    )
    def create(self, mode: str, recent: int, sinks: int) -> None:
        self.window, self.mode, self.first = WindowPolicy(sinks, recent), MODES[mode], sinks
        self.folding = self.mode.quantized and not self.mode.delegated
        self.solid = True  # no holes among raw rows
        self.pools: list[PagePool] = []
        self.cache = self._empty()

    def _empty(self) -> Cache:
        spec = CacheSpec(self.mode, 1, 2, 1, DIM, "float16", self.window)
        return self._seen(paged(self.backend, spec, attend=no_attention))

    def _seen(self, cache: Cache) -> Cache:
        self.pools += storage_of(cache)._pools()
        return cache

    def _step(self, k: Any, v: Any) -> None:
        give(self.backend, self.cache, k, v)

    @rule(count=st.integers(1, 200))
    def append(self, count: int) -> None:
        self._give(count)
        self.cache.commit()
        self.fold()

    @rule(count=st.integers(1, 16), share=st.floats(0, 1))
    def accept(self, count: int, share: float) -> None:
        self._give(count)
        accepted = int(share * count)
        self.cache.commit(accepted, count)
        self._trimmed(count - accepted)
        self.fold()

    def commit(self) -> None: ...

    def attend(self) -> None: ...

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(self.rows)))
        count = data.draw(st.integers(0, len(self.rows) - first))
        if count and first + count < len(self.rows):
            self.solid &= first + count <= self.folded
        self._drop(first, count)

    @rule()
    def restore(self) -> None:
        self._restore()
        self.solid = True

    def fold(self) -> None:
        """As a list would; where holes are among raw rows, as the cache has it."""
        super().fold()
        if not self.solid:
            self.folded = self.cache.stats().rows_folded
            page_rows = self.cache.layers[0].view().page_rows  # of centred keys
            self.pages = [page for page, rows in enumerate(page_rows) for _ in range(rows)]
            self.sinks = storage_of(self.cache).tables.rows_sinks(0)
        self.solid |= not self.rows

    @precondition(lambda self: not self.pending)
    @rule(mode=st.sampled_from(sorted(set(MODES) - {"turbo3-asym"})))
    def convert(self, mode: str) -> None:
        self._convert(mode)
        self.solid = True

    def _converted(self, mode: str) -> Cache:
        """On a backend that says it had a GPU, so that the registry takes pages."""
        gpu = replace(self.backend, arch="sm_80")
        made = convert_cache(gpu, self.cache, MODES[mode])
        storage_of(made).attend = no_attention
        return self._seen(made)

    def caches(self) -> list[Cache]:
        donated = [cache for prefixes in self.donors for cache in prefixes]
        return [self.cache, *(cache for cache, _ in self.idle), *donated]

    @invariant()
    def the_device_s_positions_are_the_cache_s(self) -> None:
        for cache in self.caches():
            assert storage_of(cache).tables.host_state()[2] == cache.offset

    @invariant()
    def references_are_those_of_the_tables(self) -> None:
        counted: Counter[tuple[int, int]] = Counter()
        for cache in self.caches():
            storage = storage_of(cache)
            native, raw = storage.tables.entries(0)
            sink = storage.tables.sink_page(0)
            counted.update(
                (id(storage.raw), page) for page in [*(e.page for e in raw), *([] if sink is None else [sink])]
            )
            counted.update((id(storage.native), entry.page) for entry in native)
        for pool in self.pools:
            want = [counted[id(pool), page] for page in range(pool.pages)]
            assert [pool.references(page) for page in range(pool.pages)] == want

    def teardown(self) -> None:
        super().teardown()
        self.idle, self.donors = [], []
        self.cache.trim(self.cache.tokens)
        assert all(pool.free_pages == pool.pages for pool in self.pools), "a page leaks"


def test_a_raw_page_with_a_hole_folds_as_it_is() -> None:
    """Its centre is that of its live rows."""
    machine = type("Machine", (PagedLifecycle,), {"backend": load_backend("cuda", TORCH_DEVICE)})()
    machine.window, machine.mode, machine.first = WindowPolicy(0, 0), MODES["turbo4"], 0
    machine.folding, machine.solid, machine.pools = True, True, []
    machine.cache = machine._empty()
    machine.append(185)
    machine.solid = False
    machine._drop(122, 50)
    machine.append(131)
    machine.regions_are_those_of_the_model()
    machine.every_row_is_where_and_what_it_should_be()
    assert machine.pages.count(0) == 122
    assert 0 < machine.pages.count(1) < PAGE


@pytest.mark.timeout(600)  # a GPU compiles a kernel for each kind of row count and mode
def test_any_history_on_pages_leaves_the_rows_that_a_list_would_hold() -> None:
    run(PagedLifecycle, load_backend("cuda", TORCH_DEVICE), 6, steps=12)


@pytest.mark.timeout(600)  # a GPU compiles a kernel for each kind of row count and mode
@pytest.mark.full
def test_many_histories_on_pages_leave_the_rows_that_a_list_would_hold() -> None:
    run(PagedLifecycle, load_backend("cuda", TORCH_DEVICE), 60)
