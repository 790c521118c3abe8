"""Log-probabilities of tokens as OpenAI's two endpoints show them, aligned with the text that is shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.engine.types import TokenLogprob
from kvcore.text import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Placed:
    """A token and the character of the text at which it begins."""

    token: TokenLogprob
    offset: int


class Aligner:
    """Holds tokens back until text of theirs is shown, so that those of a stop string never are.

    A token that spells less than a character belongs to the character that it begins or goes on with.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._waiting: deque[Placed] = deque()
        self._spelled = offset  # characters that all tokens so far spell
        self._shown = offset

    def push(self, tokens: Iterable[TokenLogprob], text: str) -> list[Placed]:
        """Tokens that came with ``text``; returns those that the text so far shows."""
        for token in tokens:
            self._waiting.append(Placed(token, self._spelled))
            self._spelled += len(self._detokenizer.add(token.token))
        self._shown += len(text)
        ready = []
        while self._waiting and self._waiting[0].offset < self._shown:
            ready.append(self._waiting.popleft())
        return ready

    def rest(self) -> list[Placed]:
        """What is held back, for an answer that no end token and no stop string ended."""
        waiting, self._waiting = list(self._waiting), deque()
        return waiting


def place_prompt(tokens: Sequence[TokenLogprob], text: str, tokenizer: Tokenizer) -> list[Placed]:
    """The tokens of a prompt in its ``text``; those that are not in it, such as a BOS, take no room."""
    detokenizer, offset, placed = Detokenizer(tokenizer, skip_special_tokens=False), 0, []
    for token in tokens:
        placed.append(Placed(token, offset))
        spelled = detokenizer.add(token.token)
        if text.startswith(spelled, offset):
            offset += len(spelled)
    return placed


def chat_logprobs(placed: Sequence[Placed], tokenizer: Tokenizer) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion."""
    return {"content": [_chat_token(each.token, tokenizer) for each in placed], "refusal": None}


def completion_logprobs(placed: Sequence[Placed], tokenizer: Tokenizer, alternatives: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion. Of two alternatives with the same text the likelier stays."""
    tops: list[dict[str, float] | None] = []
    for each in placed:
        best: dict[str, float] = {}
        for token, logprob in each.token.top[:alternatives]:
            best.setdefault(_text_or_bytes(tokenizer, token), _finite(logprob))
        if each.token.logprob is not None and alternatives:
            best.setdefault(_text_or_bytes(tokenizer, each.token.token), _finite(each.token.logprob))
        tops.append(best if each.token.logprob is not None else None)
    return {
        "tokens": [_text_or_bytes(tokenizer, each.token.token) for each in placed],
        "token_logprobs": [None if each.token.logprob is None else _finite(each.token.logprob) for each in placed],
        "top_logprobs": tops if alternatives else None,
        "text_offset": [each.offset for each in placed],
    }


def _chat_token(token: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    own = _chat_entry(token.token, token.logprob or 0.0, tokenizer)
    return own | {"top_logprobs": [_chat_entry(t, logprob, tokenizer) for t, logprob in token.top]}


def _chat_entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    piece = tokenizer.pieces[token]
    return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what cannot be drawn."""
    return max(logprob, -9999.0)


def _text_or_bytes(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; OpenAI's ``bytes:\\xe6`` for part of a character."""
    piece = tokenizer.pieces[token]
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
