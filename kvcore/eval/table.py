"""The table: which variants, their positions window by window, and a row of figures for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvcore.errors import InputError
from kvcore.eval.baselines import BASELINES, baseline_variant
from kvcore.eval.codecs import Variant, product_variant
from kvcore.eval.metrics import Positions, summarize
from kvcore.eval.rows import RawRows
from kvcore.eval.score import RAW, noise_floor, raw_logits, score
from kvcore.eval.state import State
from kvcore.eval.text import Text
from kvcore.eval.trials import TRIALS, trial_variant
from kvcore.modes import MODES, resolve_mode
from kvcore.runtime import Model

COLUMNS = (
    *("variant", "window", "bytes", "bytes_at_context", "kl", "kl_low", "kl_high", "kl_p99", "top1"),
    *("ppl_ratio", "rms_dp", "all_kl", "all_top1", "all_ppl_ratio"),
)
GROUPS = {
    "modes": tuple(name for name, mode in MODES.items() if mode.quantized),
    "baselines": tuple(BASELINES),
    "trials": tuple(TRIALS),
}
SLIDING = "sliding"  # a window that moves by one row, as a baseline's own cache would have it


def variants(words: str, rows: RawRows, windows: Sequence[str] = ("own",)) -> list[Variant]:
    """The variants that comma-separated ``words`` name: modes, aliases, baselines, trials, or one of `GROUPS`.

    ``windows``: each variant once for "own" (``rows``), "sliding" (the same, page 1) and "none". The raw mode comes
    once. InputError for an unknown word.
    """
    kinds = {"own": rows, SLIDING: replace(rows, page=1), "none": RawRows.none()}
    if unknown := [word for word in windows if word not in kinds]:
        raise InputError(f"unknown window '{unknown[0]}': choose among {', '.join(kinds)}")
    names = [name for word in words.split(",") for name in GROUPS.get(word.strip(), (word.strip(),))]
    made = {v.key: v for window in windows for name in names if (v := _variant(name, kinds[window]))}
    return list(made.values())


def _variant(name: str, rows: RawRows) -> Variant:
    if name in BASELINES:
        return baseline_variant(name, rows)
    if name in TRIALS:
        return trial_variant(name, rows)
    try:
        mode = resolve_mode(name)
    except InputError as error:
        raise InputError(f"{error}; or of baselines: {', '.join(BASELINES)}; or of {', '.join(GROUPS)}") from error
    return product_variant(mode, rows) if mode.quantized else RAW


def measure(
    model: Model,
    text: Text,
    chosen: Sequence[Variant],
    path: str,
    state: State,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, list[Positions]]:
    """Positions by variant key, a list over the text's windows. What ``state`` has is not computed again."""
    total, done = len(text.starts) * len(chosen), 0
    for start in text.starts:
        raw: np.ndarray | None = None
        for variant in chosen:
            progress(done, total)
            key = state_key(variant, start)
            if state.get(key) is None:
                ids = text.window(start)
                raw = raw_logits(model, ids, path) if raw is None else raw
                run = noise_floor(model, ids, raw, path) if variant.raw else score(model, ids, raw, variant, path)
                state.put(key, run)
            done += 1
    progress(done, total)
    return {variant.key: list(_windows(variant, text, state)) for variant in chosen}


def state_key(variant: Variant, start: int) -> str:
    """With the codecs' names: what a mode stores may change."""
    return f"{variant.key} {variant.k.name}/{variant.v.name} @ {start}"


def _windows(variant: Variant, text: Text, state: State) -> Iterator[Positions]:
    for start in text.starts:
        positions = state.get(state_key(variant, start))
        assert positions is not None
        yield positions


def rows(
    model: Model, text: Text, chosen: Sequence[Variant], measured: dict[str, list[Positions]], since: int
) -> list[dict[str, Any]]:
    """One row per variant. Plain names are over positions from ``since`` on, names with ``all_`` over all of them.

    Bytes are per token and KV head, K and V together, with 16-bit raw rows: of a coded row, and of a cache that holds
    the context, raw rows included.
    """
    dim = model.config.head_dim
    made = []
    for variant in chosen:
        windows = measured[variant.key]
        made.append(
            {
                "variant": "fp16 (noise floor)" if variant.raw else variant.name,
                "k": variant.k.name,
                "v": variant.v.name,
                "window": "" if variant.raw else variant.rows.label,
                "context": text.context,
                "windows": len(windows),
                "since": since,
                "bytes": variant.row_bytes(dim),
                "bytes_at_context": variant.cache_bytes(text.context, dim),
                **summarize([window.since(since) for window in windows]),
                **{f"all_{name}": value for name, value in summarize(windows).items()},
            }
        )
    return made
