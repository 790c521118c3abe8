"""The gate: fidelity of each codec on the real model, held to what was measured; and controls that show it can fail.

A short text and a small window, so that most rows are coded: 320 tokens, sinks 4, pages and tail of 32. KL is over
positions from 64 on. The attention error needs one pass for all codecs and hardly varies, so its bound is tight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import kvcore
from kvcore.cache import LayerCache
from kvcore.eval.codecs import RoundTrip, RowCodec, Variant, product_codec, product_variant
from kvcore.eval.metrics import compare
from kvcore.eval.probes import attention
from kvcore.eval.rows import RawRows
from kvcore.eval.score import raw_logits, score
from kvcore.eval.text import Text
from kvcore.eval.trials import centred
from kvcore.layout import TURBO4, Codebook, KVView, Rotation, WindowPolicy
from kvcore.modes import MODES, turbo
from kvcore.ops import Array, Ops

pytestmark = [pytest.mark.smollm2, pytest.mark.xdist_group("smollm2")]

TOKENS = 320
GIVEN = 192  # tokens whose q, K and V the attention error is for
WINDOW = WindowPolicy(sink_tokens=4, recent_tokens=32, page_size=32)
ROWS = RawRows.of(WINDOW)
SINCE = 64
REGRESSION, ATTENTION_REGRESSION = 1.2, 1.05
# Measured with float32 on torch's CPU device; a change that moves one on purpose says so here.
KL = {"int8": 3.14e-5, "int8-turbo4": 3.02e-4, "turbo4-asym": 2.94e-4, "turbo3-asym": 1.23e-3, "turbo4": 1.59e-3}
ATTENTION = {"int8": 0.01867, "int8-turbo4": 0.0783, "turbo4-asym": 0.0756, "turbo3-asym": 0.1468, "turbo4": 0.1400}
TRIMMED_KL = 5.17e-4  # of turbo4-asym over a text of which 50 tokens were taken back and run again
SLOW = ("int8-turbo4", "turbo4-asym")  # their codecs are in the others


@pytest.fixture(scope="module")
def ids(sample_ids: np.ndarray) -> np.ndarray:
    return sample_ids[:TOKENS]


@pytest.fixture(scope="module")
def raw(smollm2: kvcore.Model, ids: np.ndarray) -> np.ndarray:
    return raw_logits(smollm2, ids)


def kl_of(model: kvcore.Model, ids: np.ndarray, raw: np.ndarray, variant: Variant) -> float:
    return float(score(model, ids, raw, variant).since(SINCE).kl.mean())


@pytest.mark.parametrize("mode", [pytest.param(m, marks=pytest.mark.full if m in SLOW else ()) for m in KL])
def test_kl_has_not_regressed(smollm2: kvcore.Model, ids: np.ndarray, raw: np.ndarray, mode: str) -> None:
    assert 0 < kl_of(smollm2, ids, raw, product_variant(MODES[mode], ROWS)) <= REGRESSION * KL[mode]


@pytest.fixture(scope="module")
def errors(smollm2: kvcore.Model, ids: np.ndarray) -> dict[str, float]:
    """Attention error by variant, of the modes and of the controls, in one pass."""
    raw, uniform, plain = product_codec("raw"), uniform_turbo4(), product_codec("turbo4")
    chosen = [product_variant(MODES[mode], ROWS) for mode in ATTENTION]
    chosen += [
        Variant("int8 floored", floored_int8(), floored_int8(), ROWS),
        variant_of("turbo4 unrotated", unrotated_turbo4()),
        variant_of("turbo4 uniform", uniform),
        variant_of("turbo4 again", rebuilt_turbo4()),
        Variant("turbo4 off centre", plain, plain, ROWS),
        Variant("turbo4-asym uniform", raw, uniform, ROWS),
    ]
    rows = attention(smollm2, Text("gate", "", ids, (0,), GIVEN), chosen)
    return {row["variant"]: row["attention_error"] for row in rows}


@pytest.mark.parametrize("mode", ATTENTION)
def test_attention_has_not_regressed(errors: dict[str, float], mode: str) -> None:
    """Errors are roots of squared errors: 20% more of those is 9.5% more here."""
    assert errors[mode] <= ATTENTION_REGRESSION * ATTENTION[mode]


# Controls: what is broken must not pass


def floored_int8() -> RowCodec:
    """int8 whose scale is at least 1: rows are rounded to whole numbers."""

    def trip(ops: Ops, rows: Array, rotation: Rotation | None) -> Array:
        x = ops.astype(rows, "float32")
        scale = ops.maximum(ops.max(ops.abs(x), axis=-1, keepdims=True) / 127.0, 1.0)
        return ops.round(x / scale) * scale

    return broken("int8", trip)


def unrotated_turbo4() -> RowCodec:
    return broken("turbo4", lambda ops, rows, rotation: book_trip(ops, rows, None, TURBO4))


def variant_of(name: str, turbo4: RowCodec) -> Variant:
    """Mode turbo4 of that codec: K centred by page."""
    return Variant(name, centred(turbo4, WINDOW.page_size), turbo4, ROWS)


def uniform_turbo4() -> RowCodec:
    """Evenly spaced levels, the best ones: about 21% more squared error than turbo4's."""
    step = 0.3352 * TURBO4.spread
    book = replace(TURBO4, levels=tuple((i - 7.5) * step for i in range(16)))
    return broken("turbo4", lambda ops, rows, rotation: book_trip(ops, rows, rotation, book))


