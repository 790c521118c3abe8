"""Finding, probing and loading a backend."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.errors import BackendError, InputError, UnsupportedError
from kvcore.ops import Ops
from kvcore.registry import Kernel

BACKENDS = ("reference", "metal", "cuda")
_PACKAGES = {"reference": "numpy", "metal": "mlx", "cuda": "torch"}


def no_pages(*_: Any, **__: Any) -> Any:
    """The paged storage of a backend without one; no kernel of such a backend asks for it."""
    raise UnsupportedError("this backend has no paged storage: use --kernels graph")


@dataclass(frozen=True, slots=True)
class Backend:
    """A loaded backend: its operations, where they run, and the kernels that it brings.

    ``default_dtype`` is the compute dtype where the user names none; None means the checkpoint's own.
    ``raise_on_nonfinite``: quantizing a NaN or an infinity is an error (the reference), not a counted zero row.
    ``prefill_step``: tokens of a prompt that run at once, where the user names no number.
    ``paged_storage(shape, attend=, make_fold=)`` makes the storage that kernels for pages work on.
    ``fused_ops()`` makes the same operations with kernels of the backend's own, None where it has none here.
    ``make_decoder(storage, run, draws, vocab, seen, begin=, commit=, uniform=, windows=, among=, graph=)``
    makes what decodes
    over that storage with sampling on the device, None where nothing does.
    ``make_group_decoder(run, inv_freq, vocab, most=)`` makes what steps up to ``most`` sequences of one pool with
    sampling on the device, None where nothing does.
    ``paged_pools(shape, budget, raw_pages=, make_fold=)`` makes pools for many of them, to be given as ``pools=``.
    ``free_memory`` gives the bytes that are free on a device with memory of its own. ``row_block``: a product of so
    many rows gives a row the same result whatever the other rows are; None where that is not promised.
    """

    name: str
    ops: Ops
    device: str
    arch: str
    versions: Mapping[str, str]
    default_dtype: str | None
    kernels: tuple[Kernel, ...] = ()
    notice: str | None = None
    raise_on_nonfinite: bool = False
    prefill_step: int = 512
    paged_storage: Callable[..., Any] = no_pages
    fused_ops: Callable[[], Ops] | None = None
    make_decoder: Callable[..., Any] | None = None
    make_group_decoder: Callable[..., Any] | None = None
    paged_pools: Callable[..., Any] = no_pages
    free_memory: Callable[[], int | None] = lambda: None
    row_block: int | None = None

    def describe(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.name} on {self.device} ({versions})"


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend can be loaded here; ``reason`` says why not and how to change that."""

    name: str
    available: bool
    reason: str | None = None
    backend: Backend | None = field(default=None, repr=False)


def load_backend(name: str, device: str | None = None) -> Backend:
    """Load a backend by name, or the best one for "auto".

    ``device``: None for the backend's own choice; for cuda "cuda", "cuda:1" or "cpu" (the same graph operations
    with torch on the CPU); for metal "cpu" or "gpu". Raises InputError for an unknown name, BackendError with what
    is missing, how to get it and which backends work here.
    """
    if name == "auto":
        if device is not None:
            raise InputError(f"--device {device} needs a backend by name: --backend {' or '.join(BACKENDS)}")
        return default_backend()
    if name not in BACKENDS:
        raise InputError(f"unknown backend '{name}': choose one of auto, {', '.join(BACKENDS)}")
    try:
        return _load(name, device)
    except BackendError as error:
        working = ", ".join(probe.name for probe in map(_probe_other, _others(name)) if probe.available)
        raise BackendError(f"{error}; backends that work here: {working}") from error


def default_backend() -> Backend:
    """cuda where there is an NVIDIA GPU, metal where there is Metal, else reference."""
    for name in ("cuda", "metal"):
        found = probe(name)
        if found.backend is not None and found.backend.device != "cpu":
            return found.backend
    return _load("reference", None)


def probe(name: str) -> Probe:
    """Try to load a backend, and say why where that fails."""
    try:
        return Probe(name, True, backend=_load(name, None))
    except BackendError as error:
        return Probe(name, False, str(error))


def available_backends() -> list[Probe]:
    return [probe(name) for name in BACKENDS]


def _others(name: str) -> list[str]:
    return [other for other in BACKENDS if other != name]


def _probe_other(name: str) -> Probe:
    """A cheap look for an error message: numpy is always there; another framework counts where it loads."""
    return Probe(name, True) if name == "reference" else probe(name)


def _load(name: str, device: str | None) -> Backend:
    package = _PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        raise BackendError(
            f"backend {name} needs the package {package}, which is not installed: pip install 'kvcore[{name}]'"
        )
    try:
        importlib.import_module(package)
        module = importlib.import_module(f"kvcore.backends.{name}")
    except Exception as error:
        raise BackendError(
            f"backend {name}: package {package} is installed but fails to import "
            f"({type(error).__name__}: {error}); reinstall it"
        ) from error
    backend: Backend = module.load(device)
    return backend
