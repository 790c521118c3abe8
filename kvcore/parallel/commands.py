"""What rank 0 tells the other ranks: small messages, each one sum over int32 words to which only rank 0 adds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore.cache import Cache
from kvcore.communicator import Communicator
from kvcore.errors import KvcoreError

FRAME = 256  # words of the first sum; the commands of a decode step fit into it


@dataclass(frozen=True, slots=True)
class Command:
    """``name`` and plain arguments; ``ids`` int32 of any shape for a step.

    new(cache, spec)  fork(cache, into)  free(number), of a cache or a decoder  call(cache, method, arguments)  end()
    step(cache, all_logits)  ragged(caches, shapes, settings), whose ids are those of all caches one after the other
    decoder(decoder, cache, draws, seen), whose ids are those seen so far  decode(decoder, method, arguments)
    """

    name: str
    arguments: dict[str, Any]
    ids: np.ndarray | None = None


def send(ranks: Communicator, command: Command) -> None:
    """Called by rank 0, while the others `receive`."""
    ids = np.zeros((0, 0), np.int32) if command.ids is None else np.ascontiguousarray(command.ids, np.int32)
    text = json.dumps([command.name, command.arguments, ids.shape, command.ids is not None]).encode()
    words = np.concatenate([_words(text), ids.reshape(-1)])
    first = np.zeros(FRAME, np.int32)
    first[:2] = len(words), len(text)
    inline = words[: FRAME - 2]
    first[2 : 2 + len(inline)] = inline
    ranks.all_sum(first)
    if len(words) > FRAME - 2:
        ranks.all_sum(words[FRAME - 2 :])


def receive(ranks: Communicator) -> Command:
    """Called by every other rank; waits as long as rank 0 has nothing to say."""
    first = np.asarray(ranks.all_sum(np.zeros(FRAME, np.int32)))
    count, size = int(first[0]), int(first[1])
    words = first[2 : 2 + min(count, FRAME - 2)]
    if count > FRAME - 2:
        words = np.concatenate([words, np.asarray(ranks.all_sum(np.zeros(count - FRAME + 2, np.int32)))])
    text = words[: -(-size // 4)].astype("<i4").tobytes()[:size]
    name, arguments, shape, has_ids = json.loads(text)
    ids = words[-(-size // 4) :].reshape(shape) if has_ids else None
    return Command(name, arguments, ids)


def _words(text: bytes) -> np.ndarray:
    """Bytes as int32 words, filled up with zeros."""
    return np.frombuffer(text.ljust(-(-len(text) // 4) * 4, b"\0"), "<i4").astype(np.int32)


def anywhere(ranks: Communicator, happened: bool) -> bool:
    """Whether it happened on any rank; every rank asks."""
    return bool(np.asarray(ranks.all_sum(np.array([happened], np.int32)))[0])


def agree(ranks: Communicator, errors: dict[int, Exception], caches: Sequence[Cache], before: Sequence[int]) -> None:
    """After a ragged step, on every rank: a cache that failed on any of them goes back to ``before`` rows on all, and
    has an error on all."""
    failed = np.zeros(len(caches), np.int32)
    failed[list(errors)] = 1
    for i in np.flatnonzero(np.asarray(ranks.all_sum(failed))).tolist():
        if i not in errors:
            caches[i].shorten(before[i])
            errors[i] = KvcoreError("another rank could not run this step")
