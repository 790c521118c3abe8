"""Paged storage: pools of pages for all layers, block tables, and the launches of a step.

A step appends and attends in each layer, and folds once for all layers when it is committed. The host knows every
length, so nothing here waits for the device but `stats` and `view`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcore.backends.cuda.attend import Pages
from kvcore.backends.cuda.attention import MAX_DECODE_ROWS, attend_rows
from kvcore.backends.cuda.block_tables import BlockTables
from kvcore.backends.cuda.capped import capped
from kvcore.backends.cuda.kernels.append import rope_angles
from kvcore.backends.cuda.kernels.fold import Fold
from kvcore.backends.cuda.native import PAGE, NativeLayout
from kvcore.backends.cuda.paged_layer import LayerState, PagedLayer, PagedLayers, append_rows, by_position, on_device
from kvcore.backends.cuda.paged_load import page_sizes, write_layer
from kvcore.backends.cuda.paged_view import count_nonfinite
from kvcore.backends.cuda.pool import PagePool
from kvcore.backends.cuda.pool_memory import make_free, or_say_why
from kvcore.backends.cuda.pools import PagePools
from kvcore.backends.cuda.prefill import PrefillPlan
from kvcore.errors import InputError
from kvcore.layout import CacheShape, CacheStats, Cap, KVView, visible
from kvcore.layout.footprint import pages_needed

__all__ = ["PagedLayer", "PagedStorage", "append_rows", "by_position", "on_device"]

FIRST_CAPACITY = 256  # tokens, where the caller expects no number


class PagedStorage:
    """A `kvcore.cache.Storage` in pages on one device, for ``shape.batch`` sequences of equal length.

    ``attend`` and ``make_fold`` are what the registry chose: `attend_rows` and `Fold.create`. With ``pools`` the pages
    are shared with other storages of that shape, else the pools are its own and grow. Raises UnsupportedError
    for a layout without native pages, KvcoreError where the memory for ``shape.capacity`` tokens is not there.
    """

    def __init__(
        self,
        shape: CacheShape,
        device: str,
        *,
        attend: Callable[..., Tensor] = attend_rows,
        make_fold: Callable[[NativeLayout, int, str], Fold] = Fold.create,
        pools: PagePools | None = None,
    ) -> None:
        self.shape, self.device, self.attend = shape, device, attend
        expected = shape.capacity or FIRST_CAPACITY
        with self._on_device(), self._or_say_why(expected):
            self.pools = pools or PagePools.create(shape, device, make_fold, pages_needed(shape, expected))
            self.raw, self.native, self.fold = self.pools.raw, self.pools.native, self.pools.fold
            self.tables = BlockTables(
                shape.batch,
                PAGE * sum(pages_needed(replace(shape, batch=1), expected)),  # more entries than either table gets
                shape.window,
                self.raw,
                self.native,
                device,
                delegated=shape.delegated,
            )
            self._states = [
                LayerState(self.pools.k_matrix(layer), self.pools.rotations[layer]) for layer in range(shape.num_layers)
            ]
        self._advanced = 0  # rows of every layer that no layer's state counts yet
        self._start()

    def _start(self) -> None:
        """What no two storages share; pages go back to their pools with the storage."""
        self.bindings = 0  # how often planes or tables have changed their addresses
        self._inv_freq: Tensor | None = None
        self._plans: dict[Cap | None, PrefillPlan] = {}  # of the step under way
        self._stale = False  # whether rows changed since the device's tables were written
        for pool in self._pools():
            pool.users.add(self)
        weakref.finalize(self, self.tables.close).atexit = False
        self.bind()

    def _pools(self) -> tuple[PagePool, ...]:
        return self.pools.all()

    def fork(self) -> PagedStorage:
        """The same rows in the same pages; a page that both hold is copied by the first one that writes to it."""
        other = copy(self)
        other.tables = self.tables.copy()
        other._states = [replace(state) for state in self._states]
        for old, new in zip(self._states, other._states, strict=True):
            new.tokens = old.tokens
        other._start()
        other._stale = True
        return other

    @property
    def layers(self) -> Sequence[PagedLayer]:
        return PagedLayers(self, self._states)

    @property
    def tokens(self) -> int:
        """Live rows of each sequence, those of a step under way included."""
        return self.tables.length(0)

    @property
    def layer_tokens(self) -> int:
        """Live rows of the last layer."""
        return self._states[-1].tokens + self._advanced

    @property
    def rows_folded(self) -> int:
        return self.tables.rows_folded(0)

    @property
    def live_bytes(self) -> int:
        shape, folded = self.shape, self.rows_folded
        raw = self.tokens - folded + self.tables.rows_sinks(0)
        rows = shape.batch * shape.num_layers * shape.num_kv_heads
        raw_bytes = shape.layout.raw_bytes_per_token(shape.dtype)
        pages = len({entry.page for entry in self.tables.entries(0)[0]})
        return rows * (raw * raw_bytes + shape.layout.folded_bytes(shape.dtype, folded, pages))

    def start_step(self, count: int) -> None:
        """Room for ``count`` new rows of every sequence, on the host and in the device's tables.

        KvcoreError where memory is short: the cache is as it was then, and goes on with fewer rows.
        """
        self.extend(count)
        self.tables.upload()
        self._stale = False
        self._plans = {}

    def way(self, count: int, window: int | None) -> tuple[PrefillPlan | None, int | None]:
        """How a layer with a sliding ``window`` attends in a step of ``count`` rows: the plan, where it takes one, and
        the window that hides rows. Kernels count slots; where these are not as far apart as rows, a plan tells them."""
        window, keep = visible(self.shape.cap, window, self.tokens)
        if window is None or (keep == 0 and all(map(self.tables.solid, range(self.shape.batch)))):
            return (self._plan(count, None) if count > MAX_DECODE_ROWS else None), window
        return self._plan(count, Cap(window + keep, keep)), window

    def angles(self, inv_freq: np.ndarray, count: int) -> tuple[Tensor, Tensor]:
        """Begin a step of ``count`` tokens: cos and sin [B · count, D/2] of their positions, computed on the device."""
        self.start_step(count)
        return self.rope_angles(inv_freq, count)

    def advance(self, count: int) -> None:
        """A step of ``count`` rows has been launched in every layer, by a CUDA graph."""
        self._advanced += count

    def set_layer_tokens(self, tokens: Sequence[int]) -> None:
        """What each layer holds, as after a step that was captured and not run."""
        self._advanced = 0
        for state, count in zip(self._states, tokens, strict=True):
            state.tokens = count

    def rope_angles(self, inv_freq: np.ndarray, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the step under way: one launch, which reads positions on the device."""
        if self._inv_freq is None:
            self._inv_freq = torch.from_numpy(inv_freq).to(self.device)
        with self._on_device():
            return rope_angles(self._inv_freq, self.tables.positions, count)

    def commit(self) -> None:
        """Fold what is due: at most one launch, for all layers and sequences."""
        t = self.tables
        if t.due:
            assert self.fold is not None
            assert self.native is not None
            if self._stale:
                t.upload()
                self._stale = False
            tables = t.raw_table, t.table, t.lengths, t.folded, t.fold_at
            with self._on_device():
                self.fold(self.raw.planes, self.native.planes, *tables, pages=t.due)
        t.commit()

    def hand_over(self) -> None:
        """Fold from now on, and what is due at once."""
        rows = range(self.shape.batch)
        for row in rows:
            self.tables.hand_over(row)
        try:
            self.extend(0)
            self._stale = True
            self.commit()
        except BaseException:
            for row in rows:
                self.tables.hand_over(row, undo=True)
                self.tables.trim(row, 0)  # gives back the pages that were to come
            raise

    def trim(self, count: int) -> None:
        """Forget the newest ``count`` rows: see `BlockTables.trim`. InputError where there are fewer."""
        if not 0 <= count <= self.tokens:
            raise InputError(f"cannot trim {count} rows: the cache holds {self.tokens}")
        for row in range(self.shape.batch):
            self.tables.trim(row, count)
        self.set_layer_tokens([min(state.tokens + self._advanced, self.tokens) for state in self._states])
        self._stale = True

    def drop(self, first: int, count: int) -> None:
        """Forget ``count`` rows from live row ``first`` on: see `BlockTables.drop`. No row moves."""
        if first < 0 or count < 0 or first + count > self.tokens:
            raise InputError(f"cannot drop {count} rows from row {first} on: the cache holds {self.tokens}")
        t = self.tables
        for row in range(self.shape.batch):
            if max(map(len, t.entries(row))) >= t.width:
                with self._or_say_why(self.tokens):
                    t.widen(t.width * 3 // 2 + 1)
                self.bind()
            t.drop(row, first, count)
        self.set_layer_tokens([self.tokens] * len(self._states))
        self._stale = True

    def place(self, offset: int) -> None:
        for row in self._rows():
            self.tables.place(row, offset)
        self._stale = True

    def load(self, views: Sequence[KVView], first_rows: int, folding: bool) -> None:
        """Take canonical rows into this empty storage: see `kvcore.cache.RowStorage.load`."""
        view, rows = views[0], range(self.shape.batch)
        sinks, raw = view.sinks, page_sizes(view.tokens - view.folded)
        native = list(view.page_rows) or page_sizes(view.folded)  # rows stay with their centre
        with self._on_device(), self._or_say_why(view.tokens):
            for pool, pages in ((self.native, len(native)), (self.raw, len(raw) + (sinks > 0))):
                make_free(pool, pages * self.shape.batch, self.pools, self.shape.budget)
            self.tables.widen(max(len(native), len(raw)))
            self.bind()
            for row in rows:
                self.tables.fill(row, native, raw, sinks=sinks > 0, first_rows=sinks if view.folded else first_rows)
                self.tables.hand_over(row, undo=not folding)
            for layer, each in enumerate(views):
                write_layer(self.shape, self.tables, self.raw, self.native, layer, each)
        self.set_layer_tokens([self.tokens] * len(self._states))
        self._stale = True

    def shorten(self, tokens: int) -> None:
        self.trim(max(0, self.tokens - tokens))

    def stats(self) -> CacheStats:
        """Counts as the contiguous storage's: live rows cost their stored form, and allocated is what the pools have.
        Waits for the device."""
        shape, t = self.shape, self.tables
        folded, sinks = t.rows_folded(0), t.rows_sinks(0)
        raw = self.tokens - folded + sinks
        rows = shape.batch * shape.num_layers * shape.num_kv_heads
        return CacheStats(
            tokens=self.layer_tokens,
            rows_raw=raw,
            rows_folded=folded,
            kv_bytes=self.live_bytes,
            kv_bytes_raw=rows * self.tokens * shape.layout.raw_bytes_per_token(shape.dtype),
            kv_bytes_allocated=sum(pool.allocated_bytes for pool in self._pools()),
            nonfinite_rows=0 if self.native is None else count_nonfinite(shape, self.tables, self.native),
        )

    def arrays(self) -> list[Tensor]:
        native = {} if self.native is None else self.native.planes
        return [*self.raw.planes.values(), *native.values()]

    # Steps with others

    @property
    def group_key(self) -> object:
        """Storages of one sequence each step together where they share their pools."""
        return self.pools if self.shape.batch == 1 and self.raw.fixed else None

    def group(self, storages: Sequence[PagedStorage]) -> Any:
        """These storages, this one among them, as a `PagedGroup`."""
        from kvcore.backends.cuda.group import PagedGroup

        return PagedGroup(storages)

    def state(self, layer: int) -> LayerState:
        return self._states[layer]

    def outdated(self) -> None:
        """Rows changed since the device's tables were written."""
        self._stale = True

    @property
    def pages_held(self) -> tuple[int, int]:
        """Raw and native pages, whoever else holds them."""
        return self.tables.pages_held

    def page_numbers(self) -> tuple[set[int], set[int]]:
        """The raw and the native pages that it holds."""
        raw, native = zip(*map(self.tables.pages, self._rows()), strict=True)
        return set().union(*raw), set().union(*native)

    def _rows(self) -> range:
        return range(self.shape.batch)

    # Memory

    def extend(self, count: int) -> None:
        if count == 1 and self.shape.batch == 1 and self.tables.extend_within(0):
            return
        new = dict.fromkeys(range(self.shape.batch), count)
        needs, t = self.tables.needs(new), self.tables
        with self._or_say_why(self.tokens + count):
            for pool, wanted in ((self.native, needs.native), (self.raw, needs.raw)):
                make_free(pool, wanted, self.pools, self.shape.budget)
            if needs.width > t.width:
                t.widen(max(needs.width, t.width * 3 // 2))
                self.bind()
        t.extend(new)

    def bind(self) -> None:
        """Give each layer its share of the planes and tables, where these have changed their addresses."""
        self.bindings += 1
        t = self.tables
        for i, state in enumerate(self._states):
            state.pages = self.pages_of(
                i,
                table=t.table,
                raw_table=t.raw_table,
                ranges=t.ranges,
                raw_ranges=t.raw_ranges,
                sink_page=t.sink_pages,
                sinks=t.sinks,
                folded=t.folded,
                length=t.lengths,
            )

    def pages_of(self, layer: int, **tables: Tensor) -> Pages:
        """A layer's planes, with these tables."""
        raw = self.raw.planes
        folded = raw if self.native is None else self.native.planes  # without folded rows nothing reads them
        k_scale, v_scale = (folded.get(f"{part}_scale", folded[part])[layer] for part in "kv")
        return Pages(
            k=folded["k"][layer],
            v=folded["v"][layer],
            k_scale=k_scale,
            v_scale=v_scale,
            raw_k=raw["k"][layer],
            raw_v=raw["v"][layer],
            k_center=folded["k_center"][layer] if "k_center" in folded else None,
            **tables,
        )

    def _or_say_why(self, tokens: int) -> AbstractContextManager[None]:
        return or_say_why(self.shape, self.device, tokens)

    def _plan(self, count: int, cap: Cap | None) -> PrefillPlan:
        """The plan of the step under way, the same for every layer with the same rule."""
        if cap not in self._plans:
            rows = range(self.shape.batch)
            host, live = [self.tables.slots(row) for row in rows], [self.tables.live(row) for row in rows]
            plan = PrefillPlan.create(host, count, self.device, live)
            self._plans[cap] = plan if cap is None else capped(plan, cap)
        return self._plans[cap]

    def _on_device(self) -> AbstractContextManager[object]:
        """Triton launches on torch's current device."""
        return on_device(self.device)
