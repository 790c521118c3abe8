"""Caches in pages of one pool that step together: one launch for all of them, whatever their lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcore.backends.cuda.attend import Pages
from kvcore.backends.cuda.kernels.append import rope_angles
from kvcore.backends.cuda.paged import PagedStorage, append_rows, by_position, on_device
from kvcore.layout import KVView, Layout


class PagedGroup:
    """Several `PagedStorage`, of one sequence each, that take one new row at a time.

    The tables of a step are put together from each storage's own, which stays the one that knows its pages.
    """

    def __init__(self, storages: Sequence[PagedStorage]) -> None:
        """ValueError where the storages do not share their pools."""
        if any(storage.pools is not storages[0].pools or storage.shape.batch != 1 for storage in storages):
            raise ValueError("a group needs sequences in pages of one pool")
        self._storages, self._first = tuple(storages), storages[0]
        self._pages: list[Pages] = []
        self._tables: tuple[Tensor, ...] = ()
        self._due = 0

    @property
    def layers(self) -> list[GroupLayer]:
        return [GroupLayer(self, layer) for layer in range(self._first.shape.num_layers)]

    def start_step(self) -> None:
        """Room for a new row of every sequence, and the tables of all in one copy each."""
        for storage in self._storages:
            storage.extend(1)
        rows = [storage.tables.host_rows() for storage in self._storages]
        width = max(tables.shape[1] for tables, _ in rows)
        tables = np.zeros((len(rows[0][0]), len(rows), width), np.int32)
        for row, (own, _) in enumerate(rows):
            tables[:, row, : own.shape[1]] = own
        state = np.stack([own for _, own in rows], axis=1)
        device = self._first.device
        table, ranges, raw_table, raw_ranges = torch.from_numpy(tables).to(device, copy=True).unbind()
        lengths, folded, self._positions, sinks, sink_pages, fold_at = (
            torch.from_numpy(state).to(device, copy=True).unbind()
        )
        self._tables = raw_table, table, lengths, folded, fold_at
        self._due = max(storage.tables.due for storage in self._storages)
        self._pages = [
            self._first.pages_of(
                layer,
                table=table,
                ranges=ranges,
                raw_table=raw_table,
                raw_ranges=raw_ranges,
                sink_page=sink_pages,
                sinks=sinks,
                folded=folded,
                length=lengths,
            )
            for layer in range(self._first.shape.num_layers)
        ]

    def angles(self, inv_freq: np.ndarray) -> tuple[Tensor, Tensor]:
        """Begin a step: cos and sin of every sequence's position."""
        self.start_step()
        device = self._first.device
        with on_device(device):
            return rope_angles(torch.from_numpy(inv_freq).to(device), self._positions, 1)

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, angles: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """One row of each sequence: q [n, Hq, 1, D], k and v [n, Hkv, 1, D] -> [n, Hq, 1, D_v]. Without ``angles`` q
        and k come after the rotary embedding, and the first layer begins the step."""
        first = self._first
        if layer == 0 and angles is None:
            self.start_step()
        state = first.state(layer)
        with on_device(first.device):
            queries = append_rows(self._pages[layer], first.shape.layout, state.k_matrix, q, k, v, angles)
            for storage in self._storages:
                storage.state(layer).tokens += 1
            out = first.attend(
                *queries,
                self._pages[layer],
                first.shape.layout,
                plan=None,
                query_rows=1,
                v_rotation=state.v_rotation,
                scale=scale,
                window=None,
            )
        return by_position(out, 1)

    def commit(self) -> None:
        """Fold what is due: at most one launch for all layers and sequences."""
        first = self._first
        if self._due:
            assert first.fold is not None
            assert first.native is not None
            with on_device(first.device):
                first.fold(first.raw.planes, first.native.planes, *self._tables, pages=self._due)
        for storage in self._storages:
            storage.tables.commit()
            storage.outdated()


class GroupLayer:
    """One layer of a `PagedGroup`, as a `CacheLayer` for as many sequences as the group has."""

    __slots__ = ("_group", "layer")

    def __init__(self, group: PagedGroup, layer: int) -> None:
        self._group, self.layer = group, layer

    @property
    def layout(self) -> Layout:
        return self._group._first.shape.layout

    @property
    def tokens(self) -> int:
        """Live rows of the longest sequence."""
        return max(storage.state(self.layer).tokens for storage in self._group._storages)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        *,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if window is not None or int(k.shape[2]) != 1:
            raise ValueError("a group steps by one row, without a window")
        return self._group.step(self.layer, q, k, v, scale, angles)

    def view(self) -> KVView:
        raise ValueError("a group of sequences of different lengths has no view: ask each of its caches")
