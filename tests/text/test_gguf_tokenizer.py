"""Tokenizers from GGUF metadata: equal to what the models were trained with."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvcore.errors import InputError, ModelError
from kvcore.text import Detokenizer, Tokenizer, load_tokenizer
from kvcore.text.detokenizer import byte_level_alphabet
from kvcore.text.gguf_tokenizer import PRE_TOKENIZERS, read_vocabulary
from kvcore.weights import open_checkpoint

HI = [{"role": "user", "content": "Name three rivers."}]
VARIED = {
    "english": "The quick brown fox doesn't jump; it's lazy, we've said. I'LL SEE!",
    "code": "def f(x: int) -> int:\n    return x ** 2  # done\n\n\nclass A:\n\tpass\r\n",
    "digits": "In 1984, 3.14159 and 1,000,000 + 0x7F = 12345678901 v1.2.3",
    "cjk": "日本語のテキスト。中文字符，한국어 문장",
    "emoji": "👍🏽 family 👨‍👩‍👧‍👦 flags 🇩🇪🇫🇷",
    "whitespace": " a  b   c\t\td\n\n\n e \n  \n\u00a0f\u3000g   ",
    "special-tokens": "x<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <repo_name>y",
    "accents": "Ünïcödé naïve e\u0301 \u200b ß Ωμέγα Привет שלום",
    "empty": "",
}


# SmolLM2, the real file


@pytest.fixture(scope="session")
def smollm2_as_trained(smollm2_metadata: dict[str, Any]) -> Backend:
    """The original tokenizer.json of SmolLM2 spells 'smollm' as Digits, then ByteLevel with GPT-2's pattern."""
    tokens = smollm2_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in smollm2_metadata["tokenizer.ggml.merges"]]
    backend = Backend(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens[:17]])
    return backend


@pytest.fixture(scope="session")
def smollm2_transformers(smollm2_path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


def test_smollm2_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.adds_bos, smollm2.eos_token_ids) == (1, False, (2,))
    assert smollm2.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert smollm2.pieces.special_ids == frozenset(range(17))


def test_smollm2_digits_are_single(smollm2: Tokenizer) -> None:
    assert smollm2.encode("Hello 12345 x9") == [19556, 216, 33, 34, 35, 36, 37, 1792, 41]


@pytest.mark.parametrize("text", VARIED.values(), ids=VARIED.keys())
def test_smollm2_equals_transformers(smollm2: Tokenizer, smollm2_transformers: Any, text: str) -> None:
    ids = smollm2.encode(text)
    assert ids == smollm2_transformers(text).input_ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text


# transformers' conversion does not split numbers, which shows only at those that merges cover: not at 0 to 9.
@given(text=st.text(st.characters(exclude_categories=("Cs", "Nd", "Nl", "No")) | st.sampled_from("0123456789  '")))
def test_smollm2_equals_transformers_on_any_text(smollm2: Tokenizer, smollm2_transformers: Any, text: str) -> None:
    assert smollm2.encode(text) == smollm2_transformers(text).input_ids


@given(text=st.text() | st.text(st.sampled_from("1٣½² \n'sa.")))
def test_smollm2_equals_its_original_on_any_text(smollm2: Tokenizer, smollm2_as_trained: Backend, text: str) -> None:
    assert smollm2.encode(text) == smollm2_as_trained.encode(text).ids


def test_B53_smollm2_chat_begins_with_one_bos(smollm2: Tokenizer, smollm2_transformers: Any) -> None:
    ids = smollm2.encode_chat(HI)
    assert ids[0] == 1 != ids[1]
    theirs = smollm2_transformers.apply_chat_template(HI, add_generation_prompt=True, return_dict=True)
    assert ids == theirs["input_ids"]


def test_smollm2_saved_is_read_by_transformers(smollm2: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    smollm2.save(tmp_path)
    theirs, again = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    for text in (*VARIED.values(), "1٣½²"):
        assert smollm2.encode(text) == again.encode(text) == theirs(text).input_ids
    chat = theirs.apply_chat_template(HI, add_generation_prompt=True, return_dict=True)
    assert smollm2.encode_chat(HI) == again.encode_chat(HI) == chat["input_ids"]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)


