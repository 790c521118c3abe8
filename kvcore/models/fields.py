"""Typed reading of settings that somebody else wrote: each refusal names the file, the key and the value."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from kvcore.errors import ModelError

LARGEST_COUNT = 2**31 - 1
LARGEST_NUMBER = sys.float_info.max


def quoted(value: object, limit: int = 60) -> str:
    """``repr`` cut to ``limit`` characters, so that a hostile name still makes one short line."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


@dataclass(frozen=True, slots=True)
class Fields:
    """Settings ``values`` found in ``where``. A null value counts as absent."""

    values: Mapping[str, object]
    where: str

    def get(self, key: str) -> object:
        return self.values.get(key)

    def require(self, *keys: str) -> None:
        """Raise ModelError naming every key that is absent."""
        missing = [key for key in keys if self.get(key) is None]
        if missing:
            plural = "s" if len(missing) > 1 else ""
            raise ModelError(f"{self.where}: missing key{plural} {', '.join(missing)}")

    def refuse(self, key: str, wanted: str) -> ModelError:
        return ModelError(f"{self.where}: {key} must be {wanted}, is {quoted(self.get(key))}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LARGEST_COUNT:
            raise self.refuse(key, f"an integer from 1 to {LARGEST_COUNT}")
        return value

    def whole(self, key: str, default: int) -> int:
        """An integer of 0 or more."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST_COUNT:
            raise self.refuse(key, f"an integer from 0 to {LARGEST_COUNT}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LARGEST_NUMBER:
            raise self.refuse(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "a string")
        return value

    def block(self, key: str) -> Mapping[str, object]:
        """A nested object; empty where absent."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.refuse(key, "an object")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where absent."""
        value = self.get(key)
        if value is None:
            return ()
        listed = value if isinstance(value, list | tuple) else [value]
        ids = [i for i in listed if isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= LARGEST_COUNT]
        if len(ids) != len(listed):
            raise self.refuse(key, "a token id or a list of token ids")
        return tuple(ids)

    def _value(self, key: str, default: object) -> object:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.where}: missing key {key}")
        return default
