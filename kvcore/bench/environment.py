"""What a number was measured on."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from kvcore.backends import Backend
from kvcore.version import __version__


def describe(backend: Backend) -> dict[str, str]:
    """Date, commit, device and versions, as plain strings."""
    return {
        **machine(),
        "backend": backend.name,
        "device": backend.versions.get("gpu", backend.device),
        "arch": backend.arch,
        **backend.versions,
    }


def machine() -> dict[str, str]:
    """Date, commit, processor and Python."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "kvcore": __version__,
        "commit": commit(),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The checkout's commit, with + where it has changes; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.strip()
