"""Stop strings in streamed text: nothing of a stop string is ever shown, and nothing else is kept back."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.errors import InputError


class StopMatcher:
    """Cuts streamed text before the first stop string that completes.

    Read character by character, the text ends where any of ``stops`` is complete; the longest of those complete
    there is cut off. So the result does not depend on how the text is chunked. Text is held back only while it
    could be the beginning of a stop string: at most ``len(stop) - 1`` characters.

    Raises:
        InputError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InputError("a stop string is empty, which would stop before any text; leave it out")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece of text; return what can be shown now, and whether a stop string was reached."""
        if self._stopped:
            return "", True
        text = self._held + text
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            self._held, self._stopped = "", True
            return text[: min(hits)[1]], True
        shown = len(text) - self._unsure(text)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """The text still held back, for when generation ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _unsure(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
