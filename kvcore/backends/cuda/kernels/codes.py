"""What the kernels with stored weights share: words to numbers, the layouts in which lanes load their own operands of the
tensor cores, those loads, and what comes after a product."""

from __future__ import annotations

import triton.language as tl

from kvcore.backends.cuda.kernels.fragments import join8, pair_of
from kvcore.backends.cuda.kernels.gl import INTERPRET, constexpr_function, gl, jit


def _nibbles_asm(bf16: bool) -> str:
    """Two words to sixteen numbers in eight registers: each nibble in the mantissa of a power of two, which its product
    with Σ x takes away again (`offset`). float16 has room for it at bits 0 (under 1024) and 4 (under 64), bf16 at bit 0
    (under 128).
    """
    low, high = ((0x000F, 0x4300), (0x000F, 0x4300)) if bf16 else ((0x000F, 0x6400), (0x00F0, 0x5400))
    lines = ["{", ".reg .b32 w, m, b, n, c;"]
    for names, numbers in (("mb", low), ("nc", high)):
        lines += [f"mov.b32 {name}, {x * 0x10001:#x};" for name, x in zip(names, numbers, strict=True)]
    for word in range(2):
        for i in range(4):
            source, shift = f"${8 + word}", 4 * i if bf16 else 8 * (i // 2)
            if shift and (bf16 or i % 2 == 0):
                lines.append(f"shr.b32 w, {source}, {shift};")
            mask, under = "nc" if i % 2 else "mb"
            lines.append(f"lop3.b32 ${4 * word + i}, {'w' if shift else source}, {mask}, {under}, 0xEA;")
    return "\n".join([*lines, "}"])


# Bytes under 1024 in float16. bf16 holds a code of eight bits only by itself.
_BYTES_ASM = """{
prmt.b32 $0, $4, 0x64646464, 0x4140;
prmt.b32 $1, $4, 0x64646464, 0x4342;
prmt.b32 $2, $5, 0x64646464, 0x4140;
prmt.b32 $3, $5, 0x64646464, 0x4342;
}"""
NIBBLES_F16, NIBBLES_BF16 = tl.constexpr(_nibbles_asm(False)), tl.constexpr(_nibbles_asm(True))
NIBBLES_TO = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r")
BYTES_ASM = tl.constexpr(_BYTES_ASM)
# x · (weight / 8), rounded once. 0x8000 is -0.
WEIGHTED_F16 = tl.constexpr("{ .reg .b32 c; mov.b32 c, 0x30003000; mul.rn.f16x2 c, $2, c; mul.rn.f16x2 $0, $1, c; }")
WEIGHTED_BF16 = tl.constexpr(
    "{ .reg .b32 c, z; mov.b32 c, 0x3E003E00; mov.b32 z, 0x80008000; fma.rn.bf16x2 c, $2, c, z; "
    "fma.rn.bf16x2 $0, $1, c, z; }"
)
# (code - offset) · scale + bias, rounded once; bf16 takes -offset.
AFFINE_F16 = tl.constexpr("{ .reg .b32 c; sub.rn.f16x2 c, $1, $2; fma.rn.f16x2 $0, c, $3, $4; }")
AFFINE_BF16 = tl.constexpr(
    "{ .reg .b32 c, one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 c, $1, one, $2; fma.rn.bf16x2 $0, c, $3, $4; }"
)


@constexpr_function
def offset(bits, bf16, r):
    """What the unpacked codes of a tile's rows 8 · r .. 8 · r + 7 have too much."""
    if bits == 4:
        return 128.0 if bf16 else (64.0 if r else 1024.0)
    return 0.0 if bf16 else 1024.0


@jit
def _nibbles(word, pair: tl.constexpr, dtype: tl.constexpr, like):
    more: gl.constexpr = offset(4, dtype == tl.bfloat16, pair % 2)
    low, high = (word >> (4 * pair)) & 15, (word >> (16 + 4 * pair)) & 15
    return pair_of(low.to(tl.float32) + more, high.to(tl.float32) + more, like)


@jit
def _byte_pair(word, pair: tl.constexpr, dtype: tl.constexpr, like):
    more: gl.constexpr = offset(8, dtype == tl.bfloat16, 0)
    low, high = (word >> (16 * pair)) & 255, (word >> (16 * pair + 8)) & 255
    return pair_of(low.to(tl.float32) + more, high.to(tl.float32) + more, like)


@jit
def unpack_nibbles(x, dtype: tl.constexpr):
    """Words [..., 2] -> codes and `offset` [..., 2 (e), 2 (word), 2 (b), 2 (r)]."""
    if INTERPRET:
        w0, w1 = tl.split(x)
        values = join8(
            _nibbles(w0, 0, dtype, x),
            _nibbles(w0, 1, dtype, x),
            _nibbles(w0, 2, dtype, x),
            _nibbles(w0, 3, dtype, x),
            _nibbles(w1, 0, dtype, x),
            _nibbles(w1, 1, dtype, x),
            _nibbles(w1, 2, dtype, x),
            _nibbles(w1, 3, dtype, x),
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
def unpack_bytes(x, dtype: tl.constexpr):
    """Words [..., 2] -> codes and `offset` [..., 2 (e), 2 (word), 2 (r)]."""
    if INTERPRET:
        w0, w1 = tl.split(x)
        o0, o1 = _byte_pair(w0, 0, dtype, x), _byte_pair(w0, 1, dtype, x)
        o2, o3 = _byte_pair(w1, 0, dtype, x), _byte_pair(w1, 1, dtype, x)
        values = gl.join(gl.join(o0, o2), gl.join(o1, o3))
    else:
        o0, o1, o2, o3 = gl.inline_asm_elementwise(
            BYTES_ASM, "=&r,=&r,=&r,=&r,r,r", [x], dtype=(gl.float16,) * 4, is_pure=True, pack=2
        )
        values = gl.join(gl.join(o0, o2), gl.join(o1, o3))
        if dtype == gl.bfloat16:
            values = (values.to(gl.float32) - 1024.0).to(gl.bfloat16)
    return values


@jit
def weighted(x, weight):
    """x · weight / 8: products of 16-bit rows stay in range."""
    if INTERPRET:
        y = (x.to(tl.float32) * weight.to(tl.float32) * 0.125).to(x.dtype)
    elif x.dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(WEIGHTED_BF16, "=r,r,r", [x, weight], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        y = gl.inline_asm_elementwise(WEIGHTED_F16, "=r,r,r", [x, weight], dtype=gl.float16, is_pure=True, pack=2)
    return y


@jit
def affine(x, more, scale, bias, dtype: tl.constexpr):
    """(x - more) · scale + bias of 16-bit numbers, rounded once: the difference is exact."""
    if INTERPRET:
        y = ((x.to(tl.float32) - more.to(tl.float32)) * scale.to(tl.float32) + bias.to(tl.float32)).to(dtype)
    elif dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(
            AFFINE_BF16, "=r,r,r,r,r", [x, -more, scale, bias], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        y = gl.inline_asm_elementwise(
            AFFINE_F16, "=r,r,r,r,r", [x, more, scale, bias], dtype=gl.float16, is_pure=True, pack=2
        )
    return y


@constexpr_function
def words_layout(bits, W, tiles, count):
    """Codes of some tiles and chunks as words [W, tiles, count, 8 · bits, 4], or numbers [W, tiles, count, 128, 8]: a
    lane takes 16 bytes at a time."""
    regs = [[0, 0, 0, 0, 1 << i] for i in range(3 if bits == 16 else 2)]
    regs += [[0, 0, 0, 32 << i, 0] for i in range((bits // 4).bit_length() - 1)]
    regs += [[0, 0, 1 << i, 0, 0] for i in range(count.bit_length() - 1)] + [
        [0, 1 << i, 0, 0, 0] for i in range(tiles.bit_length() - 1)
    ]
    lanes = [[0, 0, 0, 1 << i, 0] for i in range(5)]
    warps = [[1 << i, 0, 0, 0, 0] for i in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [W, tiles, count, 8 * bits, 8 if bits == 16 else 4])


@constexpr_function
def x_layout(W, NP, count):
    regs = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32]] + [[0, 8 << i, 0] for i in range((NP // 8).bit_length() - 1)]
    regs += [[0, 0, 64 << i] for i in range(count.bit_length() - 1)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1 << i, 0, 0] for i in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [W, NP, 64 * count])


@constexpr_function
def sides_layout(W, tiles, count):
    """Scales and biases [W, tiles, count, 8 g, 4 (r, scale or bias)]: a lane holds those of its two outputs."""
    regs = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2]]
    regs += [[0, 0, 1 << i, 0, 0] for i in range(count.bit_length() - 1)] + [
        [0, 1 << i, 0, 0, 0] for i in range(tiles.bit_length() - 1)
    ]
    lanes = [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], *([0, 0, 0, 1 << i, 0] for i in range(3))]
    warps = [[1 << i, 0, 0, 0, 0] for i in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [W, tiles, count, 8, 4])


@jit
def codes_operand(x, OPERAND: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """The operand [W, 16 · tiles, 64] of a chunk's words or numbers [W, tiles, ...]."""
    W: gl.constexpr = x.shape[0]
    T: gl.constexpr = x.shape[1]
    if BITS == 16:
        # W, tile, h, j, g, t, b, r, e
        y = gl.permute(gl.reshape(x, [W, T, 2, 2, 8, 4, 2, 2, 2]), [0, 1, 7, 4, 2, 3, 6, 5, 8])
    elif BITS == 4:
        # W, tile, g, t, h, e, j, b, r
        y = gl.permute(unpack_nibbles(gl.reshape(x, [W, T, 8, 4, 2, 2]), DTYPE), [0, 1, 8, 2, 4, 6, 7, 3, 5])
    else:
        # W, tile, h, g, t, j, e, b, r
        y = gl.permute(unpack_bytes(gl.reshape(x, [W, T, 2, 8, 4, 2, 2]), DTYPE), [0, 1, 8, 3, 2, 5, 7, 4, 6])
    return gl.convert_layout(gl.reshape(y, [W, 16 * T, 64]), OPERAND, assert_trivial=True)


@jit
def load_words(
    CODES, tile, chunk, M_TILES: tl.constexpr, CHUNKS: tl.constexpr, T: tl.constexpr, COUNT: tl.constexpr,
    EVEN: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Codes [W, T, COUNT, ...] of T tiles from tile[w] on, COUNT chunks from chunk[w] on; zeros beyond the end of a tile,
    and anything instead of a tile that is not there."""
    ROWS: gl.constexpr = 8 * BITS
    INNER: gl.constexpr = 8 if BITS == 16 else 4
    lay: gl.constexpr = words_layout(BITS, W, T, COUNT)
    ends: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, lay))
    inner: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, lay)))
    c = gl.convert_layout(chunk, gl.SliceLayout(1, gl.SliceLayout(1, ends)))[:, None]
    c = c + gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(1, ends)))[None, :]
    m = gl.convert_layout(tile, gl.SliceLayout(1, gl.SliceLayout(2, ends)))[:, None]
    m = m + gl.arange(0, T, gl.SliceLayout(0, gl.SliceLayout(2, ends)))[None, :]
    m = gl.minimum(m, M_TILES - 1).to(gl.int64)
    x = gl.arange(0, ROWS, gl.SliceLayout(1, inner)) * INNER
    within = x[:, None] + gl.arange(0, INNER, gl.SliceLayout(0, inner))[None, :]
    at = CODES + (m * (CHUNKS * ROWS * INNER))[:, :, None] + (c * (ROWS * INNER))[:, None, :]
    at = at[:, :, :, None, None] + within[None, None, None, :, :]
    if EVEN:
        y = gl.load(at, cache_modifier=".cg")
    else:
        live = (c < CHUNKS)[:, None, :, None, None] & (m >= 0)[:, :, None, None, None]
        y = gl.load(at, mask=live & (within >= 0)[None, None, None, :, :], other=0, cache_modifier=".cg")
    return y


@jit
def load_sides(
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
    m = gl.convert_layout(tile, gl.SliceLayout(1, gl.SliceLayout(2, ends)))[:, None]
    m = m + gl.arange(0, T, gl.SliceLayout(0, gl.SliceLayout(2, ends)))[None, :]
    m = gl.minimum(m, M_TILES - 1).to(gl.int64)
    g = gl.arange(0, 8, gl.SliceLayout(1, inner)) * 4
    within = g[:, None] + gl.arange(0, 4, gl.SliceLayout(0, inner))[None, :]
    group = c * (64 // PER) // GROUP
    at = SIDES + (m * (CHUNKS * 64 // GROUP * 32))[:, :, None] + (group * 32)[:, None, :]
    at = at[:, :, :, None, None] + within[None, None, None, :, :]
    if EVEN:
        y = gl.load(at)
    else:
        live = (c < CHUNKS * PER)[:, None, :, None, None] & (m >= 0)[:, :, None, None, None]
        y = gl.load(at, mask=live & (within >= 0)[None, None, None, :, :], other=0.0)
    return y


@jit
def load_x(
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
def halves(x):
    """The first and the last half along the last axis of three, or the third of five."""
    S: gl.constexpr = x.shape
    if len(S) == 3:
        y = gl.permute(gl.reshape(x, [S[0], S[1], 2, S[2] // 2]), [0, 1, 3, 2])
    else:
        y = gl.permute(gl.reshape(x, [S[0], S[1], 2, S[2] // 2, S[3], S[4]]), [0, 1, 3, 4, 5, 2])
    return gl.split(y)


@jit
def two_groups(codes, sides, x, A: tl.constexpr, B: tl.constexpr):
    """A chunk of two groups: codes [W, 16 · T, 64], sides [W, T, 2, 8, 4] and x [W, 64, NP], each of the first and of the
    second."""
    S: gl.constexpr = x.shape
    c0, c1 = halves(codes)
    s0, s1 = gl.split(gl.permute(sides, [0, 1, 3, 4, 2]))
    x0, x1 = gl.split(gl.permute(gl.reshape(x, [S[0], 2, 32, S[2]]), [0, 2, 3, 1]))
    c0, c1 = gl.convert_layout(c0, A, assert_trivial=True), gl.convert_layout(c1, A, assert_trivial=True)
    x0, x1 = gl.convert_layout(x0, B, assert_trivial=True), gl.convert_layout(x1, B, assert_trivial=True)
    return c0, c1, s0, s1, x0, x1


@jit
def x_operand(x, OPERAND: tl.constexpr, W: tl.constexpr, NP: tl.constexpr):
    """The operand [W, 64, NP] of a chunk's rows [W, NP, 64]."""
    y = gl.permute(gl.reshape(x, [W, NP, 2, 4, 2, 2, 2]), [0, 2, 4, 5, 3, 6, 1])
    return gl.convert_layout(gl.reshape(y, [W, 64, NP]), OPERAND, assert_trivial=True)


@jit
def side_rows(x, i: tl.constexpr, ROWS: tl.constexpr):
    """Scales (i 0) or biases (1) [W, 16 · tiles] float32 of a group's [W, tiles, 8, 4]."""
    W: gl.constexpr = x.shape[0]
    T: gl.constexpr = x.shape[1]
    scale, bias = gl.split(gl.reshape(x, [W, T, 8, 2, 2]))
    y = scale if i == 0 else bias
    y = gl.reshape(gl.permute(y, [0, 1, 3, 2]), [W, 16 * T])
    return gl.convert_layout(y, ROWS, assert_trivial=True).to(gl.float32)


@jit
def store_outputs(
    Y, BIAS, ADDED, y, tile, n, M: tl.constexpr, BIASED: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """Write y [G, 16 · T, NP] float32, the outputs of T tiles from tile[g] on, after what is added or gated."""
    G: gl.constexpr = y.shape[0]
    TILES: gl.constexpr = y.shape[1] // 16
    NP: gl.constexpr = y.shape[2]
    outputs: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    first = gl.convert_layout(tile, gl.SliceLayout(1, outputs))[:, None]
    r = gl.arange(0, 16 * TILES, gl.SliceLayout(0, outputs))[None, :]
    row = gl.arange(0, NP, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    if GATED:
        m = (first + r // 16) * 8 + r % 8
        if BIASED:
            y = y + gl.load(BIAS + (r // 8 % 2) * M + m, mask=m < M, other=0.0).to(gl.float32)[:, :, None]
        gate, up = gl.split(gl.permute(gl.reshape(y, [G, TILES, 2, 8, NP]), [0, 1, 3, 4, 2]))
        result = gate / (1.0 + gl.exp(-gate)) * up
        y = gl.reshape(gl.permute(gl.join(result, result), [0, 1, 4, 2, 3]), [G, 16 * TILES, NP])
        y = gl.convert_layout(y, LAYOUT, assert_trivial=True)
        live = (m < M) & (r % 16 < 8)
    else:
        m = first * 16 + r
        live = m < M
        if BIASED:
            y = y + gl.load(BIAS + m, mask=live, other=0.0).to(gl.float32)[:, :, None]
    stored = live[:, :, None] & (row < n)[None, None, :]
    at = row[None, None, :] * M + m[:, :, None]
    if ADD and not GATED:
        y = y + gl.load(ADDED + at, mask=stored, other=0.0).to(gl.float32)
    gl.store(Y + at, y.to(Y.dtype.element_ty), mask=stored)
