"""Rank 0's side: caches whose other shares the other ranks hold, and the steps over them.

What changes a cache is announced, then done here as everywhere. A `RankedCache` announces its own methods; a step is
announced once, and what it does to the cache is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvcore.cache import Cache, CacheRows, CacheSpec, StepCache
from kvcore.errors import KvcoreError, UnsupportedError
from kvcore.models.llama import Ragged
from kvcore.parallel.commands import Command, agree, anywhere, send
from kvcore.parallel.join import Ranks

FILED = "rows of a cache that several ranks share cannot be exported or loaded: each has its own heads; use one process"


class Leader:
    """Sends commands, in the order in which rank 0 does the same. For one thread at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._next = 0
        self._freed: list[int] = []
        self._late: list[tuple[Command, Callable[[], None]]] = []
        self._decoders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._broken: str | None = None
        self._quiet = self._closed = False

    @property
    def quiet(self) -> bool:
        """Whether a command is under way, so that what it causes is not announced again."""
        return self._quiet

    def adopt(self, cache: Cache, spec: CacheSpec) -> RankedCache:
        """The same cache, with its other shares made by the other ranks. ``spec`` is rank 0's, with its own heads."""
        number = self._number()
        self.announce(Command("new", {"cache": number, "spec": spec_to_json(spec)}))
        return RankedCache(self, number, cache)

    def fork(self, number: int, cache: Cache) -> RankedCache:
        into = self._number()
        self.announce(Command("fork", {"cache": number, "into": into}))
        return RankedCache(self, into, cache)

    @contextmanager
    def decoder(
        self, cache: RankedCache, draws: Sequence[Mapping[str, Any]], seen: Sequence[Sequence[int]]
    ) -> Iterator[LedSteps]:
        """Every rank makes a decoder over its share of ``cache``, rank 0 in the body; see `decoding.device_source`."""
        number = self._number()
        given = {"decoder": number, "cache": cache.number, "draws": list(draws), "seen": [len(ids) for ids in seen]}
        flat = np.fromiter((token for ids in seen for token in ids), np.int32)
        with self.command(Command("decoder", given, flat)):
            yield LedSteps(self, number)

    def keep(self, decoder: Any, number: int) -> None:
        """A decoder that was made under `decoder`: freed on all ranks when it goes here."""
        self._decoders.add(decoder)
        weakref.finalize(decoder, self.forget, number)

    def end(self, number: int, kept: int, forget: Callable[[], None]) -> None:
        """The decoders give up what nobody read. Garbage is collected at any time, amidst another command too: then it
        is done before the next one."""
        command = Command("decode", {"decoder": number, "method": "forget", "arguments": [kept]})
        if self._broken is not None:
            return
        if self._quiet or number in self._freed:
            self._late.append((command, forget))
            return
        with self.command(command):
            forget()

    @contextmanager
    def command(self, command: Command) -> Iterator[None]:
        """Announce, then run the body as the others run theirs. An error in the body leaves the ranks out of step:
        afterwards nothing more can be done with them."""
        if self._broken is not None:
            raise KvcoreError(f"the ranks are out of step since {self._broken}; start all of them again")
        quiet, self._quiet = self._quiet, True
        try:
            while self._late:
                late, forget = self._late.pop(0)
                send(self.ranks, late)
                forget()
            while self._freed:
                send(self.ranks, Command("free", {"number": self._freed.pop()}))
            send(self.ranks, command)
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self.ranks.monitor.fail(self._broken, 1)
            raise
        finally:
            self._quiet = quiet

    def step(
        self,
        ids: Sequence[np.ndarray],
        caches: Sequence[StepCache],
        settings: Mapping[str, Any],
        run: Callable[[], Ragged],
    ) -> Ragged:
        """A ragged step over ranked caches: ``ids[i]`` int [B, T]; ``settings`` as `forward_ragged` takes them."""
        ranked = [cache for cache in caches if isinstance(cache, RankedCache)]
        if len(ranked) != len(caches):
            raise UnsupportedError("a step over caches that the other ranks do not share", [])
        numbers, shapes = [cache.number for cache in ranked], [list(part.shape) for part in ids]
        given = {"caches": numbers, "shapes": shapes, "settings": dict(settings)}
        flat = np.concatenate([np.ravel(part) for part in ids]).astype(np.int32)
        with self.command(Command("ragged", given, flat)):
            before = [cache.tokens for cache in ranked]
            ran = run()
            agree(self.ranks, ran.errors, ranked, before)
        return ran

    def announce(self, command: Command) -> None:
        with self.command(command):
            pass

    def forget(self, number: int) -> None:
        """A cache or a decoder is gone; said with the next command, because garbage is collected at any time."""
        self._freed.append(number)

    def close(self) -> None:
        """Tell the others to end, and leave; once."""
        if self._closed:
            return
        self._closed = True
        for decoder in list(self._decoders):
            decoder.release()
        if self._broken is None:
            self.announce(Command("end", {}))
        self.ranks.close()

    def _number(self) -> int:
        self._next += 1
        return self._next


