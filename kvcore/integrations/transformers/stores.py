"""Where a `KVCache` keeps its rows: layer by layer for graph operations, or in pages for the fused kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from torch import Tensor

from kvcore.attention import decide, default_registry, make_cache
from kvcore.backends import Backend
from kvcore.cache import Cache, CacheSpec, CacheStats
from kvcore.errors import UnsupportedError
from kvcore.integrations.rows import Rows, open_rows, stats
from kvcore.registry import Decision


class Store(Protocol):
    """The rows of all layers; ``layer`` is the model's index of one."""

    name: str
    decisions: tuple[Decision, ...]
    notices: list[str]

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, mask: Tensor | None
    ) -> Tensor:
        """Keep new rows raw, then attend; ``mask`` bool [B or 1, Hq or 1, n, rows] includes causality and window."""

    def settle(self, layer: int, count: int) -> None:
        """Before ``count`` new rows of a layer: the hand-over to decode, where this is it, and folding what is due."""

    def commit(self) -> None:
        """Fold what is due in all layers now."""

    def tokens(self, layer: int) -> int:
        """Tokens seen, forgotten ones included."""

    def dropped(self, layer: int) -> int:
        """Oldest tokens that the layer has forgotten."""

    def trim(self, layer: int, count: int) -> None:
        """Forget the newest ``count`` rows of a layer."""

    def stats(self) -> CacheStats: ...

    def to_graph(self, why: str) -> GraphStore: ...


def open_store(
    backend: Backend, spec: CacheSpec, *, kernels: str, masked: bool, alike: bool, layers: int
) -> GraphStore | PagedStore:
    """Pages where the kernels for them serve this model, else the graph path.

    ``alike``: all layers are of one kind. ``masked``: the batch is padded. UnsupportedError under the policy "fused"
    where the fused kernels cannot serve.
    """
    decisions = decide(backend, default_registry(backend), spec, kernels)
    if decisions[0].storage != "paged":
        return GraphStore(backend, spec, kernels, decisions)
    if alike and not masked:
        return PagedStore(backend, spec, kernels)
    why = "a mask for each sequence" if masked else "layers of several kinds"
    return GraphStore.instead_of_pages(backend, spec, kernels, why)


