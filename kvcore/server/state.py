"""The life of a server: loading, ready, stopping or failed; and the answers that are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvcore.server.errors import unavailable
from kvcore.server.metrics import Metrics
from kvcore.server.served import Served
from kvcore.server.subscription import Subscription

Status = Literal["loading", "ready", "stopping", "failed"]


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """How the HTTP side behaves. ``keep_alive`` seconds without a piece before a comment in a stream."""

    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    max_body: int = 32 * 2**20
    keep_alive: float = 5.0
    shutdown_timeout: float = 30.0


@dataclass(slots=True)
class ServerState:
    """Used on the event loop only, but for `served`, which the loading thread sets last."""

    settings: HttpSettings
    metrics: Metrics
    served: Served | None = None
    stopping: bool = False
    failure: BaseException | None = None
    open: set[Subscription] = field(default_factory=set)

    @property
    def status(self) -> Status:
        if self.failure is not None:
            return "failed"
        if self.stopping:
            return "stopping"
        return "loading" if self.served is None else "ready"

    def ready(self) -> Served:
        """The model. ApiError 503 where there is none to ask."""
        match self.status:
            case "loading":
                raise unavailable("the model is loading: try again in a moment", "loading", 5)
            case "stopping":
                raise unavailable("the server is stopping: send the request to another one", "stopping", 30)
            case "failed":
                raise unavailable("the model could not be loaded: see the log", "failed", 30)
        assert self.served is not None
        return self.served

    async def drain(self, timeout: float, hurry: Callable[[], bool] = lambda: False) -> int:
        """Refuse new requests, wait up to ``timeout`` seconds for open ones, then end them with an error.

        ``hurry`` ends the wait. Returns how many were ended so.
        """
        self.stopping = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self.open and loop.time() < deadline and not hurry():
            await asyncio.sleep(0.02)
        left = list(self.open)
        for subscription in left:
            subscription.abort(unavailable("the server is stopping and has ended this answer", "stopping", 30))
        deadline = loop.time() + 2
        while self.open and loop.time() < deadline:
            await asyncio.sleep(0.02)
        return len(left)
