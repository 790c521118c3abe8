"""Reuse of prompts: caches that were donated, and what of them a new prompt may adopt.

A snapshot ends where a prompt ended; a prompt that extends it goes on from there as if nothing had happened. Of any
other shared prefix of L tokens only whole pages are adopted: in a raw mode those below L, in a quantized one those that
the donor has folded below L minus the recent tokens, because newer rows are raw in a run that is chunked there.

Donors stand in a tree of token blocks, so that a look-up reads the prompt once, however many donors there are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvcore.cache.cache import Cache, CacheSpec

TRIMMED = "it was trimmed in the middle"
NOT_HANDED_OVER = "its hand-over has not been made"


@dataclass(slots=True)
class PrefixCounters:
    """Look-ups that adopted rows, those that found none, and donors declined on the way, by reason.

    A donor counts as declined where its tokens fit and it may not be used; of many that fit alike, one is counted.
    """

    hits: int = 0
    misses: int = 0
    declined: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Donor:
    tokens: tuple[int, ...]
    cache: Cache
    nbytes: int


@dataclass(slots=True)
class _Node:
    """Donors that begin with the same whole blocks. ``ends``: those that end before another block is full, by length
    and rest; ``donors``: all of them, the newest last."""

    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    ends: dict[int, dict[tuple[int, ...], _Donor]] = field(default_factory=dict)
    donors: dict[tuple[int, ...], _Donor] = field(default_factory=dict)


class Prefixes:
    """Donated caches, the least recently used of which goes first: at most ``capacity`` of them (None: any number).

    ``measure`` gives what a cache costs; ``nbytes`` is the sum over the donors.
    """

    def __init__(self, capacity: int | None = 8, measure: Callable[[Cache], int] = lambda _cache: 0) -> None:
        self._capacity, self._measure = capacity, measure
        self._donors: OrderedDict[tuple[CacheSpec, tuple[int, ...]], _Donor] = OrderedDict()
        self._trees: dict[tuple[CacheSpec, bool, bool], _Node] = {}
        self.nbytes = 0
        self.counters = PrefixCounters()

    def __len__(self) -> int:
        return len(self._donors)

    def __iter__(self) -> Iterator[Cache]:
        """The donors' caches, the least recently used first."""
        return (donor.cache for donor in self._donors.values())

    def donate(self, tokens: Sequence[int], cache: Cache, *, fork: bool = True) -> None:
        """Keep a snapshot of ``cache``, which has seen ``tokens``: a fork, so that the cache itself goes on, or the
        cache itself, where nobody else will use it. It takes the place of one with the same tokens and settings."""
        kept = cache.fork() if fork else cache
        donor = _Donor(tuple(tokens)[: kept.offset], kept, self._measure(kept))
        self._remove((_group(kept.spec), donor.tokens))
        self._donors[_group(kept.spec), donor.tokens] = donor
        self.nbytes += donor.nbytes
        node, end = self._trees.setdefault(_tree(kept), _Node()), 0
        node.donors[donor.tokens] = donor
        for start, end in _blocks(kept.spec, donor.tokens):
            node = node.children.setdefault(donor.tokens[start:end], _Node())
            node.donors[donor.tokens] = donor
        rest = donor.tokens[end:]
        node.ends.setdefault(len(rest), {})[rest] = donor
        while self._capacity is not None and len(self._donors) > self._capacity:
            self.evict()

    def adopt(self, tokens: Sequence[int], spec: CacheSpec) -> Cache | None:
        """A cache of its own with rows of the first tokens, as many as a donor has; never of the last token, whose
        logits are needed. None where no donor has any for ``spec``."""
        adopted, declined = self.look_up(tokens, spec)
        self.count(adopted is not None, declined)
        return adopted

    def count(self, hit: bool, declined: Mapping[str, int]) -> None:
        """Book a look-up."""
        self.counters.hits += hit
        self.counters.misses += not hit
        self.counters.declined.update(declined)

    def look_up(self, tokens: Sequence[int], spec: CacheSpec) -> tuple[Cache | None, Mapping[str, int]]:
        """`adopt` that counts nothing, for a request that may have to wait and look again; with the reasons."""
        tokens, best = tuple(tokens), 0
        chosen: _Donor | None = None
        declined = Counter[str]()
        for tree, root in self._trees.items():
            rows, donor = _best(root, tree[0], tokens)
            if donor is None:
                continue
            reasons = reasons_against(donor.cache, spec)
            declined.update(reasons)
            if not reasons and rows > best:
                best, chosen = rows, donor
        if chosen is None:
            return None, declined
        adopted = chosen.cache.fork()
        adopted.trim(adopted.tokens - best)
        self._donors.move_to_end((_group(chosen.cache.spec), chosen.tokens))
        return adopted, declined

    def evict(self, of: Callable[[Cache], bool] = lambda _cache: True) -> bool:
        """Let go of the least recently used donor, of those that ``of`` chooses; False where there is none."""
        key = next((key for key, donor in self._donors.items() if of(donor.cache)), None)
        if key is None:
            return False
        self._remove(key)
        return True

    def clear(self) -> None:
        """Let go of every donor."""
        self._donors.clear()
        self._trees.clear()
        self.nbytes = 0

    def _remove(self, key: tuple[CacheSpec, tuple[int, ...]]) -> None:
        donor = self._donors.pop(key, None)
        if donor is None:
            return
        self.nbytes -= donor.nbytes
        tree = _tree(donor.cache)
        path, blocks, end = [self._trees[tree]], [], 0
        for start, end in _blocks(donor.cache.spec, donor.tokens):
            blocks.append(donor.tokens[start:end])
            path.append(path[-1].children[blocks[-1]])
        rest = donor.tokens[end:]
        ends = path[-1].ends[len(rest)]
        del ends[rest]
        if not ends:
            del path[-1].ends[len(rest)]
        for node in path:
            del node.donors[donor.tokens]
        for parent, block, node in reversed(list(zip(path, blocks, path[1:], strict=False))):
            if not node.donors:
                del parent.children[block]
        if not path[0].donors:
            del self._trees[tree]


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


