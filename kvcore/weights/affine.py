"""MLX's affine quantization in NumPy: packing, values, and the quantizer of ``mlx.core.quantize``.

A row of codes is one little-endian bit stream: code ``i`` holds bits ``[i * bits, (i + 1) * bits)``. For 2, 4
and 8 bits no code crosses a byte; for 3, 5 and 6 bits, eight codes fill ``bits`` whole bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES = (32, 64, 128)

Array = npt.NDArray[np.generic]


def columns(words: int, bits: int) -> int:
    """How many codes of ``bits`` bits a row of ``words`` 32-bit words holds."""
    return words * 32 // bits


def unpack(words: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint8]:
    """uint32 [..., n * bits / 32] -> uint8 codes [..., n]."""
    stream = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
    codes = np.empty((*words.shape[:-1], columns(words.shape[-1], bits)), np.uint8)
    mask = 2**bits - 1
    if 8 % bits == 0:
        per_byte = 8 // bits
        for i in range(per_byte):
            codes[..., i::per_byte] = (stream >> (bits * i)) & mask
        return codes
    padded = np.zeros((*stream.shape[:-1], stream.shape[-1] // bits, 8), np.uint8)
    padded[..., :bits] = stream.reshape(*stream.shape[:-1], -1, bits)
    octets = padded.view("<u8")[..., 0]
    for i in range(8):
        codes[..., i::8] = (octets >> np.uint64(bits * i)) & np.uint64(mask)
    return codes


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint32]:
    """uint8 codes [..., n], n a multiple of 32 -> uint32 [..., n * bits / 32]."""
    lead, width = codes.shape[:-1], codes.shape[-1]
    if 8 % bits == 0:
        per_byte = 8 // bits
        stream = np.zeros((*lead, width // per_byte), np.uint8)
        for i in range(per_byte):
            stream |= codes[..., i::per_byte] << np.uint8(bits * i)
        return stream.view("<u4").astype(np.uint32, copy=False)
    octets = np.zeros((*lead, width // 8), "<u8")
    for i in range(8):
        octets |= codes[..., i::8].astype(np.uint64) << np.uint64(bits * i)
    stream = octets[..., None].view(np.uint8)[..., :bits]
    return np.ascontiguousarray(stream).reshape(*lead, -1).view("<u4").astype(np.uint32, copy=False)


def affine_value(
    codes: npt.NDArray[np.uint8], scales: Array, biases: Array, group_size: int
) -> npt.NDArray[np.float32]:
    """``scale * code + bias`` in float32; codes [..., n], scales and biases [..., n / group_size]."""
    grouped = codes.reshape(*scales.shape, group_size).astype(np.float32)
    grouped *= scales.astype(np.float32)[..., None]
    grouped += biases.astype(np.float32)[..., None]
    return grouped.reshape(codes.shape)


def affine_quantize(
    values: Array, bits: int, group_size: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Codes uint8 [..., n], float32 scales and biases [..., n / group_size], as in ``mlx.core.quantize``.

    The end of each group's range that is larger in magnitude is met exactly, and zero gets a code of its own.
    """
    grouped = values.astype(np.float32).reshape(*values.shape[:-1], -1, group_size)
    low, high = grouped.min(axis=-1), grouped.max(axis=-1)
    low_is_edge = np.abs(low) > np.abs(high)
    top = np.float32(2**bits - 1)
    step = np.maximum((high - low) / top, np.float32(1e-7))
    step = np.where(low_is_edge, step, -step)
    edge = np.where(low_is_edge, low, high)
    edge_code = np.rint(edge / step)
    keeps_edge = edge_code != 0
    scales = np.where(keeps_edge, edge / np.where(keeps_edge, edge_code, 1), step).astype(np.float32)
    biases = np.where(keeps_edge, edge, 0).astype(np.float32)
    codes = np.clip(np.rint((grouped - biases[..., None]) / scales[..., None]), 0, top)
    return codes.astype(np.uint8).reshape(values.shape), scales, biases
