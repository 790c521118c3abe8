"""Block tables: which pages hold the rows of each sequence, on the host and on the device.

The host keeps lengths and tables of its own and never reads the device's: a step needs no synchronization. The device's
copy is what kernels read, at addresses that stay, as CUDA graphs require.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from kvcore.backends.cuda.native import PAGE
from kvcore.backends.cuda.pool import PagePool
from kvcore.errors import InputError
from kvcore.layout import WindowPolicy

NEVER = 1 << 30


@dataclass(slots=True)
class _Sequence:
    """The host's view of one sequence: ``folded`` of its ``length`` rows in native pages, the others raw."""

    length: int = 0
    folded: int = 0
    position: int = 0
    folding: bool = True
    due: int = 0  # pages that the step under way folds
    sink_page: int | None = None
    pages: list[int] = field(default_factory=list)
    raw: list[int] = field(default_factory=list)

    @property
    def tail(self) -> int:
        return self.length - self.folded


_STATE = ("lengths", "folded", "positions", "sinks", "sink_pages", "fold_at")


class BlockTables:
    """Which pages hold the rows of each sequence: ``rows`` sequences of at most ``max_tokens`` tokens.

    On the device, int32: ``table`` and ``raw_table`` [rows, pages] (native pages, and raw pages from the oldest raw
    row on), ``lengths`` (all rows), ``folded``, ``positions`` (RoPE position of the next token), ``sinks`` (raw rows
    that shadow the first page's), ``sink_pages`` (raw page that holds them) and ``fold_at`` (raw rows at which the
    oldest page folds) [rows].

    A step is: `extend`, `upload`, the launches, `commit`. Without a pool of native pages nothing folds; with
    ``delegated`` a sequence folds from its `hand_over` on.
    """

    def __init__(
        self,
        rows: int,
        max_tokens: int,
        window: WindowPolicy,
        raw: PagePool,
        native: PagePool | None,
        device: str,
        *,
        delegated: bool = False,
    ) -> None:
        self._raw, self._native, self._window = raw, native, window
        self._max_tokens = max_tokens
        self._folding = native is not None and not delegated
        self._rows = [_Sequence(folding=self._folding) for _ in range(rows)]
        width = -(-max_tokens // PAGE)
        self._host_table, self._host_raw_table = (np.zeros((rows, width), np.int32) for _ in range(2))
        self._host_state = np.zeros((len(_STATE), rows), np.int32)
        self.table, self.raw_table, self._state = (
            torch.from_numpy(host).to(device, copy=True)
            for host in (self._host_table, self._host_raw_table, self._host_state)
        )
        self.lengths, self.folded, self.positions, self.sinks, self.sink_pages, self.fold_at = self._state.unbind()
        self._new_pages: set[int] = set()  # rows of the tables that the device does not have yet

    def length(self, row: int) -> int:
        return self._rows[row].length

    def rows_folded(self, row: int) -> int:
        return self._rows[row].folded

    @property
    def due(self) -> int:
        """Most pages that the step under way folds in one sequence: what `Fold` takes as ``pages``."""
        return max(sequence.due for sequence in self._rows)

    def extend(self, new: Mapping[int, int]) -> None:
        """Room for new rows of some sequences ({row: count}) and for the pages that fold after them, or none of it.

        Raises InputError beyond ``max_tokens``, KvcoreError where a pool has too few pages.
        """
        for row, count in new.items():
            if self._rows[row].length + count > self._max_tokens:
                raise InputError(
                    f"sequence of {self._rows[row].length} rows cannot take {count} more: "
                    f"these tables hold {self._max_tokens} tokens a sequence"
                )
        needs = [self._needs(self._rows[row], count) for row, count in new.items()]
        self._raw.require(sum(raw + copies for raw, copies, _ in needs))
        if self._native is not None:
            self._native.require(sum(pages for _, _, pages in needs))
        for (row, count), (raw, copies, pages) in zip(new.items(), needs, strict=True):
            sequence = self._rows[row]
            if copies:
                last = sequence.tail // PAGE
                sequence.raw[last] = self._raw.writable(sequence.raw[last])
            sequence.raw += self._raw.alloc(raw)
            if self._native is not None:
                sequence.pages += self._native.alloc(pages)
            sequence.due += pages
            sequence.length += count
            sequence.position += count
            if raw or copies or pages:
                self._new_pages.add(row)

    def _needs(self, sequence: _Sequence, count: int) -> tuple[int, int, int]:
        """Raw pages, copies of a shared raw page, and native pages that ``count`` more rows take."""
        rows = sequence.tail + count
        raw = -(-rows // PAGE) - len(sequence.raw)
        shared = count > 0 and sequence.tail % PAGE > 0
        copies = int(shared and self._raw.references(sequence.raw[sequence.tail // PAGE]) > 1)
        return raw, copies, self._foldable_pages(sequence, rows) - sequence.due

    def _foldable_pages(self, sequence: _Sequence, tail: int) -> int:
        return self._window.foldable(tail) // PAGE if sequence.folding else 0

    def upload(self) -> None:
        """Bring the device's copy up to date: a few small copies on the current stream, which nothing waits for.

        The host's side is pageable memory, which the driver stages before it returns: it may change at once.
        """
        for row in self._new_pages:
            sequence = self._rows[row]
            for host, device, pages in (
                (self._host_table, self.table, sequence.pages),
                (self._host_raw_table, self.raw_table, sequence.raw),
            ):
                host[row, : len(pages)] = pages
                device[row].copy_(torch.from_numpy(host[row]), non_blocking=True)
        self._new_pages.clear()
        for row, x in enumerate(self._rows):
            fold_at = self._window.recent_tokens + PAGE if x.folding else NEVER
            self._host_state[:, row] = (x.length, x.folded, x.position, self._sinks(x), x.sink_page or 0, fold_at)
        self._state.copy_(torch.from_numpy(self._host_state), non_blocking=True)

    def _sinks(self, sequence: _Sequence) -> int:
        return min(self._window.sink_tokens, sequence.folded)

    def commit(self) -> None:
        """Book what the step's launches fold: give back the raw pages that became native ones, but for the sinks'."""
        for row, sequence in enumerate(self._rows):
            if sequence.due == 0:
                continue
            done, sequence.raw = sequence.raw[: sequence.due], sequence.raw[sequence.due :]
            if sequence.folded == 0 and self._window.sink_tokens > 0:
                sequence.sink_page = done.pop(0)
            self._raw.free(done)
            sequence.folded += sequence.due * PAGE
            sequence.due = 0
            self._new_pages.add(row)

    def hand_over(self, row: int) -> None:
        """Let the sequence fold from now on, beginning with the step under way (`due` pages). One-way."""
        self._rows[row].folding = self._native is not None
        self.extend({row: 0})

    def fork(self, source: int, target: int) -> None:
        """Let the empty ``target`` hold what ``source`` holds; pages are shared until one of them writes."""
        origin, copy = self._rows[source], self._rows[target]
        if copy.length or origin.due:
            raise ValueError("fork needs an empty target, and no step under way")
        self._raw.share([*origin.raw, *self._sink_pages(origin)])
        if self._native is not None:
            self._native.share(origin.pages)
        self._rows[target] = _Sequence(
            length=origin.length,
            folded=origin.folded,
            position=origin.position,
            folding=origin.folding,
            sink_page=origin.sink_page,
            pages=list(origin.pages),
            raw=list(origin.raw),
        )
        self._new_pages.add(target)

    def trim(self, row: int, count: int) -> None:
        """Forget the newest ``count`` rows: raw rows first, then whole folded pages. Within a step, rows that were not
        accepted; what folds then is reckoned anew.

        InputError where a folded page would have to be cut.
        """
        sequence = self._rows[row]
        left = sequence.length - count
        if not 0 <= left <= sequence.length:
            raise InputError(f"cannot trim {count} rows: the sequence holds {sequence.length}")
        if left < sequence.folded and left % PAGE:
            raise InputError(
                f"cannot trim to {left} rows: {sequence.folded} are folded, in pages of {PAGE}; "
                f"trim to {left // PAGE * PAGE}, or to {sequence.folded} or more"
            )
        sequence.folded = min(sequence.folded, left)
        sequence.length, sequence.position = left, sequence.position - count
        sequence.due = min(sequence.due, self._foldable_pages(sequence, sequence.tail))
        kept = -(-sequence.tail // PAGE)
        self._raw.free(sequence.raw[kept:])
        del sequence.raw[kept:]
        kept = sequence.folded // PAGE + sequence.due
        if self._native is not None:
            self._native.free(sequence.pages[kept:])
            del sequence.pages[kept:]
        if sequence.folded == 0:
            self._raw.free(self._sink_pages(sequence))
            sequence.sink_page = None
        self._new_pages.add(row)

    def release(self, row: int) -> None:
        """Forget the sequence; its row is empty then, and idle for the kernels."""
        self.trim(row, self._rows[row].length)
        self._rows[row] = _Sequence(folding=self._folding)

    def _sink_pages(self, sequence: _Sequence) -> list[int]:
        return [] if sequence.sink_page is None else [sequence.sink_page]
