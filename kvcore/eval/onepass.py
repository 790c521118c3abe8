"""Decode's attention in one pass: each query sees, of every key, the form that it would have had at that step.

Decoding sees a row raw until its page is folded, and coded afterwards. So whether a key is raw depends on the query.
Here both forms of all rows are kept, and a mask per (query, key) selects: logits from the raw or the coded key,
probabilities to the raw or the coded value. A text then takes a few large products instead of a step per token.
tests/eval/test_onepass.py holds it equal to token-by-token decode through the real cache, for each mode and backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcore.cache import Cache, CacheLayer, CacheSpec
from kvcore.errors import UnsupportedError
from kvcore.eval.codecs import RowCodec, Variant
from kvcore.layout import CODECS, CacheStats, KVView, Layout
from kvcore.modes import MODES
from kvcore.ops import Array, Ops
from kvcore.runtime import Model

CHUNK = 512  # tokens per forward: bounds the logits and scores held at once


class _Part:
    """Raw and coded rows of one layer's K or V, as lists of chunks."""

    __slots__ = ("_coded", "_ops", "_raw", "_round_trip", "codec")

    def __init__(self, ops: Ops, codec: RowCodec, layer: int, part: str, dim: int) -> None:
        self._ops, self.codec = ops, codec
        self._round_trip = None if codec.raw else codec.bind(ops, layer, part, dim)
        self._raw: list[Array] = []
        self._coded: list[Array] = []

    def append(self, rows: Array) -> None:
        self._raw.append(self._ops.astype(rows, "float32"))
        if self._round_trip is not None:
            self._coded.append(self._ops.astype(self._round_trip(rows), "float32"))

    def raw(self) -> Array:
        return self._joined(self._raw)

    def coded(self) -> Array:
        """The raw rows themselves where the codec is raw."""
        return self._joined(self._raw if self._round_trip is None else self._coded)

    def _joined(self, chunks: list[Array]) -> Array:
        if len(chunks) > 1:
            chunks[:] = [self._ops.concat(chunks, 2)]
        return chunks[0]


class OnePassLayer:
    """A `CacheLayer` that keeps both forms of every row; chunks begin at whole groups of its codecs."""

    def __init__(self, ops: Ops, variant: Variant, layer: int, layout: Layout) -> None:
        self._ops, self._variant, self.layout = ops, variant, layout
        self._k = _Part(ops, variant.k, layer, "k", layout.k_dim)
        self._v = _Part(ops, variant.v, layer, "v", layout.v_dim)
        self.tokens = 0

    def step(self, q: Array, k: Array, v: Array, scale: float, window: int | None = None) -> Array:
        """See `CacheLayer.step`; a sliding ``window`` of attention is refused."""
        if window is not None:
            raise UnsupportedError("scoring in one pass knows no sliding window: score through the cache")
        self._k.append(k)
        self._v.append(v)
        start, self.tokens = self.tokens, self.tokens + int(k.shape[2])
        queries, keys = np.arange(start, self.tokens), np.arange(self.tokens)
        coded = None if self._variant.raw else self._variant.rows.coded(queries, keys)
        ops = self._ops
        parts = ((self._k.raw(), self._k.coded()), (self._v.raw(), self._v.coded()))
        return ops.astype(attend_masked(ops, q, *parts, scale, queries, coded), ops.dtype(q))

    def view(self) -> KVView:
        raise UnsupportedError("rows under evaluation have no stored form")


def attend_masked(
    ops: Ops,
    q: Array,
    k: tuple[Array, Array],
    v: tuple[Array, Array],
    scale: float,
    queries: np.ndarray,
    coded: np.ndarray | None,
) -> Array:
    """Causal attention, float32 [B, Hq, n, D], of ``q`` [B, Hq, n, D] at the positions ``queries`` [n].

    ``k`` and ``v`` are (raw, coded) rows [B, Hkv, T, D], ``coded`` bool [n, T] says which form a query sees; None: all
    raw. Softmax and sums are float32.
    """
    batch, q_heads, rows, dim = (int(n) for n in q.shape)
    kv_heads, tokens = int(k[0].shape[1]), int(k[0].shape[2])
    group = q_heads // kv_heads
    grouped = ops.reshape(ops.astype(q, "float32") * scale, (batch, kv_heads, group * rows, dim))
    causal = np.arange(tokens)[None, :] <= queries[:, None]
    some = coded is not None and bool((coded & causal).any())
    mask = ops.asarray(np.tile(coded, (group, 1))) if some and coded is not None else None

    logits = ops.matmul(grouped, ops.permute_dims(k[0], (0, 1, 3, 2)))
    if mask is not None and k[1] is not k[0]:
        logits = ops.where(mask, ops.matmul(grouped, ops.permute_dims(k[1], (0, 1, 3, 2))), logits)
    logits = ops.where(ops.asarray(np.tile(causal, (group, 1))), logits, -float("inf"))
    weights = ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
    total = ops.sum(weights, axis=-1, keepdims=True)
    if mask is None or v[1] is v[0]:
        out = ops.matmul(weights, v[0])
    else:
        out = ops.matmul(ops.where(mask, 0.0, weights), v[0]) + ops.matmul(ops.where(mask, weights, 0.0), v[1])
    return ops.reshape(out / total, (batch, q_heads, rows, int(out.shape[-1])))


class OnePassStorage:
    """A `Storage` that only grows: it folds nothing and forgets nothing."""

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        self.layers: Sequence[CacheLayer] = layers

    def commit(self) -> None:
        """Nothing to do: the mask knows what is folded."""

    def hand_over(self) -> None:
        """Nothing to do: see `RawRows.hand_over`."""

    def trim(self, count: int) -> None:
        raise UnsupportedError("rows under evaluation cannot be trimmed")

    def shorten(self, tokens: int) -> None:
        """A failed pass is not taken back: its cache is thrown away."""

    def stats(self) -> CacheStats:
        raise UnsupportedError("rows under evaluation have no stored form")

    def arrays(self) -> list[Array]:
        return []


def one_pass_cache(model: Model, variant: Variant) -> Cache:
    """A cache for `Model.forward` that scores ``variant``. Use it once, in chunks of whole groups, for one text."""
    config = model.config
    layout = Layout(CODECS["raw"], CODECS["raw"], config.head_dim, config.head_dim)
    spec = CacheSpec(
        mode=MODES["fp16"],
        num_layers=config.num_layers,
        num_q_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.params.dtype,
    )
    layers = [OnePassLayer(model.backend.ops, variant, layer, layout) for layer in range(config.num_layers)]
    return Cache(model.backend.ops, spec, OnePassStorage(layers))
