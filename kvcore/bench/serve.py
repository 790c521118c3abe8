"""A load on a server with OpenAI's API: requests arrive at random, whether or not earlier ones are done."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from kvcore.errors import InputError, KvcoreError

COLUMNS = (
    "rate",
    "requests",
    "errors",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "duration_s",
    "total_tokens_per_s",
    "output_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "ttft_p99_ms",
    "itl_p50_ms",
    "itl_p95_ms",
    "itl_p99_ms",
    "e2e_p50_ms",
    "e2e_p99_ms",
)
CALIBRATION_WORDS = 200
# Short, common words: most tokenizers spell each with one token.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class Target:
    """A server. ``url`` ends in /v1; ``endpoint`` is chat or completions."""

    url: str
    model: str
    endpoint: str
    api_key: str | None
    timeout: float
    ignore_eos: bool

    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def path(self) -> str:
        return self.url + ("/chat/completions" if self.endpoint == "chat" else "/completions")

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.endpoint == "chat" else {"prompt": prompt}
        return body | ({"ignore_eos": True} if self.ignore_eos else {})


@dataclass(frozen=True, slots=True)
class Load:
    """What to ask for. Lengths are (least, most) tokens; ``shared`` is the part of a prompt that all have in common;
    ``rate`` in requests per second, infinite for all at once; ``concurrency``: most requests at a time, or None."""

    requests: int
    rate: float
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    shared: float
    concurrency: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to come: its prompt, most tokens of its answer, and when it is sent, seconds from the start."""

    prompt: str
    max_tokens: int
    at: float


@dataclass(slots=True)
class Timing:
    """What happened to a request; times in seconds from its planned arrival. ``gaps`` lie between pieces of text."""

    first: float | None = None
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    pieces: int = 0
    usage: dict[str, Any] | None = None
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """As the server counts; pieces of text where it does not."""
        return self.pieces if self.usage is None else int(self.usage["completion_tokens"])


def plan(load: Load, tokens_per_word: float) -> list[Asked]:
    """The requests of a load, the same for the same seed."""
    random = np.random.default_rng(load.seed)
    gaps = random.exponential(1 / load.rate, load.requests) if np.isfinite(load.rate) else np.zeros(load.requests)
    prompts = random.integers(load.prompt_tokens[0], load.prompt_tokens[1] + 1, load.requests)
    answers = random.integers(load.new_tokens[0], load.new_tokens[1] + 1, load.requests)
    most = round(load.prompt_tokens[1] / tokens_per_word)
    common = random.choice(WORDS, max(1, most)).tolist()
    asked = []
    for at, prompt, answer in zip(np.cumsum(gaps), prompts, answers, strict=True):
        words = max(1, round(prompt / tokens_per_word))
        shared = round(load.shared * words)
        own = random.choice(WORDS, words - shared).tolist()
        asked.append(Asked(" ".join(common[:shared] + own), int(answer), float(at)))
    return asked


def measure_words(target: Target) -> float:
    """Tokens per word of `WORDS`, by asking the server. KvcoreError where it does not answer or does not count."""
    random = np.random.default_rng(1)
    timing = asyncio.run(_one(target, " ".join(random.choice(WORDS, CALIBRATION_WORDS)), 1))
    if timing.error is not None:
        raise KvcoreError(f"{target.url} does not answer as expected: {timing.error}")
    if timing.usage is None:
        raise KvcoreError(f"{target.url} counts no tokens (no usage in its streams): give --tokens-per-word")
    return int(timing.usage["prompt_tokens"]) / CALIBRATION_WORDS


