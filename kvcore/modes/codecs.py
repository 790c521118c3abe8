"""The codecs as graph operations over the array protocol, the same on every backend.

``encode`` turns rows [B, H, T, D] of any float dtype into planes; arithmetic is float32. ``unpack`` returns
values and a scale so that row = Rᵀ(values) · scale (R only for the turbo codecs): attention multiplies its logits by
the scale and never rotates the cache back. ``decode`` returns the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvcore.layout import CODECS, Rotation
from kvcore.modes import int8, turbo
from kvcore.ops import Array, Ops

Planes = Mapping[str, Array]


class Encode(Protocol):
    def __call__(self, ops: Ops, rows: Array, rotation: Rotation | None) -> dict[str, Array]: ...


class Unpack(Protocol):
    def __call__(self, ops: Ops, planes: Planes) -> tuple[Array, Array | None]: ...


@dataclass(frozen=True, slots=True)
class CodecFunctions:
    encode: Encode
    unpack: Unpack

    def decode(self, ops: Ops, planes: Planes, rotation: Rotation | None) -> Array:
        """Rows [B, H, T, D] in float32."""
        values, scale = self.unpack(ops, planes)
        if rotation is not None:
            values = rotation.undo(ops, values)
        return values if scale is None else values * scale


def _encode_raw(ops: Ops, rows: Array, rotation: Rotation | None) -> dict[str, Array]:
    return {"rows": rows}


def _unpack_raw(ops: Ops, planes: Planes) -> tuple[Array, Array | None]:
    return ops.astype(planes["rows"], "float32"), None


CODEC_FUNCTIONS: dict[str, CodecFunctions] = {
    "raw": CodecFunctions(_encode_raw, _unpack_raw),
    "int8": CodecFunctions(int8.encode, int8.unpack),
    "turbo4": CodecFunctions(*turbo.functions(CODECS["turbo4"])),
    "turbo3": CodecFunctions(*turbo.functions(CODECS["turbo3"])),
}
