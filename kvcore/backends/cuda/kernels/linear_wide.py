"""y = x Wᵀ for some tens of rows of x: what a batch decodes with.

W is stored and loaded as for `kernels/linear.py`. With more rows its bytes are no longer all that counts: codes become
numbers once, in registers, so that the tensor cores add up all inputs without a stop at each group, and warps that have
outputs of their own read the same x at the same time, which all but the first find in the L1 cache.
"""

from __future__ import annotations

import triton.language as tl

from kvcore.backends.cuda.kernels.codes import (
    affine,
    codes_operand,
    halves,
    load_sides,
    load_words,
    load_x,
    offset,
    side_rows,
    store_outputs,
    two_groups,
    x_operand,
)
from kvcore.backends.cuda.kernels.gl import gl, jit, let_next_start, loop_bound, mma, wait_for_previous


@jit
def _numbers(codes, sides, BITS: tl.constexpr, DTYPE: tl.constexpr, A: tl.constexpr):
    """A group's codes [W, 16 · T, k] and sides [W, T, 8, 4] to numbers in DTYPE, rounded once."""
    rows: gl.constexpr = gl.SliceLayout(2, A)
    S: gl.constexpr = codes.shape
    row = gl.arange(0, S[1], gl.SliceLayout(0, rows))[None, :]
    low: gl.constexpr = offset(BITS, gl.bfloat16 == DTYPE, 0)
    high: gl.constexpr = offset(BITS, gl.bfloat16 == DTYPE, 1)
    more = gl.where(row // 8 % 2 == 0, low, high)[:, :, None]
    scale, bias = side_rows(sides, 0, rows)[:, :, None], side_rows(sides, 1, rows)[:, :, None]
    if sides.dtype == DTYPE:
        y = affine(codes, more.to(DTYPE), scale.to(DTYPE), bias.to(DTYPE), DTYPE)
    else:
        y = ((codes.to(gl.float32) - more) * scale + bias).to(DTYPE)
    return y


@jit
def _add_chunk(acc, words, sides, x, BITS: tl.constexpr, DTYPE: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """acc [W, 16 · T, NP] + the product of one chunk's words [W, T, 1, ...] and x [W, 64, NP]."""
    W: gl.constexpr = acc.shape[0]
    codes = codes_operand(words, A, BITS, DTYPE)
    if BITS == 16:
        acc = mma(codes, x, acc)
    elif sides.shape[2] == 1:
        acc = mma(_numbers(codes, gl.reshape(sides, [W, sides.shape[1], 8, 4]), BITS, DTYPE, A), x, acc)
    else:
        c0, c1, s0, s1, x0, x1 = two_groups(codes, sides, x, A, B)
        acc = mma(_numbers(c0, s0, BITS, DTYPE, A), x0, acc)
        acc = mma(_numbers(c1, s1, BITS, DTYPE, A), x1, acc)
    return acc


@jit
def _add_chunks(
    acc, words, sides, X, chunk, n,
    COUNT: tl.constexpr, CHUNKS: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """acc + the products of COUNT chunks; x comes for one at a time."""
    if COUNT > 1:
        HALF: gl.constexpr = COUNT // 2
        w0, w1 = halves(words)
        s0, s1 = sides, sides
        if BITS < 16:
            s0, s1 = halves(sides)
        acc = _add_chunks(acc, w0, s0, X, chunk, n, HALF, CHUNKS, BITS, EVEN, A, B)
        acc = _add_chunks(acc, w1, s1, X, chunk + HALF, n, HALF, CHUNKS, BITS, EVEN, A, B)
    else:
        W: gl.constexpr = acc.shape[0]
        NP: gl.constexpr = acc.shape[2]
        _, x = load_x(X, X, chunk, n, CHUNKS, 1, False, EVEN, W, NP)
        acc = _add_chunk(acc, words, sides, x_operand(x, B, W, NP), BITS, X.dtype.element_ty, A, B)
    return acc


@jit(do_not_specialize_on_alignment=["n"])  # or 24 and 32 rows would be compiled twice
def linear_wide(
    X, CODES, SIDES, BIAS, ADDED, Y, n,
    M: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, NP: tl.constexpr, W: tl.constexpr,
    TILES: tl.constexpr, COUNT: tl.constexpr, APART: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (outputs / (16 · TILES)), with APART (outputs / (16 · TILES · W)). X [n, K], Y [n, M], n up to NP; CODES, SIDES,
    BIAS, ADDED and GATED as in `linear_rows`.

    APART: each warp has TILES of its own and takes all inputs; else the warps share a program's TILES, take turns at COUNT ·
    64 inputs, and their sums are added at the end.
    """
    SHARE: gl.constexpr = 1 if APART else W
    CHUNKS: gl.constexpr = K // 64
    TURNS: gl.constexpr = (CHUNKS + SHARE * COUNT - 1) // (SHARE * COUNT)
    EVEN: gl.constexpr = CHUNKS % (SHARE * COUNT) == 0
    OUTPUTS: gl.constexpr = 8 if GATED else 16  # of a tile
    M_TILES: gl.constexpr = (M + OUTPUTS - 1) // OUTPUTS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    warps: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, ACC))
    warp = gl.arange(0, W, warps)
    if APART:
        tile, chunk = (gl.program_id(0) * W + warp) * TILES, warp * 0
    else:
        tile, chunk = gl.full([W], gl.program_id(0) * TILES, gl.int32, warps), warp * COUNT
    words = load_words(CODES, tile, chunk, M_TILES, CHUNKS, TILES, COUNT, EVEN, BITS, W)
    sides = words
    if BITS < 16:
        sides = load_sides(SIDES, tile, chunk, M_TILES, CHUNKS, TILES, COUNT, EVEN, GROUP, W)
    if OVERLAP:
        wait_for_previous()
        let_next_start()
    acc = gl.zeros([W, 16 * TILES, NP], gl.float32, ACC)
    for _ in range(loop_bound(0), loop_bound(TURNS - 1)):
        later = chunk + SHARE * COUNT
        next_words = load_words(CODES, tile, later, M_TILES, CHUNKS, TILES, COUNT, EVEN, BITS, W)
        next_sides = next_words
        if BITS < 16:
            next_sides = load_sides(SIDES, tile, later, M_TILES, CHUNKS, TILES, COUNT, EVEN, GROUP, W)
        acc = _add_chunks(acc, words, sides, X, chunk, n, COUNT, CHUNKS, BITS, EVEN, A, B)
        words, sides, chunk = next_words, next_sides, later
    acc = _add_chunks(acc, words, sides, X, chunk, n, COUNT, CHUNKS, BITS, EVEN, A, B)
    if APART:
        store_outputs(Y, BIAS, ADDED, acc, tile, n, M, BIASED, ADD, GATED, ACC)
    else:
        first = gl.full([1], gl.program_id(0) * TILES, gl.int32, warps)
        store_outputs(Y, BIAS, ADDED, gl.expand_dims(gl.sum(acc, 0), 0), first, n, M, BIASED, ADD, GATED, ACC)
