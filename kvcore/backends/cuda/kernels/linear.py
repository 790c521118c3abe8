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

from kvcore.backends.cuda.kernels.fragments import join8, pair_of
from kvcore.backends.cuda.kernels.gl import (
    INTERPRET,
    commit,
    constexpr_function,
    copy,
    gl,
    jit,
    let_next_start,
    loop_bound,
    mma,
    wait,
    wait_for_previous,
)

STEP = tl.constexpr(64)  # inputs of a step


def _nibbles_asm(bf16: bool) -> str:
    """Two words to sixteen numbers in eight registers: each nibble under the exponent of a power of two, less it.

    Nibbles 0 and 4 stand at bit 0 of a half: 1024 + code in float16 (bf16: 128 + code). Nibbles 1 and 5 stand at bit
    4: 64 + code (bf16: 8 + code). The others follow after a shift by eight.
    """
    low, high, kind = (0x4300, 0x4100, "bf16x2") if bf16 else (0x6400, 0x5400, "f16x2")
    one, minus = (0x3F80, 0x8000) if bf16 else (0x3C00, 0x8000)
    lines = ["{", ".reg .b32 w, m, n, a, b, c, d, u;"]
    lines += ["mov.b32 m, 0x000F000F;", "mov.b32 n, 0x00F000F0;", f"mov.b32 u, {one * 0x10001:#x};"]
    lines += [f"mov.b32 {name}, {x * 0x10001:#x};" for name, x in (("a", low), ("b", high))]
    lines += [f"mov.b32 {name}, {(x | minus) * 0x10001:#x};" for name, x in (("c", low), ("d", high))]
    for word in range(2):
        for half in range(2):
            source = f"${8 + word}" if half == 0 else "w"
            if half:
                lines.append(f"shr.u32 w, ${8 + word}, 8;")
            for i, (mask, base, less) in enumerate((("m", "a", "c"), ("n", "b", "d"))):
                out = f"${4 * word + 2 * half + i}"
                lines += [f"lop3.b32 {out}, {source}, {mask}, {base}, 0xEA;", f"fma.rn.{kind} {out}, {out}, u, {less};"]
    return "\n".join([*lines, "}"])


_BYTES_ASM = """{
.reg .b32 z;
mov.b32 z, 0x64006400;
prmt.b32 $0, $4, 0x64646464, 0x4140;
prmt.b32 $1, $4, 0x64646464, 0x4342;
prmt.b32 $2, $5, 0x64646464, 0x4140;
prmt.b32 $3, $5, 0x64646464, 0x4342;
sub.f16x2 $0, $0, z;
sub.f16x2 $1, $1, z;
sub.f16x2 $2, $2, z;
sub.f16x2 $3, $3, z;
}"""
NIBBLES_F16, NIBBLES_BF16 = tl.constexpr(_nibbles_asm(False)), tl.constexpr(_nibbles_asm(True))
NIBBLES_TO = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r")
BYTES_ASM = tl.constexpr(_BYTES_ASM)


@jit
def _nibbles(word, pair: tl.constexpr, like):
    return pair_of(((word >> (4 * pair)) & 15).to(tl.float32), ((word >> (16 + 4 * pair)) & 15).to(tl.float32), like)


@jit
def _byte_pair(word, pair: tl.constexpr, like):
    return pair_of(((word >> (16 * pair)) & 255).to(tl.float32), ((word >> (16 * pair + 8)) & 255).to(tl.float32), like)


@jit
def unpack_nibbles(x, dtype: tl.constexpr):
    """Words [..., 2] -> codes as numbers [..., 2 (e), 2 (word), 2 (b), 2 (r)]."""
    if INTERPRET:
        w0, w1 = tl.split(x)
        values = join8(
            _nibbles(w0, 0, x),
            _nibbles(w0, 1, x),
            _nibbles(w0, 2, x),
            _nibbles(w0, 3, x),
            _nibbles(w1, 0, x),
            _nibbles(w1, 1, x),
            _nibbles(w1, 2, x),
            _nibbles(w1, 3, x),
        )
    elif dtype == gl.bfloat16:
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            NIBBLES_BF16, NIBBLES_TO, [x], dtype=(gl.bfloat16,) * 8, is_pure=True, pack=2
        )
        values = join8(o0, o1, o2, o3, o4, o5, o6, o7)
    else:
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            NIBBLES_F16, NIBBLES_TO, [x], dtype=(gl.float16,) * 8, is_pure=True, pack=2
        )
        values = join8(o0, o1, o2, o3, o4, o5, o6, o7)
    return values


