"""The real model in mlx-lm with kvcore's caches: stock's tokens in fp16, kvcore's own in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx_lm
from conftest import sure_steps
from mlx_lm.generate import BatchGenerator, generate_step

import kvcore
from kvcore.integrations.mlx_lm import make_prompt_cache, patched
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

pytestmark = [pytest.mark.smollm2, pytest.mark.xdist_group("mlx-lm-smollm2")]

NEW = 4
SMALL = WindowPolicy(recent_tokens=16, page_size=16)  # so that a prompt of 36 tokens folds


@pytest.fixture(scope="module")
def model(hf_folder: Path) -> Any:
    """With plain weights: MLX's quantized product is slow on a CPU."""
    return mlx_lm.load(str(hf_folder))[0]


def greedy(model: Any, prompt: list[int], **settings: Any) -> tuple[list[int], np.ndarray]:
    """Tokens, and log-probabilities [NEW, vocab]."""
    steps = list(generate_step(mx.array(prompt), model, max_tokens=NEW, **settings))
    return [int(token) for token, _ in steps], np.stack([np.array(scores) for _, scores in steps])


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.full, id="long"), pytest.param(1, id="short")])
def test_fp16_is_stock_alone_and_in_a_batch_of_three(first: int, model: Any, prompts: list[list[int]]) -> None:
    prompts = prompts[first : first + 3]
    stock = [greedy(model, prompt) for prompt in prompts]
    assert sum(sure_steps(scores) for _, scores in stock) > NEW, "hardly a step has a clear winner"
    with patched(model, "fp16"):
        alone = [greedy(model, prompt)[0] for prompt in prompts]
        generator = BatchGenerator(model, max_tokens=NEW)
        batch: dict[int, list[int]] = {uid: [] for uid in generator.insert(prompts, [NEW] * 3)}
        while any(len(tokens) < NEW for tokens in batch.values()):
            for each in generator.next()[1]:
                batch[each.uid].append(each.token)
    for got in (alone, list(batch.values())):
        for mine, (want, scores) in zip(got, stock, strict=True):
            steps = sure_steps(scores)
            assert mine[:steps] == want[:steps]


def test_stream_generate_takes_no_more_than_the_block(mlx_folder: Path, prompts: list[list[int]]) -> None:
    """On the quantized weights that `kvcore convert --to mlx` writes."""
    model, tokenizer = mlx_lm.load(str(mlx_folder))
    with patched(model, "int8"):
        pieces = list(mlx_lm.stream_generate(model, tokenizer, prompts[1], max_tokens=NEW))
    assert "".join(piece.text for piece in pieces).startswith("1. 1")


@pytest.mark.parametrize(
    ("mode", "which", "window"),
    [
        pytest.param("turbo4", 1, SMALL, id="turbo4-short"),
        *(pytest.param(mode, 0, WindowPolicy(), marks=pytest.mark.full, id=f"{mode}-long") for mode in MODES),
    ],
)
def test_each_mode_is_kvcores_own(
    mode: str, which: int, window: WindowPolicy, model: Any, smollm2_path: Path, prompts: list[list[int]]
) -> None:
    """mlx-lm runs the last prompt token as a step of its own; kvcore's generation is chunked there too."""
    native = kvcore.load(smollm2_path, backend="metal", dtype="float32", window=window)
    prompt = prompts[which]
    with patched(model):
        held = make_prompt_cache(model, mode, window=window)
        got, scores = greedy(model, prompt, prompt_cache=held)
    cache = native.new_cache(mode)
    text = native.generate(prompt, kvcore.SamplingParams(max_tokens=NEW), cache=cache, prefill_step=len(prompt) - 1)
    list(text)
    steps = min(sure_steps(scores), len(text.token_ids))
    assert steps > 3
    assert got[:steps] == text.token_ids[:steps]
    held[0].rows.commit()
    assert held[0].rows.rows_folded == cache.stats().rows_folded
    assert (held[0].rows.rows_folded > 0) == (mode != "fp16")
