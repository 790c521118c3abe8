"""A model whose steps take as long as a device's would: it computes, and sleeps for the rest. As a program, its server.

paced.py MODEL PORT
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

import kvcore
from kvcore.engine import EngineConfig
from kvcore.planning import Rates
from kvcore.runtime import Model

CHUNK, BATCH = 128, 8
# Far more than the tiny model computes, so that other work on the machine changes little, and HTTP, which is not
# simulated and takes 0.03 to 0.1 s on two slow cores.
DEVICE = Rates(chunk=0.1, prompt_token=0.0024, prompt_pair=4e-6, step=0.24, sequence=0.016, context_token=6e-5)


@dataclass(frozen=True, slots=True)
class Paced(Model):
    def forward_ragged(self, ids: Sequence[np.ndarray], caches: Sequence[Any], **settings: Any) -> Any:
        begin = time.perf_counter()
        before = [cache.tokens for cache in caches]
        ran = Model.forward_ragged(self, ids, caches, **settings)
        if len(ids) == 1 and ids[0].shape[1] > 1:
            wanted = DEVICE.piece(before[0], ids[0].shape[1])
        else:
            wanted = DEVICE.decode(len(ids), sum(before))
        time.sleep(max(0.0, wanted - (time.perf_counter() - begin)))
        return ran


def load(path: str) -> Paced:
    model = kvcore.load(path, backend="reference", kv_cache_mode="turbo4")
    return Paced(**{field.name: getattr(model, field.name) for field in fields(model)})


def main(path: str, port: str) -> int:
    from kvcore.server.load import start
    from kvcore.server.metrics import Metrics
    from kvcore.server.run import listen, serve
    from kvcore.server.served import Defaults
    from kvcore.server.state import HttpSettings, ServerState

    config = EngineConfig(max_batch=BATCH, prefill_step=CHUNK, prefix_reuse=False)
    made = ServerState(HttpSettings(), Metrics())
    return serve(
        made,
        listen("127.0.0.1", int(port)),
        lambda: start(load(path), config, requested_mode="turbo4", names=(Path(path).name,), defaults=Defaults()),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
