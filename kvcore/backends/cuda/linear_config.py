"""Which kernel a product with a few rows takes, and in which launch shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """Of `linear_rows`: warps of a program, which share the inputs of its ``tiles``; chunks of 64 inputs that a warp
    loads at a time; turns of the warps for which weights are asked for beforehand."""

    max_rows: ClassVar[int] = 16  # of a launch
    warps: int
    tiles: int
    chunks: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class WideConfig:
    """Of `linear_wide`: likewise; ``apart``, each warp has ``tiles`` of its own and takes all of their inputs."""

    max_rows: ClassVar[int] = 64
    warps: int
    tiles: int
    chunks: int
    apart: bool = False


LinearConfig = RowsConfig | WideConfig


def choose_config(tiles: int, chunks: int, bits: int, rows: int, *, normed: bool, processors: int) -> LinearConfig:
    """Of a product with ``tiles`` of ``chunks``, measured on an H200 with 4 bits, see docs/performance.md.

    `linear_rows` is best where the reading of weights is all that counts, and takes a norm into its launch; before
    `linear_wide` that is a launch of its own, which only a large product does not notice.
    """
    many, most = tiles >= 8 * processors, tiles >= 32 * processors
    if rows > 8:
        wide = rows > 16 or many or not normed
    else:
        wide = bits < 16 and (most or (rows > 1 and not normed))
    if wide:
        return _wide(many, most, chunks >= 128, bits, rows)
    return _rows(many, tiles > 2 * processors, chunks >= 128, bits, rows)


def _wide(many: bool, most: bool, deep: bool, bits: int, rows: int) -> WideConfig:
    """Many outputs: warps with tiles of their own read the same x, where there is much of x or of them. Few: the warps
    share the inputs of one tile or two."""
    if many:
        if rows > 32:
            return WideConfig(4, 2, 1, apart=True)
        if rows > 8:
            return WideConfig(4, 4, 1, apart=True) if most else WideConfig(4, 2, 1)
        return WideConfig(4, 1, 2)
    if rows > 16 or (deep and rows > 8):
        # Two chunks of 16 bits need more registers than there are.
        return WideConfig(8 if deep else 4, 2, 1 if bits == 16 else 2)
    return WideConfig(8, 1, 4)


def _rows(many: bool, some: bool, deep: bool, bits: int, rows: int) -> RowsConfig:
    """Many outputs: two tiles share what is done to x. Few: many warps share the inputs of one, and weights are asked
    for early."""
    if rows > 8:
        return RowsConfig(8, 1, 2, 2) if deep else RowsConfig(4, 2 if some else 1, 2, 2)
    if bits == 16:
        if many:
            return RowsConfig(4, 1, 2)
        return RowsConfig(16, 2, 1) if deep else RowsConfig(4 if some else 8, 1, 4)
    if many:
        return RowsConfig(4, 2, 1)
    if deep:
        return RowsConfig(8, 1, 4, 2)
    return RowsConfig(4, 1, 4, 4) if some else RowsConfig(8, 1, 2, 2)
