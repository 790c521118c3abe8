"""Room for caches: what a request needs at most, what is left, and what idle prefixes give back."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcore.backends import Backend
from kvcore.cache import Cache, CacheSpec
from kvcore.engine.config import KvUse
from kvcore.layout.footprint import Rows, over_layers

Amount = tuple[int, ...]  # of each resource: bytes, or raw and native pages


def covers(have: Amount, wanted: Amount) -> bool:
    return all(a >= b for a, b in zip(have, wanted, strict=True))


def beyond(wanted: Amount, have: Amount) -> Amount:
    """What of ``wanted`` is missing."""
    return tuple(max(0, a - b) for a, b in zip(wanted, have, strict=True))


class Holder(Protocol):
    """A running request: its cache, and what is set aside for it."""

    @property
    def mode(self) -> str: ...
    @property
    def cache(self) -> Cache | None: ...
    @property
    def reserved(self) -> Amount: ...


class Memory(Protocol):
    """Where caches come from, and how much room there is."""

    budget: int
    words: str  # what a step computes together

    def modes(self) -> tuple[str, ...] | None:
        """Modes that have room; None for any."""

    def spec(self, mode: str) -> CacheSpec:
        """What caches of the mode are made of."""

    def new_cache(self, mode: str) -> Cache:
        """An empty one."""

    def needs(self, mode: str, prompt: int, tokens: int) -> Amount:
        """What a sequence takes at most on its way to ``tokens``, the first ``prompt`` of which come in chunks: those
        are raw until they are committed."""

    def capacity(self, mode: str) -> Amount: ...

    def held(self, cache: Cache) -> Amount:
        """What of a request's needs its cache has already, so that it is not free any more."""

    def room(self, mode: str, holders: Iterable[Holder], idle: int) -> Amount:
        """What is neither used nor set aside, ``idle`` bytes of prefixes being kept; may be below 0."""

    def shares(self, mode: str, other: str) -> bool:
        """Whether caches of the two modes take room from each other."""

    def at_best(self, mode: str, holders: Sequence[Holder], idle: Sequence[Cache]) -> Amount:
        """`room` without any prefix."""

    def margin(self, mode: str, sequences: int) -> Amount:
        """What a step of so many sequences may take beside what is set aside, while there are prefixes."""

    def room_for_prefix(self, mode: str, holders: Iterable[Holder], idle: int) -> int:
        """Bytes that a prefix may count for beside ``idle`` bytes of others."""

    def cost(self, cache: Cache) -> int:
        """Bytes that a prefix counts for."""

    def uses(self, holders: Iterable[Holder], prefixes: Iterable[Cache]) -> Mapping[str, KvUse]: ...

    def describe(self, mode: str, amount: Amount) -> str:
        """An amount in words."""


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Rows of one mode in bytes, over all layers and heads; ``step`` rows come in one chunk at most."""

    spec: CacheSpec
    step: int

    def phases(self, prompt: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """Most raw and folded rows while the prompt is prefilled, and after; sinks count as both."""
        # An answer that is run again is cut where pages fold, so that it takes no more than it took row by row.
        after = self._rows(tokens, 1 if self.spec.cap is None else self.step)
        if not prompt:
            return (after,)
        if self.spec.mode.delegated:
            raw, _ = self._rows(prompt, prompt)
            return (raw, self.spec.window.foldable(raw)), after
        return self._rows(prompt, self.step), after

    def _rows(self, tokens: int, chunk: int) -> tuple[int, int]:
        window, cap = self.spec.window, self.spec.cap
        if cap is not None:
            tokens = min(tokens, cap.tokens - 1 + min(chunk, cap.window))
        if not self.spec.mode.quantized:
            return tokens, 0
        folded = window.foldable(tokens)
        raw = min(tokens, window.recent_tokens + window.page_size - 1 + chunk)
        return raw + min(window.sink_tokens, folded), folded

    def nbytes(self, prompt: int, tokens: int) -> int:
        shape, page = self.spec.shape(), self.spec.window.page_size
        cut = 0 if self.spec.cap is None else 2  # pages that are not whole: see `pages_of`

        def of(raw: int, folded: int) -> int:
            rows = Rows(raw, 0, folded, -(-folded // page) + cut if folded else 0)
            return over_layers(shape, rows.nbytes(shape), Rows(raw + folded).nbytes(shape))

        return max(of(*rows) for rows in self.phases(prompt, tokens))


class ByteMemory:
    """Contiguous storage of any mode under one budget in bytes. A fork counts in full: buffers that two caches share
    are copied as soon as one of them grows."""

    words = "ragged batch: projections of all decoding sequences in one product, attention of each over its own rows"

    def __init__(self, costs: Mapping[str, RowCosts], make: Callable[[str], Cache], budget: int) -> None:
        self.budget, self._make, self._costs = budget, make, dict(costs)

    def modes(self) -> tuple[str, ...] | None:
        return None

    def spec(self, mode: str) -> CacheSpec:
        return self._costs[mode].spec

    def new_cache(self, mode: str) -> Cache:
        return self._make(mode)

    def needs(self, mode: str, prompt: int, tokens: int) -> Amount:
        return (self._costs[mode].nbytes(prompt, tokens),)

    def capacity(self, mode: str) -> Amount:
        return (self.budget,)

    def held(self, cache: Cache) -> Amount:
        return (0,)

    def room(self, mode: str, holders: Iterable[Holder], idle: int) -> Amount:
        return (self.budget - idle - sum(sum(holder.reserved) for holder in holders),)

    def shares(self, mode: str, other: str) -> bool:
        return True

    def at_best(self, mode: str, holders: Sequence[Holder], idle: Sequence[Cache]) -> Amount:
        return self.room(mode, holders, 0)

    def margin(self, mode: str, sequences: int) -> Amount:
        return (0,)

    def room_for_prefix(self, mode: str, holders: Iterable[Holder], idle: int) -> int:
        return self.room(mode, holders, idle)[0]

    def cost(self, cache: Cache) -> int:
        return cache.live_bytes

    def uses(self, holders: Iterable[Holder], prefixes: Iterable[Cache]) -> Mapping[str, KvUse]:
        running, idle = Counter[str](), Counter[str]()
        for holder in holders:
            cache = holder.cache  # another thread may take it away
            if cache is not None:
                running[holder.mode] += self.cost(cache)
        for cache in prefixes:
            idle[cache.mode.name] += self.cost(cache)
        return {mode: KvUse(running[mode], idle[mode], self.budget) for mode in self._costs}

    def describe(self, mode: str, amount: Amount) -> str:
        return f"{amount[0]} bytes"


def default_budget(backend: Backend) -> int:
    """Bytes where the user gives none: 0.9 of a GPU's free memory, else a quarter of the RAM."""
    free = backend.free_memory()
    if free is not None:
        return int(free * 0.9)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
