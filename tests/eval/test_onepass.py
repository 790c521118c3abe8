"""Scoring in one pass is decoding: the same logits as token by token through the real cache, mode by mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llamas import load_on, random_ids, tiny_folder
from oracle import gaussian

import kvcore
from kvcore.attention import make_cache
from kvcore.backends import Backend
from kvcore.cache import CacheSpec
from kvcore.errors import InputError
from kvcore.eval.codecs import Variant, product_codec, product_variant
from kvcore.eval.onepass import OnePassLayer
from kvcore.eval.rows import RawRows
from kvcore.eval.score import logits, raw_logits, score
from kvcore.layout import CODECS, Layout, WindowPolicy
from kvcore.modes import MODES

WINDOWS = {
    "pages of 32": WindowPolicy(sink_tokens=4, recent_tokens=32, page_size=32),
    "odd window": WindowPolicy(sink_tokens=3, recent_tokens=21, page_size=16),
    "no tail": WindowPolicy(sink_tokens=0, recent_tokens=0, page_size=8),
}
QUICK = ("odd window", "fp16", "int8", "turbo4")  # where a model decodes; for given rows every case is quick
TOKENS = 150


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"), max_position=2048)


@pytest.fixture(scope="module")
def model(backend: Backend, tiny_path: Path) -> kvcore.Model:
    return load_on(backend, tiny_path, dtype="float32", kernels="graph")


def whole(model: kvcore.Model, ids: np.ndarray, variant: Variant, path: str) -> np.ndarray:
    return np.concatenate(list(logits(model, ids, variant, path)))


def some(value: object, quick: bool, name: str) -> object:
    return pytest.param(value, id=name, marks=() if quick else pytest.mark.full)


each_window = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def one_pass_attention(backend: Backend, variant: Variant, rows: Sequence[np.ndarray], chunk: int) -> np.ndarray:
    """The layer's answers [B, Hq, T, D] to all queries; ``rows`` are q, k, v [B, H, T, D]."""
    ops, dim = backend.ops, rows[1].shape[-1]
    layer = OnePassLayer(ops, variant, 0, Layout(CODECS["raw"], CODECS["raw"], dim, dim))
    parts = [[ops.asarray(x[:, :, at : at + chunk]) for x in rows] for at in range(0, TOKENS, chunk)]
    return np.concatenate([ops.to_numpy(layer.step(*part, dim**-0.5)) for part in parts], 2)


def decoded_attention(
    backend: Backend, mode: kvcore.Mode, window: WindowPolicy, rows: Sequence[np.ndarray]
) -> np.ndarray:
    """The same from a real cache, a step per token."""
    ops, (heads, tokens, dim) = backend.ops, rows[1].shape[1:]
    spec = CacheSpec(mode, 1, rows[0].shape[1], heads, dim, "float32", window)
    cache = make_cache(backend, spec, kernels="graph")
    cache.begin_decode()
    answers = []
    for at in range(tokens):
        q, k, v = (ops.asarray(x[:, :, at : at + 1]) for x in rows)
        answers.append(ops.to_numpy(cache.layers[0].step(q, k, v, dim**-0.5)))
        cache.commit()
    return np.concatenate(answers, 2)


@each_window
@each_mode
def test_given_rows_get_decodes_attention(backend: Backend, mode: kvcore.Mode, window: WindowPolicy) -> None:
    """Exact: with q, k and v given, nothing is left that could differ but which form of a key is seen; and now and then
    the float16 to which an element of a centre is rounded, by the last bit of a product of more pages or fewer."""
    rows = [gaussian(1, heads, TOKENS, 64, seed=seed) for seed, heads in enumerate((4, 2, 2))]
    want = decoded_attention(backend, mode, window, rows)
    got = one_pass_attention(backend, product_variant(mode, RawRows.of(window)), rows, chunk=64)
    off = np.abs(got - want).max(-1)
    assert off.max() <= (5e-4 if mode.k_codec.centred else 2e-6)
    assert np.median(off) <= 2e-6
    for wrong in (
        replace(window, recent_tokens=window.recent_tokens + 1),
        replace(window, sink_tokens=window.sink_tokens + 1),
    ):
        off = one_pass_attention(backend, product_variant(mode, RawRows.of(wrong)), rows, chunk=64)
        assert (np.abs(off - want).max() > 2e-3) == mode.quantized, "one row more or less raw must show"


