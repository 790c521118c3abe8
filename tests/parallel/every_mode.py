"""Run by each rank: greedy tokens of a model in every mode, as JSON by rank 0.

every_mode.py MODEL BACKEND DEVICE RANKS PROMPT_TOKENS NEW_TOKENS
"""

from __future__ import annotations

import json
import sys

import numpy as np

import kvcore
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES


def tokens(model: kvcore.Model, prompt_tokens: int, new_tokens: int) -> dict[str, list[int]]:
    """For each mode; the window is small, so that most of the prompt and some of the answer are quantized."""
    ids = np.random.default_rng(0).integers(5, 200, prompt_tokens).tolist()
    params = kvcore.SamplingParams(max_tokens=new_tokens)
    found = {}
    for mode in MODES:
        generation = model.generate(ids, params, cache=model.new_cache(mode), prefill_step=48)
        for _ in generation:
            pass
        stats = generation.cache.stats()
        assert mode == "fp16" or stats.rows_folded > new_tokens // 2
        found[mode] = generation.token_ids
    return found


def load(path: str | None, backend: str, device: str | None, ranks: int) -> kvcore.Model:
    window = WindowPolicy(sink_tokens=2, recent_tokens=16, page_size=16)
    return kvcore.load(path, backend=backend, device=device, window=window, tensor_parallel=ranks)


def main() -> None:
    path, backend, device, ranks, prompt_tokens, new_tokens = sys.argv[1:]
    model = load(path or None, backend, device or None, int(ranks))
    print(json.dumps(tokens(model, int(prompt_tokens), int(new_tokens))), flush=True)


if __name__ == "__main__":
    main()
