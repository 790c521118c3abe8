"""The real model generates in each of the seven modes on each backend, and the cache holds what the mode says."""

from __future__ import annotations

import numpy as np
import pytest
from llamas import FOLDED_ROW_BYTES, Loader, margins

import kvcore
from kvcore.modes import MODES

pytestmark = pytest.mark.smollm2

QUESTION = "What is this text about?"
PROMPT_TOKENS = 400
NEW_TOKENS = 3
LAYERS, KV_HEADS, RAW_ROW = 30, 3, 512  # SmolLM2 with float32 raw rows: 2 · 64 · 4 bytes per token and KV head
SINKS = 4


def combinations() -> list[object]:
    """MLX takes long on a CPU: one mode of it, unless in full."""
    groups = {"reference": "smollm2", "mlx": "mlx", "torch": "smollm2"}
    found = []
    for name, group in groups.items():
        for mode in MODES:
            long = [pytest.mark.full] if name == "mlx" and mode != "turbo4" else []
            marks = [pytest.mark.xdist_group(group), *long]
            found.append(pytest.param(name, mode, marks=marks, id=f"{name}-{mode}"))
    return found


each_mode_and_backend = pytest.mark.parametrize(("name", "mode"), combinations())


@pytest.fixture(scope="session")
def long_prompt(smollm2: Loader, text_ids: np.ndarray) -> list[int]:
    """A chat of exactly 400 tokens: as much of the text as fits, then a question about it."""
    tokenizer = smollm2("reference").tokenizer
    for count in range(PROMPT_TOKENS, 0, -1):
        content = f"{tokenizer.decode(text_ids[:count].tolist())}\n\n{QUESTION}"
        ids = tokenizer.encode_chat([{"role": "user", "content": content}])
        if len(ids) == PROMPT_TOKENS:
            return ids
    raise AssertionError("no length of text makes a prompt of 400 tokens")


@pytest.fixture(scope="session")
def raw_first_token(smollm2: Loader, long_prompt: list[int]) -> int:
    """The first token without quantization; so far ahead of the second that no mode may take another."""
    model = smollm2("reference")
    last = model.forward(np.array([long_prompt]), model.new_cache("fp16"))[0, -1]
    assert margins(last) > 1
    return int(last.argmax())


@each_mode_and_backend
def test_generates_from_400_tokens(
    name: str, mode: str, smollm2: Loader, long_prompt: list[int], raw_first_token: int
) -> None:
    model = smollm2(name)
    cache = model.new_cache(mode)
    generation = model.generate(
        long_prompt, kvcore.SamplingParams(max_tokens=NEW_TOKENS), cache=cache, prefill_step=128
    )
    text, stats = "".join(generation), cache.stats()

    assert cache.mode.name == mode
    assert generation.token_ids[0] == raw_first_token
    assert len(generation.token_ids) == NEW_TOKENS
    assert text == model.tokenizer.decode(generation.token_ids) == generation.text
    assert text.startswith("This")
    assert stats.tokens == PROMPT_TOKENS + NEW_TOKENS - 1  # the last token is not run
    assert stats.nonfinite_rows == 0
    quantized = mode != "fp16"
    assert stats.rows_folded == (256 if quantized else 0)
    tail = stats.tokens - stats.rows_folded
    sinks = SINKS if quantized else 0
    assert stats.rows_raw == sinks + tail
    per_head = (sinks + tail) * RAW_ROW + stats.rows_folded * FOLDED_ROW_BYTES[mode]
    assert stats.kv_bytes == LAYERS * KV_HEADS * per_head
    assert stats.kv_bytes_raw == LAYERS * KV_HEADS * stats.tokens * RAW_ROW
    assert quantized == (stats.kv_bytes < stats.kv_bytes_raw)
    assert all(np.isfinite(part).all() for part in map(model.backend.ops.to_numpy, cache.dense(LAYERS - 1)))


@each_mode_and_backend
def test_generates_from_the_short_default_prompt(name: str, mode: str, smollm2: Loader) -> None:
    """Below 256 tokens nothing is folded, so every mode gives the raw one's text (each step's margin is above 0.19)."""
    model = smollm2(name)
    cache = model.new_cache(mode)
    generation = model.generate("Name three rivers.", kvcore.SamplingParams(max_tokens=8), cache=cache)
    assert "".join(generation) == "1. The River of Life: This"
    assert (cache.mode.name, cache.stats().rows_folded) == (mode, 0)
    assert cache.stats().kv_bytes == LAYERS * KV_HEADS * RAW_ROW * cache.offset
