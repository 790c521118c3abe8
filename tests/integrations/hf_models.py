"""Tiny random models of several families in transformers, and what is measured on them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from kvcore.integrations.transformers import KVCache, cache_argument
from kvcore.layout import WindowPolicy

SMALL = WindowPolicy(recent_tokens=32, page_size=32)
BASE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
SLIDING = 40
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


def tiny(family: str, attention: str = "kvcore") -> Any:
    """A seeded random model; qwen2 has biases on q, k and v, mistral slides everywhere, gemma3 in its first layer."""
    torch.manual_seed(0)
    t = transformers
    layers = ["sliding_attention", "full_attention"]
    config, model = {
        "llama": lambda: (t.LlamaConfig(**BASE), t.LlamaForCausalLM),
        "mistral": lambda: (t.MistralConfig(sliding_window=SLIDING, head_dim=32, **BASE), t.MistralForCausalLM),
        "qwen2": lambda: (t.Qwen2Config(**BASE), t.Qwen2ForCausalLM),
        "qwen3": lambda: (t.Qwen3Config(head_dim=64, **BASE), t.Qwen3ForCausalLM),
        "gemma3": lambda: (
            t.Gemma3TextConfig(sliding_window=SLIDING, head_dim=64, layer_types=layers, **BASE),
            t.Gemma3ForCausalLM,
        ),
    }[family]()
    made = model(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
            elif parameter.ndim == 2:
                parameter.mul_(3)  # transformers starts so near to zero that all logits are alike
    made.set_attn_implementation(attention)
    return made


def ids(batch: int = 1, length: int = 100, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: tuple[int, ...], width: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids [B, width] with left padding, and their mask."""
    tokens, mask = ids(len(lengths), width), torch.ones(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens[row, : width - length] = 0
        mask[row, : width - length] = 0
    return tokens, mask


def cache(model: Any, mode: str, **settings: Any) -> KVCache:
    return KVCache(model.config, mode, **{"window": SMALL, **settings})


def generate(model: Any, tokens: torch.Tensor, kv: KVCache | None = None, **settings: Any) -> torch.Tensor:
    """Greedy tokens, prompt included."""
    given = {} if kv is None else {cache_argument(): kv}
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **given, **settings}
    return model.generate(tokens, **settings)


def logits(model: Any, tokens: torch.Tensor, kv: Any, steps: tuple[int, ...]) -> torch.Tensor:
    """float32 [B, T, vocab], run in pieces of those lengths."""
    parts = torch.split(tokens, list(steps), dim=1)
    with torch.no_grad():
        return torch.cat([model(part, **{cache_argument(): kv, "use_cache": True}).logits for part in parts], 1)
