"""Other views of the same loss: attention outputs layer by layer, greedy text, a planted fact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore.cache import Cache, CacheSpec
from kvcore.eval.codecs import RoundTrip, Variant
from kvcore.eval.onepass import CHUNK, OnePassLayer, OnePassStorage, attend_masked
from kvcore.eval.rows import RawRows
from kvcore.eval.score import RAW
from kvcore.eval.table import variants
from kvcore.eval.text import Text
from kvcore.layout import CODECS, Layout
from kvcore.modes import MODES, resolve_mode
from kvcore.ops import Array, Ops
from kvcore.runtime import Model
from kvcore.sampling import SamplingParams

Row = dict[str, Any]
NEW_TOKENS = 128  # of a greedy answer
PROMPT = 512  # its prompt, the first tokens of each window
DEPTHS = (0.1, 0.5, 0.9)  # of the planted fact, as shares of the context
FACT, CUE, ANSWER = " The access code of the north gate is 7241.", " The access code of the north gate is", " 7241"


def run(
    model: Model, text: Text, wanted: Sequence[str], words: str, notify: Callable[[str], None]
) -> dict[str, list[Row]]:
    """Rows of each wanted probe; ``words`` name the variants, as for the table."""
    chosen = variants(words, RawRows.of(model.window))
    found = {}
    for name in wanted:
        notify(f"probe {name}")
        found[name] = PROBES[name](model, text, chosen)
    return found


# Attention outputs


class _ProbeLayer(OnePassLayer):
    """The raw model's layer, which also answers with coded rows and keeps how far off that is."""

    def __init__(self, ops: Ops, layer: int, layout: Layout, chosen: Sequence[Variant], errors: dict[str, list[float]]):
        super().__init__(ops, RAW, layer, layout)
        dims = (layout.k_dim, layout.v_dim)
        self._trips: list[tuple[RoundTrip, ...]] = [
            tuple(codec.bind(ops, layer, part, dim) for codec, part, dim in zip((v.k, v.v), "kv", dims, strict=True))
            for v in chosen
        ]
        self._names, self._errors = [v.name for v in chosen], errors

    def step(self, q: Array, k: Array, v: Array, scale: float, window: int | None = None) -> Array:
        ops = self._ops
        out = super().step(q, k, v, scale, window)
        want = ops.to_numpy(out).astype(np.float64)
        for name, (k_trip, v_trip) in zip(self._names, self._trips, strict=True):
            keys, values = k_trip(k), v_trip(v)
            queries = np.arange(int(k.shape[2]))
            got = ops.to_numpy(attend_masked(ops, q, (keys, keys), (values, values), scale, queries, None))
            relative = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
            self._errors[name].append(float(relative.mean()))
        return out


def attention(model: Model, text: Text, chosen: Sequence[Variant]) -> list[Row]:
    """‖o − raw o‖ / ‖raw o‖ of each head's output vector, the mean over heads and positions of the first window, for
    the q, K and V of the raw model, every row coded, not even the query's own left raw. Mean, least and greatest over
    the layers."""
    config, ops = model.config, model.backend.ops
    errors: dict[str, list[float]] = {variant.name: [] for variant in chosen}
    layout = Layout(CODECS["raw"], CODECS["raw"], config.head_dim, config.head_dim)
    layers = [_ProbeLayer(ops, layer, layout, chosen, errors) for layer in range(config.num_layers)]
    spec = CacheSpec(
        mode=MODES["fp16"],
        num_layers=config.num_layers,
        num_q_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.params.dtype,
    )
    ids = text.window(text.starts[0])[: 2 * CHUNK]
    model.forward(ids[None], Cache(ops, spec, OnePassStorage(layers)))
    return [
        {
            "variant": name,
            "attention_error": float(np.mean(by_layer)),
            "least": min(by_layer),
            "greatest": max(by_layer),
            "worst_layer": int(np.argmax(by_layer)),
            "by_layer": by_layer,
        }
        for name, by_layer in errors.items()
    ]


# Greedy text


@dataclass(frozen=True, slots=True)
class _Answers:
    """Greedy tokens of each prompt."""

    ids: list[list[int]]

    @classmethod
    def of(cls, model: Model, text: Text, mode: str) -> _Answers:
        params = SamplingParams(max_tokens=NEW_TOKENS)
        answers = []
        for start in text.starts:
            generation = model.generate(text.window(start)[:PROMPT].tolist(), params, cache=model.new_cache(mode))
            "".join(generation)
            answers.append(generation.token_ids)
        return cls(answers)


def greedy(model: Model, text: Text, chosen: Sequence[Variant]) -> list[Row]:
    """The first step at which greedy text leaves the raw model's, on the first 512 tokens of each window; through the
    real cache, prompt in chunks. A text that never leaves counts as its length."""
    raw = _Answers.of(model, text, "fp16")
    rows = []
    for mode in _modes(chosen):
        steps = [
            next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
            for a, b in zip(raw.ids, _Answers.of(model, text, mode).ids, strict=True)
        ]
        rows.append({"variant": mode, "median_step": float(np.median(steps)), "steps": steps, "of": NEW_TOKENS})
    return rows


def _modes(chosen: Sequence[Variant]) -> list[str]:
    """Those that a real cache has."""
    return [variant.name for variant in chosen if variant.name in MODES and not variant.raw]


# A planted fact


def retrieval(model: Model, text: Text, chosen: Sequence[Variant]) -> list[Row]:
    """log-probability of a fact's answer, the fact planted at each of `DEPTHS` in a context of the first window, the
    cue at its end; raw beside mode, through the real cache, prompt by pages."""
    rows = []
    for depth in DEPTHS:
        prompt, answer = planted(model, text, depth)
        raw = answer_logprob(model, "fp16", prompt, answer)
        for mode in _modes(chosen):
            found = answer_logprob(model, mode, prompt, answer)
            rows.append(
                {
                    "variant": mode,
                    "context": len(prompt),
                    "depth": depth,
                    "raw_logprob": raw,
                    "logprob": found,
                    "change": found - raw,
                }
            )
    return rows


def planted(model: Model, text: Text, depth: float) -> tuple[list[int], list[int]]:
    """A prompt of the text's context with the fact at ``depth`` of it and the cue at its end; and the answer's ids."""
    fact, cue = (model.tokenizer.encode(words) for words in (FACT, f"\n\nRemember:{CUE}"))
    around = text.window(text.starts[0])[: text.context - len(fact) - len(cue)].tolist()
    at = round(depth * len(around))
    return [*around[:at], *fact, *around[at:], *cue], model.tokenizer.encode(ANSWER)


def answer_logprob(model: Model, mode: str, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Natural logarithm of the answer's probability after the prompt."""
    cache = model.new_cache(resolve_mode(mode))
    page = model.window.page_size
    scores = np.empty(0)
    for start in range(0, len(prompt), page):
        scores = model.forward(np.array([prompt[start : start + page]]), cache)[0, -1]
    cache.begin_decode()
    total = 0.0
    for i, token in enumerate(answer):
        wide = scores.astype(np.float64)
        top = wide.max()
        total += wide[token] - top - np.log(np.exp(wide - top).sum())
        if i + 1 < len(answer):
            scores = model.forward(np.array([[token]]), cache)[0, -1]
    return float(total)


PROBES: dict[str, Callable[[Model, Text, Sequence[Variant]], list[Row]]] = {
    "attention": attention,
    "greedy": greedy,
    "retrieval": retrieval,
}
