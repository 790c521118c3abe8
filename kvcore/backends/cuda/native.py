"""How pages are stored on CUDA, and the way from and to the canonical planes.

A page holds `PAGE` tokens of one KV head. What a lane of a warp loads is its own fragment of the tensor core
instruction mma.m16n8k16: lane = 4·g + t, with g in 0..7 and t in 0..3. K is stored token by token; V in tiles of 16
tokens and 16 dimensions (an m-tile), in which a lane holds d = 16·mtile + 8·r + g of tokens 8·k8 + 2·t + half. Turbo
codes are a magnitude and a sign bit each, at the places where a byte permute and a logic operation look for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.errors import UnsupportedError
from kvcore.layout import Codec, Layout
from kvcore.ops import ITEMSIZE

PAGE = 128
TILE = 16

# Where the eight codes of a turbo4 word, and the 32 codes (4 m-tiles of 8) of a turbo3 lane, have their bits.
_TURBO4_MAGNITUDE = tuple(4 * c for c in range(8))
_TURBO4_SIGN = tuple(8 * (c % 4) + (7 if c < 4 else 3) for c in range(8))
_TURBO3_MAGNITUDE = tuple(4 * c + 2 * (m % 2) for m in range(4) for c in range(8))
_TURBO3_SIGN = tuple(8 * (c % 4) + 7 - (2 * m + c // 4) for m in range(4) for c in range(8))
_INT8_BYTE = (0, 8, 16, 24)


def mtile_group(codec: str, head_dim: int) -> int:
    """m-tiles of V stored side by side per lane, so that a lane's load is 16 bytes where their number allows it."""
    largest = 2 if codec == "int8" else 4
    return math.gcd(head_dim // TILE, largest)


def reasons_against(layout: Layout, page_size: int = PAGE) -> list[str]:
    """Why pages of this layout have no native form; empty where they have one."""
    reasons = []
    if page_size != PAGE:
        reasons.append(f"page_size {page_size}: needs {PAGE}")
    for part, codec, dim in (("K", layout.k, layout.k_dim), ("V", layout.v, layout.v_dim)):
        if codec.name == "turbo3" and part == "K":
            reasons.append("turbo3 K: only V is stored in turbo3 pages")
        step = 4 * TILE if codec.name == "turbo3" else TILE
        if dim % step:
            reasons.append(f"head_dim {dim}: {codec.name} pages need a multiple of {step}")
    return list(dict.fromkeys(reasons))


@dataclass(frozen=True, slots=True)
class NativePlane:
    """One array of a page and KV head: ``shape`` and dtype of what stands behind [layers, pages, Hkv]."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class NativeLayout:
    """The planes of folded pages: "k", "v" and, where quantized, "k_scale", "v_scale"; where K is centred, "k_center".

    ``dtype`` is the compute dtype, that of raw rows. Raises UnsupportedError with `reasons_against`.
    """

    layout: Layout
    dtype: str

    def __post_init__(self) -> None:
        if reasons := reasons_against(self.layout):
            raise UnsupportedError(f"no native pages: {'; '.join(reasons)} (use --kernels graph)", reasons)

    @property
    def planes(self) -> tuple[NativePlane, ...]:
        k = _planes("k", self.layout.k, self.layout.k_dim, self.dtype)
        return k + _planes("v", self.layout.v, self.layout.v_dim, self.dtype)

    @property
    def raw_planes(self) -> tuple[NativePlane, ...]:
        """The planes "k" and "v" of pages of raw rows."""
        widths = (("k", self.layout.k_dim), ("v", self.layout.v_dim))
        return tuple(NativePlane(part, (PAGE, dim), self.dtype) for part, dim in widths)


def _planes(part: str, codec: Codec, dim: int, dtype: str) -> tuple[NativePlane, ...]:
    if not codec.quantized:
        return (NativePlane(part, (PAGE, dim), dtype),)
    words = PAGE * dim * code_bits(codec) // 32
    planes = NativePlane(part, (words,), "int32"), NativePlane(f"{part}_scale", (PAGE,), "float16")
    return (*planes, NativePlane(f"{part}_center", (dim,), "float16")) if codec.centred else planes


def code_bits(codec: Codec) -> int:
    return 8 if codec.codebook is None else codec.codebook.bits


def to_native(codec: Codec, part: str, planes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Canonical planes of whole pages [..., 128, width] to native ones, bit for bit.

    ``part`` is "k" or "v". Codes become int32 [..., words], scales fp16 [..., 128] in the order of tokens that
    lanes read; raw rows stay as they are.
    """
    if not codec.quantized:
        return dict(planes)
    codes = _indices(codec, planes["codes"])
    lead, dim = codes.shape[:-2], codes.shape[-1]
    size = PAGE * dim
    if part == "v":
        codes = _to_fragments(codes, mtile_group(codec.name, dim))
    if codec.name == "turbo3":
        words = _pack_turbo3(codes.reshape(*lead, size // 1024, 32, 32))
    elif codec.name == "turbo4":
        words = _pack_turbo4(codes.reshape(*lead, size // 8, 8))
    else:
        words = _deposit(codes.reshape(*lead, size // 4, 4), _INT8_BYTE)
    scale = planes["scale"].reshape(*lead, 2 * PAGE // TILE, 8).transpose(-1, -2)
    return {"codes": words.reshape(*lead, size * code_bits(codec) // 32), "scale": scale.reshape(*lead, PAGE)}


def to_canonical(codec: Codec, part: str, planes: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """The inverse of `to_native`."""
    if not codec.quantized:
        return dict(planes)
    words, lead = planes["codes"], planes["codes"].shape[:-1]
    if codec.name == "turbo3":
        codes = _unpack_turbo3(words.reshape(*lead, PAGE * head_dim // 1024, 3, 32))
    elif codec.name == "turbo4":
        codes = _unpack_turbo4(words)
    else:
        codes = _extract(words, _INT8_BYTE, 255)
    if part == "v":
        codes = _from_fragments(codes.reshape(*lead, PAGE, head_dim), mtile_group(codec.name, head_dim))
    scale = planes["scale"].reshape(*lead, 8, 2 * PAGE // TILE).transpose(-1, -2)
    codes = _canonical_codes(codec, codes.reshape(*lead, PAGE, head_dim))
    return {"codes": codes, "scale": scale.reshape(*lead, PAGE, 1)}


# Canonical codes to numbers and back


def _indices(codec: Codec, codes: Tensor) -> Tensor:
    """int32 [..., D]: turbo indices, or int8 codes + 128."""
    wide = codes.int()
    if codec.name == "int8":
        return wide + 128
    if codec.name == "turbo4":
        return torch.stack([wide & 15, wide >> 4], -1).flatten(-2)
    b = wide.unflatten(-1, (-1, 3))
    word = b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16
    return _extract(word, range(0, 24, 3), 7).flatten(-2)


def _canonical_codes(codec: Codec, indices: Tensor) -> Tensor:
    if codec.name == "int8":
        return (indices - 128).to(torch.int8)
    if codec.name == "turbo4":
        return _deposit(indices.unflatten(-1, (-1, 2)), (0, 4)).to(torch.uint8)
    word = _deposit(indices.unflatten(-1, (-1, 8)), range(0, 24, 3))
    return _extract(word, (0, 8, 16), 255).flatten(-2).to(torch.uint8)


# Rows [..., 128, D] to the order of fragments: tile, m-tile group, g, t, m-tile in its group, r, k8, half


def _to_fragments(codes: Tensor, group: int) -> Tensor:
    pages, groups = math.prod(codes.shape[:-2]), codes.shape[-1] // (TILE * group)
    split = codes.reshape(pages, PAGE // TILE, 2, 4, 2, groups, group, 2, 8)
    return split.permute(0, 1, 5, 8, 3, 6, 7, 2, 4).reshape(codes.shape)


def _from_fragments(codes: Tensor, group: int) -> Tensor:
    pages, groups = math.prod(codes.shape[:-2]), codes.shape[-1] // (TILE * group)
    split = codes.reshape(pages, PAGE // TILE, groups, 8, 4, group, 2, 2, 2)
    return split.permute(0, 1, 7, 4, 8, 2, 5, 6, 3).reshape(codes.shape)


# Words


def _deposit(values: Tensor, shifts: Sequence[int]) -> Tensor:
    """int32 [..., n], disjoint once shifted -> one word each [...]."""
    places = torch.tensor(list(shifts), dtype=torch.int32, device=values.device)
    return (values << places).sum(-1, dtype=torch.int32)


def _extract(words: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """One word each [...] -> int32 [..., n]."""
    places = torch.tensor(list(shifts), dtype=torch.int32, device=words.device)
    return words[..., None] >> places & mask


def _magnitude_and_sign(indices: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Levels are antisymmetric: indices below ``half`` are the negative ones, counted from the middle."""
    negative = indices < half
    return torch.where(negative, half - 1 - indices, indices - half), negative.int()


def _index(magnitude: Tensor, sign: Tensor, half: int) -> Tensor:
    return torch.where(sign == 1, half - 1 - magnitude, half + magnitude)


def _pack_turbo4(indices: Tensor) -> Tensor:
    magnitude, sign = _magnitude_and_sign(indices, 8)
    return _deposit(magnitude, _TURBO4_MAGNITUDE) | _deposit(sign, _TURBO4_SIGN)


def _unpack_turbo4(words: Tensor) -> Tensor:
    return _index(_extract(words, _TURBO4_MAGNITUDE, 7), _extract(words, _TURBO4_SIGN, 1), 8)


def _pack_turbo3(indices: Tensor) -> Tensor:
    """[..., lane, m-tile and code] -> words [..., 3, lane]: m-tiles 0 and 1, m-tiles 2 and 3, signs."""
    magnitude, sign = _magnitude_and_sign(indices, 4)
    low = _deposit(magnitude[..., :16], _TURBO3_MAGNITUDE[:16])
    high = _deposit(magnitude[..., 16:], _TURBO3_MAGNITUDE[16:])
    return torch.stack([low, high, _deposit(sign, _TURBO3_SIGN)], -2)


def _unpack_turbo3(words: Tensor) -> Tensor:
    low, high, signs = words.unbind(-2)
    magnitude = [_extract(low, _TURBO3_MAGNITUDE[:16], 3), _extract(high, _TURBO3_MAGNITUDE[16:], 3)]
    return _index(torch.cat(magnitude, -1), _extract(signs, _TURBO3_SIGN, 1), 4)
