"""A request in a batch is the request alone."""

from __future__ import annotations

import numpy as np
import pytest
from driving import Heard, alone, finish, ids, new_engine, request, submit

import kvcore
from kvcore.modes import MODES

each_mode = pytest.mark.parametrize("mode", MODES)


@each_mode
def test_text_is_the_same_alone_and_in_a_batch_with_random_joins_and_leaves(model: kvcore.Model, mode: str) -> None:
    """Every text in full, in float32 on the reference: prompts of 3 to 150 tokens in chunks of 48, pages of 32."""
    rng = np.random.default_rng(1)
    requests = [
        request(f"r{i}", ids(int(rng.integers(3, 150)), i), int(rng.integers(1, 60)), mode=mode) for i in range(12)
    ]
    engine = new_engine(model, prefill_step=48, max_batch=8, prefix_reuse=False)
    heard: list[Heard] = []
    for each in requests:
        heard += submit(engine, each)
        for _ in range(int(rng.integers(0, 8))):
            engine.step()
    finish(engine, heard)
    for each, got in zip(requests, heard, strict=True):
        want = alone(model, each, prefill_step=48, prefix_reuse=False)
        assert got.text == want.text
        assert (got.reason, got.last.usage) == ("length", want.last.usage)
        assert got.last.usage.completion_tokens == each.params.max_tokens
    assert engine.stats().running == engine.stats().waiting == 0
