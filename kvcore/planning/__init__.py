"""What a fleet would do: arrivals, prefill, decode and the cache's memory, simulated.

`simulate` takes a `Workload`, a `Fleet` and the `Rates` of one replica in one mode. Rates are measured (`fit`), or
computed from a model's shape (`floor_rates`), which is what no kernel beats.
"""

from __future__ import annotations

from kvcore.planning.fleet import Fleet, Summary, simulate, simulate_arrivals
from kvcore.planning.rates import Rates, Sample, fit, floor_rates, read_rates, share_of_rank
from kvcore.planning.workload import Lengths, Workload, parse_lengths

__all__ = [
    "Fleet",
    "Lengths",
    "Rates",
    "Sample",
    "Summary",
    "Workload",
    "fit",
    "floor_rates",
    "parse_lengths",
    "read_rates",
    "share_of_rank",
    "simulate",
    "simulate_arrivals",
]
