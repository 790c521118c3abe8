"""Pages of keys and values, counted by reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from kvcore.backends.cuda.native import PAGE, NativePlane
from kvcore.errors import CapacityError, KvcoreError


class PagePool:
    """Pages of all layers. A page has one number in every plane and layer: ``planes[name]`` [layers, pages, Hkv, ...].

    What no sequence has written is uninitialised, and nothing reads it. ``what`` names the pages in errors. A ``fixed``
    pool has its share of a budget, and does not grow.
    """

    def __init__(
        self,
        planes: Iterable[NativePlane],
        layers: int,
        kv_heads: int,
        pages: int,
        device: str,
        what: str = "KV",
        *,
        fixed: bool = False,
    ) -> None:
        self._shapes = tuple(planes)
        self._layers, self._kv_heads, self._device = layers, kv_heads, device
        self.pages, self.what, self.fixed = pages, what, fixed
        self.page_bytes = bytes_per_page(self._shapes, layers, kv_heads)
        self.planes = self._allocate(pages)
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))
        self.users: WeakSet[Any] = WeakSet()  # storages that must learn of new planes

    def _allocate(self, pages: int) -> dict[str, Tensor]:
        return {
            plane.name: torch.empty(
                (self._layers, pages, self._kv_heads, *plane.shape),
                dtype=getattr(torch, plane.dtype),
                device=self._device,
            )
            for plane in self._shapes
        }

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        return (self.pages - self.free_pages) * self.page_bytes

    @property
    def allocated_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def shared_pages(self) -> int:
        """Pages with more than one reference."""
        return sum(count > 1 for count in self._references)

    def references(self, page: int) -> int:
        return self._references[page]

    def require(self, count: int) -> None:
        """CapacityError where fewer than ``count`` pages are free."""
        if count > self.free_pages:
            raise CapacityError(
                f"out of {self.what} pages: {count} needed, {self.free_pages} of {self.pages} free "
                f"({PAGE} tokens each); end or shorten a sequence, or give the cache more memory"
            )

    def grow(self, pages: int) -> None:
        """``pages`` in all, in new planes; numbers and contents stay. Old and new planes are there together meanwhile.

        Raises torch.OutOfMemoryError, and nothing has changed then.
        """
        if pages <= self.pages:
            return
        grown = self._allocate(pages)
        for name, plane in self.planes.items():
            grown[name][:, : self.pages].copy_(plane)
        self.planes = grown
        self._references += [0] * (pages - self.pages)
        self._free = [*range(pages - 1, self.pages - 1, -1), *self._free]
        self.pages = pages

    def alloc(self, count: int = 1) -> list[int]:
        """``count`` pages with one reference each, or KvcoreError and none."""
        self.require(count)
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page."""
        for page in pages:
            self._check_live(page)
            self._references[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Give back one reference to each page."""
        for page in pages:
            self._check_live(page)
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def writable(self, page: int) -> int:
        """Copy on write: ``page`` itself for its only owner, else a copy that takes the place of one reference."""
        self._check_live(page)
        if self._references[page] == 1:
            return page
        (copy,) = self.alloc()
        for plane in self.planes.values():
            plane[:, copy].copy_(plane[:, page])
        self.free([page])
        return copy

    def _check_live(self, page: int) -> None:
        if self._references[page] == 0:
            raise ValueError(f"{self.what} page {page} is free")


def bytes_per_page(planes: Iterable[NativePlane], layers: int, kv_heads: int) -> int:
    return layers * kv_heads * sum(plane.nbytes for plane in planes)


def pages_in_budget(planes: Sequence[NativePlane], layers: int, kv_heads: int, budget: int) -> int:
    """How many pages ``budget`` bytes hold. KvcoreError where that is none."""
    size = bytes_per_page(planes, layers, kv_heads)
    if budget < size:
        raise KvcoreError(
            f"a KV budget of {budget} bytes holds no page: one takes {size} bytes "
            f"({PAGE} tokens, {layers} layers); give the cache more memory"
        )
    return budget // size
