"""Attention over a cache's stored rows as graph operations, and the making of a cache with its kernels.

Two queries per step: q for raw rows and R_K q for pages, so the cache is never rotated back. Each block of keys gives
a partial result (sum, maximum, normalizer); partials merge by log-sum-exp, first the pages in V's rotated basis, then,
after one R_Vᵀ on their sum, with the raw rows. K's scale multiplies the logits, then R_K q · centre of a row's page is
added where K is centred; V's scale multiplies the probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from kvcore.backends import Backend
from kvcore.cache import Cache, CacheRows, CacheSpec, ContiguousStorage, LayerKernels, Storage
from kvcore.errors import CapacityError, UnsupportedError
from kvcore.layout import CacheShape, Codec, KVView, Rotation, WindowPolicy
from kvcore.layout.footprint import FOREVER, bytes_needed, reserving, tokens_in
from kvcore.modes import CODEC_FUNCTIONS, Mode, pages_of_rows
from kvcore.ops import Array, Ops
from kvcore.registry import Decision, Kernel, KernelQuery, Registry

SCORE_ELEMENTS = 1 << 24  # largest block of scores held at once: 64 MiB in float32
_LOWEST = -1e30  # a floor for row maxima, so that a fully masked block gives zeros


@dataclass(frozen=True, slots=True)
class _Partial:
    """out [B, Hkv, R, D_v] is the sum of exp(logit - peak) v; peak and total [B, Hkv, R, 1]; all float32."""

    out: Array
    peak: Array
    total: Array


def attend_graph(ops: Ops, q: Array, view: KVView, scale: float, window: int | None = None) -> Array:
    """Attention of the newest rows' queries over all live rows; see `LayerCache.attend` for shapes.

    Dot products, softmax and sums are float32 whatever the dtype. Scores are tiled: no block exceeds
    ``SCORE_ELEMENTS``.
    """
    batch, q_heads, rows, dim = (int(n) for n in q.shape)
    kv_heads = int(view.tail_k.shape[1])
    group = q_heads // kv_heads
    grouped = ops.reshape(ops.astype(q, "float32") * scale, (batch, kv_heads, group * rows, dim))
    step = max(128, SCORE_ELEMENTS // (batch * q_heads * rows))
    mask = _Mask(ops, group, rows, view.tokens, window, view.keep)

    pages = _attend_pages(ops, grouped, view, mask, step)
    raw = _attend_raw(ops, grouped, view, mask, step)
    partials = [partial for partial in (pages, raw) if partial is not None]
    if not partials:
        return ops.zeros((batch, q_heads, rows, view.layout.v_dim), ops.dtype(q))
    merged = partials[0] if len(partials) == 1 else _merge(ops, *partials)
    out = merged.out / merged.total
    return ops.astype(ops.reshape(out, (batch, q_heads, rows, int(out.shape[-1]))), ops.dtype(q))


def _attend_raw(ops: Ops, q: Array, view: KVView, mask: _Mask, step: int) -> _Partial | None:
    k, v, positions = view.tail_k, view.tail_v, np.arange(view.folded, view.tokens)
    if view.sinks:
        k, v = ops.concat([view.sink_k, k], 2), ops.concat([view.sink_v, v], 2)
        positions = np.concatenate([np.arange(view.sinks), positions])
    partial: _Partial | None = None
    for start, stop in _blocks(0, len(positions), step):
        values = (ops.astype(x[:, :, start:stop], "float32") for x in (k, v))
        partial = _accumulate(ops, partial, q, (*values, None, None), mask.block(positions[start:stop]))
    return partial


def _attend_pages(ops: Ops, q: Array, view: KVView, mask: _Mask, step: int) -> _Partial | None:
    if view.folded <= view.sinks:
        return None
    k_codec, v_codec = CODEC_FUNCTIONS[view.layout.k.name], CODEC_FUNCTIONS[view.layout.v.name]
    if view.k_rotation is not None:
        q = view.k_rotation.apply(ops, q)
    by_page, bias = None, None  # R q · centre [B, Hkv, R, pages]; of a block's rows [B, Hkv, R, T]
    if view.layout.k.centred:
        by_page = ops.matmul(q, ops.permute_dims(ops.astype(view.k_centers, "float32"), (0, 1, 3, 2)))
        pages = pages_of_rows(ops, view.page_rows)
    partial: _Partial | None = None
    for start, stop in _blocks(view.sinks, view.folded, step):
        k, k_scale = k_codec.unpack(ops, _rows(view.k_planes, start, stop))
        v, v_scale = v_codec.unpack(ops, _rows(view.v_planes, start, stop))
        allowed = mask.block(np.arange(start, stop))
        if by_page is not None:
            bias = ops.take(by_page, pages[start:stop], 3)
        partial = _accumulate(ops, partial, q, (k, v, k_scale, v_scale), allowed, bias)
    assert partial is not None
    if view.v_rotation is None:
        return partial
    return _Partial(view.v_rotation.undo(ops, partial.out), partial.peak, partial.total)


def _accumulate(
    ops: Ops,
    partial: _Partial | None,
    q: Array,
    block: tuple[Array, Array, Array | None, Array | None],
    allowed: Array | None,
    bias: Array | None = None,
) -> _Partial:
    """Attend over one block of keys and values [B, Hkv, T, D] with scales [B, Hkv, T, 1], and merge it in. ``bias``
    [B, Hkv, R, T] is added to the scaled logits."""
    k, v, k_scale, v_scale = block
    logits = ops.matmul(q, ops.permute_dims(k, (0, 1, 3, 2)))
    if k_scale is not None:
        logits = logits * ops.permute_dims(k_scale, (0, 1, 3, 2))
    if bias is not None:
        logits = logits + bias
    if allowed is not None:
        logits = ops.where(allowed, logits, -float("inf"))
    peak = ops.maximum(ops.max(logits, axis=-1, keepdims=True), _LOWEST)
    weights = ops.exp(logits - peak)
    total = ops.sum(weights, axis=-1, keepdims=True)
    if v_scale is not None:
        weights = weights * ops.permute_dims(v_scale, (0, 1, 3, 2))
    out = ops.matmul(weights, v) if allowed is None else _masked_product(ops, weights, v, allowed)
    new = _Partial(out, peak, total)
    return new if partial is None else _merge(ops, partial, new)


def _masked_product(ops: Ops, weights: Array, v: Array, allowed: Array) -> Array:
    """weights v where a masked row adds nothing even if it is not finite (0 · NaN is NaN), and a visible one does."""
    finite = ops.all(ops.isfinite(v), axis=-1, keepdims=True)
    bad = 1.0 - ops.astype(finite, "float32")
    seen = ops.matmul(ops.astype(allowed, "float32"), bad)
    return ops.where(seen > 0, float("nan"), ops.matmul(weights, ops.where(finite, v, 0.0)))


def _merge(ops: Ops, a: _Partial, b: _Partial) -> _Partial:
    peak = ops.maximum(a.peak, b.peak)
    a_weight, b_weight = ops.exp(a.peak - peak), ops.exp(b.peak - peak)
    return _Partial(a.out * a_weight + b.out * b_weight, peak, a.total * a_weight + b.total * b_weight)


@dataclass(frozen=True, slots=True)
class _Mask:
    """Which keys the queries of the newest ``rows`` of ``tokens`` live rows may see: no later one, and with a
    ``window`` the first ``keep`` and the newest."""

    ops: Ops
    group: int
    rows: int
    tokens: int
    window: int | None
    keep: int

    def block(self, positions: np.ndarray) -> Array | None:
        """bool [group · rows, len(positions)] for ascending live rows, or None where every query sees every key."""
        first = self.tokens - self.rows
        everything = self.rows == 1 or positions[-1] <= first
        sliding = positions[np.searchsorted(positions, self.keep) :]
        if everything and (self.window is None or not len(sliding) or sliding[0] > self.tokens - 1 - self.window):
            return None
        query = np.arange(first, self.tokens)[:, None]
        allowed = positions[None, :] <= query
        if self.window is not None:
            allowed &= (positions[None, :] > query - self.window) | (positions[None, :] < self.keep)
        return self.ops.asarray(np.tile(allowed, (self.group, 1)))


def _blocks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, stop, step):
        yield begin, min(stop, begin + step)


def _rows(planes: Mapping[str, Array], start: int, stop: int) -> dict[str, Array]:
    return {name: plane[:, :, start:stop] for name, plane in planes.items()}


def encode_graph(ops: Ops, codec: Codec, rows: Array, rotation: Rotation | None) -> Mapping[str, Array]:
    """Rows [B, H, n, D] to the codec's planes."""
    return CODEC_FUNCTIONS[codec.name].encode(ops, rows, rotation)


