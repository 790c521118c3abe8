"""`kvcore serve` as a process: options, the environment, signals, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import CHAT, MESSAGES, TEXTS, error_of, wait_until
from sse import stream
from tiny import write_tiny_llama
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

from kvcore.cli import run as run_command
from kvcore.cli.serve import Budget, parse_budget
from kvcore.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_tiny_llama(tmp_path_factory.mktemp("command"), eos_token_id=None)
    return write_tiny_tokenizer(made, chat_template=CHAT_TEMPLATE)


class Process:
    """`kvcore serve` on a free port."""

    def __init__(self, args: tuple[object, ...], env: dict[str, str], log: Path) -> None:
        command = [sys.executable, "-m", "kvcore", "serve", "--port", "0", *map(str, args)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVCORE_")}
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, env={**clean, **threads, **env}, stderr=file)
        assert wait_until(lambda: "listening on" in self.log, 200), self.log
        found = re.search(r"listening on (http://\S+)", self.log)
        assert found is not None
        self.http = httpx.Client(base_url=found[1], timeout=120)
        assert wait_until(lambda: self.http.get("/health").status_code == 200, 200), self.log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    def end(self, sig: int = signal.SIGTERM, seconds: float = 90) -> int:
        self.process.send_signal(sig)
        return self.process.wait(seconds)


@pytest.fixture
def serve(tmp_path: Path, folder: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*args: object, **env: str) -> Process:
        process = Process(("--model", folder, *args), env, tmp_path / f"log{len(started)}")
        started.append(process)
        return process

    yield start
    for each in started:
        each.http.close()
        each.process.kill()
        each.process.wait(10)


def test_the_environment_and_the_log(serve: Callable[..., Process]) -> None:
    """B78, B137: the mode of the environment holds, and the line at the start says what runs."""
    secret = "sk-of-the-environment"
    process = serve("--log-format", "json", KVCORE_KV_CACHE_MODE="turbo4", KVCORE_API_KEY=secret)
    health = process.http.get("/health").json()
    assert health["mode"] == {"requested": "turbo4", "effective": "turbo4"}
    assert error_of(process.http.post(CHAT, json={"messages": MESSAGES}), 401)
    key = {"Authorization": f"Bearer {secret}"}
    answer = process.http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 5}, headers=key)
    assert answer.status_code == 200
    assert process.end() == 0
    (ready,) = [event for event in process.events() if event["event"] == "ready"]
    assert ready["prefix_reuse"] is True
    assert ready["mode"]["effective"] == "turbo4"
    assert ready["kv_cache_budget"] > 0
    assert [event["event"] for event in process.events()][-2:] == ["stopping", "stopped"]
    assert secret not in process.log


def test_flags_reach_the_engine(serve: Callable[..., Process]) -> None:
    process = serve(
        *("--kv-cache-mode", "int8", "--recent-tokens", 32, "--page-size", 32, "--served-model-name", "a,b"),
        *("--kv-cache-budget", "5MiB", "--max-batch", 3, "--max-queue", 9, "--max-model-len", 500, "--temp", 0),
        *("--max-kv-size", 200, "--keep", 8, "--max-tokens", 6),
        KVCORE_KV_CACHE_MODE="turbo4",
    )
    health = process.http.get("/health").json()
    assert health["mode"]["effective"] == "int8"
    assert (health["kv_bytes"]["budget"], health["max_batch"], health["max_queue"]) == (5 * 2**20, 3, 9)
    assert health["cap"] == {"max_kv_size": 200, "keep": 8, "context_shift": True}
    assert health["window"]["page_size"] == 32
    models = process.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("a", 500), ("b", 500)]
    answer = process.http.post(TEXTS, json={"prompt": "hi", "model": "b"}).json()
    assert (answer["model"], answer["usage"]["completion_tokens"]) == ("a", 6)
    assert process.end(signal.SIGINT) == 130


def test_sigterm_under_load_ends_every_stream_in_order(serve: Callable[..., Process]) -> None:
    process = serve("--shutdown-timeout", 1, "--temp", 0, "--log-format", "json")
    body = {"prompt": "x" * 30, "max_tokens": 3000, "ignore_eos": True}
    url = str(process.http.base_url)

    def ask(i: int) -> Any:
        with httpx.Client(base_url=url, timeout=120) as http:
            return stream(http, TEXTS, **body | {"max_tokens": 5 if i == 0 else 3000, "prompt": "x" * (30 + i)})

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, i) for i in range(4)]
        assert wait_until(lambda: process.http.get("/health").json()["engine"]["generated_tokens"] > 20)
        begin = time.monotonic()
        assert process.end() == 0
        assert time.monotonic() - begin < 60
        found = [each.result() for each in asked]
    for each in found:
        assert each.status == 200
        assert each.done or each.chunks[-1]["error"]["code"] == "stopping"
    assert found[0].done
    assert not all(each.done for each in found)
    assert "traceback" not in process.log.lower()


BAD = [
    (["--port", "99999"], "--port 99999"),
    (["--max-batch", "0"], "--max-batch 0"),
    (["--max-model-len", "1"], "--max-model-len 1"),
    (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
    (["--log-format", "xml"], "--log-format xml"),
    (["--allowed-origins", "example.com"], "--allowed-origins example.com"),
    (["--kv-cache-budget", "lots"], "--kv-cache-budget lots"),
    (["--kv-cache-budget", "0%"], "--kv-cache-budget 0%"),
    (["--served-model-name", "a,,b"], "--served-model-name a,,b"),
    (["--api-key", " "], "--api-key"),
    (["--temp", "3"], "--temp 3"),
    (["--top-p", "0"], "top_p 0"),
    (["--max-tokens", "0"], "--max-tokens 0"),
    (["--keep", "9", "--max-kv-size", "5"], "keep 9"),
    (["--context-shift", "maybe"], "--context-shift maybe"),
    (["--request-modes", "turbo9"], "unknown KV cache mode 'turbo9'"),
    (["--kv-cache-mode", "int8", "--kv-bits", "4"], "--kv-cache-mode int8 means int8 but --kv-bits 4 means turbo4"),
]


@pytest.mark.parametrize(("args", "words"), BAD, ids=[" ".join(args) for args, _ in BAD])
def test_bad_options_are_refused_before_the_model_loads(
    capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    assert run_command(["serve", "--model", "/no/such/model", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvcore: error: {words}")
    assert err.count("\n") == 1


def test_a_model_that_cannot_be_loaded_ends_the_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command(["serve", "--port", "0", "--model", str(tmp_path), "--log-format", "json"]) == 2
    assert "kvcore: error: " in capsys.readouterr().err.splitlines()[-1]


def test_a_broken_template_ends_the_server(capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% if %}")
    assert run_command(["serve", "--port", "0", "--model", str(folder), "--chat-template", str(template)]) == 2
    assert "syntax error" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        (None, Budget()),
        ("8GiB", Budget(bytes=8 * 2**30)),
        ("500MB", Budget(bytes=500_000_000)),
        ("80%", Budget(share=0.8)),
        ("0.5", Budget(share=0.5)),
        (".25", Budget(share=0.25)),
        ("1", Budget(share=1.0)),
    ],
)
def test_budgets(given: str | None, budget: Budget) -> None:
    assert parse_budget(given) == budget


@pytest.mark.parametrize("given", ["", "101%", "-1GiB", "1.5", "GiB", "0", "nan", "1e9"])
def test_budgets_that_are_none(given: str) -> None:
    with pytest.raises(InputError, match="--kv-cache-budget"):
        parse_budget(given)
