"""kvcore: quantized KV caches for llama-family models, from one source on NVIDIA, Apple and NumPy.

    import kvcore
    model = kvcore.load(kv_cache_mode="turbo4")
    for piece in model.generate("Name three rivers.", kvcore.SamplingParams(max_tokens=64)):
        print(piece, end="", flush=True)

Names are imported on first use, so that `import kvcore` stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcore.version import __version__

if TYPE_CHECKING:
    from kvcore.cache import Cache, CacheStats
    from kvcore.errors import BackendError, CapacityError, InputError, KvcoreError, ModelError, UnsupportedError
    from kvcore.generate import Generation, GenerationStats
    from kvcore.layout import WindowPolicy
    from kvcore.loading import load
    from kvcore.modes import MODES, Mode
    from kvcore.registry import Decision, KernelQuery, Registry
    from kvcore.runtime import Model
    from kvcore.sampling import SamplingParams

_HOME = {
    "BackendError": "errors",
    "Cache": "cache",
    "CacheStats": "cache",
    "CapacityError": "errors",
    "Decision": "registry",
    "Generation": "generate",
    "GenerationStats": "generate",
    "InputError": "errors",
    "KernelQuery": "registry",
    "KvcoreError": "errors",
    "MODES": "modes",
    "Mode": "modes",
    "Model": "runtime",
    "ModelError": "errors",
    "Registry": "registry",
    "SamplingParams": "sampling",
    "UnsupportedError": "errors",
    "WindowPolicy": "layout",
    "load": "loading",
}

__all__ = [
    "MODES",
    "BackendError",
    "Cache",
    "CacheStats",
    "CapacityError",
    "Decision",
    "Generation",
    "GenerationStats",
    "InputError",
    "KernelQuery",
    "KvcoreError",
    "Mode",
    "Model",
    "ModelError",
    "Registry",
    "SamplingParams",
    "UnsupportedError",
    "WindowPolicy",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvcore' has no attribute '{name}'")
    value = getattr(import_module(f"kvcore.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
