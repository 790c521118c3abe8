"""The way from the engine's thread to a request's coroutine: bounded, and never blocking the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcore.engine.types import Output, Request
from kvcore.server.errors import ApiError, refusal, unavailable
from kvcore.server.logs import log_exception
from kvcore.server.served import EngineLike

STREAM_BUFFER = 1024  # pieces that wait for a client before its request is cancelled


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of choice ``index``, and when the engine made it (`time.perf_counter`)."""

    index: int
    output: Output
    at: float


class Subscription:
    """The outputs of some requests, in the order in which they come. Use it on one event loop.

    `next` raises ApiError where the server ends the requests (`abort`), and where the reader is so slow that ``limit``
    pieces wait (None: no limit, for a reader that gathers everything anyway).
    """

    def __init__(self, engine: EngineLike, requests: Sequence[Request], limit: int | None = STREAM_BUFFER) -> None:
        self._engine, self._limit = engine, limit
        self._loop = asyncio.get_running_loop()
        self._indices = {request.id: index for index, request in enumerate(requests)}
        self._requests = requests
        self._running: set[str] = set()
        self._events: list[Event] = []
        self._wake = asyncio.Event()
        self.ended = asyncio.Event()  # by `abort` or a full buffer
        self._error: ApiError | None = None

    def submit(self, prompt_param: str) -> None:
        """Hand all requests to the engine, or none. ApiError where it refuses one."""
        for request in self._requests:
            self._running.add(request.id)
            try:
                self._engine.submit(request, self._listener())
            except Exception as error:
                self._running.discard(request.id)
                self.cancel()
                refused = refusal(error, prompt_param)
                if refused.status == 500:
                    log_exception(error, id=request.id)
                raise refused from error

    async def next(self, timeout: float | None = None) -> list[Event]:
        """The pieces that have come, at least one; none where ``timeout`` seconds pass without."""
        if not self._events and self._error is None:
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), timeout)
            except TimeoutError:
                return []
        if self._error is not None:
            raise self._error
        events, self._events = self._events, []
        return events

    def cancel(self) -> None:
        """End what still runs; the engine frees its pages at the next step."""
        for request_id in list(self._running):
            self._engine.cancel(request_id)
        self._running.clear()

    def abort(self, error: ApiError) -> None:
        """`cancel`, and let `next` raise ``error`` instead of what still waits."""
        if self._error is None:
            self._error = error
            self.cancel()
            self.ended.set()
            self._wake.set()

    def _listener(self) -> Callable[[Output], None]:
        def listen(output: Output) -> None:
            event = Event(self._indices[output.request_id], output, time.perf_counter())
            try:
                self._loop.call_soon_threadsafe(self._put, event)
            except RuntimeError:  # the loop has closed: nobody reads any more
                return

        return listen

    def _put(self, event: Event) -> None:
        if event.output.finish_reason is not None:
            self._running.discard(event.output.request_id)
        if self._error is not None:
            return
        self._events.append(event)
        self._wake.set()
        if self._limit is not None and len(self._events) > self._limit:
            self.abort(unavailable(f"the client left {self._limit} pieces unread", "slow_client"))
