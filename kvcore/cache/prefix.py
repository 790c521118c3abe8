"""Reuse of prompts: caches that were donated, and what of them a new prompt may adopt.

A snapshot ends where a prompt ended; a prompt that extends it goes on from there as if nothing had happened. Of any
other shared prefix of L tokens only whole pages are adopted: in a raw mode those below L, in a quantized one those that
the donor has folded below L minus the recent tokens, because newer rows are raw in a run that is chunked there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcore.cache.cache import Cache, CacheSpec

TRIMMED = "it was trimmed in the middle"
NOT_HANDED_OVER = "its hand-over has not been made"


@dataclass(slots=True)
class PrefixCounters:
    """Look-ups that adopted rows, those that found none, and donors declined on the way, by reason."""

    hits: int = 0
    misses: int = 0
    declined: Counter[str] = field(default_factory=Counter)


class Prefixes:
    """At most ``capacity`` donated caches, the least recently used of which goes first."""

    def __init__(self, capacity: int = 8) -> None:
        self._capacity = capacity
        self._donors: OrderedDict[tuple[int, ...], Cache] = OrderedDict()
        self.counters = PrefixCounters()

    def __len__(self) -> int:
        return len(self._donors)

    def donate(self, tokens: Sequence[int], cache: Cache) -> None:
        """Keep a snapshot of ``cache``, which has seen ``tokens``: a fork, so that the cache itself goes on."""
        self._donors[tuple(tokens)] = cache.fork()
        self._donors.move_to_end(tuple(tokens))
        while len(self._donors) > self._capacity:
            self._donors.popitem(last=False)

    def adopt(self, tokens: Sequence[int], spec: CacheSpec) -> Cache | None:
        """A cache of its own with rows of the first tokens, as many as a donor has; never of the last token, whose
        logits are needed. None where no donor has any for ``spec``."""
        best: tuple[int, tuple[int, ...]] | None = None
        for key, donor in self._donors.items():
            reasons = reasons_against(donor, spec)
            self.counters.declined.update(reasons)
            rows = 0 if reasons else adoptable(donor, key, tokens)
            if rows > (best[0] if best else 0):
                best = (rows, key)
        if best is None:
            self.counters.misses += 1
            return None
        rows, key = best
        self.counters.hits += 1
        self._donors.move_to_end(key)
        adopted = self._donors[key].fork()
        adopted.trim(adopted.tokens - rows)
        return adopted

    def clear(self) -> None:
        """Let go of every donor."""
        self._donors.clear()


def reasons_against(donor: Cache, spec: CacheSpec) -> list[str]:
    """Why no cache of ``spec`` may adopt rows of ``donor``; empty where it may."""
    own = donor.spec
    pairs = (
        ("model", own.model, spec.model),
        ("mode", own.mode.name, spec.mode.name),
        ("dtype", own.dtype, spec.dtype),
        ("batch", own.batch, spec.batch),
        ("cap", own.cap, spec.cap),
    )
    reasons = [f"{name} {theirs} instead of {ours}" for name, theirs, ours in pairs if theirs != ours]
    if own.window != spec.window and spec.mode.quantized:
        reasons.append("another window policy")
    if donor.holes:
        reasons.append(TRIMMED)
    if not donor.handed_over:
        reasons.append(NOT_HANDED_OVER)
    return reasons


def adoptable(donor: Cache, donated: Sequence[int], tokens: Sequence[int]) -> int:
    """Rows of ``donor``, which has seen ``donated``, that a run of ``tokens`` may begin with."""
    pairs = zip(donated[: donor.tokens], tokens, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(donor.tokens, len(tokens)))
    if shared == donor.tokens and shared < len(tokens):
        return shared
    page, window = donor.spec.window.page_size, donor.spec.window
    if not donor.spec.mode.quantized:
        return min(len(tokens) - 1, shared // page * page)
    folded = max(layer.view().folded for layer in donor.layers)
    return min(window.foldable(min(shared, len(tokens) - 1)), folded // page * page)
