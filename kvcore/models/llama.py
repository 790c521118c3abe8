"""The llama model as a function over the array protocol: weights in, logits out, rows into the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvcore.backends import Backend
from kvcore.cache import Cache, CacheLayer
from kvcore.errors import InputError
from kvcore.models.config import LlamaConfig
from kvcore.models.rope import rope_inv_freq
from kvcore.ops import Array, Ops
from kvcore.weights import Checkpoint, Weight


@dataclass(frozen=True, slots=True)
class Linear:
    """A prepared weight [out, in] and an optional bias [out]."""

    weight: Array
    bias: Array | None

    def __call__(self, ops: Ops, x: Array) -> Array:
        y = ops.linear(x, self.weight)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class LayerParams:
    input_norm: Array
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    mlp_norm: Array
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaParams:
    """Weights in the backend's own form. ``head`` is ``embedding`` itself where the embeddings are tied."""

    dtype: str
    embedding: Array
    layers: tuple[LayerParams, ...]
    norm: Array
    head: Array
    inv_freq: np.ndarray


def load_params(
    backend: Backend,
    checkpoint: Checkpoint,
    dtype: str,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    seen: Callable[[str, Weight], None] = lambda _name, _weight: None,
) -> LlamaParams:
    """Read every weight into the backend. ``progress(done, total)`` counts layers; ``seen`` gets each weight as the
    checkpoint has it.

    Raises ModelError where a weight is missing or of the wrong shape.
    """
    ops, config = backend.ops, checkpoint.config
    names = set(checkpoint.names())

    def read(name: str) -> Weight:
        weight = checkpoint.load(name)
        seen(name, weight)
        return weight

    def matrix(name: str) -> Array:
        return ops.prepare_linear(read(name), dtype)

    def vector(name: str) -> Array:
        return ops.asarray(read(name).dequantize(), dtype)

    def linear(prefix: str) -> Linear:
        bias = vector(f"{prefix}.bias") if f"{prefix}.bias" in names else None
        return Linear(matrix(f"{prefix}.weight"), bias)

    layers = []
    for i in range(config.num_layers):
        at = f"model.layers.{i}"
        layers.append(
            LayerParams(
                input_norm=vector(f"{at}.input_layernorm.weight"),
                q=linear(f"{at}.self_attn.q_proj"),
                k=linear(f"{at}.self_attn.k_proj"),
                v=linear(f"{at}.self_attn.v_proj"),
                o=linear(f"{at}.self_attn.o_proj"),
                mlp_norm=vector(f"{at}.post_attention_layernorm.weight"),
                gate=linear(f"{at}.mlp.gate_proj"),
                up=linear(f"{at}.mlp.up_proj"),
                down=linear(f"{at}.mlp.down_proj"),
            )
        )
        progress(i + 1, config.num_layers)
    embedding = matrix("model.embed_tokens.weight")
    return LlamaParams(
        dtype=dtype,
        embedding=embedding,
        layers=tuple(layers),
        norm=vector("model.norm.weight"),
        head=embedding if config.tie_embeddings else matrix("lm_head.weight"),
        inv_freq=np.asarray(rope_inv_freq(config.rope, config.head_dim), np.float64),
    )


def forward(
    ops: Ops,
    config: LlamaConfig,
    params: LlamaParams,
    ids: np.ndarray,
    cache: Cache,
    *,
    all_logits: bool = False,
    commit: bool = True,
) -> Array:
    """Run ``ids`` int [B, T] at the cache's offset; their rows go into the cache.

    Returns float32 logits [B, T, vocab], or [B, 1, vocab] of the last position unless ``all_logits``.
    ``commit=False`` leaves folding to the caller (`Cache.commit`), for speculative verification. More ids than a capped
    cache takes in a step (`Cache.step_limit`) run as several steps; InputError where those may not be committed.
    """
    count, limit = int(ids.shape[1]), cache.step_limit
    if limit is None or count <= limit:
        return _step(ops, config, params, ids, cache, all_logits, commit)
    if not commit:
        raise InputError(f"{count} tokens without a commit: a cap of this size takes at most {limit} in a step")
    starts = range(0, count, limit)
    logits = [_step(ops, config, params, ids[:, i : i + limit], cache, all_logits, True) for i in starts]
    return ops.concat(logits, 1) if all_logits else logits[-1]


def _step(
    ops: Ops, config: LlamaConfig, params: LlamaParams, ids: np.ndarray, cache: Cache, all_logits: bool, commit: bool
) -> Array:
    cache.begin_step(int(ids.shape[1]))
    x = ops.embed(ops.asarray(np.asarray(ids), "int32"), params.embedding)
    start = cache.tokens
    angles = _angles(ops, params.inv_freq, cache.offset, ids.shape[1])
    try:
        for layer, rows in zip(params.layers, cache.layers, strict=True):
            x = x + _attention(ops, config, layer, ops.rms_norm(x, layer.input_norm, config.rms_norm_eps), angles, rows)
            x = x + _mlp(ops, layer, ops.rms_norm(x, layer.mlp_norm, config.rms_norm_eps))
        if commit:
            cache.commit()
    except BaseException:
        cache.shorten(start)  # or the layers before the failure would hold rows that the others lack
        raise
    if not all_logits:
        x = x[:, -1:]
    x = ops.rms_norm(x, params.norm, config.rms_norm_eps)
    return ops.astype(ops.linear(x, params.head), "float32")


def _attention(
    ops: Ops, config: LlamaConfig, layer: LayerParams, x: Array, angles: tuple[Array, Array], rows: CacheLayer
) -> Array:
    batch, count = int(x.shape[0]), int(x.shape[1])

    def heads(projected: Array, number: int) -> Array:  # [B, T, n·D] -> [B, n, T, D]
        split = ops.reshape(projected, (batch, count, number, config.head_dim))
        return ops.permute_dims(split, (0, 2, 1, 3))

    q = _rotate(ops, heads(layer.q(ops, x), config.num_heads), angles)
    k = _rotate(ops, heads(layer.k(ops, x), config.num_kv_heads), angles)
    out = rows.step(q, k, heads(layer.v(ops, x), config.num_kv_heads), config.head_dim**-0.5)
    joined = ops.reshape(ops.permute_dims(out, (0, 2, 1, 3)), (batch, count, config.num_heads * config.head_dim))
    return layer.o(ops, joined)


def _mlp(ops: Ops, layer: LayerParams, x: Array) -> Array:
    return layer.down(ops, ops.silu(layer.gate(ops, x)) * layer.up(ops, x))


def _angles(ops: Ops, inv_freq: np.ndarray, offset: int, count: int) -> tuple[Array, Array]:
    """cos and sin [T, D/2], float32; the angle itself is taken in float64, where long contexts keep their phase."""
    angle = np.arange(offset, offset + count)[:, None] * inv_freq[None, :]
    return ops.asarray(np.cos(angle).astype(np.float32)), ops.asarray(np.sin(angle).astype(np.float32))


def _rotate(ops: Ops, x: Array, angles: tuple[Array, Array]) -> Array:
    """Rotary embedding (RoFormer, arXiv 2104.09864), halves paired as Hugging Face does; x [B, H, T, D]."""
    cos, sin = angles
    half = int(x.shape[-1]) // 2
    wide = ops.astype(x, "float32")
    first, second = wide[..., :half], wide[..., half:]
    turned = ops.concat([first * cos - second * sin, second * cos + first * sin], -1)
    return ops.astype(turned, ops.dtype(x))