@pytest.mark.parametrize("window", [some(window, name in QUICK, name) for name, window in WINDOWS.items()])
@pytest.mark.parametrize("mode", [some(mode, name in QUICK, name) for name, mode in MODES.items()])
def test_one_pass_is_the_decode_path(model: kvcore.Model, mode: kvcore.Mode, window: WindowPolicy) -> None:
    """Through the model, rounding turns a code over here and there; KL to raw stays the same."""
    model, ids = replace(model, window=window), random_ids(TOKENS)
    variant = product_variant(mode, RawRows.of(window))
    raw = raw_logits(model, ids, "decode")
    steps = score(model, ids, raw, variant, "decode")
    first = window.recent_tokens + window.page_size  # the first query that sees a folded row, sinks aside
    assert (steps.kl[first:].mean() > 1e-7) == mode.quantized, "nothing was quantized: the comparison says nothing"
    assert steps.kl[:first].max() < 1e-9
    for path in ("one-pass", "pages"):
        again = score(model, ids, raw_logits(model, ids, path), variant, path)
        assert again.kl[:first].max() < 1e-9
        assert again.kl.mean() == pytest.approx(steps.kl.mean(), rel=0.02, abs=1e-9)
        assert np.median(np.abs(again.nll - steps.nll)[:-1]) < 1e-4


def test_a_delegated_prompt_stays_raw_until_the_hand_over(model: kvcore.Model) -> None:
    window, prompt = WINDOWS["pages of 32"], 100
    model, ids = replace(model, window=window), random_ids(TOKENS)
    variant = product_variant(MODES["turbo4-delegated"], RawRows.of(window, hand_over=prompt))
    cache = model.new_cache("turbo4-delegated")
    steps = [model.forward(ids[None, :prompt], cache, all_logits=True)[0]]
    cache.begin_decode()
    steps += [model.forward(ids[None, at : at + 1], cache)[0] for at in range(prompt, TOKENS)]
    off = np.abs(whole(model, ids, variant, "one-pass") - np.concatenate(steps)).max(-1)
    assert off[:prompt].max() < 2e-5
    assert np.median(off[prompt:]) < 1e-4
    early = product_variant(MODES["turbo4-delegated"], RawRows.of(window))
    assert np.abs(whole(model, ids, early, "one-pass") - np.concatenate(steps))[:prompt].max() > 1e-3


def test_a_real_cache_refuses_what_is_no_mode(model: kvcore.Model) -> None:
    odd = Variant("odd", product_codec("int8"), product_codec("int8"), RawRows.of(model.window))
    slid = product_variant(MODES["int8"], RawRows(page=1))
    for variant in (odd, slid):
        with pytest.raises(InputError, match="one pass"):
            whole(model, random_ids(8), variant, "decode")


@pytest.mark.smollm2
@pytest.mark.xdist_group("smollm2")
@pytest.mark.parametrize("mode", [pytest.param("int8", marks=pytest.mark.full), "turbo4"])
def test_on_the_real_model_too(smollm2: kvcore.Model, sample_ids: np.ndarray, mode: str) -> None:
    model, ids = smollm2, sample_ids[:320]
    variant = product_variant(MODES[mode], RawRows.of(model.window))
    one = score(model, ids, raw_logits(model, ids, "one-pass"), variant, "one-pass")
    steps = score(model, ids, raw_logits(model, ids, "pages"), variant, "pages")
    assert one.kl[:256].max() < 1e-9
    assert one.kl[256:].mean() == pytest.approx(steps.kl[256:].mean(), rel=0.02)


@pytest.mark.full
@pytest.mark.smollm2
@pytest.mark.xdist_group("smollm2")
@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.quantized])
def test_on_the_real_model_token_by_token(smollm2: kvcore.Model, sample_ids: np.ndarray, mode: str) -> None:
    model, ids = smollm2, sample_ids[:400]
    variant = product_variant(MODES[mode], RawRows.of(model.window))
    one = score(model, ids, raw_logits(model, ids, "one-pass"), variant, "one-pass")
    steps = score(model, ids, raw_logits(model, ids, "decode"), variant, "decode")
    assert one.kl[256:].mean() == pytest.approx(steps.kl[256:].mean(), rel=0.02)
