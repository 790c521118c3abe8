"""Pages that many caches of one shape share: pools of a fixed size under a budget, and what their kernels need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.backends.cuda.attend import VRotation
from kvcore.backends.cuda.kernels.fold import Fold
from kvcore.backends.cuda.native import PAGE, NativeLayout
from kvcore.backends.cuda.pool import PagePool, bytes_per_page
from kvcore.errors import CapacityError
from kvcore.layout import CacheShape


@dataclass(frozen=True, slots=True, eq=False)
class PagePools:
    """A pool of raw pages, one of native pages where the mode quantizes, and what the layers of every cache share."""

    raw: PagePool
    native: PagePool | None
    fold: Fold | None
    rotations: tuple[VRotation | None, ...]

    @classmethod
    def create(
        cls,
        shape: CacheShape,
        device: str,
        make_fold: Callable[[NativeLayout, int, str], Fold],
        pages: tuple[int, int],
        *,
        fixed: bool = False,
    ) -> PagePools:
        """Pools of so many raw and native ``pages``. torch.OutOfMemoryError where there is no memory for them."""
        native, quantized = NativeLayout(shape.layout, shape.dtype), shape.layout.quantized
        sizes = shape.num_layers, shape.num_kv_heads
        return cls(
            raw=PagePool(native.raw_planes, *sizes, pages[0], device, "raw KV", fixed=fixed),
            native=PagePool(native.planes, *sizes, pages[1], device, fixed=fixed) if quantized else None,
            fold=make_fold(native, shape.num_layers, device) if quantized else None,
            rotations=tuple(
                VRotation.create(layer, shape.layout.v_dim, device) if shape.layout.v.codebook else None
                for layer in range(shape.num_layers)
            ),
        )

    def k_matrix(self, layer: int) -> Tensor | None:
        """R_K as `append` takes it."""
        matrices = None if self.fold is None else self.fold.k_matrix
        return None if matrices is None else matrices[layer]

    def all(self) -> tuple[PagePool, ...]:
        return (self.raw,) if self.native is None else (self.raw, self.native)

    def page_bytes(self) -> tuple[int, int]:
        """Of a raw and of a native page."""
        return self.raw.page_bytes, 0 if self.native is None else self.native.page_bytes

    def counts(self) -> tuple[tuple[str, int, int, int], ...]:
        """Name, free, used and shared pages of each pool."""
        return tuple(
            (pool.what, pool.free_pages, pool.pages - pool.free_pages, pool.shared_pages) for pool in self.all()
        )


def pools_in_budget(
    shape: CacheShape,
    device: str,
    make_fold: Callable[[NativeLayout, int, str], Fold],
    budget: int,
    *,
    raw_pages: int,
) -> PagePools:
    """Pools of a fixed size that take ``budget`` bytes together, as `split_budget` divides it.

    CapacityError where the budget holds no page, or the device no such budget.
    """
    pages = split_budget(shape, budget, raw_pages)
    try:
        return PagePools.create(shape, device, make_fold, pages, fixed=True)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"out of memory on {device}: there is no room for a KV budget of {budget} bytes; use a smaller one"
        ) from error


def split_budget(shape: CacheShape, budget: int, raw_pages: int) -> tuple[int, int]:
    """Raw and native pages in ``budget`` bytes. In a mode that quantizes ``raw_pages`` are raw, or as many as half of
    it holds, and the rest are native; a delegated mode, whose prompts are raw, gets that half.

    CapacityError where it holds no page.
    """
    native = NativeLayout(shape.layout, shape.dtype)
    raw_size, size = (
        bytes_per_page(planes, shape.num_layers, shape.num_kv_heads) for planes in (native.raw_planes, native.planes)
    )
    if not shape.layout.quantized:
        pages = budget // raw_size, 0
    else:
        half = budget // 2 // raw_size
        raw = half if shape.delegated else min(raw_pages, half)
        pages = raw, (budget - raw * raw_size) // size
    if pages[0] < 1 or (shape.layout.quantized and pages[1] < 1):
        raise CapacityError(
            f"a KV budget of {budget} bytes holds no page: a raw one takes {raw_size} bytes ({PAGE} tokens, "
            f"{shape.num_layers} layers); give the cache more memory"
        )
    return pages
