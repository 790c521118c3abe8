"""Policies of a cache's rows: which stay raw and when others fold, and how many may live."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.errors import InputError


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """The first ``sink_tokens`` and the newest ``recent_tokens`` rows stay raw; rows fold ``page_size`` at a time.

    The first and the last ``boundary_layers`` layers stay raw altogether.
    """

    sink_tokens: int = 4
    recent_tokens: int = 128
    page_size: int = 128
    boundary_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("sink_tokens", "recent_tokens", "boundary_layers"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} {getattr(self, name)}: must be 0 or more")
        if self.page_size < 1:
            raise InputError(f"page_size {self.page_size}: must be 1 or more")
        if self.sink_tokens > self.page_size:
            raise InputError(
                f"sink_tokens {self.sink_tokens}: must not exceed page_size {self.page_size}, "
                "because sinks are rows of the first page"
            )

    def foldable(self, tail_rows: int) -> int:
        """How many of the oldest raw rows fold now: whole pages, so that ``recent_tokens`` or more stay raw."""
        return max(0, (tail_rows - self.recent_tokens) // self.page_size) * self.page_size

    def folded_after(self, tokens: int) -> int:
        """Folded rows after ``tokens`` tokens without trims, however they were chunked."""
        return self.foldable(tokens)

    def is_raw_layer(self, layer: int, num_layers: int) -> bool:
        return layer < self.boundary_layers or layer >= num_layers - self.boundary_layers


DEFAULT_KEEP = 4


@dataclass(frozen=True, slots=True)
class Cap:
    """At most ``tokens`` rows live: the first ``keep`` and the newest.

    A query at live row t sees the rows j < ``keep`` and t - ``window`` < j <= t, in prefill as in decode.
    """

    tokens: int
    keep: int = DEFAULT_KEEP

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError(f"max_kv_size {self.tokens}: must be 1 or more")
        if self.keep < 0:
            raise InputError(f"keep {self.keep}: must be 0 or more")
        if self.keep >= self.tokens:
            raise InputError(
                f"keep {self.keep}: must be below max_kv_size {self.tokens}, so that newer tokens have room"
            )

    @property
    def window(self) -> int:
        """The newest rows that a query sees, its own included, beside the kept ones."""
        return self.tokens - self.keep

    def never_folds(self, window: WindowPolicy) -> bool:
        """Whether every row stays raw: the raw tail never gets long enough to fold."""
        return self.tokens < window.sink_tokens + window.recent_tokens + window.page_size


def narrower(cap: Cap | None, window: int | None) -> Cap | None:
    """The cap of a cache whose layers all slide, the widest by ``window``: rows that no layer sees need not live."""
    if window is None or (cap is not None and cap.window < window):
        return cap
    return Cap(window, 0)


def visible(cap: Cap | None, window: int | None, tokens: int) -> tuple[int | None, int]:
    """What queries see of ``tokens`` live rows in a layer with a sliding ``window`` of its own, under a ``cap``: the
    newest so many rows up to their own (None: all), and the first so many.

    The narrower of the two windows decides; kept rows are those of the cap's.
    """
    if cap is not None and tokens > cap.tokens and (window is None or cap.window < window):
        return cap.window, cap.keep
    return (None, 0) if window is None or tokens <= window else (window, 0)
