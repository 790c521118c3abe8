"""Planes, codecs and layouts: what one token and head costs, in arrays and in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvcore.errors import UnsupportedError
from kvcore.layout.codebook import TURBO3, TURBO4, Codebook
from kvcore.layout.rotation import ROTATION
from kvcore.ops import ITEMSIZE

COMPUTE = "compute"  # a plane's dtype that follows the model's compute dtype


@dataclass(frozen=True, slots=True)
class Plane:
    """One array [B, Hkv, T, width] of a codec: ``bits`` per element of the head, or one number per token."""

    name: str
    dtype: str
    bits: int | None = None

    def width(self, head_dim: int) -> int:
        """Elements along the last axis."""
        if self.bits is None:
            return 1
        return head_dim * self.bits // 8 if self.dtype == "uint8" else head_dim

    def resolve(self, compute_dtype: str) -> str:
        return compute_dtype if self.dtype == COMPUTE else self.dtype

    def nbytes(self, head_dim: int, compute_dtype: str) -> int:
        return self.width(head_dim) * ITEMSIZE[self.resolve(compute_dtype)]


@dataclass(frozen=True, slots=True)
class Codec:
    """How K or V rows are stored. ``codebook`` marks the codecs that rotate before they quantize.

    With ``centred``, the mean of a page's rows is taken off them and stored beside them: docs/modes.md, "Centres".
    """

    name: str
    planes: tuple[Plane, ...]
    codebook: Codebook | None = None
    centred: bool = False

    @property
    def quantized(self) -> bool:
        return self.name != "raw"

    def bytes_per_token(self, head_dim: int, compute_dtype: str) -> int:
        return sum(plane.nbytes(head_dim, compute_dtype) for plane in self.planes)

    def center_bytes(self, head_dim: int) -> int:
        """Bytes of a page's centre, one fp16 row; 0 where there is none."""
        return head_dim * ITEMSIZE["float16"] if self.centred else 0

    def reasons_against(self, head_dim: int) -> list[str]:
        """Why this codec cannot store vectors of ``head_dim``; empty where it can."""
        if self.codebook is not None and head_dim % 8:
            return [f"head_dim {head_dim}: {self.name} needs a multiple of 8"]
        return []


_SCALE = Plane("scale", "float16")

CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "raw": Codec("raw", (Plane("rows", COMPUTE, 16),)),
        "int8": Codec("int8", (Plane("codes", "int8", 8), _SCALE)),
        "turbo4": Codec("turbo4", (Plane("codes", "uint8", 4), _SCALE), TURBO4),
        "turbo3": Codec("turbo3", (Plane("codes", "uint8", 3), _SCALE), TURBO3),
    }
)
CENTRED_TURBO4 = replace(CODECS["turbo4"], centred=True)  # for K: adds R q · centre to the logits of a page


def center_skips(page: int) -> int:
    """The first rows of a page, which stay out of its mean: those of page 0 are sinks, and far off."""
    return min(4, page // 2)


@dataclass(frozen=True, slots=True)
class Layout:
    """The stored form of one layer's folded rows: a codec and a width for K and for V."""

    k: Codec
    v: Codec
    k_dim: int
    v_dim: int

    def __post_init__(self) -> None:
        both = self.k.reasons_against(self.k_dim) + self.v.reasons_against(self.v_dim)
        reasons = list(dict.fromkeys(both))
        if reasons:
            raise UnsupportedError("; ".join(reasons) + " (use fp16 or int8 for this model)", reasons)

    @property
    def quantized(self) -> bool:
        return self.k.quantized or self.v.quantized

    def bytes_per_token(self, compute_dtype: str, page: int = 128) -> int:
        """Bytes of one folded token and KV head, K and V together, with its share of the centre of a page of ``page``
        rows, rounded up: a figure for one token. `folded_bytes` is exact."""
        return -(-self.folded_bytes(compute_dtype, page, 1) // page)

    def folded_bytes(self, compute_dtype: str, rows: int, pages: int) -> int:
        """Bytes of ``rows`` folded tokens of one KV head in ``pages`` pages, K and V together, exactly."""
        k = self.k.bytes_per_token(self.k_dim, compute_dtype)
        row = k + self.v.bytes_per_token(self.v_dim, compute_dtype)
        return rows * row + pages * self.k.center_bytes(self.k_dim)

    def describe(self) -> dict[str, object]:
        """What has to agree for planes to mean the same rows: codecs, widths, the rotation and levels of turbo, and
        whether K is centred."""
        found: dict[str, object] = {"k": self.k.name, "v": self.v.name, "k_dim": self.k_dim, "v_dim": self.v_dim}
        if self.k.centred:
            found["k_center"] = "mean of a page"
        for part, codec in (("k", self.k), ("v", self.v)):
            if codec.codebook is not None:
                found |= {"rotation": ROTATION, f"{part}_levels": list(codec.codebook.levels)}
        return found

    def raw_bytes_per_token(self, compute_dtype: str) -> int:
        """Bytes of one token and KV head kept raw, K and V together."""
        return (self.k_dim + self.v_dim) * ITEMSIZE[compute_dtype]
