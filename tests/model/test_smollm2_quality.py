"""What quantized modes cost on SmolLM2, scored as decode sees it: KL to raw, a planted fact, the first tokens."""

from __future__ import annotations

import numpy as np
import pytest
from llamas import QUANTIZED, Loader, Recorder, divergence, in_mode, log_softmax, logits, margins

import kvcore
from kvcore.generate import chunks_of

pytestmark = [pytest.mark.smollm2, pytest.mark.xdist_group("smollm2")]

PAGE = 128
SCORED_FROM = 256  # before, every row is raw


# Mean KL


def decode_path(model: kvcore.Model, ids: np.ndarray) -> np.ndarray:
    """Logits of each position as decoding gives them, in one pass by pages: see
    test_one_pass_by_pages_is_the_decode_path."""
    cache = model.new_cache()
    cache.begin_decode()
    return logits(model, ids, chunk=PAGE, cache=cache)


def score(model: kvcore.Model, windows: list[np.ndarray]) -> dict[str, tuple[float, float]]:
    """Mode -> mean KL to raw in nats, share of positions whose best token is raw's."""
    raw = [decode_path(in_mode(model, "fp16"), ids)[SCORED_FROM:] for ids in windows]
    scores = {}
    for mode in QUANTIZED:
        got = [decode_path(in_mode(model, mode), ids)[SCORED_FROM:] for ids in windows]
        kl = np.concatenate([divergence(want, out) for want, out in zip(raw, got, strict=True)])
        same = [want.argmax(-1) == out.argmax(-1) for want, out in zip(raw, got, strict=True)]
        scores[mode] = (float(kl.mean()), float(np.concatenate(same).mean()))
    return scores


def assert_quality(scores: dict[str, tuple[float, float]], limits: dict[str, float], top1: float) -> None:
    for mode, limit in limits.items():
        assert 0 < scores[mode][0] <= limit, (mode, scores)
    assert scores["turbo4"][1] >= top1, scores
    kl = {mode: mean for mode, (mean, _) in scores.items()}
    assert kl["int8"] < kl["int8-turbo4"] < kl["turbo4"]
    assert kl["turbo4-asym"] < kl["turbo3-asym"]
    assert kl["turbo4-delegated"] == kl["turbo4-asym"], "from the hand-over on they are the same mode"


@pytest.mark.full
def test_B81_quality_over_two_windows_of_1024(smollm2: Loader, text_ids: np.ndarray) -> None:
    """Measured: int8 0.000023, int8-turbo4 0.00023, turbo4-asym 0.00021, turbo3-asym 0.00099, turbo4 0.0022 (97.7%)."""
    limits = {"int8": 1e-4, "int8-turbo4": 1e-3, "turbo4-asym": 1e-3, "turbo3-asym": 3e-3, "turbo4": 5e-3}
    windows = [text_ids[:1024], text_ids[1024:2048]]
    assert_quality(score(smollm2("reference"), windows), limits, top1=0.97)


def test_B81_quality_over_one_window_of_512(smollm2: Loader, text_ids: np.ndarray) -> None:
    """Measured: int8 0.000014, int8-turbo4 0.00016, turbo4-asym 0.00015, turbo3-asym 0.00065, turbo4 0.0012 (98.4%);
    the limits are about three times that."""
    limits = {"int8": 5e-5, "int8-turbo4": 5e-4, "turbo4-asym": 5e-4, "turbo3-asym": 2e-3, "turbo4": 4e-3}
    assert_quality(score(smollm2("reference"), [text_ids[512:1024]]), limits, top1=0.97)


# A planted fact

FACT, CUE, ANSWER = " The access code of the north gate is 7241.", " The access code of the north gate is", " 7241"
# How far the log-probability of the whole answer may be from raw's (L3), and the mean KL over 16 tokens (B23).
FACT_LIMITS = {
    "int8": (0.02, 2e-4),
    "int8-turbo4": (0.05, 0.05),
    "turbo4-asym": (0.05, 0.05),
    "turbo4-delegated": (0.05, 0.05),
    "turbo3-asym": (0.15, 0.05),
    "turbo4": (0.15, 0.05),
}


