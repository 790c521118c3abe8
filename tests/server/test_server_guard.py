"""Keys, origins, headers, and a log without secrets."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from live import CHAT, MESSAGES, Live, error_of, wait_until

from kvcore.server.logs import configure

KEY = "sk-a-key-of-this-test"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """The lines of the log so far."""
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    configure("json")
    return lambda: [json.loads(line) for line in stderr.getvalue().splitlines()]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_guards_everything_but_the_page_and_health(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(api_key=KEY)
    for headers in ({}, bearer("sk-another"), bearer(KEY + "x"), {"Authorization": KEY}):
        response = live.http.post(CHAT, json={"messages": MESSAGES}, headers=headers)
        error = error_of(response, 401)
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert response.headers["www-authenticate"] == "Bearer"
        assert KEY not in response.text
    for path in ("/v1/models", "/v1/models/tiny", "/metrics", "/v1/nonsense"):
        assert live.http.get(path).status_code == 401
    for path in ("/", "/page/chat.js", "/page/chat.css", "/health", "/version"):
        assert live.http.get(path).status_code == 200
    assert live.http.post(CHAT, json={"messages": MESSAGES}, headers=bearer(KEY)).status_code == 200
    assert live.http.get("/metrics", headers=bearer(KEY)).status_code == 200
    assert not live.engine.refuse


def test_without_a_key_any_key_passes(fake: Live) -> None:
    response = fake.http.post(CHAT, json={"messages": MESSAGES}, headers=bearer("sk-no-key-required"))
    assert response.status_code == 200


def test_pages_of_other_sites_cannot_send_requests(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(allowed_origins=("https://good.example",))
    body = json.dumps({"messages": MESSAGES})

    def post(origin: str) -> Any:
        return live.http.post(CHAT, content=body, headers={"Origin": origin, "Content-Type": "text/plain"})

    assert error_of(post("https://bad.example"), 403)["code"] == "origin"
    assert error_of(post("null"), 403)
    assert post(live.url).status_code == 200
    allowed = post("https://good.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://good.example"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = live.http.options(CHAT, headers={"Origin": "https://good.example", **asked})
    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    refused = live.http.options(CHAT, headers={"Origin": "https://bad.example", **asked})
    assert "access-control-allow-origin" not in refused.headers


def test_errors_reach_allowed_pages_too(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(api_key=KEY, allowed_origins=("*",))
    response = live.http.post(CHAT, content=b"{}", headers={"Origin": "https://any.example"})
    assert error_of(response, 401)
    assert response.headers["access-control-allow-origin"] == "*"


def test_every_answer_has_an_id(fake: Live) -> None:
    ids = {fake.http.get(path).headers["x-request-id"] for path in ("/v1/models", "/nonsense", "/health")}
    assert len(ids) == 3


def test_a_request_is_one_line_of_the_log(serve_fake: Callable[..., Live], log: Any) -> None:
    live = serve_fake()
    response = live.post(CHAT, messages=MESSAGES, max_tokens=7)

    def requests(count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def complete() -> bool:
            found[:] = [line for line in log() if line["event"] == "request"]
            return len(found) >= count

        assert wait_until(complete)  # a line is written after its answer
        return found

    (line,) = requests(1)
    assert line["id"] == response.headers["x-request-id"]
    assert (line["method"], line["path"], line["status"], line["level"]) == ("POST", CHAT, 200, "info")
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (19, 9, 7)
    assert (line["finish_reason"], line["stream"]) == ("length", False)
    assert 0 <= line["ttft_s"] <= line["total_s"]
    live.http.get("/health")
    live.http.get("/metrics")
    live.post(CHAT, messages=[])
    assert [line["status"] for line in requests(2)] == [200, 400]
    assert requests(2)[-1]["error"] == "invalid_value"


def test_the_log_has_no_prompts_and_no_keys(
    serve_fake: Callable[..., Live], log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve_fake(api_key=KEY)
    secret = [{"role": "user", "content": "my secret diary"}]
    for headers in (bearer(KEY), bearer("sk-wrong-guess")):
        for body in ({"messages": secret}, {"messages": secret, "temperature": 9}, {"messages": secret, "diary": 1}):
            live.http.post(CHAT, json=body, headers=headers)
    live.http.post(CHAT, json={"messages": secret, "stream": True}, headers=bearer(KEY))
    live.http.post(CHAT, content=b'{"messages": "my secret diary', headers=bearer(KEY))

    def broken(*_args: object) -> None:
        raise ValueError(secret[0]["content"])

    monkeypatch.setattr("kvcore.server.app.plan_completion", broken)
    monkeypatch.setattr(live.engine, "script", broken)
    response = live.http.post("/v1/completions", json={"prompt": "my secret diary"}, headers=bearer(KEY))
    assert error_of(response, 500)["code"] == "internal"
    assert live.http.post(CHAT, json={"messages": secret}, headers=bearer(KEY)).status_code == 500
    assert wait_until(lambda: [line.get("status") for line in log()].count(500) == 2)
    text = json.dumps(log())
    assert '"type": "ValueError"' in text
    for hidden in ("diary", KEY, "sk-wrong-guess", "best of times"):
        assert hidden not in text


def test_the_logs_text_form_is_one_line_too(serve_fake: Callable[..., Live], capsys: Any) -> None:
    configure("text")
    live = serve_fake()
    live.http.get("/v1/models")
    said = ""

    def complete() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return said.endswith("\n")

    assert wait_until(complete)  # a line is written after its answer
    (line,) = said.splitlines()
    assert "request id=req-" in line
    assert "status=200" in line
