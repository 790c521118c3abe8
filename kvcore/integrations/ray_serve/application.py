"""From settings to a Ray Serve application: an ingress, and replicas behind a router."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

import ray
from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from kvcore.cli.options import (
    BackendOptions,
    ModelOption,
    ModeOptions,
    ServeDefaultOptions,
    ServeOptions,
    WindowOptions,
)
from kvcore.cli.serve import check_options, served_from_options
from kvcore.errors import InputError
from kvcore.integrations.ray_serve.ingress import Ingress
from kvcore.integrations.ray_serve.replica import Replica
from kvcore.server.served import Served
from kvcore.server.state import HttpSettings

GROUPS = {
    "model": ModelOption,
    "mode": ModeOptions,
    "options": ServeOptions,
    "defaults": ServeDefaultOptions,
    "backend": BackendOptions,
    "window": WindowOptions,
}
ROUTERS = {
    "prefix": "kvcore.integrations.ray_serve.router:PrefixRouter",
    "balanced": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}


@dataclass(frozen=True, slots=True)
class RaySettings:
    """How replicas run.

    replicas        a number of them; or with ``autoscaling``, Ray's own settings (min_replicas, max_replicas,
                    target_ongoing_requests, ...), as many as Ray finds right
    gpus            of each replica, which Ray shows to it as the only ones
    cpus            of each replica
    ongoing         most requests that a replica has at a time, its queue included
    routing         "prefix": by conversation; "balanced": Ray's own, by load; or MODULE:CLASS, a router of your own
    health_seconds  between two health checks of a replica
    """

    replicas: int = 1
    autoscaling: Mapping[str, Any] | None = None
    gpus: float = 0.0
    cpus: float = 1.0
    ongoing: int = 320
    routing: str = "prefix"
    health_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise InputError(f"replicas {self.replicas}: must be 1 or more")
        if self.routing not in ROUTERS and ":" not in self.routing:
            raise InputError(f"routing {self.routing!r}: choose {', '.join(ROUTERS)} or MODULE:CLASS")

    def deployment(self) -> dict[str, Any]:
        """The options of Ray's deployment."""
        scale: dict[str, Any] = {"num_replicas": self.replicas}
        if self.autoscaling is not None:
            scale = {"num_replicas": None, "autoscaling_config": dict(self.autoscaling)}
        try:
            AutoscalingConfig(**(self.autoscaling or {}))
        except ValidationError as error:
            raise InputError(f"autoscaling {dict(self.autoscaling or {})}: {error.errors()[0]['msg']}") from error
        return scale | {
            "name": "kvcore",
            "max_ongoing_requests": self.ongoing,
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            "health_check_period_s": self.health_seconds,
            "health_check_timeout_s": 3 * self.health_seconds,
            "request_router_config": RequestRouterConfig(request_router_class=ROUTERS.get(self.routing, self.routing)),
        }


def build(
    load: Callable[[], Served], settings: RaySettings | None = None, http: HttpSettings | None = None
) -> Application:
    """An application whose replicas serve what ``load`` returns in each of them."""
    settings, http = settings or RaySettings(), http or HttpSettings()
    replicas = serve.deployment(Replica, **settings.deployment()).bind(load, http)
    ingress = serve.deployment(Ingress, name="ingress", max_ongoing_requests=10 * settings.ongoing)
    return ingress.options(ray_actor_options={"num_cpus": 0}).bind(replicas)


def app(args: Mapping[str, Any] | None = None) -> Application:
    """What `serve run kvcore.integrations.ray_serve:app NAME=VALUE ...` makes: names are those of the flags of
    `kvcore serve`, with underscores, and of `RaySettings`. InputError for others, and for values that do not fit."""
    given = dict(args or {})
    ray_fields = {each.name for each in fields(RaySettings)}
    settings = _make(RaySettings, {name: given.pop(name) for name in ray_fields & given.keys()})
    groups = {}
    for name, group in GROUPS.items():
        own = {each.name for each in fields(group)}
        groups[name] = _make(group, {key: given.pop(key) for key in own & given.keys()})
    if given:
        known = sorted(ray_fields.union(*({each.name for each in fields(group)} for group in GROUPS.values())))
        raise InputError(f"unknown settings {', '.join(sorted(given))}: choose from {', '.join(known)}")
    return from_options(settings, **groups)


def from_options(settings: RaySettings, **groups: Any) -> Application:
    """The application of `kvcore serve --ray`: option groups as in `GROUPS`."""
    check_options(**groups)  # here, not in each replica
    options: ServeOptions = groups["options"]
    http = HttpSettings(api_key=options.api_key, shutdown_timeout=options.shutdown_timeout)
    return build(Loader(groups), settings, http)


def run(application: Application, host: str, port: int) -> None:
    """Start Ray if it does not run, serve there, and stay until a signal. On SIGTERM answers that run end first, where
    this process has started Ray; a cluster goes on serving."""
    joined = ray.is_initialized()
    serve.start(http_options={"host": host, "port": port})
    own = not joined and ray._private.worker._global_node.is_head()
    told: list[int] = []

    def leave(number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        told.append(number)
        raise KeyboardInterrupt  # which Ray passes on, wherever it waits

    signal.signal(signal.SIGTERM, leave)  # Ray's own handler aborts
    try:
        serve.run(application, name="kvcore", blocking=True)
    except (KeyboardInterrupt, SystemExit):
        if not told:
            raise
        if own:
            serve.delete("kvcore")  # replicas end what they have begun; a shutdown alone would cut it off
            serve.shutdown()


@dataclass(frozen=True, slots=True)
class Loader:
    """Makes a replica's model and engine from option groups, in its own process."""

    groups: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Served:
        return served_from_options(**self.groups)


def _make(group: type[Any], given: Mapping[str, Any]) -> Any:
    """Text as it comes from a command line, or values as they come from a configuration file."""
    hints = get_type_hints(group)
    values = {}
    for name, value in given.items():
        try:
            values[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            raise InputError(f"{name}={value}: {error.errors()[0]['msg']}") from error
    return group(**values)