def test_smollm2_through_its_checkpoint(smollm2: Tokenizer, smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(smollm2_path).tokenizer)
    text = " ".join(VARIED.values())
    assert tokenizer.encode(text) == smollm2.encode(text)
    assert tokenizer.encode_chat(HI) == smollm2.encode_chat(HI)
    assert tokenizer.where == str(smollm2_path)


def test_building_is_fast(smollm2_metadata: dict[str, Any]) -> None:
    def seconds() -> float:
        start = time.process_time()
        Tokenizer.from_gguf(smollm2_metadata, "x.gguf")
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.5


# Chat templates in the metadata


def test_B56_template_from_metadata(smollm2: Tokenizer) -> None:
    assert smollm2.has_chat_template
    assert smollm2.encode_chat(HI).count(1) == 3  # system, user, assistant


def test_B56_template_removed(smollm2_metadata: dict[str, Any]) -> None:
    metadata = {key: value for key, value in smollm2_metadata.items() if key != "tokenizer.chat_template"}
    tokenizer = Tokenizer.from_gguf(metadata, "dir/x.gguf")
    with pytest.raises(InputError, match=r"^dir/x\.gguf has no chat template"):
        tokenizer.encode_chat(HI)
    assert Tokenizer.from_gguf(metadata, "x.gguf", chat_template="given").render_chat(HI) == "given"


def test_B56_template_broken() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level() | {"tokenizer.chat_template": "{% if %}"}, "dir/x.gguf")
    with pytest.raises(ModelError, match=r"^dir/x\.gguf: the chat template has a syntax error, line 1"):
        tokenizer.encode_chat(HI)


# Byte-level BPE


def byte_level(**fields: Any) -> dict[str, Any]:
    """Metadata of a vocabulary of 256 bytes, "abc" without merges, and a few control tokens."""
    tokens = [*byte_level_alphabet(), "abc", "<s>", "</s>", "<|eot|>", "<|tool|>"]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 257 + [3, 3, 3, 4],
        "merges": ["a b"],
        "bos_token_id": 257,
        "eos_token_id": 258,
    }
    tokens.append("ab")
    metadata["token_type"].append(1)
    metadata |= fields
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not ...}


SPLITS = {
    "gpt-2": ("it's IT'S 1234  x\n\n", ["it", "'s", "ĠIT", "'", "S", "Ġ1234", "Ġ", "Ġx", "ĊĊ"]),
    "smollm": ("a 12½ b", ["a", "Ġ", "1", "2", "Â½", "Ġb"]),
    "llama-bpe": ("IT'S 12345\n\n  x!\n", ["IT", "'S", "Ġ", "123", "45", "ĊĊ", "Ġ", "Ġx", "!Ċ"]),
    "smaug-bpe": ("a\t1234", ["a", "ĉ", "123", "4"]),
    "qwen2": ("I'M 123\n x", ["I", "'M", "Ġ", "1", "2", "3", "Ċ", "Ġx"]),
    "tekken": ("helloWorld ABc 12/\n", ["hello", "World", "ĠABc", "Ġ", "1", "2", "/Ċ"]),
    "deepseek-coder": ("a1\n\n(x)", ["a", "1", "Ċ", "Ċ", "(", "x", ")"]),
    "default": ("a+=b 12345", ["a", "+=", "b", "Ġ", "123", "45"]),
}


@pytest.mark.parametrize(("pre", "text", "words"), [(k, *v) for k, v in SPLITS.items()], ids=SPLITS.keys())
def test_pre_tokenizers_cut_words(pre: str, text: str, words: list[str]) -> None:
    backend = read_vocabulary(byte_level(pre=pre), "x.gguf").backend
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=st.text())
def test_every_pre_tokenizer_keeps_the_text(pre: str, text: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre=pre), "x.gguf")
    if not PRE_TOKENIZERS[pre].nfc:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False).removeprefix("<s>") == text


