"""A decode step inside transformers: kvcore's cache beside transformers' own, on a random model of few layers.

Every cache is filled with the same prompt, then the caches take turns, a step each. A layer's share is the step without
what comes before and after the layers, divided by their number: few layers of a large model say what many would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvcore.errors import BackendError, KvcoreError
from kvcore.integrations.transformers import KVCache, cache_argument
from kvcore.integrations.transformers.library import VERSION, DynamicCache, random_llama, stock_quantized_caches

COLUMNS = ("cache", "kernel", "attention", "tokens", "step_ms", "p10_ms", "p90_ms", "layer_us", "speedup", "kv_mib")
_PREFILL = 2048
_WARM_UP = 5
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class Setting:
    """A random llama of ``layers`` layers in ``dtype``, its prompt, and where it runs."""

    layers: int = 4
    tokens: int = 32768
    batch: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    dtype: str = "bfloat16"
    device: str = "cuda"


@dataclass(slots=True)
class Contender:
    """One cache under one attention implementation; ``step_times`` in milliseconds. Without ``cudnn`` SDPA has to take
    another of its kernels: cuDNN's plans each length anew, and in decode every step has a new one."""

    name: str
    attention: str
    cache: Any
    cudnn: bool = True
    step_times: list[float] = field(default_factory=list)
    logits: Tensor | None = None

    def kernel(self) -> str:
        made = self.cache.describe()["kernels"] if isinstance(self.cache, KVCache) else []
        return ", ".join(decision["kernel"] for decision in made if decision["op"] == "attend")

    def nbytes(self) -> int | None:
        """Live bytes of keys and values, where the cache tells."""
        if isinstance(self.cache, KVCache):
            return self.cache.stats().kv_bytes
        if type(self.cache) is not DynamicCache:
            return None
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


def run(
    setting: Setting,
    modes: Sequence[str],
    *,
    repeats: int = 30,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One row for each cache; the first is `DynamicCache` under SDPA, which the others are compared with. A quantized
    cache of transformers whose package is absent is named through ``progress`` and left out. BackendError without the
    device, KvcoreError where a cache's logits are not finite: it is not timed."""
    if setting.device.startswith("cuda") and not torch.cuda.is_available():
        raise BackendError(f"bench transformers: torch {torch.__version__} sees no NVIDIA GPU; use --device cpu")
    torch.manual_seed(0)
    model = random_llama(
        layers=setting.layers,
        heads=(setting.q_heads, setting.kv_heads, setting.head_dim),
        vocab=setting.vocab,
        positions=setting.tokens + repeats + 64,
        dtype=getattr(torch, setting.dtype),
        device=setting.device,
    )
    prompt = torch.randint(setting.vocab, (setting.batch, setting.tokens), device=setting.device)
    contenders = []
    with torch.no_grad():
        for contender in _contenders(setting, model, modes, repeats, progress):
            progress(f"{contender.name}: a prompt of {setting.tokens} tokens")
            if _fill(model, contender, prompt, progress):
                contenders.append(contender)
        _time(model, contenders, setting, repeats)
        outside = _outside_of_layers(model, setting, repeats)
    base = contenders[0]
    return [_row(contender, base, setting, outside) for contender in contenders]


def _contenders(
    setting: Setting, model: Any, modes: Sequence[str], repeats: int, progress: Callable[[str], None]
) -> Iterator[Contender]:
    yield Contender("DynamicCache", "sdpa", DynamicCache(config=model.config))
    if setting.device.startswith("cuda"):
        yield Contender("DynamicCache, no cuDNN", "sdpa", DynamicCache(config=model.config), cudnn=False)
    capacity = setting.tokens + repeats + _WARM_UP
    for mode in modes:
        yield Contender(f"kvcore {mode}", "kvcore", KVCache(model.config, mode, capacity=capacity))
    for name, made, why in stock_quantized_caches(model.config):
        if made is None:
            progress(f"{name}: left out, {why}")
        else:
            yield Contender(name, "sdpa", made)


def _step(model: Any, contender: Contender, ids: Tensor) -> Tensor:
    with nullcontext() if contender.cudnn else sdpa_kernel(_WITHOUT_CUDNN):
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_argument(): contender.cache})
    logits: Tensor = out.logits
    return logits


def _fill(model: Any, contender: Contender, prompt: Tensor, progress: Callable[[str], None]) -> bool:
    """The prompt, then the first step, whose logits are kept. False where a cache that is not ours fails."""
    model.set_attn_implementation(contender.attention)
    try:
        for start in range(0, prompt.shape[1], _PREFILL):
            _step(model, contender, prompt[:, start : start + _PREFILL])
        contender.logits = _step(model, contender, prompt[:, :1]).float()
    except Exception as error:
        if isinstance(contender.cache, KVCache) or type(contender.cache) is DynamicCache:
            raise
        progress(f"{contender.name}: left out, {type(error).__name__}: {error}")
        return False
    if not bool(torch.isfinite(contender.logits).all()):
        raise KvcoreError(f"{contender.name}: logits are not finite: not timed")
    return True


def _time(model: Any, contenders: Sequence[Contender], setting: Setting, repeats: int) -> None:
    ids = torch.full((setting.batch, 1), 7, device=setting.device)
    for repeat in range(_WARM_UP + repeats):
        for contender in contenders:
            model.set_attn_implementation(contender.attention)
            elapsed = _milliseconds(lambda one=contender: _step(model, one, ids), setting.device)  # type: ignore[misc]
            if repeat >= _WARM_UP:
                contender.step_times.append(elapsed)


def _outside_of_layers(model: Any, setting: Setting, repeats: int) -> float:
    """Milliseconds of a step's embedding, last norm and head."""
    ids = torch.full((setting.batch, 1), 7, device=setting.device)

    def outside() -> Tensor:
        head: Tensor = model.lm_head(model.model.norm(model.model.embed_tokens(ids)))
        return head

    return median([_milliseconds(outside, setting.device) for _ in range(_WARM_UP + repeats)][_WARM_UP:])


def _milliseconds(run: Callable[[], object], device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _row(contender: Contender, base: Contender, setting: Setting, outside: float) -> dict[str, Any]:
    assert contender.logits is not None
    assert base.logits is not None
    step = median(contender.step_times)
    deciles = quantiles(contender.step_times, n=10) if len(contender.step_times) > 1 else [step]
    nbytes = contender.nbytes()
    return {
        "cache": contender.name,
        "kernel": contender.kernel(),
        "attention": contender.attention,
        "tokens": setting.tokens,
        "batch": setting.batch,
        "layers": setting.layers,
        "dtype": setting.dtype,
        "step_ms": step,
        "p10_ms": deciles[0],
        "p90_ms": deciles[-1],
        "layer_us": (step - outside) / setting.layers * 1e3,
        "speedup": median(base.step_times) / step,
        "kv_mib": None if nbytes is None else nbytes / 2**20,
        "logits_difference": float((contender.logits - base.logits).norm() / base.logits.norm()),
        "notices": contender.cache.describe()["notices"] if isinstance(contender.cache, KVCache) else [],
        "repeats": len(contender.step_times),
    }


def environment(setting: Setting) -> dict[str, str]:
    """What a row was measured on, beside date, commit and machine."""
    gpu = torch.cuda.get_device_name() if setting.device.startswith("cuda") else "cpu"
    return {
        "device": gpu,
        "torch": torch.__version__,
        "transformers": ".".join(map(str, VERSION)),
        "model": f"random llama, {setting.layers} layers, {setting.q_heads}/{setting.kv_heads} D{setting.head_dim}",
        "warm-up": f"{_WARM_UP} steps",
    }
