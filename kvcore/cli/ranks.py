"""Which of several ranks this process is, and what the others than rank 0 do with a command."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from kvcore.cli.options import ParallelOptions
from kvcore.cli.terminal import note
from kvcore.parallel import check_launch, find_launch
from kvcore.runtime import Model

SAID_SECONDS = 2.0  # for rank 0 to say what is wrong before a launcher ends it because another rank has failed


def leads(options: ParallelOptions) -> bool:
    """Whether this process runs the command: a single one, or rank 0. InputError where the number of processes is not
    the one that was asked for."""
    launch = find_launch(os.environ)
    if launch is None or launch.rank == 0:
        check_launch(options.tensor_parallel, launch)
        return True
    return False


def work(load: Callable[[], object]) -> NoReturn:
    """Another rank: say nothing, read nothing, load this rank's share of the model and work for rank 0 to the end."""
    quiet = open(os.devnull, "w")  # noqa: SIM115  # for the rest of the process
    sys.stdout = sys.stderr = quiet
    try:
        load()
    except Exception:
        time.sleep(SAID_SECONDS)
        raise
    raise AssertionError("the model of another rank was returned")


def note_ranks(model: Model) -> None:
    """Say how the model is shared."""
    ranks = model.params.ranks
    if ranks.size > 1:
        note(
            f"tensor parallel: {ranks.size} ranks over {ranks.name}; each holds {model.config.num_heads} query and "
            f"{model.config.num_kv_heads} KV heads of a layer, and the cache's bytes are those of one rank"
        )
