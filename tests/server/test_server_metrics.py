"""What /metrics, /health and /version say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from live import CHAT, MESSAGES, Live
from prometheus_client.parser import text_string_to_metric_families
from sse import stream


def samples(live: Live) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of the page, by name and labels but the model's."""
    response = live.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        assert family.name.startswith("kvcore:")
        assert family.documentation
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def test_the_engines_counts_are_shown(fake: Live) -> None:
    found = samples(fake)

    def value(name: str, **labels: str) -> float:
        return found[f"kvcore:{name}", frozenset(labels.items())]

    assert value("num_requests_running") == value("num_requests_waiting") == 0
    assert value("kv_cache_usage_perc") == 3 / 1024
    assert value("kv_cache_bytes", mode="fp16", holder="running") == 2 * 2**20
    assert value("kv_cache_pages", mode="fp16", pool="raw", state="free") == 7
    assert value("prompt_tokens_total") == 1280
    assert value("generation_tokens_total") == 99
    assert value("prefix_cached_tokens_total") == 640
    assert (value("prefix_hits_total"), value("prefix_misses_total")) == (5, 4)
    assert value("prefix_declined_total", reason="no room") == 3
    assert value("fallbacks_total", reason="head_dim 80") == 6
    assert value("request_success_total", finished_reason="stop") == 8
    assert value("num_preemptions_total") == 1


def test_latencies_are_counted_once_per_request_and_token(serve_fake: Callable[..., Live]) -> None:
    live = serve_fake()
    for _ in range(2):
        live.post(CHAT, messages=MESSAGES)
        stream(live.http, CHAT, messages=MESSAGES)
    live.post(CHAT, messages=[])
    found = samples(live)
    tokens = 4 * (49 - 1)
    assert found["kvcore:time_to_first_token_seconds_count", frozenset()] == 4
    assert found["kvcore:e2e_request_latency_seconds_count", frozenset()] == 4
    assert found["kvcore:inter_token_latency_seconds_count", frozenset()] == tokens
    assert 0 < found["kvcore:time_to_first_token_seconds_sum", frozenset()] < 20
    by_status = {
        dict(labels)["status"]: n for (name, labels), n in found.items() if name == "kvcore:http_requests_total"
    }
    assert by_status == {"200": 4, "400": 1}


def test_two_servers_in_one_process_have_their_own(serve_fake: Callable[..., Live], fake: Live) -> None:
    other = serve_fake()
    other.post(CHAT, messages=MESSAGES)
    assert samples(other)["kvcore:time_to_first_token_seconds_count", frozenset()] == 1


def test_health_says_what_runs(fake: Live) -> None:
    body: dict[str, Any] = fake.http.get("/health").json()
    assert body["status"] == "ready"
    assert body["mode"] == {"requested": "fp16", "effective": "fp16"}
    assert body["kv_bytes"] == {"used": 3 * 2**20, "budget": 2**30}
    assert body["engine"]["batching"] == "one at a time"
    assert body["engine"]["kv"]["fp16"]["pages"]["raw"] == {"free": 7, "used": 3, "shared": 1}
