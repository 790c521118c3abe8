"""Speed of prefill and decode of a real model, mode by mode, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from kvcore.modes import resolve_mode
from kvcore.runtime import Model
from kvcore.sampling import SamplingParams

COLUMNS = (
    "mode",
    "effective_mode",
    "kernels",
    "dtype",
    "prompt_tokens",
    "new_tokens",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "decode_min",
    "decode_max",
    "ratio_to_fp16",
    "kv_bytes",
    "rows_folded",
)


def run(
    model: Model,
    text_ids: Sequence[int],
    *,
    modes: Sequence[str],
    prompt_tokens: Sequence[int],
    new_tokens: int,
    repeats: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One row per prompt length and mode: medians over ``repeats`` after one warm-up of the same shape.

    Modes take turns within each repeat. Rates include sampling on the host; loading and tokenization are not included.
    """
    rows = []
    for length in prompt_tokens:
        ids = [text_ids[i % len(text_ids)] for i in range(length)]
        samples: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
        last: dict[str, Any] = {}
        for repeat in range(repeats + 1):
            for mode in modes:
                progress(f"{length} tokens, {mode}, " + (f"repeat {repeat}" if repeat else "warm-up"))
                generation = model.generate(
                    ids, SamplingParams(max_tokens=new_tokens), raw=True, cache=model.new_cache(mode)
                )
                for _ in generation:
                    pass
                if repeat:
                    stats = generation.stats
                    samples[mode].append((stats.prompt_tokens_per_second, stats.generation_tokens_per_second))
                last[mode] = generation
        rows += [_row(mode, length, samples[mode], last[mode], model) for mode in modes]
    for row in rows:
        base = [r for r in rows if r["mode"] == "fp16" and r["prompt_tokens"] == row["prompt_tokens"]]
        if base:
            row["ratio_to_fp16"] = row["decode_tokens_per_s"] / base[0]["decode_tokens_per_s"]
    return rows


def _row(mode: str, length: int, samples: list[tuple[float, float]], generation: Any, model: Model) -> dict[str, Any]:
    cache = generation.cache
    stats = cache.stats()
    decode = [rate for _, rate in samples]
    return {
        "mode": resolve_mode(mode).name,
        "effective_mode": cache.mode.name,
        "kernels": " ".join(decision.kernel for decision in cache.decisions),
        "dtype": model.params.dtype,
        "prompt_tokens": length,
        "new_tokens": generation.stats.generation_tokens,
        "repeats": len(samples),
        "prefill_tokens_per_s": median(rate for rate, _ in samples),
        "decode_tokens_per_s": median(decode),
        "decode_min": min(decode),
        "decode_max": max(decode),
        "kv_bytes": stats.kv_bytes,
        "kv_bytes_raw": stats.kv_bytes_raw,
        "rows_raw": stats.rows_raw,
        "rows_folded": stats.rows_folded,
    }
