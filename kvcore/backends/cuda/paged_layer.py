"""One layer of caches in pages: its state, its step, and what steps over several caches share with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from kvcore.backends.cuda.attend import Pages, VRotation
from kvcore.backends.cuda.kernels.append import append
from kvcore.backends.cuda.paged_view import view_layer
from kvcore.errors import InputError
from kvcore.layout import KVView, Layout

if TYPE_CHECKING:
    from kvcore.backends.cuda.paged import PagedStorage


@dataclass(slots=True)
class LayerState:
    """One layer's share: R_K as `append` takes it, R_V (None: not rotated), its planes with the tables, its rows beside
    those of `PagedStorage.advance`."""

    k_matrix: Tensor | None
    v_rotation: VRotation | None
    tokens: int = 0
    pages: Pages = field(init=False)


class PagedLayer:
    """One layer of a `PagedStorage`, which holds its state: layers are made where they are asked for, so that the pages
    of a cache go with it at once, without a cycle to collect."""

    __slots__ = ("_state", "_storage", "layer", "layout")

    def __init__(self, storage: PagedStorage, layer: int, state: LayerState) -> None:
        self._storage, self._state = storage, state
        self.layer, self.layout = layer, storage.shape.layout

    @property
    def tokens(self) -> int:
        return self._state.tokens + self._storage._advanced

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
        """One launch writes the new rows and both queries, then attention: see `CacheLayer.step`. With ``angles`` of
        `PagedStorage.angles`, q and k come before the rotary embedding."""
        storage, state, count = self._storage, self._state, int(k.shape[2])
        self._check(q, k, v, count)
        if self.tokens == storage.tokens:
            storage.start_step(count)
        elif self.tokens + count != storage.tokens:
            raise ValueError(f"layer {self.layer} is {storage.tokens - self.tokens} rows behind, and gets {count}")
        with on_device(storage.device):
            queries = append_rows(state.pages, self.layout, state.k_matrix, q, k, v, angles)
            state.tokens += count
            plan, window = storage.way(count, window)
            out = storage.attend(
                *queries,
                state.pages,
                self.layout,
                plan=plan,
                query_rows=count,
                v_rotation=state.v_rotation,
                scale=scale,
                window=window,
            )
        return by_position(out, count)

    def view(self) -> KVView:
        """The live rows in canonical form; waits for the device."""
        storage = self._storage
        return view_layer(storage.shape, storage.tables, storage.raw, storage.native, self.layer)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, count: int) -> None:
        shape, layout = self._storage.shape, self.layout
        for name, rows, heads, dim in (
            ("Q", q, shape.num_q_heads, layout.k_dim),
            ("K", k, shape.num_kv_heads, layout.k_dim),
            ("V", v, shape.num_kv_heads, layout.v_dim),
        ):
            if tuple(rows.shape) != (expected := (shape.batch, heads, count, dim)):
                raise InputError(f"{name} rows of shape {tuple(rows.shape)}: this layer takes {expected}")


class PagedLayers(Sequence[PagedLayer]):
    """Layers that are made one by one, as they are asked for."""

    __slots__ = ("_states", "_storage")

    def __init__(self, storage: PagedStorage, states: Sequence[LayerState]) -> None:
        self._storage, self._states = storage, states

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, at: int) -> PagedLayer: ...
    @overload
    def __getitem__(self, at: slice) -> list[PagedLayer]: ...
    def __getitem__(self, at: int | slice) -> PagedLayer | list[PagedLayer]:
        layers = range(len(self._states))[at]
        if isinstance(layers, range):
            return [self[layer] for layer in layers]
        return PagedLayer(self._storage, layers, self._states[layers])


def append_rows(
    pages: Pages,
    layout: Layout,
    k_matrix: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Write new rows into their pages, after the rotary embedding where there are ``angles``; returns both queries,
    [B, Hkv, n · group, D]."""
    shape = (len(k), k.shape[1], k.shape[2], q.shape[1] // k.shape[1], q.shape[-1])
    q_out = torch.empty(shape, dtype=q.dtype, device=q.device)
    rotated = torch.empty(shape, dtype=torch.float16, device=q.device) if layout.k.quantized else None
    append(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        angles,
        pages.raw_k,
        pages.raw_v,
        pages.raw_table,
        pages.length,
        pages.folded,
        q_out,
        q_pages=rotated,
        k_matrix=k_matrix,
    )
    plain = q_out.flatten(2, 3)
    return plain, plain if rotated is None else rotated.flatten(2, 3)


def by_position(out: Tensor, count: int) -> Tensor:
    """Attention's output [B, Hkv, n · group, D] as [B, Hq, n, D]."""
    batch, _, _, dim = out.shape
    return out.unflatten(2, (count, -1)).transpose(2, 3).reshape(batch, -1, count, dim)


def on_device(device: str) -> AbstractContextManager[object]:
    """Make ``device`` torch's current one, on which Triton launches, where it is another."""
    where = torch.device(device)
    if where.type != "cuda" or where.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(where)
