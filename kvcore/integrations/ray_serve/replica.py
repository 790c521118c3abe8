"""One replica: the server of `kvcore serve` without its socket, answering requests that come through Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from ray import serve

from kvcore.server.app import create_app
from kvcore.server.metrics import Metrics
from kvcore.server.served import Served
from kvcore.server.state import HttpSettings, ServerState

STOP_SECONDS = 10.0
REPLICA_HEADER = b"x-kvcore-replica"


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request, whole."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Replica:
    """Loads the model when it starts; Ray sends nothing before that is done."""

    def __init__(self, load: Callable[[], Served], settings: HttpSettings) -> None:
        """``load`` returns with its engine started."""
        self._served = load()
        self._state = ServerState(settings, Metrics())
        self._state.metrics.follow(self._served.name, self._served.engine.stats)
        self._state.served = self._served
        self._app = create_app(self._state)
        self._name = serve.get_replica_context().replica_id.unique_id

    async def answer(self, key: str, call: Call) -> AsyncIterator[dict[str, Any]]:
        """The response's ASGI messages, as they come. ``key`` is for the router. Closed early, the request is given up
        as for a client that has gone."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        gone = asyncio.Event()
        asked = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if asked:
                return asked.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", []), (REPLICA_HEADER, self._name.encode())]}
            await messages.put(message)

        async def run() -> None:
            try:
                await self._app(self._scope(call), receive, send)  # type: ignore[arg-type]
            finally:
                await messages.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:
            gone.set()
            with contextlib.suppress(Exception):
                await asyncio.wait_for(task, STOP_SECONDS)

    def check_health(self) -> None:
        """Ray calls this, and replaces a replica whose engine has failed."""
        if not self._served.engine.stats().healthy:
            raise RuntimeError("the engine of this replica has failed: see its log")

    async def shutdown(self) -> None:
        """Ends what runs, with an error, and the engine's thread."""
        self._state.stopping = True
        await asyncio.to_thread(self._served.engine.stop, STOP_SECONDS)

    async def __del__(self) -> None:
        await self.shutdown()

    def _scope(self, call: Call) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": call.method,
            "scheme": "http",
            "path": call.path,
            "raw_path": call.path.encode(),
            "query_string": call.query,
            "root_path": "",
            "headers": list(call.headers),
            "client": None,
            "server": None,
            "state": {},
        }
