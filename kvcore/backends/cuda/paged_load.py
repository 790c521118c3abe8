"""Canonical rows into pages: for caches that come from a file or from another storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvcore.backends.cuda.block_tables import BlockTables
from kvcore.backends.cuda.native import PAGE, to_native
from kvcore.backends.cuda.ops import TorchOps
from kvcore.backends.cuda.pool import PagePool
from kvcore.backends.cuda.sequence import Entry
from kvcore.layout import CacheShape, Codec, KVView
from kvcore.ops import Array


def page_sizes(rows: int) -> list[int]:
    """How many rows each page gets: whole pages, and what remains."""
    return [min(PAGE, rows - start) for start in range(0, rows, PAGE)]


def write_layer(
    shape: CacheShape, tables: BlockTables, raw: PagePool, native: PagePool | None, layer: int, view: KVView
) -> None:
    """Put a layer's rows into the pages that the tables have for them; arrays are torch's or the host's."""
    ops = TorchOps(str(raw.planes["k"].device))
    layout = shape.layout
    for part, codec, planes, sinks, tail in (
        ("k", layout.k, view.k_planes, view.sink_k, view.tail_k),
        ("v", layout.v, view.v_planes, view.sink_v, view.tail_v),
    ):
        pages = raw.planes[part][layer]
        rows = ops.asarray(tail, shape.dtype)
        stored = {name: ops.asarray(plane) for name, plane in planes.items()} if view.folded else {}
        for row in range(shape.batch):
            folded, newest = tables.entries(row)
            for entry, piece in _pieces(newest, rows[row]):
                pages[entry.page, :, : entry.end] = piece
            page = tables.sink_page(row)
            if page is not None:
                pages[page, :, : view.sinks] = ops.asarray(sinks, shape.dtype)[row]
            if native is not None and folded:
                own = {name: plane[row] for name, plane in stored.items()}
                _write_folded(native, layer, part, codec, folded, own, shape.dtype)
                if codec.centred:
                    index = torch.tensor([entry.page for entry in folded], device=pages.device)
                    native.planes["k_center"][layer, index] = ops.asarray(view.k_centers)[row].transpose(0, 1)


def _pieces(entries: Sequence[Entry], rows: Tensor) -> Iterator[tuple[Entry, Tensor]]:
    """The entries with their share of ``rows`` [Hkv, T, width]."""
    at = 0
    for entry in entries:
        yield entry, rows[:, at : at + entry.end]
        at += entry.end


def _write_folded(
    pool: PagePool,
    layer: int,
    part: str,
    codec: Codec,
    entries: Sequence[Entry],
    planes: dict[str, Array],
    dtype: str,
) -> None:
    index = torch.tensor([entry.page for entry in entries], device=pool.planes[part].device)
    padded = {name: _whole_pages(plane, entries) for name, plane in planes.items()}  # [pages, Hkv, 128, width]
    if not codec.quantized:
        pool.planes[part][layer, index] = padded["rows"].to(getattr(torch, dtype))
        return
    stored = to_native(codec, part, padded)
    pool.planes[part][layer, index] = stored["codes"]
    pool.planes[f"{part}_scale"][layer, index] = stored["scale"]


def _whole_pages(plane: Tensor, entries: Sequence[Entry]) -> Tensor:
    """[Hkv, rows, width] -> [pages, Hkv, 128, width]; what no row fills is 0."""
    pages = plane.new_zeros(len(entries), plane.shape[0], PAGE, plane.shape[2])
    for page, (entry, piece) in zip(pages, _pieces(entries, plane), strict=True):
        page[:, : entry.end] = piece
    return pages
