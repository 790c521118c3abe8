"""What others store, as evaluation codecs, written from their public definitions. None is a mode of kvcore.

Bytes count codes, scales and zeros, each scale and zero as a float16. Where a definition leaves rows raw around its
codes, that is the table's window here, the same for all.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcore.eval import grids
from kvcore.eval.codecs import RoundTrip, RowCodec, Variant
from kvcore.eval.rows import RawRows
from kvcore.ops import Array, Ops

BLOCK = 32  # of llama.cpp's q8_0 and q4_0, along the head
EPSILON = 1e-7  # MLX's least scale


def llama_q8_0(ops: Ops, rows: Array) -> Array:
    """ggml's quantize_row_q8_0_ref: per 32 values d = absmax / 127, codes = round(x / d), halves away from zero; d is
    stored as fp16 after the codes are made."""
    x, shape = grids.by_channels(ops, rows, BLOCK)
    d = ops.max(ops.abs(x), axis=-1, keepdims=True) / 127.0
    scaled = x / grids.nonzero(ops, d)
    size = grids.floor(ops, ops.abs(scaled) + 0.5)
    return grids.ungrouped(ops, ops.where(scaled < 0, -size, size) * grids.half(ops, d), shape)


def llama_q4_0(ops: Ops, rows: Array) -> Array:
    """ggml's quantize_row_q4_0_ref: per 32 values d = (the value of largest magnitude) / −8, codes = min(15, ⌊x / d +
    8.5⌋), read back as (code − 8) · d with d in fp16."""
    x, shape = grids.by_channels(ops, rows, BLOCK)
    low, high = grids.extremes(ops, x, -1)
    d = ops.where(-low > high, low, high) / -8.0
    codes = grids.clip(ops, grids.floor(ops, x / grids.nonzero(ops, d) + 8.5), 0.0, 15.0)
    return grids.ungrouped(ops, (codes - 8.0) * grids.half(ops, d), shape)


def mlx_affine(ops: Ops, rows: Array, bits: int, size: int) -> Array:
    """mlx.core.quantize, mode "affine": the edge of larger magnitude is met exactly by a whole number of scales, and
    is the bias; scale and bias in fp16."""
    x, shape = grids.by_channels(ops, rows, size)
    low, high = grids.extremes(ops, x, -1)
    top = float(2**bits - 1)
    below = ops.abs(low) > ops.abs(high)
    step = ops.maximum((high - low) / top, EPSILON)
    step = ops.where(below, step, -step)
    edge = ops.where(below, low, high)
    count = ops.round(edge / step)
    step = grids.half(ops, ops.where(count != 0, edge / grids.nonzero(ops, count), step))
    bias = grids.half(ops, ops.where(count == 0, 0.0, edge))
    codes = grids.clip(ops, ops.round((x - bias) / grids.nonzero(ops, step)), 0.0, top)
    return grids.ungrouped(ops, codes * step + bias, shape)


def kivi_k(ops: Ops, rows: Array, bits: int, size: int) -> Array:
    """KIVI (arXiv 2402.02750), keys: per channel, minimum and maximum of ``size`` consecutive tokens."""
    x, shape = grids.by_tokens(ops, rows, size)
    return grids.ungrouped(ops, grids.min_max(ops, x, bits, -2), shape)


def kivi_v(ops: Ops, rows: Array, bits: int, size: int) -> Array:
    """KIVI, values: per token, minimum and maximum of ``size`` neighbouring channels."""
    x, shape = grids.by_channels(ops, rows, size)
    return grids.ungrouped(ops, grids.min_max(ops, x, bits, -1), shape)


def fp8_per_token(ops: Ops, rows: Array) -> Array:
    """fp8 e4m3 with one fp16 scale per token and head that brings the largest magnitude to 448."""
    x = ops.astype(rows, "float32")
    scale = ops.max(ops.abs(x), axis=-1, keepdims=True) / grids.E4M3_MAX
    scale = grids.nonzero(ops, grids.half(ops, scale))
    return grids.e4m3(ops, x / scale) * scale


def _codec(
    name: str, function: Callable[[Ops, Array], Array], bits: float, extra: float = 0.0, group: int = 1
) -> RowCodec:
    """``bits`` per element and ``extra`` bytes per row."""

    def bind(ops: Ops, layer: int, part: str, head_dim: int) -> RoundTrip:
        return lambda rows: function(ops, rows)

    return RowCodec(name, bind, lambda head_dim, raw_dtype: head_dim * bits / 8 + extra, group)


def _affine(bits: int, size: int) -> RowCodec:
    name = f"mlx-{bits}bit-g{size}"
    return _codec(name, lambda ops, rows: mlx_affine(ops, rows, bits, size), bits + 32 / size)


def _pairs() -> dict[str, tuple[RowCodec, RowCodec]]:
    q8_0 = _codec("llama-q8_0", llama_q8_0, 8 + 16 / BLOCK)
    q4_0 = _codec("llama-q4_0", llama_q4_0, 4 + 16 / BLOCK)
    fp8 = _codec("fp8-e4m3", fp8_per_token, 8, extra=2)
    k = _codec("kivi-4bit-g32", lambda ops, rows: kivi_k(ops, rows, 4, 32), 4 + 32 / 32, group=32)
    v = _codec("kivi-4bit-g32", lambda ops, rows: kivi_v(ops, rows, 4, 32), 4 + 32 / 32)
    same = [q8_0, fp8, *(_affine(bits, size) for bits in (8, 4) for size in (64, 32)), q4_0]
    return {codec.name: (codec, codec) for codec in same} | {k.name: (k, v)}


BASELINES = _pairs()


def baseline_variant(name: str, rows: RawRows) -> Variant:
    return Variant(name, *BASELINES[name], rows)
