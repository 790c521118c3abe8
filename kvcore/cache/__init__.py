"""The cache: how rows are stored and how long they live. Contiguous storage, for the graph path."""

from kvcore.cache.contiguous import Cache, CacheSpec, CacheStats
from kvcore.cache.layer import LayerCache, LayerKernels
from kvcore.cache.rows import RowBuffer

__all__ = ["Cache", "CacheSpec", "CacheStats", "LayerCache", "LayerKernels", "RowBuffer"]
