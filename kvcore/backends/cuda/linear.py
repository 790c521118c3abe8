"""Weights on CUDA, stored in the order that the kernels read, and their product with a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from kvcore.backends.cuda.gpu import overlap_options, processors
from kvcore.backends.cuda.kernels.linear import linear_rows
from kvcore.backends.cuda.kernels.linear_wide import linear_wide
from kvcore.backends.cuda.kernels.weight_rows import weight_rows
from kvcore.backends.cuda.linear_config import LinearConfig, WideConfig, choose_config
from kvcore.errors import UnsupportedError
from kvcore.weights.types import AffineWeight, DenseWeight, Weight

FEW_ROWS = WideConfig.max_rows  # more are multiplied by dense weights
CHUNK = 64  # inputs that stand together in a tile


@dataclass(frozen=True, slots=True)
class WeightTiles:
    """A matrix [out, in] as tiles of 16 outputs and 64 inputs.

    codes  int32 [tiles, in / 64, 32 · bits], bits 4 or 8 (codes of 2 and 3 bits take 4, of 5 and 6 take 8), or numbers
           of 16 bits [tiles, in / 64, 1024]
    sides  the scales' dtype [tiles, in / group, 8, 4]: of outputs g and g + 8 each scale and bias; None of 16 bits
    dtype  of the rows that it is multiplied with
    gated  whether tiles hold 8 rows of a gate and 8 of an up projection, and ``out`` counts one of them
    """

    codes: Tensor
    sides: Tensor | None
    dtype: torch.dtype
    out: int
    inputs: int
    bits: int
    group: int
    gated: bool = False

    @classmethod
    def create(cls, weights: Sequence[Weight], device: torch.device | str, dtype: torch.dtype) -> WeightTiles:
        """One matrix, or several of the same inputs with their outputs one after the other. Dense weights become
        ``dtype``. UnsupportedError with all of `reasons_against`."""
        _check(weights, dtype)
        return _tiles([_Parts.create(weight, device, dtype) for weight in weights], weights[0], dtype)

    @classmethod
    def create_gated(cls, gate: Weight, up: Weight, device: torch.device | str, dtype: torch.dtype) -> WeightTiles:
        """A gate and an up projection of one shape, for silu(gate x) · (up x). UnsupportedError with all of
        `reasons_against_gated`."""
        if reasons := reasons_against_gated(gate, up, dtype):
            raise _unsupported(reasons)
        parts = [_Parts.create(weight, device, dtype) for weight in (gate, up)]
        tiles = _tiles([_by_eights(*parts)], gate, dtype)
        return replace(tiles, out=gate.shape[0], gated=True)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.sides is None else self.sides.nbytes)

    def rows(self, ids: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Rows ``ids`` (any shape) of the matrix, or all of them (a gate's, then those of up): [..., in]."""
        dtype = dtype or self.dtype
        count = self.out * (2 if self.gated else 1)
        out = torch.empty(*((count,) if ids is None else ids.shape), self.inputs, dtype=dtype, device=self.codes.device)
        weight_rows(
            self.codes, self.sides, ids, out, outputs=self.out, bits=self.bits, group=self.group, gated=self.gated
        )
        return out


@dataclass(frozen=True, slots=True)
class _Parts:
    """On the device: numbers or codes [out, in]; scales and biases [out, in / group] of codes."""

    values: Tensor
    sides: tuple[Tensor, Tensor] | None

    @classmethod
    def create(cls, weight: Weight, device: torch.device | str, dtype: torch.dtype) -> _Parts:
        if isinstance(weight, DenseWeight):
            return cls(_tensor(weight.array).to(device).to(dtype), None)
        scales, biases = (_tensor(side).to(device) for side in (weight.scales, weight.biases))
        return cls(unpacked_on(weight, device), (scales, biases))

    def all(self) -> tuple[Tensor, ...]:
        return self.values, *(self.sides or ())


