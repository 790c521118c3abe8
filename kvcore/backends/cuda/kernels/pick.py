"""The likeliest token of each row of logits, in two launches: one processor alone would read a row for long."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PARTS = 128  # programs that share a row
BLOCK = 2048


@triton.jit
def _first_best(best, at):
    """The highest value and the lowest id that has it."""
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, at, 2147483647), 0)


@triton.jit
def best_of_parts(LOGITS, BEST, AT, stride, VOCAB: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (PARTS, rows)."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    SIZE: tl.constexpr = (VOCAB + PARTS - 1) // PARTS
    top, found = -float("inf"), 2147483647
    bad = 0
    for begin in range(0, SIZE, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        id = part * SIZE + i
        inside = (i < SIZE) & (id < VOCAB)
        x = tl.load(LOGITS + row * stride + id, mask=inside, other=-float("inf")).to(tl.float32)
        bad += tl.sum((inside & ((x != x) | (x == float("inf")))).to(tl.int32), 0)
        best, at = _first_best(x, id)
        found = tl.where(best > top, at, found)
        top = tl.maximum(top, best)
    tl.store(BEST + row * PARTS + part, tl.where(bad > 0, float("inf"), top))
    tl.store(AT + row * PARTS + part, found)


@triton.jit
def best_of_row(BEST, AT, TOKEN, PARTS: tl.constexpr):
    """Grid (rows): -1 where a logit is not finite, or none is."""
    row = tl.program_id(0)
    i = tl.arange(0, PARTS)
    best = tl.load(BEST + row * PARTS + i)
    top, at = _first_best(best, tl.load(AT + row * PARTS + i))
    tl.store(TOKEN + row, tl.where(tl.abs(top) < float("inf"), at, -1))


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """logits [B, vocab] -> ids int32 [B]; the lowest of equals, -1 for a row with a NaN or an infinity above all."""
    rows, vocab = logits.shape
    best = torch.empty(rows, PARTS, device=logits.device)
    at = torch.empty(rows, PARTS, dtype=torch.int32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int32, device=logits.device)
    best_of_parts[(PARTS, rows)](logits, best, at, logits.stride(0), VOCAB=vocab, PARTS=PARTS, BLOCK=BLOCK)
    best_of_row[(rows,)](best, at, token, PARTS=PARTS)
    return token
