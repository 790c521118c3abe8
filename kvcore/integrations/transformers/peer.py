"""transformers' own generate loop, timed for a row beside kvcore's: a random llama in bf16, `DynamicCache`, SDPA,
greedy."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from kvcore.bench.decode import SETTLE, Measured
from kvcore.integrations.transformers.library import VERSION, DynamicCache, cache_argument, llama_of
from kvcore.models.config import LlamaConfig

RELEASE = ".".join(map(str, VERSION))
WARM = 4096  # tokens of the short run before


class Peer:
    """A model made where it runs. Its weights are dense whatever the other rows' are."""

    def __init__(self, config: LlamaConfig, device: str) -> None:
        torch.manual_seed(0)
        settings = {**config.to_hf(), "eos_token_id": None, "torch_dtype": None}
        self.vocab, self.device = config.vocab_size, device
        self.model = llama_of(settings, torch.bfloat16, device)
        self.model.set_attn_implementation("sdpa")

    def measure(self, tokens: int, batch: int, new_tokens: int) -> Measured:
        """One prompt of ``tokens`` and ``new_tokens`` steps after it, after a short run of the same kind."""
        self._run(min(tokens, WARM), batch, SETTLE)
        cuda = self.device.startswith("cuda")
        before = 0
        if cuda:
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        times, cache = self._run(tokens, batch, new_tokens + SETTLE)
        steps = [b - a for a, b in zip(times[1 + SETTLE :], times[2 + SETTLE :], strict=False)]
        return Measured(
            kernels="transformers DynamicCache, sdpa, bf16 weights",
            step="transformers generate",
            dtype="bfloat16",
            prefill_seconds=times[1] - times[0],
            intervals=steps,
            kv_bytes=sum(tokens * _row_bytes(layer) for layer in cache.layers),
            weight_bits=16.0,
            peak_bytes=torch.cuda.max_memory_allocated(self.device) - before if cuda else None,
        )

    def _run(self, tokens: int, batch: int, more: int) -> tuple[list[float], Any]:
        """When the prompt came in, and each token; the cache that is left."""
        ids = np.random.default_rng(0).integers(0, self.vocab, (batch, tokens), np.int64)
        prompt, clock, cache = torch.from_numpy(ids).to(self.device), _Clock(), DynamicCache(config=self.model.config)
        with torch.inference_mode():
            self.model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=1 + more,
                do_sample=False,
                streamer=clock,
                **{cache_argument(): cache},
            )
        return clock.times, cache


class _Clock:
    """A streamer, which gets the prompt and then each token on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _row_bytes(layer: Any) -> int:
    """Of one position in all sequences."""
    return int((layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[-2])
