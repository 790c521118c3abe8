"""What attention reads: one layer's live rows in their stored form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcore.layout.planes import Layout
from kvcore.layout.rotation import Rotation
from kvcore.ops import Array

Planes = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class KVView:
    """Live rows of one layer, oldest first: ``sinks`` rows raw, ``folded`` rows quantized, the tail raw.

    sink_k, sink_v     [B, Hkv, sinks, D] compute dtype (None where no row is folded)
    k_planes, v_planes plane name -> [B, Hkv, folded, width]; rows below ``sinks`` are shadowed by the raw sinks
    tail_k, tail_v     [B, Hkv, T, D] compute dtype; the newest rows, those of the current step included
    keep               a sliding window of attention never hides the first ``keep`` rows
    k_centers          [B, Hkv, pages, D] float16, in K's rotated basis, where its codec is centred; else None
    page_rows          then the live rows of each page, oldest first: ``folded`` in all; else empty
    """

    layout: Layout
    sinks: int
    folded: int
    sink_k: Array | None
    sink_v: Array | None
    k_planes: Planes
    v_planes: Planes
    tail_k: Array
    tail_v: Array
    k_rotation: Rotation | None
    v_rotation: Rotation | None
    keep: int = 0
    k_centers: Array | None = None
    page_rows: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.folded + int(self.tail_k.shape[2])
