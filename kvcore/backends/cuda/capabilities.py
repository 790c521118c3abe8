"""What the CUDA kernels take, as declarations: importable without torch, and the same on every machine.

Both kernels work on one cache in pages, so they have the same constraints: where one serves a cache, the other does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore.registry import Kernel, KernelQuery, needs, needs_between, needs_multiple, needs_nvidia

MAX_SINKS = 16  # the attention kernel's first raw tile
MAX_HEAD_DIM = 256
MAX_GROUP = 16

_CONSTRAINTS = (
    needs("dtype", "float16", "bfloat16"),
    needs("k_codec", "raw", "int8", "turbo4"),
    needs("v_codec", "raw", "int8", "turbo4", "turbo3"),
    needs_multiple("head_dim", 16, MAX_HEAD_DIM),
    needs_multiple("head_dim", 64, MAX_HEAD_DIM, only=("v_codec", "turbo3")),
    needs_between("gqa_ratio", 1, MAX_GROUP),
    needs("page_size", 128),
    needs_between("sink_tokens", 0, MAX_SINKS),
    needs("boundary_layers", 0),
    needs_nvidia(80),
)


def _equal_widths(query: KernelQuery) -> list[str]:
    if query.v_head_dim in (None, query.head_dim):
        return []
    return [f"v_head_dim {query.v_head_dim}: needs that of K, {query.head_dim}"]


def _load_attend() -> Callable[..., Any]:
    from kvcore.backends.cuda.attention import attend_rows

    return attend_rows


def _load_fold() -> Callable[..., Any]:
    from kvcore.backends.cuda.kernels.fold import Fold

    return Fold.create


def _kernel(name: str, op: str, load: Callable[[], Callable[..., Any]]) -> Kernel:
    return Kernel(
        name,
        op,
        "cuda",
        "fused",
        load,
        _CONSTRAINTS,
        requires=("triton",),
        extra=_equal_widths,
        extra_words="v_head_dim that of K",
        storage="paged",
    )


# Raw rows need no encoding; in fp16 mode fold-pages stands for that, and is never launched.
KERNELS = (_kernel("fold-pages", "encode", _load_fold), _kernel("attend-pages", "attend", _load_attend))
