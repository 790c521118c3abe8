"""One replica: a queue, one prompt in prefill, a batch in decode, and the memory of its pages.

Time passes in blocks of alike iterations: between two events the batch is the same and its contexts grow by one token
each per step, so that any number of steps costs one formula.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from kvcore.generate import chunks_of
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
    _running: list[tuple[int, int, Job]] = field(default_factory=list)  # finishing step, a tie-break, the job
    _filling: Job | None = None
    _iterations: int = 0  # that the prompt still takes
    _extra: float = 0.0  # seconds of each of them for the prompt
    _steps: int = 0
    _context: int = 0
    _admitted: int = 0

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
        while self.now < until:
            self._admit()
            if self._filling is None and not self._running:
                return
            self._block(until)

    def _admit(self) -> None:
        """Take the oldest request into prefill, if none is there and its whole length fits."""
        while self._filling is None and self.waiting and len(self._running) < self.max_batch:
            job = self.waiting[0]
            if self.memory is not None and job.bytes > self.memory:
                job.refused = True
                self.waiting.popleft()
                continue
            if self.memory is not None and self.used + job.bytes > self.memory:
                return
            self.waiting.popleft()
            self.used += job.bytes
            self._filling = job
            self._iterations = chunks_of(job.prompt, self.chunk)
            self._extra = self.rates.prefill(job.prompt, self.chunk) / self._iterations

    def _block(self, until: float) -> None:
        """Alike iterations up to the next event."""
        batch = len(self._running)
        count = self._iterations if self._filling is not None else self._running[0][0] - self._steps
        if batch:
            count = min(count, self._running[0][0] - self._steps)
        first = self._extra if self._filling is not None else 0.0
        growth = 0.0
        if batch:
            first += self.rates.decode(batch, self._context)
            growth = batch * self.rates.context_token
        count = min(count, _iterations_to(until - self.now, first, growth))
        seconds = count * first + growth * count * (count - 1) / 2
        self.now += seconds
        self.busy += seconds
        if batch:
            self.gaps.append((seconds / count, batch * count))
            self._steps += count
            self._context += batch * count
        self._finish()
        if self._filling is not None:
            self._iterations -= count
            if self._iterations == 0:
                self._first_token(self._filling)

    def _first_token(self, job: Job) -> None:
        self._filling = None
        job.first_token = self.now
        if job.output == 1:
            self._end(job)
            return
        self._admitted += 1
        heapq.heappush(self._running, (self._steps + job.output - 1, self._admitted, job))
        self._context += job.prompt + 1

    def _finish(self) -> None:
        while self._running and self._running[0][0] <= self._steps:
            _, _, job = heapq.heappop(self._running)
            self._context -= job.prompt + job.output
            self._end(job)

    def _end(self, job: Job) -> None:
        job.finished = self.now
        self.used -= job.bytes


def _iterations_to(seconds: float, first: float, growth: float) -> int:
    """The fewest iterations that take ``seconds`` or more, where each takes ``growth`` longer than the one before."""
    if math.isinf(seconds):
        return 1 << 62
    if growth == 0:
        return max(1, math.ceil(seconds / first))
    half, linear = growth / 2, first - growth / 2
    return max(1, math.ceil((-linear + math.sqrt(linear * linear + 4 * half * seconds)) / (2 * half)))
