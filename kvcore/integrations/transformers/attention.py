"""The attention function and the mask function that transformers calls by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcore.errors import UnsupportedError
from kvcore.integrations.transformers.library import (
    AttentionInterface,
    AttentionMaskInterface,
    sdpa_attention_forward,
    sdpa_mask,
)

if TYPE_CHECKING:
    from kvcore.integrations.transformers.cache import KVLayer

NAME = "kvcore"
_STEP, _PLAIN = "_kvcore_step", "_kvcore_plain"  # attributes of the tensors that transformers hands on
_REFUSED = {  # arguments of attention that change its result, and what they are
    "softcap": "soft-capped attention logits",
    "s_aux": "learned attention sinks",
    "position_bias": "a position bias",
}


@dataclass(slots=True)
class Step:
    """One layer's new rows between the cache's update and attention; k and v go when they are stored."""

    layer: KVLayer
    k: Tensor | None
    v: Tensor | None


def register() -> None:
    """Make "kvcore" an attention implementation of transformers. Done when the integration is imported."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def tag(keys: Tensor, step: Step) -> Tensor:
    """``keys`` as another tensor object, by which `attend` finds the step."""
    tagged = keys.view_as(keys)  # the step holds ``keys``: a tag on them would be a cycle
    setattr(tagged, _STEP, step)
    return tagged


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention over a `KVCache`; what has no such cache goes to transformers' own sdpa.

    ``query`` [B, Hq, n, D] -> [B, n, Hq, D_v]. ``key`` and ``value`` are the new rows only. UnsupportedError for what
    kvcore's attention does not have: soft-capping, learned sinks, a bias, bidirectional attention.
    """
    step: Step | None = getattr(key, _STEP, None)
    _refuse(module, kwargs)
    if step is None:
        out: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    _check_causal(module, kwargs)
    plain = attention_mask is None or getattr(attention_mask, _PLAIN, False)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    attended = step.layer.attend(step, query, scale, None if plain else _checked(attention_mask))
    return attended.transpose(1, 2).contiguous(), None


def make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' boolean mask, marked where it says no more than "causal" or "causal within the window": a kernel
    needs no mask for that. Padding in any sequence makes it a mask of its own."""
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    if mask is not None and not args and _is_plain(**kwargs):
        setattr(mask, _PLAIN, True)
    return mask


def _is_plain(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **_: Any,
) -> bool:
    """Whether the newest rows' queries see all that is before them, or the model's sliding window of it.

    ``allow_is_causal_skip`` is off wherever a pattern of another kind was laid over the mask.
    """
    if not allow_is_causal_skip or isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        return False
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        return False  # chunks, which have a size too
    return attention_mask is None or bool(attention_mask[:, kv_offset : kv_offset + kv_length].all())


def _checked(mask: Tensor | None) -> Tensor:
    assert mask is not None
    if mask.dtype != torch.bool or mask.ndim != 4:
        raise UnsupportedError(
            f"attention mask of {mask.dtype} with {mask.ndim} dimensions: kvcore takes a padding mask [B, T] or a "
            "boolean one [B, 1, n, T]"
        )
    return mask


def _refuse(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"{type(module).__name__} has {what}, which kvcore's attention lacks: "
                "use transformers' own cache and attn_implementation='eager' for this model"
            )


def _check_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    causal = kwargs.get("is_causal")
    if causal is False or (causal is None and not getattr(module, "is_causal", True)):
        raise UnsupportedError(f"{type(module).__name__} is not causal: use transformers' own cache for it")
    if kwargs.get("dropout") and module.training:
        raise UnsupportedError("attention dropout with a KVCache: call model.eval() first")
