"""The shape of one layer's attention in a decode step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """``batch`` sequences of ``tokens`` tokens; heads as in one layer of a model."""

    batch: int
    tokens: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens} {self.q_heads}/{self.kv_heads} D{self.head_dim}"
