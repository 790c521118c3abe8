"""Sampling: the formulas by hand, the same draws everywhere, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import kvcore
from kvcore.backends import Backend
from kvcore.errors import InputError, KvcoreError
from kvcore.sampling import Sampler, likeliest, log_probabilities

PROBS = [0.1, 0.4, 0.05, 0.25, 0.2]  # best first: 1, 3, 4, 0, 2
LOGITS = np.log(np.array(PROBS)).astype(np.float32)
DRAWS = 4_000


def frequencies(logits: np.ndarray = LOGITS, seen: tuple[int, ...] = (), **params: object) -> np.ndarray:
    """How often each token is drawn."""
    sampler = Sampler(kvcore.SamplingParams(seed=1, **{"temperature": 1.0, **params}))
    drawn = [sampler(logits, seen) for _ in range(DRAWS)]
    return np.bincount(drawn, minlength=len(logits)) / DRAWS


def assert_distribution(got: np.ndarray, want: list[float]) -> None:
    """Within five standard deviations; where the probability is 0, never."""
    want = np.array(want) / sum(want)
    assert (np.abs(got - want) <= 5 * np.sqrt(want * (1 - want) / DRAWS)).all(), got


def test_temperature_zero_takes_the_best() -> None:
    sampler = Sampler(kvcore.SamplingParams())
    assert {sampler(LOGITS, ()) for _ in range(10)} == {1}


def test_a_tie_goes_to_the_lower_id() -> None:
    assert Sampler(kvcore.SamplingParams())(np.array([0.0, 2.0, 2.0]), ()) == 1


def test_temperature_one_is_the_softmax() -> None:
    assert_distribution(frequencies(), PROBS)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_raises_probabilities_to_its_inverse(temperature: float) -> None:
    want = np.array(PROBS) ** (1 / temperature)
    assert_distribution(frequencies(temperature=temperature), want.tolist())


def test_a_tiny_temperature_does_not_overflow() -> None:
    got = frequencies(np.array([-300.0, 300.0, 299.0]), temperature=1e-6)
    np.testing.assert_array_equal(got, [0, 1, 0])


def test_top_k_keeps_the_k_best() -> None:
    assert_distribution(frequencies(top_k=2), [0, 0.4, 0, 0.25, 0])


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    assert_distribution(frequencies(top_k=100), PROBS)


@pytest.mark.parametrize(
    ("top_p", "want"),
    [(0.3, [0, 1, 0, 0, 0]), (0.5, [0, 0.4, 0, 0.25, 0]), (0.7, [0, 0.4, 0, 0.25, 0.2]), (1.0, PROBS)],
    ids=["one", "two", "three", "off"],
)
def test_top_p_keeps_the_token_that_crosses_it(top_p: float, want: list[float]) -> None:
    """Cumulative: 0.4, 0.65, 0.85, 0.95, 1."""
    assert_distribution(frequencies(top_p=top_p), want)


def test_min_p_is_relative_to_the_best() -> None:
    """0.5 · 0.4 = 0.2: tokens of 0.2 and more stay (a hair below, as the sum rounds)."""
    assert_distribution(frequencies(min_p=0.49), [0, 0.4, 0, 0.25, 0.2])
    assert_distribution(frequencies(min_p=1.0), [0, 1, 0, 0, 0])


def test_top_p_counts_what_top_k_left() -> None:
    """Of 0.4 and 0.25 the best has 0.615, so top_p 0.6 leaves it alone; over all tokens it would not."""
    assert_distribution(frequencies(top_k=2, top_p=0.6), [0, 1, 0, 0, 0])
    assert_distribution(frequencies(top_p=0.6), [0, 0.4, 0, 0.25, 0])


# Repetition penalty


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores() -> None:
    """CTRL's formula: seen tokens 0 and 1 go from 3 to 1.5 and from -1 to -2; once, however often they were seen."""
    logits = np.array([3.0, -1.0, 1.0, 0.0])
    got = frequencies(logits, seen=(0, 0, 1), repetition_penalty=2.0)
    assert_distribution(got, np.exp([1.5, -2.0, 1.0, 0.0]).tolist())


