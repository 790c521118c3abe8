"""Prefixes that the engine keeps: what is worth keeping, and how much of the budget it may take."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from kvcore.cache import Cache, PrefixCounters, Prefixes
from kvcore.cache.prefix import TRIMMED
from kvcore.engine.config import EngineConfig
from kvcore.engine.memory import Memory
from kvcore.engine.running import Running

log = logging.getLogger(__name__)

SHORTEST = 16  # tokens of a prefix that is worth a look-up
NO_ROOM = "no room in the budget"
FAILED = "keeping it failed"


class PrefixStore:
    """`Prefixes` under the engine's budget. Nothing here ever fails a request."""

    def __init__(self, memory: Memory, config: EngineConfig, running: Callable[[], Sequence[Running]]) -> None:
        self._memory, self._config, self._running = memory, config, running
        self._prefixes = Prefixes(None, memory.cost)
        self._lock = threading.Lock()  # `caches` is called from other threads

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def nbytes(self) -> int:
        return self._prefixes.nbytes

    @property
    def counters(self) -> PrefixCounters:
        return self._prefixes.counters

    def caches(self) -> list[Cache]:
        with self._lock:
            return list(self._prefixes)

    def adopt(self, running: Running) -> tuple[Cache | None, Mapping[str, int]]:
        """A cache with the rows of the longest prefix of the request's prompt that is kept, and what was declined."""
        if not self._config.prefix_reuse or running.request.echo_logprobs:
            return None, {}
        spec = self._memory.spec(running.mode)
        try:
            with self._lock:
                return self._prefixes.look_up(running.prompt, spec)
        except Exception:
            log.exception("a prefix could not be adopted")
            return None, {"adopting it failed": 1}

    def count(self, running: Running, hit: bool, declined: Mapping[str, int]) -> None:
        """Book the look-up of a request that starts."""
        if self._config.prefix_reuse and not running.request.echo_logprobs:
            with self._lock:
                self._prefixes.count(hit, declined)

    def keep(self, running: Running, *, fork: bool) -> None:
        """Keep what a request's cache has seen, or a fork of it where the request goes on."""
        cache = running.cache
        if not self._config.prefix_reuse or cache is None or cache.offset < SHORTEST:
            return
        try:
            if cache.holes:
                self.counters.declined[TRIMMED] += 1
                return
            if not self._room_for(running, self._memory.cost(cache), fork):
                self.counters.declined[NO_ROOM] += 1
                return
            with self._lock:
                self._prefixes.donate(running.tokens[: cache.offset], cache, fork=fork)
        except Exception:
            log.exception("a prefix could not be kept")
            self.counters.declined[FAILED] += 1

    def evict(self, mode: str) -> bool:
        """Let go of the least recently used prefix that takes room of ``mode``'s; False where there is none."""
        with self._lock:
            return self._prefixes.evict(lambda cache: self._memory.shares(cache.mode.name, mode))

    def clear(self) -> None:
        with self._lock:
            self._prefixes.clear()

    def _room_for(self, running: Running, cost: int, fork: bool) -> bool:
        """Let older prefixes go until this one fits beside what is set aside for running requests."""
        most = self._config.prefix_bytes
        others = [each for each in self._running() if fork or each is not running]
        if cost > min(self._memory.room_for_prefix(running.mode, others, 0), cost if most is None else most):
            return False
        while True:
            room = self._memory.room_for_prefix(running.mode, others, self.nbytes)
            if cost <= room and (most is None or self.nbytes + cost <= most):
                return True
            if not self.evict(running.mode):
                return False
