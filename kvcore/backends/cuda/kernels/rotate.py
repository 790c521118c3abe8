"""The rotation of the turbo codecs as a matrix product on tensor cores, without loss against float32.

√D·R has only ±1 where D is a power of two, which 16-bit dtypes hold exactly; otherwise it is split into a sum of 16-bit
matrices (two of fp16, three of bf16), and float32 rows into three of bf16. The products add up in float32 to float32's
own precision.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcore.backends.cuda.kernels.gl import INTERPRET
from kvcore.layout import hadamard_dct, rotation_signs


def rotation_matrices(layers: int, part: str, head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    """√D·Rᵀ of each layer as a sum of 16-bit terms: [layers, terms, D (input), D (output)].

    Rows x are multiplied from the left: x @ the sum over the terms. ``part`` is "k" or "v", ``dtype`` that of the rows;
    layers count from the model's first.
    """
    term_dtype = torch.float16 if dtype == torch.float16 else torch.bfloat16
    count = matrix_terms(head_dim, dtype)
    matrix = torch.from_numpy(hadamard_dct(head_dim) * np.float32(head_dim**0.5)).to(device)
    signs = np.stack([rotation_signs(layer, part, head_dim) for layer in range(layers)])
    return sum_of_terms(torch.from_numpy(signs).to(device)[:, :, None] * matrix.T, term_dtype, count)


def sum_of_terms(matrices: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """float32 [..., D, D] as a sum of ``count`` 16-bit terms: [..., count, D, D]."""
    terms, rest = [], matrices
    for _ in range(count):
        terms.append(rest.to(dtype))
        rest = rest - terms[-1].float()
    return torch.stack(terms, -3).contiguous()


def matrix_terms(head_dim: int, dtype: torch.dtype) -> int:
    if head_dim & (head_dim - 1) == 0:
        return 1
    return 2 if dtype == torch.float16 else 3


@triton.jit
def rotate(x, y, MATRIX, column, first: tl.constexpr, last: tl.constexpr, D: tl.constexpr, TERMS: tl.constexpr):
    """y + √D·R x, where the rows x [rows, power of two] are coordinates first .. last, zero beyond.

    y float32 [rows, columns] holds the output coordinates from ``column`` on; those beyond D stay as they are.
    MATRIX is one layer of `rotation_matrices` for x's dtype.
    """
    for term in tl.static_range(TERMS):
        y = exact_product(x, rotation_part(MATRIX, column, first, x.shape[1], last, D, term, COLUMNS=y.shape[1]), y)
    return y


@triton.jit
def rotation_part(
    MATRIX, column, first: tl.constexpr, COUNT: tl.constexpr, last: tl.constexpr, D: tl.constexpr, term: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A term's rows ``first`` .. ``first`` + COUNT, zeros from ``last`` on, and COLUMNS columns of it."""
    d = first + tl.arange(0, COUNT)
    j = column + tl.arange(0, COLUMNS)
    inside = (d < last)[:, None] & (j < D)[None, :]
    return tl.load(MATRIX + (term * D + d[:, None]) * D + j[None, :], mask=inside, other=0.0)


@triton.jit
def exact_product(x, matrix, y):
    """y + x @ matrix for a 16-bit matrix; float32 rows x are taken as a sum of three bf16 numbers."""
    if x.dtype == tl.float32:
        rest = x
        for _ in tl.static_range(3):
            piece = rest.to(tl.bfloat16)
            y = _product(piece, matrix, y)
            rest -= piece.to(tl.float32)
    else:
        y = _product(x, matrix, y)
    return y


@triton.jit
def _product(x, matrix, y):
    if INTERPRET:  # whose bf16 products are wrong
        return tl.dot(x.to(tl.float32), matrix.to(tl.float32), y, input_precision="ieee")
    return tl.dot(x, matrix, y)
