"""Paged storage: pools of pages for all layers, block tables, and the launches of a step.

A step appends and attends in each layer, and folds once for all layers when it is committed. The host knows every
length, so nothing here waits for the device but `stats` and `view`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvcore.backends.cuda.attend import Pages, VRotation
from kvcore.backends.cuda.attention import MAX_DECODE_ROWS, attend_rows
from kvcore.backends.cuda.block_tables import BlockTables
from kvcore.backends.cuda.capped import capped
from kvcore.backends.cuda.kernels.append import append
from kvcore.backends.cuda.kernels.fold import Fold
from kvcore.backends.cuda.native import PAGE, NativeLayout
from kvcore.backends.cuda.paged_load import page_sizes, write_layer
from kvcore.backends.cuda.paged_view import count_nonfinite, view_layer
from kvcore.backends.cuda.pool import PagePool
from kvcore.backends.cuda.prefill import PrefillPlan
from kvcore.errors import InputError, KvcoreError
from kvcore.layout import CacheShape, CacheStats, KVView

FIRST_CAPACITY = 256  # tokens, where the caller expects no number
CHUNK = 512  # rows of a prefill step that a reservation leaves raw pages for


@dataclass(slots=True)
class LayerState:
    """One layer's share: R_K as `append` takes it, R_V (None: not rotated), its planes with the tables, its rows."""

    k_matrix: Tensor | None
    v_rotation: VRotation | None
    tokens: int = 0
    pages: Pages = field(init=False)


