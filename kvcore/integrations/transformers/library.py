"""transformers as kvcore sees it: every name that comes from it, and every difference between its versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from kvcore.integrations.versions import require

LEAST, BELOW = "5.17", "6"
VERSION = require("transformers", LEAST, BELOW, "transformers")

from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache  # noqa: E402
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

__all__ = [
    "LEAST",
    "VERSION",
    "AttentionInterface",
    "AttentionMaskInterface",
    "Cache",
    "CacheLayerMixin",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "cache_argument",
    "layers_for",
    "llama_of",
    "random_llama",
    "rows_to_remove",
    "sdpa_attention_forward",
    "sdpa_mask",
    "stock_quantized_caches",
]


def cache_argument() -> str:
    """What ``generate`` and ``forward`` call the cache: ``cache`` from 5.24 on, before that ``past_key_values``.

    The old name goes on working there, with a warning.
    """
    return "cache" if VERSION >= (5, 24) else "past_key_values"


def rows_to_remove(crop: int | Tensor, tokens: int) -> int:
    """How many newest rows ``crop(n)`` removes: -n of them; before 5.24 a positive n is the length to keep."""
    crop = int(crop)  # assisted decoding counts in tensors
    if crop <= 0:
        return -crop
    if VERSION >= (5, 24):
        raise ValueError(f"crop({crop}): give the tokens to remove as a negative number")
    return max(0, tokens - crop)


def layers_for(config: Any) -> list[Any]:
    """The layers that transformers itself would make for a model."""
    return list(DynamicCache(config=config).layers)


def random_llama(
    *, layers: int, heads: tuple[int, int, int], vocab: int, positions: int, dtype: Any, device: str
) -> Any:
    """A seeded llama in evaluation mode, made where it runs. ``heads``: query heads, KV heads, head size; the MLP has
    3.5 times the hidden size, as llama-3.1-8b's."""
    hidden = heads[0] * heads[2]
    settings = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
    }
    return llama_of(settings, dtype, device)


def llama_of(settings: dict[str, Any], dtype: Any, device: str) -> Any:
    """A llama of these settings of its configuration with random weights, in evaluation mode."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**settings)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def stock_quantized_caches(config: Any) -> Iterator[tuple[str, Any, str]]:
    """transformers' own quantized caches: a name, and the cache, or None and why there is none here."""
    from transformers.cache_utils import QuantizedCache

    for backend, settings in (("quanto", {"nbits": 4}), ("hqq", {"nbits": 4}), ("fp8", {})):
        name = " ".join(["QuantizedCache", backend, *(f"{bits} bits" for bits in settings.values())])
        try:
            yield name, QuantizedCache(backend, config, **settings), ""
        except (ImportError, ValueError, TypeError) as error:
            yield name, None, str(error).split("\n")[0]
