"""torch on an NVIDIA GPU; `device="cpu"` runs the same graph operations with torch on the CPU.

`capabilities` can be imported without torch; whatever else is here needs it.
"""

from __future__ import annotations

from kvcore.backends.load import Backend


def load(device: str | None = None) -> Backend:
    """The backend on ``device``: see `kvcore.backends.load_backend`."""
    from kvcore.backends.cuda.device import load

    return load(device)
