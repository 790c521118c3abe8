"""Figures from logits: against the formulas in float64, and where digits would cancel."""

from __future__ import annotations

import numpy as np
import pytest
from llamas import divergence, log_softmax

from kvcore.eval.metrics import Positions, by_position, compare, summarize


def logits(seed: int, shift: float = 0.0, rows: int = 150, vocab: int = 300) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    raw = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    return raw, (raw + shift * rng.standard_normal(raw.shape)).astype(np.float32)


@pytest.mark.parametrize("shift", [0.0, 1e-3, 0.1, 3.0, 60.0])
def test_positions_are_the_formulas(shift: float) -> None:
    raw, other = logits(0, shift)
    following = np.arange(len(raw)) % 300
    following[-1] = -1
    got = compare(raw, other, following)
    np.testing.assert_allclose(got.kl, divergence(raw, other), rtol=1e-6, atol=1e-13)
    rows = np.arange(len(raw) - 1)
    for name, scores in (("nll_raw", raw), ("nll", other)):
        values = getattr(got, name)
        np.testing.assert_allclose(values[:-1], -log_softmax(scores)[rows, following[:-1]], rtol=1e-9, atol=1e-9)
        assert np.isnan(values[-1])
    np.testing.assert_array_equal(got.same == 1, raw.argmax(-1) == other.argmax(-1))


def test_a_tiny_divergence_keeps_its_digits() -> None:
    raw, _ = logits(1)
    step = np.float32(2**-14)
    other = raw.copy()
    other[:, 0] += step
    p = np.exp(log_softmax(raw))[:, 0]
    d = other[:, 0].astype(np.float64) - raw[:, 0]
    want = np.log1p(p * np.expm1(d)) - p * d
    np.testing.assert_allclose(compare(raw, other, np.full(len(raw), -1)).kl, want, rtol=1e-5, atol=1e-18)


def test_a_constant_added_to_all_logits_changes_nothing() -> None:
    raw, other = logits(2, 0.1)
    following = np.zeros(len(raw), int)
    a, b = compare(raw, other, following), compare(raw, other + np.float32(2), following)
    np.testing.assert_allclose(a.kl, b.kl, rtol=1e-3, atol=1e-9)


def test_the_summary_by_hand() -> None:
    raw, other = logits(3, 0.5)
    following = np.arange(len(raw)) % 300
    windows = [compare(raw, other, following), compare(other, raw, following)]
    every = Positions.joined(windows)
    got = summarize(windows)
    assert got["kl"] == pytest.approx(every.kl.mean())
    assert got["kl_p99"] == pytest.approx(np.quantile(every.kl, 0.99))
    assert got["top1"] == pytest.approx(every.same.mean())
    assert got["ppl_ratio"] == pytest.approx(got["ppl"] / got["ppl_raw"])
    assert got["rms_dp"] == pytest.approx(np.sqrt(np.mean((np.exp(-every.nll) - np.exp(-every.nll_raw)) ** 2)))
    assert got["positions"] == 300
    for name in ("kl", "top1", "ppl_ratio"):
        assert got[f"{name}_low"] < got[name] < got[f"{name}_high"]


def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        kl = rng.exponential(1.0, 960)
        got = summarize([Positions(kl, kl * 0 + 1, kl, kl)])
        held += got["kl_low"] <= 1.0 <= got["kl_high"]
    assert 85 <= held <= 100


def test_what_is_equal_has_no_distance() -> None:
    raw, _ = logits(4)
    got = summarize([compare(raw, raw, np.zeros(len(raw), int))])
    assert (got["kl"], got["kl_p99"], got["top1"], got["ppl_ratio"], got["rms_dp"]) == (0, 0, 1, 1, 0)


def test_positions_survive_an_array() -> None:
    raw, other = logits(5, 0.1)
    positions = compare(raw, other, np.zeros(len(raw), int))
    again = Positions.from_array(positions.to_array())
    for name in Positions.__slots__:
        np.testing.assert_array_equal(getattr(positions, name), getattr(again, name))


def test_the_curve_over_positions() -> None:
    kl = np.repeat([1.0, 2.0, 3.0], 64)
    ((starts, means),) = by_position({"x": [Positions(kl, kl, kl, kl)] * 2}).values()
    np.testing.assert_array_equal(starts, [0, 64, 128])
    np.testing.assert_allclose(means, [1, 2, 3])
