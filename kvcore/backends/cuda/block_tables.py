"""Block tables: the pages of each sequence as kernels read them.

The host keeps lengths and tables of its own (`PageBooks`) and never reads the device's: a step needs no
synchronization. The device's copy is what kernels read, at addresses that stay, as CUDA graphs require.
"""

from __future__ import annotations

import numpy as np
import torch

from kvcore.backends.cuda.native import PAGE
from kvcore.backends.cuda.page_books import Needs, PageBooks
from kvcore.backends.cuda.pool import PagePool
from kvcore.backends.cuda.sequence import NEVER
from kvcore.layout import WindowPolicy

__all__ = ["NEVER", "BlockTables", "Needs"]

_TABLES = ("table", "ranges", "raw_table", "raw_ranges")
_STATE = ("lengths", "folded", "positions", "sinks", "sink_pages", "fold_at")


class BlockTables(PageBooks):
    """Which pages hold the rows of each sequence: ``rows`` sequences of at most ``max_tokens`` tokens.

    On the device, int32: ``table`` and ``raw_table`` [rows, entries] (native pages, and raw pages from the oldest raw
    row on) with ``ranges`` and ``raw_ranges`` beside them, the live rows of each entry's page as first | end << 16;
    and [rows]: ``lengths`` and ``folded`` in slots, 128 an entry, ``positions`` (RoPE position of the next token),
    ``sinks`` (raw rows that shadow the first page's), ``sink_pages`` (raw page that holds them) and ``fold_at`` (slots
    of the raw tail at which the oldest page folds). The newest row has the slot before ``lengths``. The range of the
    last raw entry ends at 128: its length bounds it.

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
        super().__init__(rows, window, raw, native, delegated=delegated)
        self._device = device
        self._host_state = np.zeros((len(_STATE), rows), np.int32)
        self._state = torch.from_numpy(self._host_state).to(device, copy=True)
        self.lengths, self.folded, self.positions, self.sinks, self.sink_pages, self.fold_at = self._state.unbind()
        self.widen(-(-max_tokens // PAGE))

    def widen(self, width: int) -> None:
        """Tables of ``width`` entries, at new addresses. torch.OutOfMemoryError: nothing has changed."""
        if width <= self.width:
            return
        host = np.zeros((len(_TABLES), len(self._rows), width), np.int32)
        device = torch.from_numpy(host).to(self._device, copy=True)
        self.width, self._host_tables, self._tables = width, host, device
        self.table, self.ranges, self.raw_table, self.raw_ranges = device.unbind()
        self._mark_all()

    def copy(self) -> BlockTables:
        """Other tables, over the same pools, that share every page: whoever writes first copies. ValueError within a
        step that folds."""
        if any(sequence.coming for sequence in self._rows):
            raise ValueError("a copy needs tables without a step under way")
        count, tokens = len(self._rows), self.width * PAGE
        other = BlockTables(count, tokens, self._window, self._raw, self._native, self._device)
        for sequence in self._rows:
            self._share(sequence)
        other._folding = self._folding
        other._rows = [sequence.copy() for sequence in self._rows]
        return other

    def host_table(self) -> np.ndarray:
        """The tables [4, entries] of the only sequence, int32, as `upload` would write them; they change where
        ``stamp`` does. The device's own copy stays as old as it is."""
        self._write_tables()
        return self._host_tables[:, 0, : self.entries_used]

    def host_state(self, row: int = 0) -> tuple[int, ...]:
        """What stands beside the sequence's tables: lengths, folded, positions, sinks, sink_pages, fold_at."""
        x, (sinks, folded, length) = self._rows[row], self.slots(row)
        return length, folded, x.position, sinks, x.sink_page or 0, x.fold_at(self._window)

    def upload(self) -> None:
        """Bring the device's copy up to date: a few small copies on the current stream, which nothing waits for.

        The host's side is pageable memory, which the driver stages before it returns: it may change at once.
        """
        self._write_tables()
        for row in self._changed:
            for host, device in zip(self._host_tables, self._tables, strict=True):
                device[row].copy_(torch.from_numpy(host[row]), non_blocking=True)
        self._changed.clear()
        self._write_state()
        self._state.copy_(torch.from_numpy(self._host_state), non_blocking=True)

    def _write_tables(self) -> None:
        for row in self._unwritten:
            sequence = self._rows[row]
            table, ranges, raw_table, raw_ranges = self._host_tables[:, row]
            native, raw = self.live(row)
            pages = [*(entry.page for entry in sequence.native), *sequence.coming]
            table[: len(pages)] = pages
            ranges[: len(native)] = [first | end << 16 for first, end in native]
            raw_table[: len(raw)] = [entry.page for entry in sequence.raw]
            raw_ranges[: len(raw)] = [first | end << 16 for first, end in raw]
        self._unwritten.clear()

    def _write_state(self) -> None:
        for row in range(len(self._rows)):
            self._host_state[:, row] = self.host_state(row)
