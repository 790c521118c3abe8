"""Attention over dense rows that also returns its log-sum-exp, so that results over parts of the keys can be merged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOWEST = -1e30  # the log-sum-exp over no key at all
PLAIN_LOGITS = 1 << 24  # float32 logits that `_plain_attention` holds at a time


@dataclass(frozen=True, slots=True)
class Band:
    """A sliding window: a query at position p sees keys at positions above p - ``window``, up to p.

    keys   int32 [B, Lk]: positions of the keys, relative to the end of their sequence
    first  position of the first query, likewise; the others follow it
    """

    keys: Tensor
    first: int
    window: int


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, band: Band | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ) v and the natural log of its normalizer.

    q [B, Hq, Lq, D], k and v [B, Hkv, Lk, D], one dtype. ``causal``: the last query sees all keys, the one before it
    all but one, and so on (Lk >= Lq). Returns out [B, Hq, Lq, D] in q's dtype, or in float32 where no flash kernel
    serves; and float32 [B, Hq, Lq], `LOWEST` for a query that sees nothing.
    """
    if band is None and flash_serves(q):
        # Its causal mask is aligned to the bottom right, as torch.nn.attention.bias.causal_lower_right relies on; fewer
        # KV heads than query heads are its own.
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = attend(q, k, v, 0.0, causal, return_debug_mask=False, scale=scale)
        return out, lse
    return _plain_attention(q, k, v, scale, causal, band)


def flash_serves(q: Tensor) -> bool:
    """Whether PyTorch's flash attention takes these queries; it needs sm_80."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) < (8, 0):
        return False
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, band: Band | None
) -> tuple[Tensor, Tensor]:
    """Matrix products in float32, one KV head and some queries at a time."""
    group, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    out = torch.empty(*q.shape[:3], v.shape[3], device=q.device)
    lse = torch.empty(q.shape[:3], device=q.device)
    key = torch.arange(-keys, 0, device=q.device)
    step = max(1, PLAIN_LOGITS // (group * keys))
    for b in range(q.shape[0]):
        at = key if band is None else band.keys[b]
        for h in range(k.shape[1]):
            heads = slice(h * group, (h + 1) * group)
            k_t, values = k[b, h].float().T, v[b, h].float()
            for begin in range(0, queries, step):
                rows = slice(begin, min(begin + step, queries))
                logits = (q[b, heads, rows].float() @ k_t).mul_(scale)  # [group, rows, keys]
                if causal or band is not None:
                    first = -queries if band is None else band.first
                    own = torch.arange(first + rows.start, first + rows.stop, device=q.device)[:, None]
                    hidden = at > own
                    if band is not None:
                        hidden |= at <= own - band.window
                    logits.masked_fill_(hidden, float("-inf"))
                total = logits.logsumexp(-1).clamp(min=LOWEST)
                lse[b, heads, rows] = total
                out[b, heads, rows] = logits.sub_(total[..., None]).exp_() @ values
    return out, lse
