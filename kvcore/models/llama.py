"""The llama model as a function over the array protocol: weights in, logits out, rows into the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from kvcore.backends import Backend
from kvcore.cache import Cache, StepCache
from kvcore.communicator import SINGLE, Communicator
from kvcore.errors import InputError
from kvcore.models.config import LlamaConfig
from kvcore.models.rope import rope_inv_freq
from kvcore.models.shard import Shard
from kvcore.ops import Array, Ops
from kvcore.weights import Checkpoint, Weight
from kvcore.weights.expected import EMBEDDING, HEAD

Angles: TypeAlias = tuple[Array, Array]  # cos and sin of the rotary embedding


@dataclass(frozen=True, slots=True)
class Linear:
    """A prepared weight, or several that are taken together, and an optional bias for all of their outputs.

    With ``ranks`` the weight is this rank's share of the inputs, and products are summed over the ranks.
    """

    weight: Any
    bias: Array | None
    ranks: Communicator | None = None


@dataclass(frozen=True, slots=True)
class LayerParams:
    """``qkv`` are three projections of the same rows, ``gate_up`` the two of `Ops.gated`."""

    input_norm: Array
    qkv: Linear
    o: Linear
    mlp_norm: Array
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaParams:
    """Weights in the backend's own form. ``head`` is ``embedding`` itself where the embeddings are tied.

    Among ``ranks`` they are one rank's share (`kvcore.models.shard`), and the head is always of its own.
    """

    dtype: str
    embedding: Any
    layers: tuple[LayerParams, ...]
    norm: Array
    head: Any
    inv_freq: np.ndarray
    vocab_size: int
    ranks: Communicator = SINGLE

    def whole(self, scores: Array) -> Array:
        """Logits [..., vocab] from this rank's rows of the head."""
        return scores if self.ranks.size == 1 else self.ranks.all_gather(scores)[..., : self.vocab_size]


