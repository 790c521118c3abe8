"""An answer on its way to a client: whole or as a stream, given up as soon as nobody reads it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvcore.engine.types import Usage
from kvcore.server import bodies
from kvcore.server.choice import Choice
from kvcore.server.errors import ApiError
from kvcore.server.prepare import Plan
from kvcore.server.record import Record
from kvcore.server.served import Served
from kvcore.server.subscription import Event, Subscription

_FLUSH_SECONDS = 1.0  # for the last event of a stream that the server ends


class Answer(Response):
    """Sends the answer to ``plan``. The requests must be submitted already."""

    def __init__(
        self,
        plan: Plan,
        served: Served,
        subscription: Subscription,
        record: Record,
        *,
        open_answers: set[Subscription],
        keep_alive: float,
    ) -> None:
        super().__init__()
        self._open = open_answers
        self._plan, self._served, self._subscription, self._record = plan, served, subscription, record
        self._keep_alive = keep_alive
        self._choices = [Choice(plan, served, index) for index in range(len(plan.requests))]
        self._head = bodies.head(plan, served, chunk=True)
        self._spoke: set[int] = set()
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._open.add(self._subscription)
        work = asyncio.create_task(self._stream(send) if self._plan.stream else self._whole(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        ended = asyncio.create_task(self._subscription.ended.wait())
        try:
            await asyncio.wait((work, gone, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not work.done():
                # The error goes out unless the client does not read; then the connection is given up.
                await asyncio.wait((work, gone), timeout=_FLUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._record.finish("disconnected")
        finally:
            self._subscription.cancel()
            if any(choice.usage is not None for choice in self._choices):
                self._record.usage = self._usage()
            self._open.discard(self._subscription)
            for task in (work, gone, ended):
                task.cancel()
            await asyncio.wait((work, gone, ended))
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: list[list[str]] = [[] for _ in self._choices]
        placed: list[list[Any]] = [[] for _ in self._choices]
        while any(choice.finish_reason is None for choice in self._choices):
            for event in await self._subscription.next():
                text, tokens = self._take(event)
                texts[event.index].append(text)
                placed[event.index] += tokens
        await JSONResponse(self._body(["".join(pieces) for pieces in texts], placed))(scope, receive, send)

    def _body(self, texts: list[str], placed: list[list[Any]]) -> bodies.Json:
        plan, served = self._plan, self._served
        if plan.endpoint == "native":
            (choice,) = self._choices
            return bodies.native_body(plan, served, texts[0], choice.usage or Usage(0, 0, 0), choice.finish_reason)
        choices = [
            bodies.whole_choice(plan, served, c.index, texts[c.index], placed[c.index], c.finish_reason)
            for c in self._choices
        ]
        return bodies.head(plan, served, chunk=False) | {"choices": choices, "usage": self._usage()}

    async def _stream(self, send: Send) -> None:
        """The first piece is awaited before the status goes out, so that an early failure still has its own."""
        try:
            async for data in self._pieces():
                await self._send(send, data)
        except ApiError as error:
            if not self._started:
                raise
            self._record.fail(error)
            await self._send(send, _event(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            headers.append((b"x-accel-buffering", b"no"))  # nginx would hold pieces back
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Events as bytes; what comes while a slow client is written to goes out in one."""
        comment_due = time.monotonic()
        while any(choice.finish_reason is None for choice in self._choices):
            events = await self._subscription.next(self._keep_alive)
            data = bytearray()
            for event in events:
                try:
                    data += b"".join(map(_event, self._chunks(event)))
                except ApiError:
                    if data:
                        yield bytes(data)
                    raise
            if data:
                yield bytes(data)
            elif not events:
                yield b": keep-alive\n\n"
            elif time.monotonic() >= comment_due and not (last := events[-1].output).usage.completion_tokens:
                comment_due = time.monotonic() + 1
                yield b": prompt %d/%d\n\n" % (last.prompt_done, last.usage.prompt_tokens)
        if self._plan.include_usage:
            yield _event(self._head | {"choices": [], "usage": self._usage()})
        if self._plan.endpoint != "native":
            yield b"data: [DONE]\n\n"

    def _chunks(self, event: Event) -> Iterable[bodies.Json]:
        """What ``event`` adds to the stream. ApiError where it is a failure."""
        text, placed = self._take(event)
        plan, served, choice = self._plan, self._served, self._choices[event.index]
        reason, first = choice.finish_reason, event.index not in self._spoke
        if plan.endpoint == "native":
            if text:
                yield bodies.native_chunk(text)
            if reason is not None:
                yield bodies.native_body(plan, served, "", choice.usage or Usage(0, 0, 0), reason)
            return
        if not text and reason is None:
            return
        self._spoke.add(event.index)
        if first and plan.endpoint == "chat":
            yield self._chunk(bodies.role_choice(choice.index))
        if text:
            yield self._chunk(bodies.delta_choice(plan, served, choice.index, text, placed, None))
        if reason is not None:
            rest = [] if text else placed
            yield self._chunk(bodies.delta_choice(plan, served, choice.index, "", rest, reason))

    def _take(self, event: Event) -> tuple[str, list[Any]]:
        choice = self._choices[event.index]
        text, placed = choice.take(event.output)
        self._record.saw(event)
        if choice.finish_reason is not None:
            self._record.finish(choice.finish_reason)
        return text, placed

    def _usage(self) -> bodies.Json:
        usages = [choice.usage for choice in self._choices]
        return bodies.usage_body(usages, self._plan.n, prompt_only=self._plan.prompt_only)

    def _chunk(self, choice: bodies.Json) -> bodies.Json:
        usage = {"usage": None} if self._plan.include_usage else {}
        return self._head | {"choices": [choice]} | usage


def _event(value: bodies.Json) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