def test_repetition_penalty_can_change_the_best_token() -> None:
    sampler = Sampler(kvcore.SamplingParams(repetition_penalty=2.0))
    assert sampler(np.array([3.0, 2.0]), (0,)) == 1
    assert sampler(np.array([3.0, 2.0]), ()) == 0


def test_repetition_penalty_sees_the_prompt_and_the_answer(tiny_model: kvcore.Model) -> None:
    """So strong that no token comes twice, nor one of the prompt."""
    params = kvcore.SamplingParams(max_tokens=40, repetition_penalty=1e6)
    generation = tiny_model.generate([9, 10, 11], params)
    "".join(generation)
    ids = [*generation.prompt, *generation.token_ids]
    assert len(set(ids)) == len(ids)
    plain = tiny_model.generate([9, 10, 11], kvcore.SamplingParams(max_tokens=40))
    "".join(plain)
    assert len(set(plain.token_ids)) < len(plain.token_ids)


def test_the_caller_s_logits_are_left_alone() -> None:
    logits = LOGITS.copy()
    Sampler(kvcore.SamplingParams(temperature=1.0, seed=0, repetition_penalty=1.5))(logits, (1, 2))
    np.testing.assert_array_equal(logits, LOGITS)


# Penalties of generated tokens, biases, log-probabilities


def test_presence_and_frequency_penalty_count_generated_tokens_only() -> None:
    """OpenAI's: score - presence - frequency · count. Token 1 was generated twice, 0 once, 2 stood in the prompt."""
    logits = np.array([3.0, 3.0, 3.0, 0.0])
    sampler = Sampler(kvcore.SamplingParams(temperature=1.0, seed=1, presence_penalty=0.5, frequency_penalty=0.75))
    drawn = [sampler(logits, (2, 1, 0, 1), (1, 0, 1)) for _ in range(DRAWS)]
    want = np.exp([3 - 0.5 - 0.75, 3 - 0.5 - 1.5, 3.0, 0.0]).tolist()
    assert_distribution(np.bincount(drawn, minlength=4) / DRAWS, want)


def test_a_negative_penalty_repeats() -> None:
    sampler = Sampler(kvcore.SamplingParams(presence_penalty=-2, frequency_penalty=-2))
    assert sampler(np.array([3.0, 0.0]), (1,), (1,)) == 1
    assert sampler(np.array([3.0, 0.0]), (1,), ()) == 0


def test_a_bias_is_added_after_the_penalties() -> None:
    """4 / 2 - 1 + 1.5 = 2.5 against 2.4; before the penalty (4 + 1.5) / 2 - 1 = 1.75 would lose."""
    params = kvcore.SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 1.5})
    assert Sampler(params)(np.array([4.0, 2.4]), (0,), (0,)) == 0
    assert Sampler(kvcore.SamplingParams(logit_bias={0: -100}))(np.array([50.0, 0.0]), ()) == 1