class GraphStore:
    """A `Rows` for each layer, made at its first step: layers may differ in heads and in head size.

    A sliding layer gives up rows that no later query can see, a page or more at a time. It keeps a page beyond its
    window, so that a crop finds what it uncovers.
    """

    name = "contiguous"

    def __init__(
        self,
        backend: Backend,
        spec: CacheSpec,
        kernels: str,
        decisions: tuple[Decision, ...],
        notices: list[str] | None = None,
    ) -> None:
        self.decisions, self.notices = decisions, notices or []
        self._backend, self._spec, self._kernels = backend, spec, kernels
        self._rows: dict[int, Rows] = {}
        self._dropped: dict[int, int] = {}
        self._windows: dict[int, int | None] = {}
        self._handed_over: set[int] = set()

    @classmethod
    def instead_of_pages(cls, backend: Backend, spec: CacheSpec, kernels: str, why: str) -> GraphStore:
        """UnsupportedError under the policy "fused"."""
        if kernels == "fused":
            raise UnsupportedError(f"the fused kernels do not serve {why}: use kernels='auto'", [why])
        decisions = decide(backend, default_registry(backend), spec, "graph")
        return cls(backend, spec, "graph", decisions, [f"graph operations instead of fused kernels: {why}"])

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, mask: Tensor | None
    ) -> Tensor:
        rows = self._rows.get(layer)
        if rows is None:
            rows = self._rows[layer] = open_rows(self._backend, self._spec_of(q, k, v), layer, kernels=self._kernels)
        self._windows[layer] = window
        rows.append(k, v)
        return self.attend(layer, q, scale, window, mask)

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None, mask: Tensor | None) -> Tensor:
        """Attention of the newest rows' queries, without new rows."""
        rows = self._rows[layer]
        if mask is None:
            out: Tensor = rows.attend(q, scale, window)
        else:
            # The mask was made before `settle`, which may have dropped rows at its left.
            out = rows.attend_masked(q, scale, mask[..., mask.shape[-1] - rows.tokens :])
        return out

    def settle(self, layer: int, count: int) -> None:
        rows = self._rows.get(layer)
        if rows is None:
            return
        if self._spec.mode.delegated and count == 1 and layer not in self._handed_over:
            rows.hand_over(None)
            self._handed_over.add(layer)
        rows.commit()
        window, page = self._windows[layer], self._spec.window.page_size
        if window is not None:
            pages = (rows.tokens - window - page) // page
            if pages >= max(1, window // (4 * page)):
                rows.drop(0, pages * page)
                self._dropped[layer] = self.dropped(layer) + pages * page

    def commit(self) -> None:
        for rows in self._rows.values():
            rows.commit()

    def tokens(self, layer: int) -> int:
        return self._rows[layer].tokens + self.dropped(layer) if layer in self._rows else 0

    def dropped(self, layer: int) -> int:
        return self._dropped.get(layer, 0)

    def batch(self, layer: int) -> int:
        return self._rows[layer].batch if layer in self._rows else 0

    def trim(self, layer: int, count: int) -> None:
        rows = self._rows.get(layer)
        if rows is None or count == 0:
            return
        window = self._windows[layer]
        if window is not None and self.dropped(layer) and rows.tokens - count < window - 1:
            raise UnsupportedError(
                f"crop of {count} tokens: layer {layer} keeps {rows.tokens} rows and needs {window - 1} of them "
                "afterwards; crop less at a time"
            )
        rows.trim(count)

    def select(self, layer: int, indices: Tensor) -> None:
        """Take those sequences of the batch, in that order."""
        rows = self._rows.get(layer)
        if rows is not None:
            self._rows[layer] = rows.selected(indices)

    def fill(self, layer: int, rows: Rows, *, handed_over: bool, window: int | None) -> None:
        self._rows[layer], self._windows[layer] = rows, window
        if handed_over:
            self._handed_over.add(layer)

    def stats(self) -> CacheStats:
        layers = [self._rows[index] for index in sorted(self._rows)]
        return stats(layers, max(map(self.tokens, self._rows)))

    def to_graph(self, why: str) -> GraphStore:
        return self

    def _spec_of(self, q: Tensor, k: Tensor, v: Tensor) -> CacheSpec:
        return replace(
            self._spec,
            num_q_heads=int(q.shape[1]),
            num_kv_heads=int(k.shape[1]),
            head_dim=int(k.shape[-1]),
            v_head_dim=None if v.shape[-1] == k.shape[-1] else int(v.shape[-1]),
            batch=int(k.shape[0]),
        )


class PagedStore:
    """A kvcore `Cache` in pages. Layers step in order, and the first one's turn settles the step before."""

    name = "paged"

    def __init__(self, backend: Backend, spec: CacheSpec, kernels: str) -> None:
        self._backend, self._spec, self._kernels = backend, spec, kernels
        self._cache: Cache = make_cache(backend, spec, kernels=kernels)
        self._layers = self._cache.layers
        self._window: int | None = None
        self._handed_over = not spec.mode.delegated
        self.decisions = self._cache.decisions
        self.notices: list[str] = []

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, mask: Tensor | None
    ) -> Tensor:
        assert mask is None
        self._window = window
        out: Tensor = self._layers[layer].step(q, k, v, scale, window)
        return out

    def settle(self, layer: int, count: int) -> None:
        if layer:
            return
        if count == 1 and not self._handed_over:
            self._cache.begin_decode()
            self._handed_over = True
        self._cache.commit()

    def commit(self) -> None:
        self._cache.commit()

    def tokens(self, layer: int) -> int:
        return self._layers[layer].tokens

    def dropped(self, layer: int) -> int:
        return 0

    def trim(self, layer: int, count: int) -> None:
        """All layers at once, when the first asks: transformers crops one after the other by the same number."""
        if layer == 0:
            self._cache.trim(count)

    def stats(self) -> CacheStats:
        return self._cache.stats()

    def to_graph(self, why: str) -> GraphStore:
        """The same rows on the graph path. UnsupportedError under the policy "fused"."""
        graph = GraphStore.instead_of_pages(self._backend, self._spec, self._kernels, why)
        self._cache.commit()
        for index, layer in enumerate(self._layers):
            rows = open_rows(self._backend, self._spec, index)
            rows.fill(layer.view())
            rows.folding = rows.layout.quantized and self._handed_over
            graph.fill(index, rows, handed_over=self._handed_over, window=self._window)
        return graph
