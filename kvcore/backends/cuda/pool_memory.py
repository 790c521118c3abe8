"""Pools that grow while a cache does: by how much, within which budget, and what is said where memory is short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvcore.backends.cuda.pool import PagePool
from kvcore.backends.cuda.pools import PagePools
from kvcore.backends.cuda.sequence import NEVER
from kvcore.errors import CapacityError
from kvcore.layout import CacheShape


def make_free(pool: PagePool | None, wanted: int, pools: PagePools, budget: int | None) -> None:
    """Make ``wanted`` pages free in one of ``pools``, and by half more than there were if that fits.

    CapacityError where a fixed pool or the budget has not as many, torch.OutOfMemoryError where the device has not.
    """
    if pool is None or wanted <= pool.free_pages:
        return
    if pool.fixed:
        pool.require(wanted)
    least = pool.pages + wanted - pool.free_pages
    most = _pages_within(budget, pool, pools, least)
    try:
        pool.grow(min(max(least, pool.pages * 3 // 2), most))
    except torch.OutOfMemoryError:
        pool.grow(least)
    for user in pool.users:
        user.bind()  # which lets go of the old planes


def _pages_within(budget: int | None, pool: PagePool, pools: PagePools, least: int) -> int:
    """How many pages the pool may have beside the others. CapacityError where these are fewer than ``least``."""
    if budget is None:
        return NEVER
    others = sum(each.allocated_bytes for each in pools.all() if each is not pool)
    most = (budget - others) // pool.page_bytes
    if least > most:
        raise CapacityError(
            f"{least} {pool.what} pages take {others + least * pool.page_bytes} bytes with the others, the budget "
            f"is {budget} bytes: give a larger --kv-cache-budget, a smaller cache mode or fewer tokens"
        )
    return most


@contextmanager
def or_say_why(shape: CacheShape, device: str, tokens: int) -> Iterator[None]:
    """A CUDA out-of-memory error as one line for the user."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        rows = shape.batch * shape.num_layers * shape.num_kv_heads * tokens
        wanted = rows * shape.layout.bytes_per_token(shape.dtype)
        raise CapacityError(
            f"out of memory on {device}: the pages of {tokens} tokens in mode {shape.name} take about "
            f"{wanted} bytes, and they grow by a copy; use a smaller cache mode or a shorter context"
        ) from error
