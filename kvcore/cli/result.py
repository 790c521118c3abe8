"""What a generation reports: lines for stderr and one object for JSON. The same facts in both."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvcore.cache import Cache
from kvcore.cli.terminal import mib
from kvcore.generate import Generation
from kvcore.runtime import Model


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation, the model that made it, and the words that chose the mode."""

    model: Model
    generation: Generation
    requested_mode: str

    @property
    def effective_mode(self) -> str:
        return effective_mode(self.generation.cache)

    @property
    def step(self) -> str | None:
        """How a decode step ran where sampling was on the device; None where both were the host's."""
        source = self.generation.source
        if source is None:
            return None
        if source.no_graph is not None:
            return f"sampling on the device, no CUDA graph: {source.no_graph}"
        return f"one CUDA graph, sampling included, captured in {source.capture_seconds:.2f} s"

    def lines(self) -> list[str]:
        """Speed, cache, kernels: one line each."""
        stats = self.generation.stats
        prompt = f"{stats.prompt_tokens} tokens"
        if stats.cached_tokens:
            prompt += f" ({stats.cached_tokens} of them cached)"
        return [
            f"prompt: {prompt}, {stats.prompt_tokens_per_second:.1f} tok/s; "
            f"generation: {stats.generation_tokens} tokens, {stats.generation_tokens_per_second:.1f} tok/s; "
            f"first token after {stats.time_to_first_token:.2f} s; finish: {stats.finish_reason}",
            cache_line(self.generation.cache, self.requested_mode),
            kernel_line(self.model, self.generation.cache),
            *([f"decode: {step}"] if (step := self.step) else []),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. Times are in seconds, sizes in bytes."""
        generation, model = self.generation, self.model
        stats, cache = generation.stats, generation.cache
        speed = {
            "prompt_tokens_per_second": stats.prompt_tokens_per_second,
            "generation_tokens_per_second": stats.generation_tokens_per_second,
        }
        return {
            "text": generation.text,
            "token_ids": generation.token_ids,
            "finish_reason": generation.finish_reason,
            "stats": asdict(stats) | speed,
            "cache": cache.stats().to_dict() | bytes_per_token(cache) | {"window": asdict(cache.spec.window)},
            "mode": {"requested": self.requested_mode, "effective": self.effective_mode},
            "backend": {
                "name": model.backend.name,
                "device": model.backend.device,
                "arch": model.backend.arch,
                "versions": dict(model.backend.versions),
            },
            "kernels": [decision.to_dict() for decision in cache.decisions],
            "decode": self.step,
            "dtype": cache.spec.dtype,
            "model": model.name,
            "notices": [*model.notices, *([] if generation.notice is None else [generation.notice])],
        }


def effective_mode(cache: Cache) -> str:
    """The cache's mode, or fp16 where boundary layers leave no layer to quantize."""
    return cache.mode.name if any(layer.layout.quantized for layer in cache.layers) else "fp16"


def bytes_per_token(cache: Cache) -> dict[str, int]:
    """What a token adds beyond the window, over all layers and heads, and what it would add raw."""
    spec = cache.spec
    heads, page = spec.batch * spec.num_kv_heads, spec.window.page_size
    layouts = [layer.layout for layer in cache.layers]
    return {
        "bytes_per_token": heads * sum(layout.bytes_per_token(spec.dtype, page) for layout in layouts),
        "bytes_per_token_raw": heads * sum(layout.raw_bytes_per_token(spec.dtype) for layout in layouts),
    }


def cache_line(cache: Cache, requested: str) -> str:
    """Mode, bytes against raw rows, and how many rows are quantized."""
    stats, effective = cache.stats(), effective_mode(cache)
    line = f"cache: mode {effective} (requested {requested}), {mib(stats.kv_bytes)}"
    if effective != "fp16":
        ratio = stats.kv_bytes_raw / max(1, stats.kv_bytes)
        line += f" instead of {mib(stats.kv_bytes_raw)} raw ({ratio:.2f}x)"
    line += f" for {stats.tokens} tokens; rows: {stats.rows_folded} quantized, {stats.rows_raw} raw"
    return line + (f"; {stats.nonfinite_rows} not finite, stored as zeros" if stats.nonfinite_rows else "")


def kernel_line(model: Model, cache: Cache) -> str:
    """Each operation's kernel, with reasons where a better one was passed over; device and dtype."""
    kernels = "; ".join(decision.explain() for decision in cache.decisions)
    return f"kernels: {kernels}; {model.backend.describe()}, {cache.spec.dtype}"
