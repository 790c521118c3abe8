"""Which rows a prefill step attends to, block by block: planned once on the host, for every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kvcore.backends.cuda.kernels.gather import PIECE_FIELDS
from kvcore.backends.cuda.native import PAGE

SINK_ENTRY = -1

Ranges = Sequence[tuple[int, int]]


class Piece(NamedTuple):
    """Live rows first .. end of one page: that of a table entry, or of the sinks. ``position`` is the slot of the
    first one, relative to the end of the sequence."""

    entry: int
    first: int
    end: int
    position: int


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The live rows of one sequence, oldest first."""

    folded: tuple[Piece, ...]
    raw: tuple[Piece, ...]

    @property
    def counts(self) -> tuple[int, int]:
        return _count(self.folded), _count(self.raw)


class Call(NamedTuple):
    """One attention over a block: of query rows first .. last; ``causal`` with the last of them seeing every key."""

    first: int
    last: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive live rows of each sequence of a batch; pieces as `gather` takes them.

    ``oldest`` and ``newest`` bound the positions of its rows, relative to the end of their sequence.
    """

    folded: bool
    rows: int
    pieces: Tensor
    oldest: int
    newest: int
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive sequences with equal counts of live rows. ``fresh``: they hold the new rows alone, in one block."""

    sequences: slice
    folded: tuple[Block, ...]
    raw: tuple[Block, ...]
    fresh: bool


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What `attend_prefill` needs to know of the cache's rows without asking the device."""

    sequences: tuple[SequenceRows, ...]
    query_rows: int
    device: torch.device
    _batches: dict[int, tuple[Batch, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def create(
        cls,
        host: Sequence[tuple[int, int, int]],
        query_rows: int,
        device: torch.device | str,
        ranges: Sequence[tuple[Ranges, Ranges] | None] | None = None,
    ) -> PrefillPlan:
        """host: (sinks, folded, length) of each sequence in slots, the ``query_rows`` new rows counted; length 0 for an
        idle one. ranges: the live rows (first, end) of each folded page and of each raw page; None where all are, but
        for those that sinks shadow. ValueError where these contradict each other."""
        live = ranges or [None] * len(host)
        sequences = tuple(
            _sequence(*state, query_rows, own or (None, None)) for state, own in zip(host, live, strict=True)
        )
        return cls(sequences, query_rows, torch.device(device))

    def batches(self, rows: int) -> tuple[Batch, ...]:
        """Blocks of at most ``rows`` dense rows, over all sequences of a batch; uploaded on first use."""
        if rows not in self._batches:
            self._batches[rows] = tuple(self._plan(rows))
        return self._batches[rows]

    def _plan(self, rows: int) -> Iterator[Batch]:
        outlines = []
        for counts, same in groupby(range(len(self.sequences)), lambda i: self.sequences[i].counts):
            indices = list(same)
            step = max(1, rows // max(1, *counts))
            for i in range(indices[0], indices[-1] + 1, step):
                sequences = slice(i, min(i + step, indices[-1] + 1))
                limit = max(1, rows // (sequences.stop - sequences.start))
                outlines.append((sequences, counts, self._outlines(sequences, counts, limit)))
        uploaded = _upload([block.pieces for _, _, blocks in outlines for block in blocks], self.device)
        for sequences, counts, blocks in outlines:
            done = [replace(block, pieces=next(uploaded)) for block in blocks]
            folded, raw = (tuple(block for block in done if block.folded is kind) for kind in (True, False))
            yield Batch(sequences, folded, raw, counts == (0, self.query_rows) and len(raw) == 1)

    def _outlines(self, sequences: slice, counts: tuple[int, int], limit: int) -> list[Block]:
        """Blocks whose pieces are still on the host."""
        blocks = []
        for folded, count in zip((True, False), counts, strict=True):
            older = count if folded else count - self.query_rows
            sources = [s.folded if folded else s.raw for s in self.sequences[sequences]]
            for begin in range(0, count, limit):
                end = min(begin + limit, count)
                pieces = [list(_clip(source, begin, end)) for source in sources]
                oldest = min(p[0].position for p in pieces)
                newest = max(p[-1].position + p[-1].end - p[-1].first - 1 for p in pieces)
                calls = _calls(max(0, begin - older), max(0, end - older), self.query_rows)
                blocks.append(Block(folded, end - begin, _padded(pieces), oldest, newest, calls))
        return blocks


def _calls(first: int, last: int, query_rows: int) -> tuple[Call, ...]:
    """Of a block that ends with the new rows first .. last (none: both 0): theirs, and those of later rows."""
    own = (Call(first, last, True),) if last > first else ()
    return (*own, Call(last, query_rows, False)) if last < query_rows else own


def _sequence(
    sinks: int, folded: int, length: int, query_rows: int, ranges: tuple[Ranges | None, Ranges | None]
) -> SequenceRows:
    if length == 0:
        return SequenceRows((), ())
    tail = length - folded
    if folded % PAGE or tail < query_rows:
        raise ValueError(f"{folded} folded slots of {length} do not leave whole pages and {query_rows} raw rows")
    entries = folded // PAGE
    live = ranges[0] if ranges[0] is not None else [(sinks if e == 0 else 0, PAGE) for e in range(entries)]
    pieces = _pieces(live, entries, folded, -length)
    tail_entries = -(-tail // PAGE)
    live = ranges[1] if ranges[1] is not None else [(0, PAGE)] * tail_entries
    raw = _pieces(live, tail_entries, tail, -tail)
    if sinks:
        raw = (Piece(SINK_ENTRY, 0, sinks, -length), *raw)
    ends = ((p.position + p.end - p.first, p.end - p.first) for p in raw)
    if sum(max(0, min(size, end + query_rows)) for end, size in ends) != query_rows:
        raise ValueError(f"not all of the {query_rows} new rows are live")
    return SequenceRows(pieces, raw)


def _pieces(live: Ranges, entries: int, slots: int, position: int) -> tuple[Piece, ...]:
    """The non-empty live ranges of the first ``entries`` pages, which hold ``slots`` slots from ``position`` on."""
    if len(live) < entries:
        raise ValueError(f"{len(live)} ranges for {entries} pages")
    pieces = []
    for e in range(entries):
        first, end = live[e][0], min(live[e][1], slots - e * PAGE)
        if first < end:
            pieces.append(Piece(e, first, end, position + e * PAGE + first))
    return tuple(pieces)


def _count(pieces: Sequence[Piece]) -> int:
    return sum(piece.end - piece.first for piece in pieces)


def _clip(pieces: Sequence[Piece], begin: int, end: int) -> Iterator[Piece]:
    """What of the live rows stands at begin .. end of all of them."""
    at = 0
    for piece in pieces:
        size = piece.end - piece.first
        skip, stop = max(0, begin - at), min(size, end - at)
        if skip < stop:
            yield Piece(piece.entry, piece.first + skip, piece.first + stop, piece.position + skip)
        at += size


def _padded(pieces: Sequence[Sequence[Piece]]) -> Tensor:
    """int32 [B, pieces, 5] on the host; the fourth is the row of the block that a piece begins at."""
    padded = torch.zeros(len(pieces), max(map(len, pieces)), PIECE_FIELDS, dtype=torch.int32)
    for table, own in zip(padded, pieces, strict=True):
        rows, at = [], 0
        for piece in own:
            rows.append((piece.entry, piece.first, piece.end, at, piece.position))
            at += piece.end - piece.first
        table[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    return padded


def _upload(tables: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The tables on the device, after one copy that the host does not wait for."""
    flat = torch.cat([table.flatten() for table in tables] or [torch.zeros(0, dtype=torch.int32)])
    flat = flat.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else flat.to(device)
    for part, table in zip(flat.split([table.numel() for table in tables]), tables, strict=True):
        yield part.view(table.shape)