def broken(name: str, trip: Callable[[Ops, Array, Rotation | None], Array]) -> RowCodec:
    def bind(ops: Ops, layer: int, part: str, head_dim: int) -> RoundTrip:
        rotation = Rotation.create(ops, layer, part, head_dim)
        return lambda rows: trip(ops, rows, rotation)

    return replace(product_codec(name), bind=bind)


def book_trip(ops: Ops, rows: Array, rotation: Rotation | None, book: Codebook) -> Array:
    x = ops.astype(rows, "float32")
    norm = ops.sqrt(ops.sum(x * x, axis=-1, keepdims=True))
    z = x if rotation is None else rotation.apply(ops, x)
    z = z * (book.spread * int(rows.shape[-1]) ** 0.5 / norm)
    values = ops.take(ops.asarray(book.as_array()), turbo.quantize(ops, z, book), 0)
    decoded = values * (norm / ops.sqrt(ops.sum(values * values, axis=-1, keepdims=True)))
    return decoded if rotation is None else rotation.undo(ops, decoded)


def rebuilt_turbo4() -> RowCodec:
    return broken("turbo4", lambda ops, rows, rotation: book_trip(ops, rows, rotation, TURBO4))


def test_the_controls_begin_from_the_codec(errors: dict[str, float]) -> None:
    """Unbroken, the codec of the controls is turbo4."""
    assert errors["turbo4 again"] == pytest.approx(errors["turbo4"], rel=0.01)


BROKEN = ("int8 floored", "turbo4 unrotated", "turbo4 uniform", "turbo4 off centre", "turbo4-asym uniform")


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_codec_fails_the_gate_of_attention(errors: dict[str, float], broken: str) -> None:
    assert errors[broken] > ATTENTION_REGRESSION * ATTENTION[broken.partition(" ")[0]]


@pytest.mark.full
@pytest.mark.parametrize(("mode", "make"), [("int8", floored_int8), ("turbo4", unrotated_turbo4)])
def test_a_broken_codec_fails_the_gate_of_kl(
    smollm2: kvcore.Model, ids: np.ndarray, raw: np.ndarray, mode: str, make: Callable[[], RowCodec]
) -> None:
    broken = Variant(mode, make(), make(), ROWS) if mode == "int8" else variant_of(mode, make())
    assert kl_of(smollm2, ids, raw, broken) > 2 * REGRESSION * KL[mode]


def test_keys_off_their_centre_fail_the_gate_of_kl(smollm2: kvcore.Model, ids: np.ndarray, raw: np.ndarray) -> None:
    plain = product_codec("turbo4")
    assert kl_of(smollm2, ids, raw, Variant("turbo4", plain, plain, ROWS)) > REGRESSION * KL["turbo4"]


def trimmed(model: kvcore.Model, ids: np.ndarray, mode: str) -> Iterator[np.ndarray]:
    """Logits through the real cache by pages; half way, 50 tokens are forgotten and run again."""
    cache = model.new_cache(mode)
    page, half = WINDOW.page_size, TOKENS // 2
    for start in range(0, half, page):
        model.forward(ids[None, start : start + page], cache)
    cache.trim(50)
    for start in range(half - 50, TOKENS, page):
        yield model.forward(ids[None, start : start + page], cache, all_logits=True)[0]


def test_sinks_dropped_after_a_trim_fail_the_gate(
    smollm2: kvcore.Model, ids: np.ndarray, raw: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(smollm2, window=WINDOW, kernels="graph")
    at = TOKENS // 2 - 50

    def kl() -> float:
        got = np.concatenate(list(trimmed(model, ids, "turbo4-asym")))
        return float(compare(raw[at:], got, np.full(TOKENS - at, -1)).kl.mean())

    assert kl() <= REGRESSION * TRIMMED_KL
    trim, view = LayerCache.trim, LayerCache.view
    forgetful: set[int] = set()

    def dropping(layer: LayerCache, count: int) -> None:
        trim(layer, count)
        if count:
            forgetful.add(id(layer))

    def without_sinks(layer: LayerCache) -> KVView:
        seen = view(layer)
        return replace(seen, sinks=0, sink_k=None, sink_v=None) if id(layer) in forgetful else seen

    monkeypatch.setattr(LayerCache, "trim", dropping)
    monkeypatch.setattr(LayerCache, "view", without_sinks)
    assert kl() > REGRESSION * TRIMMED_KL
