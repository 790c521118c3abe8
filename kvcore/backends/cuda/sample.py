"""Sampling on the device: the same steps as `kvcore.sampling`, in float32, for every sequence of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.backends.cuda.kernels.pick import likeliest


@dataclass(frozen=True, slots=True)
class Draw:
    """How to pick one sequence's tokens: `kvcore.sampling.SamplingParams` says what each means."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class DeviceSampler:
    """Picks tokens without a word to the host, so that a CUDA graph can hold it.

    ``seen``: the ids so far of each sequence, for the repetition penalty.
    """

    def __init__(self, draws: Sequence[Draw], vocab: int, device: str, seen: Sequence[Sequence[int]]) -> None:
        self.random = any(draw.temperature > 0 for draw in draws)
        in_order = [draw.top_k > 0 or draw.top_p < 1 for draw in draws]
        self._sorted = any(in_order)
        most = [draw.top_k or vocab for draw in draws]
        self._width = min(vocab, max(most))

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        # Greedy rows draw too, and their draw is not used.
        self._temperature = column([draw.temperature or 1.0 for draw in draws])
        self._greedy = column([draw.temperature == 0 for draw in draws], torch.bool)[:, 0]
        self._top_k, self._top_p = column(most, torch.int64), column([draw.top_p for draw in draws])
        self._in_order = column(in_order, torch.bool)
        self._min_p = column([draw.min_p for draw in draws])
        self._penalty = column([draw.repetition_penalty for draw in draws])
        self._seen: Tensor | None = None
        if any(draw.repetition_penalty != 1 for draw in draws):
            self._seen = torch.zeros(len(draws), vocab, dtype=torch.bool)
            for row, ids in enumerate(seen):
                self._seen[row, torch.tensor(list(ids), dtype=torch.int64)] = True
            self._seen = self._seen.to(device)

    def __call__(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """``logits`` float32 [B, vocab], ``uniform`` float32 [B] in [0, 1) -> ids int32 [B], -1 where logits are not
        finite."""
        if not self.random and self._seen is None and logits.is_cuda:
            return likeliest(logits)
        scores = self._penalized(logits)
        best, token = scores.max(-1)
        if self.random:
            drawn = self._draw((scores - best[:, None]) / self._temperature, uniform)
            token = torch.where(self._greedy, token, drawn)
        if self._seen is not None:
            self._seen.scatter_(1, token[:, None], True)
        return torch.where(torch.isfinite(best), token, -1).to(torch.int32)

    def _penalized(self, logits: Tensor) -> Tensor:
        if self._seen is None:
            return logits
        penalized = torch.where(logits > 0, logits / self._penalty, logits * self._penalty)
        return torch.where(self._seen, penalized, logits)

    def _draw(self, scores: Tensor, uniform: Tensor) -> Tensor:
        """By the inverse of the cumulative distribution, over candidates from the likeliest down where they are
        sorted, else by id."""
        order = None
        if self._sorted and self._width <= 1024:
            scores, order = torch.topk(scores, self._width)
        elif self._sorted:
            by_id = torch.arange(0, -scores.shape[1], -1, dtype=scores.dtype, device=scores.device)
            order = torch.sort(torch.where(self._in_order, scores, by_id), descending=True, stable=True).indices
            scores = scores.gather(1, order)
        probs = torch.exp(scores)
        if order is not None:
            rank = torch.arange(scores.shape[1], device=scores.device)
            probs = torch.where(rank < self._top_k, probs, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
            nucleus = (probs.cumsum(-1) - probs < self._top_p) | (self._top_p >= 1)
            probs = torch.where(nucleus, probs, 0.0)
        probs = torch.where(probs >= self._min_p * probs.amax(-1, keepdim=True), probs, 0.0)
        total = probs.cumsum(-1)
        index = (total <= uniform[:, None] * total[:, -1:]).sum(-1)
        # Rounding may leave nothing above; the last candidate that is not ruled out is right then.
        last = scores.shape[1] - 1 - (probs > 0).flip(-1).to(torch.int32).argmax(-1)
        index = torch.minimum(index, last)
        return index if order is None else order.gather(1, index[:, None])[:, 0]
