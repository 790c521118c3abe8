"""kvcore's server on Ray Serve: replicas that conversations return to.

    serve run kvcore.integrations.ray_serve:app model=FOLDER kv_cache_mode=turbo4 replicas=2

`app` makes the application; `build` makes it from settings in Python. An ingress takes HTTP requests and passes them to
the replica that holds their prefix; each replica runs the server of `kvcore serve` with its own engine.
"""

from __future__ import annotations

from kvcore.integrations.versions import require

LEAST, BELOW = "2.60", "2.61"  # tested with 2.60.0; Ray calls its request-router interface alpha
require("ray", LEAST, BELOW, "ray")

from kvcore.integrations.ray_serve.application import RaySettings, app, build, from_options, run  # noqa: E402
from kvcore.integrations.ray_serve.router import PrefixRouter  # noqa: E402
from kvcore.server.affinity import Affinity, affinity_key  # noqa: E402

__all__ = ["Affinity", "PrefixRouter", "RaySettings", "affinity_key", "app", "build", "from_options", "run"]
