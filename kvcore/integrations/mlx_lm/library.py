"""mlx-lm as kvcore sees it: every name that comes from it, and every difference between its versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvcore.integrations.versions import require

LEAST, BELOW = "0.31.3", "0.33"
VERSION = require("mlx-lm", LEAST, BELOW, "mlx-lm")
ONE_STATE = VERSION >= (0, 32)  # from_state(state) with scalars in it; before: from_state(state, meta_state) of strings

import mlx_lm.models.cache as mlx_cache  # noqa: E402

__all__ = ["BELOW", "LEAST", "ONE_STATE", "VERSION", "mlx_cache", "pack_state", "register", "unpack_state"]


def register(cache: type) -> type:
    """Make mlx-lm's loader of saved caches know a class, which it looks up by name."""
    setattr(mlx_cache, cache.__name__, cache)
    return cache


def pack_state(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    """What a cache's ``state`` is: arrays alone where ``meta_state`` has the header, else both."""
    return (json.dumps(header), dict(arrays)) if ONE_STATE else dict(arrays)


def unpack_state(state: Any, meta_state: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and arrays. A saved cache without rows comes back without its arrays."""
    if not ONE_STATE:
        return json.loads(meta_state), dict(state or {})
    header, *arrays = state
    return json.loads(header), dict(arrays[0]) if arrays else {}
