"""Where HTTP requests come in: each is passed, whole, to the replica that its conversation belongs to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvcore.integrations.ray_serve.replica import Call
from kvcore.server.affinity import affinity_key

MAX_BODY = 32 * 2**20
LOST = "the replica that ran this request has ended: send it again"
TRIES = 3  # a request of which nothing has been answered yet may run anew


class Ingress:
    """Ray runs one on each node that takes HTTP requests."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return JSONResponse(_error(f"the body is longer than {MAX_BODY} bytes", "invalid_request_error"), 413)
        path = request.url.path
        call = Call(request.method, path, request.url.query.encode(), tuple(request.headers.raw), body)
        for attempt in range(TRIES):
            messages = aiter(self._replicas.answer.remote(affinity_key(path, body), call))
            try:
                start = await anext(messages)
                break
            except RayActorError:
                if attempt == TRIES - 1:
                    return JSONResponse(_error(LOST, "server_error"), 503, {"retry-after": "5"})
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
        streamed = any(name == "content-type" and value.startswith("text/event-stream") for name, value in headers)
        response = StreamingResponse(_rest(messages, streamed), start["status"])
        response.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        return response


async def _rest(messages: AsyncIterator[dict[str, Any]], streamed: bool) -> AsyncIterator[bytes]:
    """The body as it comes. A stream whose replica has gone ends with an error event, like any that fails."""
    try:
        async for message in messages:
            if message.get("body"):
                yield message["body"]
    except RayActorError:
        if not streamed:
            raise
        yield b"data: " + json.dumps(_error(LOST, "server_error")).encode() + b"\n\n"


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": "replica_lost"}}
