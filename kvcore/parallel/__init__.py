"""Several processes, the ranks, that share one model: started by torchrun or mlx.launch.

Rank 0 decides everything: it runs the command, samples, and tells the others what to do with their shares
(`commands`). A monitor beside the collectives ends every rank when one ends, so that nobody waits for it.
"""

from __future__ import annotations

from kvcore.parallel.join import Ranks, join
from kvcore.parallel.launch import Launch, check_launch, find_launch
from kvcore.parallel.leader import Leader, RankedCache
from kvcore.parallel.worker import Worker, follow

__all__ = ["Launch", "Leader", "RankedCache", "Ranks", "Worker", "check_launch", "find_launch", "follow", "join"]