GRAPH_KERNELS = (
    Kernel("encode-graph", "encode", "*", "graph", lambda: encode_graph),
    Kernel("attend-graph", "attend", "*", "graph", lambda: attend_graph),
)


def default_registry(backend: Backend) -> Registry:
    """The backend's own kernels, then the graph fallbacks."""
    return Registry((*backend.kernels, *GRAPH_KERNELS))


def decide(backend: Backend, registry: Registry, spec: CacheSpec, policy: str = "auto") -> tuple[Decision, ...]:
    """One decision per cache operation for decode.

    UnsupportedError where the policy cannot be met, or where the kernels do not work on one kind of storage.
    """
    layout = spec.mode.layout(spec.head_dim, spec.v_head_dim)
    window = spec.window if spec.mode.quantized else WindowPolicy(sink_tokens=0)
    queries = (
        KernelQuery(
            op=op,
            backend=backend.name,
            k_codec=layout.k.name,
            v_codec=layout.v.name,
            dtype=spec.dtype,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            gqa_ratio=spec.num_q_heads // spec.num_kv_heads,
            mask="sliding" if spec.sliding or spec.cap is not None else "causal",
            windowed=spec.mode.quantized,
            page_size=window.page_size,
            sink_tokens=window.sink_tokens,
            boundary_layers=window.boundary_layers,
            arch=backend.arch,
        )
        for op in ("encode", "attend")
    )
    decisions = tuple(registry.resolve(query, policy) for query in queries)
    if len({decision.storage for decision in decisions}) > 1:
        first, second = (f"{decision.kernel} works on {decision.storage} storage" for decision in decisions)
        raise UnsupportedError(f"one cache cannot serve both kernels: {first}, {second}; use --kernels graph")
    return decisions


