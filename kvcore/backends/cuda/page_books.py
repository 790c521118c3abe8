"""Which pages hold the rows of each sequence: what a step takes, what it gives back, and what is shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count as numbers

from kvcore.backends.cuda.native import PAGE
from kvcore.backends.cuda.pool import PagePool
from kvcore.backends.cuda.sequence import NEVER, Entry, PagedRows, carve, cut
from kvcore.errors import InputError
from kvcore.layout import WindowPolicy

_STAMPS = numbers(1)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a step takes: raw pages, copies of shared ones included, native pages, and table entries in all."""

    raw: int
    native: int
    width: int


class PageBooks:
    """What the host knows of ``rows`` sequences, and the references to their pages.

    Tables have ``width`` entries, for native pages and for raw ones. Without a pool of native pages nothing folds; with
    ``delegated`` a sequence folds from its `hand_over` on.
    """

    def __init__(
        self, rows: int, window: WindowPolicy, raw: PagePool, native: PagePool | None, *, delegated: bool = False
    ) -> None:
        self._raw, self._native, self._window = raw, native, window
        self._folding = native is not None and not delegated
        self._rows = [PagedRows(folding=self._folding) for _ in range(rows)]
        self.width = 0
        self._mark_all()

    def length(self, row: int) -> int:
        """Live rows of the sequence."""
        return self._rows[row].rows

    def rows_folded(self, row: int) -> int:
        """Those of them in native pages, the ones that raw sinks shadow included."""
        return self._rows[row].rows_folded

    def rows_sinks(self, row: int) -> int:
        return self._rows[row].sinks(self._window)

    def slots(self, row: int) -> tuple[int, int, int]:
        """Sinks, folded slots, all slots: what the device has of the sequence after `upload`."""
        sequence = self._rows[row]
        return sequence.sinks(self._window), sequence.folded_slots, sequence.folded_slots + sequence.tail_slots

    def solid(self, row: int) -> bool:
        """Whether slots of the sequence are as far apart as its live rows."""
        return self._rows[row].solid

    def entries(self, row: int) -> tuple[Sequence[Entry], Sequence[Entry]]:
        """Native and raw entries, oldest first, with their live rows; the first native one counts the sinks."""
        return self._rows[row].native, self._rows[row].raw

    def sink_page(self, row: int) -> int | None:
        return self._rows[row].sink_page

    @property
    def due(self) -> int:
        """Most pages that the step under way folds in one sequence: what `Fold` takes as ``pages``."""
        return max(len(sequence.coming) for sequence in self._rows)

    def needs(self, new: Mapping[int, int]) -> Needs:
        """What `extend` would take."""
        raw, copies, native = zip(*(self._needs(self._rows[row], count) for row, count in new.items()), strict=True)
        width = max(self._width_after(self._rows[row], *need) for row, *need in zip(new, raw, native, strict=True))
        return Needs(sum(raw) + sum(copies), sum(native), width)

    def extend(self, new: Mapping[int, int]) -> None:
        """Room for new rows ({row: count}) and for the pages that fold after them, or none of it.

        Every sequence that the step's fold looks at is named, with 0 where no row comes: behind a hole a page may still
        be due.

        Raises InputError where a table has too few entries, KvcoreError where a pool has too few pages.
        """
        needs = [self._needs(self._rows[row], count) for row, count in new.items()]
        for (row, count), (raw, _, native) in zip(new.items(), needs, strict=True):
            sequence = self._rows[row]
            if self._width_after(sequence, raw, native) > self.width:
                raise InputError(
                    f"sequence of {sequence.rows} rows cannot take {count} more: these tables hold "
                    f"{self.width * PAGE} tokens a sequence, whole pages where some of their rows were trimmed"
                )
        self._raw.require(sum(raw + copies for raw, copies, _ in needs))
        if self._native is not None:
            self._native.require(sum(native for *_, native in needs))
        for (row, count), (raw, copies, native) in zip(new.items(), needs, strict=True):
            sequence = self._rows[row]
            if copies:
                sequence.raw[-1].page = self._raw.writable(sequence.raw[-1].page)
            sequence.add(count, self._raw.alloc(raw))
            if self._native is not None:
                sequence.coming += self._native.alloc(native)
            if raw or copies or native:
                self._mark(row)

    def extend_within(self, row: int) -> bool:
        """Room for one new row on the sequence's open page, where that is all it takes; else False, and no room."""
        sequence = self._rows[row]
        if not sequence.room or self._raw.references(sequence.raw[-1].page) > 1:
            return False
        if self._due_after(sequence, 1) > len(sequence.coming):
            return False
        sequence.add(1, ())
        return True

    def _needs(self, sequence: PagedRows, count: int) -> tuple[int, int, int]:
        """Raw pages, copies of a shared raw page, and native pages that ``count`` more rows take."""
        raw = -(-max(0, count - sequence.room) // PAGE)
        writes = count > 0 and sequence.room > 0
        copies = int(writes and self._raw.references(sequence.raw[-1].page) > 1)
        return raw, copies, self._due_after(sequence, count) - len(sequence.coming)

    def _due_after(self, sequence: PagedRows, count: int) -> int:
        return sequence.due_after(count, self._window) if self._native is not None else 0

    def _width_after(self, sequence: PagedRows, raw: int, native: int) -> int:
        return max(len(sequence.native) + len(sequence.coming) + native, len(sequence.raw) + raw)

    def pages(self, row: int) -> tuple[list[int], list[int]]:
        """Raw pages, that of the sinks included, and native ones, those to come included."""
        sequence = self._rows[row]
        raw = [*(entry.page for entry in sequence.raw), *_sink_pages(sequence)]
        return raw, [*(entry.page for entry in sequence.native), *sequence.coming]

    @property
    def pages_held(self) -> tuple[int, int]:
        """How many `pages` all sequences have together."""
        raw = sum(len(x.raw) + (x.sink_page is not None) for x in self._rows)
        return raw, sum(len(x.native) + len(x.coming) for x in self._rows)

    @property
    def entries_used(self) -> int:
        """Of the longest sequence, those of the step under way included."""
        return max(max(len(x.native) + len(x.coming), len(x.raw)) for x in self._rows)

    def _mark(self, row: int) -> None:
        self._unwritten.add(row)
        self._changed.add(row)
        self.stamp = next(_STAMPS)

    def _mark_all(self) -> None:
        self._unwritten = set(range(len(self._rows)))  # rows of the tables that the host's arrays do not have yet
        self._changed = set(self._unwritten)  # nor the device's
        self.stamp = next(_STAMPS)  # a number of its own for all that a table has been

    def live(self, row: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The live rows (first, end) of each native and each raw entry, as the device has them in ``ranges``."""
        sequence = self._rows[row]
        native = [(entry.first, entry.end) for entry in sequence.native]
        raw = [(entry.first, entry.end) for entry in sequence.raw]
        if sinks := sequence.sinks(self._window):
            native[0] = sinks, native[0][1]
        if raw:
            raw[-1] = raw[-1][0], PAGE
        return native, raw

    def commit(self) -> None:
        """Book what the step's launches fold: give back the raw pages that became native ones, but for the sinks'."""
        for row, sequence in enumerate(self._rows):
            if not sequence.coming:
                continue
            first = not sequence.native
            done = sequence.fold()
            most = min(self._window.sink_tokens, sequence.first_rows)
            if first and most > 0 and sequence.native[0].first == 0:
                sequence.sink_page = done.pop(0)
            self._raw.free(done)
            self._mark(row)

    def hand_over(self, row: int, *, undo: bool = False) -> None:
        """Let the sequence fold from the next `extend` on, which may add no rows. ``undo``: that found no room."""
        self._rows[row].folding = self._native is not None and not undo

    def fill(self, row: int, native: Sequence[int], raw: Sequence[int], *, sinks: bool, first_rows: int) -> None:
        """Give the empty sequence pages of its own with so many rows each, oldest first, and one for ``sinks``; its
        ``first_rows`` oldest rows may be sinks.

        KvcoreError where a pool has too few pages, InputError where the table has too few entries; nothing has changed
        then.
        """
        if max(len(native), len(raw)) > self.width:
            raise InputError(f"{max(len(native), len(raw))} pages do not fit into a table of {self.width} entries")
        self._raw.require(len(raw) + sinks)
        sequence = PagedRows(folding=self._rows[row].folding, first_rows=first_rows)
        if native and self._native is not None:
            pages = self._native.alloc(len(native))
            sequence.native = [Entry(page, 0, count) for page, count in zip(pages, native, strict=True)]
        sequence.raw = [Entry(page, 0, count) for page, count in zip(self._raw.alloc(len(raw)), raw, strict=True)]
        sequence.sink_page = self._raw.alloc()[0] if sinks else None
        sequence.recount()
        sequence.position = sequence.rows
        self._rows[row] = sequence
        self._mark(row)

    def place(self, row: int, position: int) -> None:
        """The sequence's next token has this position."""
        self._rows[row].position = position

    def fork(self, source: int, target: int) -> None:
        """Let the empty ``target`` hold what ``source`` holds; pages are shared until one of them writes."""
        origin = self._rows[source]
        if self._rows[target].rows or origin.coming:
            raise ValueError("fork needs an empty target, and no step under way")
        self._share(origin)
        self._rows[target] = origin.copy()
        self._mark(target)

    def _share(self, sequence: PagedRows) -> None:
        self._raw.share([*(entry.page for entry in sequence.raw), *_sink_pages(sequence)])
        if self._native is not None:
            self._native.share(entry.page for entry in sequence.native)

    def trim(self, row: int, count: int) -> None:
        """Forget the newest ``count`` rows: raw ones first, then folded ones. A page that is cut stays folded with
        fewer rows, and the raw tail begins anew behind it. Within a step, rows that were not accepted; what folds then
        is reckoned anew.

        InputError where there are fewer rows.
        """
        sequence = self._rows[row]
        left = sequence.rows - count
        if not 0 <= left <= sequence.rows:
            raise InputError(f"cannot trim {count} rows: the sequence holds {sequence.rows}")
        if count == 0 and not sequence.coming:
            return
        raw = cut(sequence.raw, left - sequence.rows_folded)
        self._replace(row, cut(sequence.native, left), raw)
        sequence.position -= count
        kept = min(len(sequence.coming), self._due_after(sequence, 0))
        if self._native is not None:
            self._native.free(sequence.coming[kept:])
        del sequence.coming[kept:]

    def drop(self, row: int, first: int, count: int) -> None:
        """Forget ``count`` rows from the ``first`` on; the others stay where and as they are, and keep their positions.

        A page without live rows is given back, one with a hole stands in the table twice. Where a hole begins before
        the end of the sinks, those behind it are read from their page's codes from now on. InputError for rows that are
        not there, or where the table has no entry left. ValueError within a step that folds.
        """
        sequence = self._rows[row]
        if sequence.coming:
            raise ValueError("drop needs a sequence without a fold under way")
        if first < 0 or count < 0 or first + count > sequence.rows:
            raise InputError(f"cannot drop {count} rows from row {first} on: the sequence holds {sequence.rows}")
        if first + count == sequence.rows:
            position = sequence.position
            self.trim(row, count)
            sequence.position = position
            if count:
                sequence.first_rows = min(sequence.first_rows, first)
                self._without_sinks(row)
            return
        if count == 0:
            return
        cuts, at = [], first
        for pool, entries, rows in (
            (self._native, sequence.native, sequence.rows_folded),
            (self._raw, sequence.raw, sequence.rows - sequence.rows_folded),
        ):
            start, stop = (min(max(edge, 0), rows) for edge in (at, at + count))
            where, pieces = carve(entries, start, stop) if start < stop else (slice(0, 0), [])
            if len(entries) - (where.stop - where.start) + len(pieces) > self.width:
                raise InputError(f"cannot drop {count} rows: a page with a hole needs an entry more than {self.width}")
            cuts.append((pool, entries, where, pieces, stop - start))
            at, count = (at - rows if at > rows else 0), count - (stop - start)
        for pool, entries, where, pieces, gone in cuts:
            if pool is not None and gone:
                pool.share(entry.page for entry in pieces)
                pool.free(entry.page for entry in entries[where])
                entries[where] = pieces
            sequence.rows -= gone
        sequence.rows_folded -= cuts[0][-1]
        sequence.first_rows = min(sequence.first_rows, first)
        self._without_sinks(row)

    def _replace(self, row: int, native: list[Entry], raw: list[Entry]) -> None:
        """New entries for the same pages or fewer, with their references, and sinks only where they still are."""
        sequence = self._rows[row]
        for pool, old, new in ((self._native, sequence.native, native), (self._raw, sequence.raw, raw)):
            if pool is not None:
                pool.share(entry.page for entry in new)
                pool.free(entry.page for entry in old)
        sequence.native, sequence.raw = native, raw
        sequence.recount()
        if not sequence.native and sequence.rows <= sequence.first_rows:
            sequence.first_rows = NEVER  # no hole is left
        self._without_sinks(row)

    def _without_sinks(self, row: int) -> None:
        """No sinks where their rows are gone."""
        sequence = self._rows[row]
        if not sequence.native or sequence.native[0].first > 0 or sequence.first_rows == 0:
            self._raw.free(_sink_pages(sequence))
            sequence.sink_page = None
        self._mark(row)

    def close(self) -> None:
        """Give back every page."""
        for row, sequence in enumerate(self._rows):
            if self._native is not None:
                self._native.free(sequence.coming)
            sequence.coming = []
            self.release(row)

    def release(self, row: int) -> None:
        """Forget the sequence; its row is empty then, and idle for the kernels."""
        self.trim(row, self._rows[row].rows)
        self._rows[row] = PagedRows(folding=self._folding)


def _sink_pages(sequence: PagedRows) -> list[int]:
    return [] if sequence.sink_page is None else [sequence.sink_page]
