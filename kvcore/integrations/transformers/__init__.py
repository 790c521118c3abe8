"""kvcore inside transformers: a `Cache` of kvcore layers, and the attention function that reads it.

    from kvcore.integrations.transformers import KVCache

    model.set_attn_implementation("kvcore")
    model.generate(**inputs, past_key_values=KVCache(model.config, mode="turbo4"))

Importing this module registers the attention function and its mask under the name "kvcore".
"""

from __future__ import annotations

from kvcore.integrations.transformers.attention import NAME, register
from kvcore.integrations.transformers.cache import KVCache, KVLayer
from kvcore.integrations.transformers.library import LEAST, VERSION, cache_argument

register()

__all__ = ["LEAST", "NAME", "VERSION", "KVCache", "KVLayer", "cache_argument", "register"]
