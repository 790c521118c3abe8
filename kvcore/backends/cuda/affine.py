"""MLX's affine weights on CUDA: stored in the order that `kernels/linear.py` reads, and multiplied by a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvcore.backends.cuda.attend import device_capability
from kvcore.backends.cuda.kernels.linear import linear_rows
from kvcore.errors import UnsupportedError
from kvcore.weights.types import AffineWeight

MAX_ROWS = 16
STEP = 64  # inputs that a warp takes at a time


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Warps of a program, which share the inputs of 16 outputs; steps in flight or in use."""

    warps: int = 8
    stages: int = 4


@dataclass(frozen=True, slots=True)
class AffineTiles:
    """A matrix [out, in] as tiles of 16 outputs and 64 inputs.

    codes  int32 [tiles, in / 64, 32 · bits] (bits 4 or 8; codes of 2 and 3 bits take 4, of 5 and 6 take 8)
    sides  the scales' dtype [tiles, in / group, 8, 4]: of outputs g and g + 8 each scale and bias
    gated  whether tiles hold 8 rows of a gate and 8 of an up projection, and ``out`` counts one of them
    """

    codes: Tensor
    sides: Tensor
    out: int
    inputs: int
    bits: int
    group: int
    gated: bool = False

    @classmethod
    def create(cls, weight: AffineWeight, device: torch.device | str) -> AffineTiles:
        """UnsupportedError with all of `reasons_against`."""
        return cls._create(weight.unpacked(), weight.scales, weight.biases, weight, device)

    @classmethod
    def stacked(cls, weights: Sequence[AffineWeight], device: torch.device | str) -> AffineTiles:
        """Several matrices of the same inputs, bits and groups as one, their outputs one after the other."""
        _check_alike(weights)
        codes = np.concatenate([w.unpacked() for w in weights])
        scales, biases = np.concatenate([w.scales for w in weights]), np.concatenate([w.biases for w in weights])
        return cls._create(codes, scales, biases, weights[0], device)

    @classmethod
    def create_gated(cls, gate: AffineWeight, up: AffineWeight, device: torch.device | str) -> AffineTiles:
        """A gate and an up projection of the same shape, for silu(gate x) · (up x). The number of outputs must be a
        multiple of 8."""
        _check_alike([gate, up])
        out = gate.shape[0]
        if gate.shape != up.shape or out % 8:
            raise UnsupportedError(f"gate {gate.shape} and up {up.shape}: need one shape, and outputs in eights", [])
        codes = _by_eights(gate.unpacked(), up.unpacked())
        scales, biases = _by_eights(gate.scales, up.scales), _by_eights(gate.biases, up.biases)
        return replace(cls._create(codes, scales, biases, gate, device), out=out, gated=True)

    @classmethod
    def _create(
        cls,
        unpacked: np.ndarray,
        scales: np.ndarray,
        biases: np.ndarray,
        like: AffineWeight,
        device: torch.device | str,
    ) -> AffineTiles:
        if reasons := reasons_against(like):
            raise UnsupportedError(f"no tiles for this weight: {'; '.join(reasons)}; dequantize it", reasons)
        out, inputs = unpacked.shape
        bits, tiles = 4 if like.bits <= 4 else 8, -(-out // 16)
        codes = np.zeros((tiles * 16, inputs), np.uint32)
        codes[:out] = unpacked
        # tile, r, g, step, h, t, j, b, e
        split = codes.reshape(tiles, 2, 8, inputs // STEP, 2, 4, 2, 2, 2)
        if bits == 4:
            fields = split.transpose(0, 3, 2, 5, 4, 6, 8, 7, 1)  # within a word: e, b, r
        else:
            fields = split.transpose(0, 3, 4, 2, 5, 6, 7, 1, 8)  # r, e
        fields = fields.reshape(-1, 32 // bits)
        words = (fields << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32)
        groups = inputs // like.group_size
        sides = np.zeros((2, tiles * 16, groups), scales.dtype)
        sides[0, :out], sides[1, :out] = scales, biases
        sides = sides.reshape(2, tiles, 2, 8, groups).transpose(1, 4, 3, 2, 0).reshape(tiles, groups, 8, 4)
        return cls(
            torch.from_numpy(words.view(np.int32).reshape(tiles, inputs // STEP, -1)).to(device),
            _tensor(np.ascontiguousarray(sides)).to(device),
            out,
            inputs,
            bits,
            like.group_size,
        )

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.sides.nbytes


def reasons_against(weight: AffineWeight) -> list[str]:
    reasons = []
    if weight.group_size not in (32, 64, 128):
        reasons.append(f"group_size {weight.group_size}: needs 32, 64 or 128")
    if weight.shape[1] % max(STEP, weight.group_size):
        reasons.append(f"{weight.shape[1]} inputs: need a multiple of {max(STEP, weight.group_size)}")
    return reasons


def linear_tiles(
    x: Tensor,
    weight: AffineTiles,
    *,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: LinearConfig | None = None,
) -> Tensor:
    """x [..., in] times Wᵀ -> [..., out], in x's dtype or ``out_dtype``.

    x has at most `MAX_ROWS` rows, of float16, or with 4-bit codes of bf16. ``norm``: weights [in] and eps of an RMSNorm
    of x before. ``bias`` [out] and ``added`` [..., out] (a residual) come after; neither with a gated weight.
    """
    rows = x.reshape(-1, weight.inputs)
    config, n = config or LinearConfig(), rows.shape[0]
    y = torch.empty(n, weight.out, dtype=out_dtype or x.dtype, device=x.device)
    overlap = {"launch_pdl": True} if device_capability(x.device) >= (9, 0) else {}
    linear_rows[(weight.codes.shape[0],)](
        rows, rows if norm is None else norm[0], weight.codes, weight.sides, rows if bias is None else bias,
        rows if added is None else added, y, n, 0.0 if norm is None else norm[1],
        M=weight.out, K=weight.inputs, GROUP=weight.group, BITS=weight.bits, NP=8 if n <= 8 else 16,
        W=config.warps, STAGES=config.stages, NORMED=norm is not None, BIASED=bias is not None, ADD=added is not None,
        GATED=weight.gated, OVERLAP=bool(overlap), num_warps=config.warps, **overlap,
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], weight.out)


def _check_alike(weights: Sequence[AffineWeight]) -> None:
    kinds = {(w.shape[1], w.bits, w.group_size) for w in weights}
    if len(kinds) > 1:
        raise UnsupportedError(f"weights of different (inputs, bits, group size) {sorted(kinds)}: keep them apart", [])


def _by_eights(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Eight rows of the gate, eight of up, and so on."""
    width = gate.shape[1]
    return np.stack([gate.reshape(-1, 8, width), up.reshape(-1, 8, width)], 1).reshape(-1, width)


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
