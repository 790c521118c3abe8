"""kvcore inside mlx-lm: prompt caches of kvcore rows, and the attention that reads them.

    from kvcore.integrations.mlx_lm import patched

    with patched(model, mode="turbo4"):
        text = mlx_lm.generate(model, tokenizer, prompt)

Or with a cache of one's own: ``prompt_cache=make_prompt_cache(model, "turbo4")`` inside ``with patched(model)``.
"""

from __future__ import annotations

from kvcore.integrations.mlx_lm.batch import KvcoreBatchCache
from kvcore.integrations.mlx_lm.cache import KvcoreCache
from kvcore.integrations.mlx_lm.library import BELOW, LEAST, VERSION
from kvcore.integrations.mlx_lm.patch import make_prompt_cache, patched

__all__ = ["BELOW", "LEAST", "VERSION", "KvcoreBatchCache", "KvcoreCache", "make_prompt_cache", "patched"]
