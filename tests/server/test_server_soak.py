"""Many requests, some cancelled and some malformed: nothing leaks, nothing hangs, every answer is well-formed."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import CHAT, TEXTS, Live
from real import serving, words
from sse import parse
from tiny import write_tiny_llama
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

import kvcore
from kvcore.layout import WindowPolicy

MALFORMED: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
    {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
    {"messages": [{"role": "user", "content": "x"}], "model": "nobody"},
    {"messages": [{"role": "robot", "content": "x"}]},
    {"messages": "x"},
]
MODES = ("fp16", "int8", "turbo4", "int8-turbo4")
BUDGET = 24 * 2**20  # too small for all: prefixes go, and requests wait


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_tiny_llama(tmp_path_factory.mktemp("soak"), eos_token_id=None)
    return write_tiny_tokenizer(made, chat_template=CHAT_TEMPLATE)


def soak(live: Live, requests: int, *, concurrent: int, length: int, answer: int, seed: int) -> Counter[str]:
    """What came of each request. 20% are cancelled in the middle of their stream, 10% malformed."""
    plan = random.Random(seed)
    kinds = ["cancel"] * (requests // 5) + ["malformed"] * (requests // 10)
    kinds += ["plain"] * (requests - len(kinds))
    plan.shuffle(kinds)

    async def one(http: httpx.AsyncClient, gate: asyncio.Semaphore, i: int, kind: str) -> str:
        async with gate:
            if kind == "malformed":
                return await malformed(http, MALFORMED[i % len(MALFORMED)], streamed=i % 2 == 0)
            prompt = words(100, 1) + words(plan.randrange(4, length), 100 + i)  # a prefix in common
            body = {"prompt": prompt, "max_tokens": answer, "kv_cache_mode": MODES[i % 4], "ignore_eos": True}
            if kind == "cancel":
                return await cancelled(http, body, after=i % 6)
            return await plain(http, body, streamed=i % 2 == 0)

    async def everything() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=live.url, timeout=300, limits=limits) as http:
            gate = asyncio.Semaphore(concurrent)
            return await asyncio.gather(*(one(http, gate, i, kind) for i, kind in enumerate(kinds)))

    return Counter(asyncio.run(everything()))


async def malformed(http: httpx.AsyncClient, body: dict[str, Any], *, streamed: bool) -> str:
    response = await http.post(CHAT, json=body | {"stream": streamed})
    assert response.status_code in (400, 404)
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return "malformed"


async def cancelled(http: httpx.AsyncClient, body: dict[str, Any], *, after: int) -> str:
    async with http.stream("POST", TEXTS, json=body | {"stream": True, "max_tokens": 500}) as response:
        assert response.status_code == 200
        seen = 0
        async for line in response.aiter_lines():
            seen += line.startswith("data: ")
            if seen > after:
                break
    return "cancelled"


async def plain(http: httpx.AsyncClient, body: dict[str, Any], *, streamed: bool) -> str:
    response = await http.post(TEXTS, json=body | {"stream": streamed, "stream_options": None})
    assert response.status_code == 200, response.text
    if streamed:
        found = parse(200, response.content)
        assert found.done
        assert found.finish_reasons()[-1] == "length"
        assert found.text()
        assert all("error" not in chunk for chunk in found.chunks)
    else:
        answer = json.loads(response.content, parse_constant=pytest.fail)
        assert answer["usage"]["completion_tokens"] == body["max_tokens"]
        assert answer["choices"][0]["finish_reason"] == "length"
    return "plain"


def check_empty(live: Live, budget: int) -> None:
    """Nothing runs, and what is kept for reuse is within the budget."""
    assert live.idle()
    stats = live.engine.stats()
    assert (stats.running, stats.waiting, stats.healthy, stats.listener_errors) == (0, 0, True, 0)
    assert sum(use.running for use in stats.kv.values()) == 0
    assert sum(use.prefixes for use in stats.kv.values()) <= budget
    assert live.state.open == set()


def test_a_small_soak(folder: Path) -> None:
    model = kvcore.load(folder, backend="reference", window=WindowPolicy(recent_tokens=32, page_size=32))
    with serving(model, kv_cache_budget=2 * 2**20, max_batch=8, prefill_step=64) as live:
        found = soak(live, 50, concurrent=16, length=60, answer=12, seed=1)
        assert found == {"plain": 35, "cancelled": 10, "malformed": 5}
        check_empty(live, 2 * 2**20)
        stats = live.engine.stats()
        assert stats.prefix_hits > 0
        assert stats.finished["length"] == 35


@pytest.mark.full
@pytest.mark.parametrize("backend", ["reference", "cuda"])
def test_a_soak(folder: Path, backend: str) -> None:
    """500 requests, 16 at a time, twice: the second time memory does not grow."""
    if backend == "cuda" and importlib.util.find_spec("torch") is None:
        pytest.skip("the package torch is not installed")
    device = "cpu" if backend == "cuda" else None
    window = WindowPolicy(recent_tokens=32, page_size=32)
    model = kvcore.load(folder, backend=backend, device=device, dtype="float32", window=window)
    with serving(model, kv_cache_budget=BUDGET, max_batch=16, prefill_step=64) as live:
        sizes = []
        for seed in (1, 2):
            found = soak(live, 500, concurrent=16, length=300, answer=20, seed=seed)
            assert found == {"plain": 350, "cancelled": 100, "malformed": 50}
            check_empty(live, BUDGET)
            gc.collect()
            sizes.append(resident())
        assert live.engine.stats().finished["length"] == 700
        assert sizes[1] - sizes[0] < 40 * 2**20
        assert live.post(TEXTS, prompt="x", max_tokens=1).status_code == 200


def resident() -> int:
    """Bytes of this process that are in memory; 0 where /proc does not say."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * 4096 if path.is_file() else 0