def _best(root: _Node, spec: CacheSpec, tokens: tuple[int, ...]) -> tuple[int, _Donor | None]:
    """Most rows that a run of ``tokens`` may begin with, and the donor in the tree that has them."""
    path = [(root, 0)]
    for start, end in _blocks(spec, tokens):
        child = path[-1][0].children.get(tokens[start:end])
        if child is None:
            break
        path.append((child, end))
    deepest, shared = path[-1]
    pages = next(reversed(deepest.donors.values()), None)
    rows = 0 if pages is None else _whole_pages(pages.cache, shared, len(tokens))
    for node, end in reversed(path):
        whole = _end(node, tokens, end)
        if whole is not None and len(whole.tokens) >= rows:
            return len(whole.tokens), whole
    return rows, pages if rows else None


def _end(node: _Node, tokens: tuple[int, ...], start: int) -> _Donor | None:
    """The longest donor that ends here and that ``tokens``, which follow ``start`` of this node, extend."""
    for length in sorted(node.ends, reverse=True):
        if start + length < len(tokens):
            donor = node.ends[length].get(tokens[start : start + length])
            if donor is not None and donor.tokens:
                return donor
    return None


def _whole_pages(donor: Cache, shared: int, count: int) -> int:
    """Rows of whole pages that a run of ``count`` tokens adopts, of which the first ``shared`` are the donor's too."""
    window, page = donor.spec.window, donor.spec.window.page_size
    if not donor.spec.mode.quantized:
        return min(count - 1, shared // page * page)
    return min(window.foldable(shared), donor.rows_folded // page * page, (count - 1) // page * page)


def _blocks(spec: CacheSpec, tokens: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Start and end of the whole blocks of the tokens. A page each, but for the first one in a mode with a window: the
    borders are where one more page can be adopted."""
    page = spec.window.page_size
    first = spec.window.recent_tokens % page if spec.mode.quantized else 0
    start, end = 0, first or page
    while end <= len(tokens):
        yield start, end
        start, end = end, end + page


def _group(spec: CacheSpec) -> CacheSpec:
    """What donors must have in common to share rows."""
    return replace(spec, capacity=None)


def _tree(cache: Cache) -> tuple[CacheSpec, bool, bool]:
    return _group(cache.spec), bool(cache.holes), cache.handed_over
