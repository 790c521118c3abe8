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

from kvcore.backends.cuda.kernels.codes import codes_operand, offset, sides_layout, weighted, words_layout, x_layout
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
    m = gl.minimum(tile + n // LINES, M_TILES - 1).to(gl.int64) * (CHUNKS * (RUN // COUNT) // SIZE)
    at = PLANE + m[None, :] + (first * (RUN // SIZE))[:, None] + (n % LINES * (128 // SIZE))[None, :]
    prefetch(at)


@jit
def _words(
    CODES, tile, chunk, M_TILES: tl.constexpr, CHUNKS: tl.constexpr, T: tl.constexpr, COUNT: tl.constexpr,
    EVEN: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Codes [W, T, COUNT, ...] of T tiles from ``tile`` on, COUNT chunks from chunk[w] on; zeros beyond the end of a tile,
    and anything instead of a tile that is not there."""
    ROWS: gl.constexpr = 8 * BITS
    INNER: gl.constexpr = 8 if BITS == 16 else 4
    lay: gl.constexpr = words_layout(BITS, W, T, COUNT)
    ends: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, lay))
    inner: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, lay)))
    c = gl.convert_layout(chunk, gl.SliceLayout(1, gl.SliceLayout(1, ends)))[:, None]
    c = c + gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, ends)))[None, :]
    m = gl.minimum(tile + gl.arange(0, T, gl.SliceLayout(0, gl.SliceLayout(2, ends))), M_TILES - 1).to(gl.int64)
    x = gl.arange(0, ROWS, gl.SliceLayout(1, inner)) * INNER
    within = x[:, None] + gl.arange(0, INNER, gl.SliceLayout(0, inner))[None, :]
    at = CODES + (m * (CHUNKS * ROWS * INNER))[None, :, None] + (c * (ROWS * INNER))[:, None, :]
    at = at[:, :, :, None, None] + within[None, None, None, :, :]
    if EVEN:
        y = gl.load(at, cache_modifier=".cg")
    else:
        live = (c < CHUNKS)[:, None, :, None, None] & (m >= 0)[None, :, None, None, None]
        y = gl.load(at, mask=live & (within >= 0)[None, None, None, :, :], other=0, cache_modifier=".cg")
    return y


@jit
def _sides(
    SIDES, tile, chunk, M_TILES: tl.constexpr, CHUNKS: tl.constexpr, T: tl.constexpr, COUNT: tl.constexpr,
    EVEN: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Scales and biases [W, T, COUNT, 8, 4], one set a chunk, or [W, T, 2 · COUNT, 8, 4] where groups are of 32."""
    PER: gl.constexpr = 2 if GROUP == 32 else 1
    lay: gl.constexpr = sides_layout(W, T, COUNT * PER)
    ends: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, lay))
    inner: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, lay)))
    c = gl.convert_layout(chunk, gl.SliceLayout(1, gl.SliceLayout(1, ends)))[:, None] * PER
    c = c + gl.arange(0, COUNT * PER, gl.SliceLayout(0, gl.SliceLayout(1, ends)))[None, :]
    m = gl.minimum(tile + gl.arange(0, T, gl.SliceLayout(0, gl.SliceLayout(2, ends))), M_TILES - 1).to(gl.int64)
    g = gl.arange(0, 8, gl.SliceLayout(1, inner)) * 4
    within = g[:, None] + gl.arange(0, 4, gl.SliceLayout(0, inner))[None, :]
    group = c * (64 // PER) // GROUP
    at = SIDES + (m * (CHUNKS * 64 // GROUP * 32))[None, :, None] + (group * 32)[:, None, :]
    at = at[:, :, :, None, None] + within[None, None, None, :, :]
    if EVEN:
        y = gl.load(at)
    else:
        live = (c < CHUNKS * PER)[:, None, :, None, None] & (m >= 0)[None, :, None, None, None]
        y = gl.load(at, mask=live & (within >= 0)[None, None, None, :, :], other=0.0)
    return y


@jit
def _inputs(
    X, NORM, chunk, n, CHUNKS: tl.constexpr, COUNT: tl.constexpr, NORMED: tl.constexpr, EVEN: tl.constexpr,
    W: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """COUNT chunks of x and of what is multiplied with codes, x with NORMED's weights or x: [W, NP, COUNT · 64]. The last
    row stands for those from n on too, which nobody stores; what is beyond the end is zeros."""
    lay: gl.constexpr = x_layout(W, NP, COUNT)
    first = gl.convert_layout(chunk, gl.SliceLayout(1, gl.SliceLayout(2, lay)))
    row = gl.minimum(gl.arange(0, NP, gl.SliceLayout(0, gl.SliceLayout(2, lay))), n - 1)
    i = gl.arange(0, 64 * COUNT, gl.SliceLayout(0, gl.SliceLayout(1, lay)))
    k = first[:, None, None] * 64 + i[None, None, :]
    at, weight_at = X + (k + row[None, :, None] * (CHUNKS * 64)), NORM + (k + row[None, :, None] * 0)
    if EVEN:
        x = gl.load(at)
    else:
        live = (k < CHUNKS * 64) & (row >= 0)[None, :, None]
        x = gl.load(at, mask=live, other=0.0)
    y = x
    if NORMED:
        if EVEN:
            y = weighted(x, gl.load(weight_at))
        else:
            y = weighted(x, gl.load(weight_at, mask=live, other=0.0))
    return x, y


@jit
def _halves(x):
    """The first and the last half along the last axis of three, or the third of five."""
    S: gl.constexpr = x.shape
    if len(S) == 3:
        y = gl.permute(gl.reshape(x, [S[0], S[1], 2, S[2] // 2]), [0, 1, 3, 2])
    else:
        y = gl.permute(gl.reshape(x, [S[0], S[1], 2, S[2] // 2, S[3], S[4]]), [0, 1, 3, 4, 5, 2])
    return gl.split(y)


@constexpr_function
def at_least(count, least):
    """The next power of two."""
    return max(least, 1 << (count - 1).bit_length())


@jit
def _operand(x, OPERAND: tl.constexpr, W: tl.constexpr, NP: tl.constexpr):
    y = gl.permute(gl.reshape(x, [W, NP, 2, 4, 2, 2, 2]), [0, 2, 4, 5, 3, 6, 1])
    return gl.convert_layout(gl.reshape(y, [W, 64, NP]), OPERAND, assert_trivial=True)


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
def _side(x, i: tl.constexpr, ROWS: tl.constexpr):
    """Scales (i 0) or biases (1) [W, 16 · tiles] float32 of a group's [W, tiles, 8, 4]."""
    W: gl.constexpr = x.shape[0]
    T: gl.constexpr = x.shape[1]
    scale, bias = gl.split(gl.reshape(x, [W, T, 8, 2, 2]))
    y = scale if i == 0 else bias
    y = gl.reshape(gl.permute(y, [0, 1, 3, 2]), [W, 16 * T])
    return gl.convert_layout(y, ROWS, assert_trivial=True).to(gl.float32)


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
    if T >= 2:
        total = _twice(total, ACC)
    if T == 4:
        total = _twice(total, ACC)
    low: gl.constexpr = offset(BITS, gl.bfloat16 == DTYPE, 0)
    high: gl.constexpr = offset(BITS, gl.bfloat16 == DTYPE, 1)
    scale = _side(side, 0, ROWS)
    row = gl.arange(0, 16 * T, gl.SliceLayout(0, ROWS))
    bias = _side(side, 1, ROWS) - scale * gl.where(row // 8 % 2 == 0, low, high)[None, :]
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
        raw, x = _inputs(X, NORM, chunk, n, CHUNKS, COUNT, NORMED, EVEN, W, NP)
    if COUNT > 1:
        w0, w1 = _halves(words)
        s0, s1, x0, x1, r0, r1 = sides, sides, x, x, raw, raw
        if BITS < 16:
            s0, s1 = _halves(sides)
        if HAS_X:
            x0, x1 = _halves(x)
            r0, r1 = _halves(raw)
        HALF: gl.constexpr = COUNT // 2
        acc, squares = _add_chunks(
            acc, squares, w0, s0, x0, r0, X, NORM, chunk, n, HAS_X, HALF, CHUNKS, BITS, NORMED, EVEN, ACC, A, B
        )
        acc, squares = _add_chunks(
            acc, squares, w1, s1, x1, r1, X, NORM, chunk + HALF, n, HAS_X, HALF, CHUNKS, BITS, NORMED, EVEN, ACC, A, B
        )
    else:
        if NORMED:
            squares = _add_squares(squares, _operand(raw, B, W, NP), A)
        acc = _add_chunk(acc, words, sides, _operand(x, B, W, NP), BITS, DTYPE, ACC, A, B)
    return acc, squares


@jit
def _add_chunk(
    acc, words, sides, x, BITS: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr, A: tl.constexpr, B: tl.constexpr
):
    W: gl.constexpr = acc.shape[0]
    NP: gl.constexpr = acc.shape[2]
    codes = codes_operand(words, A, BITS, DTYPE)
    if BITS == 16:
        acc = mma(codes, x, acc)
    elif sides.shape[2] == 1:
        acc = _add_group(acc, codes, x, gl.reshape(sides, [W, sides.shape[1], 8, 4]), BITS, DTYPE, ACC, A)
    else:
        c0, c1 = _halves(codes)
        x0, x1 = gl.split(gl.permute(gl.reshape(x, [W, 2, 32, NP]), [0, 2, 3, 1]))
        s0, s1 = gl.split(gl.permute(sides, [0, 1, 3, 4, 2]))
        c0, x0 = gl.convert_layout(c0, A, assert_trivial=True), gl.convert_layout(x0, B, assert_trivial=True)
        c1, x1 = gl.convert_layout(c1, A, assert_trivial=True), gl.convert_layout(x1, B, assert_trivial=True)
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
    warps of a program take turns at COUNT · 64 inputs of its TILES, and their sums are added at the end. Weights go from
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
    tile = gl.program_id(0) * TILES
    chunk = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, ACC))) * COUNT
    RUN: gl.constexpr = 128 * BITS * COUNT
    SIDE_RUN: gl.constexpr = 4096 * COUNT // GROUP if BITS < 16 else 0
    # Weights never change: what comes first is loaded, and more comes closer, before the kernel that writes x has ended.
    words = _words(CODES, tile, chunk, M_TILES, CHUNKS, TILES, COUNT, EVEN, BITS, W)
    sides = words
    if BITS < 16:
        sides = _sides(SIDES, tile, chunk, M_TILES, CHUNKS, TILES, COUNT, EVEN, GROUP, W)
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
        next_words = _words(CODES, tile, later, M_TILES, CHUNKS, TILES, COUNT, EVEN, BITS, W)
        next_sides = next_words
        if BITS < 16:
            next_sides = _sides(SIDES, tile, later, M_TILES, CHUNKS, TILES, COUNT, EVEN, GROUP, W)
        acc, squares = _add_chunks(
            acc, squares, words, sides, i, i, X, NORM, chunk, n, False, COUNT, CHUNKS, BITS, NORMED, EVEN, ACC, A, B
        )
        words, sides, chunk = next_words, next_sides, later
    acc, squares = _add_chunks(
        acc, squares, words, sides, n, n, X, NORM, chunk, n, False, COUNT, CHUNKS, BITS, NORMED, EVEN, ACC, A, B
    )
    y = gl.sum(acc, 0)
    out: gl.constexpr = gl.SliceLayout(0, ACC)
    r = gl.arange(0, 16 * TILES, gl.SliceLayout(1, out))
    row = gl.arange(0, NP, gl.SliceLayout(0, out))
    if NORMED:
        one = gl.arange(0, 16, gl.SliceLayout(1, out))
        mean = gl.sum(gl.where(one[:, None] == row[None, :], gl.sum(squares, 0), 0.0), 0) / K
        y = y * (8.0 * gl.rsqrt(mean + eps))[None, :]
    if GATED:
        half = (tile + r // 16) * 8 + r % 8
        if BIASED:
            y = y + gl.load(BIAS + (r // 8 % 2) * M + half, mask=half < M, other=0.0).to(gl.float32)[:, None]
        gate, up = gl.split(gl.permute(gl.reshape(y, [TILES, 2, 8, NP]), [0, 2, 3, 1]))
        result = gate / (1.0 + gl.exp(-gate)) * up
        y = gl.reshape(gl.permute(gl.join(result, result), [0, 3, 1, 2]), [16 * TILES, NP])
        y = gl.convert_layout(y, out, assert_trivial=True)
        m = half
        stored = (row < n)[None, :] & (r % 16 < 8)[:, None] & (m < M)[:, None]
    else:
        m = tile * 16 + r
        stored = (row < n)[None, :] & (m < M)[:, None]
        if BIASED:
            y = y + gl.load(BIAS + m, mask=m < M, other=0.0).to(gl.float32)[:, None]
        if ADD:
            y = y + gl.load(ADDED + row[None, :] * M + m[:, None], mask=stored, other=0.0).to(gl.float32)
    gl.store(Y + row[None, :] * M + m[:, None], y.to(Y.dtype.element_ty), mask=stored)
