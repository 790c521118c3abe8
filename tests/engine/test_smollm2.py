"""SmolLM2: coherent answers from shared prefixes, in every family of modes."""

from __future__ import annotations

import pytest
from driving import finish, new_engine, request, submit

import kvcore
from kvcore.errors import ModelError
from kvcore.modes import MODES

pytestmark = [pytest.mark.smollm2, pytest.mark.xdist_group("smollm2")]
FACTS = (
    "The river Anduin rises in the Grey Mountains. The capital of the country of Zubrowka is Lutz, and its currency is "
    "the klubeck. The lighthouse keeper at Cape Morrow is called Edwina Pratt; she keeps eleven goats and a parrot. "
    "The train from Lutz to Nebelsbad leaves at seven each morning and takes two hours, with a stop at Tuckerberg. "
)


@pytest.fixture(scope="module")
def smollm2() -> kvcore.Model:
    try:
        return kvcore.load(None, backend="reference")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "mode", ["turbo4", *(pytest.param(mode, marks=pytest.mark.full) for mode in MODES if mode != "turbo4")]
)
def test_a_second_question_about_a_shared_text_is_answered_from_its_rows(smollm2: kvcore.Model, mode: str) -> None:
    """B117, S5: with a window, pages below the shared tokens less 128; in fp16 whole pages. The answer is right."""
    system = {"role": "system", "content": FACTS * 3}
    questions = ("Who is the lighthouse keeper at Cape Morrow?", "What is the capital of Zubrowka?")
    prompts = [smollm2.encode([system, {"role": "user", "content": question}]) for question in questions]
    shared = next(i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)
    assert shared > 256
    engine = new_engine(smollm2, kv_cache_budget=512 << 20)
    texts = []
    for name, prompt in zip("ab", prompts, strict=True):
        (heard,) = submit(engine, request(name, prompt, 18, mode=mode))
        finish(engine, [heard])
        texts.append(heard.text)
    assert heard.last.usage.cached_tokens == (shared - (128 if MODES[mode].quantized else 0)) // 128 * 128
    assert "Edwina Pratt" in texts[0]
    assert "Lutz" in texts[1]


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_B19_prompts_of_unequal_length_in_one_batch(smollm2: kvcore.Model, mode: str) -> None:
    """3 to 300 tokens, greedy: the tokens of each as alone."""
    words = smollm2.encode(FACTS * 4, raw=True)
    requests = [request(f"r{n}", words[:n], 32, mode=mode) for n in (3, 17, 64, 129, 255, 300)]
    engine = new_engine(smollm2, kv_cache_budget=1 << 30, prefix_reuse=False)
    heard = submit(engine, *requests)
    finish(engine, heard)
    for each, got in zip(requests, heard, strict=True):
        lone = new_engine(smollm2, kv_cache_budget=1 << 30, prefix_reuse=False)
        (want,) = submit(lone, each)
        finish(lone, [want])
        assert got.text == want.text
        assert got.text


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_B85_the_same_request_five_times(smollm2: kvcore.Model, mode: str) -> None:
    """Requests 2 to 5 alike, and in fp16 as the first one too."""
    prompt = smollm2.encode(FACTS * 4, raw=True)[:300]
    engine = new_engine(smollm2, kv_cache_budget=1 << 30)
    texts = []
    for i in range(5):
        (heard,) = submit(engine, request(str(i), prompt, 16, mode=mode))
        finish(engine, [heard])
        texts.append(heard.text)
    assert len(set(texts[0 if mode == "fp16" else 1 :])) == 1
