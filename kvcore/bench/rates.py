"""How long this machine's engine takes for prefill and decode, for the simulation of `kvcore advise --rates`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from kvcore.engine import Engine, EngineConfig, Request
from kvcore.engine.types import Output
from kvcore.errors import KvcoreError
from kvcore.generate import chunks_of
from kvcore.planning import Rates, Sample, fit
from kvcore.runtime import Model
from kvcore.sampling import SamplingParams

COLUMNS = ("mode", "chunk", "prompt_token", "prompt_pair", "step", "sequence", "context_token", "worst_misfit")


def measure(
    model: Model,
    *,
    modes: Sequence[str],
    batches: Sequence[int],
    prompts: Sequence[int],
    chunk: int,
    steps: int,
    repeats: int,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, tuple[Rates, list[Sample]]]:
    """By mode: the rates, and the medians that they were fitted to.

    Each prompt length is prefilled alone; each batch decodes ``steps`` tokens behind prompts of each length. Modes take
    turns. Times are those of the engine's steps, sampling and text included; prompts are random and never reused.
    """
    random = np.random.default_rng(0)
    times: dict[str, dict[tuple[str, int, int], list[float]]] = {mode: {} for mode in modes}
    for repeat in range(repeats + 1):
        for mode in modes:
            progress(f"{mode}, " + (f"repeat {repeat}" if repeat else "warm-up"))
            for length in prompts:
                for batch in batches:
                    found = _run(model, mode, batch, length, chunk, steps, random)
                    for key, seconds in found.items() if repeat else ():
                        times[mode].setdefault(key, []).extend(seconds)
    measured = {}
    for mode in modes:
        samples = [_sample(key, median(seconds), chunk) for key, seconds in sorted(times[mode].items())]
        measured[mode] = (fit(samples), samples)
    return measured


def rows(measured: dict[str, tuple[Rates, list[Sample]]], chunk: int) -> list[dict[str, Any]]:
    """Microseconds, and the largest relative distance of a median from the fit."""
    found = []
    for mode, (rates, samples) in measured.items():
        names = ("chunk", "prompt_token", "prompt_pair", "step", "sequence", "context_token")
        row: dict[str, Any] = {"mode": mode} | {name: getattr(rates, name) * 1e6 for name in names}
        found.append(row | {"worst_misfit": max(abs(_predicted(rates, s, chunk) / s.seconds - 1) for s in samples)})
    return found


def _predicted(rates: Rates, sample: Sample, chunk: int) -> float:
    if sample.kind == "prefill":
        return rates.prefill(sample.count, chunk)
    return rates.decode(sample.count, sample.context)


def _sample(key: tuple[str, int, int], seconds: float, chunk: int) -> Sample:
    kind, count, context = key
    if kind == "prefill":
        return Sample("prefill", count, 0, seconds, chunks_of(count, chunk))
    return Sample("decode", count, context, seconds)


def _run(
    model: Model, mode: str, batch: int, length: int, chunk: int, steps: int, random: np.random.Generator
) -> dict[tuple[str, int, int], list[float]]:
    """Prefill ``batch`` prompts one after the other, of which the first is alone and counts, then decode them all."""
    engine = Engine(model, EngineConfig(max_batch=batch, prefill_step=chunk, prefix_reuse=False))
    failed: list[str] = []

    def listen(output: Output) -> None:
        if output.error is not None:
            failed.append(output.error)

    found: dict[tuple[str, int, int], list[float]] = {}
    chunks = chunks_of(length, chunk)
    no_end = dict.fromkeys(model.eos_token_ids, -100.0)
    for number in range(batch):
        prompt = tuple(random.integers(0, model.config.vocab_size, length).tolist())
        params = SamplingParams(max_tokens=steps + batch * chunks + 4, logit_bias=no_end)
        request = Request(str(number), prompt, params, mode=mode)
        engine.submit(request, listen)
        begin = time.perf_counter()
        while engine.stats().prompt_tokens < (number + 1) * length and not failed:
            engine.step()
        if number == 0:
            found["prefill", length, 0] = [time.perf_counter() - begin]
    taken = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - begin)
    if failed:
        raise KvcoreError(f"mode {mode}, batch {batch}, prompts of {length} tokens: {failed[0]}")
    engine.stop()
    earlier = chunks * batch * (batch - 1) // 2  # tokens that came while later prompts were prefilled
    found["decode", batch, batch * (length + steps // 2) + earlier] = [median(taken)]
    return found
