"""Making prompt caches, and putting kvcore's attention where a model of mlx-lm calls its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from kvcore.errors import InputError, UnsupportedError
from kvcore.integrations.mlx_lm.batch import KvcoreBatchCache
from kvcore.integrations.mlx_lm.cache import KvcoreCache, LayerSettings
from kvcore.integrations.mlx_lm.library import mlx_cache
from kvcore.layout import WindowPolicy
from kvcore.modes import Mode, resolve_mode

_ATTENTION = "scaled_dot_product_attention"
_patched: list[object] = []  # one entry for each `patched` block that is open


def make_prompt_cache(
    model: Any, mode: str | Mode = "turbo4", *, window: WindowPolicy | None = None, kernels: str = "auto"
) -> list[Any]:
    """A prompt cache in one of kvcore's modes: a list with one cache for each layer.

    A sliding layer, or one without keys and values, keeps mlx-lm's own cache. Raises InputError for an unknown mode and
    UnsupportedError where no layer is left for kvcore.
    """
    chosen = mode if isinstance(mode, Mode) else resolve_mode(mode)
    own = _own_caches(model)
    settings = (LayerSettings(chosen, i, len(own), window or WindowPolicy(), kernels) for i in range(len(own)))
    made = [
        KvcoreCache(each) if type(cache) is mlx_cache.KVCache else cache
        for cache, each in zip(own, settings, strict=True)
    ]
    if not any(isinstance(cache, KvcoreCache) for cache in made):
        kinds = ", ".join(sorted({type(cache).__name__ for cache in own}))
        raise UnsupportedError(f"no layer of this model has a plain KV cache (it has {kinds}): use mlx-lm's own")
    return made


@contextmanager
def patched(
    model: Any, mode: str | Mode | None = None, *, window: WindowPolicy | None = None, kernels: str = "auto"
) -> Iterator[None]:
    """Inside, the model's attention reads kvcore's caches; other caches work as before.

    With a ``mode``, caches that mlx-lm makes for this model are kvcore's too, so nothing else has to be passed: not to
    ``generate``, ``stream_generate``, ``batch_generate`` or the server. The model's own modules are changed, and put
    back at the end. UnsupportedError for a model that does not call mlx-lm's attention function.
    """
    modules = _attention_modules(model)
    before = {module: getattr(module, _ATTENTION) for module in modules}
    had = model.__dict__.get("make_cache")
    if mode is not None:
        make_prompt_cache(model, mode, window=window, kernels=kernels)  # whatever is wrong shows here
    token = object()
    _patched.append(token)
    try:
        for module, original in before.items():
            setattr(module, _ATTENTION, _dispatching(original))
        if mode is not None:
            model.make_cache = lambda: make_prompt_cache(model, mode, window=window, kernels=kernels)
        yield
    finally:
        _patched.remove(token)
        for module, original in before.items():
            setattr(module, _ATTENTION, original)
        if mode is not None:
            del model.__dict__["make_cache"]
            if had is not None:
                model.make_cache = had


def check_patched() -> None:
    """InputError outside of `patched`: there mlx-lm's attention would read the newest rows alone."""
    if not _patched:
        raise InputError(
            "a kvcore cache outside of kvcore.integrations.mlx_lm.patched: mlx-lm's own attention cannot read it; "
            "run the model inside `with patched(model):`"
        )


def _own_caches(model: Any) -> list[Any]:
    """The caches that mlx-lm itself makes for the model."""
    if hasattr(type(model), "make_cache"):
        return list(type(model).make_cache(model))
    return [mlx_cache.KVCache() for _ in model.layers]


def _attention_modules(model: Any) -> list[ModuleType]:
    """The Python modules of the model's parts that have mlx-lm's attention function as a global name."""
    names = {type(part).__module__ for part in model.modules()}
    found = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    modules = [module for module in found if _ATTENTION in vars(module) and module.__name__ != "mlx_lm.models.base"]
    if not modules:
        raise UnsupportedError(
            f"{type(model).__module__} does not call {_ATTENTION}: use mlx-lm's own cache for this model"
        )
    return modules


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    def scaled_dot_product_attention(
        queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None, **more: Any
    ) -> Any:
        if not isinstance(cache, (KvcoreCache, KvcoreBatchCache)):
            given = more if sinks is None else {**more, "sinks": sinks}
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **given)
        if sinks is not None or any(value is not None for value in more.values()):
            raise UnsupportedError("attention with learned sinks: kvcore's lacks them; use mlx-lm's own cache")
        return cache.attend(queries, scale, mask)

    return scaled_dot_product_attention
