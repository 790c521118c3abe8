"""int8: one scale per token and head, codes = round(x / scale)."""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.layout import Rotation
from kvcore.ops import Array, Ops

FP16_MAX = 65504.0


def encode(ops: Ops, rows: Array, rotation: Rotation | None = None) -> dict[str, Array]:
    """``rows`` [B, H, T, D] -> codes int8 [B, H, T, D] in [-127, 127], scale fp16 [B, H, T, 1].

    scale = absmax / 127, rounded *up* to fp16 so that no code clips; a zero row gets scale 1. A row with a
    non-finite value gets scale 0 and codes 0.
    """
    x = ops.astype(rows, "float32")
    absmax = ops.max(ops.abs(x), axis=-1, keepdims=True)
    finite = ops.isfinite(absmax)
    scale = _round_up_to_fp16(ops, ops.where(finite, absmax, 0.0) / 127.0)
    divisor = ops.astype(scale, "float32")
    divisor = ops.where(divisor == 0, 1.0, divisor)
    codes = ops.round(ops.where(finite, x, 0.0) / divisor)
    codes = ops.minimum(ops.maximum(codes, -127.0), 127.0)
    stored = ops.where(finite, divisor, 0.0)
    return {"codes": ops.astype(codes, "int8"), "scale": ops.astype(stored, "float16")}


def unpack(ops: Ops, planes: Mapping[str, Array]) -> tuple[Array, Array | None]:
    return ops.astype(planes["codes"], "float32"), ops.astype(planes["scale"], "float32")


def _round_up_to_fp16(ops: Ops, x: Array) -> Array:
    """The smallest fp16 number that is not below ``x`` (float32, not negative), at most 65504."""
    nearest = ops.astype(ops.minimum(x, FP16_MAX), "float16")
    below = ops.astype(nearest, "float32") < ops.minimum(x, FP16_MAX)
    bits = ops.astype(ops.bitcast(nearest, "uint16"), "int32")
    bits = bits + ops.astype(below, "int32")
    return ops.bitcast(ops.astype(bits, "uint16"), "float16")
