"""Scoring token by token on pages: the engine's steps give what a forward of one token gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from caches import TORCH_DEVICE
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore
from kvcore.backends.cuda.attention import attend_rows
from kvcore.backends.cuda.device import group_decoder_on
from kvcore.backends.cuda.kernels.fold import Fold
from kvcore.eval.codecs import product_variant
from kvcore.eval.rows import RawRows
from kvcore.eval.score import RAW, logits
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES
from kvcore.registry import Kernel, Registry

WINDOW = WindowPolicy(recent_tokens=0)  # so that the first page folds early: the interpreter takes its time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> kvcore.Model:
    return on_pages(tmp_path_factory.mktemp("tiny"))


def on_pages(folder: Path, sliding_window: int | None = None) -> kvcore.Model:
    """One layer on pages whatever the device, as on a GPU of sm_90."""
    write_tiny_llama(folder, layers=1, heads=2, kv_heads=1, eos_token_id=None, sliding_window=sliding_window)
    write_tiny_tokenizer(folder)
    loaded = kvcore.load(folder, backend="cuda", device=TORCH_DEVICE, dtype="float16", window=WINDOW)
    kernels = [
        Kernel("attend-pages", "attend", "cuda", "fused", lambda: attend_rows, storage="paged"),
        Kernel("fold-pages", "encode", "cuda", "fused", lambda: Fold.create, storage="paged"),
    ]
    backend = replace(loaded.backend, make_group_decoder=group_decoder_on(loaded.backend.device))
    return replace(loaded, backend=backend, registry=Registry(tuple(kernels)))


@pytest.mark.parametrize(("mode", "tokens"), [("fp16", 8), pytest.param("turbo4", 136, marks=pytest.mark.full)])
def test_steps_of_the_engine_score_as_forwards_of_one_token(
    model: kvcore.Model, monkeypatch: pytest.MonkeyPatch, mode: str, tokens: int
) -> None:
    ids = np.random.default_rng(0).integers(5, 256, tokens)
    variant = product_variant(MODES[mode], RawRows.of(WINDOW))
    steps = np.concatenate(list(logits(model, ids, variant, "decode")))
    assert model.group_tokens(1) is not None
    monkeypatch.setattr(kvcore.Model, "group_tokens", lambda *_: None)
    forwards = np.concatenate(list(logits(model, ids, variant, "decode")))
    assert steps.shape == forwards.shape == (tokens, model.config.vocab_size)
    assert np.abs(steps - forwards).max() <= 2e-3 * np.abs(forwards).max()
    assert np.abs(steps[1:] - forwards[:-1]).max() > 0.1 * np.abs(forwards).max()  # a row off would show


def test_layers_with_a_sliding_window_are_scored_by_forwards(tmp_path: Path) -> None:
    """Steps of the engine know no window."""
    model, ids = on_pages(tmp_path, sliding_window=2), np.arange(5, 9)
    assert model.group_tokens(1) is not None
    steps = np.concatenate(list(logits(model, ids, RAW, "decode")))
    cache = model.new_cache("fp16")
    forwards = np.concatenate([model.forward(ids[None, i : i + 1], cache)[0] for i in range(len(ids))])
    assert np.array_equal(steps, forwards)
