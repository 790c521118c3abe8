"""What pages hold, in canonical form: for reading a cache and for counting, not for attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcore.backends.cuda.block_tables import BlockTables
from kvcore.backends.cuda.native import PAGE, to_canonical
from kvcore.backends.cuda.ops import TorchOps
from kvcore.backends.cuda.pool import PagePool
from kvcore.backends.cuda.sequence import Entry
from kvcore.layout import CacheShape, Codec, KVView, Rotation


def view_layer(shape: CacheShape, tables: BlockTables, raw: PagePool, native: PagePool | None, layer: int) -> KVView:
    """One layer's live rows, oldest first; of each kind every sequence has equally many."""
    layout, sinks = shape.layout, tables.rows_sinks(0)
    k = _part(tables, raw, native, layer, "k", layout.k, layout.k_dim)
    v = _part(tables, raw, native, layer, "v", layout.v, layout.v_dim)
    ops = TorchOps(str(raw.planes["k"].device))
    centers, page_rows = _centers(tables, native, layer) if native is not None and layout.k.centred else (None, ())
    return KVView(
        layout=layout,
        sinks=sinks,
        folded=tables.rows_folded(0),
        sink_k=k[0] if sinks else None,
        sink_v=v[0] if sinks else None,
        k_planes=k[1],
        v_planes=v[1],
        tail_k=k[2],
        tail_v=v[2],
        k_rotation=Rotation.create(ops, layer, "k", layout.k_dim) if layout.k.codebook else None,
        v_rotation=Rotation.create(ops, layer, "v", layout.v_dim) if layout.v.codebook else None,
        k_centers=centers,
        page_rows=page_rows,
    )


def _centers(tables: BlockTables, native: PagePool, layer: int) -> tuple[Tensor, tuple[int, ...]]:
    """K's centres [B, Hkv, pages, D] and the live rows of each page; a page with a hole is two entries of a table."""
    plane, found = native.planes["k_center"][layer], []
    for row in range(len(tables.lengths)):
        by_page = {entry.page: 0 for entry in tables.entries(row)[0]}
        for entry in tables.entries(row)[0]:
            by_page[entry.page] += entry.rows
        found.append(plane[torch.tensor([*by_page], dtype=torch.int64, device=plane.device)].transpose(0, 1))
    return torch.stack(found), tuple(by_page.values())


def _part(
    tables: BlockTables, raw: PagePool, native: PagePool | None, layer: int, part: str, codec: Codec, dim: int
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Sinks [B, Hkv, sinks, D], folded planes [B, Hkv, folded, width] and raw tail of K or V."""
    plane, sinks, folded, tail = raw.planes[part][layer], [], [], []
    for row in range(len(tables.lengths)):
        old, new = tables.entries(row)
        count = tables.rows_sinks(row)
        sinks.append(plane[tables.sink_page(row) or 0, :, :count])
        tail.append(_live_rows(plane[_pages(new, plane)], new))
        if native is not None:
            index = _pages(old, plane)
            stored = {name: pages[layer][index] for name, pages in native.planes.items()}
            planes = _canonical(stored, part, codec, dim)
            folded.append({name: _live_rows(pages, old) for name, pages in planes.items()})
    names = folded[0] if folded else ()
    return (
        torch.stack(sinks),
        {name: torch.stack([planes[name] for planes in folded]) for name in names},
        torch.stack(tail),
    )


def _canonical(stored: dict[str, Tensor], part: str, codec: Codec, dim: int) -> dict[str, Tensor]:
    """Planes [..., 128, width] of native pages [..., words]."""
    if not codec.quantized:
        return {"rows": stored[part]}
    return to_canonical(codec, part, {"codes": stored[part], "scale": stored[f"{part}_scale"]}, dim)


def _pages(entries: Sequence[Entry], like: Tensor) -> Tensor:
    return torch.tensor([entry.page for entry in entries], dtype=torch.int64, device=like.device)


def _live_slots(entries: Sequence[Entry]) -> Tensor:
    """bool [entries, 128]."""
    edges = torch.tensor([(entry.first, entry.end) for entry in entries], dtype=torch.int64).reshape(-1, 2, 1)
    slot = torch.arange(PAGE)
    return (slot >= edges[:, 0]) & (slot < edges[:, 1])


def _live_rows(pages: Tensor, entries: Sequence[Entry]) -> Tensor:
    """[entries, Hkv, 128, width] -> [Hkv, live rows, width]."""
    live = _live_slots(entries).flatten().to(pages.device)
    return pages.transpose(0, 1).flatten(1, 2)[:, live]


def count_nonfinite(shape: CacheShape, tables: BlockTables, native: PagePool) -> int:
    """Folded rows, those of K and V and of each layer and head counted apart, that held a NaN or an infinity: scale and
    codes are 0. Looks into pages only where a scale is 0."""
    entries = [entry for row in range(shape.batch) for entry in tables.entries(row)[0]]
    index, live = _pages(entries, native.planes["k"]), _live_slots(entries)
    count = 0
    for part, codec, dim in (
        ("k", shape.layout.k, shape.layout.k_dim),
        ("v", shape.layout.v, shape.layout.v_dim),
    ):
        if not codec.quantized:
            continue
        codes, scale = native.planes[part], native.planes[f"{part}_scale"]
        layer, at, head = torch.nonzero((scale[:, index] == 0).any(-1), as_tuple=True)
        stored = {part: codes[layer, index[at], head], f"{part}_scale": scale[layer, index[at], head]}
        planes = _canonical(stored, part, codec, dim)
        marked = (planes["scale"][..., 0] == 0) & (planes["codes"] == 0).all(-1)
        count += int((marked & live.to(marked.device)[at]).sum())
    return count
