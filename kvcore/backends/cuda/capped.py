"""A prefill plan under a cap: a window of the newest rows, which hides all others but the first ones.

The kernels know a sliding window by positions, and no rows that it spares. So the kept rows get positions that no
window of the step hides, just before the new rows, and stand there; the others get their place among the live rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from kvcore.backends.cuda.prefill_plan import SINK_ENTRY, Piece, PrefillPlan, SequenceRows
from kvcore.errors import InputError
from kvcore.layout import Cap


def capped(plan: PrefillPlan, cap: Cap) -> PrefillPlan:
    """The plan for attention with the window of ``cap``. With kept rows, InputError for more new ones than that."""
    if cap.keep and plan.query_rows > cap.window:
        raise InputError(
            f"{plan.query_rows} new rows in a step: max_kv_size {cap.tokens} with keep {cap.keep} takes at most "
            f"{cap.window} at a time; use a smaller prefill step"
        )
    sequences = tuple(_sequence(rows, plan.query_rows, cap) for rows in plan.sequences)
    return PrefillPlan(sequences, plan.query_rows, plan.device)


def _sequence(rows: SequenceRows, new: int, cap: Cap) -> SequenceRows:
    sinks = [piece for piece in rows.raw if piece.entry == SINK_ENTRY]
    tail = [piece for piece in rows.raw if piece.entry != SINK_ENTRY]
    total = sum(rows.counts)
    size = cap.window - new + 1  # of kept rows that fit before the new ones and into the window of the newest
    folded: list[Piece] = []
    kept_folded: list[Piece] = []
    raw: list[Piece] = []
    kept_raw: list[Piece] = []
    newest: list[Piece] = []
    at = 0
    for pieces, is_folded in ((sinks, False), (rows.folded, True), (tail, False)):
        for piece in _split(pieces, at, (cap.keep, total - new)):
            place = at - total
            at += piece.end - piece.first
            if at <= cap.keep:
                (kept_folded if is_folded else kept_raw).extend(_before(piece, new, size))
            else:
                kind = folded if is_folded else newest if at > total - new else raw
                kind.append(piece._replace(position=place))
    return replace(rows, folded=(*folded, *kept_folded), raw=(*raw, *kept_raw, *newest))


def _split(pieces: Sequence[Piece], at: int, edges: tuple[int, ...]) -> Iterator[Piece]:
    """The pieces, the first of which begins at live row ``at``, cut where a live row of ``edges`` begins."""
    for piece in pieces:
        size = piece.end - piece.first
        cuts = sorted({0, size, *(edge - at for edge in edges if 0 < edge - at < size)})
        for first, end in pairwise(cuts):
            yield Piece(piece.entry, piece.first + first, piece.first + end, piece.position + first)
        at += size


def _before(piece: Piece, new: int, size: int) -> Iterator[Piece]:
    """Pieces of at most ``size`` rows, each with its last row at the position of the first new row."""
    for first in range(piece.first, piece.end, size):
        end = min(piece.end, first + size)
        yield Piece(piece.entry, first, end, -new - (end - first) + 1)
