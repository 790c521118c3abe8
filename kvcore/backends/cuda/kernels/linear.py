"""y = x Wᵀ for a few rows of x, W in an affine form of 4 or 8 bits or in 16 bits: reads W once, at the speed of memory.

W's codes (or numbers) are the first operand of the tensor core instruction mma.m16n8k16 (16 outputs, 16 inputs), x the second. As in
a page of the cache (docs/cuda.md), codes are stored such that what a lane loads is its own fragment. Lane = 4·g + t.
In a step of 64 inputs, k = 32·h + 8·t + 4·j + 2·b + e is the tensor core's index (h, j, b, t, e): lanes read 8 inputs
side by side. Within a group of inputs, scale and bias are one number each for an output:

    y = Σ_groups scale · Σ code · x + bias · Σ x

What surrounds a product in a llama layer can be part of it: RMSNorm of x before, an addition or the gated activation
after.
"""

from __future__ import annotations

import triton.language as tl

from kvcore.backends.cuda.kernels.codes import (
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
from kvcore.backends.cuda.kernels.gl import (
    constexpr_function,
    gl,
    jit,
    let_next_start,
    loop_bound,
    mma,
    prefetch,
    wait_for_previous,
)

X_CHUNKS = tl.constexpr(2)  # chunks of 64 inputs whose x is loaded at a time


@jit
def _prefetch(
    PLANE, tile, chunk, turn, RUN: tl.constexpr, T: tl.constexpr, M_TILES: tl.constexpr, CHUNKS: tl.constexpr,
    COUNT: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Ask for what the warps need in their next ``turn`` to come to the L2 cache: RUN bytes a tile and COUNT chunks."""
    SIZE: gl.constexpr = PLANE.dtype.element_ty.primitive_bitwidth // 8
    LINES: gl.constexpr = at_least((RUN + 127) // 128, 1)
    lay: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    n = gl.arange(0, at_least(T * LINES, 32), gl.SliceLayout(0, lay)) % (T * LINES)
    first = gl.convert_layout(chunk, gl.SliceLayout(1, lay)) + turn * W * COUNT
    first = gl.minimum(first, CHUNKS - 1) // COUNT  # whose runs follow one another in a tile
    m = gl.convert_layout(tile, gl.SliceLayout(1, lay))[:, None] + (n // LINES)[None, :]
    m = gl.minimum(m, M_TILES - 1).to(gl.int64) * (CHUNKS * (RUN // COUNT) // SIZE)
    at = PLANE + m + (first * (RUN // SIZE))[:, None] + (n % LINES * (128 // SIZE))[None, :]
    prefetch(at)


@constexpr_function
def at_least(count, least):
    """The next power of two."""
    return max(least, 1 << (count - 1).bit_length())


@jit
def _add_squares(squares, x, A: tl.constexpr):
    """squares [W, 16, NP] + x's products with itself: those of a row with itself are on the diagonal."""
    W: gl.constexpr = x.shape[0]
    NP: gl.constexpr = x.shape[2]
    rows = gl.permute(x, [0, 2, 1])
    if NP == 8:
        rows = gl.reshape(gl.permute(gl.join(rows, rows), [0, 3, 1, 2]), [W, 16, 64])
    return mma(gl.convert_layout(rows, A, assert_trivial=True), x, squares)


@jit
def _twice(x, LAYOUT: tl.constexpr):
    """The rows of x [W, rows, n], and the same again."""
    S: gl.constexpr = x.shape
    y = gl.reshape(gl.permute(gl.join(x, x), [0, 3, 1, 2]), [S[0], 2 * S[1], S[2]])
    return gl.convert_layout(y, LAYOUT, assert_trivial=True)


@jit
def _add_group(acc, codes, x, side, BITS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, A: tl.constexpr):
    """acc + scale · (codes x) + bias · Σ x, for one group or a part of it."""
    W: gl.constexpr = acc.shape[0]
    NP: gl.constexpr = acc.shape[2]
    T: gl.constexpr = acc.shape[1] // 16
    ROWS: gl.constexpr = gl.SliceLayout(2, ACC)
    ones = gl.full([W, 16, codes.shape[2]], 1.0, codes.dtype, A)
    total = mma(ones, x, gl.zeros([W, 16, NP], gl.float32, ACC))  # Σ x, where every output has its own copy
    if T == 2:
        total = _twice(total, ACC)
    low: gl.constexpr = offset(BITS, gl.bfloat16 == DTYPE, 0)
    high: gl.constexpr = offset(BITS, gl.bfloat16 == DTYPE, 1)
    scale = side_rows(side, 0, ROWS)
    row = gl.arange(0, 16 * T, gl.SliceLayout(0, ROWS))
    bias = side_rows(side, 1, ROWS) - scale * gl.where(row // 8 % 2 == 0, low, high)[None, :]
    return (
        acc + mma(codes, x, gl.zeros([W, 16 * T, NP], gl.float32, ACC)) * scale[:, :, None] + total * bias[:, :, None]
    )


@jit
def _add_chunks(
    acc, squares, words, sides, x, raw, X, NORM, chunk, n,
    LOADED: tl.constexpr, COUNT: tl.constexpr, CHUNKS: tl.constexpr, BITS: tl.constexpr, NORMED: tl.constexpr, EVEN: tl.constexpr,
    ACC: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """acc + the products of COUNT chunks, squares + their squares. x and raw, unless they are LOADED, come for two chunks
    at a time."""
    W: gl.constexpr = acc.shape[0]
    NP: gl.constexpr = acc.shape[2]
    DTYPE: gl.constexpr = X.dtype.element_ty
    HAS_X: gl.constexpr = COUNT <= X_CHUNKS
    if HAS_X and not LOADED:
        raw, x = load_x(X, NORM, chunk, n, CHUNKS, COUNT, NORMED, EVEN, W, NP)
    if COUNT > 1:
        w0, w1 = halves(words)
        s0, s1, x0, x1, r0, r1 = sides, sides, x, x, raw, raw
        if BITS < 16:
            s0, s1 = halves(sides)
        if HAS_X:
            x0, x1 = halves(x)
            r0, r1 = halves(raw)
        HALF: gl.constexpr = COUNT // 2
        acc, squares = _add_chunks(
            acc, squares, w0, s0, x0, r0, X, NORM, chunk, n, HAS_X, HALF, CHUNKS, BITS, NORMED, EVEN, ACC, A, B
        )
        acc, squares = _add_chunks(
            acc, squares, w1, s1, x1, r1, X, NORM, chunk + HALF, n, HAS_X, HALF, CHUNKS, BITS, NORMED, EVEN, ACC, A, B
        )
    else:
        if NORMED:
            squares = _add_squares(squares, x_operand(raw, B, W, NP), A)
        acc = _add_chunk(acc, words, sides, x_operand(x, B, W, NP), BITS, DTYPE, ACC, A, B)
    return acc, squares


@jit
def _add_chunk(
    acc, words, sides, x, BITS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, A: tl.constexpr, B: tl.constexpr
):
    W: gl.constexpr = acc.shape[0]
    codes = codes_operand(words, A, BITS, DTYPE)
    if BITS == 16:
        acc = mma(codes, x, acc)
    elif sides.shape[2] == 1:
        acc = _add_group(acc, codes, x, gl.reshape(sides, [W, sides.shape[1], 8, 4]), BITS, DTYPE, ACC, A)
    else:
        c0, c1, s0, s1, x0, x1 = two_groups(codes, sides, x, A, B)
        acc = _add_group(acc, c0, x0, s0, BITS, DTYPE, ACC, A)
        acc = _add_group(acc, c1, x1, s1, BITS, DTYPE, ACC, A)
    return acc


@jit
def linear_rows(
    X, NORM, CODES, SIDES, BIAS, ADDED, Y, n, eps,
    M: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, NP: tl.constexpr, W: tl.constexpr,
    TILES: tl.constexpr, COUNT: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (outputs / (16 · TILES)). X [n, K], Y [n, M]; CODES, SIDES as `linear.WeightTiles` stores them.

    NORMED: x is RMSNorm of X with weights NORM [K]. BIASED: BIAS [M] is added, ADD: ADDED [n, M]. GATED: outputs g and
    g + 8 of a tile are gate and up of one result, y = silu(gate) · up, and M counts results, 8 a tile; BIAS is [2 · M]. The
    warps of a program take turns at COUNT · 64 inputs of its TILES (1 or 2), and their sums are added at the end. Weights go from
    memory to the registers that need them: no shared memory, no barrier.
    """
    CHUNKS: gl.constexpr = K // 64
    TURNS: gl.constexpr = (CHUNKS + W * COUNT - 1) // (W * COUNT)
    EVEN: gl.constexpr = CHUNKS % (W * COUNT) == 0
    OUTPUTS: gl.constexpr = 8 if GATED else 16  # of a tile
    M_TILES: gl.constexpr = (M + OUTPUTS - 1) // OUTPUTS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    warps: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, ACC))
    tile = gl.full([W], gl.program_id(0) * TILES, gl.int32, warps)
    chunk = gl.arange(0, W, warps) * COUNT
    RUN: gl.constexpr = 128 * BITS * COUNT
    SIDE_RUN: gl.constexpr = 4096 * COUNT // GROUP if BITS < 16 else 0
    # Weights never change: what comes first is loaded, and more comes closer, before the kernel that writes x has ended.
    words = load_words(CODES, tile, chunk, M_TILES, CHUNKS, TILES, COUNT, EVEN, BITS, W)
    sides = words
    if BITS < 16:
        sides = load_sides(SIDES, tile, chunk, M_TILES, CHUNKS, TILES, COUNT, EVEN, GROUP, W)
    for i in tl.static_range(1, AHEAD):
        _prefetch(CODES, tile, chunk, i, RUN, TILES, M_TILES, CHUNKS, COUNT, W)
        if BITS < 16:
            _prefetch(SIDES, tile, chunk, i, SIDE_RUN, TILES, M_TILES, CHUNKS, COUNT, W)
    if OVERLAP:
        wait_for_previous()
        let_next_start()
    acc = gl.zeros([W, 16 * TILES, NP], gl.float32, ACC)
    squares = gl.zeros([W, 16, NP], gl.float32, ACC)
    for i in range(loop_bound(0), loop_bound(TURNS - 1)):
        if AHEAD > 0 and TURNS > AHEAD:
            _prefetch(CODES, tile, chunk, AHEAD, RUN, TILES, M_TILES, CHUNKS, COUNT, W)
            if BITS < 16:
                _prefetch(SIDES, tile, chunk, AHEAD, SIDE_RUN, TILES, M_TILES, CHUNKS, COUNT, W)
        later = chunk + W * COUNT
        next_words = load_words(CODES, tile, later, M_TILES, CHUNKS, TILES, COUNT, EVEN, BITS, W)
        next_sides = next_words
        if BITS < 16:
            next_sides = load_sides(SIDES, tile, later, M_TILES, CHUNKS, TILES, COUNT, EVEN, GROUP, W)
        acc, squares = _add_chunks(
            acc, squares, words, sides, i, i, X, NORM, chunk, n, False, COUNT, CHUNKS, BITS, NORMED, EVEN, ACC, A, B
        )
        words, sides, chunk = next_words, next_sides, later
    acc, squares = _add_chunks(
        acc, squares, words, sides, n, n, X, NORM, chunk, n, False, COUNT, CHUNKS, BITS, NORMED, EVEN, ACC, A, B
    )
    y = gl.sum(acc, 0)
    if NORMED:
        out: gl.constexpr = gl.SliceLayout(0, ACC)
        one = gl.arange(0, 16, gl.SliceLayout(1, out))
        row = gl.arange(0, NP, gl.SliceLayout(0, out))
        mean = gl.sum(gl.where(one[:, None] == row[None, :], gl.sum(squares, 0), 0.0), 0) / K
        y = y * (8.0 * gl.rsqrt(mean + eps))[None, :]
    first = gl.full([1], gl.program_id(0) * TILES, gl.int32, gl.SliceLayout(1, gl.SliceLayout(2, ACC)))
    store_outputs(Y, BIAS, ADDED, gl.expand_dims(y, 0), first, n, M, BIASED, ADD, GATED, ACC)
