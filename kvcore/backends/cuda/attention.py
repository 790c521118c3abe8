"""Attention over pages: which of the two ways a step takes."""

from __future__ import annotations

from torch import Tensor

from kvcore.backends.cuda.attend import Pages, VRotation, attend_pages
from kvcore.backends.cuda.prefill import PrefillPlan, attend_prefill
from kvcore.layout import Layout

MAX_DECODE_ROWS = 16  # new rows of a step that `attend_pages` takes


def attend_rows(
    q: Tensor,
    q_rotated: Tensor,
    pages: Pages,
    layout: Layout,
    *,
    plan: PrefillPlan | None,
    query_rows: int,
    v_rotation: VRotation | None,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attention of the newest rows' queries [B, Hkv, n · group, D], in the form that `attend_pages` describes.

    One kernel over the pages for few rows; library kernels over gathered rows for many, where the step has a ``plan``.
    """
    if plan is not None:
        return attend_prefill(q, q_rotated, pages, layout, plan=plan, v_rotation=v_rotation, scale=scale, window=window)
    return attend_pages(
        q, q_rotated, pages, layout, query_rows=query_rows, v_rotation=v_rotation, scale=scale, window=window
    )
