"""Errors that a user can act on: one line that says what failed, why, and what to do instead.

The command line prints the message alone and exits with ``exit_code``; ``--debug`` adds the traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


class KvcoreError(Exception):
    """A failure with a message meant for the user. Exit code 1."""

    exit_code = 1


class CapacityError(KvcoreError):
    """Rows that find no room: beyond a budget, or beyond what the device has. Nothing has changed."""


class InputError(KvcoreError):
    """Something the caller gave cannot be used: an argument, a prompt, a setting. Exit code 2."""

    exit_code = 2


class ModelError(InputError):
    """A model's files are missing, damaged, contradictory or of another architecture."""


class UnsupportedError(InputError):
    """The request is well-formed, but nothing here can serve it; ``reasons`` lists every cause."""

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class BackendError(InputError):
    """A backend cannot be used on this machine: a package or a device is missing, or a package is broken."""


NOT_FINITE = "the model's logits are not finite: check its weights, or use a wider --dtype"


class NonFiniteError(KvcoreError):
    """A NaN or an infinity: in logits (`NOT_FINITE`), or, on the reference backend, where rows are quantized."""


_OUT_OF_MEMORY = ("out of memory", "unable to allocate", "can't allocate memory", "bad_alloc", "[malloc")


def is_out_of_memory(error: BaseException) -> bool:
    """CapacityError, MemoryError, and what torch and MLX raise instead: RuntimeErrors of which only the text tells."""
    if isinstance(error, CapacityError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(mark in text for mark in _OUT_OF_MEMORY)
