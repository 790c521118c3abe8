"""Reading a stream of events as strictly as a client may."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Stream:
    status: int
    comments: list[str]
    chunks: list[dict[str, Any]]
    done: bool

    def text(self, index: int = 0) -> str:
        """The text of one choice, joined."""
        return "".join(piece for piece in self.pieces(index) if piece)

    def pieces(self, index: int = 0) -> list[str]:
        """The contents of the chunks of one choice, but those of the role and the finish reason."""
        found = []
        for choice in self.choices(index):
            delta = choice.get("delta")
            if choice["finish_reason"] is None and (delta is None or "role" not in delta):
                found.append(choice["text"] if delta is None else delta["content"])
        return found

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [c for chunk in self.chunks for c in chunk.get("choices", []) if c["index"] == index]

    def finish_reasons(self, index: int = 0) -> list[str | None]:
        return [choice["finish_reason"] for choice in self.choices(index)]


def stream(http: httpx.Client, path: str, **body: Any) -> Stream:
    with http.stream("POST", path, json=body | {"stream": True}) as response:
        return parse(response.status_code, response.read())


def parse(status: int, data: bytes) -> Stream:
    comments, chunks, done = [], [], False
    events = data.decode().split("\n\n")
    assert events.pop() == "", "the stream ends in the middle of an event"
    for event in events:
        assert not done, "something follows [DONE]"
        assert "\n" not in event
        if event.startswith(":"):
            comments.append(event)
        elif event == "data: [DONE]":
            done = True
        else:
            chunks.append(json.loads(event.removeprefix("data: "), parse_constant=_refuse))
    return Stream(status, comments, chunks, done)


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")
