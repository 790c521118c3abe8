"""Kernels under every schedule: what comes out must not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from metal_shim import SCHEDULES, Recorder, Shim, compile_all
from oracle import relative_error, to_numpy

from kvcore.backends import Backend
from kvcore.backends.metal import attention
from kvcore.backends.metal.attention import attend
from kvcore.backends.metal.encode import encode
from kvcore.backends.metal.launch import Run
from kvcore.layout import CODECS, KVView, Rotation


def compile_for(calls: Iterable[Callable[[Run], Any]]) -> None:
    """Compile at once what ``calls`` will launch."""
    recorder = Recorder()
    for call in calls:
        call(recorder.run)
    compile_all(recorder.keys)


def attended(host: Backend, q: np.ndarray, view: KVView, scale: float, window: int | None = None) -> np.ndarray:
    """Attention by the Metal kernels: the same bits under all schedules, and close to it where splits are long."""
    runs = [Shim(schedule, seed=7).run for schedule in SCHEDULES]
    outs = [np.asarray(attend(host.ops, q, view, scale, window, run)) for run in runs]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "THREADGROUPS", 1)
        long = np.asarray(attend(host.ops, q, view, scale, window, runs[-1]))
    if np.isfinite(outs[0]).all() and outs[0].any():
        rounding = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[outs[0].dtype.name]
        assert relative_error(long, outs[0].astype(np.float64)) <= rounding
    return outs[0]


def encoded(
    host: Backend, codec: str, rows: np.ndarray, *, layer: int = 0, part: str = "k", centred: bool = False
) -> dict[str, np.ndarray]:
    """Planes by the Metal kernel, the same under all schedules."""
    rotation, stored = rotation_of(host, codec, rows.shape[-1], layer, part), replace(CODECS[codec], centred=centred)
    found = [
        to_numpy(host.ops, encode(host.ops, stored, rows, rotation, Shim(schedule, seed=7).run))
        for schedule in SCHEDULES
    ]
    for planes in found[1:]:
        for name, plane in planes.items():
            np.testing.assert_array_equal(plane, found[0][name])
    return found[0]


def rotation_of(host: Backend, codec: str, dim: int, layer: int = 0, part: str = "k") -> Rotation | None:
    return Rotation.create(host.ops, layer, part, dim) if CODECS[codec].codebook else None