def run(target: Target, load: Load, tokens_per_word: float, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """One row: send the load, wait for every answer. ``progress(done, total)`` counts requests."""
    asked = plan(load, tokens_per_word)
    begin = time.perf_counter()
    timings = asyncio.run(_send(target, asked, load.concurrency, progress))
    return summary(load, timings, time.perf_counter() - begin)


def summary(load: Load, timings: Sequence[Timing], duration: float) -> dict[str, Any]:
    """The row of a table. Latencies are those of requests that ended well."""
    good = [timing for timing in timings if timing.error is None]
    prompt = sum(int(t.usage["prompt_tokens"]) for t in good if t.usage)
    cached = sum(_cached(t.usage) for t in good if t.usage)
    output = sum(t.output_tokens for t in good)
    row: dict[str, Any] = {
        "rate": load.rate,
        "requests": len(timings),
        "errors": len(timings) - len(good),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": output,
        "duration_s": duration,
        "requests_per_s": len(good) / duration,
        "total_tokens_per_s": (prompt + output) / duration,
        "output_tokens_per_s": output / duration,
    }
    row |= _percentiles("ttft", [t.first for t in good if t.first is not None])
    row |= _percentiles("itl", [gap for t in good for gap in t.gaps])
    row |= _percentiles("e2e", [t.end for t in good])
    kinds = Counter(t.error for t in timings if t.error is not None)
    return row | {"error_kinds": "; ".join(f"{count} x {kind}" for kind, count in kinds.most_common())}


async def _send(
    target: Target, asked: Sequence[Asked], concurrency: int | None, progress: Callable[[int, int], None]
) -> list[Timing]:
    gate = asyncio.Semaphore(concurrency or len(asked))
    begin = time.perf_counter()
    done = 0
    # One client: connections are kept, and their number is not limited on this side.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=target.timeout, limits=limits, headers=target.headers()) as http:

        async def one(each: Asked) -> Timing:
            nonlocal done
            await asyncio.sleep(max(0.0, begin + each.at - time.perf_counter()))
            async with gate:
                timing = await _ask(http, target, each, begin + each.at)
            done += 1
            progress(done, len(asked))
            return timing

        return list(await asyncio.gather(*(one(each) for each in asked)))


async def _one(target: Target, prompt: str, max_tokens: int) -> Timing:
    async with httpx.AsyncClient(timeout=target.timeout, headers=target.headers()) as http:
        return await _ask(http, target, Asked(prompt, max_tokens, 0.0), time.perf_counter())


async def _ask(http: httpx.AsyncClient, target: Target, asked: Asked, planned: float) -> Timing:
    """Times count from ``planned``, so that a client that cannot keep up does not hide waiting."""
    timing = Timing()
    try:
        async with asyncio.timeout(target.timeout):
            body = target.body(asked.prompt, asked.max_tokens)
            async with http.stream("POST", target.path(), json=body) as response:
                if response.status_code != 200:
                    timing.error = _refused(response.status_code, await response.aread())
                else:
                    await _read(response, timing, planned)
    except TimeoutError:
        timing.error = f"no end within {target.timeout:g} s"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        timing.error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    timing.end = time.perf_counter() - planned
    return timing


async def _read(response: httpx.Response, timing: Timing, planned: float) -> None:
    finished, last = False, planned
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        try:
            chunk = json.loads(data)
        except ValueError:
            timing.error = "an event is not JSON"
            return
        if chunk.get("error"):
            timing.error = f"error event: {_message(chunk['error'])}"
            return
        timing.usage = chunk.get("usage") or timing.usage
        for choice in chunk.get("choices", []):
            finished = finished or choice.get("finish_reason") is not None
            if choice.get("text") or choice.get("delta", {}).get("content"):
                now = time.perf_counter()
                if timing.pieces:
                    timing.gaps.append(now - last)
                else:
                    timing.first = now - planned
                timing.pieces += 1
                last = now
    if not finished:
        timing.error = "the stream ended without a finish reason"


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    if not seconds:
        return {f"{name}_p{p}_ms": None for p in (50, 95, 99)}
    values = np.percentile(np.asarray(seconds) * 1000, (50, 95, 99))
    return {f"{name}_p{p}_ms": float(value) for p, value in zip((50, 95, 99), values, strict=True)}


def _cached(usage: dict[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _refused(status: int, data: bytes) -> str:
    try:
        return f"status {status}: {_message(json.loads(data)['error'])}"
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


def _message(error: Any) -> str:
    text = error.get("message", "") if isinstance(error, dict) else str(error)
    return " ".join(str(text).split())[:200]


def first_model(url: str, api_key: str | None) -> str:
    """The first model that a server lists. KvcoreError where it cannot be asked."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        response = httpx.get(f"{url}/models", headers=headers, timeout=30)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise KvcoreError(f"{url}/models: {_refused(error.response.status_code, error.response.content)}") from error
    except httpx.InvalidURL as error:
        raise InputError(f"--url {url}: {error}") from error
    except httpx.HTTPError as error:
        raise KvcoreError(f"{url} does not answer ({error or type(error).__name__}): is the server running?") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise KvcoreError(f"{url}/models lists no models as OpenAI does: give --model") from error
