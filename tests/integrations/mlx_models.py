"""Tiny random models in mlx-lm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text, llama, qwen2, qwen3

from kvcore.layout import WindowPolicy

SMALL = WindowPolicy(recent_tokens=32, page_size=32)
BASE = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
}
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


def tiny(family: str = "llama") -> Any:
    """A seeded random model; qwen2 has biases on q, k and v, gemma3 slides in its first layer."""
    mx.random.seed(0)
    module, more = {
        "llama": (llama, {"head_dim": 64}),
        "qwen2": (qwen2, {}),
        "qwen3": (
            qwen3,
            {"head_dim": 64, "max_position_embeddings": 2048, "rope_theta": 1e4, "tie_word_embeddings": True},
        ),
        "gemma3": (gemma3_text, {"head_dim": 64, "sliding_window": 40, "sliding_window_pattern": 2}),
    }[family]
    model = module.Model(module.ModelArgs(model_type=family, **{**BASE, **more}))
    mx.eval(model.parameters())
    return model


def ids(length: int = 100, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 256, length).tolist()


def greedy(model: Any, prompt: list[int], count: int = 40, **settings: Any) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=count, **settings)
    return [int(token) for token, _ in steps]


def logits(model: Any, tokens: list[int], cache: list[Any]) -> np.ndarray:
    """float32 [T, vocab]."""
    return np.array(model(mx.array([tokens]), cache=cache)[0].astype(mx.float32))
