"""Rows to planes on Metal, in one launch: rotate, quantize, pack. No value visits the host."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from kvcore.backends.metal.kernels import CODEC_NUMBERS, ENCODE, SIMDS, THREADS
from kvcore.backends.metal.launch import Launch, Run, run_on_metal
from kvcore.layout import Codebook, Codec, Rotation
from kvcore.ops import Array, Ops


def encode_metal(ops: Ops, codec: Codec, rows: Array, rotation: Rotation | None) -> Mapping[str, Array]:
    """Rows [B, H, n, D] of any strides to the codec's planes."""
    return encode(ops, codec, rows, rotation, run_on_metal)


def encode(ops: Ops, codec: Codec, rows: Array, rotation: Rotation | None, run: Run) -> Mapping[str, Array]:
    if not codec.quantized:
        return {"rows": rows}
    batch, heads, tokens, dim = (int(n) for n in rows.shape)
    plane = codec.planes[0]
    shapes = ((batch, heads, tokens, plane.width(dim)), plane.dtype), ((batch, heads, tokens, 1), "float16")
    count = batch * heads * tokens
    if count == 0:
        return {name: ops.zeros(*output) for name, output in zip(("codes", "scale"), shapes, strict=True)}
    matrix, signs = (rotation.matrix, rotation.signs) if rotation is not None else (zeros(ops), zeros(ops))
    book = codec.codebook
    factor = numbers(ops, book.spread * dim**0.5 if book else 1.0)
    launch = Launch(
        ENCODE,
        (rows, matrix, signs, levels(ops, book), factor, integers(ops, heads, tokens, count)),
        (("T", ops.dtype(rows)), ("D", dim), ("CODEC", CODEC_NUMBERS[codec.name])),
        grid=(-(-count // SIMDS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        outputs=shapes,
    )
    codes, scale = run(ops, launch)
    return {"codes": codes, "scale": scale}


@lru_cache(maxsize=32)
def zeros(ops: Ops, dtype: str = "float32") -> Array:
    """What stands for an input that the kernel does not read: too long for MLX to pass it as a constant."""
    return ops.zeros((1, 1, 8, 1), dtype)


@lru_cache(maxsize=32)
def levels(ops: Ops, book: Codebook | None) -> Array:
    return zeros(ops) if book is None else ops.asarray(book.as_array())


def integers(ops: Ops, *values: int) -> Array:
    return ops.asarray(np.array(values, np.int32))


def numbers(ops: Ops, *values: float) -> Array:
    return ops.asarray(np.array(values, np.float32))
