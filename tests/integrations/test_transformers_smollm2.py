"""The real model in transformers with kvcore's cache: stock's tokens in fp16, kvcore's own in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

import transformers
from conftest import sure_steps

import kvcore
from kvcore.integrations.transformers import KVCache, cache_argument
from kvcore.modes import MODES

pytestmark = [pytest.mark.smollm2, pytest.mark.xdist_group("transformers-smollm2")]

NEW = 6
FAST = ("turbo4",)


@pytest.fixture(scope="module")
def model(hf_folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32).eval()


def run(model: Any, attention: str, kv: KVCache | None, tokens: Any, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens [B, NEW] and the logits that they were taken from [B, NEW, vocab]."""
    model.set_attn_implementation(attention)
    given = {} if kv is None else {cache_argument(): kv}
    out = model.generate(
        torch.as_tensor(tokens),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **given,
        **settings,
    )
    return out.sequences[:, -NEW:].numpy(), torch.stack(out.logits, 1).numpy()


def test_fp16_is_stock_alone_and_in_a_padded_batch_of_three(model: Any, prompts: list[list[int]]) -> None:
    prompts = prompts[:3]
    width = max(map(len, prompts))
    tokens = np.array([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.as_tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    want, scores = run(model, "sdpa", None, tokens, attention_mask=mask)
    got, _ = run(model, "kvcore", KVCache(model.config, "fp16"), tokens, attention_mask=mask)
    assert sum(map(sure_steps, scores)) > NEW, "hardly a step has a clear winner"
    for row, prompt in enumerate(prompts):
        alone, exact = run(model, "sdpa", None, [prompt])
        mine, _ = run(model, "kvcore", KVCache(model.config, "fp16"), [prompt])
        for tokens_of, reference, logits in ((mine[0], alone[0], exact[0]), (got[row], want[row], scores[row])):
            steps = sure_steps(logits)
            np.testing.assert_array_equal(tokens_of[:steps], reference[:steps])


@pytest.mark.parametrize(
    "mode", [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in MODES]
)
def test_each_mode_is_kvcores_own(mode: str, model: Any, native: kvcore.Model, prompts: list[list[int]]) -> None:
    """128 tokens of the prompt are folded when the second token is made."""
    kv = KVCache(model.config, mode)
    got, scores = run(model, "kvcore", kv, [prompts[0]])
    cache = native.new_cache(mode)
    text = native.generate(prompts[0], kvcore.SamplingParams(max_tokens=NEW), cache=cache)
    list(text)
    steps = min(sure_steps(scores[0]), len(text.token_ids))
    assert steps > 3
    np.testing.assert_array_equal(got[0, :steps], text.token_ids[:steps])
    assert kv.stats().rows_folded == cache.stats().rows_folded == (0 if mode == "fp16" else 128)
