"""From an exception to one line and an exit code."""

from __future__ import annotations

import typer

from kvcore.errors import KvcoreError, is_out_of_memory

# typer re-exports one of click's usage errors; its base class covers them all, also where typer brings its own
# click.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def explain(error: Exception) -> tuple[str, int]:
    """One line for the user, and the exit code."""
    if isinstance(error, KvcoreError):
        return one_line(str(error)), error.exit_code
    if isinstance(error, UsageError):
        return _usage(error), 2
    if is_out_of_memory(error):
        return (
            f"out of memory ({_cause(error)}): try a shorter prompt, a smaller --max-tokens or "
            "--prefill-step-size, a quantized --kv-cache-mode or a smaller model (kvcore advise says what fits)"
        ), 1
    return f"unexpected {type(error).__name__}: {_cause(error)} (run with --debug for the traceback)", 1


def one_line(text: str) -> str:
    """Line breaks and runs of spaces, as in the messages of other packages, become single spaces."""
    return " ".join(text.split())


def _cause(error: Exception) -> str:
    return one_line(str(error)).rstrip(".")[:200] or "no message"


def _usage(error: Exception) -> str:
    text = one_line(error.format_message())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = "kvcore" if context is None else context.command_path
    return f"{text.rstrip('.')} (see {command} --help)"