def test_qwen2_composes_characters() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre="qwen2"), "x.gguf")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


@pytest.mark.parametrize(("pre", "pieces"), [("llama-bpe", ["abc"]), ("smaug-bpe", ["ab", "c"])])
def test_whole_words_before_merges(pre: str, pieces: list[str]) -> None:
    metadata = byte_level(pre=pre, add_bos_token=False)
    ids = Tokenizer.from_gguf(metadata, "x.gguf").encode("abc")
    assert [metadata["tokenizer.ggml.tokens"][i] for i in ids] == pieces


BOS_RULES = {
    "gpt-2-default": ({"pre": "gpt-2"}, False),
    "llama-bpe-default": ({"pre": "llama-bpe"}, True),
    "llama-bpe-off": ({"pre": "llama-bpe", "add_bos_token": False}, False),
    "gpt-2-on": ({"pre": "gpt-2", "add_bos_token": True}, True),
    "no-bos": ({"pre": "llama-bpe", "bos_token_id": ...}, False),
    "bos-outside": ({"pre": "llama-bpe", "bos_token_id": 2**32 - 1}, False),
}


@pytest.mark.parametrize(("fields", "adds"), BOS_RULES.values(), ids=BOS_RULES.keys())
def test_who_decides_on_bos(fields: dict[str, Any], adds: bool) -> None:
    ids = Tokenizer.from_gguf(byte_level(**fields), "x.gguf").encode("hi")
    assert (ids[0] == 257, len(ids)) == (adds, 3 if adds else 2)


def test_B53_gguf_that_adds_bos_with_a_template_that_has_it() -> None:
    metadata = byte_level(add_bos_token=True) | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    ids = Tokenizer.from_gguf(metadata, "x.gguf").encode_chat(HI)
    assert ids[:2].count(257) == 1


def test_M5_end_tokens() -> None:
    with_eot = Tokenizer.from_gguf(byte_level(eot_token_id=259), "x.gguf")
    assert with_eot.eos_token_ids == (258, 259)
    same = Tokenizer.from_gguf(byte_level(eot_token_id=258), "x.gguf")
    assert same.eos_token_ids == (258,)
    not_special = Tokenizer.from_gguf(byte_level(eot_token_id=97), "x.gguf")
    assert not_special.eos_token_ids == (258,)


def test_user_defined_tokens_are_shown_and_control_tokens_are_not() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(), "x.gguf")
    ids = tokenizer.encode("a<|tool|>b<|eot|>")
    assert 260 in ids
    assert 259 in ids
    assert tokenizer.decode(ids) == "a<|tool|>b"


def test_padding_with_a_text_token_leaves_it_text() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(padding_token_id=0), "x.gguf")
    assert "pad_token" not in tokenizer.special_tokens
    assert tokenizer.decode([0]) == "!"


# SentencePiece BPE


SPM_WORDS = ["▁t", "he", "▁the", "▁a", "in", "▁in", "an", "the", "nin", "▁▁", "▁thin", "th", "hin"]


def sentencepiece(**fields: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: 3 special tokens, 256 bytes, words and characters, best first."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [*SPM_WORDS, *"▁thein\na"]
    metadata = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *words],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(words))],
    } | fields
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not ...}


def best_pair_first(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's algorithm, naively: join the neighbours whose union scores highest, leftmost first."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        unions = [scores.get(left + right, -math.inf) for left, right in pairwise(symbols)]
        if not unions or max(unions) == -math.inf:
            return symbols
        at = unions.index(max(unions))
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(text=st.text(alphabet="thein a\n", max_size=30))
def test_sentencepiece_joins_the_best_pair_first(text: str) -> None:
    metadata = sentencepiece()
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens[259:], metadata["tokenizer.ggml.scores"][259:], strict=True))
    ids = Tokenizer.from_gguf(metadata, "x.gguf").encode(text)
    assert ids[0] == 1
    assert [tokens[i] for i in ids[1:]] == best_pair_first(text, scores)


