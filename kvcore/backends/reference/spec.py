"""The specification: codecs and attention written as the formulas read, for tests to compare everything else with.

Independent of the graph operations in `kvcore.modes`: plain NumPy, one vector or one matrix at a time, no tiling.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcore.layout import Codebook, hadamard_dct, rotation_signs

Floats = npt.NDArray[np.float32]


def rotation_matrix(layer: int, part: str, head_dim: int) -> npt.NDArray[np.float64]:
    """R = (H ⊗ C)·diag(signs), float64 [D, D]."""
    return hadamard_dct(head_dim).astype(np.float64) * rotation_signs(layer, part, head_dim)


def round_up_to_fp16(x: Floats) -> npt.NDArray[np.float16]:
    """The smallest fp16 number not below each x."""
    nearest = x.astype(np.float16)
    return np.where(nearest.astype(np.float32) < x, np.nextafter(nearest, np.float16(np.inf)), nearest)


def int8_encode(x: Floats) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """Rows [..., D] -> codes [..., D], scale [..., 1]: absmax / 127 rounded up, codes = round-half-even(x / scale)."""
    x = x.astype(np.float32)
    scale = round_up_to_fp16(np.abs(x).max(-1, keepdims=True) / np.float32(127))
    scale = np.where(scale == 0, np.float16(1), scale)
    return np.rint(x / scale.astype(np.float32)).astype(np.int8), scale


def int8_decode(codes: npt.NDArray[np.int8], scale: npt.NDArray[np.float16]) -> Floats:
    return codes.astype(np.float32) * scale.astype(np.float32)


def turbo_normalize(x: Floats, rotation: npt.NDArray[np.float64], book: Codebook) -> npt.NDArray[np.float64]:
    """z = (R x)·(s·√D / ‖x‖), what the codebook quantizes; float64 [..., D]. Zero rows give zeros."""
    wide = x.astype(np.float64)
    norm = np.linalg.norm(wide, axis=-1, keepdims=True)
    unit = np.divide(wide, norm, out=np.zeros_like(wide), where=norm > 0)
    return unit @ rotation.T * (book.spread * np.sqrt(x.shape[-1]))


def turbo_encode(
    x: Floats, rotation: npt.NDArray[np.float64], book: Codebook
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float16]]:
    """Rows [..., D] -> indices [..., D] (not packed), scale [..., 1] = ‖x‖ / ‖levels[index]‖, at most 65504."""
    z = turbo_normalize(x, rotation, book)
    indices = np.searchsorted(np.array(book.midpoints), z, side="left")
    length = np.linalg.norm(book.as_array()[indices], axis=-1, keepdims=True)
    norm = np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)
    return indices, np.minimum(norm / length, 65504).astype(np.float16)


def turbo_decode(
    indices: npt.NDArray[np.intp],
    scale: npt.NDArray[np.float16],
    rotation: npt.NDArray[np.float64],
    book: Codebook,
) -> npt.NDArray[np.float64]:
    """x̂ = scale · Rᵀ levels[index]."""
    return book.as_array()[indices].astype(np.float64) @ rotation * scale.astype(np.float64)


def pack_bits(indices: npt.NDArray[np.intp], bits: int) -> npt.NDArray[np.uint8]:
    """Indices [..., D] as one little-endian bit stream per row, uint8 [..., D·bits/8]."""
    stream = (indices[..., None] >> np.arange(bits)) & 1
    return np.packbits(stream.reshape(*indices.shape[:-1], -1).astype(np.uint8), -1, bitorder="little")


def attention(q: Floats, k: Floats, v: Floats, scale: float, window: int | None = None) -> npt.NDArray[np.float64]:
    """softmax(scale · q kᵀ) v in float64: q [B, Hq, n, D], k and v [B, Hkv, T, D]; the queries are the newest rows."""
    group, rows, tokens = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    wide_k, wide_v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    logits = q.astype(np.float64) @ wide_k.swapaxes(-1, -2) * scale
    query, key = np.arange(tokens - rows, tokens)[:, None], np.arange(tokens)[None, :]
    allowed = (key <= query) & (key > query - (window or tokens))
    logits = np.where(allowed, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    out: npt.NDArray[np.float64] = weights / weights.sum(-1, keepdims=True) @ wide_v
    return out
