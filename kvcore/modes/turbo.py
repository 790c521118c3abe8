"""turbo4 and turbo3: rotate, quantize each coordinate with one fixed codebook, keep one number per vector.

TurboQuant (arXiv 2504.19874, MSE variant without the residual stage), with the norm correction folded into the
stored scale: scale = ‖x‖ / ‖levels[index]‖, so that a decoded vector has exactly the length of the original.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from kvcore.layout import Codebook, Codec, Rotation
from kvcore.modes.int8 import FP16_MAX
from kvcore.ops import Array, Ops


def functions(codec: Codec):  # type: ignore[no-untyped-def]
    """The pair (encode, unpack) for a codec with a codebook."""
    book = codec.codebook
    assert book is not None

    def encode(ops: Ops, rows: Array, rotation: Rotation | None) -> dict[str, Array]:
        assert rotation is not None
        return _encode(ops, rows, rotation, book)

    def unpack(ops: Ops, planes: Mapping[str, Array]) -> tuple[Array, Array | None]:
        return unpack_levels(ops, planes["codes"], book), ops.astype(planes["scale"], "float32")

    return encode, unpack


def _encode(ops: Ops, rows: Array, rotation: Rotation, book: Codebook) -> dict[str, Array]:
    """``rows`` [B, H, T, D] -> codes uint8 [B, H, T, D·bits/8], scale fp16 [B, H, T, 1]."""
    x = ops.astype(rows, "float32")
    absmax = ops.max(ops.abs(x), axis=-1, keepdims=True)
    usable = ops.isfinite(absmax)
    zero = absmax == 0
    # Dividing by absmax first keeps the squares of huge and of tiny rows in float32's range.
    absmax = ops.where(zero, 1.0, ops.where(usable, absmax, 1.0))
    unit = ops.where(usable, x, 0.0) / absmax
    norm = ops.sqrt(ops.sum(unit * unit, axis=-1, keepdims=True))
    safe_norm = ops.where(norm == 0, 1.0, norm)
    z = rotation.apply(ops, unit) * (book.spread * rows.shape[-1] ** 0.5 / safe_norm)
    indices = quantize(ops, z, book)
    values = ops.take(ops.asarray(book.as_array()), indices, 0)
    length = ops.sqrt(ops.sum(values * values, axis=-1, keepdims=True))
    scale = ops.minimum(norm / length * absmax, FP16_MAX)
    indices = ops.where(usable, indices, ops.astype(indices * 0, "uint8"))
    return {"codes": pack_indices(ops, indices, book.bits), "scale": ops.astype(scale, "float16")}


def quantize(ops: Ops, z: Array, book: Codebook) -> Array:
    """The number of midpoints strictly below each ``z``, as uint8 of the same shape."""
    indices = ops.astype(z > book.midpoints[0], "uint8")
    for midpoint in book.midpoints[1:]:
        indices = indices + ops.astype(z > midpoint, "uint8")
    return indices


def pack_indices(ops: Ops, indices: Array, bits: int) -> Array:
    """uint8 [..., D] -> uint8 [..., D·bits/8].

    4 bits: the even index in the low nibble. 3 bits: eight indices in a little-endian 24-bit word.
    """
    lead, dim = tuple(indices.shape[:-1]), indices.shape[-1]
    if bits == 4:
        pairs = ops.reshape(indices, (*lead, dim // 2, 2))
        return pairs[..., 0] | (pairs[..., 1] << 4)
    i = ops.reshape(indices, (*lead, dim // 8, 8))
    # uint8 shifts drop the bits that belong to the next byte.
    first = i[..., 0] | (i[..., 1] << 3) | (i[..., 2] << 6)
    second = (i[..., 2] >> 2) | (i[..., 3] << 1) | (i[..., 4] << 4) | (i[..., 5] << 7)
    third = (i[..., 5] >> 1) | (i[..., 6] << 2) | (i[..., 7] << 5)
    return ops.reshape(ops.stack([first, second, third], -1), (*lead, dim // 8 * 3))


def unpack_levels(ops: Ops, codes: Array, book: Codebook) -> Array:
    """uint8 [..., D·bits/8] -> levels float32 [..., D], by one look-up for two (4 bits) or four (3 bits) of them."""
    lead, width = tuple(codes.shape[:-1]), codes.shape[-1]
    if book.bits == 4:
        words = ops.astype(codes, "int32")
    else:
        b = ops.astype(ops.reshape(codes, (*lead, width // 3, 3)), "int32")
        words = ops.stack([b[..., 0] | ((b[..., 1] & 15) << 8), (b[..., 1] >> 4) | (b[..., 2] << 4)], -1)
    return ops.reshape(ops.take(_level_table(ops, book), words, 0), (*lead, width * 8 // book.bits))


@lru_cache(maxsize=16)
def _level_table(ops: Ops, book: Codebook) -> Array:
    """Levels of all indices in a byte [256, 2], or in a 12-bit word [4096, 4]."""
    words = np.arange(256 if book.bits == 4 else 4096)
    shifts = np.arange(0, 8 if book.bits == 4 else 12, book.bits)
    return ops.asarray(book.as_array()[(words[:, None] >> shifts) & (len(book.levels) - 1)])
