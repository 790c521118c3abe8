"""silu(gate) · up over many rows, whose halves a product left side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048  # outputs of a program


@triton.jit
def gate_kernel(X, Y, M: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of outputs). X [rows, 2 · M], Y [rows, M]."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(X + row * (2 * M) + m, mask=m < M, other=0.0).to(tl.float32)
    up = tl.load(X + row * (2 * M) + M + m, mask=m < M, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(Y + row * M + m, y.to(Y.dtype.element_ty), mask=m < M)


def gate_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2 · M] contiguous, gate before up -> [..., M]."""
    size = x.shape[-1] // 2
    y = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    gate_kernel[(y.numel() // size, triton.cdiv(size, BLOCK))](x, y, M=size, BLOCK=BLOCK)
    return y
