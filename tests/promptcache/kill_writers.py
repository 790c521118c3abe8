"""Kill writers of a prompt-cache file at random points.

`python kill_writers.py FILE TIMES` prints what was left as JSON.

A process of its own that forks, so that no other thread is there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from kvcore.promptcache.atomic import write_atomically
from kvcore.weights.safetensors import open_safetensors, write_safetensors

ROWS = 100_000


def write(path: Path, value: int) -> None:
    arrays = {f"layer.{i}": np.full((ROWS,), value, np.float32) for i in range(4)}
    write_atomically(path, lambda file: write_safetensors(file, arrays, {"value": str(value)}))


def read(path: Path) -> int:
    """The value that fills the file, from its first to its last number."""
    file = open_safetensors(path)
    (value,) = {int(x) for name in file.entries for x in np.unique(file.array(name))}
    assert len(file.entries) == 4
    return value


def main(path: Path, times: int) -> dict[str, int]:
    random.seed(0)
    write(path, 0)
    start = time.perf_counter()
    write(path, 0)
    usual = time.perf_counter() - start
    counts = {"killed": 0, "old": 0, "new": 0}
    current, most = 0, 0
    for number in range(1, times + 1):
        child = os.fork()
        if child == 0:
            write(path, number)
            signal.pause()
        time.sleep(random.uniform(0, 2 * usual))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = read(path)
        assert found in (current, number), (found, current, number)
        counts["killed"] += 1
        counts["new" if found == number else "old"] += 1
        current = found
        most = max(most, len(list(path.parent.iterdir())))
    write(path, times + 1)
    return counts | {"most_files": most, "files": len(list(path.parent.iterdir())), "last": read(path)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
