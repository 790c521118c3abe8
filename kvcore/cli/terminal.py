"""Notes and progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvcore.cli.errors import one_line

Progress = Callable[[int, int], None]


def note(text: str) -> None:
    """One line on stderr."""
    print(f"kvcore: {one_line(text)}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A ``progress(done, total)`` that draws a bar, on a terminal only; the bar goes away at the end."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def mib(count: float) -> str:
    """Bytes in MiB or GiB, four digits."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
