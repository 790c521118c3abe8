"""Clients that leave or stop reading, an engine that fails, and a server that stops: the others go on."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from live import CHAT, MESSAGES, TEXT, TEXTS, Live, error_of, wait_until, works
from sse import Stream, parse, stream

from kvcore.engine import Failure

FAILURES = [  # the engine's code, and the status, the code and the type of the answer
    ("out_of_memory", 503, "out_of_memory", "server_error"),
    ("insufficient_kv_budget", 400, "insufficient_kv_budget", "invalid_request_error"),
    ("not_finite", 500, "not_finite", "server_error"),
    ("cancelled", 503, "cancelled", "server_error"),
    ("shutdown", 503, "stopping", "server_error"),
    ("internal", 500, "engine_error", "server_error"),
]


def endless(_request: Any) -> list[int]:
    return [77] * 1_000_000


def raw_request(live: Live, body: dict[str, Any], *, small_buffer: bool = False) -> socket.socket:
    """The request on a socket of its own, sent."""
    at = urlsplit(live.url)
    connection = socket.socket()
    if small_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((at.hostname, at.port))
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_S1_a_client_that_leaves_ends_its_request(serve_fake: Callable[..., Live], streamed: bool) -> None:
    live = serve_fake(script=endless, engine={"step_seconds": 0.01})
    connection = raw_request(live, {"messages": MESSAGES, "stream": streamed, "n": 2})
    if streamed:
        assert b"data: " in connection.recv(4096) + connection.recv(4096)
    else:
        assert wait_until(lambda: live.engine.stats().running == 2)
        time.sleep(0.05)
    connection.close()
    assert live.idle()
    assert len(live.engine.cancelled) == 2


def test_S2_aborts_leave_nothing_behind(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(script=endless, engine={"step_seconds": 0.002})

    def abort(i: int) -> None:
        connection = raw_request(live, {"messages": MESSAGES, "stream": i % 2 == 0, "n": 1 + i % 3})
        if i % 4 == 0:
            connection.recv(200)
        connection.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(abort, range(200)))
    assert live.idle()
    live.engine.script = lambda _request: [77, 78]
    assert works(live)
    assert live.idle()


def test_a_client_that_stops_reading_loses_its_request_and_nobody_else(
    serve_fake: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities make pieces large, so that the buffers of the connection are full before the context is."""
    monkeypatch.setattr("kvcore.server.app.STREAM_BUFFER", 64)
    live = serve_fake(
        script=lambda r: endless(r) if r.params.seed == 1 else [77, 78, 79], engine={"step_seconds": 0.001}
    )
    body = {"messages": MESSAGES, "stream": True, "seed": 1, "logprobs": True, "top_logprobs": 20}
    connection = raw_request(live, body, small_buffer=True)
    connection.recv(100)
    assert works(live)
    assert wait_until(lambda: len(live.engine.cancelled) == 1)
    assert live.idle()
    assert works(live)
    connection.close()


def test_a_slow_body_does_not_hold_others_up(fake: Live) -> None:
    at = urlsplit(fake.url)
    connection = socket.create_connection((at.hostname, at.port))
    connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Length: 100\r\n\r\n{{".encode())
    assert works(fake)
    connection.close()
    assert works(fake)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_B42_B74_a_failure_of_the_engine_has_a_status_before_the_first_piece(
    serve_fake: Callable[..., Live], streamed: bool
) -> None:
    live = serve_fake(engine={"fail_after": 0})
    for code, status, shown, kind in FAILURES:
        live.engine.failure = Failure("memory, or the memory of it", code)  # words decide nothing
        response = live.post(CHAT, messages=MESSAGES, stream=streamed)
        error = error_of(response, status)
        assert (error["message"], error["code"], error["type"]) == ("memory, or the memory of it", shown, kind)
        assert ("retry-after" in response.headers) == (status == 503)
    live.engine.fail_after = None
    assert works(live)


def test_B42_a_failure_in_the_middle_of_a_stream_is_an_event(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(engine={"fail_after": 5})
    found = stream(live.http, CHAT, messages=MESSAGES)
    assert found.status == 200
    assert found.text() == TEXT[:5]
    assert set(found.finish_reasons()) == {None}
    assert not found.done
    error = found.chunks[-1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "logits" in error["message"]
    assert live.idle()


def test_a_failed_choice_ends_the_others_of_its_request(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(script=endless, engine={"step_seconds": 0.005, "fail_after": 5})
    live.engine.fail_after = None
    thread_error: list[Any] = []

    def ask() -> None:
        thread_error.append(live.post(CHAT, messages=MESSAGES, n=3))

    thread = threading.Thread(target=ask)
    thread.start()
    assert wait_until(lambda: live.engine.stats().running == 3)
    live.engine.fail_after = 0
    thread.join(60)
    assert thread_error[0].status_code == 500
    assert live.idle()


def test_stopping_lets_answers_finish(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(engine={"step_seconds": 0.01}, shutdown_timeout=120)
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(_stream, live.url) for _ in range(4)]
        assert wait_until(lambda: len(live.state.open) == 4)
        live.server.handle_exit(15, None)
        assert wait_until(lambda: live.state.stopping)
        with httpx.Client(base_url=live.url) as http:
            response = http.post(CHAT, json={"messages": MESSAGES})
            assert error_of(response, 503)["code"] == "stopping"
            assert "retry-after" in response.headers
            health = http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "stopping")
        assert all(each.result().done and each.result().text() == TEXT for each in streams)
    live.thread.join(60)
    assert not live.thread.is_alive()


def test_stopping_ends_what_does_not_finish_with_an_error(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(script=endless, engine={"step_seconds": 0.01}, shutdown_timeout=0.3)
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(_stream, live.url) for _ in range(2)]
        whole = pool.submit(httpx.post, live.url + CHAT, json={"messages": MESSAGES}, timeout=120)
        assert wait_until(lambda: len(live.state.open) == 3)
        live.server.handle_exit(15, None)
        for each in streams:
            found = each.result()
            assert found.chunks[-1]["error"]["code"] == "stopping"
            assert found.text()
        assert error_of(whole.result(), 503)["code"] == "stopping"
    live.thread.join(60)
    assert not live.thread.is_alive()
    assert len(live.engine.cancelled) == 3


def test_B127_an_engine_that_has_died_says_so(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake()
    live.engine.healthy = False
    assert error_of(live.post(CHAT, messages=MESSAGES), 503)["code"] == "not_ready"
    health = live.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "failed")


def test_many_clients_at_once_get_their_own_answers(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(script=lambda request: list(request.prompt[-20:-1]), engine={"step_seconds": 0.001})

    def ask(i: int) -> tuple[str, str]:
        text = f"{i:03}" * 7
        body = {"prompt": text, "max_tokens": 30, "stream": i % 2 == 0}
        response = httpx.post(live.url + TEXTS, json=body, timeout=120)
        found = parse(200, response.content).text() if i % 2 == 0 else response.json()["choices"][0]["text"]
        return found, text[-20:-1]

    with ThreadPoolExecutor(16) as pool:
        for found, wanted in pool.map(ask, range(64)):
            assert found == wanted


def _stream(url: str) -> Stream:
    with httpx.Client(base_url=url, timeout=120) as http:
        return stream(http, CHAT, messages=MESSAGES)