class PagedStorage:
    """A `kvcore.cache.Storage` in pages on one device, for ``shape.batch`` sequences of equal length.

    ``attend`` and ``make_fold`` are what the registry chose: `attend_rows` and `Fold.create`. Raises UnsupportedError
    for a layout without native pages, KvcoreError where the memory for ``shape.capacity`` tokens is not there.
    """

    def __init__(
        self,
        shape: CacheShape,
        device: str,
        *,
        attend: Callable[..., Tensor] = attend_rows,
        make_fold: Callable[[NativeLayout, int, str], Fold] = Fold.create,
    ) -> None:
        self.shape, self.device, self.attend = shape, device, attend
        native = NativeLayout(shape.layout, shape.dtype)
        quantized, heads = shape.layout.quantized, shape.num_kv_heads
        raw_pages, native_pages = _pages_for(shape)
        with self._on_device(), self._or_say_why(shape.capacity or FIRST_CAPACITY):
            self.raw = PagePool(native.raw_planes, shape.num_layers, heads, raw_pages, device, "raw KV")
            self.native = PagePool(native.planes, shape.num_layers, heads, native_pages, device) if quantized else None
            self.tables = BlockTables(
                shape.batch,
                shape.capacity or FIRST_CAPACITY,
                shape.window,
                self.raw,
                self.native,
                device,
                delegated=shape.delegated,
            )
            self._fold = make_fold(native, shape.num_layers, device) if quantized else None
            self._states = [self._new_state(layer) for layer in range(shape.num_layers)]
        self._start()

    def _start(self) -> None:
        """What no two storages share; pages go back to their pools with the storage."""
        self.plan: PrefillPlan | None = None
        self.window: int | None = None  # beside the cap's kept rows; None while it hides nothing
        self._stale = False  # whether rows changed since the device's tables were written
        for pool in self._pools():
            pool.users.add(self)
        weakref.finalize(self, self.tables.close).atexit = False
        self._bind()

    def _pools(self) -> tuple[PagePool, ...]:
        return (self.raw,) if self.native is None else (self.raw, self.native)

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
    def layers(self) -> list[PagedLayer]:
        return [PagedLayer(self, layer, state) for layer, state in enumerate(self._states)]

    @property
    def tokens(self) -> int:
        """Live rows of each sequence, those of a step under way included."""
        return self.tables.length(0)

    def start_step(self, count: int) -> None:
        """Room for ``count`` new rows of every sequence, on the host and in the device's tables.

        KvcoreError where memory is short: the cache is as it was then, and goes on with fewer rows.
        """
        self._extend(count)
        self.tables.upload()
        self._stale = False
        cap = self.shape.cap
        self.window = cap.window if cap is not None and self.tokens > cap.tokens else None
        self.plan = self._plan(count) if count > MAX_DECODE_ROWS or self.window is not None else None

    def commit(self) -> None:
        """Fold what is due: at most one launch, for all layers and sequences."""
        t = self.tables
        if t.due:
            assert self._fold is not None
            assert self.native is not None
            if self._stale:
                t.upload()
                self._stale = False
            tables = t.raw_table, t.table, t.lengths, t.folded, t.fold_at
            with self._on_device():
                self._fold(self.raw.planes, self.native.planes, *tables, pages=t.due)
        t.commit()

    def hand_over(self) -> None:
        """Fold from now on, and what is due at once."""
        rows = range(self.shape.batch)
        for row in rows:
            self.tables.hand_over(row)
        try:
            self._extend(0)
        except BaseException:
            for row in rows:
                self.tables.hand_over(row, undo=True)
            raise
        self._stale = True
        self.commit()

    def trim(self, count: int) -> None:
        """Forget the newest ``count`` rows: see `BlockTables.trim`. InputError where there are fewer."""
        if not 0 <= count <= self.tokens:
            raise InputError(f"cannot trim {count} rows: the cache holds {self.tokens}")
        for row in range(self.shape.batch):
            self.tables.trim(row, count)
        for state in self._states:
            state.tokens = min(state.tokens, self.tokens)
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
                self._bind()
            t.drop(row, first, count)
        for state in self._states:
            state.tokens = self.tokens
        self._stale = True

    def load(self, views: Sequence[KVView], first_rows: int, folding: bool) -> None:
        """Take canonical rows into this empty storage: see `kvcore.cache.RowStorage.load`."""
        view, rows = views[0], range(self.shape.batch)
        sinks, whole = view.sinks, self.shape.window.sink_tokens
        native = page_sizes(view.folded, sinks if sinks < whole else 0)  # sinks are as many as the first page has
        raw = page_sizes(view.tokens - view.folded, first_rows if first_rows < whole and not view.folded else 0)
        with self._on_device(), self._or_say_why(view.tokens):
            for pool, pages in ((self.native, len(native)), (self.raw, len(raw) + (sinks > 0))):
                self._grow(pool, pages * self.shape.batch)
            self.tables.widen(max(len(native), len(raw)))
            self._bind()
            for row in rows:
                self.tables.fill(row, native, raw, sinks=sinks > 0, headless=first_rows == 0 and not view.folded)
                self.tables.hand_over(row, undo=not folding)
            for layer, each in enumerate(views):
                write_layer(self.shape, self.tables, self.raw, self.native, layer, each)
        for state in self._states:
            state.tokens = self.tokens
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
        raw_bytes, folded_bytes = (
            measure(shape.dtype) for measure in (shape.layout.raw_bytes_per_token, shape.layout.bytes_per_token)
        )
        return CacheStats(
            tokens=self._states[-1].tokens,
            rows_raw=raw,
            rows_folded=folded,
            kv_bytes=rows * (raw * raw_bytes + folded * folded_bytes),
            kv_bytes_raw=rows * self.tokens * raw_bytes,
            kv_bytes_allocated=sum(pool.allocated_bytes for pool in self._pools()),
            nonfinite_rows=0 if self.native is None else count_nonfinite(shape, self.tables, self.native),
        )

    def arrays(self) -> list[Tensor]:
        native = {} if self.native is None else self.native.planes
        return [*self.raw.planes.values(), *native.values()]

    def _new_state(self, layer: int) -> LayerState:
        layout, matrices = self.shape.layout, None if self._fold is None else self._fold.k_matrix
        rotation = VRotation.create(layer, layout.v_dim, self.device) if layout.v.codebook else None
        return LayerState(None if matrices is None else matrices[layer], rotation)

    # Memory

    def _extend(self, count: int) -> None:
        new = dict.fromkeys(range(self.shape.batch), count)
        needs, t = self.tables.needs(new), self.tables
        with self._or_say_why(self.tokens + count):
            for pool, wanted in ((self.native, needs.native), (self.raw, needs.raw)):
                self._grow(pool, wanted)
            if needs.width > t.width:
                t.widen(max(needs.width, t.width * 3 // 2))
                self._bind()
        t.extend(new)

    def _grow(self, pool: PagePool | None, wanted: int) -> None:
        """Make ``wanted`` pages free, and by half more than there were if that fits."""
        if pool is None or wanted <= pool.free_pages:
            return
        least = pool.pages + wanted - pool.free_pages
        try:
            pool.grow(max(least, pool.pages * 3 // 2))
        except torch.OutOfMemoryError:
            pool.grow(least)
        for user in pool.users:
            user._bind()  # which lets go of the old planes

    def _bind(self) -> None:
        """Give each layer its share of the planes and tables, where these have changed their addresses."""
        raw, t = self.raw.planes, self.tables
        folded = raw if self.native is None else self.native.planes  # without folded rows nothing reads them
        scales = [folded.get(f"{part}_scale", folded[part]) for part in "kv"]
        for i, state in enumerate(self._states):
            state.pages = Pages(
                k=folded["k"][i],
                v=folded["v"][i],
                k_scale=scales[0][i],
                v_scale=scales[1][i],
                raw_k=raw["k"][i],
                raw_v=raw["v"][i],
                table=t.table,
                raw_table=t.raw_table,
                ranges=t.ranges,
                raw_ranges=t.raw_ranges,
                sink_page=t.sink_pages,
                sinks=t.sinks,
                folded=t.folded,
                length=t.lengths,
            )

    @contextmanager
    def _or_say_why(self, tokens: int) -> Iterator[None]:
        """A CUDA out-of-memory error as one line for the user."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            shape = self.shape
            rows = shape.batch * shape.num_layers * shape.num_kv_heads * tokens
            wanted = rows * shape.layout.bytes_per_token(shape.dtype)
            raise KvcoreError(
                f"out of memory on {self.device}: the pages of {tokens} tokens in mode {shape.name} take about "
                f"{wanted} bytes, and they grow by a copy; use a smaller cache mode or a shorter context"
            ) from error

    def _plan(self, count: int) -> PrefillPlan:
        rows = range(self.shape.batch)
        host, live = [self.tables.slots(row) for row in rows], [self.tables.live(row) for row in rows]
        plan = PrefillPlan.create(host, count, self.device, live)
        cap = self.shape.cap
        return plan if self.window is None or cap is None else capped(plan, cap)

    def _on_device(self) -> AbstractContextManager[object]:
        """Triton launches on torch's current device."""
        return on_device(self.device)


class PagedLayer:
    """One layer of a `PagedStorage`, which holds its state: layers are made where they are asked for, so that the pages
    of a cache go with it at once, without a cycle to collect."""

    __slots__ = ("_state", "_storage", "layer", "layout")

    def __init__(self, storage: PagedStorage, layer: int, state: LayerState) -> None:
        self._storage, self._state = storage, state
        self.layer, self.layout = layer, storage.shape.layout

    @property
    def tokens(self) -> int:
        return self._state.tokens

    def step(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
        """One launch writes the new rows and both queries, then attention: see `CacheLayer.step`."""
        storage, state, count = self._storage, self._state, int(k.shape[2])
        self._check(q, k, v, count)
        if self.tokens == storage.tokens:
            storage.start_step(count)
        elif self.tokens + count != storage.tokens:
            raise ValueError(f"layer {self.layer} is {storage.tokens - self.tokens} rows behind, and gets {count}")
        with on_device(storage.device):
            queries = self._append(q, k, v, count)
            state.tokens += count
            if storage.window is not None:
                window = storage.window if window is None else min(window, storage.window)
            out = storage.attend(
                *queries,
                state.pages,
                self.layout,
                plan=storage.plan,
                query_rows=count,
                v_rotation=state.v_rotation,
                scale=scale,
                window=window,
            )
        batch, _, _, dim = out.shape
        by_head = out.unflatten(2, (count, -1)).transpose(2, 3)
        return by_head.reshape(batch, -1, count, dim)

    def view(self) -> KVView:
        """The live rows in canonical form; waits for the device."""
        storage = self._storage
        return view_layer(storage.shape, storage.tables, storage.raw, storage.native, self.layer)

    def _append(self, q: Tensor, k: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Both queries, [B, Hkv, count · group, D]."""
        pages = self._state.pages
        shape = (len(k), k.shape[1], count, q.shape[1] // k.shape[1], q.shape[-1])
        q_out = torch.empty(shape, dtype=q.dtype, device=q.device)
        rotated = torch.empty(shape, dtype=torch.float16, device=q.device) if self.layout.k.quantized else None
        append(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            None,
            pages.raw_k,
            pages.raw_v,
            pages.raw_table,
            pages.length,
            pages.folded,
            q_out,
            q_pages=rotated,
            k_matrix=self._state.k_matrix,
        )
        plain = q_out.flatten(2, 3)
        return plain, plain if rotated is None else rotated.flatten(2, 3)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, count: int) -> None:
        shape, layout = self._storage.shape, self.layout
        for name, rows, heads, dim in (
            ("Q", q, shape.num_q_heads, layout.k_dim),
            ("K", k, shape.num_kv_heads, layout.k_dim),
            ("V", v, shape.num_kv_heads, layout.v_dim),
        ):
            if tuple(rows.shape) != (expected := (shape.batch, heads, count, dim)):
                raise InputError(f"{name} rows of shape {tuple(rows.shape)}: this layer takes {expected}")


def on_device(device: str) -> AbstractContextManager[object]:
    """Make ``device`` torch's current one, on which Triton launches, where it is another."""
    where = torch.device(device)
    if where.type != "cuda" or where.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(where)


def _pages_for(shape: CacheShape) -> tuple[int, int]:
    """Raw and native pages that ``capacity`` tokens of every sequence take; one at least, for kernels to point at."""
    tokens, window = shape.capacity or FIRST_CAPACITY, shape.window
    if shape.cap is not None:
        tokens = min(tokens, shape.cap.tokens + min(shape.cap.window, CHUNK) + PAGE)
    pages = raw = -(-tokens // PAGE)
    if shape.layout.quantized and not shape.delegated:
        raw = min(pages, -(-(window.recent_tokens + PAGE - 1 + CHUNK) // PAGE)) + (window.sink_tokens > 0)
    return max(1, raw) * shape.batch, max(1, window.foldable(tokens) // PAGE) * shape.batch