def test_biases_are_kept_as_pairs_and_checked_against_the_vocabulary() -> None:
    params = kvcore.SamplingParams(logit_bias={9: 1, 3: -2.5})
    assert params.logit_bias == ((3, -2.5), (9, 1))
    assert hash(params) == hash(kvcore.SamplingParams(logit_bias=((3, -2.5), (9, 1))))
    with pytest.raises(InputError, match="logit_bias of token 9: the vocabulary has ids 0 to 4"):
        Sampler(params)(LOGITS, ())


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({-1: 1.0}, "logit_bias of token -1: must be a token id"),
        ({"5": 1.0}, "logit_bias of token '5': must be a token id"),
        ({5: 101}, "logit_bias of token 5: 101: must be a number at least -100 and at most 100"),
        ({5: math.nan}, "logit_bias of token 5: nan: must be a number"),
    ],
)
def test_impossible_biases_are_refused(bias: dict[int, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kvcore.SamplingParams(logit_bias=bias)


def test_log_probabilities_are_those_of_the_logits_alone() -> None:
    got = log_probabilities(np.array([[0.0, np.log(3.0)], [1000.0, -1000.0]]))
    np.testing.assert_allclose(got[0], np.log([0.25, 0.75]))
    assert got[1, 0] == 0
    assert likeliest(np.log(np.array(PROBS)), 2) == ((1, np.log(0.4)), (3, np.log(0.25)))
    assert [token for token, _ in likeliest(np.log(np.array(PROBS)), 9)] == [1, 3, 4, 0, 2]
    assert likeliest(got[0], 0) == ()


# The same draws everywhere

MIXED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1}


def drawn(model: kvcore.Model, seed: int | None) -> list[int]:
    generation = model.generate([9, 10, 11], kvcore.SamplingParams(max_tokens=30, seed=seed, **MIXED))
    "".join(generation)
    return generation.token_ids


def test_a_seed_repeats_the_draws(tiny_model: kvcore.Model) -> None:
    assert drawn(tiny_model, 7) == drawn(tiny_model, 7)
    assert drawn(tiny_model, 7) != drawn(tiny_model, 8)
    assert drawn(tiny_model, 2**64 - 1) == drawn(tiny_model, 2**64 - 1)


def test_without_a_seed_draws_differ(tiny_model: kvcore.Model) -> None:
    assert len({tuple(drawn(tiny_model, None)) for _ in range(3)}) == 3


def test_a_seed_gives_the_same_tokens_on_every_backend(
    backend: Backend, tiny_folder: Path, tiny_model: kvcore.Model
) -> None:
    """Draws are made on the host in float64; logits that differ by 1e-6 move no boundary of 30 draws."""
    device = None if backend.name == "metal" else backend.device
    model = kvcore.load(tiny_folder, backend=backend.name, device=device, dtype="float32")
    assert drawn(model, 7) == drawn(tiny_model, 7)


def test_equal_logits_give_equal_draws_in_any_dtype() -> None:
    logits = np.array([0.5, -1.25, 2.0, 0.0, 1.75])  # exact in each
    runs = set()
    for dtype in ("float16", "float32", "float64"):
        sampler = Sampler(kvcore.SamplingParams(seed=3, **MIXED))
        runs.add(tuple(sampler(logits.astype(dtype), (1,)) for _ in range(50)))
    (run,) = runs
    assert len(set(run)) > 1


# What is refused

BAD = {
    "max_tokens": [0, -1],
    "temperature": [-0.1, math.nan, math.inf, -math.inf],
    "top_p": [0, -0.5, 1.5, math.nan, math.inf],
    "min_p": [-0.1, 1.1, math.nan],
    "top_k": [-1],
    "repetition_penalty": [0, -1, math.nan, math.inf],
    "seed": [-1, 2**64],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-3, 3, math.inf],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values], ids=str
)
def test_B152_impossible_parameters_are_refused_by_name_and_value(name: str, value: float) -> None:
    with pytest.raises(InputError) as refused:
        kvcore.SamplingParams(**{name: value})
    message = str(refused.value)
    assert message.startswith(f"{name} {value}: must be ")
    assert "\n" not in message
    assert refused.value.exit_code == 2


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="an empty stop string"):
        kvcore.SamplingParams(stop=("x", ""))


def test_one_string_for_stop_is_refused() -> None:
    """Read as a sequence it would stop at each of its letters."""
    with pytest.raises(InputError, match=r"stop 'END': must be a tuple of strings, as in stop=\('END',\)"):
        kvcore.SamplingParams(stop="END")


@pytest.mark.parametrize("params", [{"top_p": 1.0, "min_p": 0.0}, {"min_p": 1.0}, {"temperature": 100.0}], ids=str)
def test_the_ends_of_the_ranges_are_allowed(params: dict[str, float]) -> None:
    assert 0 <= Sampler(kvcore.SamplingParams(seed=0, **params))(LOGITS, ()) < 5


def test_masked_tokens_are_never_drawn_and_all_masked_is_an_error() -> None:
    got = frequencies(np.array([-np.inf, 0.0, 0.0]))
    assert_distribution(got, [0, 1, 1])
    with pytest.raises(KvcoreError, match="not finite"):
        Sampler(kvcore.SamplingParams())(np.full(3, -np.inf), ())
