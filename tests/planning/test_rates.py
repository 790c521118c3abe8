"""Lengths, rates from files, from measured times and from shapes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from kvcore.advise import SHAPES, Plan, kv_bytes
from kvcore.errors import InputError
from kvcore.modes import MODES
from kvcore.planning import Rates, Sample, fit, floor_rates, parse_lengths, read_rates

RATES = Rates(0.002, 5e-5, 1e-9, 0.01, 2e-4, 1e-7)


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [("512", 512, 512, 512), ("1k,2k", 1024, 2048, 1536), ("10-20", 10, 20, 15), ("normal:100:10", 1, 200, 100)],
)
def test_lengths_are_drawn_as_they_are_said(text: str, low: int, high: int, mean: float) -> None:
    lengths = parse_lengths("--x", text)
    drawn = lengths.draw(np.random.default_rng(0), 4000)
    assert low <= drawn.min() <= drawn.max() <= high
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert lengths.mean == mean


@pytest.mark.parametrize(
    "text", ["", "0", "a", "5-3", "1,,2", "1-2-3", "normal:5", "normal:0:1", "-5", "1.5.2", "9" * 30]
)
def test_other_lengths_are_refused_with_the_forms(text: str) -> None:
    with pytest.raises(InputError, match=r"--prompt-lengths .*: give a number such as 512"):
        parse_lengths("--prompt-lengths", text)


def test_noise_that_leaves_a_step_no_time_of_its_own_is_fitted_without_contexts() -> None:
    decode = [(1, 10, 0.01), (2, 20, 0.05), (3, 80, 0.6)]
    samples = [Sample("prefill", 10, 0, 1.0), *(Sample("decode", *each) for each in decode)]
    rates = fit(samples)
    assert rates.step + rates.sequence > 0
    assert rates.context_token == 0


def test_a_fit_finds_the_rates_behind_measured_times() -> None:
    rng = np.random.default_rng(0)
    samples = [Sample("prefill", n, 0, RATES.prefill(n, 256), -(-n // 256)) for n in (64, 200, 700, 1500, 4000)]
    samples += [Sample("decode", b, b * c, RATES.decode(b, b * c)) for b in (1, 2, 4, 8) for c in (100, 1000, 4000)]
    noisy = [replace(s, seconds=s.seconds * (1 + 0.001 * rng.standard_normal())) for s in samples]
    found = fit(noisy)
    for sample in samples:
        got = (
            found.prefill(sample.count, 256) if sample.kind == "prefill" else found.decode(sample.count, sample.context)
        )
        assert got == pytest.approx(sample.seconds, rel=0.01)


def test_no_fitted_rate_is_negative() -> None:
    samples = [Sample("prefill", n, 0, 0.001 * n) for n in (1, 10, 100)]
    samples += [Sample("decode", 1, 1000, 0.02), Sample("decode", 1, 4000, 0.01), Sample("decode", 2, 8000, 0.02)]
    assert min(asdict(fit(samples)).values()) == 0


def test_a_fit_needs_both_kinds() -> None:
    with pytest.raises(InputError, match="both prefill and decode"):
        fit([Sample("prefill", 10, 0, 1.0)])


def test_rates_come_back_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"machine": "x", "modes": {"turbo4": asdict(RATES)}}))
    assert read_rates(str(path)) == {"turbo4": RATES}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("{}", 'has no "modes"'),
        ('{"modes": {"turbo5": {}}}', "turbo5"),
        ('{"modes": {"int8": {"step": 1}}}', "int8: must have exactly chunk, prompt_token"),
        (json.dumps({"modes": {"int8": asdict(RATES) | {"step": -1}}}), "int8: rate step -1: must be a number"),
        (json.dumps({"modes": {"int8": asdict(RATES) | {"step": "1"}}}), "int8: rate step '1': must be a number"),
        (json.dumps({"modes": {"int8": dict.fromkeys(asdict(RATES), 0)}}), "int8: rates of no time at all"),
    ],
)
def test_a_file_that_holds_no_rates_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        read_rates(str(path))
    assert message in str(caught.value)


def test_floors_are_the_bytes_of_a_step_over_the_bandwidth() -> None:
    plan = Plan(SHAPES["llama-3.1-8b"], 8192, 4.5, 4.4e12)
    for mode in MODES.values():
        rates = floor_rates(plan, mode, ranks=1, flops=4e14, link_seconds=0.0)
        whole = (plan.streamed_bytes + kv_bytes(plan, mode, 65536 + 1152)) / plan.bandwidth
        assert rates.decode(1, 65536 + 1152) == pytest.approx(whole, rel=1e-3)
    fp16 = floor_rates(plan, MODES["fp16"], ranks=1, flops=4e14, link_seconds=0.0)
    assert fp16.prompt_token == pytest.approx(2 * plan.shape.streamed_weights / 4e14)


def test_ranks_share_weights_and_heads_and_pay_for_their_sums() -> None:
    plan = Plan(SHAPES["llama-3.1-8b"], 8192, 4.5, 4.4e12)
    one, four, sixteen = (floor_rates(plan, MODES["int8"], ranks=n, flops=4e14, link_seconds=1e-5) for n in (1, 4, 16))
    assert four.step == pytest.approx(one.step / 4 + 2 * 32 * 1e-5)
    assert four.context_token == pytest.approx(one.context_token / 4)
    assert sixteen.context_token == pytest.approx(one.context_token / 8)  # 8 KV heads: each is held twice
