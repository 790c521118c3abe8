"""Positions of live rows, where rows in the middle were dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Hole(NamedTuple):
    """``missing`` rows were dropped before live row ``at``."""

    at: int
    missing: int


@dataclass(slots=True)
class Positions:
    """Holes of a sequence, oldest first. Live row r has the position r plus what is missing before it."""

    holes: list[Hole] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Rows dropped in the middle: offset minus live rows."""
        return sum(hole.missing for hole in self.holes)

    def drop(self, first: int, count: int) -> None:
        """Live rows ``first`` to ``first`` + ``count`` go; holes among them become one."""
        if count == 0:
            return
        end = first + count
        before = [hole for hole in self.holes if hole.at < first]
        inside = sum(hole.missing for hole in self.holes if first <= hole.at <= end)
        after = [Hole(hole.at - count, hole.missing) for hole in self.holes if hole.at > end]
        self.holes = [*before, Hole(first, count + inside), *after]

    def trim(self, left: int) -> None:
        """Only the oldest ``left`` rows stay: what was missing behind them is not missing any more."""
        self.holes = [hole for hole in self.holes if hole.at < left]

    def rows_before(self, position: int, rows: int) -> int:
        """How many of ``rows`` live rows come before ``position``; those before a hole that reaches up to it."""
        missing = 0
        for hole in self.holes:
            if position <= hole.at + missing + hole.missing:
                return min(position - missing, hole.at)
            missing += hole.missing
        return min(position - missing, rows)

    def copy(self) -> Positions:
        return Positions(list(self.holes))
