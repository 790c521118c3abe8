"""The command line: `kvcore generate`, `chat`, `serve`, `doctor`, `advise`, `convert`, `eval`, `bench`.

Nothing here imports NumPy or a framework before a command needs it, so that `kvcore --help` stays fast.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

INTERRUPTED = 130


def main() -> None:
    """The console script, and `python -m kvcore`."""
    with contextlib.suppress(AttributeError):  # a replaced stdout has no encoding to fall back from
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run one command and return its exit code: 0, 1 for a failure, 2 for bad input, 130 when interrupted.

    An error is one line on stderr; ``--debug`` adds the traceback.
    """
    state = {"debug": False}  # a command's --debug sets it
    try:
        from kvcore.cli.app import app

        code = app(list(args), prog_name="kvcore", standalone_mode=False, obj=state)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, which is its right
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("kvcore: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        from kvcore.cli.errors import explain

        line, code = explain(error)
        if state["debug"]:
            traceback.print_exception(error)
        print(f"kvcore: error: {line}", file=sys.stderr)
        return code
    return code if isinstance(code, int) else 0
