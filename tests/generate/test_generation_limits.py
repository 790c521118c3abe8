"""How long a generation may be, and what is refused before it starts."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeCache, Script

import kvcore
from kvcore.errors import InputError, KvcoreError
from kvcore.text import Tokenizer

CONTEXT = 128


def run(tokenizer: Tokenizer, prompt: int, **params: int) -> kvcore.Generation:
    generation = Script([5] * 1000, vocab=256).generate(
        tokenizer, prompt=range(10, 10 + prompt), max_position=CONTEXT, **params
    )
    "".join(generation)
    return generation


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_max_tokens_is_exact(tiny_tokenizer: Tokenizer, tokens: int) -> None:
    generation = run(tiny_tokenizer, 3, max_tokens=tokens)
    assert (len(generation.token_ids), generation.finish_reason) == (tokens, "length")


def test_B94_max_tokens_beyond_the_context_is_capped(tiny_tokenizer: Tokenizer) -> None:
    """Context 128, prompt 8, 125 asked for: 120 tokens, finish reason length."""
    generation = run(tiny_tokenizer, 8, max_tokens=125)
    assert (len(generation.token_ids), generation.finish_reason) == (120, "length")


def test_the_last_position_of_the_context_can_be_used(tiny_tokenizer: Tokenizer) -> None:
    assert len(run(tiny_tokenizer, CONTEXT - 1, max_tokens=50).token_ids) == 1


@pytest.mark.parametrize("prompt", [CONTEXT, 200])
@pytest.mark.parametrize("params", [{}, {"max_tokens": 5}], ids=["no-max-tokens", "max-tokens"])
def test_B92_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    tiny_tokenizer: Tokenizer, prompt: int, params: dict[str, int]
) -> None:
    script = Script([5], vocab=256)
    with pytest.raises(InputError) as refused:
        script.generate(tiny_tokenizer, prompt=range(10, 10 + prompt), max_position=CONTEXT, **params)
    message = str(refused.value)
    assert re.findall(r"-?\d+", message) == [str(prompt), str(CONTEXT)]
    assert "\n" not in message
    assert script.events == [], "it is refused before anything runs"


def test_the_model_s_own_context_counts(tiny_model: kvcore.Model) -> None:
    with pytest.raises(InputError, match="5000 tokens, the model's context holds 4096"):
        tiny_model.generate([5] * 5000)


@pytest.mark.parametrize("prompt", [[], ()], ids=["list", "tuple"])
def test_an_empty_prompt_is_refused(tiny_model: kvcore.Model, prompt: list[int]) -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        tiny_model.generate(prompt)


@pytest.mark.parametrize("bad", [-1, 256, 10**9])
def test_ids_outside_the_vocabulary_are_refused(tiny_model: kvcore.Model, bad: int) -> None:
    with pytest.raises(InputError, match=rf"token id {bad}: the vocabulary has ids 0 to 255"):
        tiny_model.generate([5, bad])


@pytest.mark.parametrize("step", [0, -1])
def test_a_prefill_step_below_one_is_refused(tiny_model: kvcore.Model, step: int) -> None:
    with pytest.raises(InputError, match=rf"prefill step size {step}: must be 1 or more"):
        tiny_model.generate([5], prefill_step=step)


def test_a_cache_that_holds_the_whole_prompt_is_refused(tiny_model: kvcore.Model) -> None:
    """The logits of the last token are gone; the message says what to do."""
    cache = tiny_model.new_cache()
    "".join(tiny_model.generate([5, 6, 7], kvcore.SamplingParams(max_tokens=3), cache=cache))
    with pytest.raises(InputError, match="already holds the whole prompt: trim at least its last token first"):
        tiny_model.generate([5, 6, 7], cache=cache)
    cache.trim(3)
    assert cache.offset == 2
    assert "".join(tiny_model.generate([5, 6, 7], kvcore.SamplingParams(max_tokens=1), cache=cache))


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_are_an_error(tiny_tokenizer: Tokenizer, value: float, temperature: float) -> None:
    def step(ids: object, cache: FakeCache) -> np.ndarray:
        logits = np.zeros(256, np.float32)
        logits[17] = value
        return logits

    generation = kvcore.Generation(
        step,
        tiny_tokenizer,
        FakeCache([]),
        [1],
        kvcore.SamplingParams(temperature=temperature, seed=0),
        eos_token_ids=frozenset(),
        max_position=CONTEXT,
    )
    with pytest.raises(KvcoreError, match="logits are not finite: check its weights, or use a wider --dtype"):
        "".join(generation)
    assert generation.token_ids == []


def test_NaN_weights_end_in_that_error_too(tiny_model: kvcore.Model) -> None:
    """Through a real model: 16-bit overflow or a broken file looks like this."""
    params = replace(tiny_model.params, norm=tiny_model.params.norm * np.float32(np.nan))
    with pytest.raises(KvcoreError, match="logits are not finite"):
        "".join(replace(tiny_model, params=params).generate([5]))
