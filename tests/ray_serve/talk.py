"""Conversations that take turns: 30 of them, ten turns each, about a text that each begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CONVERSATIONS, TURNS = 30, 10
TEXT = "we walked along the river until the light was gone and then told each other stories of "

Send = Callable[[list[dict[str, str]]], tuple[str, int, int]]


def said(conversation: int, turn: int) -> str:
    """A text of about 500 characters of its own, then short questions."""
    if turn == 0:
        return f"{conversation}: {(TEXT[conversation:] + TEXT[:conversation]) * 6}"
    return f"and what came after {turn}?"


def play(send: Send) -> dict[str, int]:
    """``send(messages)`` gives the answer, its prompt tokens and the cached ones; returns the sums."""
    messages: list[list[dict[str, str]]] = [[] for _ in range(CONVERSATIONS)]
    total = {"requests": 0, "prompt": 0, "cached": 0}
    for conversation in list(range(CONVERSATIONS)) * TURNS:
        own = messages[conversation]
        own.append({"role": "user", "content": said(conversation, len(own) // 2)})
        text, prompt, cached = send(own)
        own.append({"role": "assistant", "content": text})
        total["requests"] += 1
        total["prompt"] += prompt
        total["cached"] += cached
    return total


def cached_of(body: dict[str, Any]) -> tuple[str, int, int]:
    """What `Send` gives, from the body of a chat completion."""
    usage = body["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return body["choices"][0]["message"]["content"], usage["prompt_tokens"], details.get("cached_tokens", 0)
