"""Sampling on the device draws what the host's sampler draws."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from triton_device import DEVICE

torch = pytest.importorskip("torch", reason="the package torch is not installed")

from kvcore.backends.cuda.kernels.pick import likeliest
from kvcore.backends.cuda.sample import MAX_BIASES, UNDECIDED, DeviceSampler, Draw, Mix, RowSettings, sample_rows
from kvcore.sampling import Sampler, SamplingParams

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 0.7},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 3.0, "top_k": 1500},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
]


def draw(settings: dict[str, Any]) -> Draw:
    return Draw(**settings)


def same_tokens(all_settings: list[dict[str, Any]], logits: np.ndarray, seen: list[list[int]], rounds: int) -> None:
    """Each round a token for every sequence, which both sides have seen from then on."""
    hosts = [Sampler(SamplingParams(seed=i, **settings)) for i, settings in enumerate(all_settings)]
    twins = [Sampler(SamplingParams(seed=i, **settings)) for i, settings in enumerate(all_settings)]
    device = DeviceSampler([draw(settings) for settings in all_settings], logits.shape[1], DEVICE, seen)
    on_device, seen = torch.from_numpy(logits).to(DEVICE), [list(ids) for ids in seen]
    for _ in range(rounds):
        uniform = torch.tensor([twin.uniform() for twin in twins], dtype=torch.float32, device=DEVICE)
        got = device(on_device, uniform).tolist()
        for row, (host, settings) in enumerate(zip(hosts, all_settings, strict=True)):
            want = host(logits[row], seen[row])
            if settings["temperature"] == 0:
                host.uniform()  # a greedy sequence draws on the device too, for nothing
            assert got[row] == want
            seen[row].append(want)


@pytest.mark.parametrize("settings", SETTINGS)
def test_one_sequence(settings: dict[str, Any]) -> None:
    logits = np.random.default_rng(0).standard_normal((1, 2000)).astype(np.float32) * 3
    same_tokens([settings], logits, [[5, 17, int(logits.argmax())]], 60)


def test_a_batch_where_each_has_its_own_settings() -> None:
    logits = np.random.default_rng(1).standard_normal((len(SETTINGS), 2000)).astype(np.float32) * 3
    same_tokens(SETTINGS, logits, [[i, i + 1] for i in range(len(SETTINGS))], 30)


@pytest.mark.parametrize(
    "settings", [{"temperature": 1.0}, {"temperature": 1.0, "top_k": 7}, {"temperature": 1.0, "top_p": 0.5}]
)
def test_the_largest_number_draws_a_candidate(settings: dict[str, Any]) -> None:
    """Rounding of the cumulative sum never leads to a token that was ruled out."""
    logits = np.full((1, 1000), -50.0, np.float32)
    logits[0, :10] = np.linspace(0, -2, 10)
    token = DeviceSampler([draw(settings)], 1000, DEVICE, [[]])(
        torch.from_numpy(logits).to(DEVICE), torch.tensor([1 - 2**-24], device=DEVICE)
    )
    assert token.item() < 10


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_no_token(bad: float) -> None:
    logits = torch.zeros(2, 50, device=DEVICE)
    logits[1, 3] = bad
    for settings in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 3}):
        tokens = DeviceSampler([draw(settings)] * 2, 50, DEVICE, [[], []])(logits, torch.full((2,), 0.5, device=DEVICE))
        assert tokens[0] >= 0
        assert tokens[1] == -1


def test_settings_have_the_host_s_names() -> None:
    assert set(asdict(Draw(0.0))) < set(asdict(SamplingParams()))


def test_the_likeliest_token_is_the_first_of_equals(device: str) -> None:
    """Rows longer and shorter than a block; a NaN or a positive infinity anywhere gives -1, a negative one is a ban."""
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((6, 5000)).astype(np.float32))
    logits[1, [4000, 17, 4999]] = 9.0
    logits[2, 3] = float("nan")
    logits[3, 4998] = float("inf")
    logits[4, :4999] = -float("inf")
    logits[5] = -float("inf")
    got = likeliest(logits.to(device)).cpu().tolist()
    assert got == [int(logits[0].argmax()), 17, -1, -1, 4999, -1]
    assert likeliest(logits[:2, :7].to(device)).cpu().tolist() == logits[:2, :7].argmax(-1).tolist()


ROWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 3.0, "top_k": 1000},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.9, "logit_bias": {3: 9.0, 5: -100.0}},
    {"logit_bias": {3: 50.0}},
]


def row_settings(all_settings: list[SamplingParams], uniform: list[float]) -> RowSettings:
    def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    biases = [[*p.biases, *[(0, 0.0)] * (MAX_BIASES - len(p.biases))] for p in all_settings]
    return RowSettings(
        uniform=column(uniform, torch.float64),
        top_k=column([p.top_k for p in all_settings], torch.int32),
        greedy=column([p.temperature == 0 for p in all_settings], torch.int32),
        ordered=column([p.top_k > 0 or p.top_p < 1 for p in all_settings], torch.int32),
        temperature=column([p.temperature or 1 for p in all_settings], torch.float32),
        top_p=column([p.top_p for p in all_settings], torch.float32),
        min_p=column([p.min_p for p in all_settings], torch.float32),
        bias_ids=column([[token for token, _ in row] for row in biases], torch.int32),
        biases=column([[bias for _, bias in row] for row in biases], torch.float32),
    )


@pytest.mark.parametrize("vocab", [2000, 2048])
def test_rows_of_any_mix_draw_the_host_s_tokens(vocab: int) -> None:
    """With ties, which float16 has many of."""
    logits = np.random.default_rng(2).standard_normal((len(ROWS), vocab)).astype(np.float32) * 3
    logits = np.round(logits * 8) / 8
    params = [SamplingParams(seed=i, **settings) for i, settings in enumerate(ROWS)]
    hosts, twins = [Sampler(p) for p in params], [Sampler(p) for p in params]
    for _ in range(30):
        uniform = [twin.uniform() if twin.params.temperature else 0.0 for twin in twins]
        given = torch.tensor(logits, device=DEVICE)  # a copy: biases are added to it
        got = sample_rows(given, row_settings(params, uniform), Mix(True, True, True))
        assert got.tolist() == [host(row, []) for host, row in zip(hosts, logits, strict=True)]


def test_more_candidates_than_are_put_in_order_are_left_to_the_host() -> None:
    logits = torch.linspace(0, -1e-3, 4096, device=DEVICE).repeat(3, 1)
    params = [
        SamplingParams(temperature=1.0, top_p=top_p, min_p=min_p) for top_p, min_p in ((0.5, 0), (0.2, 0), (1, 0))
    ]
    got = sample_rows(logits, row_settings(params, [0.5] * 3), Mix(random=True, ordered=True)).tolist()
    assert got == [UNDECIDED, 409, 2047]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_give_no_token(bad: float) -> None:
    logits = torch.zeros(2, 50, device=DEVICE)
    logits[1, 3] = bad
    params = [SamplingParams(temperature=1.0, top_k=3)] * 2
    for mix in (Mix(), Mix(random=True), Mix(True, True, True)):
        got = sample_rows(logits.clone(), row_settings(params, [0.5] * 2), mix).tolist()
        assert got[0] >= 0
        assert got[1] == -1


def test_a_number_that_is_asked_for_ahead_is_the_next_one() -> None:
    sampler, twin = (Sampler(SamplingParams(temperature=1.0, seed=3)) for _ in range(2))
    assert sampler.ahead() == sampler.ahead() == sampler.uniform() == twin.uniform()
    assert sampler.uniform() == twin.uniform()
