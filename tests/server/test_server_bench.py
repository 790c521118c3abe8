"""`kvcore bench serve`, against a server that is known, and against some that misbehave."""

from __future__ import annotations

import csv
import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import Live

from kvcore.bench.serve import COLUMNS, Load, Timing, plan, summary
from kvcore.cli import run as run_command

LOAD = Load(200, 50.0, (100, 300), (5, 9), 0.5, None, 3)


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def run(*args: object) -> Result:
        code = run_command(["bench", "serve", *map(str, args)])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def test_a_load_is_what_was_asked_for_and_repeatable() -> None:
    asked = plan(LOAD, 1.0)
    assert asked == plan(LOAD, 1.0)
    words = [len(each.prompt.split()) for each in asked]
    assert min(words) >= 100
    assert max(words) <= 300
    assert len(set(words)) > 50
    assert {each.max_tokens for each in asked} == {5, 6, 7, 8, 9}
    gaps = np.diff([0.0, *(each.at for each in asked)])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.25)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.3)  # exponential, not regular
    first, second = asked[0].prompt.split(), asked[1].prompt.split()
    shared = min(len(first), len(second)) // 2
    assert first[:shared] == second[:shared]
    assert first[shared + 40 :] != second[shared + 40 : len(first)]
    assert plan(LOAD, 2.0)[0].prompt.count(" ") == pytest.approx(words[0] / 2, abs=2)


def test_all_at_once() -> None:
    load = Load(5, math.inf, (10, 10), (3, 3), 1.0, None, 0)
    assert [each.at for each in plan(load, 1.0)] == [0.0] * 5
    assert len({each.prompt for each in plan(load, 1.0)}) == 1


def test_the_row_of_known_timings() -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    timings = [Timing(first=i / 100, end=1.0, gaps=[0.01, 0.03], pieces=3, usage=usage) for i in range(1, 101)]
    timings.append(Timing(error="status 429: full", end=9.0))
    row = summary(LOAD, timings, 10.0)
    assert (row["requests"], row["errors"], row["error_kinds"]) == (101, 1, "1 x status 429: full")
    assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (1000, 400, 300)
    assert (row["total_tokens_per_s"], row["output_tokens_per_s"], row["requests_per_s"]) == (130, 30, 10)
    assert row["ttft_p50_ms"] == pytest.approx(505)
    assert row["ttft_p95_ms"] == pytest.approx(950.5)
    assert row["ttft_p99_ms"] == pytest.approx(990.1)
    assert (row["itl_p50_ms"], row["itl_p99_ms"]) == (pytest.approx(20), pytest.approx(30))
    assert row["e2e_p99_ms"] == pytest.approx(1000)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_against_a_server(
    serve_fake: Callable[..., Live], bench: Callable[..., Result], tmp_path: Path, endpoint: str
) -> None:
    live = serve_fake(engine={"step_seconds": 0.003}, api_key="sk-bench")
    args = ["--url", live.url + "/v1", "--api-key", "sk-bench", "--endpoint", endpoint, "--requests", 8]
    args += ["--rate", "200,inf", "--prompt-tokens", "40-60", "--new-tokens", 12, "--shared-prefix", 0.5]
    result = bench(*args, "--out", tmp_path, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out, parse_constant=pytest.fail)
    first, second = found["rows"]
    assert (first["rate"], second["rate"]) == (200, "inf")
    for row in (first, second):
        assert (row["requests"], row["errors"], row["output_tokens"]) == (8, 0, 96)
        assert 8 * 30 <= row["prompt_tokens"] <= 8 * 90
        assert row["cached_tokens"] == pytest.approx(row["prompt_tokens"] / 2, abs=8)
        assert row["ttft_p50_ms"] >= 3
        assert row["itl_p50_ms"] <= row["itl_p95_ms"] <= row["itl_p99_ms"]
        assert row["itl_p99_ms"] >= 2  # on a busy machine pieces come in bunches
        assert row["e2e_p50_ms"] > row["ttft_p50_ms"]
    environment = found["environment"]
    assert (environment["model"], environment["seed"], environment["endpoint"]) == ("tiny", "0", endpoint)
    assert "sk-bench" not in result.out + result.err
    assert len(live.engine.submitted) == 1 + 16
    assert {path.name for path in tmp_path.iterdir()} == {"serve.md", "serve.jsonl", "serve.csv"}
    lines = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text().splitlines()]
    assert [line["output_tokens"] for line in lines] == [96, 96]
    with (tmp_path / "serve.csv").open() as file:
        assert [row["errors"] for row in csv.DictReader(file)] == ["0", "0"]
    assert set(COLUMNS) <= set(lines[0])


