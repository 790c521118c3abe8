"""Backends by name. A framework is imported when its backend is loaded, never before."""

from kvcore.backends.load import BACKENDS, Backend, available_backends, default_backend, load_backend, probe

__all__ = ["BACKENDS", "Backend", "available_backends", "default_backend", "load_backend", "probe"]
