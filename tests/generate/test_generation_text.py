"""From tokens to shown text: characters that span tokens, stop strings, ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fakes import Script
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore
from kvcore.text import Tokenizer

STOP, HERE = 48124, 27873  # SmolLM2's tokens 'STOP' and ' HERE'
SPLIT_CHARACTERS = {  # SmolLM2's tokens of characters that span several of them
    "one-cjk-character": [34978, 120],
    "emoji-with-skin-tone": [10813, 235, 231, 10813, 233, 138],
    "two-characters": [23274, 115, 40993, 179, 120, 248],
}


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte of ``text``."""
    return [tokenizer.encode(char)[-1] for char in text]


# Stop strings


@pytest.mark.smollm2
def test_B48_a_stop_string_that_starts_and_ends_inside_tokens(smollm2_tokenizer: Tokenizer) -> None:
    more = smollm2_tokenizer.encode(" more")
    assert smollm2_tokenizer.decode([STOP, HERE, *more]) == "STOP HERE more"
    generation = Script([STOP, HERE, *more], vocab=49152).generate(smollm2_tokenizer, stop=("OP HE",))
    pieces = list(generation)
    assert pieces == ["ST"]
    assert (generation.text, generation.finish_reason) == ("ST", "stop")
    assert generation.stats.generation_tokens == len(generation.token_ids) == 2


@pytest.mark.smollm2
def test_M9_a_stop_string_across_tokens_is_cut_exactly_before_it(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("alpha beta gamma delta")
    generation = Script(ids, vocab=49152).generate(smollm2_tokenizer, stop=("beta gamma",))
    pieces = list(generation)
    assert "".join(pieces) == generation.text == "alpha "
    assert generation.finish_reason == "stop"


def test_the_end_of_what_was_held_back_is_shown(tiny_tokenizer: Tokenizer) -> None:
    """'beta ' could begin the stop string until 'x' comes."""
    ids = byte_ids(tiny_tokenizer, "beta x")
    generation = Script(ids, vocab=256).generate(tiny_tokenizer, stop=("beta gamma",), max_tokens=6)
    assert list(generation) == ["beta x"]
    assert generation.finish_reason == "length"


ENDINGS = {"eos": "stop", "max_tokens": "length", "cancel": "cancelled"}


@pytest.mark.parametrize("ending", ENDINGS)
def test_B154_held_text_is_flushed_at_the_end(tiny_tokenizer: Tokenizer, ending: str) -> None:
    """'as' begins 'assistant' and 'assume'; it is text all the same when nothing follows."""

    def emitted() -> Iterator[int]:
        yield from byte_ids(tiny_tokenizer, "plea")
        if ending == "cancel":
            generation.cancel()
        yield from [*byte_ids(tiny_tokenizer, "s"), 2]

    limit = 5 if ending == "max_tokens" else 100
    script = Script(emitted(), vocab=256)
    generation = script.generate(tiny_tokenizer, stop=("assistant", "assume"), eos=[2], max_tokens=limit)
    assert "".join(generation) == generation.text == "pleas"
    assert generation.finish_reason == ENDINGS[ending]


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_text_does_not_depend_on_how_it_is_read(tiny_tokenizer: Tokenizer, limit: int) -> None:
    """Streamed or joined afterwards: the same text, and `text` is what was shown."""
    ids = byte_ids(tiny_tokenizer, "abcd")
    generation = Script(ids, vocab=256).generate(tiny_tokenizer, stop=("bd", "cx"), max_tokens=limit)
    assert "".join(generation) == generation.text == "abcd"[:limit]


def test_nothing_empty_is_ever_yielded(tiny_tokenizer: Tokenizer) -> None:
    ids = [*byte_ids(tiny_tokenizer, "a"), 3, *byte_ids(tiny_tokenizer, "b"), 2]  # 3 is special: no text
    generation = Script(ids, vocab=256).generate(tiny_tokenizer, stop=("bc",), eos=[2])
    assert list(generation) == ["a", "b"]
    assert generation.token_ids == ids


# Characters


@pytest.mark.smollm2
@pytest.mark.parametrize("ids", SPLIT_CHARACTERS.values(), ids=SPLIT_CHARACTERS.keys())
def test_M8_B50_only_whole_characters_are_shown(smollm2_tokenizer: Tokenizer, ids: list[int]) -> None:
    generation = Script(ids, vocab=49152).generate(smollm2_tokenizer, max_tokens=len(ids))
    pieces = list(generation)
    assert "".join(pieces) == generation.text == smollm2_tokenizer.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(pieces) < len(ids)


@pytest.mark.smollm2
def test_M8_half_a_character_at_the_end_is_one_replacement(smollm2_tokenizer: Tokenizer) -> None:
    generation = Script([34978], vocab=49152).generate(smollm2_tokenizer, max_tokens=1)
    assert "".join(generation) == smollm2_tokenizer.decode([34978]) == "\ufffd"


# End tokens


@pytest.mark.parametrize("eos", [2, 7])
def test_M5_stops_at_each_end_token(tiny_tokenizer: Tokenizer, eos: int) -> None:
    ids = [*byte_ids(tiny_tokenizer, "ab"), eos, *byte_ids(tiny_tokenizer, "c")]
    generation = Script(ids, vocab=256).generate(tiny_tokenizer, eos=[2, 7])
    assert "".join(generation) == "ab"
    assert (generation.finish_reason, generation.token_ids) == ("stop", ids[:3])


END_TOKENS = {"generation_config.json": (None, [2, 7]), "config.json": ([2, 7], None), "one-in-each": (2, 7)}


@pytest.mark.parametrize("where", END_TOKENS)
def test_M5_B57_end_tokens_of_the_files_reach_the_loop(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 and 7, in either file or one in each: the model stops at 7, whose text is never shown."""
    in_config, in_generation_config = END_TOKENS[where]
    folder = write_tiny_llama(tmp_path, eos_token_id=in_config)
    write_tiny_tokenizer(folder)
    if in_generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation_config}))
    model = kvcore.load(folder, backend="reference")
    assert model.eos_token_ids == {2, 7}
    emitted = iter([5, 7, 5])

    def emit(model: kvcore.Model, ids: np.ndarray, cache: kvcore.Cache) -> np.ndarray:
        return np.eye(256, dtype=np.float32)[None, [next(emitted)]]

    monkeypatch.setattr(kvcore.Model, "forward", emit)
    generation = model.generate([1, 9])
    assert "".join(generation) == model.tokenizer.decode([5])
    assert (generation.finish_reason, generation.token_ids) == ("stop", [5, 7])


def test_the_tokenizer_s_end_token_counts_where_the_config_names_none(tiny_model: kvcore.Model) -> None:
    assert tiny_model.config.eos_token_ids == ()
    assert tiny_model.eos_token_ids == {2}


def test_an_end_token_first_gives_no_text(tiny_tokenizer: Tokenizer) -> None:
    generation = Script([2], vocab=256).generate(tiny_tokenizer, eos=[2])
    assert list(generation) == []
    assert (generation.text, generation.finish_reason, generation.stats.generation_tokens) == ("", "stop", 1)
