"""Decode of a whole model at long contexts, mode by mode: prefill, time to the first token, time per token, bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any

import numpy as np

from kvcore.advise import ModelShape
from kvcore.attention import default_registry, make_cache
from kvcore.backends import Backend
from kvcore.cache import Cache, CacheSpec, LayerCache
from kvcore.decoding import token_source
from kvcore.errors import KvcoreError, is_out_of_memory
from kvcore.models.config import LlamaConfig
from kvcore.models.llama import LlamaParams, forward, load_params
from kvcore.modes import MODES
from kvcore.ops import ITEMSIZE
from kvcore.registry import Registry
from kvcore.runtime import Model
from kvcore.sampling import Sampler, SamplingParams

COLUMNS = (
    "mode", "effective_mode", "kernels", "step", "prompt_tokens", "batch", "fill", "prefill_tokens_per_s", "ttft_ms",
    "decode_ms", "decode_ms_p10", "decode_ms_p90", "tokens_per_s", "ratio_to_fp16", "floor_percent", "kv_bytes",
    "peak_bytes",
)  # fmt: skip
PEER_TOKENS, PEER_PROMPT = 32, 32768  # steps that another library's loop is timed for, and its longest prompt
SETTLE = 4  # tokens after which steps are compiled and captured; their times are left out


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure. ``bits_per_weight`` is what a step reads for one, ``kernels`` the registry's policy.

    ``shared``: the model of rank 0 where ranks share it; they are told of each step. Its bytes are this rank's.
    """

    backend: Backend
    config: LlamaConfig
    params: LlamaParams
    registry: Registry
    name: str
    kernels: str
    bits_per_weight: float
    shared: Model | None = None

    @classmethod
    def of(cls, model: Model) -> Subject:
        """Weights are counted as the backend holds them, in their compute dtype where it does not say."""
        elements, size = ModelShape.from_config(model.config).streamed_weights, _held(model.params)
        bits = 8.0 * (ITEMSIZE[model.params.dtype] if size is None else size / elements)
        shared = model if model.leader is not None else None
        return cls(model.backend, model.config, model.params, model.registry, model.name, model.kernels, bits, shared)

    @classmethod
    def random(cls, backend: Backend, checkpoint: Any, name: str, *, dtype: str | None, kernels: str) -> Subject:
        """Of a `RandomCheckpoint`."""
        if kernels != "graph" and backend.fused_ops is not None:
            backend = replace(backend, ops=backend.fused_ops())
        params = load_params(backend, checkpoint, dtype or backend.default_dtype or checkpoint.config.dtype)
        registry, bits = default_registry(backend), checkpoint.bits_per_weight
        return cls(backend, checkpoint.config, params, registry, name, kernels, bits)

    def new_cache(self, mode: str, batch: int, capacity: int) -> Cache:
        if self.shared is not None:
            return self.shared.new_cache(mode, batch=batch, capacity=capacity)
        config = self.config
        spec = CacheSpec(
            mode=MODES[mode],
            num_layers=config.num_layers,
            num_q_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.params.dtype,
            batch=batch,
            capacity=capacity,
        )
        return make_cache(self.backend, spec, kernels=self.kernels, registry=self.registry)

    def forward(self, ids: np.ndarray, cache: Cache) -> Any:
        """Logits of the last token, for `picked`."""
        if self.shared is not None:
            return self.shared.forward(ids, cache)
        return forward(self.backend.ops, self.config, self.params, ids, cache)

    def picked(self, logits: Any) -> np.ndarray:
        """The likeliest token of each sequence."""
        host = logits if isinstance(logits, np.ndarray) else self.backend.ops.to_numpy(logits)
        token: np.ndarray = host[:, -1].argmax(-1)
        return token

    def weight_bytes(self, bits: float | None = None) -> float:
        """Read by one step, of ``bits`` each or as many as here."""
        return ModelShape.from_config(self.config).streamed_weights * (bits or self.bits_per_weight) / 8


