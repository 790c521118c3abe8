"""Reading text from the command line and from standard input."""

from __future__ import annotations

import sys

from kvcore.errors import InputError

STDIN = "-"


def read_prompt(given: str | None) -> str:
    """The prompt's text; "-" reads standard input to its end. One final line break is not part of it."""
    if given is None:
        raise InputError("no prompt: give --prompt TEXT, or --prompt - to read it from standard input")
    if given != STDIN:
        return given
    return without_line_break(decode_stdin(sys.stdin.buffer.read()))


def decode_stdin(data: bytes, start: int = 0) -> str:
    """UTF-8 text of bytes that begin at ``start`` in standard input. InputError says which byte is not."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not UTF-8: byte {start + error.start} is 0x{data[error.start]:02x} "
            f"({error.reason}); convert it, for example with iconv -t UTF-8"
        ) from error


def without_line_break(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