@dataclass(frozen=True, slots=True)
class LedSteps:
    """Rank 0's side of decoders that all ranks have: a `SharedSteps`."""

    leader: Leader
    number: int
    alone: bool = False

    def command(self, method: str, *arguments: Any) -> AbstractContextManager[None]:
        given = {"decoder": self.number, "method": method, "arguments": arguments}
        return self.leader.command(Command("decode", given))

    def end(self, kept: int, forget: Callable[[], None]) -> None:
        self.leader.end(self.number, kept, forget)

    def any(self, happened: bool) -> bool:
        return anywhere(self.leader.ranks, happened)

    def chosen(self, tokens: Any) -> Any:
        return self.leader.ranks.all_sum(tokens)


class RankedCache(Cache):
    """Rank 0's share of a cache."""

    def __init__(self, leader: Leader, number: int, own: Cache) -> None:
        """``own`` holds rank 0's rows, and is not used otherwise."""
        super().__init__(own._ops, own.spec, own.storage, own.decisions)
        self._positions, self._handed_over = own._positions, own._handed_over
        self.leader, self.number = leader, number
        weakref.finalize(self, leader.forget, number)

    def begin_decode(self) -> None:
        if not self.handed_over:
            self._announced("begin_decode", super().begin_decode)

    def commit(self, accepted: int | None = None, pending: int | None = None) -> None:
        self._announced("commit", super().commit, accepted, pending)

    def trim(self, count: int) -> None:
        self._announced("trim", super().trim, count)

    def rewind(self, offset: int) -> int:
        self._announced("rewind", super().rewind, offset)
        return self.offset

    def drop(self, first: int, count: int) -> None:
        self._announced("drop", super().drop, first, count)

    def shorten(self, tokens: int) -> None:
        self._announced("shorten", super().shorten, tokens)

    def export(self) -> CacheRows:
        raise UnsupportedError(FILED, [FILED])

    def load(self, rows: CacheRows) -> None:
        raise UnsupportedError(FILED, [FILED])

    def fork(self) -> Cache:
        return self.leader.fork(self.number, super().fork())

    def run(self, ids: np.ndarray, all_logits: bool, step: Callable[[], np.ndarray]) -> np.ndarray:
        """Announce a step over ``ids`` int [B, T], and run this rank's."""
        with self.leader.command(Command("step", {"cache": self.number, "all_logits": all_logits}, ids)):
            return step()

    def _announced(self, method: str, run: Callable[..., object], *arguments: Any) -> None:
        if self.leader.quiet:
            run(*arguments)
            return
        with self.leader.command(Command("call", {"cache": self.number, "method": method, "arguments": arguments})):
            run(*arguments)


def spec_to_json(spec: CacheSpec) -> dict[str, Any]:
    """A spec as plain values; heads are left to each rank."""
    return asdict(spec) | {"mode": spec.mode.name}
