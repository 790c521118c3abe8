"""`kvcore serve --ray`: replicas of the server on Ray Serve, on this machine or the cluster that RAY_ADDRESS names."""

from __future__ import annotations

import importlib
from dataclasses import fields
from typing import Any

from kvcore.cli.options import (
    BackendOptions,
    ModelOption,
    ModeOptions,
    ParallelOptions,
    RayOptions,
    ServeDefaultOptions,
    ServeOptions,
    WindowOptions,
)
from kvcore.cli.serve import check_options
from kvcore.cli.terminal import note
from kvcore.errors import InputError


def serve_ray(
    model: ModelOption,
    mode: ModeOptions,
    options: ServeOptions,
    defaults: ServeDefaultOptions,
    backend: BackendOptions,
    window: WindowOptions,
    parallel: ParallelOptions,
    replicas: RayOptions,
) -> None:
    """Deploy, and stay until a signal."""
    if parallel.tensor_parallel > 1:
        raise InputError(
            "--ray with --tensor-parallel: Ray starts one process for each replica, and ranks are started by torchrun; "
            "use one of the two"
        )
    if options.allowed_origins:
        raise InputError("--ray with --allowed-origins: Ray's proxy answers browsers' questions itself; leave it out")
    autoscaling = None if replicas.autoscale is None else _pairs(replicas.autoscale)
    check_options(model, mode, options, defaults, backend, window)
    # By name, as Ray's own command line does: nothing below imports an integration.
    integration: Any = importlib.import_module("kvcore.integrations.ray_serve")
    settings = integration.RaySettings(
        replicas=replicas.replicas,
        autoscaling=autoscaling,
        gpus=replicas.gpus_per_replica,
        ongoing=options.max_batch + options.max_queue,
        routing=replicas.routing,
    )
    groups = {"model": model, "mode": mode, "options": options, "defaults": defaults}
    application = integration.from_options(settings, **groups, backend=backend, window=window)
    note(f"starting replicas on Ray; listening on http://{options.host}:{options.port} when they are there")
    integration.run(application, options.host, options.port)


def check_unused(replicas: RayOptions) -> None:
    """InputError for settings of replicas without --ray."""
    given = [f"--{f.name.replace('_', '-')}" for f in fields(replicas) if getattr(replicas, f.name) != f.default]
    if given:
        raise InputError(f"{', '.join(given)}: belong to replicas on Ray Serve; give --ray too")


def _pairs(text: str) -> dict[str, float]:
    pairs = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError as error:
            raise InputError(f"--autoscale {text}: give pairs such as min_replicas=1,max_replicas=4") from error
        pairs[name.strip()] = int(number) if number.is_integer() else number
    return pairs