def _held(params: LlamaParams) -> int | None:
    """Bytes of the matrices that a step reads; None where the backend does not say."""
    linear = [each.weight for layer in params.layers for each in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    parts = [part for weight in (*linear, params.head) for part in (weight if isinstance(weight, tuple) else (weight,))]
    sizes = [getattr(part, "nbytes", None) for part in parts]
    return None if None in sizes else sum(int(size) for size in sizes if size is not None)


@dataclass(frozen=True, slots=True)
class Settings:
    """``fill`` "real": the prompt is run; "random": rows of K and V are drawn instead, for contexts whose prefill would
    take too long. ``bandwidth`` in bytes per second, None where no floor is reckoned."""

    modes: Sequence[str]
    prompt_tokens: Sequence[int]
    batch: int = 1
    max_tokens: int = 64
    repeats: int = 3
    fill: str = "real"
    prefill_step: int = 2048
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What another library's own loop took: one prompt, and ``intervals`` between the tokens after it, in seconds."""

    kernels: str
    step: str
    dtype: str
    prefill_seconds: float
    intervals: Sequence[float]
    kv_bytes: int  # of the prompt
    weight_bits: float
    peak_bytes: int | None


@dataclass(slots=True)
class _Run:
    """One mode at one context: the filled cache, which stays as it is, and what was measured over it."""

    mode: str
    cache: Cache
    first: list[int]
    prefill_seconds: float
    peak_bytes: int | None = None
    step: str = ""
    intervals: list[list[float]] = field(default_factory=list)


def run(subject: Subject, settings: Settings, progress: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """A row for each context and mode. Modes take turns at each repeat, over forks of caches that were filled once.

    A row for which memory does not suffice is left out, which ``progress`` says; where none is left, that is the error.
    """
    rows: list[dict[str, Any]] = []
    short: Exception | None = None
    for tokens in settings.prompt_tokens:
        runs: list[_Run] = []
        for mode in settings.modes:
            what = f"{subject.name}, {settings.batch} x {tokens} tokens, {mode}"
            progress(f"{what}: prefill")
            try:
                runs.append(_filled(subject, settings, mode, tokens))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                short = error.with_traceback(None)  # its frames hold rows
                progress(f"{what}: left out, out of memory")
        for repeat in range(settings.repeats):
            for each in runs:
                progress(f"{subject.name}, {settings.batch} x {tokens} tokens, {each.mode}: repeat {repeat + 1}")
                each.intervals.append(_decode(subject, each, settings.max_tokens))
        base = next((each for each in runs if each.mode == "fp16"), None)
        rows += [_row(subject, settings, each, tokens, base) for each in runs]
    if short is not None and not rows:
        raise short
    return rows


def _filled(subject: Subject, settings: Settings, mode: str, tokens: int) -> _Run:
    """After one short run of the same kind, for what is compiled on first use."""
    capacity = tokens + settings.max_tokens + SETTLE
    warm = subject.new_cache(mode, settings.batch, capacity)
    _fill(subject, settings, warm, min(tokens, 2 * settings.prefill_step))
    del warm
    with _peak_memory(subject.backend) as peak:
        cache = subject.new_cache(mode, settings.batch, capacity)
        start = time.perf_counter()
        first = _fill(subject, settings, cache, tokens)
        seconds = time.perf_counter() - start
        made = _Run(mode, cache, first, seconds)
        _decode(subject, made, SETTLE)
    made.peak_bytes = peak[0] if peak else None
    return made


def _fill(subject: Subject, settings: Settings, cache: Cache, tokens: int) -> list[int]:
    """The first token of each sequence's answer."""
    if settings.fill == "random":
        _fill_random(subject, cache, tokens, settings.prefill_step)
        cache.begin_decode()
        return [1] * settings.batch
    random = np.random.default_rng(0)
    ids = random.integers(0, subject.config.vocab_size, (settings.batch, tokens), np.int32)
    logits = None
    for begin in range(0, tokens, settings.prefill_step):
        chunk = ids[:, begin : begin + settings.prefill_step]
        logits = subject.forward(chunk, cache)
    cache.begin_decode()
    first: list[int] = subject.picked(logits).tolist()
    return first


def _fill_random(subject: Subject, cache: Cache, tokens: int, step: int) -> None:
    """Normal rows of K and V without a model's run, which the cache folds as ever."""
    ops, config, random = subject.backend.ops, subject.config, np.random.default_rng(0)
    shape = cache.spec.batch, config.num_kv_heads, min(step, tokens), config.head_dim
    k, v = (ops.asarray(random.standard_normal(shape, np.float32), subject.params.dtype) for _ in range(2))
    q = ops.zeros((shape[0], config.num_heads, *shape[2:]), subject.params.dtype)
    storage: Any = cache.storage
    attend = getattr(storage, "attend", None)
    for begin in range(0, tokens, step):
        count = min(step, tokens - begin)
        try:
            if attend is not None:
                storage.attend = lambda q, *_, **__: q
            for layer in cache.layers:
                if isinstance(layer, LayerCache):
                    layer.append(k[:, :, :count], v[:, :, :count])
                else:
                    layer.step(q[:, :, :count], k[:, :, :count], v[:, :, :count], 1.0)
        finally:
            if attend is not None:
                storage.attend = attend
        cache.commit()
    ops.evaluate(*cache.arrays())


def _decode(subject: Subject, each: _Run, count: int) -> list[float]:
    """Seconds between tokens, read one after another over a fork of the cache, without the first `SETTLE`."""
    cache = each.cache.fork()
    greedy = [Sampler(SamplingParams()) for _ in each.first]
    seen = [[token] for token in each.first]
    if subject.shared is None:
        source = token_source(subject.backend, subject.config, subject.params, cache, greedy, seen)
    else:
        source = subject.shared.token_source(cache, greedy, seen)
    tokens = _host_tokens(subject, cache, each.first) if source is None else source.tokens(each.first, count + SETTLE)
    times = []
    for _ in range(count + SETTLE):
        next(tokens)
        times.append(time.perf_counter())
    tokens.close()
    each.step = "host" if source is None else source.no_graph or "CUDA graph"
    if subject.shared is not None:
        each.step += f", {subject.params.ranks.size} ranks"
    return [b - a for a, b in zip(times[SETTLE - 1 :], times[SETTLE:], strict=False)]


def _host_tokens(subject: Subject, cache: Cache, first: Sequence[int]) -> Any:
    tokens = np.array(first, np.int32)[:, None]
    while True:
        tokens = subject.picked(subject.forward(tokens, cache)).astype(np.int32)[:, None]
        yield tokens[:, 0].tolist()


def _row(subject: Subject, settings: Settings, each: _Run, tokens: int, base: _Run | None) -> dict[str, Any]:
    stats = each.cache.stats()
    if stats.tokens != tokens:
        raise KvcoreError(f"{each.mode}: the cache holds {stats.tokens} rows after {tokens} tokens: not reported")
    steps = [interval for sample in each.intervals for interval in sample]
    middle, tenths = median(steps), quantiles(steps, n=10) if len(steps) > 1 else [steps[0]] * 9
    row: dict[str, Any] = {
        "model": subject.name,
        "mode": each.mode,
        "effective_mode": each.cache.mode.name,
        "kernels": " ".join(decision.kernel for decision in each.cache.decisions),
        "step": each.step,
        "dtype": subject.params.dtype,
        "prompt_tokens": tokens,
        "batch": settings.batch,
        "fill": settings.fill,
        "new_tokens": settings.max_tokens,
        "repeats": settings.repeats,
        "prefill_tokens_per_s": None,
        "ttft_ms": None,
        "decode_ms": 1e3 * middle,
        "decode_ms_p10": 1e3 * tenths[0],
        "decode_ms_p90": 1e3 * tenths[-1],
        "tokens_per_s": settings.batch / middle,
        "ratio_to_fp16": None,
        "floor_percent": None,
        "kv_bytes": stats.kv_bytes,
        "kv_bytes_raw": stats.kv_bytes_raw,
        "rows_raw": stats.rows_raw,
        "rows_folded": stats.rows_folded,
        "peak_bytes": each.peak_bytes,
    }
    if settings.fill == "real":
        row["prefill_tokens_per_s"] = settings.batch * tokens / each.prefill_seconds
        row["ttft_ms"] = 1e3 * each.prefill_seconds
    if base is not None:
        pairs = zip(base.intervals, each.intervals, strict=True)
        row["ratio_to_fp16"] = median(median(theirs) / median(ours) for theirs, ours in pairs)
    if settings.bandwidth is not None:
        floor = (subject.weight_bytes() + stats.kv_bytes) / settings.bandwidth
        row["floor_percent"] = 100 * floor / middle
    return row


def with_peer(
    subject: Subject,
    settings: Settings,
    rows: Sequence[dict[str, Any]],
    name: str,
    measure: Callable[[int, int, int], Measured],
    note: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[str]]:
    """``rows``, and at the end of each length one of another library's fp16 cache; and why there is none where
    ``measure(tokens, batch, steps)`` fails or the prompt is too long."""
    found: list[dict[str, Any]] = []
    absent: list[str] = []
    for tokens in settings.prompt_tokens:
        mine = [row for row in rows if row["prompt_tokens"] == tokens]
        found += mine
        if tokens > PEER_PROMPT:
            absent.append(f"no row for {tokens} tokens, more than {PEER_PROMPT}")
            note(f"{name}: {absent[-1]}")
            continue
        note(f"{subject.name}, {settings.batch} x {tokens} tokens, {name}")
        count = min(settings.max_tokens, PEER_TOKENS)
        try:
            measured = measure(tokens, settings.batch, count)
        except Exception as error:  # the other rows stay
            words = (str(error).splitlines() or [""])[0]
            absent.append(f"no row for {tokens} tokens, {type(error).__name__}: {words}")
            note(f"{name}: {absent[-1]}")
            continue
        base = next((row for row in mine if row["mode"] == "fp16"), None)
        found.append(_peer_row(subject, settings, tokens, name, measured, base))
    return found, absent


def _peer_row(
    subject: Subject, settings: Settings, tokens: int, name: str, measured: Measured, base: dict[str, Any] | None
) -> dict[str, Any]:
    steps = list(measured.intervals)
    middle, tenths = median(steps), quantiles(steps, n=10) if len(steps) > 1 else [steps[0]] * 9
    floor = None
    if settings.bandwidth is not None:
        floor = (subject.weight_bytes(measured.weight_bits) + measured.kv_bytes) / settings.bandwidth
    return {
        "model": subject.name,
        "mode": f"fp16 ({name})",
        "effective_mode": "fp16",
        "kernels": measured.kernels,
        "step": measured.step,
        "dtype": measured.dtype,
        "prompt_tokens": tokens,
        "batch": settings.batch,
        "fill": "real",
        "new_tokens": len(steps),
        "repeats": 1,
        "prefill_tokens_per_s": settings.batch * tokens / measured.prefill_seconds,
        "ttft_ms": 1e3 * measured.prefill_seconds,
        "decode_ms": 1e3 * middle,
        "decode_ms_p10": 1e3 * tenths[0],
        "decode_ms_p90": 1e3 * tenths[-1],
        "tokens_per_s": settings.batch / middle,
        "ratio_to_fp16": None if base is None else base["decode_ms"] / (1e3 * middle),
        "floor_percent": None if floor is None else 100 * floor / middle,
        "kv_bytes": measured.kv_bytes,
        "kv_bytes_raw": measured.kv_bytes,
        "rows_raw": tokens,
        "rows_folded": 0,
        "peak_bytes": measured.peak_bytes,
    }


@contextmanager
def _peak_memory(backend: Backend) -> Iterator[list[int]]:
    """Bytes on the device at most meanwhile, less what earlier rows' caches hold there; empty off a GPU."""
    found: list[int] = []
    if not backend.device.startswith("cuda"):
        yield found
        return
    import torch

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield found
    found.append(torch.cuda.max_memory_allocated() - before)


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Tokens per second and bytes of the cache against context, a line per mode."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
    for axes, key, label in zip(
        panels, ("tokens_per_s", "kv_bytes"), ("tokens per second", "bytes of KV"), strict=True
    ):
        for mode in dict.fromkeys(row["mode"] for row in rows):
            mine = sorted((row for row in rows if row["mode"] == mode), key=lambda row: row["prompt_tokens"])
            axes.plot([row["prompt_tokens"] for row in mine], [row[key] for row in mine], marker="o", label=mode)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[1].set_yscale("log")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
