"""Caches in pages of one pool that step together: one launch for all of them, whatever their lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvcore.backends.cuda.attend import Pages, VRotation
from kvcore.backends.cuda.kernels.append import rope_angles
from kvcore.backends.cuda.paged import PagedStorage, append_rows, by_position, on_device
from kvcore.layout import KVView, Layout


@dataclass(frozen=True, slots=True)
class TableLayer:
    """One layer of a step of one row each over tables [n, entries], which holds no storage."""

    pages: Pages
    layout: Layout
    k_matrix: Tensor | None
    v_rotation: VRotation | None
    attend: Callable[..., Tensor]
    device: str

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
        """q [n, Hq, 1, D], k and v [n, Hkv, 1, D] -> [n, Hq, 1, D_v]."""
        if window is not None or int(k.shape[2]) != 1:
            raise ValueError("a group steps by one row, without a window")
        with on_device(self.device):
            queries = append_rows(self.pages, self.layout, self.k_matrix, q, k, v, angles)
            out = self.attend(
                *queries,
                self.pages,
                self.layout,
                plan=None,
                query_rows=1,
                v_rotation=self.v_rotation,
                scale=scale,
                window=None,
            )
        return by_position(out, 1)


def table_layers(storage: PagedStorage, tables: Mapping[str, Tensor]) -> list[TableLayer]:
    """Every layer of the storage's pools over these ``tables``, named as in `Pages`."""
    return [
        TableLayer(
            storage.pages_of(layer, **tables),
            storage.shape.layout,
            storage.pools.k_matrix(layer),
            storage.pools.rotations[layer],
            storage.attend,
            storage.device,
        )
        for layer in range(storage.shape.num_layers)
    ]


def commit_together(
    storages: Sequence[PagedStorage],
    raw_table: Tensor,
    table: Tensor,
    lengths: Tensor,
    folded: Tensor,
    fold_at: Tensor,
) -> None:
    """Fold what is due in a step over these tables, at most one launch for all layers and sequences, and book it."""
    first, due = storages[0], max(storage.tables.due for storage in storages)
    if due:
        assert first.fold is not None
        assert first.native is not None
        tables = (raw_table, table, lengths, folded, fold_at)
        with on_device(first.device):
            first.fold(first.raw.planes, first.native.planes, *tables, pages=due)
    for storage in storages:
        storage.tables.commit()
        storage.outdated()


class PagedGroup:
    """Several `PagedStorage`, of one sequence each, that take one new row at a time.

    The tables of a step are put together from each storage's own, which stays the one that knows its pages.
    """

    def __init__(self, storages: Sequence[PagedStorage]) -> None:
        """ValueError where the storages do not share their pools."""
        if any(storage.pools is not storages[0].pools or storage.shape.batch != 1 for storage in storages):
            raise ValueError("a group needs sequences in pages of one pool")
        self._storages, self._first = tuple(storages), storages[0]
        self._layers: list[TableLayer] = []
        self._tables: tuple[Tensor, ...] = ()

    @property
    def layers(self) -> list[GroupLayer]:
        return [GroupLayer(self, layer) for layer in range(self._first.shape.num_layers)]

    def start_step(self) -> None:
        """Room for a new row of every sequence, and the tables of all in one copy each."""
        for storage in self._storages:
            storage.extend(1)
        rows = [storage.tables.host_table() for storage in self._storages]
        tables = np.zeros((len(rows[0]), len(rows), max(own.shape[1] for own in rows)), np.int32)
        for row, own in enumerate(rows):
            tables[:, row, : own.shape[1]] = own
        state = np.array([storage.tables.host_state() for storage in self._storages], np.int32).T.copy()
        device = self._first.device
        table, ranges, raw_table, raw_ranges = torch.from_numpy(tables).to(device, copy=True).unbind()
        lengths, folded, self._positions, sinks, sink_pages, fold_at = (
            torch.from_numpy(state).to(device, copy=True).unbind()
        )
        self._tables = raw_table, table, lengths, folded, fold_at
        of_step = {"table": table, "ranges": ranges, "raw_table": raw_table, "raw_ranges": raw_ranges}
        of_step |= {"sink_page": sink_pages, "sinks": sinks, "folded": folded, "length": lengths}
        self._layers = table_layers(self._first, of_step)

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
        if layer == 0 and angles is None:
            self.start_step()
        out = self._layers[layer].step(q, k, v, scale, angles=angles)
        for storage in self._storages:
            storage.state(layer).tokens += 1
        return out

    def commit(self) -> None:
        """See `commit_together`."""
        commit_together(self._storages, *self._tables)


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
        return max(storage.layers[self.layer].tokens for storage in self._group._storages)

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
