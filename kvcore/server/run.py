"""Uvicorn around the application: listening at once, loading behind it, and stopping in order."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from kvcore.errors import InputError
from kvcore.server.app import create_app
from kvcore.server.logs import log
from kvcore.server.served import Served
from kvcore.server.state import ServerState

INTERRUPTED = 130
_UNREAD_MS = 30_000  # that sent data may stay unacknowledged before the kernel drops a connection
_ENGINE_STOP_SECONDS = 10.0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. InputError where the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot listen on {host} port {port}: {reason}; choose others with --host, --port") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # A client that never reads would hold its connection for ever; accepted sockets inherit this.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
    return sock


class Server(uvicorn.Server):
    """Uvicorn that drains on SIGTERM or SIGINT and leaves the exit code to its caller."""

    def __init__(self, state: ServerState) -> None:
        config = uvicorn.Config(
            create_app(state),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=3,
        )
        super().__init__(config)
        self._state = state
        self.interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, a second one ends at once."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log("stopping", open=len(self._state.open), timeout_s=self._state.settings.shutdown_timeout)
        ended = await self._state.drain(self._state.settings.shutdown_timeout, lambda: self.force_exit)
        await super().shutdown(sockets)
        log("stopped", answers_ended=ended)


def serve(state: ServerState, sock: socket.socket, load: Callable[[], Served]) -> int:
    """Answer on ``sock`` until a signal; returns the exit code. Raises what ``load`` raises.

    ``load`` runs on a thread of its own and returns with its engine started.
    """
    server = Server(state)

    def loading() -> None:
        try:
            served = load()
        except BaseException as error:
            state.failure = error
            server.should_exit = True
            return
        state.metrics.follow(served.name, served.engine.stats)
        state.served = served
        log("ready", **served.summary())

    threading.Thread(target=loading, name="kvcore-load", daemon=True).start()
    server.run(sockets=[sock])
    if state.served is not None:
        try:
            state.served.engine.stop(timeout=_ENGINE_STOP_SECONDS)
        except Exception as error:
            log("the engine did not stop in time", logging.ERROR, type=type(error).__name__)
    if state.failure is not None:
        raise state.failure
    return INTERRUPTED if server.interrupted else 0
