"""What is noted about a request: for its line in the log, and for the histograms."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from kvcore.server.errors import ApiError
from kvcore.server.metrics import Metrics
from kvcore.server.subscription import Event


@dataclass(slots=True)
class Record:
    """Times are `time.perf_counter` seconds. No text of a prompt or an answer is ever in here."""

    id: str
    method: str
    path: str
    metrics: Metrics
    start: float = field(default_factory=time.perf_counter)
    status: int = 0
    stream: bool | None = None
    first: float | None = None
    usage: dict[str, Any] | None = None
    reasons: list[str] = field(default_factory=list)
    error: str | None = None
    _last: dict[int, float] = field(default_factory=dict)
    _made: dict[int, int] = field(default_factory=dict)

    def saw(self, event: Event) -> None:
        """A piece came."""
        made = event.output.usage.completion_tokens
        new = made - self._made.get(event.index, 0)
        if new <= 0:
            return
        if self.first is None:
            self.first = event.at
            self.metrics.first_token(event.at - self.start)
        if event.index in self._last:
            self.metrics.next_token((event.at - self._last[event.index]) / new)
        self._last[event.index], self._made[event.index] = event.at, made

    def finish(self, reason: str) -> None:
        """A choice ended, or the client left."""
        self.reasons.append(reason)

    def fail(self, error: ApiError) -> None:
        self.error = error.code or str(error.status)
        if self.first is not None:
            self.finish("error")

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def line(self) -> dict[str, Any]:
        """The log's line, when the answer is out."""
        line: dict[str, Any] = {"id": self.id, "method": self.method, "path": self.path, "status": self.status}
        if self.error is not None:
            line["error"] = self.error
        if self.stream is not None:
            line["stream"] = self.stream
        if self.usage is not None:
            line |= {
                "prompt_tokens": self.usage["prompt_tokens"],
                "cached_tokens": self.usage["prompt_tokens_details"]["cached_tokens"],
                "completion_tokens": self.usage["completion_tokens"],
            }
        if self.reasons:
            line["finish_reason"] = ",".join(self.reasons)
        if self.first is not None:
            line["ttft_s"] = round(self.first - self.start, 4)
            line["decode_s"] = round(max(self._last.values()) - self.first, 4)
        return line | {"total_s": round(self.seconds(), 4)}
