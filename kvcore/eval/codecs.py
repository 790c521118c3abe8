"""Codecs as evaluation sees them: rows in, the rows that a query would see out, and the bytes of what is stored.

A product codec goes through the very functions that a cache calls. Everything else in the table (`baselines`,
`trials`) is one of these too, and none of it is a user's mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvcore.eval.rows import RawRows
from kvcore.layout import CODECS, Codec, Rotation
from kvcore.modes import CODEC_FUNCTIONS, Mode, centred_rows, page_centers, plain_centers
from kvcore.ops import ITEMSIZE, Array, Ops

PAGE = 128  # rows with one centre where no page folds
RoundTrip = Callable[[Array], Array]  # rows [B, Hkv, T, D] of any float dtype -> what is read back, float32


@dataclass(frozen=True, slots=True)
class RowCodec:
    """How rows of K or V come back from storage.

    bind(ops, layer, part, head_dim) makes the round trip of one layer's "k" or "v".
    row_bytes(head_dim, raw_dtype) is what one row costs, scales and zeros included, shares of a group's too.
    ``group``: consecutive rows that are quantized together; a round trip takes whole groups, or the last of a text.
    """

    name: str
    bind: Callable[[Ops, int, str, int], RoundTrip]
    row_bytes: Callable[[int, str], float]
    group: int = 1

    @property
    def raw(self) -> bool:
        return self.name == "raw"


@dataclass(frozen=True, slots=True)
class Variant:
    """One line of the table: a codec for K, one for V, and which rows stay raw."""

    name: str
    k: RowCodec
    v: RowCodec
    rows: RawRows

    @property
    def key(self) -> str:
        """Unique within a run."""
        hand_over = f" from {self.rows.hand_over}" if self.rows.hand_over else ""
        return f"{self.name} [{self.rows.label}{hand_over}]"

    @property
    def raw(self) -> bool:
        return self.k.raw and self.v.raw

    @property
    def group(self) -> int:
        """Rows that are whole groups of both."""
        return math.lcm(self.k.group, self.v.group)

    def row_bytes(self, head_dim: int, raw_dtype: str = "float16") -> float:
        """Bytes of one coded token and KV head, K and V together."""
        return self.k.row_bytes(head_dim, raw_dtype) + self.v.row_bytes(head_dim, raw_dtype)

    def cache_bytes(self, tokens: int, head_dim: int, raw_dtype: str = "float16") -> float:
        """Bytes per token and KV head of a cache of ``tokens`` tokens, its raw rows included."""
        raw = 2 * head_dim * ITEMSIZE[raw_dtype]
        if self.raw:
            return raw
        return self.rows.cache_bytes(tokens, raw, self.row_bytes(head_dim, raw_dtype)) / tokens


def product_codec(name: str) -> RowCodec:
    """A codec of `kvcore.modes` (raw, int8, turbo4, turbo3) as a cache applies it."""
    codec, functions = CODECS[name], CODEC_FUNCTIONS[name]

    def bind(ops: Ops, layer: int, part: str, head_dim: int) -> RoundTrip:
        rotation = Rotation.create(ops, layer, part, head_dim) if codec.codebook else None
        return lambda rows: functions.decode(ops, functions.encode(ops, rows, rotation), rotation)

    return RowCodec(name, bind, lambda head_dim, raw_dtype: float(codec.bytes_per_token(head_dim, raw_dtype)))


def centred_codec(codec: Codec, page: int) -> RowCodec:
    """A centred codec of K as a cache with pages of ``page`` rows applies it; a text's last rows are a page of theirs.

    Where rows are seen coded before their page would be whole, its centre comes from later rows as well.
    """
    functions, plain = CODEC_FUNCTIONS[codec.name], product_codec(codec.name)

    def bind(ops: Ops, layer: int, part: str, head_dim: int) -> RoundTrip:
        rotation = Rotation.create(ops, layer, part, head_dim)

        def pages(rows: Array, size: int) -> Array:
            centers = page_centers(ops, rows, rotation, size)
            planes = functions.encode(ops, centred_rows(ops, rows, centers, rotation, size), rotation)
            decoded, means = functions.decode(ops, planes, rotation), plain_centers(ops, centers, rotation)
            of_rows = np.arange(int(rows.shape[2]), dtype=np.int32) // size
            return decoded + ops.take(means, ops.asarray(of_rows), 2)

        def round_trip(rows: Array) -> Array:
            rest = int(rows.shape[2]) % page
            whole = int(rows.shape[2]) - rest
            pieces = [pages(rows[:, :, :whole], page)] if whole else []
            return ops.concat([*pieces, *([pages(rows[:, :, whole:], rest)] if rest else [])], 2)

        return round_trip

    def row_bytes(head_dim: int, raw_dtype: str) -> float:
        return plain.row_bytes(head_dim, raw_dtype) + codec.center_bytes(head_dim) / page

    return RowCodec(f"{codec.name}-centred", bind, row_bytes, page)


def product_k_codec(mode: Mode, rows: RawRows) -> RowCodec:
    """A mode's codec of K. Rows that never fold by pages, or one by one, have a centre for each `PAGE` of them."""
    if not mode.k_codec.centred:
        return product_codec(mode.k)
    return centred_codec(mode.k_codec, PAGE if rows.everything or rows.page == 1 else rows.page)


def product_variant(mode: Mode, rows: RawRows) -> Variant:
    """A mode of the product with these raw rows; `fp16` has no window, so every row is raw whatever they say."""
    return Variant(mode.name, product_k_codec(mode, rows), product_codec(mode.v), rows)
