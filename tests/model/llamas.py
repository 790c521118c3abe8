"""Models under test, and the same models computed by transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny import TinyLlama, write_tiny_gguf, write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore
from kvcore.backends import Backend
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES

QUANTIZED = [name for name, mode in MODES.items() if mode.quantized]
SMALL = WindowPolicy(recent_tokens=32, page_size=32)
BARE = WindowPolicy(sink_tokens=0, recent_tokens=0, page_size=32)
FOLDED_ROW_BYTES = {  # bytes of one folded token and KV head at D = 64 with float32 raw rows, counted by hand
    "fp16": 512,
    "int8": 2 * (64 + 2),
    "int8-turbo4": (64 + 2) + (32 + 2),
    "turbo4-asym": 256 + (32 + 2),
    "turbo4-delegated": 256 + (32 + 2),
    "turbo3-asym": 256 + (24 + 2),
    "turbo4": 2 * (32 + 2) + 1,  # and the share of a centre of 128 bytes in a page of 128 rows
}


def load_on(backend: Backend, path: Path | None, **settings: Any) -> kvcore.Model:
    """`kvcore.load` on a backend that a fixture has loaded already."""
    device = None if backend.name == "metal" else backend.device
    return kvcore.load(path, backend=backend.name, device=device, **settings)


def tiny_folder(folder: Path, **settings: Any) -> Path:
    """A tiny llama with its tokenizer; settings as for `write_tiny_llama`."""
    write_tiny_llama(folder, **settings)
    return write_tiny_tokenizer(folder)


def tiny_gguf(folder: Path, **settings: Any) -> Path:
    """The same as a GGUF file."""
    tokens = ["<pad>", "<s>", "</s>", "t", "tt", *(f"t{i}" for i in range(settings.get("vocab", 256) - 5))]

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
        writer.add_token_merges(["t t"])

    folder.mkdir(parents=True, exist_ok=True)
    return write_tiny_gguf(folder / "tiny.gguf", metadata=tokenizer, **settings)


def logits(
    model: kvcore.Model, ids: np.ndarray, *, chunk: int | None = None, cache: kvcore.Cache | None = None
) -> np.ndarray:
    """float32 [T, vocab] of every position of ``ids`` [T], run ``chunk`` at a time."""
    cache = cache or model.new_cache()
    step = chunk or len(ids)
    parts = [ids[None, at : at + step] for at in range(0, len(ids), step)]
    return np.concatenate([model.forward(part, cache, all_logits=True)[0] for part in parts])


def random_ids(count: int, vocab: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, vocab, count)


class Transformers:
    """transformers' LlamaForCausalLM (or a sliding kin of it) in float32, which shares no code with kvcore."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        kind = {"mistral": "Mistral", "ministral": "Ministral"}.get(config.get("model_type", "llama"), "Llama")
        settings = getattr(transformers, f"{kind}Config")(**config)
        self.model = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()

    @classmethod
    def tiny(cls, tiny: TinyLlama, tensors: Mapping[str, np.ndarray] | None = None) -> Transformers:
        model = cls(tiny.hf_config())
        model.load(tiny.tensors() if tensors is None else tensors)
        return model

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Every weight, by name; a tied head may be left out."""
        import torch

        state = {name: torch.from_numpy(np.ascontiguousarray(array, np.float32)) for name, array in tensors.items()}
        left = self.model.load_state_dict(state, strict=False)
        tied = self.model.config.tie_word_embeddings
        assert left.missing_keys in ([], ["lm_head.weight"] if tied else []), left
        assert left.unexpected_keys == [], left

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T, vocab] of ``ids`` [T]."""
        import torch

        with torch.inference_mode():
            return self.model(torch.as_tensor(np.asarray(ids))[None]).logits[0].numpy()


def margins(scores: np.ndarray) -> np.ndarray:
    """How far the best of the last axis is ahead of the second."""
    best = np.partition(scores, -2, axis=-1)
    return best[..., -1] - best[..., -2]


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """float64 over the last axis."""
    wide = scores.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def divergence(raw: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(raw ‖ other) in nats over the last axis."""
    p, q = log_softmax(raw), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(-1)


def assert_argmax_agrees(got: np.ndarray, want: np.ndarray, margin: float) -> None:
    sure = margins(want) > margin
    assert sure.mean() > 0.9, "hardly a position has a clear winner: the comparison says little"
    np.testing.assert_array_equal(got.argmax(-1)[sure], want.argmax(-1)[sure])


def folded_rows(tokens: int, window: WindowPolicy) -> int:
    """The design's formula, section 1, rules of the window."""
    pages = math.floor((tokens - window.recent_tokens) / window.page_size)
    return window.page_size * max(0, pages)


def in_mode(model: kvcore.Model, mode: str, window: WindowPolicy | None = None) -> kvcore.Model:
    """The same weights with another cache."""
    return replace(model, mode=MODES[mode], window=window or model.window)


Loader = Callable[[str], kvcore.Model]


class Recorder:
    """A generation's step that keeps the logits of every call, and how many tokens it ran."""

    def __init__(self, model: kvcore.Model) -> None:
        self.model = model
        self.counts: list[int] = []
        self.scores: list[np.ndarray] = []

    def __call__(self, ids: Sequence[int], cache: kvcore.Cache) -> np.ndarray:
        scores = self.model.forward(np.asarray(ids, np.int32)[None], cache)[0, -1]
        self.counts.append(len(ids))
        self.scores.append(scores)
        return scores

    def generate(self, prompt: Sequence[int], max_tokens: int, chunk: int) -> kvcore.Generation:
        """Greedy, past end tokens."""
        return kvcore.Generation(
            self,
            self.model.tokenizer,
            self.model.new_cache(),
            prompt,
            kvcore.SamplingParams(max_tokens=max_tokens),
            eos_token_ids=frozenset(),
            max_position=self.model.config.max_position,
            prefill_step=chunk,
        )
