"""JSON objects read from model files, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path

from kvcore.errors import ModelError


def read_json(path: Path) -> dict[str, object]:
    """The object in ``path``. ModelError where it cannot be read or is not one JSON object."""
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def parse_json(raw: bytes, where: str) -> dict[str, object]:
    """The object that ``raw`` spells. ModelError, beginning with ``where``, where it is none."""
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise ModelError(f"{where} is not valid JSON: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        problem = f"{error.msg} at line {error.lineno} column {error.colno}"
        raise ModelError(f"{where} is not valid JSON: {problem}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; deep nesting
        raise ModelError(f"{where} is not valid JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where} must hold a JSON object, holds {type(value).__name__}")
    return value
