"""Attention of a step of few rows on Metal: q is rotated once, one launch attends to splits, another merges them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvcore.backends.metal.encode import integers, levels, numbers, zeros
from kvcore.backends.metal.kernels import ATTEND, CODEC_NUMBERS, COMBINE, ROTATE, SIMDS, THREADS
from kvcore.backends.metal.launch import Launch, Run, run_on_metal
from kvcore.layout import KVView, Rotation
from kvcore.ops import Array, Ops

MAX_VECTORS = 8  # query vectors that share one read of K and V
THREADGROUPS = 512  # so many give every core of a large Apple GPU several
SHORTEST = THREADS  # rows of a split: a tile of 32 for each simdgroup
LONGEST = 4096
FEW = 8  # MLX passes an input with fewer elements as a constant, for which it compiles the kernel anew


@dataclass(frozen=True, slots=True)
class Split:
    """How the rows are cut: ``pages`` splits of folded rows, then ``raw`` ones of sinks and tail, of ``rows`` each."""

    rows: int
    pages: int
    raw: int

    @property
    def count(self) -> int:
        return self.pages + self.raw


def split_rows(page_rows: int, raw_rows: int, parallel: int) -> Split:
    """Splits of whole tiles, as short as `THREADGROUPS` allow where ``parallel`` threadgroups share each split."""
    wanted = max(1, THREADGROUPS // parallel)
    rows = -(-(page_rows + raw_rows) // wanted)
    rows = min(LONGEST, max(SHORTEST, -(-rows // SHORTEST) * SHORTEST))
    return Split(rows, -(-page_rows // rows), -(-raw_rows // rows))


def chunk_vectors(vectors: int) -> tuple[int, int]:
    """Chunks of at most `MAX_VECTORS` query vectors, as equal as can be: their number and their size."""
    chunks = -(-vectors // MAX_VECTORS)
    return chunks, -(-vectors // chunks)


def attend_metal(ops: Ops, q: Array, view: KVView, scale: float, window: int | None = None) -> Array:
    """Attention of the newest rows' queries [B, Hq, n, D] over all live rows, in q's dtype. Planes are read as they lie
    in their buffers, of any strides but 1 along a row."""
    return attend(ops, q, view, scale, window, run_on_metal)


def attend(ops: Ops, q: Array, view: KVView, scale: float, window: int | None, run: Run) -> Array:
    batch, q_heads, rows, dim = (int(n) for n in q.shape)
    kv_heads, tail = (int(n) for n in view.tail_k.shape[1:3])
    group = q_heads // kv_heads
    page_rows, raw_rows = max(0, view.folded - view.sinks), view.sinks + tail
    dtype = ops.dtype(q)
    if page_rows + raw_rows == 0 or rows == 0 or batch == 0:
        return ops.zeros((batch, q_heads, rows, dim), dtype)
    chunks, size = chunk_vectors(group * rows)
    split = split_rows(page_rows, raw_rows, batch * kv_heads * chunks)
    factor = numbers(ops, scale * math.log2(math.e))  # the kernels' exponentials are powers of two
    k_rotation, v_rotation = (view.k_rotation, view.v_rotation) if page_rows else (None, None)
    turned = zeros(ops) if k_rotation is None else rotate(ops, q, k_rotation, factor, run)
    (k_codec, v_codec), stored = _stored(ops, view, page_rows)
    centred = view.layout.k.centred and page_rows > 0
    bias = center_biases(ops, turned, view) if centred else (zeros(ops), zeros(ops, "int32"))
    counts = (kv_heads, group, rows, view.sinks, view.folded, tail, split.count, split.pages, split.rows)
    dims = integers(ops, *counts, window or 0, view.keep, chunks)
    template: dict[str, str | int | bool] = {
        "T": dtype,
        "R": ops.dtype(view.tail_k),
        "D": dim,
        "K_CODEC": k_codec,
        "V_CODEC": v_codec,
        "CENTRED": centred,
        "N": size,
    }
    places = batch * kv_heads * group * rows
    partial = Launch(
        ATTEND,
        (q, turned, *stored, *bias, factor, dims),
        tuple(template.items()),
        grid=(THREADS, split.count, batch * kv_heads * chunks),
        threadgroup=(THREADS, 1, 1),
        outputs=(((places, split.count, dim), "float32"), ((places, split.count, 2), "float32")),
    )
    sums, stats = run(ops, partial)
    matrix, signs = (v_rotation.matrix, v_rotation.signs) if v_rotation is not None else (zeros(ops), zeros(ops))
    merged = Launch(
        COMBINE,
        (sums, stats, matrix, signs, integers(ops, split.count, split.pages)),
        (("T", dtype), ("D", dim), ("ROTATED", v_rotation is not None)),
        grid=(THREADS, places, 1),
        threadgroup=(THREADS, 1, 1),
        outputs=(((batch, q_heads, rows, dim), dtype),),
    )
    return run(ops, merged)[0]


def rotate(ops: Ops, q: Array, rotation: Rotation, factor: Array, run: Run) -> Array:
    """R q times ``factor``, float32 of q's shape [B, Hq, n, D]."""
    batch, heads, rows, dim = (int(n) for n in q.shape)
    vectors = batch * heads * rows
    launch = Launch(
        ROTATE,
        (q, rotation.matrix, rotation.signs, factor, integers(ops, heads, rows, vectors)),
        (("T", ops.dtype(q)), ("D", dim)),
        grid=(-(-vectors // SIMDS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        outputs=(((batch, heads, rows, dim), "float32"),),
    )
    return run(ops, launch)[0]


def center_biases(ops: Ops, turned: Array, view: KVView) -> tuple[Array, Array]:
    """What centres add to logits, float32 [B, Hkv, vectors, pages], and the page of each folded row, int32 [folded].

    ``turned`` [B, Hq, n, D] is R_K q, scaled. Neither is shorter than `FEW`: there is padding at their ends.
    """
    batch, q_heads, rows, dim = (int(n) for n in turned.shape)
    kv_heads, pages = int(view.tail_k.shape[1]), len(view.page_rows)
    vectors = ops.reshape(turned, (batch, kv_heads, q_heads // kv_heads * rows, dim))
    bias = ops.matmul(vectors, ops.permute_dims(ops.astype(view.k_centers, "float32"), (0, 1, 3, 2)))
    if batch * q_heads * rows * pages < FEW:
        bias = ops.concat([bias] * FEW, 3)
    return bias, _page_of_rows(ops, view.page_rows)


@lru_cache(maxsize=32)
def _page_of_rows(ops: Ops, page_rows: tuple[int, ...]) -> Array:
    pages = np.repeat(np.arange(len(page_rows), dtype=np.int32), page_rows)
    return ops.asarray(np.pad(pages, (0, max(0, FEW - len(pages)))))


def _stored(ops: Ops, view: KVView, page_rows: int) -> tuple[tuple[int, int], tuple[Array, ...]]:
    """Codec numbers of the pages, and the arrays of pages, raw rows and levels; a stand-in for each that is absent."""
    tail, dim = (int(n) for n in view.tail_k.shape[2:])
    absent = _no_rows(ops, dim, ops.dtype(view.tail_k))
    raw = (
        *((view.sink_k, view.sink_v) if view.sinks else (absent, absent)),
        *((view.tail_k, view.tail_v) if tail else (absent, absent)),
    )
    codecs, planes, books = [], [], []
    for codec, stored in ((view.layout.k, view.k_planes), (view.layout.v, view.v_planes)):
        quantized = codec.quantized and page_rows > 0
        codecs.append(CODEC_NUMBERS[codec.name] if page_rows else CODEC_NUMBERS["raw"])
        planes += [stored["codes" if quantized else "rows"] if page_rows else absent]
        planes += [stored["scale"] if quantized else zeros(ops, "float16")]
        books.append(levels(ops, codec.codebook if quantized else None))
    return (codecs[0], codecs[1]), (*planes, *raw, *books)


@lru_cache(maxsize=32)
def _no_rows(ops: Ops, dim: int, dtype: str) -> Array:
    return ops.zeros((1, 1, 1, dim), dtype)
