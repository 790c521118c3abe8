"""Sizes as people write them."""

from __future__ import annotations

import re

from kvcore.errors import InputError

UNITS = (
    {"": 1, "B": 1}
    | {p: 1024**n for n, p in enumerate("KMGT", 1)}
    | {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
    | {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
)


def parse_size(flag: str, given: str, *, example: str, unit: bool = False) -> int:
    """Bytes of ``given``: a number, with B, K, M, G, T or KiB (1,024 each) or KB (1,000 each) behind it.

    InputError that names ``flag`` where it is none, or less than a byte. With ``unit``, where it has no unit.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)\s*([KMGT]i?B|[KMGTB]|)", given.strip(), re.ASCII)
    size = int(float(match[1]) * UNITS[match[2]]) if match and (match[2] or not unit) else 0
    if size < 1:
        what = "a number and a unit" if unit else "a number of bytes, or one with a unit"
        raise InputError(f"{flag} {given}: give {what}, such as {example}")
    return size
