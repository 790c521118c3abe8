"""Two pictures of the table. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.eval.metrics import Positions, by_position


def kl_against_bytes(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Mean KL with its interval over the bytes of a cache at the context; hollow without a window."""
    figure, axes = _figure()
    for row in rows:
        if row["kl"] <= 0 or not row["window"]:  # the noise floor is far below
            continue
        spread = [[row["kl"] - row["kl_low"]], [row["kl_high"] - row["kl"]]]
        fill = "none" if row["window"] == "none" else None
        axes.errorbar(row["bytes_at_context"], row["kl"], spread, fmt="o", markerfacecolor=fill, label=_label(row))
    axes.set(xlabel="bytes per token and KV head, raw rows included", ylabel="mean KL to the raw model (nats)")
    _save(figure, axes, path)


def kl_against_position(measured: Mapping[str, Sequence[Positions]], path: Path) -> None:
    """Mean KL of each run of 64 positions."""
    figure, axes = _figure()
    for name, (starts, kl) in by_position(measured).items():
        seen = kl > 1e-9
        if seen.any():
            axes.plot(starts[seen], kl[seen], marker=".", label=name)
    axes.set(xlabel="position", ylabel="mean KL to the raw model (nats)")
    _save(figure, axes, path)


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['variant']} [{row['window']}]"


def _figure() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(10, 6), layout="constrained")


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)
    from matplotlib import pyplot

    pyplot.close(figure)
