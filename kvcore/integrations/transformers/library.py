"""transformers as kvcore sees it: every name that comes from it, and every difference between its versions."""

from __future__ import annotations

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
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "cache_argument",
    "layers_for",
    "rows_to_remove",
    "sdpa_attention_forward",
    "sdpa_mask",
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
