"""Streamed decoding equals decoding at once, and never shows half a character."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from kvcore.errors import ModelError
from kvcore.text import Answer, Detokenizer, Tokenizer
from kvcore.text.detokenizer import TokenPieces

SPLIT_CHARACTERS = {
    "cjk": ([34978, 120], ["", "歪"]),
    "emoji-skin-tone": ([10813, 235, 231, 10813, 233, 138], ["", "", "👍", "", "", "🏽"]),
    "cjk-word": ([23274, 115, 40993, 179, 120, 248], ["", "日", "本", "", "", "語"]),
}
SMOLLM2_IDS = st.lists(st.integers(0, 49151) | st.integers(0, 16) | st.integers(99, 300), max_size=40)


def stream(tokenizer: Tokenizer, ids: Iterable[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.add, ids), detokenizer.flush()]


def backend_of(tokenizer: Tokenizer, folder: str) -> Backend:
    tokenizer.save(folder)
    return Backend.from_file(f"{folder}/tokenizer.json")


@pytest.fixture(scope="session")
def smollm2_backend(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    return backend_of(smollm2, str(tmp_path_factory.mktemp("smollm2")))


@pytest.mark.parametrize(("ids", "pieces"), SPLIT_CHARACTERS.values(), ids=SPLIT_CHARACTERS.keys())
def test_B50_characters_that_span_tokens(smollm2: Tokenizer, ids: list[int], pieces: list[str]) -> None:
    assert stream(smollm2, ids) == [*pieces, ""]


def test_B156_streams_do_not_share_half_characters(smollm2: Tokenizer) -> None:
    ids = SPLIT_CHARACTERS["emoji-skin-tone"][0]
    streams = [Detokenizer(smollm2) for _ in range(4)]
    texts = ["" for _ in streams]
    for step in range(len(ids) + len(streams)):
        for phase, detokenizer in enumerate(streams):
            if 0 <= step - phase < len(ids):
                texts[phase] += detokenizer.add(ids[step - phase])
    assert texts == ["👍🏽"] * 4


@given(text=st.text())
def test_M8_every_text_survives_streaming(tiny: Tokenizer, text: str) -> None:
    pieces = stream(tiny, tiny.encode(text))
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text
    assert pieces[-1] == ""


@given(ids=SMOLLM2_IDS, skip=st.booleans())
def test_stream_equals_decode_of_any_ids(
    smollm2: Tokenizer, smollm2_backend: Backend, ids: list[int], skip: bool
) -> None:
    whole = smollm2.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(smollm2, ids, skip_special_tokens=skip)) == whole
    assert whole == smollm2_backend.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 300), max_size=60))
def test_stream_equals_decode_of_tiny_ids(tiny: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(tiny, ids)) == tiny.decode(ids)


def test_a_skipped_token_inside_a_character_changes_nothing(smollm2: Tokenizer) -> None:
    assert stream(smollm2, [34978, 2, 120]) == ["", "", "歪", ""]


def test_special_tokens_are_shown_on_request(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>hi<|im_end|>")
    assert smollm2.decode(ids) == "hi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_piece = {tokenizer.pieces[token_id]: token_id for token_id in range(tokenizer.vocab_size)}
    return [by_piece[bytes([byte])] for byte in data]


def test_B52_unfinished_character_at_the_end(tiny: Tokenizer) -> None:
    assert stream(tiny, byte_ids(tiny, b"a\xe6\xad")) == ["a", "", "", "�"]


def test_B52_bytes_that_cannot_continue_come_out_at_once(tiny: Tokenizer) -> None:
    assert stream(tiny, byte_ids(tiny, b"\xe6\xadb\x80")) == ["", "", "�b", "�", ""]


def test_ids_beyond_the_vocabulary_are_no_text(tiny: Tokenizer) -> None:
    assert stream(tiny, [*tiny.encode("a")[1:], 999]) == ["a", "", ""]
    assert tiny.decode([999, *tiny.encode("a")[1:], 2**31 - 1]) == "a"
    assert stream(tiny, [*byte_ids(tiny, b"\xe6\xad"), 999, *byte_ids(tiny, b"\xaa")]) == ["", "", "", "歪", ""]


def test_ids_beyond_the_vocabulary_of_a_gguf_are_no_text(smollm2: Tokenizer) -> None:
    river = smollm2.encode(" river")
    assert smollm2.decode([49152, *river, 128255], skip_special_tokens=False) == " river"
    answer = Answer(smollm2, ["zz"], frozenset(), 3)
    assert [answer.add(token) for token in (128255, *river, 49152)] == [(None, ""), (None, " river"), ("length", "")]


def test_flush_leaves_a_usable_detokenizer(tiny: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny)
    detokenizer.add(byte_ids(tiny, b"\xe6")[0])
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""
    assert detokenizer.add(byte_ids(tiny, b"x")[0]) == "x"


def test_cost_is_linear(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("The quick brown fox jumps over 12 lazy dogs. 日本語 ") * 4000
    detokenizer = Detokenizer(smollm2)
    start = time.process_time()
    for token_id in ids:
        detokenizer.add(token_id)
    assert len(ids) > 50_000
    assert time.process_time() - start < 1.0  # decoding everything at each step takes minutes


def test_unknown_decoder_is_refused() -> None:
    backend = Backend(models.BPE())
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"here: the tokenizer's decoder 'WordPiece' is not supported"):
        TokenPieces(backend, "here")
    backend.decoder = None
    with pytest.raises(ModelError, match="no decoder"):
        TokenPieces(backend, "here")
