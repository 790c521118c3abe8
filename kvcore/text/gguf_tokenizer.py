"""A tokenizer from GGUF metadata (``tokenizer.ggml.*``), as llama.cpp reads it.

Sources: the GGUF specification (ggml, ``docs/gguf.md``, "Tokenizer"); llama.cpp's ``llama-vocab.cpp`` for the
pre-tokenizers that ``tokenizer.ggml.pre`` names and for defaults; the models' own ``tokenizer.json`` for the
patterns that llama.cpp spells differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from kvcore.errors import ModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "▁"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before byte-level BPE: each pattern in turn isolates its matches."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say
    adds_bos: bool = False  # where the file does not say
    nfc: bool = False  # the model was trained on composed characters; GGUF does not record it


_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_PLAIN = PreTokenizer((_GPT2,))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA_BPE),
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreTokenizer((_QWEN2,), nfc=True)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_NEVER_TEXT = (TokenType.CONTROL, TokenType.UNKNOWN)


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """What GGUF metadata says of a tokenizer; ``special_ids`` by role: bos, eos, eot, eom, unknown, padding."""

    tokens: Sequence[str]
    types: Sequence[int]
    special_ids: Mapping[str, int]
    adds_bos: bool
    backend: tokenizers.Tokenizer

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts by the names that ``tokenizer_config.json`` and chat templates use."""
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        return {
            names[role]: self.tokens[token_id]
            for role, token_id in self.special_ids.items()
            if role in ("bos", "eos") or (role in names and self.types[token_id] in _NEVER_TEXT)
        }

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end of text, and the end-of-turn tokens that the file names and marks as control tokens."""
        ids = [self.special_ids["eos"]] if "eos" in self.special_ids else []
        for role in ("eot", "eom"):
            token_id = self.special_ids.get(role)
            if token_id is not None and self.types[token_id] == TokenType.CONTROL:
                ids.append(token_id)
        return tuple(dict.fromkeys(ids))


def read_vocabulary(metadata: Mapping[str, object], where: str) -> GgufVocabulary:
    """Build the tokenizer that ``metadata`` describes.

    Args:
        metadata: GGUF key-value pairs as plain Python values.
        where: the file's name, for messages.

    Raises:
        ModelError: a key is missing or of the wrong type, or the kind of tokenizer is not supported.
    """
    fields = _Fields(metadata, where)
    model = fields.text("model", None)
    tokens = fields.list_of("tokens", str)
    if not tokens:
        raise ModelError(f"{where}: the vocabulary (tokenizer.ggml.tokens) is empty; convert the model again")
    types = fields.list_of("token_type", int, default=[int(TokenType.NORMAL)] * len(tokens), size=len(tokens))
    defaults: dict[str, int] = {}
    if model == "gpt2":
        backend, adds_bos = _byte_level_bpe(fields, tokens)
    elif model == "llama":
        backend, adds_bos = _sentencepiece_bpe(fields, tokens, types), True
        defaults = {"bos": 1, "eos": 2, "unknown": 0}
    else:
        raise ModelError(
            f"{where}: tokenizer {model!r} (tokenizer.ggml.model) is not supported; supported: gpt2, llama"
        )
    special_ids = fields.special_ids(len(tokens), defaults)
    adds_bos = fields.flag("add_bos_token", adds_bos) and "bos" in special_ids
    _mark_special_tokens(backend, tokens, types, special_ids)
    if adds_bos:
        bos = special_ids["bos"]
        backend.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], pair=[tokens[bos], "$A", "$B"], special_tokens=[(tokens[bos], bos)]
        )
    return GgufVocabulary(tokens, types, special_ids, adds_bos, backend)


def _byte_level_bpe(fields: _Fields, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = fields.text("pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ModelError(
            f"{fields.where}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
            f"supported: {', '.join(PRE_TOKENIZERS)}; or use the model's folder with tokenizer.json"
        )
    merges = [_pair(merge, fields.where) for merge in fields.list_of("merges", str)]
    backend = tokenizers.Tokenizer(_bpe(fields.where, tokens, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece_bpe(fields: _Fields, tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    scores = fields.list_of("scores", float, size=len(tokens))
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None)
    model = _bpe(
        fields.where,
        tokens,
        _merges_from_scores(tokens, types, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    decoder: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    normalizer: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    if fields.flag("add_space_prefix", True):
        normalizer.insert(0, normalizers.Prepend(_SPACE))
        decoder.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(normalizer)
    backend.decoder = decoders.Sequence(decoder)
    return backend


def _merges_from_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores highest: BPE with every such pair as a merge."""
    ids = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind == TokenType.NORMAL}
    ranked = [
        (-scores[i], i, ids[text[:cut]], ids[text[cut:]])
        for text, i in ids.items()
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]


def _bpe(
    where: str,
    tokens: Sequence[str],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> models.BPE:
    try:
        return models.BPE(
            vocab={text: i for i, text in enumerate(tokens)},
            merges=merges,
            unk_token=unk_token,
            fuse_unk=fuse_unk,
            byte_fallback=byte_fallback,
            ignore_merges=ignore_merges,
        )
    except Exception as error:  # tokenizers raises nothing narrower
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{where}: tokens and merges do not fit together ({reason}); convert the model again"
        ) from error


def _pair(merge: str, where: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ModelError(
            f"{where}: {merge!r} in tokenizer.ggml.merges is not a pair of tokens; convert the model again"
        )
    return left, right


def _mark_special_tokens(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int], special_ids: Mapping[str, int]
) -> None:
    """Control tokens, BOS and EOS are never text; user-defined tokens are text that is found before BPE."""
    special = {i for i, kind in enumerate(types) if kind in _NEVER_TEXT}
    special |= {special_ids[role] for role in ("bos", "eos") if role in special_ids}
    user_defined = [i for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED and i not in special]
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in sorted(special)])
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in user_defined])


class _Fields:
    """The ``tokenizer.ggml.*`` values, checked as they are read."""

    def __init__(self, metadata: Mapping[str, object], where: str) -> None:
        self._metadata = metadata
        self.where = where

    def text(self, name: str, default: str | None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "a boolean")
        return value

    def list_of(
        self, name: str, kind: type[_T], *, default: list[_T] | None = None, size: int | None = None
    ) -> list[_T]:
        value = self._get(name, default)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self._wrong(name, f"a list of {kind.__name__}")
        if size is not None and len(value) != size:
            raise self._wrong(name, f"as long as tokenizer.ggml.tokens ({len(value)} values for {size} tokens)")
        return value

    def special_ids(self, vocab_size: int, defaults: Mapping[str, int]) -> dict[str, int]:
        """Ids by role. As in llama.cpp, one outside the vocabulary counts as none."""
        ids = {}
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            value = self._metadata.get(f"tokenizer.ggml.{role}_token_id", defaults.get(role))
            if isinstance(value, int) and 0 <= value < vocab_size:
                ids[role] = value
        return ids

    def _get(self, name: str, default: object) -> object:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if value is None:
            raise ModelError(
                f"{self.where}: tokenizer.ggml.{name} is missing, so text cannot be tokenized; "
                "convert the model again, with its tokenizer"
            )
        return value

    def _wrong(self, name: str, wanted: str) -> ModelError:
        return ModelError(f"{self.where}: tokenizer.ggml.{name} is not {wanted}; convert the model again")
