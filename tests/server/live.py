"""A running server, and what tests ask of its answers."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

for package in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "httpx"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed (extra server)", allow_module_level=True)

import httpx
from fake_engine import FakeEngine, Script

from kvcore.modes import resolve_mode
from kvcore.server.metrics import Metrics
from kvcore.server.run import Server, listen
from kvcore.server.served import Defaults, Served
from kvcore.server.state import HttpSettings, ServerState
from kvcore.text import Tokenizer

CHAT, TEXTS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = "It was the best of times, it was the worst of times."


def says(tokenizer: Tokenizer, text: str) -> Script:
    ids = tokenizer.encode(text)[1:]  # without the BOS
    return lambda _request: ids


@dataclass
class Live:
    """A running server."""

    url: str
    state: ServerState
    server: Server
    thread: threading.Thread
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=120)

    @property
    def engine(self) -> Any:
        assert self.state.served is not None
        return self.state.served.engine

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def idle(self, seconds: float = 60.0) -> bool:
        """Whether nothing runs in the engine, after at most ``seconds``: many, for a busy machine."""
        return wait_until(lambda: self.engine.stats().running == 0 and not self.state.open, seconds)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def running(state: ServerState) -> Iterator[Live]:
    """Uvicorn on a free port, on a thread."""
    sock = listen("127.0.0.1", 0)
    server = Server(state)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    assert wait_until(lambda: server.started)
    live = Live(f"http://127.0.0.1:{sock.getsockname()[1]}", state, server, thread)
    try:
        yield live
    finally:
        live.http.close()
        server.should_exit = server.force_exit = True
        thread.join(60)
        assert not thread.is_alive()


def make_served(tokenizer: Tokenizer, engine: Any) -> Served:
    return Served(
        names=("tiny", "tiny-alias"),
        engine=engine,
        tokenizer=tokenizer,
        vocab_size=256,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        max_model_len=4096,
        created=1_700_000_000,
        fingerprint="kvcore-test",
        mode="fp16",
        check_mode=lambda name: resolve_mode(name).name,
        defaults=Defaults(temperature=0.0),
        facts={"mode": {"requested": "fp16", "effective": "fp16"}},
    )


class Servers:
    """Servers over fake engines, stopped together."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stack: list[tuple[Any, FakeEngine]] = []

    def __call__(
        self,
        text: str = TEXT,
        *,
        script: Script | None = None,
        engine: dict[str, Any] | None = None,
        served: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Live:
        """One that answers ``text``, or what ``script`` says."""
        fake = FakeEngine(self._tokenizer, script or says(self._tokenizer, text), **(engine or {}))
        state = ServerState(HttpSettings(**settings), Metrics())
        state.served = replace(make_served(self._tokenizer, fake), **(served or {}))
        state.metrics.follow("tiny", fake.stats)
        context = running(state)
        self._stack.append((context, fake))
        return context.__enter__()

    def stop(self) -> None:
        for context, fake in reversed(self._stack):
            fake.hold.set()
            context.__exit__(None, None, None)
            fake.stop()


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error, in OpenAI's shape and strict JSON."""
    assert response.status_code == status, response.text
    body = json.loads(response.content, parse_constant=pytest.fail)
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


def works(live: Live) -> bool:
    return live.post(CHAT, messages=MESSAGES).status_code == 200