def test_requests_that_fail_are_counted(serve_fake: Callable[..., Live], bench: Callable[..., Result]) -> None:
    live = serve_fake(engine={"step_seconds": 0.05, "max_queue": 2})
    args = ["--url", live.url + "/v1", "--requests", 6, "--rate", "inf", "--new-tokens", 4, "--json"]
    result = bench(*args, "--tokens-per-word", 1)
    (row,) = json.loads(result.out)["rows"]
    assert result.code == 0
    assert (row["errors"], row["output_tokens"]) == (4, 8)
    assert "4 x status 429" in row["error_kinds"]
    live.engine.max_queue = 0
    result = bench(*args, "--tokens-per-word", 1)
    assert result.code == 1
    assert "every request failed: 6 x status 429" in result.err


def test_a_limit_on_concurrency(serve_fake: Callable[..., Live], bench: Callable[..., Result]) -> None:
    live = serve_fake(engine={"step_seconds": 0.005, "max_queue": 2})
    args = ["--url", live.url + "/v1", "--requests", 6, "--rate", "inf", "--new-tokens", 4]
    result = bench(*args, "--max-concurrency", 2, "--json")
    assert json.loads(result.out)["rows"][0]["errors"] == 0


class Odd(BaseHTTPRequestHandler):
    """A server that answers ``answer`` to everything."""

    answer = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def odd() -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "ended without a finish reason"),
        (b"data: {\n\n", "not JSON"),
        (b'data: {"error": {"message": "it\\nbroke"}}\n\n', "error event: it broke"),
        (b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n', "ended without a finish reason"),
    ],
)
def test_streams_that_are_none(odd: Any, bench: Callable[..., Result], answer: bytes, words: str) -> None:
    Odd.answer = answer
    url = f"http://127.0.0.1:{odd.server_address[1]}/v1"
    result = bench("--url", url, "--model", "m", "--tokens-per-word", 1, "--requests", 2, "--rate", "inf")
    assert result.code == 1
    assert words in result.err
    assert words in bench("--url", url, "--model", "m", "--requests", 2).err


def test_a_server_that_counts_no_tokens(odd: Any, bench: Callable[..., Result]) -> None:
    Odd.answer = b'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
    url = f"http://127.0.0.1:{odd.server_address[1]}/v1"
    assert "--tokens-per-word" in bench("--url", url, "--model", "m").err
    result = bench("--url", url, "--model", "m", "--tokens-per-word", 1.5, "--requests", 3, "--rate", 100, "--json")
    (row,) = json.loads(result.out)["rows"]
    assert (row["output_tokens"], row["prompt_tokens"], row["errors"]) == (3, 0, 0)
    assert row["itl_p50_ms"] is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rate", "0"], "--rate 0"),
        (["--rate", "nan"], "--rate nan"),
        (["--prompt-tokens", "9-3"], "--prompt-tokens 9-3"),
        (["--new-tokens", "x"], "--new-tokens x"),
        (["--requests", "0"], "--requests 0"),
        (["--shared-prefix", "1.5"], "--shared-prefix 1.5"),
        (["--endpoint", "embeddings"], "--endpoint embeddings"),
        (["--url", "ftp://x"], "--url ftp://x"),
        (["--url", "http://key@host/v1"], "--url"),
        (["--timeout", "0"], "--timeout 0"),
        (["--seed", "-1"], "--seed -1"),
    ],
)
def test_bad_options_are_refused_before_the_first_request(
    bench: Callable[..., Result], args: list[str], words: str
) -> None:
    result = bench(*args)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"kvcore: error: {words}")
    assert result.err.count("\n") == 1


def test_nobody_listens(bench: Callable[..., Result]) -> None:
    result = bench("--url", "http://127.0.0.1:9/v1")
    assert result.code == 1
    assert "is the server running?" in result.err