def layer_kernels(decisions: Sequence[Decision]) -> LayerKernels:
    """The callables of contiguous storage; a step with more query rows than a kernel takes goes to `attend_graph`."""
    by_op = {decision.query.op: decision for decision in decisions}
    few, limit = by_op["attend"].run, by_op["attend"].max_rows

    def attend(ops: Ops, q: Array, view: KVView, scale: float, window: int | None) -> Array:
        run = few if int(q.shape[2]) <= cast(int, limit) else attend_graph
        return run(ops, q, view, scale, window)

    return LayerKernels(encode=by_op["encode"].run, attend=few if limit is None else attend)


def make_cache(
    backend: Backend,
    spec: CacheSpec,
    *,
    kernels: str = "auto",
    registry: Registry | None = None,
    pools: object | None = None,
) -> Cache:
    """A cache whose kernels are resolved once, here, with the storage that they work on.

    ``kernels`` is the policy: auto, fused or graph. With ``pools`` of `make_pools` its pages are theirs.
    """
    decisions = decide(backend, registry or default_registry(backend), spec, kernels)
    run = {decision.query.op: decision.run for decision in decisions}
    kind, shape = decisions[0].storage, spec.shape()
    limit = None if spec.budget is None else tokens_in(shape, spec.budget, kind)
    if spec.budget is not None:
        shape = _within(shape, spec.budget, limit, kind)
    storage: Storage
    if kind == "paged":
        shared = {} if pools is None else {"pools": pools}
        storage = backend.paged_storage(shape, attend=run["attend"], make_fold=run["encode"], **shared)
    else:
        storage = ContiguousStorage(
            backend.ops,
            shape,
            layer_kernels(decisions),
            raise_on_nonfinite=backend.raise_on_nonfinite,
        )
    return Cache(backend.ops, spec, storage, decisions, limit)


def _within(shape: CacheShape, budget: int, limit: int | None, kind: str) -> CacheShape:
    """The shape with room for what the budget holds at most. CapacityError where that is not one token."""
    if limit == 0:
        least = bytes_needed(shape, 1, kind)
        raise CapacityError(
            f"a KV budget of {budget} bytes holds no token: in mode {shape.name} the first takes {least} bytes; give a "
            "larger --kv-cache-budget"
        )
    return reserving(shape, FOREVER if limit is None else limit)


def make_pools(
    backend: Backend,
    spec: CacheSpec,
    budget: int,
    *,
    raw_pages: int,
    kernels: str = "auto",
    registry: Registry | None = None,
) -> Any:
    """Pages of ``budget`` bytes for many caches of ``spec``, ``raw_pages`` of them raw where the mode quantizes; None
    where its kernels do not work on pages. CapacityError where there is no memory for them."""
    decisions = decide(backend, registry or default_registry(backend), spec, kernels)
    if decisions[0].storage != "paged":
        return None
    run = {decision.query.op: decision.run for decision in decisions}
    return backend.paged_pools(spec.shape(), budget, raw_pages=raw_pages, make_fold=run["encode"])


def convert_cache(
    backend: Backend, cache: Cache, mode: Mode, *, kernels: str = "auto", registry: Registry | None = None
) -> Cache:
    """A cache in another mode with the rows of ``cache``, which stays: for long chats that are compressed late.

    Raw rows fold as they would have; quantized ones are decoded and quantized anew, which adds the new mode's error to
    the old one's. Needs room for all rows in raw form meanwhile. Errors are those of `make_cache`.
    """
    made = make_cache(backend, replace(cache.spec, mode=mode), kernels=kernels, registry=registry)
    views = []
    for layer, target in enumerate(made.layers):
        k, v = (backend.ops.astype(rows, cache.spec.dtype) for rows in cache.dense(layer))
        views.append(KVView(target.layout, 0, 0, None, None, {}, {}, k, v, None, None))
    made.load(CacheRows(tuple(views), cache.holes, handed_over=False))
    made.begin_decode()
    return made