def planted(model: kvcore.Model, text_ids: np.ndarray) -> list[int]:
    """600 tokens: the fact from position 50 on, the cue for it at the end."""
    encode = model.tokenizer.encode
    start = [*text_ids[:50].tolist(), *encode(FACT)]
    end = encode("\n\nRemember:" + CUE)
    return [*start, *text_ids[50 : 650 - len(start) - len(end)].tolist(), *end]


def decoded(model: kvcore.Model, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Logits before each token of ``answer``: the prompt by pages, then token by token."""
    cache = model.new_cache()
    for start in range(0, len(prompt), PAGE):
        last = model.forward(np.array([prompt[start : start + PAGE]]), cache)[0, -1]
    cache.begin_decode()
    scores = [last]
    scores += [model.forward(np.array([[token]]), cache)[0, -1] for token in answer[:-1]]
    assert cache.stats().rows_folded == (384 if cache.mode.quantized else 0)
    return np.array(scores)


def test_L3_B23_a_fact_in_the_folded_prompt_is_recalled(smollm2: Loader, text_ids: np.ndarray) -> None:
    model = smollm2("reference")
    prompt = planted(model, text_ids)
    assert len(prompt) == 600
    generation = in_mode(model, "fp16").generate(prompt, kvcore.SamplingParams(max_tokens=16))
    assert "".join(generation).startswith(ANSWER), "the raw model does not recall it: the test says nothing"
    answer = generation.token_ids
    length = len(model.tokenizer.encode(ANSWER))
    raw = decoded(in_mode(model, "fp16"), prompt, answer)
    wanted = log_softmax(raw)[np.arange(length), answer[:length]]
    assert wanted.sum() > -1
    for mode, (logprob, kl) in FACT_LIMITS.items():
        got = decoded(in_mode(model, mode), prompt, answer)
        found = log_softmax(got)[np.arange(length), answer[:length]]
        assert abs(found.sum() - wanted.sum()) <= logprob, mode
        assert divergence(raw, got).mean() <= kl, mode
        if mode == "int8":
            sure = margins(raw) >= 0.05
            assert got.argmax(-1)[sure].tolist() == np.array(answer)[sure].tolist()


# The first tokens after a prompt in chunks


# 273 tokens are the shortest prompt of which a chunk of 128 sees a folded row: 272 end with the second chunk.
@pytest.mark.parametrize("length", [273, *(pytest.param(n, marks=pytest.mark.full) for n in (255, 256, 512, 700))])
def test_B126_first_tokens_after_a_prompt_in_chunks(smollm2: Loader, text_ids: np.ndarray, length: int) -> None:
    """Raw: no chunking matters. Quantized: the first token's KL to raw is at most twice the mode's limit, and nothing
    but the folded rows makes it."""
    prompt = text_ids[:length].tolist()
    raw_first, raw_tokens = first_steps(smollm2("reference"), "fp16", prompt, length)
    for mode, limit in {"fp16": 1e-9, "int8": 1e-4, "turbo4": 5e-3}.items():
        for chunk in {128, 256, length} if length > 273 else {128, length}:
            first, tokens = first_steps(smollm2("reference"), mode, prompt, chunk)
            assert divergence(raw_first, first) <= 2 * limit, (mode, chunk)
            if mode == "fp16" or chunk >= length:
                assert np.abs(first - raw_first).max() <= 1e-3, (mode, chunk)
            if mode == "fp16":
                assert tokens == raw_tokens, chunk


def first_steps(model: kvcore.Model, mode: str, prompt: list[int], chunk: int) -> tuple[np.ndarray, list[int]]:
    """Logits of the first token, and the first 8 tokens (one where the mode is quantized)."""
    recorder = Recorder(in_mode(model, mode))
    generation = recorder.generate(prompt, 8 if mode == "fp16" else 1, chunk)
    "".join(generation)
    return recorder.scores[chunks_of(len(prompt), chunk) - 1], generation.token_ids
