"""`kvcore bench generate`, `attention` and `cache`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.bench import report
from kvcore.bench.environment import describe
from kvcore.cli.options import (
    AttentionBenchOptions,
    BackendOptions,
    BenchOptions,
    CacheBenchOptions,
    CommonOptions,
    GenerateBenchOptions,
    ModelOption,
)
from kvcore.cli.terminal import note
from kvcore.errors import InputError
from kvcore.modes import resolve_mode
from kvcore.runtime import load


def bench_generate(
    model: ModelOption,
    bench: BenchOptions,
    options: GenerateBenchOptions,
    backend: BackendOptions,
    common: CommonOptions,
) -> None:
    """Prefill and decode of a model, mode by mode."""
    from kvcore.bench.generate import COLUMNS, run

    modes = _modes(bench.modes)
    lengths = _numbers("--prompt-tokens", options.prompt_tokens)
    _positive("--repeats", bench.repeats)
    if options.new_tokens < 2:
        raise InputError(f"--new-tokens {options.new_tokens}: must be 2 or more, because a rate needs an interval")
    loaded = load(
        model.model,
        backend=backend.backend,
        device=backend.device,
        dtype=backend.dtype,
        kernels=backend.kernels,
        notify=note,
    )
    ids = np.random.default_rng(0).integers(0, loaded.config.vocab_size, max(lengths)).tolist()
    rows = run(
        loaded,
        ids,
        modes=modes,
        prompt_tokens=lengths,
        new_tokens=options.new_tokens,
        repeats=bench.repeats,
        progress=note,
    )
    environment = {**describe(loaded.backend), "model": loaded.name, "seed": "0", "warm-up": "one run of each row"}
    _publish("generate", environment, rows, COLUMNS, bench, common)


def bench_attention(bench: BenchOptions, options: AttentionBenchOptions, common: CommonOptions) -> None:
    """The fused attention kernels beside torch's, on an NVIDIA GPU."""
    from kvcore.backends import load_backend

    modes = _modes(bench.modes)
    _positive("--repeats", bench.repeats)
    heads = _numbers("--heads", options.heads, "/", 3)
    shapes = [_numbers("--shapes", shape, "x", 2) for shape in options.shapes.split(",")]
    _sixteen_bits(options.bench_dtype)
    backend = load_backend("cuda")

    from kvcore.bench.attention import COLUMNS, Shape, plot, run

    rows = run(
        [Shape(*shape, *heads) for shape in shapes],
        modes,
        dtype=options.bench_dtype,
        repeats=max(bench.repeats, 11),
        progress=note,
    )
    environment = {**describe(backend), "warm-up": "three replays of each graph", "data": "normal, seed 0"}
    _publish("attention", environment, rows, COLUMNS, bench, common, plot)


def bench_cache(bench: BenchOptions, options: CacheBenchOptions, common: CommonOptions) -> None:
    """The kernels that write the paged cache, on an NVIDIA GPU."""
    from kvcore.backends import load_backend

    modes = _modes(bench.modes)
    _positive("--repeats", bench.repeats)
    batches = _numbers("--batches", options.batches)
    _sixteen_bits(options.bench_dtype)
    backend = load_backend("cuda")

    from kvcore.bench.cache import COLUMNS, run

    rows = run(modes, dtype=options.bench_dtype, batches=batches, repeats=max(bench.repeats, 11), progress=note)
    environment = {**describe(backend), "warm-up": "three replays of each graph", "data": "normal, seed 0"}
    _publish("cache", environment, rows, COLUMNS, bench, common)


def _publish(
    name: str,
    environment: Mapping[str, str],
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str],
    bench: BenchOptions,
    common: CommonOptions,
    plot: Callable[[Sequence[dict[str, Any]], str], None] | None = None,
) -> None:
    if common.json:
        print(json.dumps({"environment": environment, "rows": list(rows)}, indent=2))
    else:
        print(report.markdown(rows, columns))
    if bench.out is None:
        return
    folder = Path(bench.out).expanduser()
    for path in report.write(folder, name, environment, rows, columns):
        note(f"wrote {path}")
    if plot is not None:
        try:
            plot(rows, str(folder / f"{name}.png"))
        except ImportError:
            note("no plot: matplotlib is not installed (pip install 'kvcore[bench]')")


def _modes(words: str) -> list[str]:
    return [resolve_mode(word, note).name for word in words.split(",")]


def _numbers(flag: str, words: str, separator: str = ",", count: int | None = None) -> list[int]:
    parts = words.strip().split(separator)
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts) or (count and len(parts) != count):
        form = separator.join(["N"] * count) if count else "whole numbers from 1, comma-separated"
        raise InputError(f"{flag} {words}: must be {form}")
    return [int(part) for part in parts]


def _sixteen_bits(dtype: str) -> None:
    if dtype not in ("float16", "bfloat16"):
        raise InputError(f"--bench-dtype {dtype}: choose float16 or bfloat16")


def _positive(flag: str, number: int) -> None:
    if number < 1:
        raise InputError(f"{flag} {number}: must be 1 or more")