def unpacked_on(weight: AffineWeight, device: torch.device | str) -> Tensor:
    """Its codes uint8 [out, in] on the device, where they are unpacked if the width divides a word."""
    if 32 % weight.bits:
        return torch.from_numpy(weight.unpacked()).to(device)
    words = _tensor(weight.codes.view(np.int32)).to(device)
    shifts = torch.arange(0, 32, weight.bits, dtype=torch.int32, device=device)
    codes = (words[..., None] >> shifts) & (1 << weight.bits) - 1
    return codes.to(torch.uint8).flatten(1)


def _tiles(parts: Sequence[_Parts], like: Weight, dtype: torch.dtype) -> WeightTiles:
    values, *sides = (torch.cat(each) for each in zip(*(part.all() for part in parts), strict=True))
    out, inputs = values.shape
    tiles = -(-out // 16)
    values, *sides = (torch.nn.functional.pad(x, (0, 0, 0, tiles * 16 - out)) for x in (values, *sides))
    # tile, r, g, step, h, t, j, b, e
    split = values.reshape(tiles, 2, 8, inputs // CHUNK, 2, 4, 2, 2, 2)
    if isinstance(like, DenseWeight):
        numbers = split.permute(0, 3, 4, 6, 2, 5, 7, 1, 8)
        numbers = numbers.reshape(tiles, inputs // CHUNK, -1).contiguous()
        return WeightTiles(numbers, None, dtype, out, inputs, 16, inputs)
    bits = 4 if like.bits <= 4 else 8
    fields = split.permute(0, 3, 2, 5, 4, 6, 8, 7, 1) if bits == 4 else split.permute(0, 3, 4, 2, 5, 6, 7, 1, 8)
    fields = fields.reshape(tiles, inputs // CHUNK, -1, 32 // bits)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=values.device)
    for i in range(32 // bits):
        words |= fields[..., i].to(torch.int32) << bits * i
    groups = inputs // like.group_size
    both = torch.stack(sides, -1).reshape(tiles, 2, 8, groups, 2).permute(0, 3, 2, 1, 4)
    both = both.reshape(tiles, groups, 8, 4).contiguous()
    return WeightTiles(words, both, dtype, out, inputs, bits, like.group_size)


def reasons_against(weight: Weight, dtype: torch.dtype) -> list[str]:
    reasons = []
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"dtype {str(dtype).removeprefix('torch.')}: needs float16 or bfloat16")
    group = weight.group_size if isinstance(weight, AffineWeight) else CHUNK
    if group not in (32, 64, 128):
        reasons.append(f"group_size {group}: needs 32, 64 or 128")
    if weight.shape[1] % max(CHUNK, group):
        reasons.append(f"{weight.shape[1]} inputs: need a multiple of {max(CHUNK, group)}")
    return reasons


def reasons_against_gated(gate: Weight, up: Weight, dtype: torch.dtype) -> list[str]:
    reasons = reasons_against(gate, dtype)
    if gate.shape != up.shape or gate.shape[0] % 8:
        reasons.append(f"gate {gate.shape} and up {up.shape}: need one shape, and outputs in eights")
    return reasons if alike([gate, up]) else [*reasons, _unlike([gate, up])]


def alike(weights: Sequence[Weight]) -> bool:
    """Whether they can be one matrix: the same inputs, and the same form."""
    return len({_kind(weight) for weight in weights}) == 1


def linear_tiles(
    x: Tensor,
    weight: WeightTiles,
    *,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: LinearConfig | None = None,
) -> Tensor:
    """x [..., in] times Wᵀ -> [..., out], in x's dtype or ``out_dtype``: a launch for each ``config.max_rows`` rows.

    x is float16 or bf16. ``norm``: weights [in] and eps of an RMSNorm of x before. ``bias`` [out] (of a gated weight
    [2 · out]) and ``added`` [..., out] (a residual, not with a gated weight) come after.
    """
    rows = x.reshape(-1, weight.inputs)
    config = config or config_for(weight, len(rows), normed=norm is not None)
    if norm is not None and isinstance(config, WideConfig):
        rows, norm = torch.nn.functional.rms_norm(rows, rows.shape[1:], *norm), None
    y = torch.empty(len(rows), weight.out, dtype=out_dtype or x.dtype, device=x.device)
    most = config.max_rows
    rest = [None] * len(rows) if added is None else added.reshape(-1, weight.out).split(most)
    for part, out, more in zip(rows.split(most), y.split(most), rest, strict=False):
        _launch(part, weight, out, norm, bias, more, config)
    return y.reshape(*x.shape[:-1], weight.out)


def config_for(weight: WeightTiles, rows: int, *, normed: bool) -> LinearConfig:
    tiles, chunks = weight.codes.shape[:2]
    cores = processors(weight.codes.device)
    return choose_config(tiles, chunks, weight.bits, rows, normed=normed, processors=cores)


def _launch(
    x: Tensor,
    weight: WeightTiles,
    y: Tensor,
    norm: tuple[Tensor, float] | None,
    bias: Tensor | None,
    added: Tensor | None,
    config: LinearConfig,
) -> None:
    n, blocks = len(x), -(-weight.codes.shape[0] // config.tiles)
    sides = weight.codes if weight.sides is None else weight.sides
    shifts, residual = x if bias is None else bias, x if added is None else added
    options: dict[str, Any] = {
        "M": weight.out, "K": weight.inputs, "GROUP": weight.group, "BITS": weight.bits, "W": config.warps,
        "TILES": config.tiles, "COUNT": config.chunks, "BIASED": bias is not None, "ADD": added is not None,
        "GATED": weight.gated, "num_warps": config.warps, **overlap_options(x.device),
    }  # fmt: skip
    if isinstance(config, WideConfig):
        if config.apart:
            blocks = -(-blocks // config.warps)
        linear_wide[(blocks,)](
            x, weight.codes, sides, shifts, residual, y, n,
            NP=max(8, 1 << (n - 1).bit_length()), APART=config.apart, **options,
        )  # fmt: skip
        return
    weights, eps = (x, 0.0) if norm is None else norm
    linear_rows[(blocks,)](
        x, weights, weight.codes, sides, shifts, residual, y, n, eps,
        NP=8 if n <= 8 else 16, AHEAD=config.ahead, NORMED=norm is not None, **options,
    )  # fmt: skip


def _check(weights: Sequence[Weight], dtype: torch.dtype) -> None:
    reasons = [reason for weight in weights for reason in reasons_against(weight, dtype)]
    if not alike(weights):
        reasons.append(_unlike(weights))
    if reasons:
        raise _unsupported(reasons)


def _unsupported(reasons: list[str]) -> UnsupportedError:
    return UnsupportedError(f"no tiles for this weight: {'; '.join(reasons)}; dequantize it", reasons)


def _kind(weight: Weight) -> tuple[Any, ...]:
    if isinstance(weight, AffineWeight):
        return weight.shape[1], weight.bits, weight.group_size, weight.scales.dtype.name
    return (weight.shape[1],)


def _unlike(weights: Sequence[Weight]) -> str:
    return f"(inputs, bits, group size, dtype) {sorted({_kind(weight) for weight in weights})}: need to be the same"


def _by_eights(gate: _Parts, up: _Parts) -> _Parts:
    """Eight rows of the gate, eight of up, and so on."""

    def mix(a: Tensor, b: Tensor) -> Tensor:
        width = a.shape[1]
        return torch.stack([a.reshape(-1, 8, width), b.reshape(-1, 8, width)], 1).reshape(-1, width)

    values, *sides = (mix(a, b) for a, b in zip(gate.all(), up.all(), strict=True))
    return _Parts(values, (sides[0], sides[1]) if sides else None)


def _tensor(array: np.ndarray) -> Tensor:
    whole = array if array.flags.c_contiguous and array.flags.writeable else array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(whole.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(whole)
