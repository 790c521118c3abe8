"""MLX: Metal on Apple hardware, elsewhere MLX's own default device.

`capabilities` and the kernels' sources can be imported without MLX; what runs here needs it.
"""

from __future__ import annotations

from kvcore.backends.load import Backend


def load(device: str | None = None) -> Backend:
    """The backend on ``device``: see `kvcore.backends.load_backend`."""
    from kvcore.backends.metal.device import load

    return load(device)
