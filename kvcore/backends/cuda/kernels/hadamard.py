"""R_Vᵀ of a power-of-two head size on an accumulator: additions between registers and lanes, no matrix.

R = H·diag(signs)/√D with H the Walsh–Hadamard matrix in Sylvester order (`kvcore.layout.rotation`), so Rᵀ x is one
butterfly per bit of the dimension, then the signs. In an accumulator of mma.m16n8k16 lane 4·g + t holds dimensions
16·m + 8·r + g: the low three bits are lanes, the others registers.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kvcore.backends.cuda.kernels.gl import INTERPRET, constexpr_function, gl, jit
from kvcore.layout import rotation_signs

EXCHANGE_ASM = [tl.constexpr(f"shfl.sync.bfly.b32 $0, $1, {4 * h}, 0x1f, 0xffffffff;") for h in (1, 2, 4)]
EXCHANGE1, EXCHANGE2, EXCHANGE4 = EXCHANGE_ASM


def packed_signs(layer: int, head_dim: int) -> torch.Tensor:
    """int32 [8]: bit d // 8 of word d % 8 is set where V's dimension d changes its sign."""
    negative = torch.from_numpy(rotation_signs(layer, "v", head_dim).copy()) < 0
    bits = negative.view(-1, 8).long() << torch.arange(head_dim // 8)[:, None]
    return bits.sum(0).to(torch.int32)


@constexpr_function
def butterflies(head_dim):
    return head_dim.bit_length() - 1


@jit
def _exchanged(x, h: tl.constexpr):
    """x [D, N] with dimensions d and d ^ h in each other's place, h below 8: a shuffle between lanes."""
    if INTERPRET:
        a, b = tl.split(tl.permute(tl.reshape(x, [x.shape[0] // (2 * h), 2, h, x.shape[1]]), [0, 2, 3, 1]))
        y = tl.reshape(tl.permute(tl.join(b, a), [0, 3, 1, 2]), x.shape)
    else:
        asm: gl.constexpr = EXCHANGE1 if h == 1 else EXCHANGE2 if h == 2 else EXCHANGE4
        y = gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)
    return y


@jit
def _butterfly(x, d, h: tl.constexpr, LAYOUT: tl.constexpr):
    """Sums and differences of the dimensions d and d ^ h."""
    D: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    if h < 8:
        y = _exchanged(x, h) + gl.where((d & h) == 0, 1.0, -1.0)[:, None] * x
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, [D // (2 * h), 2, h, N]), [0, 2, 3, 1]))
        y = gl.reshape(gl.permute(gl.join(a + b, a - b), [0, 3, 1, 2]), [D, N])
        y = gl.convert_layout(y, LAYOUT, assert_trivial=True)
    return y


@jit
def undo_rotation(x, words, d, D: tl.constexpr, LAYOUT: tl.constexpr):
    """√D·Rᵀ x for the first D dimensions of x [D or more, N] float32; ``words`` are `packed_signs` of each d."""
    for i in tl.static_range(butterflies(D)):
        x = _butterfly(x, d, 1 << i, LAYOUT)
    flip = (words << (31 - d // 8)) & -0x80000000
    return (x.to(gl.int32, bitcast=True) ^ flip[:, None]).to(gl.float32, bitcast=True)