@jit
def unpack_bytes(x):
    """Words [..., 2] -> codes as float16 [..., 2 (e), 2 (word), 2 (r)]."""
    if INTERPRET:
        w0, w1 = tl.split(x)
        o0, o1 = _byte_pair(w0, 0, x), _byte_pair(w0, 1, x)
        o2, o3 = _byte_pair(w1, 0, x), _byte_pair(w1, 1, x)
    else:
        o0, o1, o2, o3 = gl.inline_asm_elementwise(
            BYTES_ASM, "=&r,=&r,=&r,=&r,r,r", [x], dtype=(gl.float16,) * 4, is_pure=True, pack=2
        )
    return gl.join(gl.join(o0, o2), gl.join(o1, o3))


@constexpr_function
def words_layout(bits, W):
    """Codes as words [W, 8 · bits, 4], or numbers [W, 128, 8]: a lane takes 16 bytes at a time."""
    regs = [[0, 0, 1], [0, 0, 2]] + ([[0, 0, 4]] if bits == 16 else [])
    regs += [[0, 32 << i, 0] for i in range((bits // 4).bit_length() - 1)]
    lanes = [[0, 1 << i, 0] for i in range(5)]
    warps = [[1 << i, 0, 0] for i in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [W, 8 * bits, 8 if bits == 16 else 4])


@constexpr_function
def x_layout(W, NP):
    regs = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32]] + ([[0, 8, 0]] if NP == 16 else [])
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1 << i, 0, 0] for i in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [W, NP, 64])


@constexpr_function
def sides_layout(W, groups):
    """Scales and biases [W, groups, 8 g, 4 (r, scale or bias)]: a lane holds those of its two outputs."""
    regs = [[0, 0, 0, 1], [0, 0, 0, 2]] + ([[0, 1, 0, 0]] if groups == 2 else [])
    lanes = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    warps = [[1 << i, 0, 0, 0] for i in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [W, groups, 8, 4])


@jit
def _codes(x, OPERAND: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, DTYPE: tl.constexpr):
    """The operand [W, 16, 64] of a step's words or numbers."""
    if BITS == 16:
        # W, h, j, g, t, b, r, e
        y = gl.permute(gl.reshape(x, [W, 2, 2, 8, 4, 2, 2, 2]), [0, 6, 3, 1, 2, 5, 4, 7])
    elif BITS == 4:
        # W, g, t, h, e, j, b, r
        y = unpack_nibbles(gl.reshape(x, [W, 8, 4, 2, 2]), DTYPE)
        y = gl.permute(y, [0, 7, 1, 3, 5, 6, 2, 4])
    else:
        # W, h, g, t, j, e, b, r
        y = unpack_bytes(gl.reshape(x, [W, 2, 8, 4, 2, 2]))
        if gl.bfloat16 == DTYPE and not INTERPRET:  # whose products are in float32
            y = y.to(gl.float32).to(gl.bfloat16)
        y = gl.permute(y, [0, 7, 2, 1, 4, 6, 3, 5])
    return gl.convert_layout(gl.reshape(y, [W, 16, 64]), OPERAND, assert_trivial=True)


@jit
def _inputs(
    X, NORM, k, n, K: tl.constexpr, NORMED: tl.constexpr, OPERAND: tl.constexpr, W: tl.constexpr, NP: tl.constexpr
):  # fmt: skip
    """The operand [W, 64, NP] of x from input k[w] on, and the sums of squares [W, NP]; rows from n on are zeros.

    With NORMED x is multiplied by the norm's weights and by 1/8, so that products of 16-bit rows stay in range.
    """
    lay: gl.constexpr = x_layout(W, NP)
    first = gl.convert_layout(k, gl.SliceLayout(1, gl.SliceLayout(2, lay)))
    row = gl.arange(0, NP, gl.SliceLayout(0, gl.SliceLayout(2, lay)))
    i = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, lay)))
    at = X + first[:, None, None] + (row[None, :, None] * K + i[None, None, :])
    x = gl.load(at, mask=(first >= 0)[:, None, None] & (row < n)[None, :, None] & (i >= 0)[None, None, :], other=0.0)
    squares = gl.zeros([W, NP], gl.float32, gl.SliceLayout(2, lay))
    if NORMED:
        weight = gl.load(NORM + first[:, None, None] + (row[None, :, None] * 0 + i[None, None, :])).to(gl.float32)
        wide = x.to(gl.float32)
        squares = gl.sum(wide * wide, 2)
        x = (wide * weight * 0.125).to(x.dtype)
    y = gl.permute(gl.reshape(x, [W, NP, 2, 4, 2, 2, 2]), [0, 2, 4, 5, 3, 6, 1])
    return gl.convert_layout(gl.reshape(y, [W, 64, NP]), OPERAND, assert_trivial=True), squares


