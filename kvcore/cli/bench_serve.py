"""`kvcore bench serve`: options to a load, rows to a table and files."""

from __future__ import annotations

import importlib.util
import json
import math
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvcore.bench import report
from kvcore.bench.environment import commit
from kvcore.cli.options import CommonOptions, ServeBenchOptions
from kvcore.cli.terminal import note, progress_bar
from kvcore.errors import InputError, KvcoreError
from kvcore.version import __version__


def bench_serve(options: ServeBenchOptions, common: CommonOptions) -> None:
    """One row for each rate. Everything is checked before the first request."""
    if importlib.util.find_spec("httpx") is None:
        raise InputError("kvcore bench serve needs httpx: pip install 'kvcore[server]'")
    rates = _rates(options.rate)
    prompts, answers = _range("--prompt-tokens", options.prompt_tokens), _range("--new-tokens", options.new_tokens)
    _check(options)

    from kvcore.bench.serve import COLUMNS, Load, Target, first_model, measure_words, run

    url = options.url.rstrip("/")
    model = options.model or first_model(url, options.api_key)
    target = Target(url, model, options.endpoint, options.api_key, options.timeout, options.ignore_eos)
    per_word = measure_words(target) if options.tokens_per_word is None else options.tokens_per_word
    rows: list[dict[str, Any]] = []
    for i, rate in enumerate(rates):
        # Another seed for each rate: the same prompts would be found in the server's cache.
        load = Load(
            options.requests, rate, prompts, answers, options.shared_prefix, options.max_concurrency, options.seed + i
        )
        note(f"{options.requests} requests to {url} at {rate:g} per second")
        with progress_bar("requests") as progress:
            rows.append(run(target, load, per_word, progress))
        if rows[-1]["errors"]:
            note(f"{rows[-1]['errors']} of {options.requests} requests failed: {rows[-1]['error_kinds']}")
    _publish(rows, COLUMNS, _environment(options, url, model, per_word), options, common)
    if all(row["errors"] == row["requests"] for row in rows):
        raise KvcoreError(f"every request failed: {rows[-1]['error_kinds']}")


def _publish(
    rows: list[dict[str, Any]],
    columns: tuple[str, ...],
    environment: dict[str, str],
    options: ServeBenchOptions,
    common: CommonOptions,
) -> None:
    strict = [{k: str(v) if v == math.inf else v for k, v in row.items()} for row in rows]  # JSON has no infinity
    if common.json:
        print(json.dumps({"environment": environment, "rows": strict}, indent=2))
    else:
        print(report.markdown(strict, columns))
    if options.out is not None:
        for path in report.write(Path(options.out).expanduser(), "serve", environment, strict, columns):
            note(f"wrote {path}")


def _environment(options: ServeBenchOptions, url: str, model: str, per_word: float) -> dict[str, str]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "kvcore": __version__,
        "commit": commit(),
        "url": url,
        "endpoint": options.endpoint,
        "model": model,
        "server": _server(url),
        "prompts": f"{options.prompt_tokens} tokens, {options.shared_prefix:.0%} of each shared",
        "answers": f"{options.new_tokens} tokens" + (", end tokens ignored" if options.ignore_eos else " at most"),
        "arrivals": "Poisson" + (f", at most {options.max_concurrency} at a time" if options.max_concurrency else ""),
        "times": "from the planned arrival; itl between pieces of text",
        "tokens per word": f"{per_word:.3f}",
        "seed": str(options.seed),
        "warm-up": "one request" if options.tokens_per_word is None else "none",
        "python": platform.python_version(),
    }


def _server(url: str) -> str:
    """What the server says of itself: kvcore's mode, backend and device, or what its headers have."""
    import httpx

    root = re.sub(r"/v1$", "", url)
    try:
        response = httpx.get(f"{root}/health", timeout=10)
        health = response.json()
        mode, backend = health["mode"], health["backend"]
        kernels = " ".join(kernel["kernel"] for kernel in health["kernels"])
        return (
            f"kvcore {health['version']}, mode {mode['effective']} (requested {mode['requested']}), {backend['name']} "
            f"on {backend['versions'].get('gpu', backend['device'])}, {health['dtype']}, kernels {kernels}, "
            f"{health['kv_cache_budget']} bytes for caches"
        )
    except httpx.HTTPError:
        return "unknown"
    except (ValueError, KeyError, TypeError):
        return str(response.headers.get("server", "unknown"))


def _check(options: ServeBenchOptions) -> None:
    if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", options.url):
        raise InputError(f"--url {options.url}: give an address such as http://127.0.0.1:8080/v1")
    if options.endpoint not in ("chat", "completions"):
        raise InputError(f"--endpoint {options.endpoint}: choose chat or completions")
    for name in ("requests", "max_concurrency"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    if not 0 <= options.shared_prefix <= 1:
        raise InputError(f"--shared-prefix {options.shared_prefix:g}: must be from 0 to 1")
    for name in ("timeout", "tokens_per_word"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"--{name.replace('_', '-')} {value:g}: must be above 0")
    if options.seed < 0:
        raise InputError(f"--seed {options.seed}: must be 0 or more")


def _rates(words: str) -> list[float]:
    try:
        rates = [float(word) for word in words.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(rate > 0 for rate in rates):
        raise InputError(f"--rate {words}: must be numbers above 0, comma-separated, or inf")
    return rates


def _range(flag: str, words: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", words.strip(), re.ASCII)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise InputError(f"{flag} {words}: must be a number from 1, or a range such as 256-1024")
    return least, most
