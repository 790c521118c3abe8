"""Rows of weights that are stored as tiles: embeddings of a few tokens, or a whole matrix for a product of many rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # inputs of a program


@triton.jit
def weight_rows_kernel(
    CODES, SIDES, IDS, OUT, M,
    K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, GATED: tl.constexpr, SELECT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of inputs). See `linear.WeightTiles` for the order: within a tile row = 8·r + g, within a step
    k = 32·h + 8·t + 4·j + 2·b + e."""
    row = tl.program_id(0)
    if SELECT:
        row = tl.load(IDS + row).to(tl.int32)
    if GATED:
        r = row // M
        tile, g = (row % M) // 8, row % M % 8
    else:
        tile, g = row // 16, row % 8
        r = row % 16 // 8
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    h, t, j, b, e = k // 32 % 2, k // 8 % 4, k // 4 % 2, k // 2 % 2, k % 2
    step = tile.to(tl.int64) * (K // 64) + k // 64
    if BITS == 16:
        at = step * 1024 + (((h * 2 + j) * 8 + g) * 4 + t) * 8 + b * 4 + r * 2 + e
        value = tl.load(CODES + at, mask=inside, other=0.0).to(tl.float32)
    else:
        if BITS == 4:
            at = ((g * 4 + t) * 2 + h) * 2 + j
            shift = e * 16 + b * 8 + r * 4
        else:
            at = (((h * 8 + g) * 4 + t) * 2 + j) * 2 + b
            shift = r * 16 + e * 8
        word = tl.load(CODES + step * (32 * BITS) + at, mask=inside, other=0)
        code = ((word >> shift) & ((1 << BITS) - 1)).to(tl.float32)
        side = (tile.to(tl.int64) * (K // GROUP) + k // GROUP) * 32 + g * 4 + r * 2
        scale = tl.load(SIDES + side, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(SIDES + side + 1, mask=inside, other=0.0).to(tl.float32)
        value = code * scale + bias
    out = OUT + tl.program_id(0).to(tl.int64) * K + k
    tl.store(out, value.to(OUT.dtype.element_ty), mask=inside)


def weight_rows(
    codes: torch.Tensor,
    sides: torch.Tensor | None,
    ids: torch.Tensor | None,
    out: torch.Tensor,
    *,
    outputs: int,
    bits: int,
    group: int,
    gated: bool,
) -> None:
    """Write rows ``ids`` of `linear.WeightTiles`, or all of them, to ``out`` [..., in]."""
    inputs = out.shape[-1]
    weight_rows_kernel[(out.numel() // inputs, triton.cdiv(inputs, BLOCK))](
        codes, codes if sides is None else sides, codes if ids is None else ids, out, outputs,
        K=inputs, GROUP=group, BITS=bits, GATED=gated, SELECT=ids is not None, BLOCK=BLOCK,
    )  # fmt: skip