@jit
def _side(x, i: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr):
    """Scales (i 0) or biases (1) [W, 16] float32 of a group's [W, 8, 4]."""
    scale, bias = gl.split(gl.reshape(x, [W, 8, 2, 2]))
    y = scale if i == 0 else bias
    y = gl.reshape(gl.permute(y, [0, 2, 1]), [W, 16])
    return gl.convert_layout(y, ROWS, assert_trivial=True).to(gl.float32)


@jit
def _add_group(acc, codes, x, side, ROWS: tl.constexpr, ACC: tl.constexpr, A: tl.constexpr, NP: tl.constexpr):
    """acc + scale · (codes x) + bias · Σ x, for one group or a part of it."""
    W: gl.constexpr = codes.shape[0]
    zeros = gl.zeros([W, 16, NP], gl.float32, ACC)
    ones = gl.full([W, 16, codes.shape[2]], 1.0, codes.dtype, A)
    total = mma(ones, x, zeros)  # Σ x, where every output has its own copy
    return (
        acc + mma(codes, x, zeros) * _side(side, 0, ROWS, W)[:, :, None] + total * _side(side, 1, ROWS, W)[:, :, None]
    )


@jit
def linear_rows(
    X, NORM, CODES, SIDES, BIAS, ADDED, Y, n, eps,
    M: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, NP: tl.constexpr, W: tl.constexpr,
    STAGES: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 outputs). X [n, K], Y [n, M]; CODES, SIDES as `linear.WeightTiles` stores them.

    NORMED: x is RMSNorm of X with weights NORM [K]. BIASED: BIAS [M] is added, ADD: ADDED [n, M]. GATED: outputs g and
    g + 8 of a tile are gate and up of one result, y = silu(gate) · up, and M counts results, 8 a tile; BIAS is [2 · M]. The warps of a
    program take turns at the steps of 64 inputs, and their sums are added at the end.
    """
    STEPS: gl.constexpr = K // 64
    GROUPS: gl.constexpr = 2 if GROUP == 32 else 1
    DTYPE: gl.constexpr = X.dtype.element_ty
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, acc_layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(2, acc_layout)
    warp_rows: gl.constexpr = gl.SliceLayout(1, rows_layout)
    lay: gl.constexpr = words_layout(BITS, W)
    side_lay: gl.constexpr = sides_layout(W, GROUPS)
    tile = gl.program_id(0)
    ring = gl.allocate_shared_memory(
        CODES.dtype.element_ty,
        [STAGES, W, 8 * BITS, 8 if BITS == 16 else 4],
        gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]),
    )
    side_ring = gl.allocate_shared_memory(
        SIDES.dtype.element_ty, [STAGES, W, GROUPS, 8, 4], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )
    # Weights never change: their copies begin before the kernel that writes x has ended.
    for j in tl.static_range(STAGES - 1):
        _copy_step(ring.index(j), side_ring.index(j), CODES, SIDES, tile, j, STEPS, GROUP, BITS, W)
        commit()
    if OVERLAP:
        wait_for_previous()
        let_next_start()
    acc = gl.zeros([W, 16, NP], gl.float32, acc_layout)
    squares = gl.zeros([W, NP], gl.float32, gl.SliceLayout(2, x_layout(W, NP)))
    for i in range(loop_bound(0), loop_bound((STEPS + W - 1) // W)):
        wait(STAGES - 2)
        free = (i + STAGES - 1) % STAGES
        _copy_step(ring.index(free), side_ring.index(free), CODES, SIDES, tile, i + STAGES - 1, STEPS, GROUP, BITS, W)
        commit()
        step = i * W + gl.arange(0, W, warp_rows)
        k = gl.minimum(step, STEPS - 1) * 64  # beyond the end codes, scales and biases are zeros
        x, more = _inputs(X, NORM, k, n, K, NORMED, b_layout, W, NP)
        inside = gl.convert_layout(step < STEPS, gl.SliceLayout(1, gl.SliceLayout(2, x_layout(W, NP))))
        squares += gl.where(inside[:, None], more, 0.0)
        codes = _codes(ring.index(i % STAGES).load(lay), a_layout, BITS, W, DTYPE)
        if BITS == 16:
            acc = mma(codes, x, acc)
        elif GROUPS == 1:
            sides = side_ring.index(i % STAGES).load(side_lay)
            acc = _add_group(acc, codes, x, gl.reshape(sides, [W, 8, 4]), rows_layout, acc_layout, a_layout, NP)
        else:
            sides = side_ring.index(i % STAGES).load(side_lay)
            c0, c1 = gl.split(gl.permute(gl.reshape(codes, [W, 16, 2, 32]), [0, 1, 3, 2]))
            x0, x1 = gl.split(gl.permute(gl.reshape(x, [W, 2, 32, NP]), [0, 2, 3, 1]))
            s0, s1 = gl.split(gl.permute(sides, [0, 2, 3, 1]))
            c0, c1 = (
                gl.convert_layout(c0, a_layout, assert_trivial=True),
                gl.convert_layout(c1, a_layout, assert_trivial=True),
            )
            x0, x1 = (
                gl.convert_layout(x0, b_layout, assert_trivial=True),
                gl.convert_layout(x1, b_layout, assert_trivial=True),
            )
            acc = _add_group(acc, c0, x0, s0, rows_layout, acc_layout, a_layout, NP)
            acc = _add_group(acc, c1, x1, s1, rows_layout, acc_layout, a_layout, NP)
    y = gl.sum(acc, 0)
    out: gl.constexpr = gl.SliceLayout(0, acc_layout)
    r = gl.arange(0, 16, gl.SliceLayout(1, out))
    row = gl.arange(0, NP, gl.SliceLayout(0, out))
    if NORMED:
        mean = gl.convert_layout(gl.sum(squares, 0), gl.SliceLayout(0, out)) / K
        y = y * (8.0 * gl.rsqrt(mean + eps))[None, :]
    if GATED:
        if BIASED:
            half = tile * 8 + r % 8
            y = y + gl.load(BIAS + (r // 8) * M + half, mask=half < M, other=0.0).to(gl.float32)[:, None]
        gate, up = gl.split(gl.permute(gl.reshape(y, [2, 8, NP]), [1, 2, 0]))
        result = gate / (1.0 + gl.exp(-gate)) * up
        y = gl.reshape(gl.permute(gl.join(result, result), [2, 0, 1]), [16, NP])
        y = gl.convert_layout(y, out, assert_trivial=True)
        m = tile * 8 + r
        stored = (row < n)[None, :] & (r < 8)[:, None] & (m < M)[:, None]
    else:
        m = tile * 16 + r
        stored = (row < n)[None, :] & (m < M)[:, None]
        if BIASED:
            y = y + gl.load(BIAS + m, mask=m < M, other=0.0).to(gl.float32)[:, None]
        if ADD:
            y = y + gl.load(ADDED + row[None, :] * M + m[:, None], mask=stored, other=0.0).to(gl.float32)
    gl.store(Y + row[None, :] * M + m[:, None], y.to(Y.dtype.element_ty), mask=stored)


@jit
def _copy_step(
    SLOT, SIDE_SLOT, CODES, SIDES, tile, i, STEPS: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Start the copies of the warps' i-th steps; those beyond the end become zeros."""
    ROWS: gl.constexpr = 8 * BITS
    INNER: gl.constexpr = 8 if BITS == 16 else 4
    lay: gl.constexpr = words_layout(BITS, W)
    step = i * W + gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, lay)))
    x = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, lay)))
    e = gl.arange(0, INNER, gl.SliceLayout(0, gl.SliceLayout(1, lay)))
    first = (tile.to(gl.int64) * STEPS + step)[:, None, None] * (ROWS * INNER)
    at = CODES + first + (x[None, :, None] * INNER + e[None, None, :])
    copy(SLOT, at, mask=(step < STEPS)[:, None, None] & (x >= 0)[None, :, None] & (e >= 0)[None, None, :])
    if BITS < 16:
        _copy_sides(SIDE_SLOT, SIDES, tile, i, STEPS, GROUP, W)


@jit
def _copy_sides(SLOT, SIDES, tile, i, STEPS: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr):
    GROUPS: gl.constexpr = 2 if GROUP == 32 else 1
    lay: gl.constexpr = sides_layout(W, GROUPS)
    part: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, lay))
    step = i * W + gl.arange(0, W, gl.SliceLayout(1, part))
    c = gl.arange(0, GROUPS, gl.SliceLayout(0, part))
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, lay))))
    s = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, lay))))
    group = step[:, None] * 64 // GROUP + c[None, :]
    first = (tile.to(gl.int64) * (STEPS * 64 // GROUP) + group)[:, :, None, None] * 32
    at = SIDES + first + (g[None, None, :, None] * 4 + s[None, None, None, :])
    live = (step < STEPS)[:, None] & (c >= 0)[None, :]
    copy(SLOT, at, mask=live[:, :, None, None] & (g >= 0)[None, None, :, None] & (s >= 0)[None, None, None, :])
