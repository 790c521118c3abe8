"""The cache: how rows are stored and how long they live. Storage for the graph path is here, paged storage comes from a
backend."""

from kvcore.cache.cache import Cache, CacheRows, CacheSpec
from kvcore.cache.contiguous import ContiguousStorage
from kvcore.cache.group import CacheGroup, group_key
from kvcore.cache.layer import LayerCache, LayerKernels
from kvcore.cache.positions import Hole
from kvcore.cache.prefix import PrefixCounters, Prefixes
from kvcore.cache.rows import RowBuffer
from kvcore.cache.storage import CacheLayer, RowStorage, StepCache, Storage
from kvcore.layout import CacheStats

__all__ = [
    "Cache",
    "CacheGroup",
    "CacheLayer",
    "CacheRows",
    "CacheSpec",
    "CacheStats",
    "ContiguousStorage",
    "Hole",
    "LayerCache",
    "LayerKernels",
    "PrefixCounters",
    "Prefixes",
    "RowBuffer",
    "RowStorage",
    "StepCache",
    "Storage",
    "group_key",
]
