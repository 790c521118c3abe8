"""The text that is scored, and where its windows begin."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from kvcore.errors import InputError
from kvcore.text import Tokenizer

SAMPLE_NAME = "The Jargon File 4.4.7 (public domain), as in Debian's jargon-text"
SAMPLE_STARTS = (20_000, 80_000, 140_000, 200_000, 260_000, 320_000)


@dataclass(frozen=True, slots=True)
class Text:
    """``ids`` int64 [N] of the whole text without BOS; ``starts`` the first tokens of its windows."""

    name: str
    sha256: str
    ids: np.ndarray
    starts: tuple[int, ...]
    context: int

    def window(self, start: int) -> np.ndarray:
        return self.ids[start : start + self.context]


def sample_text() -> str:
    """The bundled sample: 1.7 MB of English prose and definitions."""
    packed = (files("kvcore.eval") / "sample" / "jargon.txt.gz").read_bytes()
    return gzip.decompress(packed).decode("utf-8")


def read_text(path: str | Path | None) -> tuple[str, str]:
    """A name and the text: a UTF-8 file, or the bundled sample. InputError where it cannot be read."""
    if path is None:
        return SAMPLE_NAME, sample_text()
    try:
        return Path(path).name, Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--text {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--text {path}: not UTF-8 at byte {error.start}") from error


def tokenize(
    tokenizer: Tokenizer, path: str | Path | None, *, context: int, windows: int, starts: Sequence[int] | None = None
) -> Text:
    """The text's tokens and ``windows`` windows of ``context`` of them: the sample's own, or spread evenly.

    ``starts`` overrules both. InputError where the text is too short for them.
    """
    name, text = read_text(path)
    ids = np.asarray(tokenizer.encode(text), np.int64)
    bos = tokenizer.bos_token_id
    if len(ids) and bos is not None and ids[0] == bos:
        ids = ids[1:]
    last = len(ids) - context
    if last < 0:
        raise InputError(
            f"the text has {len(ids)} tokens, a window {context}: give a longer --text or a smaller --context"
        )
    if starts is None and path is None and windows <= len(SAMPLE_STARTS) and last >= SAMPLE_STARTS[-1]:
        starts = SAMPLE_STARTS[:windows]
    elif starts is None:
        starts = sorted({int(at) for at in np.linspace(0, last, windows + 2)[1:-1]})
    if beyond := [at for at in starts if not 0 <= at <= last]:
        raise InputError(f"a window at token {beyond[0]}: the last one of {context} tokens begins at {last}")
    return Text(name, hashlib.sha256(text.encode()).hexdigest(), ids, tuple(starts), context)