def load_params(
    backend: Backend,
    checkpoint: Checkpoint,
    dtype: str,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    seen: Callable[[str, Weight], None] = lambda _name, _weight: None,
    ranks: Communicator = SINGLE,
    notify: Callable[[str], None] = lambda _text: None,
) -> LlamaParams:
    """Read every weight into the backend, or with ``ranks`` this one's share. ``progress(done, total)`` counts layers;
    ``seen`` gets each weight as the checkpoint has it; ``notify`` hears what a share costs.

    Raises ModelError where a weight is missing or of the wrong shape, InputError where ranks cannot share the heads.
    """
    ops, config = backend.ops, checkpoint.config
    names, shard = set(checkpoint.names()), Shard(config, ranks.rank, ranks.size)
    between = ranks if ranks.size > 1 else None
    notices: dict[str, None] = {}

    def read(name: str) -> Weight:
        weight = checkpoint.load(name)
        seen(name, weight)
        if (notice := shard.notice(name, weight)) is not None:
            notices[notice] = None
        return shard.part(name, weight)

    def matrix(name: str) -> Any:
        return ops.prepare_linear(read(name), dtype)

    def vector(name: str) -> Array:
        return ops.asarray(read(name).dequantize(), dtype)

    def linear(prepare: Callable[[list[Weight]], Any], *prefixes: str, ranks: Communicator | None = None) -> Linear:
        weights = [read(f"{prefix}.weight") for prefix in prefixes]
        biases = [read(name).dequantize() if (name := f"{prefix}.bias") in names else None for prefix in prefixes]
        whole = [np.zeros(w.shape[0], np.float32) if b is None else b for w, b in zip(weights, biases, strict=True)]
        present = any(bias is not None for bias in biases)
        return Linear(prepare(weights), ops.asarray(np.concatenate(whole), dtype) if present else None, ranks)

    def one(weights: list[Weight]) -> Any:
        return ops.prepare_linear(weights[0], dtype)

    def together(weights: list[Weight]) -> Any:
        return ops.prepare_projections(weights, dtype)

    def gated(weights: list[Weight]) -> Any:
        return ops.prepare_gated(weights[0], weights[1], dtype)

    layers = []
    for i in range(config.num_layers):
        at = f"model.layers.{i}"
        attention, mlp = f"{at}.self_attn", f"{at}.mlp"
        layers.append(
            LayerParams(
                input_norm=vector(f"{at}.input_layernorm.weight"),
                qkv=linear(together, f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
                o=linear(one, f"{attention}.o_proj", ranks=between),
                mlp_norm=vector(f"{at}.post_attention_layernorm.weight"),
                gate_up=linear(gated, f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                down=linear(one, f"{mlp}.down_proj", ranks=between),
            )
        )
        progress(i + 1, config.num_layers)
    embedding, norm = matrix(EMBEDDING), vector("model.norm.weight")
    if not config.tie_embeddings:
        head = matrix(HEAD)
    elif between is None:
        head = embedding
    else:
        head = ops.prepare_linear(shard.head(checkpoint.load(EMBEDDING)), dtype)
    for notice in notices:
        notify(notice)
    return LlamaParams(
        dtype=dtype,
        embedding=embedding,
        layers=tuple(layers),
        norm=norm,
        head=head,
        inv_freq=np.asarray(rope_inv_freq(config.rope, config.head_dim), np.float64),
        vocab_size=config.vocab_size,
        ranks=ranks,
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

    def step(part: np.ndarray) -> Array:
        ran = forward_ragged(ops, config, params, [part], [cache], all_logits=all_logits, commit=commit)
        for error in ran.errors.values():
            raise error
        return ops.reshape(ran.logits, (len(ids), -1, int(ran.logits.shape[-1])))

    if limit is None or count <= limit:
        return step(ids)
    if not commit:
        raise InputError(f"{count} tokens without a commit: a cap of this size takes at most {limit} in a step")
    logits = [step(ids[:, i : i + limit]) for i in range(0, count, limit)]
    return ops.concat(logits, 1) if all_logits else logits[-1]


@dataclass(slots=True)
class Ragged:
    """Logits of a step over several caches: float32 [rows, vocab], those of cache i in the rows ``spans[i]``.

    ``errors``: what went wrong in single caches. They are as they were before the step, and their rows mean nothing.
    """

    logits: Array
    spans: tuple[slice, ...]
    errors: dict[int, Exception] = field(default_factory=dict)


def forward_ragged(
    ops: Ops,
    config: LlamaConfig,
    params: LlamaParams,
    ids: Sequence[np.ndarray],
    caches: Sequence[StepCache],
    *,
    all_logits: bool = False,
    commit: bool = True,
    row_block: int | None = None,
) -> Ragged:
    """One step of several caches: ``ids[i]`` int [B_i, T_i] at the offsets of ``caches[i]``.

    Every linear layer is one product over the rows of all sequences; positions, attention and rows are each cache's
    own. The logits have the rows of each cache in turn, [B_i, T_i] of them, or only the last of T_i unless
    ``all_logits``. With ``row_block`` products take that many rows at a time, the last block filled up, so that the
    result of a row does not depend on what else is in the step.

    An error in one cache ends the step for that cache alone; any other is raised, and takes back the whole step.
    """
    sizes = [tuple(int(n) for n in part.shape) for part in ids]
    products = _Products.of(ops, config, row_block)
    step = _RaggedStep(ops, config, sizes, caches, products)
    try:
        x = products.filled(ops.embed(step.flat_ids(ids), params.embedding))
        step.begin(params.inv_freq)
        x = _layers(params, products, x, step.attention)
        if commit:
            step.commit()
    except BaseException:
        step.take_back()  # or the layers before the failure would hold rows that the others lack
        raise
    x, spans = step.wanted(x, all_logits)
    return Ragged(_logits(ops, params, products, x)[0], spans, step.errors)


def decode_logits(
    ops: Ops, config: LlamaConfig, params: LlamaParams, ids: Array, layers: Sequence[Any], angles: Angles
) -> Array:
    """float32 logits [B, vocab] of a step of one token, ``ids`` int32 [B, 1], that a cache has begun whose ``layers``
    apply the rotary embedding (`TurningStorage`).

    Nothing here depends on a length or reads a value back, but what the layers do: a CUDA graph can hold it.
    """
    batch, dim = int(ids.shape[0]), config.head_dim
    products = _Products.of(ops, config)

    def attention(i: int, *rows: Array) -> Array:  # [B, 1, n·D] each
        q, k, v = (ops.reshape(x, (batch, -1, 1, dim)) for x in rows)
        out = layers[i].step(q, k, v, dim**-0.5, _window(config, i), angles=angles)
        return ops.reshape(out, (batch, 1, config.num_heads * dim))

    x = _layers(params, products, ops.embed(ids, params.embedding), attention)
    return _logits(ops, params, products, x)[:, -1]


def _layers(params: LlamaParams, products: _Products, x: Array, attention: Callable[..., Array]) -> Array:
    """All layers, without the last norm. ``attention(i, q, k, v)``: from projections [..., n · D] to [..., Hq · D]."""
    for i, layer in enumerate(params.layers):
        joined = attention(i, *products.projections(x, layer.qkv, layer.input_norm))
        x = products.linear(joined, layer.o, added=x)
        x = products.linear(products.gated(x, layer.gate_up, layer.mlp_norm), layer.down, added=x)
    return x


def _logits(ops: Ops, params: LlamaParams, products: _Products, x: Array) -> Array:
    scores = products.linear(x, Linear(params.head, None), norm=params.norm)
    return params.whole(ops.astype(scores, "float32"))


@dataclass(frozen=True, slots=True)
class _Products:
    """Linear layers over rows [1, N, ·] with their norm before and residual after: all at once, or ``block`` rows at a
    time."""

    ops: Ops
    eps: float
    block: int | None
    sizes: Sequence[int]  # outputs of q, k and v

    @classmethod
    def of(cls, ops: Ops, config: LlamaConfig, block: int | None = None) -> _Products:
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        return cls(ops, config.rms_norm_eps, block, [number * config.head_dim for number in heads])

    def linear(self, x: Array, layer: Linear, *, norm: Array | None = None, added: Array | None = None) -> Array:
        before = None if norm is None else (norm, self.eps)
        bias = layer.bias
        if layer.ranks is not None and layer.ranks.rank > 0:
            bias = added = None  # rank 0 puts them into the sum
        y = self._joined(
            self.ops.linear(x[:, rows], layer.weight, norm=before, bias=bias, added=_part(added, rows))
            for rows in self._blocks(x)
        )
        return y if layer.ranks is None else layer.ranks.all_sum(y)

    def gated(self, x: Array, layer: Linear, norm: Array) -> Array:
        before = (norm, self.eps)
        return self._joined(
            self.ops.gated(x[:, rows], layer.weight, norm=before, bias=layer.bias) for rows in self._blocks(x)
        )

    def projections(self, x: Array, layer: Linear, norm: Array) -> list[Array]:
        """q, k and v."""
        before = (norm, self.eps)
        blocks = [
            self.ops.projections(x[:, rows], layer.weight, self.sizes, norm=before, bias=layer.bias)
            for rows in self._blocks(x)
        ]
        return [self._joined(parts) for parts in zip(*blocks, strict=True)]

    def filled(self, x: Array) -> Array:
        """``x`` [1, n, ·], and zeros up to a whole block."""
        missing = self.padding(int(x.shape[1]))
        if not missing:
            return x
        return self.ops.concat([x, self.ops.zeros((1, missing, int(x.shape[2])), self.ops.dtype(x))], 1)

    def padding(self, count: int) -> int:
        return 0 if self.block is None else -count % self.block

    def _blocks(self, x: Array) -> list[slice]:
        if self.block is None:
            return [slice(None)]
        return [slice(i, i + self.block) for i in range(0, int(x.shape[1]), self.block)]

    def _joined(self, parts: Iterable[Array]) -> Array:
        blocks = list(parts)
        return blocks[0] if len(blocks) == 1 else self.ops.concat(blocks, 1)


def _part(x: Array | None, rows: slice) -> Array | None:
    return None if x is None else x[:, rows]


class _RaggedStep:
    """The rows of a step, [1, N, ·]: those of each cache in turn, sequence by sequence, and what fills up the block."""

    def __init__(
        self,
        ops: Ops,
        config: LlamaConfig,
        sizes: Sequence[tuple[int, ...]],
        caches: Sequence[StepCache],
        products: _Products,
    ) -> None:
        self._ops, self._config, self._sizes, self._caches, self._products = ops, config, sizes, caches, products
        self.errors: dict[int, Exception] = {}
        self._undo: list[Callable[[], None] | None] = []
        for i, (cache, (_, count)) in enumerate(zip(caches, sizes, strict=True)):
            try:
                cache.begin_step(count)
            except Exception as error:
                self.errors[i] = error
            self._undo.append(None if i in self.errors else cache.checkpoint())
        self._count = sum(batch * count for batch, count in sizes)

    def flat_ids(self, ids: Sequence[np.ndarray]) -> Array:
        return self._ops.asarray(np.concatenate([np.ravel(part) for part in ids])[None].astype(np.int32), "int32")

    def begin(self, inv_freq: np.ndarray) -> None:
        """Angles of the rotary embedding: flat ones here, and each cache's own where its layers apply it themselves."""
        self._own: list[Angles | None] = [None] * len(self._caches)
        for unit, (cache, (_, count)) in enumerate(zip(self._caches, self._sizes, strict=True)):
            if unit not in self.errors:
                try:
                    self._own[unit] = cache.angles(inv_freq, count)
                except Exception as error:
                    self._fail(unit, error)
        turning = [unit in self.errors or own is not None for unit, own in enumerate(self._own)]
        self._flat = None if all(turning) else self._angles(inv_freq)

    def _angles(self, inv_freq: np.ndarray) -> Angles:
        """cos and sin [1, N, 1, D/2], float32; the angle is taken in float64, where long contexts keep their phase."""
        positions = [
            offset + np.arange(count)
            for cache, (_, count) in zip(self._caches, self._sizes, strict=True)
            for offset in cache.offsets
        ]
        flat = np.concatenate([*positions, np.zeros(self._products.padding(self._count), np.int64)])
        angle = flat[None, :, None, None] * inv_freq
        return self._ops.asarray(np.cos(angle).astype(np.float32)), self._ops.asarray(np.sin(angle).astype(np.float32))

    def attention(self, layer: int, *projected: Array) -> Array:
        """Attention of every cache over its own rows: q, k and v [1, N, n · D] -> [1, N, Hq · D]."""
        ops, dim = self._ops, self._config.head_dim
        q, k, v = (ops.reshape(x, (1, -1, int(x.shape[-1]) // dim, dim)) for x in projected)
        turned = (q, k) if self._flat is None else (_rotate(ops, q, self._flat), _rotate(ops, k, self._flat))
        parts, at = [], 0
        for unit, size in enumerate(self._sizes):
            end = at + size[0] * size[1]
            queries, keys = turned if self._own[unit] is None else (q, k)
            parts.append(self._attend(unit, layer, [rows[:, at:end] for rows in (queries, keys, v)]))
            at = end
        return self._products.filled(parts[0] if len(parts) == 1 else ops.concat(parts, 1))

    def _attend(self, unit: int, layer: int, parts: Sequence[Array]) -> Array:
        """One cache's share: rows [1, B · T, n, D] of q, k and v -> [1, B · T, Hq · D]."""
        ops, (batch, count), width = self._ops, self._sizes[unit], self._config.num_heads * self._config.head_dim
        q, k, v = (
            ops.permute_dims(ops.reshape(x, (batch, count, int(x.shape[2]), int(x.shape[3]))), (0, 2, 1, 3))
            for x in parts
        )
        if unit not in self.errors:
            own, window = self._own[unit], _window(self._config, layer)
            try:
                rows: Any = self._caches[unit].layers[layer]
                out = rows.step(
                    q, k, v, self._config.head_dim**-0.5, window, **({} if own is None else {"angles": own})
                )
                return ops.reshape(ops.permute_dims(out, (0, 2, 1, 3)), (1, batch * count, width))
            except Exception as error:
                self._fail(unit, error)
        return ops.zeros((1, batch * count, width), ops.dtype(q))

    def commit(self) -> None:
        for unit, cache in enumerate(self._caches):
            if unit not in self.errors:
                try:
                    cache.commit()
                except Exception as error:
                    self._fail(unit, error)

    def take_back(self) -> None:
        for unit in range(len(self._caches)):
            if unit not in self.errors:
                self._back(unit)

    def wanted(self, x: Array, all_logits: bool) -> tuple[Array, tuple[slice, ...]]:
        """The rows whose logits are asked for, filled up, and which of them are whose."""
        ends = np.cumsum([batch * count for batch, count in self._sizes]).tolist()
        if all_logits:
            return x, tuple(slice(a, b) for a, b in zip([0, *ends], ends, strict=False))
        last = [
            end - batch * count + (row + 1) * count - 1
            for (batch, count), end in zip(self._sizes, ends, strict=True)
            for row in range(batch)
        ]
        ends = np.cumsum([batch for batch, _ in self._sizes]).tolist()
        spans = tuple(slice(a, b) for a, b in zip([0, *ends], ends, strict=False))
        if last == list(range(self._count)):
            return x, spans
        return self._products.filled(self._ops.concat([x[:, i : i + 1] for i in last], 1)), spans

    def _fail(self, unit: int, error: Exception) -> None:
        self.errors[unit] = error
        self._back(unit)

    def _back(self, unit: int) -> None:
        undo = self._undo[unit]
        if undo is not None:
            undo()


def _window(config: LlamaConfig, layer: int) -> int | None:
    return config.layer_windows[layer] if config.layer_windows else None


def _rotate(ops: Ops, x: Array, angles: Angles) -> Array:
    """Rotary embedding (RoFormer, arXiv 2104.09864), halves paired as Hugging Face does; x [..., D]."""
    cos, sin = angles
    half = int(x.shape[-1]) // 2
    wide = ops.astype(x, "float32")
    first, second = wide[..., :half], wide[..., half:]
    turned = ops.concat([first * cos - second * sin, second * cos + first * sin], -1)
    return ops.astype(turned, ops.dtype(x))
