"""One replica: a queue, prompts in prefill, a batch in decode, and the memory of its pages.

An iteration is the engine's (`kvcore.engine.Engine.step`): a token for each sequence of the batch, then a chunk's worth
of prompts. While nothing but lengths changes, any number of iterations costs one formula.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import deque
from dataclasses import dataclass, field

from kvcore.generate import chunk_end, chunks_of
from kvcore.planning.rates import Rates


@dataclass(slots=True)
class Job:
    """A request; times in seconds. ``bytes`` of cache are reserved for it while it is admitted."""

    arrived: float
    prompt: int
    output: int
    bytes: int
    first_token: float = math.nan
    finished: float = math.nan
    refused: bool = False


@dataclass(slots=True)
class Replica:
    """``memory`` in bytes for the cache, None without a limit; at most ``max_batch`` sequences at a time."""

    rates: Rates
    memory: int | None
    max_batch: int
    chunk: int
    now: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    gaps: list[tuple[float, int]] = field(default_factory=list)  # seconds between tokens, how many of them
    used: int = 0
    busy: float = 0.0
    steps: int = 0  # of decode
    _running: list[tuple[int, int, Job]] = field(default_factory=list)  # finishing step, a tie-break, the job
    _filling: Job | None = None
    _filled: int = 0  # tokens of its prompt that ran
    _context: int = 0
    _admitted: int = 0
    _decoded: float = 0.0  # when the last step of decode ended
    _joined: list[float] = field(default_factory=list)  # first tokens since then

    @property
    def load(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self._running) + (self._filling is not None)

    def submit(self, job: Job) -> None:
        if self.load == 0:
            self.now = max(self.now, job.arrived)
        self.waiting.append(job)

    def advance(self, until: float) -> None:
        """Go on to ``until``, or to the end of the iteration that runs then."""
        while self.now < until and self.load:
            if not self._repeat(until):
                self._decode()
                self._prefill()

    def _repeat(self, until: float) -> bool:
        """Several iterations at once, where no sequence comes or goes and each takes as much of the same prompt."""
        batch, job = len(self._running), self._filling
        if self._joined or (job is None and (not batch or self._fits())):
            return False
        count = self._running[0][0] - self.steps - 1 if batch else sys.maxsize
        decode = self.rates.decode(batch, self._context) if batch else 0.0
        longer, piece, growth = batch * self.rates.context_token, 0.0, 0.0
        if job is not None:
            count = min(count, chunks_of(job.prompt - self._filled, self.chunk) - 1)
            piece, growth = self.rates.piece(self._filled, self.chunk), self.chunk**2 * self.rates.prompt_pair
        if count < 2:
            return False
        count = min(count, _iterations_to(until - self.now, decode + piece, longer + growth))
        self._pass(count * (decode + piece) + (longer + growth) * count * (count - 1) / 2)
        if job is not None:
            piece += growth * (count - 1)
            self._filled += count * self.chunk
        if batch:
            self.steps += count
            self._context += batch * count
            self.gaps.append(((self.now - piece - self._decoded) / count, batch * count))
            self._decoded = self.now - piece
        return True

    def _decode(self) -> None:
        """A token for each sequence."""
        batch = len(self._running)
        if not batch:
            return
        self._pass(self.rates.decode(batch, self._context))
        self.steps += 1
        self._context += batch
        if batch > len(self._joined):
            self.gaps.append((self.now - self._decoded, batch - len(self._joined)))
        self.gaps.extend((self.now - first, 1) for first in self._joined)
        self._joined.clear()
        self._decoded = self.now
        while self._running and self._running[0][0] == self.steps:
            _, _, job = heapq.heappop(self._running)
            self._context -= job.prompt + job.output
            self._end(job)

    def _prefill(self) -> None:
        """Chunks of prompts, the oldest request's first, as long as the next is not longer than what is left."""
        left = self.chunk
        while left > 0 and (job := self._filling or self._admit()) is not None:
            size = chunk_end(self._filled + self.chunk, job.prompt, self.chunk) - self._filled
            if size > left and left < self.chunk:
                return
            left -= size
            self._pass(self.rates.piece(self._filled, size))
            self._filled += size
            if self._filled >= job.prompt:
                self._first_token(job)

    def _fits(self) -> bool:
        """Whether the oldest request can begin. Those that never can are refused."""
        while self.waiting and self.memory is not None and self.waiting[0].bytes > self.memory:
            self.waiting.popleft().refused = True
        if not self.waiting or len(self._running) >= self.max_batch:
            return False
        return self.memory is None or self.used + self.waiting[0].bytes <= self.memory

    def _admit(self) -> Job | None:
        if not self._fits():
            return None
        self._filling, self._filled = self.waiting.popleft(), 0
        self.used += self._filling.bytes
        return self._filling

    def _first_token(self, job: Job) -> None:
        self._filling = None
        job.first_token = self.now
        if job.output == 1:
            self._end(job)
            return
        self._admitted += 1
        heapq.heappush(self._running, (self.steps + job.output - 1, self._admitted, job))
        self._context += job.prompt + 1
        self._joined.append(self.now)

    def _end(self, job: Job) -> None:
        job.finished = self.now
        self.used -= job.bytes

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds


def _iterations_to(seconds: float, first: float, growth: float) -> int:
    """The fewest iterations that take ``seconds`` or more, where each takes ``growth`` longer than the one before."""
    if math.isinf(seconds):
        return sys.maxsize
    if growth == 0:
        return max(1, math.ceil(seconds / first))
    half, linear = growth / 2, first - growth / 2
    return max(1, math.ceil((-linear + math.sqrt(linear * linear + 4 * half * seconds)) / (2 * half)))
