"""Logits of a text as decoding gives them, and a variant's distance from the raw model on it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from kvcore.cache import Cache
from kvcore.cache.storage import TurningStorage
from kvcore.errors import InputError, KvcoreError
from kvcore.eval.codecs import Variant, product_codec
from kvcore.eval.metrics import Positions, compare
from kvcore.eval.onepass import CHUNK, one_pass_cache
from kvcore.eval.rows import RawRows
from kvcore.modes import MODES
from kvcore.runtime import Model

PATHS = ("one-pass", "pages", "decode")
RAW = Variant("fp16", product_codec("raw"), product_codec("raw"), RawRows())


def logits(model: Model, ids: np.ndarray, variant: Variant, path: str = "one-pass") -> Iterator[np.ndarray]:
    """float32 logits [n, vocab] of ``ids`` [T], piece by piece, each position as a decode step computes it.

    one-pass   the form that a mask selects (`onepass`): any variant
    pages      the real cache, in chunks within which nothing folds, so that each query sees decode's rows; its
               kernels are those of prefill
    decode     the real cache and its decode kernels, token by token
    InputError where the path cannot score the variant: a real cache has modes, not evaluation codecs.
    """
    if path == "one-pass":
        yield from _run(model, ids, one_pass_cache(model, variant), _even(len(ids), variant.group))
        return
    cache = _real_cache(model, variant, len(ids))
    if path == "decode":
        yield from _steps(model, ids, cache)
    else:
        page, first = model.window.page_size, model.window.recent_tokens % model.window.page_size
        cuts = sorted({0, *range(first, len(ids), page), len(ids)})
        yield from _run(model, ids, cache, cuts)


def _steps(model: Model, ids: np.ndarray, cache: Cache) -> Iterator[np.ndarray]:
    """Token by token: where the device steps caches on pages, as the engine does it, with its CUDA graphs. They know no
    sliding window, and no pools that grow: the cache has room for all."""
    together = isinstance(cache.storage, TurningStorage) and not cache.spec.sliding
    group = model.group_tokens(1) if together else None
    if group is None:
        yield from _run(model, ids, cache, list(range(len(ids) + 1)))
        return
    yield from _run(model, ids[:1], cache, [0, 1])
    rows: list[np.ndarray] = []
    for token in ids[1:].tolist():
        group.launch([cache], [token], [None])
        (found,) = group.read()
        if not isinstance(found, np.ndarray):
            raise found if isinstance(found, KvcoreError) else AssertionError(found)
        rows.append(found.copy())
        if len(rows) == CHUNK // 4:
            yield np.concatenate(rows)
            rows.clear()
    if rows:
        yield np.concatenate(rows)


def raw_logits(model: Model, ids: np.ndarray, path: str = "one-pass") -> np.ndarray:
    """float32 [T, vocab] of every position of ``ids`` [T] without quantization."""
    raw = np.empty((len(ids), model.config.vocab_size), np.float32)
    at = 0
    for piece in logits(model, ids, RAW, path):
        raw[at : at + len(piece)] = piece
        at += len(piece)
    return raw


def score(model: Model, ids: np.ndarray, raw: np.ndarray, variant: Variant, path: str = "one-pass") -> Positions:
    """``variant`` beside ``raw``, the `raw_logits` of the same ids and path."""
    following = np.append(ids[1:], -1)
    parts, at = [], 0
    for piece in logits(model, ids, variant, path):
        run = slice(at, at + len(piece))
        parts.append(compare(raw[run], piece, following[run]))
        at = run.stop
    return Positions.joined(parts)


def noise_floor(model: Model, ids: np.ndarray, raw: np.ndarray, path: str = "one-pass") -> Positions:
    """The raw model beside itself, computed the other way: one pass by graph operations against the real cache.

    On a backend with fused kernels that is what they cost by themselves; elsewhere it is rounding.
    """
    return score(model, ids, raw, RAW, "pages" if path == "one-pass" else "one-pass")


def _run(model: Model, ids: np.ndarray, cache: Cache, cuts: list[int]) -> Iterator[np.ndarray]:
    for start, stop in pairwise(cuts):
        yield model.forward(ids[None, start:stop], cache, all_logits=True)[0]
        model.backend.ops.evaluate(*cache.arrays())


def _even(tokens: int, group: int) -> list[int]:
    """Chunks of whole groups."""
    step = max(1, CHUNK // group) * group
    return [*range(0, tokens, step), tokens]


def _real_cache(model: Model, variant: Variant, tokens: int) -> Cache:
    """An empty cache of the mode for so many tokens, handed over already: every scored position is a decode step."""
    mode = MODES.get(variant.name)
    if mode is None or (mode.quantized and variant.rows != RawRows.of(model.window)):
        raise InputError(
            f"{variant.key} is no mode of a cache with this window: score it in one pass (--path one-pass)"
        )
    cache = model.new_cache(mode, capacity=tokens)
    cache.begin_decode()
    return cache
