"""Listening before the model is there, and failing to load it."""

from __future__ import annotations

import socket
import threading
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from live import error_of, make_served, says, wait_until

from kvcore.errors import InputError, ModelError
from kvcore.server.metrics import Metrics
from kvcore.server.run import Server, listen, serve
from kvcore.server.state import HttpSettings, ServerState
from kvcore.text import Tokenizer


class Run:
    """`serve` on a thread."""

    def __init__(self, load: Any) -> None:
        self.sock = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.result: Any = None
        self.thread = threading.Thread(target=self._run, args=(load,))
        self.thread.start()

    def _run(self, load: Any) -> None:
        try:
            self.result = serve(ServerState(HttpSettings(), Metrics()), self.sock, load)
        except Exception as error:
            self.result = error


def test_the_server_answers_while_the_model_loads(tokenizer: Tokenizer) -> None:
    go = threading.Event()

    def load() -> Any:
        go.wait(60)
        raise ModelError("the model is damaged")

    run = Run(load)
    assert wait_until(lambda: _health(run.url) is not None)
    health = httpx.get(run.url + "/health")
    assert (health.status_code, health.json()["status"]) == (503, "loading")
    response = httpx.post(run.url + "/v1/chat/completions", json={"messages": []})
    assert error_of(response, 503)["code"] == "loading"
    assert response.headers["retry-after"] == "5"
    assert httpx.get(run.url + "/").status_code == 200
    assert httpx.get(run.url + "/metrics").status_code == 200
    go.set()
    run.thread.join(60)
    assert isinstance(run.result, ModelError)


@pytest.mark.parametrize(("signal", "code"), [(15, 0), (2, 130)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_stops_the_server_and_its_engine(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, signal: int, code: int
) -> None:
    engine = FakeEngine(tokenizer, says(tokenizer, "x"))
    servers: list[Server] = []

    def make(state: ServerState) -> Server:
        servers.append(Server(state))
        return servers[0]

    monkeypatch.setattr("kvcore.server.run.Server", make)
    run = Run(lambda: make_served(tokenizer, engine))
    assert wait_until(lambda: (_health(run.url) or {}).get("status") == "ready")
    servers[0].handle_exit(signal, None)
    run.thread.join(60)
    assert run.result == code
    assert not engine._thread.is_alive()


def test_a_port_that_is_taken_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(InputError, match=r"cannot listen on 127\.0\.0\.1"),
    ):
        listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(InputError, match=r"cannot listen on no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)


def _health(url: str) -> dict[str, Any] | None:
    try:
        return dict(httpx.get(url + "/health").json())
    except httpx.TransportError:
        return None
