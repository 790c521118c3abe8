"""Room in pools of pages: one pair of pools for each mode, under one budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvcore.cache import Cache, CacheSpec
from kvcore.engine.config import KvUse, Pages
from kvcore.engine.memory import Amount, Holder, RowCosts


class PageMemory:
    """Pages that caches of a mode share. An amount is raw pages and native pages.

    What is free is what the pools say, so that a page that several caches hold counts once.
    """

    words = (
        "continuous batch: projections of all decoding sequences in one product, attention of those of a mode in one "
        "launch over their pages"
    )

    def __init__(
        self,
        costs: Mapping[str, RowCosts],
        pools: Mapping[str, Any],
        make: Callable[[str, Any], Cache],
        budget: int,
    ) -> None:
        self.budget, self._costs, self._pools, self._make = budget, dict(costs), dict(pools), make

    def modes(self) -> tuple[str, ...] | None:
        return tuple(self._pools)

    def spec(self, mode: str) -> CacheSpec:
        return self._costs[mode].spec

    def new_cache(self, mode: str) -> Cache:
        return self._make(mode, self._pools[mode])

    def needs(self, mode: str, prompt: int, tokens: int) -> Amount:
        return pages_of(self._costs[mode], prompt, tokens)

    def capacity(self, mode: str) -> Amount:
        return self._amount(mode, [pool.pages for pool in self._pools[mode].all()])

    def held(self, cache: Cache) -> Amount:
        storage: Any = cache.storage
        return tuple(storage.pages_held)

    def room(self, mode: str, holders: Iterable[Holder], idle: int) -> Amount:
        raw, native = self._amount(mode, [pool.free_pages for pool in self._pools[mode].all()])
        for holder in holders:
            if holder.mode == mode and holder.cache is not None:
                (raw_due, native_due), held = holder.reserved, self.held(holder.cache)
                raw, native = raw - max(0, raw_due - held[0]), native - max(0, native_due - held[1])
        return raw, native

    def shares(self, mode: str, other: str) -> bool:
        return mode == other

    def at_best(self, mode: str, holders: Sequence[Holder], idle: Sequence[Cache]) -> Amount:
        """Pages that running requests hold too do not become free."""
        running = self._numbers(mode, [holder.cache for holder in holders if holder.mode == mode])
        kept = self._numbers(mode, [cache for cache in idle if cache.mode.name == mode])
        room = self.room(mode, holders, 0)
        return tuple(free + len(b - a) for free, a, b in zip(room, running, kept, strict=True))

    def margin(self, mode: str, sequences: int) -> Amount:
        """A page that a prefix shares is copied before it is written: at most one for each sequence in a step."""
        return (sequences, 0)

    def room_for_prefix(self, mode: str, holders: Iterable[Holder], idle: int) -> int:
        """Any number: a prefix takes no page that nobody has, and goes when pages are short."""
        return self.budget

    def cost(self, cache: Cache) -> int:
        sizes = self._pools[cache.mode.name].page_bytes()
        return sum(count * size for count, size in zip(self.held(cache), sizes, strict=True))

    def uses(self, holders: Iterable[Holder], prefixes: Iterable[Cache]) -> Mapping[str, KvUse]:
        caches: dict[str, list[Cache | None]] = {mode: [] for mode in self._pools}
        for holder in holders:
            caches[holder.mode].append(holder.cache)
        uses = {}
        for mode, pools in self._pools.items():
            running = self._numbers(mode, caches[mode])
            sizes, counts = pools.page_bytes(), pools.counts()
            used = sum(size * count for size, (_, _, count, _) in zip(sizes, counts, strict=False))
            held = min(used, sum(size * len(pages) for size, pages in zip(sizes, running, strict=True)))
            total = sum(pool.allocated_bytes for pool in pools.all())
            pages = {name: Pages(free, taken, shared) for name, free, taken, shared in counts}
            uses[mode] = KvUse(held, used - held, total, pages)
        return uses

    def describe(self, mode: str, amount: Amount) -> str:
        raw, native = amount
        nbytes = sum(count * size for count, size in zip(amount, self._pools[mode].page_bytes(), strict=True))
        return f"{raw + native} pages ({nbytes} bytes)"

    def _numbers(self, mode: str, caches: Iterable[Cache | None]) -> tuple[set[int], set[int]]:
        """The raw and the native pages that any of the caches holds."""
        raw: set[int] = set()
        native: set[int] = set()
        for cache in caches:
            if cache is not None:
                storage: Any = cache.storage
                more = storage.page_numbers()
                raw, native = raw | more[0], native | more[1]
        return raw, native

    def _amount(self, mode: str, pages: Sequence[int]) -> Amount:
        return (*pages, *(0 for _ in range(2 - len(pages))))


def pages_of(costs: RowCosts, prompt: int, tokens: int) -> Amount:
    """Most raw and native pages of a sequence on its way to ``tokens``; the first ``prompt`` come in chunks."""
    spec = costs.spec
    page, sinks = spec.window.page_size, spec.mode.quantized and spec.window.sink_tokens > 0
    holes = 0 if spec.cap is None else 2  # pages that are cut: one with the kept rows, and one at the hole's end
    raw = native = 0
    for raw_rows, folded in costs.phases(prompt, tokens):
        own = int(sinks and folded > 0)  # sinks have a page of their own
        rows = raw_rows - (min(spec.window.sink_tokens, folded) if own else 0)
        raw = max(raw, -(-rows // page) + own + holes)
        native = max(native, -(-folded // page) + (holes if folded else 0))
    return raw, native


def raw_pages_for(costs: RowCosts, sequences: int, prompt: int) -> int:
    """Raw pages that ``sequences`` decoding sequences take, one of them prefilling, and the open pages of half as many
    prefixes."""
    longest = 1 << 40
    decoding, _ = pages_of(costs, 0, longest)
    prefilling, _ = pages_of(costs, prompt, longest)
    return sequences * decoding + prefilling + sequences // 2
