"""The rotation of the turbo codecs as a matrix product on tensor cores, without loss against float32.

√D·R has only ±1 where D is a power of two, which 16-bit dtypes hold exactly. Otherwise it is split into a sum of 16-bit
matrices (two of fp16, three of bf16), whose products add up in float32 to float32's own precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.backends.cuda.kernels.gl import INTERPRET
from kvcore.layout import hadamard_dct, rotation_signs


def rotation_matrices(layers: int, part: str, head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    """√D·Rᵀ of each layer as a sum of terms of ``dtype``: [layers, terms, D (input), D (output)].

    Rows are multiplied from the left: x @ the sum over the terms. ``part`` is "k" or "v"; layers count from the
    model's first.
    """
    matrix = torch.from_numpy(hadamard_dct(head_dim).copy()).double()
    matrix = (matrix * head_dim**0.5).to(torch.float32).to(device)
    signs = [torch.from_numpy(rotation_signs(layer, part, head_dim).copy()) for layer in range(layers)]
    rest = torch.stack(signs).to(device)[:, :, None] * matrix.T
    terms = []
    for _ in range(_terms(head_dim, dtype)):
        terms.append(rest.to(dtype))
        rest = rest - terms[-1].float()
    return torch.stack(terms, 1).contiguous()


def _terms(head_dim: int, dtype: torch.dtype) -> int:
    if dtype == torch.float32 or head_dim & (head_dim - 1) == 0:
        return 1
    return 2 if dtype == torch.float16 else 3


@triton.jit
def rotate(x, y, MATRIX, col, first: tl.constexpr, last: tl.constexpr, D: tl.constexpr, TERMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """y + √D·R x for coordinates first .. last of the rows x [rows, power of two], zero beyond ``last``.

    y float32 [rows, COLS] holds the output coordinates from ``col`` on; those beyond D are not touched. MATRIX: one layer
    of `rotation_matrices`, whose dtype x shares.
    """
    d = first + tl.arange(0, x.shape[1])
    j = col + tl.arange(0, y.shape[1])
    inside = (d < last)[:, None] & (j < D)[None, :]
    for term in tl.static_range(TERMS):
        matrix = tl.load(MATRIX + (term * D + d[:, None]) * D + j[None, :], mask=inside, other=0.0)
        if INTERPRET:
            y = tl.dot(x.to(tl.float32), matrix.to(tl.float32), y, input_precision="ieee")
        else:
            y = tl.dot(x, matrix, y, input_precision="tf32x3")
    return y
