"""`kvcore bench decode`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcore.bench.environment import describe
from kvcore.cli.bench import check_positive, loader, modes_of, numbers, publish
from kvcore.cli.options import (
    BackendOptions,
    BenchOptions,
    CommonOptions,
    DecodeBenchOptions,
    ModelOption,
    ParallelOptions,
)
from kvcore.cli.ranks import leads, work
from kvcore.cli.terminal import note
from kvcore.errors import InputError
from kvcore.loading import resolve_dtype

if TYPE_CHECKING:
    from kvcore.backends import Backend
    from kvcore.bench.decode import Subject
    from kvcore.models.config import LlamaConfig
    from kvcore.runtime import Model


def bench_decode(
    model: ModelOption,
    bench: BenchOptions,
    options: DecodeBenchOptions,
    backend: BackendOptions,
    parallel: ParallelOptions,
    common: CommonOptions,
) -> None:
    """Decode of a whole model at long contexts, mode by mode."""
    from kvcore.bench.decode import COLUMNS, Settings, plot, run, with_peer

    load_it = loader(model, backend, parallel.tensor_parallel)
    if not leads(parallel):
        work(load_it)
    modes = modes_of(bench.modes)
    lengths = numbers("--prompt-tokens", options.prompt_tokens)
    for name, number in (
        ("--repeats", bench.repeats),
        ("--batch", options.batch),
        ("--max-tokens", options.max_tokens),
        ("--prefill-step-size", options.prefill_step_size),
    ):
        check_positive(name, number)
    if options.fill not in ("real", "random"):
        raise InputError(f"--fill {options.fill}: choose real or random")
    if options.peer not in ("none", "transformers"):
        raise InputError(f"--peer {options.peer}: choose none or transformers")
    if parallel.tensor_parallel > 1:
        _check_ranks(options)
    subject = _subject(model, options.random_model, backend, load_it, max(lengths), options.max_tokens)
    made = None if options.peer == "none" else _peer(subject)
    settings = Settings(
        modes,
        lengths,
        batch=options.batch,
        max_tokens=options.max_tokens,
        repeats=bench.repeats,
        fill=options.fill,
        prefill_step=options.prefill_step_size,
        bandwidth=_bandwidth(subject.backend),
    )
    rows = run(subject, settings, note)
    peer = {}
    if made is not None:
        theirs = cache(lambda: made.Peer(subject.config, subject.backend.device))
        rows, absent = with_peer(subject, settings, rows, options.peer, lambda *what: theirs().measure(*what), note)
        peer = {"peer": "; ".join([f"{options.peer} {made.RELEASE}, bf16 weights", *absent])}
    measured = "none" if settings.bandwidth is None else f"{settings.bandwidth / 1e12:.2f} TB/s"
    environment = {**describe(subject.backend), "model": subject.name, "seed": "0", "read ceiling": measured, **peer}
    if subject.shared is not None:
        environment["ranks"] = f"{parallel.tensor_parallel} over {subject.params.ranks.name}"
    publish("decode", environment, rows, COLUMNS, bench, common, plot)


def _check_ranks(options: DecodeBenchOptions) -> None:
    """InputError for what one process does alone."""
    if options.random_model is not None:
        raise InputError("--random-model with ranks: write it with kvcore bench model, and give --model")
    if options.fill == "random":
        raise InputError("--fill random draws rows for one process: with ranks use --fill real")
    if options.peer != "none":
        raise InputError(f"--peer {options.peer} runs in one process: leave it out with ranks")


def _subject(
    model: ModelOption,
    random_model: str | None,
    options: BackendOptions,
    load_it: Callable[[], Model],
    tokens: int,
    more: int,
) -> Subject:
    from kvcore.backends import load_backend
    from kvcore.bench.decode import Subject
    from kvcore.bench.random_model import random_checkpoint

    def check(config: LlamaConfig) -> None:
        if tokens + more > config.max_position:
            raise InputError(
                f"--prompt-tokens {tokens} with --max-tokens {more}: the model's context holds {config.max_position} "
                "tokens"
            )

    if random_model is None:
        loaded = load_it()
        check(loaded.config)
        return Subject.of(loaded)
    if model.model is not None:
        raise InputError(f"--model {model.model} and --random-model {random_model}: choose one")
    checkpoint, backend = random_checkpoint(random_model), load_backend(options.backend, options.device)
    check(checkpoint.config)
    note(f"making {random_model} with synthetic weights")
    return Subject.random(
        backend, checkpoint, random_model, dtype=resolve_dtype(options.dtype), kernels=options.kernels
    )


def _peer(subject: Subject) -> Any:
    """The module that times transformers, before anything else takes time."""
    if subject.backend.name != "cuda":
        raise InputError(
            "--peer transformers runs on torch: use --backend cuda, with --device cpu where there is no GPU"
        )
    # Integrations are plugins that nothing imports: this one is found by its name, when it is asked for.
    return import_module("kvcore.integrations.transformers.peer")


def _bandwidth(backend: Backend) -> float | None:
    """Bytes per second that a GPU's memory is read at best, measured."""
    if not backend.device.startswith("cuda"):
        return None
    from kvcore.bench.attention import read_ceiling

    return 1e12 * read_ceiling()
