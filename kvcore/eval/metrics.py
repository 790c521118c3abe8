"""From logits to figures: per position first, then means over positions with confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_BLOCK = 64  # positions at a time: bounds the workspace
_SAMPLES = 1000  # bootstrap resamples
_STRETCH = 32  # neighbouring positions that a resample keeps together, because they are correlated

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Positions:
    """One variant beside the raw model at each position of one window; float64 [T], the next token's entries NaN at
    the last position, where the window ends.

    kl        KL(raw ‖ variant) in nats
    same      1 where both have the same likeliest token
    nll_raw, nll   −log probability of the token that comes next, in the raw model and in the variant
    """

    kl: Floats
    same: Floats
    nll_raw: Floats
    nll: Floats

    @classmethod
    def joined(cls, parts: Sequence[Positions]) -> Positions:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def since(self, start: int) -> Positions:
        return Positions(self.kl[start:], self.same[start:], self.nll_raw[start:], self.nll[start:])

    def to_array(self) -> Floats:
        """[4, T], for a file."""
        return np.stack([self.kl, self.same, self.nll_raw, self.nll])

    @classmethod
    def from_array(cls, array: Floats) -> Positions:
        return cls(*array)


def compare(raw: np.ndarray, other: np.ndarray, following: np.ndarray) -> Positions:
    """``raw`` and ``other`` are float32 logits [T, vocab]; ``following`` int [T] the token after each, −1 for none."""
    blocks = range(0, len(raw), _BLOCK)
    return Positions.joined(
        [_compare(raw[at : at + _BLOCK], other[at : at + _BLOCK], following[at : at + _BLOCK]) for at in blocks]
    )


def _compare(raw: np.ndarray, other: np.ndarray, following: np.ndarray) -> Positions:
    """KL = log Σ p exp(d − m) with d = other − raw and m = Σ p d.

    Since Σ p (d − m) = 0 it is log1p(Σ p (exp(x) − 1 − x)) with x = d − m, a sum of terms that are not negative: no
    digits cancel, however close the two are.
    """
    wide = raw.astype(np.float64)
    difference = other - wide
    wide -= wide.max(-1, keepdims=True)
    p = np.exp(wide)
    total = p.sum(-1, keepdims=True)
    p /= total
    x = difference - (p * difference).sum(-1, keepdims=True)
    kl = np.log1p((p * (np.expm1(x) - x)).sum(-1))
    rows, known = np.arange(len(raw)), following >= 0
    token = np.where(known, following, 0)
    nll_raw = np.log(total[:, 0]) - wide[rows, token]
    nll = nll_raw - (x[rows, token] - kl)  # log q − log p = x − log Σ p exp(x)
    return Positions(
        kl=np.maximum(kl, 0.0),
        same=(raw.argmax(-1) == other.argmax(-1)).astype(np.float64),
        nll_raw=np.where(known, nll_raw, np.nan),
        nll=np.where(known, nll, np.nan),
    )


def summarize(windows: Sequence[Positions]) -> dict[str, float]:
    """The figures of one line, over all positions of ``windows``; intervals are 95%, by bootstrap over stretches.

    kl, kl_low, kl_high, kl_p99     nats
    top1, top1_low, top1_high       share of positions with the raw model's likeliest token
    ppl, ppl_raw, ppl_ratio, ppl_ratio_low, ppl_ratio_high
    rms_dp                          root mean square change in the probability of the token that comes next
    positions                       their number
    """
    every = Positions.joined(windows)
    known = ~np.isnan(every.nll)
    nll, nll_raw = every.nll[known], every.nll_raw[known]
    figures = {
        "kl": float(every.kl.mean()),
        "kl_p99": float(np.quantile(every.kl, 0.99)),
        "top1": float(every.same.mean()),
        "ppl": float(np.exp(nll.mean())),
        "ppl_raw": float(np.exp(nll_raw.mean())),
        "ppl_ratio": float(np.exp((nll - nll_raw).mean())),
        "rms_dp": float(np.sqrt(np.mean((np.exp(-nll) - np.exp(-nll_raw)) ** 2))),
        "positions": float(len(every.kl)),
    }
    for name, low, high in _intervals(windows):
        figures |= {f"{name}_low": low, f"{name}_high": high}
    return figures


def _intervals(windows: Sequence[Positions]) -> list[tuple[str, float, float]]:
    stretches = [stretch for window in windows for stretch in _stretches(window)]
    sums = np.array([[s.kl.sum(), s.same.sum(), np.nansum(s.nll - s.nll_raw)] for s in stretches])
    counts = np.array([[len(s.kl), len(s.kl), np.count_nonzero(~np.isnan(s.nll))] for s in stretches])
    drawn = np.random.default_rng(0).integers(0, len(stretches), (_SAMPLES, len(stretches)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    means[:, 2] = np.exp(means[:, 2])
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return [(name, float(low[i]), float(high[i])) for i, name in enumerate(("kl", "top1", "ppl_ratio"))]


def _stretches(window: Positions) -> list[Positions]:
    array = window.to_array()
    return [Positions.from_array(array[:, at : at + _STRETCH]) for at in range(0, array.shape[1], _STRETCH)]


def by_position(windows: Mapping[str, Sequence[Positions]], step: int = 64) -> dict[str, tuple[Floats, Floats]]:
    """For a plot: name -> (first positions of runs of ``step``, mean KL of each run over the windows)."""
    curves = {}
    for name, parts in windows.items():
        kl = np.mean([part.kl for part in parts], axis=0)
        starts = np.arange(0, len(kl), step)
        curves[name] = (starts.astype(np.float64), np.array([kl[at : at + step].mean() for at in starts]))
    return curves