@given(text=st.text())
def test_sentencepiece_spells_unknown_characters_in_bytes(text: str) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(), "x.gguf")
    spelled = text.replace("▁", " ")  # SentencePiece's own mark for a space
    assert tokenizer.decode(tokenizer.encode(text)) == spelled


@given(ids=st.lists(st.sampled_from((0, 1, 2, 35, 164, 169, *range(259, 280))), max_size=20))
def test_sentencepiece_streams_what_it_decodes(ids: list[int]) -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(), "x.gguf")
    detokenizer = Detokenizer(tokenizer)
    streamed = "".join(map(detokenizer.add, ids)) + detokenizer.flush()
    assert streamed == tokenizer.decode(ids)


SPACES = {
    "prefix": ({}, "the", ["▁the"], "the"),
    "no-prefix": ({"add_space_prefix": False}, "the", ["the"], "the"),
    "no-prefix-keeps-space": ({"add_space_prefix": False}, " the", ["▁the"], " the"),
    "after-special": ({}, "<s>the</s>a", ["<s>", "▁the", "</s>", "▁a"], "the a"),
}


@pytest.mark.parametrize(("fields", "text", "pieces", "shown"), SPACES.values(), ids=SPACES.keys())
def test_sentencepiece_space_prefix(fields: dict[str, Any], text: str, pieces: list[str], shown: str) -> None:
    metadata = sentencepiece(add_bos_token=False, **fields)
    tokenizer = Tokenizer.from_gguf(metadata, "x.gguf")
    ids = tokenizer.encode(text)
    assert [metadata["tokenizer.ggml.tokens"][i] for i in ids] == pieces
    assert tokenizer.decode(ids) == shown


def test_sentencepiece_defaults() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(), "x.gguf")
    assert (tokenizer.bos_token_id, tokenizer.adds_bos, tokenizer.eos_token_ids) == (1, True, (2,))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_sentencepiece_saved_and_loaded_again(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.from_gguf(sentencepiece(), "x.gguf")
    tokenizer.save(tmp_path)
    theirs, again = transformers.AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    for text in ("the thin  cat\n", "é😀 in", ""):
        assert tokenizer.encode(text) == again.encode(text) == theirs(text).input_ids
        assert tokenizer.decode(tokenizer.encode(text)) == again.decode(again.encode(text)) == text


# Errors


ERRORS = {
    "model-missing": ({"model": ...}, r"tokenizer\.ggml\.model is missing"),
    "model-unknown": ({"model": "rwkv"}, r"tokenizer 'rwkv' .* is not supported; supported: gpt2, llama"),
    "pre-unknown": (
        {"pre": "superbpe"},
        r"pre-tokenizer 'superbpe' .* is not supported; supported: default, gpt-2",
    ),
    "pre-not-text": ({"pre": 3}, r"tokenizer\.ggml\.pre is not a string"),
    "tokens-missing": ({"tokens": ...}, r"tokenizer\.ggml\.tokens is missing"),
    "tokens-empty": ({"tokens": []}, r"vocabulary .* is empty"),
    "tokens-numbers": ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens is not a list of str"),
    "types-short": ({"token_type": [1]}, r"token_type is not as long as .* \(1 values for 262 tokens\)"),
    "merges-missing": ({"merges": ...}, r"tokenizer\.ggml\.merges is missing"),
    "merge-not-a-pair": ({"merges": ["ab"]}, r"'ab' in tokenizer\.ggml\.merges is not a pair"),
    "merge-unknown-token": ({"merges": ["a xyz"]}, r"tokens and merges do not fit together"),
    "flag-not-boolean": ({"add_bos_token": "yes"}, r"add_bos_token is not a boolean"),
    "scores-missing": ({"model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
}


@pytest.mark.parametrize(("fields", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_M4_errors_are_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"^dir/x\.gguf: .*{message}") as caught:
        Tokenizer.from_gguf(byte_level(**fields), "dir/x.gguf")
    assert "\n" not in str(caught.value)
