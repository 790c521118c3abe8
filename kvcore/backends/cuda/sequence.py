"""What the host knows of one paged sequence: which rows of which pages it holds, and which of them are due to fold.

A row that lives is a row that attention sees. A page may hold dead rows too: trimmed ones, or those of a hole. A table
entry takes 128 slots whatever its page holds, and a slot that died is never used again: rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from kvcore.backends.cuda.native import PAGE
from kvcore.layout import WindowPolicy

NEVER = 1 << 30


@dataclass(slots=True)
class Entry:
    """A table entry: rows ``first`` to ``end`` of a page live. The last raw entry is open: rows come at its end."""

    page: int
    first: int = 0
    end: int = PAGE

    @property
    def rows(self) -> int:
        return self.end - self.first


@dataclass(slots=True)
class PagedRows:
    """One sequence. The first native entry counts its sinks, whose codes it holds, as its own rows.

    ``rows_folded`` of ``rows`` live rows are in native pages; ``coming`` are native pages for the oldest raw ones,
    which the step under way folds. ``position`` is that of the next token. ``first_rows``: the oldest rows that may be
    sinks, fewer than there could be where a hole follows them.
    """

    folding: bool = True
    first_rows: int = NEVER
    rows: int = 0
    rows_folded: int = 0
    position: int = 0
    sink_page: int | None = None
    native: list[Entry] = field(default_factory=list)
    raw: list[Entry] = field(default_factory=list)
    coming: list[int] = field(default_factory=list)

    @property
    def folded_slots(self) -> int:
        return PAGE * len(self.native)

    @property
    def tail_slots(self) -> int:
        return PAGE * (len(self.raw) - 1) + self.raw[-1].end if self.raw else 0

    @property
    def room(self) -> int:
        """Rows that the last raw page still takes."""
        return PAGE - self.raw[-1].end if self.raw else 0

    @property
    def solid(self) -> bool:
        """Whether no dead slot lies between live rows, so that slots are as far apart as rows."""
        entries = [*self.native, *self.raw]
        return all(a.end == PAGE and b.first == 0 for a, b in pairwise(entries))

    def sinks(self, window: WindowPolicy) -> int:
        """Raw rows that shadow the first native entry's."""
        return 0 if self.sink_page is None else min(window.sink_tokens, self.native[0].end, self.first_rows)

    def fold_at(self, window: WindowPolicy) -> int:
        """Slots of the raw tail at which its oldest page folds: those of ``recent_tokens`` + 128 live rows."""
        if not self.folding:
            return NEVER
        dead = sum(PAGE - entry.rows for entry in self.raw[:-1])
        dead += self.raw[-1].first if self.raw else 0
        return window.recent_tokens + PAGE + dead

    def due_after(self, count: int, window: WindowPolicy) -> int:
        """Pages that fold in a step that adds ``count`` rows; the kernel's rule."""
        return max(0, (self.tail_slots + count - self.fold_at(window)) // PAGE + 1)

    def recount(self) -> None:
        self.rows_folded = sum(entry.rows for entry in self.native)
        self.rows = self.rows_folded + sum(entry.rows for entry in self.raw)

    def add(self, count: int, pages: Iterable[int]) -> None:
        """``count`` new rows, first into the open page, then into new raw ``pages``."""
        self.rows += count
        self.position += count
        if self.raw:
            taken = min(count, self.room)
            self.raw[-1].end += taken
            count -= taken
        for page in pages:
            self.raw.append(Entry(page, 0, min(PAGE, count)))
            count -= PAGE

    def fold(self) -> list[int]:
        """The oldest raw entries become native ones with the same rows; returns their raw pages."""
        due = len(self.coming)
        done, self.raw = self.raw[:due], self.raw[due:]
        self.native += [replace(entry, page=page) for entry, page in zip(done, self.coming, strict=True)]
        self.coming = []
        self.rows_folded += sum(entry.rows for entry in done)
        return [entry.page for entry in done]

    def copy(self) -> PagedRows:
        native, raw = ([replace(entry) for entry in entries] for entries in (self.native, self.raw))
        return replace(self, native=native, raw=raw, coming=list(self.coming))


def cut(entries: Sequence[Entry], rows: int) -> list[Entry]:
    """The entries of the oldest ``rows`` rows."""
    kept = []
    for entry in entries:
        if rows <= 0:
            break
        kept.append(replace(entry, end=min(entry.end, entry.first + rows)))
        rows -= entry.rows
    return kept


def carve(entries: Sequence[Entry], start: int, stop: int) -> tuple[slice, list[Entry]]:
    """Without rows ``start`` to ``stop``: which entries are affected, and what takes their place. A page with a hole
    inside stands twice. Looks at no entry behind the hole."""
    kept: list[Entry] = []
    first = 0
    while first < len(entries) and entries[first].rows <= start:
        start, stop = start - entries[first].rows, stop - entries[first].rows
        first += 1
    last = first
    while last < len(entries) and stop > 0:
        entry = entries[last]
        low, high = max(start, 0), min(stop, entry.rows)
        pieces = replace(entry, end=entry.first + low), replace(entry, first=entry.first + high)
        kept += [piece for piece in pieces if piece.rows]
        start, stop, last = start - entry.rows, stop - entry.rows, last + 1
    return slice(first, last), kept
