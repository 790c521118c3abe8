"""Run by each rank, or alone: tokens that are sampled on the device, over pages, in Triton's interpreter.

device_steps.py MODEL RANKS; rank 0 prints them as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kvcore
import kvcore.loading
import kvcore.parallel.join  # a module, whose name in the package is a function
import kvcore.runtime
from kvcore.backends import Backend, load_backend
from kvcore.backends.cuda.device import make_decoder
from kvcore.backends.cuda.paged import PagedStorage
from kvcore.cache import Cache, CacheSpec

PROMPT = [7, 11, 13, 17, 19, 23, 29, 31]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "top_k": 20, "seed": 5},
    "penalized": {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.4},
}


def on_cpu(name: str, device: str | None = None) -> Backend:
    """The backend of an NVIDIA GPU as far as its decoder goes."""
    return replace(load_backend("cuda", "cpu"), make_decoder=make_decoder)


def in_pages(backend: Backend, spec: CacheSpec, **_: Any) -> Cache:
    """Queries stand for attention, which takes the interpreter long: they carry the positions."""
    return Cache(backend.ops, spec, PagedStorage(spec.shape(), backend.device, attend=lambda q, *_, **__: q))


def patch(put: Callable[[Any, str, Any], None]) -> None:
    put(kvcore.loading, "load_backend", on_cpu)
    put(sys.modules["kvcore.parallel.join"], "load_backend", on_cpu)
    put(kvcore.runtime, "make_cache", in_pages)


def load(path: str, ranks: int) -> kvcore.Model:
    return kvcore.load(path, backend="cuda", device="cpu", dtype="float16", kernels="graph", tensor_parallel=ranks)


def tokens(model: kvcore.Model) -> dict[str, list[int]]:
    found = {}
    for name, settings in SETTINGS.items():
        generation = model.generate(PROMPT, kvcore.SamplingParams(max_tokens=8, **settings))
        for _ in generation:
            pass
        assert generation.source is not None, "the host picked the tokens"
        found[name] = generation.token_ids
    # Stopped while a step is under way; then the same cache goes on.
    cache = model.new_cache("fp16")
    generation = model.generate(PROMPT, kvcore.SamplingParams(max_tokens=50), cache=cache)
    for count, _ in enumerate(generation):
        if count == 3:
            generation.cancel()
    told = [*PROMPT, *generation.token_ids]
    assert cache.offset == len(told) - 1
    more = model.generate([*told, 37], kvcore.SamplingParams(max_tokens=6), cache=cache)
    for _ in more:
        pass
    found["stopped"], found["continued"] = generation.token_ids, more.token_ids
    return found


if __name__ == "__main__":
    patch(setattr)
    said = json.dumps(tokens(load(sys.argv[1], int(sys.argv[2]))))
    print(said, flush=True)
