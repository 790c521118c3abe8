"""Ways to do better at the same bytes, as evaluation codecs: what was tried, so that anyone can try it again.

Each wraps a product codec and adds planes that a page would hold. None is a format of kvcore; mode turbo4 has its K
centred by page, which was the first of them.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcore.eval import grids
from kvcore.eval.codecs import RoundTrip, RowCodec, Variant, product_codec, product_k_codec
from kvcore.eval.rows import RawRows
from kvcore.modes import MODES
from kvcore.ops import Array, Ops

PAGE = 128
SINKS = 4  # rows left out of a page's statistics: on the first page they are the sinks, and far off


def _mean(ops: Ops, pages: Array) -> Array:
    """Pages [..., page, D] -> their rows' mean [..., 1, D]."""
    rows = pages[..., SINKS:, :]
    return ops.sum(rows, axis=-2, keepdims=True) / float(rows.shape[-2])


def centred(codec: RowCodec, page: int = PAGE) -> RowCodec:
    """Each page's mean is subtracted before its rows are quantized, and added again: one fp16 row per page.

    For K, decode adds q · mean to the logits of a page.
    """

    def make() -> _Apply:
        def apply(ops: Ops, x: Array, inner: RoundTrip) -> Array:
            mean = grids.half(ops, _mean(ops, x))
            return inner(x - mean) + mean

        return apply

    return _paged(f"{codec.name}-centred", codec, make, 2.0, page)


def channel_scaled(codec: RowCodec, page: int = PAGE, power: float = 1.0, fixed: bool = False) -> RowCodec:
    """Channels are divided by their root mean square over the page to a ``power``: one fp16 row per page.

    For K, decode multiplies the query by it before it rotates the query, page by page. With ``fixed`` the first page's
    row serves the whole sequence, so that there is one query, and no bytes per token.
    """

    def make() -> _Apply:
        kept: list[Array] = []

        def apply(ops: Ops, x: Array, inner: RoundTrip) -> Array:
            if not (fixed and kept):
                size = ops.sqrt(_mean(ops, x * x))
                size = ops.exp(ops.log(grids.nonzero(ops, size)) * power)
                kept[:] = [grids.nonzero(ops, grids.half(ops, size[:, :, :1] if fixed else size))]
            return inner(x / kept[0]) * kept[0]

        return apply

    name = f"{codec.name}-scaled^{power:g}" + ("-fixed" if fixed else "")
    return _paged(name, codec, make, 0.0 if fixed else 2.0, page)


_Apply = Callable[[Ops, Array, RoundTrip], Array]  # pages [B, H, n, page, D], and a round trip of such pages


def _paged(name: str, codec: RowCodec, make: Callable[[], _Apply], plane: float, page: int) -> RowCodec:
    """``plane`` bytes per channel and page on top of ``codec``'s. ``make`` gives each layer an ``apply`` of its own."""

    def bind(ops: Ops, layer: int, part: str, head_dim: int) -> RoundTrip:
        inner, apply = codec.bind(ops, layer, part, head_dim), make()

        def flat(x: Array) -> Array:
            shape = tuple(int(n) for n in x.shape)
            return ops.reshape(inner(ops.reshape(x, (*shape[:2], -1, shape[-1]))), shape)

        def round_trip(rows: Array) -> Array:
            x, shape = grids.by_tokens(ops, rows, page)
            return grids.ungrouped(ops, apply(ops, x, flat), shape)

        return round_trip

    def row_bytes(head_dim: int, raw_dtype: str) -> float:
        return codec.row_bytes(head_dim, raw_dtype) + plane * head_dim / page

    return RowCodec(name, bind, row_bytes, page)


def _pairs() -> dict[str, tuple[RowCodec, RowCodec]]:
    turbo4, int8 = product_codec("turbo4"), product_codec("int8")
    own_k, centre = product_k_codec(MODES["turbo4"], RawRows()), centred(turbo4)
    return {
        "turbo4-plain": (turbo4, turbo4),  # K without a centre
        "turbo4+centre-v": (own_k, centre),
        "turbo4+centre-k-32": (centred(turbo4, 32), turbo4),
        "turbo4+scale-k-half": (centred(channel_scaled(turbo4, power=0.5)), turbo4),
        "turbo4+scale-k-half-fixed": (centred(channel_scaled(turbo4, power=0.5, fixed=True)), turbo4),
        "int8-turbo4+centre-v": (int8, centre),
    }


TRIALS = _pairs()


def trial_variant(name: str, rows: RawRows) -> Variant:
    return Variant(name, *TRIALS[name], rows)
