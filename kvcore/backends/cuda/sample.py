"""Sampling on the device: the same steps as `kvcore.sampling`, in float32, for every sequence of a batch at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcore.backends.cuda.kernels.pick import likeliest

NOT_FINITE, UNDECIDED = -1, -2  # in the place of a token
MAX_ORDERED = 1024  # candidates that `sample_rows` puts in order
MAX_BIASES = 8


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

    def __call__(
        self, logits: Tensor, uniform: Tensor, chosen: Callable[[Tensor], Tensor] = lambda tokens: tokens
    ) -> Tensor:
        """``logits`` float32 [B, vocab], ``uniform`` float32 [B] in [0, 1) -> ids int32 [B], `NOT_FINITE` where the
        best is not finite. ``chosen`` has the last word on what was drawn."""
        if not self.random and self._seen is None and logits.is_cuda:
            return likeliest(logits)
        scores = self._penalized(logits)
        best, token = _best(scores)
        if self.random:
            drawn = self._draw((scores - best[:, None]) / self._temperature, uniform)
            token = chosen(torch.where(self._greedy, token, drawn))
        if self._seen is not None:
            self._seen.scatter_(1, token[:, None], True)
        return torch.where(torch.isfinite(best), token, NOT_FINITE).to(torch.int32)

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
        index = _first_above(total, probs, uniform * total[:, -1])
        return index if order is None else order.gather(1, index[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How to pick each row's token, in tensors [B]: one CUDA graph serves any mix.

    uniform                     float64 in [0, 1)
    top_k                       int32, 0 is off
    greedy, ordered             int32: whether the best is taken; whether there is a top_k or a top_p
    temperature, top_p, min_p   float32
    bias_ids, biases            int32 and float32 [B, MAX_BIASES], unused ones 0
    """

    uniform: Tensor
    top_k: Tensor
    greedy: Tensor
    ordered: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    bias_ids: Tensor
    biases: Tensor


@dataclass(frozen=True, slots=True)
class Mix:
    """What any row of a step asks for: the rest is left out of its launches."""

    random: bool = False
    ordered: bool = False
    biased: bool = False


def sample_rows(logits: Tensor, rows: RowSettings, mix: Mix) -> Tensor:
    """``logits`` float32 [B, vocab], which biases are added to -> ids int32 [B].

    `NOT_FINITE` where any logit of the row is not; `UNDECIDED` where the candidates from the likeliest down are more
    than `MAX_ORDERED`, which the host has to go through.
    """
    if mix.biased:
        logits.scatter_add_(1, rows.bias_ids.long(), rows.biases)
    best, token = _best(logits)
    least = _in_parts(logits).amin(-1).amin(-1)
    if mix.random:
        scores = (logits - best[:, None]) / rows.temperature[:, None]
        probs = torch.exp(scores)
        drawn = _draw_by_id(probs, rows)
        if mix.ordered:
            drawn = torch.where(rows.ordered > 0, _draw_in_order(scores, probs, rows), drawn)
        token = torch.where(rows.greedy > 0, token, drawn)
    finite = torch.isfinite(best) & torch.isfinite(least)
    return torch.where(finite, token, NOT_FINITE).to(torch.int32)


def _draw_by_id(probs: Tensor, rows: RowSettings) -> Tensor:
    """By the inverse of the cumulative distribution over ids: which part of them, and which in that part."""
    probs = torch.where(probs >= rows.min_p[:, None], probs, 0.0)  # the best one is 1
    parts = _in_parts(probs)
    sums = parts.sum(-1, dtype=torch.float64)
    totals = sums.cumsum(-1)
    target = rows.uniform * totals[:, -1]
    part = _first_above(totals, sums, target)
    inner = parts.gather(1, part[:, None, None].expand(-1, 1, parts.shape[2]))[:, 0].double()
    before = (totals - sums).gather(1, part[:, None])[:, 0]
    return part * parts.shape[2] + _first_above(inner.cumsum(-1), inner, target - before)


def _draw_in_order(scores: Tensor, probs: Tensor, rows: RowSettings) -> Tensor:
    """The same over candidates from the likeliest down, equal ones by id."""
    vocab = scores.shape[1]
    width = min(vocab, MAX_ORDERED)
    ids = torch.topk(scores, width, sorted=False).indices.sort(-1).values
    top, order = torch.sort(scores.gather(1, ids), dim=-1, descending=True, stable=True)
    best = torch.exp(top).double()
    rank, top_k = torch.arange(width, device=scores.device), rows.top_k[:, None]
    best = torch.where((rank < top_k) | (top_k == 0), best, 0.0)
    every = torch.where(rows.top_k > 0, best.sum(-1), probs.sum(-1, dtype=torch.float64))
    best = best / every[:, None]
    reached = best.cumsum(-1)
    top_p = rows.top_p[:, None]
    likely = best >= rows.min_p[:, None] * best[:, :1]
    enough = (rows.top_k > 0) | (reached[:, -1] >= rows.top_p) | ~likely[:, -1]
    best = torch.where(((reached - best < top_p) | (top_p >= 1)) & likely, best, 0.0)
    total = best.cumsum(-1)
    at = _first_above(total, best, rows.uniform * total[:, -1])
    token = ids.gather(1, order.gather(1, at[:, None]))[:, 0]
    return token if width == vocab else torch.where(enough, token, UNDECIDED)


def _first_above(totals: Tensor, steps: Tensor, target: Tensor) -> Tensor:
    """The first place of each row where the running ``totals`` of ``steps`` exceed ``target``, or, as rounding may
    leave none, the last one with a step."""
    last = steps.shape[1] - 1 - (steps > 0).flip(-1).to(torch.int32).argmax(-1)
    return torch.minimum((totals <= target[:, None]).sum(-1), last)


def _in_parts(x: Tensor) -> Tensor:
    """[B, parts, vocab / parts]: a GPU gives a row to one of its processors."""
    return x.reshape(len(x), next(n for n in (128, 96, 64, 48, 32, 16, 1) if x.shape[1] % n == 0), -1)


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The highest score of each row and its id, in two steps."""
    best, inner = _in_parts(scores).max(-1)
    top, part = best.max(-1)
    return top, part * (scores.shape[1] // best.shape[1]) + inner.gather(1, part[:, None])[:, 0]
