"""An engine without a model: it says what a script tells it, token by token, from a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcore.engine.config import EngineStats, KvUse, Pages
from kvcore.engine.types import (
    Failure,
    FinishReason,
    Listener,
    NotReadyError,
    Output,
    QueueFullError,
    Request,
    TokenLogprob,
    Usage,
)
from kvcore.text import Detokenizer, StopMatcher, Tokenizer

NOT_FINITE = Failure("the model's logits are not finite", "not_finite")
Script = Callable[[Request], Sequence[int]]


@dataclass
class _Running:
    request: Request
    listener: Listener
    ids: list[int]
    detokenizer: Detokenizer
    stops: StopMatcher
    made: int = 0
    prompt_done: int = 0


@dataclass
class FakeEngine:
    """``script`` gives a request's tokens; after them comes the end. One token of each request per step."""

    tokenizer: Tokenizer
    script: Script
    step_seconds: float = 0.0
    prefill_step: int = 10**9
    max_queue: int = 1000
    most_open: int = 1000
    refusals: dict[str, Exception] = field(default_factory=dict)
    fail_after: int | None = None
    failure: Failure = NOT_FINITE
    hold: threading.Event = field(default_factory=threading.Event)  # clear it: no step is made
    cancelled: list[str] = field(default_factory=list)
    submitted: list[Request] = field(default_factory=list)
    refuse: Exception | None = None
    healthy: bool = True

    def __post_init__(self) -> None:
        self.hold.set()
        self._lock = threading.Condition()
        self._running: dict[str, _Running] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> None:
        with self._lock:
            if not self.healthy:
                raise NotReadyError("the engine has failed; start it anew")
            if self.refuse is not None:
                raise self.refuse
            if len(self._running) >= self.max_queue:
                raise QueueFullError(f"{self.max_queue} requests wait, as many as may: try again", 2.5)
            self.submitted.append(request)
            stops = StopMatcher(request.params.stop)
            self._running[request.id] = _Running(
                request, listener, list(self.script(request)), Detokenizer(self.tokenizer), stops
            )
            self._lock.notify()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if self._running.pop(request_id, None) is not None:
                self.cancelled.append(request_id)

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(
                running=len(self._running),
                waiting=0,
                kv={"fp16": KvUse(2 * 2**20, 2**20, 2**30, {"raw": Pages(7, 3, 1)})},
                budget=2**30,
                prefixes=2,
                prefix_hits=5,
                prefix_misses=4,
                prefix_declined={"no room": 3},
                cached_tokens=640,
                prompt_tokens=1280,
                generated_tokens=99,
                preemptions=1,
                steps=50,
                finished={"stop": 8, "length": 2},
                fallbacks={"head_dim 80": 6},
                listener_errors=0,
                batching="one at a time",
                healthy=self.healthy,
            )

    def stop(self, timeout: float = 30.0) -> None:
        with self._lock:
            self._stopped = True
            self._lock.notify()
        self._thread.join(timeout)

    def _loop(self) -> None:
        while True:
            with self._lock:
                while not self._running and not self._stopped:
                    self._lock.wait()
                if self._stopped:
                    return
                batch = list(self._running.values())
            self.hold.wait()
            if self.step_seconds:
                time.sleep(self.step_seconds)
            for each in batch:
                self._step(each)

    def _step(self, each: _Running) -> None:
        with self._lock:
            if each.request.id not in self._running:
                return
        total = len(each.request.prompt)
        if each.prompt_done < total:
            each.prompt_done = min(total, each.prompt_done + self.prefill_step)
            if each.prompt_done < total:
                self._emit(each, "", (), None)
                return
        if self.fail_after is not None and each.made >= self.fail_after:
            self._end(each, "", (), "error", self.failure)
            return
        token = each.ids[each.made] if each.made < len(each.ids) else self.tokenizer.eos_token_ids[0]
        tokens = self._prompt_logprobs(each) if not each.made else ()
        each.made += 1
        if each.request.logprobs is not None:
            tokens = (*tokens, _logprob(token, each.request.logprobs))
        if token in self.tokenizer.eos_token_ids:
            piece, stopped = each.stops.push(each.detokenizer.flush())
            self._end(each, piece if stopped else piece + each.stops.flush(), tokens, "stop")
            return
        piece, stopped = each.stops.push(each.detokenizer.add(token))
        if stopped:
            self._end(each, piece, tokens, "stop")
        elif each.made >= each.request.params.max_tokens:
            rest, stopped = each.stops.push(each.detokenizer.flush())
            self._end(each, piece + rest + ("" if stopped else each.stops.flush()), tokens, "length")
        else:
            self._emit(each, piece, tokens, None)

    def _prompt_logprobs(self, each: _Running) -> tuple[TokenLogprob, ...]:
        if not each.request.echo_logprobs:
            return ()
        first, *rest = each.request.prompt
        return (TokenLogprob(first, None), *(_logprob(token, each.request.logprobs or 0) for token in rest))

    def _end(
        self,
        each: _Running,
        text: str,
        tokens: tuple[TokenLogprob, ...],
        reason: FinishReason,
        failure: Failure | None = None,
    ) -> None:
        with self._lock:
            if self._running.pop(each.request.id, None) is None:
                return
        self._emit(each, text, tokens, reason, failure)

    def _emit(
        self,
        each: _Running,
        text: str,
        tokens: tuple[TokenLogprob, ...],
        reason: FinishReason | None,
        failure: Failure | None = None,
    ) -> None:
        usage = Usage(len(each.request.prompt), each.made, len(each.request.prompt) // 2)
        error, code = (failure.message, failure.code) if failure else (None, None)
        each.listener(Output(each.request.id, text, usage, tokens, each.prompt_done, reason, error, code))


def _logprob(token: int, count: int) -> TokenLogprob:
    """The token itself is the likeliest; the ids after it follow."""
    return TokenLogprob(token, -0.125, tuple((token + i, -0.125 - i) for i in range(count)))
