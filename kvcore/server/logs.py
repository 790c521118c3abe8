"""The server's log on stderr: one JSON object per line, or short lines for a terminal."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

logger = logging.getLogger("kvcore.server")
FORMATS = ("auto", "json", "text")


def log(event: str, level: int = logging.INFO, **facts: Any) -> None:
    """``facts`` must not hold texts of prompts or answers, nor keys."""
    logger.log(level, event, extra={"facts": facts})


def log_exception(error: BaseException, **facts: Any) -> None:
    """Type and frames only: the message of an exception that nobody planned may repeat what a request holds."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log("unexpected error", logging.ERROR, type=type(error).__name__, frames=frames, **facts)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{name}={value}" for name, value in getattr(record, "facts", {}).items())
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{time} {record.levelname.lower()} {record.getMessage()} {facts}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(form: str) -> None:
    """Send this package's and uvicorn's messages to stderr; ``auto`` is text on a terminal."""
    text = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler()
    handler.setFormatter(_TextFormatter() if text else _JsonFormatter())
    package = logging.getLogger("kvcore")  # the engine's too
    package.handlers, package.propagate = [handler], False
    package.setLevel(logging.INFO)
    # Uvicorn's access log would repeat the requests; its warnings tell of broken connections.
    for name in ("uvicorn", "uvicorn.error"):
        theirs = logging.getLogger(name)
        theirs.handlers, theirs.propagate = [handler] if name == "uvicorn" else [], name != "uvicorn"
        theirs.setLevel(logging.ERROR)
