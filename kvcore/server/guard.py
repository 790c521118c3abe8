"""The outermost layer: who may ask, how much, one line in the log per request, and errors in one shape."""

from __future__ import annotations

import hmac
import json
import logging
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvcore.server.errors import ApiError
from kvcore.server.logs import log, log_exception
from kvcore.server.record import Record
from kvcore.server.state import ServerState

OPEN_PATHS = frozenset({"/", "/health", "/version", "/page/chat.js", "/page/chat.css"})  # no key needed
_QUIET_PATHS = OPEN_PATHS | {"/metrics"}  # polled, so not logged


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state
        key = state.settings.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(f"req-{uuid.uuid4().hex}", scope["method"], scope["path"][:200], self._state.metrics)
        scope["kvcore.record"] = record

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            try:
                self._check(scope)
                await self._app(scope, receive, note_status)
            except ApiError as error:
                record.fail(error)
                await error_response(error)(scope, receive, note_status)
            except ClientDisconnect:  # in the middle of the body
                record.error = "disconnected"
            except Exception as error:
                await self._failed(error, record, scope, receive, note_status)
        finally:
            self._log(scope, record)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if scope["path"] not in OPEN_PATHS:
            self._check_origin(scope, headers)
            self._check_key(headers)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """A page of another site can send requests, if not read the answers: not without being allowed."""
        origin, allowed = headers.get("origin"), self._state.settings.allowed_origins
        if origin is None or "*" in allowed or origin in allowed:
            return
        if urlsplit(origin).netloc != headers.get("host"):
            raise ApiError(403, "this origin is not allowed: --allowed-origins names those that are", code="origin")

    def _check_key(self, headers: Headers) -> None:
        if self._key is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key):
            raise ApiError(
                401,
                "a valid API key is needed: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _failed(self, error: Exception, record: Record, scope: Scope, receive: Receive, send: Send) -> None:
        log_exception(error, id=record.id)
        record.error = "internal"
        if record.status == 0:
            failure = ApiError(500, "the server failed on this request; its log says more", code="internal")
            await error_response(failure)(scope, receive, send)

    def _log(self, scope: Scope, record: Record) -> None:
        if record.usage is not None:
            record.metrics.whole_answer(record.seconds())
        route = scope.get("route")
        record.metrics.responded(getattr(route, "path", "other"), record.status)
        if record.path not in _QUIET_PATHS:
            log("request", logging.INFO if record.status < 500 else logging.WARNING, **record.line())


def error_response(error: ApiError) -> Response:
    """ASCII, so that it can be sent whatever a message repeats."""
    data = json.dumps(error.body(), allow_nan=False).encode()
    return Response(data, error.status, dict(error.headers), media_type="application/json")
