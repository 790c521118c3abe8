"""The engine: requests join and leave at any step, and long prompts are prefilled between the steps of running streams.

One thread runs the model. A step lets every decoding sequence advance by one token, and then takes at most
``prefill_step`` tokens of prompts, the oldest request first. Requests start in the order in which they came.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import Counter, deque

import numpy as np

from kvcore.engine.config import EngineConfig, EngineStats
from kvcore.engine.limits import Limits, chunk_of, make_memory
from kvcore.engine.memory import Amount, beyond, covers
from kvcore.engine.prefixes import PrefixStore
from kvcore.engine.running import Running, pieces
from kvcore.engine.steps import Stepper, failure_of
from kvcore.engine.types import (
    BudgetError,
    Failure,
    FinishReason,
    Listener,
    NotReadyError,
    Output,
    QueueFullError,
    Request,
)
from kvcore.errors import NOT_FINITE, InputError, is_out_of_memory
from kvcore.runtime import Model
from kvcore.sampling import Sampler
from kvcore.text import Answer

log = logging.getLogger(__name__)

NO_LOGITS = Failure(NOT_FINITE, "not_finite")
STOPPED = Failure("the engine was stopped before this request was done", "shutdown")
SHUTTING_DOWN = Failure("the server is shutting down: try another one, or later", "shutdown")
FAILED = Failure("the engine failed while this request ran: see the log", "internal")
MAX_FAILURES = 3  # times that a request is run again after memory ran out


class Engine:
    """Runs many requests on one model. `submit`, `cancel` and `stats` may be called from any thread; listeners are
    called from the engine's."""

    def __init__(self, model: Model, config: EngineConfig = EngineConfig()) -> None:  # noqa: B008
        """InputError for a configuration that cannot be, CapacityError where the budget holds no page or the device has
        no such memory."""
        self.model, self.config = model, config
        self._memory = make_memory(model, config)
        self._limits = Limits(model, config, self._memory)
        self._chunk = chunk_of(model, config)
        self._prefixes = PrefixStore(self._memory, config, lambda: self._running)
        self._stepper = Stepper(model, config.max_batch)
        self._wake = threading.Condition()
        self._inbox: list[Running] = []  # submitted and not yet seen by the engine's thread
        self._cancelled: set[str] = set()
        self._open: dict[str, Running] = {}  # everything that has no finish reason yet
        self._waiting: list[tuple[int, Running]] = []  # a heap by order
        self._running: list[Running] = []  # in order
        self._outbox: deque[tuple[Running, Output]] = deque()  # to be told while the device computes
        self._orders = 0
        self._changes = 0  # times that room became free
        self._blocked = (0, 0)  # the request that found no room, and the changes until then
        self._accepting, self._stopping, self._healthy = True, False, True
        self._thread: threading.Thread | None = None
        self._finished: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    # From any thread

    def start(self) -> None:
        """Run steps in a thread of the engine's own."""
        if self._thread is not None:
            raise InputError("the engine runs already")
        self._thread = threading.Thread(target=self._loop, name="kvcore-engine", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Refuse new requests, end those that have not started with an error, and let running ones finish for
        ``timeout`` seconds; what runs then ends with an error too."""
        with self._wake:
            self._accepting, self._stopping = False, True
            self._wake.notify_all()
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            self._thread.join(timeout)
        with self._wake:
            self._healthy = False
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(max(5.0, deadline - time.monotonic()))
        if self._thread is None or not self._thread.is_alive():
            self._end_all(STOPPED)
            self._prefixes.clear()

    @property
    def most_open(self) -> int:
        """Requests that may run and wait at a time."""
        return self.config.max_batch + self.config.max_queue

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request. ``listener`` gets its output piece by piece, the last one with a finish reason.

        Raises InputError for what cannot be run, ContextLengthError, BudgetError, QueueFullError (with the seconds
        after which to try again), NotReadyError where the engine stops or has failed.
        """
        mode, limit = self._limits.check(request)
        model = self.model
        answer = Answer(model.tokenizer, request.params.stop, model.eos_token_ids, limit)
        with self._wake:
            if not self._accepting or not self._healthy:
                raise NotReadyError("the engine " + ("is stopping" if self._healthy else "has failed; start it anew"))
            if request.id in self._open:
                raise InputError(f"request id {request.id!r} is in use")
            if len(self._open) >= self.most_open:
                most = f"{self.most_open} requests run or wait, as many as may"
                raise QueueFullError(f"{most}: try again later", self._retry_after())
            self._orders += 1
            chunk, sampler = self._chunk, Sampler(request.params)
            running = Running(request, listener, mode, self._orders, limit, chunk, answer, sampler)
            self._open[request.id] = running
            self._inbox.append(running)
            self._wake.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a request before the next step, with finish reason "cancelled". Ids that are not open are ignored."""
        with self._wake:
            if request_id in self._open:
                self._cancelled.add(request_id)
                self._wake.notify_all()

    def stats(self) -> EngineStats:
        with self._wake:
            running, opened = list(self._running), len(self._open)
        counters = self._prefixes.counters
        return EngineStats(
            running=len(running),
            waiting=opened - len(running),
            kv=self._memory.uses(running, self._prefixes.caches()),
            budget=self._memory.budget,
            prefixes=len(self._prefixes),
            prefix_hits=counters.hits,
            prefix_misses=counters.misses,
            prefix_declined=dict(counters.declined),
            cached_tokens=self._counts["cached"],
            prompt_tokens=self._counts["prompt"],
            generated_tokens=self._counts["generated"],
            preemptions=self._counts["preemptions"],
            steps=self._counts["steps"],
            finished=dict(self._finished),
            fallbacks=dict(self._fallbacks),
            listener_errors=self._counts["listener errors"],
            batching=self._memory.words,
            decoding=self._stepper.words,
            healthy=self._healthy,
        )

    # The engine's thread

    def step(self) -> bool:
        """One step, in the caller's thread; False where there was nothing to do. For programs with a loop of their own:
        never beside `start`."""
        worked = self._step()
        self._deliver()
        return worked

    def _step(self) -> bool:
        self._collect()
        decoding = [running for running in self._running if running.decoding]
        worked = self._decode(decoding) | self._prefill()
        if worked:
            self._counts["steps"] += 1
        return worked

    def _loop(self) -> None:
        try:
            while self._healthy:
                if self._step():
                    continue
                self._deliver()
                with self._wake:
                    if self._stopping and not self._open:
                        return
                    if not self._inbox and not self._cancelled and self._healthy:
                        self._wake.wait(0.5 if self._waiting or self._running else None)
        except BaseException:
            log.exception("the engine failed")
            self._end_all(FAILED)
        else:
            self._end_all(STOPPED)

    def _collect(self) -> None:
        """Take in what other threads asked for since the last step."""
        with self._wake:
            inbox, self._inbox = self._inbox, []
            gone = [self._open[name] for name in self._cancelled if name in self._open]
            self._cancelled.clear()
            stopping = self._stopping
        for running in inbox:
            heapq.heappush(self._waiting, (running.order, running))
        for running in gone:
            running.cancelled = True
        ended = 0
        for running in [*self._running, *(running for _, running in self._waiting)]:
            if running.cancelled:
                self._finish(running, "cancelled", running.answer.flush() if running.started else "")
                ended += 1
            elif stopping and not running.started:
                self._finish(running, "error", failure=SHUTTING_DOWN)
                ended += 1
        if ended:
            waiting = [entry for entry in self._waiting if self._open.get(entry[1].request.id) is entry[1]]
            heapq.heapify(waiting)
            self._waiting = waiting

    def _decode(self, batch: list[Running]) -> bool:
        """One token for every sequence."""
        batch = self._make_room(batch)
        if not batch:
            self._deliver()
            return False
        ids = [np.asarray([[running.answer.tokens[-1]]], np.int32) for running in batch]
        for running, result in zip(batch, self._stepper.decode(batch, ids, self._deliver), strict=True):
            if isinstance(result, Exception):
                self._failed(running, result)
            elif isinstance(result, int):
                self._take(running, result)
            else:
                self._sample(running, result[-1])
        return True

    def _prefill(self) -> bool:
        """Chunks of prompts, the oldest request's first; a new request starts where there is time for its first one."""
        left = self._chunk
        while left > 0:
            running = next((each for each in self._running if not each.decoding), None) or self._start_next()
            if running is None:
                break
            ids = running.chunk()
            if ids.shape[1] > left and left < self._chunk:
                break
            left -= ids.shape[1]
            if self._make_room([running]):
                self._run_chunk(running, ids)
        return left < self._chunk

    def _run_chunk(self, running: Running, ids: np.ndarray) -> None:
        assert running.cache is not None
        self._deliver()  # a chunk takes long
        start, echo = running.offset, running.request.echo_logprobs
        logits: list[np.ndarray] = []
        for part in pieces(ids, running.cache.step_limit):
            result = self._stepper.prefill(running, part, all_logits=echo and start < len(running.prompt))
            if isinstance(result, Exception):
                self._failed(running, result)
                return
            logits.append(result)
        self._counts["prompt"] += ids.shape[1]
        if echo and start < len(running.prompt):
            running.note_prompt(start, np.concatenate(logits))
        if not np.isfinite(logits[-1][-1]).all():
            self._finish(running, "error", failure=NO_LOGITS)
            return
        if running.offset == len(running.prompt):
            try:
                running.cache.begin_decode()
            except Exception as error:
                self._failed(running, error)
                return
            self._prefixes.keep(running, fork=True)
        if running.offset >= running.target:
            running.covered = self._planned(running)
            running.reserved = self._needs(running, running.covered)
            self._changes += 1
            if not running.answer.tokens:
                self._sample(running, logits[-1][-1])
                return
        self._tell(running)

    def _sample(self, running: Running, logits: np.ndarray) -> None:
        """The next token of one request. Whatever goes wrong is its own affair."""
        if not np.isfinite(logits).all():
            self._finish(running, "error", failure=NO_LOGITS)
            return
        try:
            generated = running.answer.tokens
            token = running.sampler(logits, (*running.prompt, *generated), generated)
        except Exception as error:
            self._failed(running, error)
            return
        self._take(running, token, logits)

    def _take(self, running: Running, token: int, logits: np.ndarray | None = None) -> None:
        """What a token means for the request's answer. Without ``logits`` nobody asks for log-probabilities."""
        try:
            reason, text = running.answer.add(token)
            if logits is not None and (reason != "stop" or token not in self.model.eos_token_ids):
                running.note(token, logits)
        except Exception as error:
            self._failed(running, error)
            return
        self._counts["generated"] += 1
        if reason is None:
            if text:
                self._tell(running, text)
            return
        self._finish(running, "stop" if reason == "stop" else "length", text)

    # Coming and going

    def _start_next(self) -> Running | None:
        """The oldest waiting request, if there is room for it now; rows of a prefix are adopted here."""
        while self._waiting and len(self._running) < self.config.max_batch:
            running = self._waiting[0][1]
            if self._blocked == (running.order, self._changes):
                return None
            try:
                adopted, declined = self._prefixes.adopt(running)
                cache = adopted or self._memory.new_cache(running.mode)
                needs = self._needs(running, self._planned(running))
                if not self._free(running.mode, beyond(needs, self._memory.held(cache))):
                    if self._running:
                        self._blocked = running.order, self._changes
                        return None
                    needed = self._memory.describe(running.mode, needs)
                    raise BudgetError(f"needs {needed} for its cache, more than is free with nothing running")
            except Exception as error:
                heapq.heappop(self._waiting)
                self._finish(running, "error", failure=failure_of(error))
                continue
            heapq.heappop(self._waiting)
            running.cache, running.reserved, running.covered = cache, needs, self._planned(running)
            if not running.started:
                running.started, running.cached = True, cache.offset
                self._prefixes.count(running, adopted is not None, declined)
                self._counts["cached"] += cache.offset
                self._fallbacks.update(
                    each.explain() for each in cache.decisions if each.kind == "graph" and each.rejected
                )
            with self._wake:
                self._running.append(running)
                self._running.sort(key=lambda each: each.order)
            return running
        return None

    def _needs(self, running: Running, tokens: int) -> Amount:
        prompt = len(running.prompt) if running.offset < len(running.prompt) else 0
        return self._memory.needs(running.mode, prompt, tokens)

    def _planned(self, running: Running) -> int:
        """Tokens that room is set aside for."""
        reserve = self.config.decode_reserve
        most = len(running.prompt) + running.limit
        return most if reserve is None else min(most, running.length + reserve)

    def _free(self, mode: str, wanted: Amount) -> bool:
        """Let prefixes go until ``wanted`` is free beside what is set aside; False, and none goes, where all of them
        are not enough."""
        checked = False
        while not covers(self._memory.room(mode, self._running, self._prefixes.nbytes), wanted):
            if not checked and not covers(self._memory.at_best(mode, self._running, self._prefixes.caches()), wanted):
                return False
            checked = True
            if not self._prefixes.evict(mode):
                return False
        return True

    def _youngest(self, mode: str) -> list[Running]:
        """Running requests that take room from ``mode``, the youngest last."""
        return [running for running in self._running if self._memory.shares(running.mode, mode)]

    def _make_room(self, batch: list[Running]) -> list[Running]:
        """Set aside what a step of these takes. Where it is not there prefixes go, and then the youngest requests,
        which are run again later. Returns those that are left."""
        for running in batch:
            if running.cache is None:
                continue
            tokens = max(running.length, running.offset + 1)
            if tokens <= running.covered:
                continue
            needs = self._needs(running, tokens)
            if covers(running.reserved, needs):
                continue
            planned = self._needs(running, self._planned(running))
            if self._free(running.mode, beyond(planned, running.reserved)):
                running.reserved, running.covered = planned, self._planned(running)
                continue
            while running.cache is not None and not self._free(running.mode, beyond(needs, running.reserved)):
                self._preempt(self._youngest(running.mode)[-1])
            if running.cache is not None:
                running.reserved = needs
        for mode in {running.mode for running in batch}:
            if self._free(mode, self._memory.margin(mode, len(batch))):
                continue
            none = tuple(0 for _ in self._memory.capacity(mode))
            while len(young := self._youngest(mode)) > 1 and not self._free(mode, none):
                self._preempt(young[-1])
        return [running for running in batch if running.cache is not None]

    def _preempt(self, running: Running) -> None:
        """Give up a request's rows; it goes back to its place in the queue, with the tokens that it has."""
        self._counts["preemptions"] += 1
        self._leave(running)
        heapq.heappush(self._waiting, (running.order, running))

    def _failed(self, running: Running, error: Exception) -> None:
        """Something went wrong for one request: run it again where memory ran out, else end it."""
        error.__traceback__ = None  # its frames hold rows
        if is_out_of_memory(error):
            running.failures += 1
            while self._prefixes.evict(running.mode):
                pass
            if running.failures < MAX_FAILURES:
                self._preempt(running)
                return
        self._finish(running, "error", failure=failure_of(error))

    def _finish(self, running: Running, reason: FinishReason, text: str = "", failure: Failure | None = None) -> None:
        if reason in ("stop", "length"):
            self._prefixes.keep(running, fork=False)
        self._leave(running)
        with self._wake:
            self._open.pop(running.request.id, None)
        self._finished[reason] += 1
        running.cancelled = False
        self._tell(running, text, reason, failure)

    def _leave(self, running: Running) -> None:
        with self._wake:
            if running in self._running:
                self._running.remove(running)
        self._changes += 1
        running.cache, running.reserved, running.covered = None, (), 0

    def _tell(
        self, running: Running, text: str = "", reason: FinishReason | None = None, failure: Failure | None = None
    ) -> None:
        self._outbox.append((running, running.output(text, reason, failure)))

    def _deliver(self) -> None:
        """Tell what there is to tell."""
        while self._outbox:
            running, output = self._outbox.popleft()
            try:
                running.listener(output)
            except Exception:
                log.exception("a listener failed; its request is cancelled")
                self._counts["listener errors"] += 1
                running.cancelled = True

    def _end_all(self, problem: Failure) -> None:
        with self._wake:
            self._healthy = False
            left = list(self._open.values())
            self._waiting.clear()
            self._inbox.clear()
        for running in left:
            self._finish(running, "error", failure=problem)
        self._deliver()

    def _retry_after(self) -> float:
        """A guess from how fast requests finish: seconds until one more may wait."""
        oldest = min((running.arrived for running in self._running), default=time.monotonic())
        return float(min(60.0, max(1.0, (time.monotonic() - oldest) / max(1, len(self._running)))))
