"""What a mode stores, as data: planes, bytes, codebooks, rotations, windows. Modes and backends meet here."""

from kvcore.layout.codebook import TURBO3, TURBO4, Codebook
from kvcore.layout.planes import CENTRED_TURBO4, CODECS, Codec, Layout, Plane
from kvcore.layout.rotation import Rotation, hadamard_dct, rotation_signs
from kvcore.layout.storage import CacheShape, CacheStats
from kvcore.layout.view import KVView
from kvcore.layout.window import DEFAULT_KEEP, Cap, WindowPolicy, narrower, visible

__all__ = [
    "CENTRED_TURBO4",
    "CODECS",
    "DEFAULT_KEEP",
    "TURBO3",
    "TURBO4",
    "CacheShape",
    "CacheStats",
    "Cap",
    "Codebook",
    "Codec",
    "KVView",
    "Layout",
    "Plane",
    "Rotation",
    "WindowPolicy",
    "hadamard_dct",
    "narrower",
    "rotation_signs",
    "visible",
]
