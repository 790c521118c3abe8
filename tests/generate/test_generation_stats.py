"""Counts and times of a generation, with a step whose time is known."""

from __future__ import annotations

import pytest
from fakes import Script

from kvcore.generate import GenerationStats
from kvcore.text import Tokenizer


@pytest.mark.smollm2
def test_B82_tokens_are_counted_not_characters(smollm2_tokenizer: Tokenizer) -> None:
    """20 one-word tokens at 10 ms each, 19 of them after the first: at most 100 tokens/s, not 800."""
    (token,) = smollm2_tokenizer.encode(" language")
    generation = Script([token] * 20, vocab=49152, seconds=(0.0, 0.01)).generate(smollm2_tokenizer, max_tokens=20)
    text, stats = "".join(generation), generation.stats
    assert text == " language" * 20
    assert (stats.prompt_tokens, stats.generation_tokens) == (3, 20)
    assert stats.decode_seconds >= 19 * 0.01
    assert stats.generation_tokens_per_second == pytest.approx(19 / stats.decode_seconds)
    assert 10 <= stats.generation_tokens_per_second <= 100


def test_B83_prefill_and_decode_are_timed_apart(tiny_tokenizer: Tokenizer) -> None:
    """300 ms of prompt, then 10 ms per token; the first token comes with the prompt's end."""
    script = Script([5] * 5, vocab=256, seconds=(0.3, 0.01))
    generation = script.generate(tiny_tokenizer, prompt=range(10, 130), max_tokens=5)
    "".join(generation)
    stats = generation.stats
    assert 0.3 <= stats.prefill_seconds <= stats.time_to_first_token < 1
    assert 0.04 <= stats.decode_seconds < 0.3
    assert stats.prompt_tokens_per_second == pytest.approx(120 / stats.prefill_seconds)


def test_each_chunk_of_the_prompt_counts(tiny_tokenizer: Tokenizer) -> None:
    script = Script([5], vocab=256, seconds=(0.02, 0.0))
    generation = script.generate(tiny_tokenizer, prompt=range(10, 60), prefill_step=20, max_tokens=1)
    "".join(generation)
    assert script.events == [20, 20, 10, "begin_decode"]
    assert generation.stats.prefill_seconds >= 3 * 0.02


def test_a_last_chunk_of_a_few_tokens_runs_with_the_one_before(tiny_tokenizer: Tokenizer) -> None:
    script = Script([5], vocab=256)
    "".join(script.generate(tiny_tokenizer, prompt=range(10, 52), prefill_step=20, max_tokens=1))
    assert script.events == [20, 22, "begin_decode"]


def test_cached_tokens_are_not_counted_as_run(tiny_tokenizer: Tokenizer) -> None:
    script = Script([5], vocab=256, seconds=(0.05, 0.0))
    generation = script.generate(tiny_tokenizer, prompt=range(10, 60), cached=40, max_tokens=1)
    "".join(generation)
    stats = generation.stats
    assert script.events[0] == 10
    assert (stats.prompt_tokens, stats.cached_tokens) == (50, 40)
    assert stats.prompt_tokens_per_second == pytest.approx(10 / stats.prefill_seconds)


def test_time_that_the_reader_takes_is_not_hidden(tiny_tokenizer: Tokenizer) -> None:
    """Statistics can be read meanwhile, and they grow with each token."""
    generation = Script([5, 6, 7], vocab=256).generate(tiny_tokenizer, max_tokens=3)
    counts = [generation.stats.generation_tokens for _ in generation]
    assert counts == [1, 2, 3]
    assert generation.stats.finish_reason == generation.finish_reason == "length"


@pytest.mark.parametrize("tokens", [0, 1])
def test_rates_without_a_measured_time_are_zero(tokens: int) -> None:
    stats = GenerationStats(3, 0, tokens, 0.0, 0.0, 0.0, None)
    assert stats.prompt_tokens_per_second == stats.generation_tokens_per_second == 0


def test_statistics_before_the_first_step(tiny_tokenizer: Tokenizer) -> None:
    generation = Script([5], vocab=256).generate(tiny_tokenizer)
    assert generation.stats == GenerationStats(3, 0, 0, 0.0, 0.0, 0.0, None)
    assert (generation.text, generation.token_ids, generation.finish_reason) == ("", [], None)
