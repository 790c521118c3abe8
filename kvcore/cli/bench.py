"""`kvcore bench generate`, `rates`, `attention`, `cache`, `linear` and `transformers`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.backends import Backend, load_backend
from kvcore.bench import report
from kvcore.bench.environment import describe, machine
from kvcore.cli.options import (
    AttentionBenchOptions,
    BackendOptions,
    BenchOptions,
    CacheBenchOptions,
    CommonOptions,
    GenerateBenchOptions,
    LinearBenchOptions,
    ModelOption,
    ParallelOptions,
    RatesBenchOptions,
    TransformersBenchOptions,
)
from kvcore.cli.ranks import leads, work
from kvcore.cli.terminal import note
from kvcore.errors import BackendError, InputError
from kvcore.loading import load
from kvcore.modes import resolve_mode
from kvcore.runtime import Model


def loader(model: ModelOption, backend: BackendOptions, ranks: int = 1) -> Callable[[], Model]:
    """What loads the chosen model, or one of ``ranks`` shares of it."""
    return partial(
        load,
        model.model,
        backend=backend.backend,
        device=backend.device,
        dtype=backend.dtype,
        kernels=backend.kernels,
        notify=note,
        tensor_parallel=ranks,
    )


def bench_generate(
    model: ModelOption,
    bench: BenchOptions,
    options: GenerateBenchOptions,
    backend: BackendOptions,
    parallel: ParallelOptions,
    common: CommonOptions,
) -> None:
    """Prefill and decode of a model, mode by mode."""
    from kvcore.bench.generate import COLUMNS, run

    load_it = loader(model, backend, parallel.tensor_parallel)
    if not leads(parallel):
        work(load_it)
    modes = modes_of(bench.modes)
    lengths = numbers("--prompt-tokens", options.prompt_tokens)
    check_positive("--repeats", bench.repeats)
    if options.new_tokens < 2:
        raise InputError(f"--new-tokens {options.new_tokens}: must be 2 or more, because a rate needs an interval")
    loaded = load_it()
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
    if parallel.tensor_parallel > 1:
        environment["ranks"] = f"{parallel.tensor_parallel} over {loaded.params.ranks.name}"
    publish("generate", environment, rows, COLUMNS, bench, common)


SHAPES = {
    "cuda": "1x2048,1x8192,1x32768,1x131072,4x32768,16x8192,16x32768,64x8192",
    "metal": "1x2048,1x8192,1x32768,1x131072",
}


def bench_rates(
    model: ModelOption,
    bench: BenchOptions,
    options: RatesBenchOptions,
    backend: BackendOptions,
    common: CommonOptions,
) -> None:
    """The rates of `kvcore advise --rates`; with --json, its file."""
    from kvcore.bench.rates import COLUMNS, measure, rows

    modes = modes_of(bench.modes)
    lengths, batches = numbers("--prompt-tokens", options.prompt_tokens), numbers("--batches", options.batches)
    check_positive("--repeats", bench.repeats)
    loaded = loader(model, backend)()
    measured = measure(
        loaded,
        modes=modes,
        batches=batches,
        prompts=lengths,
        chunk=options.prefill_step_size,
        steps=options.new_tokens,
        repeats=bench.repeats,
        progress=note,
    )
    environment = {**describe(loaded.backend), "model": loaded.name, "seed": "0", "warm-up": "one run of each row"}
    environment |= {"unit": "microseconds", "prefill step": str(options.prefill_step_size)}
    found = {"environment": environment, "modes": {mode: asdict(rates) for mode, (rates, _) in measured.items()}}
    if bench.out is not None:
        path = Path(bench.out).expanduser() / "rates.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        note(f"wrote {path}")
    if common.json:
        print(json.dumps(found, indent=2))
        return
    publish("rates", environment, rows(measured, options.prefill_step_size), COLUMNS, bench, common)


def bench_attention(bench: BenchOptions, options: AttentionBenchOptions, common: CommonOptions) -> None:
    """The fused attention kernels beside torch's on an NVIDIA GPU, or beside MLX's on an Apple one."""
    from kvcore.bench.shape import Shape

    if options.backend not in SHAPES:
        raise InputError(f"--backend {options.backend}: this benchmark knows cuda and metal")
    modes = modes_of(bench.modes)
    check_positive("--repeats", bench.repeats)
    heads = numbers("--heads", options.heads, "/", 3)
    words = (options.shapes or SHAPES[options.backend]).split(",")
    shapes = [Shape(*numbers("--shapes", shape, "x", 2), *heads) for shape in words]
    _sixteen_bits(options.bench_dtype)
    backend = _gpu_backend("attention") if options.backend == "cuda" else load_backend(options.backend)
    environment = {**describe(backend), "data": "normal, seed 0"}
    repeats = max(bench.repeats, 11)
    if options.backend == "metal":
        if backend.device != "metal":
            raise BackendError("bench attention --backend metal: MLX has no Metal here; run it on an Apple GPU")
        from kvcore.bench import attention_metal

        rows = attention_metal.run(backend, shapes, modes, dtype=options.bench_dtype, repeats=repeats, progress=note)
        environment["warm-up"] = "three runs of each variant"
        publish("attention", environment, rows, attention_metal.COLUMNS, bench, common)
        return

    from kvcore.bench.attention import COLUMNS, plot, run

    rows = run(shapes, modes, dtype=options.bench_dtype, repeats=repeats, progress=note)
    environment["warm-up"] = "three replays of each graph"
    publish("attention", environment, rows, COLUMNS, bench, common, plot)


def bench_cache(bench: BenchOptions, options: CacheBenchOptions, common: CommonOptions) -> None:
    """The kernels that write the paged cache, on an NVIDIA GPU."""
    modes = modes_of(bench.modes)
    check_positive("--repeats", bench.repeats)
    batches = numbers("--batches", options.batches)
    _sixteen_bits(options.bench_dtype)
    backend = _gpu_backend("cache")

    from kvcore.bench.cache import COLUMNS, run

    rows = run(modes, dtype=options.bench_dtype, batches=batches, repeats=max(bench.repeats, 11), progress=note)
    environment = {**describe(backend), "warm-up": "three replays of each graph", "data": "normal, seed 0"}
    publish("cache", environment, rows, COLUMNS, bench, common)


def _gpu_backend(name: str) -> Backend:
    """BackendError without an NVIDIA GPU: these benchmarks have nothing to time elsewhere."""
    try:
        return load_backend("cuda")
    except BackendError as error:
        why = str(error).removeprefix("backend cuda: ").partition(";")[0]
        raise BackendError(
            f"bench {name} times CUDA kernels: {why}; run it on a machine with an NVIDIA GPU, or time a whole model "
            "here with kvcore bench decode"
        ) from None


def bench_linear(options: LinearBenchOptions, common: CommonOptions) -> None:
    """The products of a decode step, on an NVIDIA GPU."""
    from kvcore.bench.random_model import random_checkpoint

    check_positive("--repeats", options.repeats)
    rows = list(dict.fromkeys(numbers("--rows", options.rows)))
    checkpoint = random_checkpoint(options.random_model)
    backend = _gpu_backend("linear")
    if backend.fused_ops is None:
        raise BackendError(
            f"bench linear: no kernels for {backend.arch}: they need sm_80 or newer, and Triton; time a whole model "
            "here with kvcore bench decode"
        )

    from kvcore.bench.linear import COLUMNS, run

    found, peers = run(checkpoint, rows, repeats=max(options.repeats, 11), progress=note)
    environment = {
        **describe(backend),
        "model": options.random_model,
        "warm-up": "three replays of each graph",
        "data": "normal, seed 0",
        **peers,
        "configs": "warps x tiles x chunks, + turns ahead for few rows",
    }
    publish("linear", environment, found, COLUMNS, options, common)


def bench_transformers(bench: BenchOptions, options: TransformersBenchOptions, common: CommonOptions) -> None:
    """A decode step of a random llama in transformers, cache by cache."""
    modes = modes_of(bench.modes)
    check_positive("--repeats", bench.repeats)
    q_heads, kv_heads, head_dim = numbers("--heads", options.heads, "/", 3)
    if q_heads % kv_heads:
        raise InputError(f"--heads {options.heads}: {q_heads} query heads are no multiple of {kv_heads} KV heads")
    if options.bench_dtype not in ("float16", "bfloat16", "float32"):
        raise InputError(f"--bench-dtype {options.bench_dtype}: choose float16, bfloat16 or float32")
    if options.device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", options.device):
        raise InputError(f"--device {options.device}: choose cuda, cuda:N or cpu")
    # Integrations are plugins that nothing imports: this one's benchmark is found by its name, when it is asked for.
    made = import_module("kvcore.integrations.transformers.bench")
    setting = made.Setting(
        options.layers,
        options.context,
        options.batch,
        *(q_heads, kv_heads, head_dim, options.vocab),
        options.bench_dtype,
        options.device,
    )
    rows = made.run(setting, modes, repeats=max(bench.repeats, 10), progress=note)
    publish("transformers", {**machine(), **made.environment(setting)}, rows, made.COLUMNS, bench, common)


def publish(
    name: str,
    environment: Mapping[str, str],
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str],
    bench: BenchOptions | LinearBenchOptions,
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


def modes_of(words: str) -> list[str]:
    return [resolve_mode(word, note).name for word in words.split(",")]


def numbers(flag: str, words: str, separator: str = ",", count: int | None = None) -> list[int]:
    parts = words.strip().split(separator)
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts) or (count and len(parts) != count):
        form = separator.join(["N"] * count) if count else "whole numbers from 1, comma-separated"
        raise InputError(f"{flag} {words}: must be {form}")
    return [int(part) for part in parts]


def _sixteen_bits(dtype: str) -> None:
    if dtype not in ("float16", "bfloat16"):
        raise InputError(f"--bench-dtype {dtype}: choose float16 or bfloat16")


def check_positive(flag: str, number: int) -> None:
    if number < 1:
        raise InputError(f"{flag} {number}: must be 1 or more")
