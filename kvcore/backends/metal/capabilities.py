"""What the Metal kernels take, as declarations: importable without MLX, and the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore.registry import Constraint, Kernel, KernelQuery, needs, needs_between

HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP = 16
MAX_ROWS = 16

_SHARED = (
    needs("dtype", "float16", "bfloat16", "float32"),
    needs("k_codec", "raw", "int8", "turbo4", "turbo3"),
    needs("v_codec", "raw", "int8", "turbo4", "turbo3"),
    needs("head_dim", *HEAD_DIMS),
    Constraint("arch", "an Apple GPU with Metal", lambda arch: arch.startswith("apple")),
)


def _equal_widths(query: KernelQuery) -> list[str]:
    if query.v_head_dim in (None, query.head_dim):
        return []
    return [f"v_head_dim {query.v_head_dim}: needs that of K, {query.head_dim}"]


def _load_encode() -> Callable[..., Any]:
    from kvcore.backends.metal.encode import encode_metal

    return encode_metal


def _load_attend() -> Callable[..., Any]:
    from kvcore.backends.metal.attention import attend_metal

    return attend_metal


KERNELS = (
    Kernel(
        *("encode-metal", "encode", "metal", "fused", _load_encode),
        _SHARED,
        requires=("mlx",),
        extra=_equal_widths,
        extra_words="v_head_dim that of K",
    ),
    Kernel(
        *("attend-metal", "attend", "metal", "fused", _load_attend),
        (*_SHARED, needs_between("gqa_ratio", 1, MAX_GROUP)),
        requires=("mlx",),
        extra=_equal_widths,
        extra_words="v_head_dim that of K",
        max_rows=MAX_ROWS,
    ),
)
