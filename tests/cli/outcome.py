"""One run of a command, and what it printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        assert self.code == 0, self.err
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    def refused(self, code: int = 2) -> str:
        """The message of a refusal: one line on stderr, nothing on stdout, no traceback."""
        assert (self.code, self.out) == (code, "")
        assert self.err.startswith("kvcore: error: ")
        assert self.err.count("\n") == 1
        assert "Traceback" not in self.err
        return self.err.removeprefix("kvcore: error: ").strip()


class Cli(Protocol):
    def __call__(self, *args: object, stdin: bytes = b"") -> Outcome: ...
