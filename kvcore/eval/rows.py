"""Which rows a query sees raw: the window policy as a rule from positions to rows, for scoring in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcore.errors import InputError
from kvcore.layout import WindowPolicy


@dataclass(frozen=True, slots=True)
class RawRows:
    """The rows that stay raw: the first ``sinks``, and those that a cache with ``recent`` and ``page`` has not folded.

    A cache folds after it attends, so a query at position i sees what i tokens left behind: page · max(0, ⌊(i −
    recent) / page⌋) folded rows. ``page`` may be 1, which no real cache allows: a window that slides by one row.
    With ``everything`` no row is raw, not even the query's own: a codec without a window.
    ``hand_over``: queries before this position see every row raw, as a delegated mode's prompt does.
    """

    sinks: int = 4
    recent: int = 128
    page: int = 128
    everything: bool = False
    hand_over: int = 0

    def __post_init__(self) -> None:
        if min(self.sinks, self.recent, self.hand_over) < 0 or self.page < 1:
            raise InputError(f"{self}: sinks, recent and hand_over must be 0 or more, page 1 or more")

    @classmethod
    def of(cls, window: WindowPolicy, hand_over: int = 0) -> RawRows:
        """What a cache with this policy does, boundary layers aside."""
        return cls(window.sink_tokens, window.recent_tokens, window.page_size, hand_over=hand_over)

    @classmethod
    def none(cls) -> RawRows:
        return cls(sinks=0, recent=0, page=1, everything=True)

    @property
    def label(self) -> str:
        return "none" if self.everything else f"{self.sinks}+{self.recent}/{self.page}"

    def folded(self, positions: np.ndarray) -> np.ndarray:
        """How many of the oldest rows are folded for queries at ``positions``, sinks among them; int of its shape."""
        if self.everything:
            return positions + 1
        due = np.maximum(0, (positions - self.recent) // self.page) * self.page
        return np.where(positions < self.hand_over, 0, due)

    def coded(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """bool [queries, keys]: where a query sees a key in its coded form."""
        result: np.ndarray = (keys[None, :] < self.folded(queries)[:, None]) & (keys[None, :] >= self.sinks)
        return result

    def cache_bytes(self, tokens: int, raw: float, coded: float) -> float:
        """Bytes of a layer and KV head after ``tokens`` tokens; ``raw`` and ``coded`` are those of one row.

        Sinks count twice once their page is folded, raw and as codes, as in a cache.
        """
        if self.everything:
            return tokens * coded
        folded = int(RawRows(self.sinks, self.recent, self.page).folded(np.array([tokens]))[0])
        return (tokens - folded + min(self.sinks, folded)) * raw + folded * coded
