"""From token ids back to text, piece by piece, never showing half a character.

Every token of a byte-level or SentencePiece vocabulary stands for fixed bytes, and text is their concatenation
read as UTF-8. So streaming needs only an incremental UTF-8 decoder; a token costs no more than its own bytes.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import tokenizers

from kvcore.errors import ModelError

if TYPE_CHECKING:
    from kvcore.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """Decodes one sequence as its tokens arrive.

    All ``add`` results and the final ``flush``, joined, equal ``tokenizer.decode(ids)``. Bytes that cannot be a
    character come out as U+FFFD as soon as that is certain; an unfinished character is held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.pieces.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.pieces.strips_leading_space

    def add(self, token_id: int) -> str:
        """The text that becomes final with ``token_id``; empty where a character is unfinished."""
        if token_id in self._skipped:
            return ""
        piece = self._pieces[token_id]
        if self._at_start and piece:
            self._at_start = False
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What remains at the end: U+FFFD for an unfinished character, otherwise nothing."""
        return self._utf8.decode(b"", final=True)


class TokenPieces:
    """The bytes that each token id stands for; ids outside the vocabulary stand for none.

    Attributes:
        special_ids: ids that are not text (BOS, end of turn, ...).
        strips_leading_space: a text begins with a space that SentencePiece put there, and that is not shown.

    Raises:
        ModelError: the tokenizer decodes in another way than byte-level BPE and SentencePiece do.
    """

    def __init__(self, backend: tokenizers.Tokenizer, where: str) -> None:
        self._backend = backend
        self._cache: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.strips_leading_space = False
        self._bytes_of_char: Mapping[str, int] | None = None
        self._space = ""
        self._byte_tokens = False
        for step in _decoder_steps(backend, where):
            self._read_step(step, where)

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._cache[token_id] = self._piece(token_id)
        return piece

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        text = self._backend.id_to_token(token_id) or ""
        if self._bytes_of_char is not None:
            if all(char in self._bytes_of_char for char in text):
                return bytes(self._bytes_of_char[char] for char in text)
            return text.encode()
        if self._byte_tokens and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(byte[1])
        return (text.replace(self._space, " ") if self._space else text).encode()

    def _read_step(self, step: Mapping[str, Any], where: str) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._bytes_of_char = byte_level_alphabet()
            case {"type": "ByteFallback"}:
                self._byte_tokens = True
            case {"type": "Replace", "pattern": {"String": str(space)}, "content": " "}:
                self._space = space
            case {"type": "Metaspace", "replacement": str(space)}:
                self._space = space
                self.strips_leading_space = step.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                self.strips_leading_space = True
            case {"type": "Fuse"}:
                pass
            case _:
                raise ModelError(
                    f"{where}: the tokenizer's decoder {step.get('type')!r} is not supported; "
                    "supported are byte-level BPE and SentencePiece"
                )


def byte_level_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary (GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _decoder_steps(backend: tokenizers.Tokenizer, where: str) -> Iterator[dict[str, Any]]:
    if backend.decoder is None:
        raise ModelError(f"{where}: the tokenizer has no decoder, so ids cannot be turned back into text")
    decoder = json.loads(backend.decoder.__getstate__())
    yield from decoder["decoders"] if decoder["type"] == "Sequence" else (decoder,)
