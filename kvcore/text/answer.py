"""An answer as it grows: from tokens to text that is safe to show, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.text.detokenizer import Detokenizer
from kvcore.text.stop import StopMatcher

if TYPE_CHECKING:
    from kvcore.text.tokenizer import Tokenizer


class Answer:
    """Takes generated tokens one by one. No text holds part of a character or of a stop string.

    The answer ends with reason "stop" at a token of ``ends``, whose text is never shown, or before the first of
    ``stops`` that completes; with "length" at the ``limit``-th token.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], ends: frozenset[int], limit: int) -> None:
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopMatcher(stops)
        self._ends, self._limit = ends, limit
        self.tokens: list[int] = []

    def add(self, token: int) -> tuple[str | None, str]:
        """The finish reason, if any, and the text that ``token`` makes safe to show."""
        self.tokens.append(token)
        if token in self._ends:
            return "stop", self.flush()
        piece, stopped = self._stops.push(self._detokenizer.add(token))
        if stopped:
            return "stop", piece
        if len(self.tokens) >= self._limit:
            return "length", piece + self.flush()
        return None, piece

    def flush(self) -> str:
        """The text still held back, for an answer that ends otherwise."""
        piece, stopped = self._stops.push(self._detokenizer.flush())
        return piece if stopped else piece + self._stops.flush()
