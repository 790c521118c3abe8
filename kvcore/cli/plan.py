"""`kvcore advise --rps`: a fleet under load, simulated in each mode."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from typing import Any

from kvcore.advise import Plan, shape_of, unsupported
from kvcore.cli.advise import Source, read_plan
from kvcore.cli.options import AdviseOptions, CommonOptions, ParallelOptions, PlanOptions, WindowOptions
from kvcore.errors import InputError
from kvcore.layout.footprint import peak_live_bytes
from kvcore.models.shard import check_heads
from kvcore.modes import MODES, Mode
from kvcore.planning import (
    Fleet,
    Rates,
    Summary,
    Workload,
    floor_rates,
    parse_lengths,
    read_rates,
    share_of_rank,
    simulate,
)

COLUMNS = ("mode", "TTFT p50", "p90", "p99", "gap p50", "p90", "p99", "tok/s", "busy", "batch")


def plan(
    options: AdviseOptions,
    fleet: PlanOptions,
    parallel: ParallelOptions,
    window: WindowOptions,
    common: CommonOptions,
) -> None:
    """Print a row per mode."""
    source, shape_plan = read_plan(options, window)
    ranks = parallel.tensor_parallel
    check_heads(shape_plan.shape.num_kv_heads, shape_plan.shape.num_heads, ranks)
    _check(fleet)
    if options.context is not None or options.batch != AdviseOptions().batch:
        raise InputError("--context and --batch with --rps: lengths are --prompt-lengths and --output-lengths there")
    workload = _workload(fleet, shape_plan.shape.max_position)
    machines = _fleet(fleet, ranks, shape_plan)
    measured = None if fleet.rates is None else read_rates(fleet.rates)
    results: dict[str, Summary] = {}
    used: dict[str, Rates] = {}
    for mode in MODES.values():
        if unsupported(shape_plan.shape, mode) or (measured is not None and mode.name not in measured):
            continue
        used[mode.name] = measured[mode.name] if measured is not None else _floor(shape_plan, mode, fleet, ranks)
        results[mode.name] = simulate(workload, machines, used[mode.name], _bytes_of(shape_plan, mode, ranks))
    if not results:
        raise InputError(f"--rates {fleet.rates}: none of its modes can store this model's heads")
    if common.json:
        print(json.dumps(_report(source, workload, machines, fleet, used, results), indent=2))
    else:
        head = _heading(source, shape_plan, workload, machines)
        print("\n".join([*head, "", *_table(results, machines, fleet), "", *_remarks(results, fleet, machines)]))


def check_unused(fleet: PlanOptions, parallel: ParallelOptions) -> None:
    """InputError for settings of a fleet without --rps, which asks for one."""
    given = [f"--{f.name.replace('_', '-')}" for f in fields(fleet) if getattr(fleet, f.name) != f.default]
    given += ["--tensor-parallel"] if parallel.tensor_parallel != 1 else []
    if given:
        raise InputError(f"{', '.join(given)}: belong to the simulation of a fleet; give --rps too")


def _check(fleet: PlanOptions) -> None:
    """InputError for a number that is none."""
    for name in ("compute", "link_latency", "cost_per_hour", "rps"):
        value = getattr(fleet, name)
        low_ok = name in ("link_latency", "cost_per_hour")
        if value is not None and not (math.isfinite(value) and (value > 0 or (low_ok and value == 0))):
            raise InputError(f"--{name.replace('_', '-')} {value}: must be {'0 or more' if low_ok else 'above 0'}")


def _workload(fleet: PlanOptions, max_position: int) -> Workload:
    assert fleet.rps is not None
    workload = Workload(
        rate=fleet.rps,
        prompts=parse_lengths("--prompt-lengths", fleet.prompt_lengths),
        outputs=parse_lengths("--output-lengths", fleet.output_lengths),
        requests=fleet.requests or max(2000, 20 * fleet.replicas),
        seed=fleet.seed,
    )
    _, prompts, outputs = workload.draw()
    if (longest := int((prompts + outputs).max())) > max_position:
        raise InputError(f"the longest request has {longest} tokens, the model's context holds {max_position}")
    return workload


def _fleet(fleet: PlanOptions, ranks: int, shape_plan: Plan) -> Fleet:
    """The memory is that of one device; the fullest rank decides, which holds its share of weights and KV heads."""
    memory = None if shape_plan.memory is None else int(shape_plan.memory - shape_plan.weight_bytes / ranks)
    return Fleet(fleet.replicas, ranks, memory, fleet.max_batch, fleet.prefill_step_size)


def _floor(shape_plan: Plan, mode: Mode, fleet: PlanOptions, ranks: int) -> Rates:
    link = fleet.link_latency * 1e-6
    return floor_rates(shape_plan, mode, ranks=ranks, flops=fleet.compute * 1e12, link_seconds=link)


def _bytes_of(shape_plan: Plan, mode: Mode, ranks: int) -> Any:
    share, shape = share_of_rank(shape_plan.shape, ranks), shape_of(shape_plan, mode)
    return lambda tokens: int(peak_live_bytes(shape, tokens) * share)


def _heading(source: Source, shape_plan: Plan, workload: Workload, machines: Fleet) -> list[str]:
    each = f" of {machines.devices} devices" if machines.devices > 1 else ""
    memory = "without a limit" if machines.memory is None else f"{machines.memory / 2**30:.2f} GiB of a device"
    return [
        f"{source.name}: {machines.replicas} replicas{each}, batches up to {machines.max_batch}, "
        f"prefill {machines.chunk} tokens at a time, memory for the cache: {memory}",
        f"load: {workload.rate:g} requests/s (Poisson, seed {workload.seed}), {workload.requests} of them; "
        f"mean prompt {workload.prompts.mean:.0f}, mean answer {workload.outputs.mean:.0f} tokens; "
        f"weights {shape_plan.bits_per_weight:.2f} bits, raw rows in {shape_plan.dtype}",
    ]


def _table(results: dict[str, Summary], machines: Fleet, fleet: PlanOptions) -> list[str]:
    titles = [*COLUMNS, *(["cost/Mtok"] if fleet.cost_per_hour is not None else [])]
    rows = [titles]
    for mode, found in results.items():
        row = [f"{mode}{' *' if found.overloaded else ''}"]
        row += [_time(value) for value in (*found.time_to_first_token, *found.gap)]
        row += [f"{found.tokens_per_second:,.0f}", f"{found.busy:.0%}", f"{found.batch:.1f}"]
        if fleet.cost_per_hour is not None:
            row.append(f"{found.cost_per_million_tokens(machines, fleet.cost_per_hour):.3f}")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _remarks(results: dict[str, Summary], fleet: PlanOptions, machines: Fleet) -> list[str]:
    remarks = ["TTFT: time to the first token, waiting included. gap: time between two tokens of an answer."]
    if fleet.rates is None:
        remarks.append(
            f"Rates are floors, not measurements: bytes over the bandwidth, {fleet.compute:g} TFLOP/s in prefill. "
            "A real engine is slower; --rates takes measured ones."
        )
    else:
        remarks.append(f"Rates: {fleet.rates}.")
    if any(found.overloaded for found in results.values()):
        remarks.append("* more requests come than are served: waiting grows as long as the load lasts.")
    refused = {mode: found.refused for mode, found in results.items() if found.refused}
    if refused:
        said = ", ".join(f"{mode} {count}" for mode, count in refused.items())
        remarks.append(f"Requests that a replica can never hold, left out: {said}.")
    if fleet.cost_per_hour is not None:
        total = machines.replicas * machines.devices
        remarks.append(
            f"cost/Mtok: of a million tokens of answers; {total} devices at {fleet.cost_per_hour:g} an hour."
        )
    remarks.append("Not simulated: reuse of prompts, failures, requests that are cancelled.")
    return remarks


def _report(
    source: Source,
    workload: Workload,
    machines: Fleet,
    fleet: PlanOptions,
    used: dict[str, Rates],
    results: dict[str, Summary],
) -> dict[str, Any]:
    modes = {}
    for mode, found in results.items():
        modes[mode] = asdict(found) | {"rates": asdict(used[mode])}
        if fleet.cost_per_hour is not None:
            modes[mode]["cost_per_million_tokens"] = found.cost_per_million_tokens(machines, fleet.cost_per_hour)
    return {
        "model": source.name,
        "workload": asdict(workload),
        "fleet": asdict(machines),
        "rates": fleet.rates or "floors",
        "modes": modes,
    }
