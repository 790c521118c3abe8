"""A cache whose operations are the Metal kernels, run on the CPU: the same life as on the graph."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from metal_shim import Shim
from oracle import SMALL, exact_attention, gaussian, new_cache, relative_error

from kvcore.attention import decide, default_registry, make_cache
from kvcore.backends import Backend, load_backend
from kvcore.backends.metal.attention import attend
from kvcore.backends.metal.capabilities import HEAD_DIMS, KERNELS, MAX_ROWS
from kvcore.backends.metal.encode import encode
from kvcore.cache import CacheSpec
from kvcore.errors import UnsupportedError
from kvcore.modes import MODES

SPEC = CacheSpec(MODES["turbo4"], 2, 4, 2, 64, "float32", SMALL)


@pytest.fixture
def shim() -> Shim:
    return Shim("random")


@pytest.fixture
def apple(host: Backend, shim: Shim) -> Backend:
    """The reference backend's arrays with the Metal kernels, as if on an Apple GPU."""
    run = {"encode": partial(encode, run=shim.run), "attend": partial(attend, run=shim.run)}
    kernels = tuple(
        replace(kernel, backend="reference", requires=(), load=lambda op=kernel.op: run[op]) for kernel in KERNELS
    )
    return replace(host, kernels=kernels, arch="applegpu_g16s", raise_on_nonfinite=False)


@pytest.mark.parametrize("mode", MODES)
def test_steps_folds_and_trims_are_those_of_the_graph(host: Backend, apple: Backend, shim: Shim, mode: str) -> None:
    """A prompt in chunks, the hand-over, steps that fold, a trim into the pages, a few rows at a time."""
    caches = [new_cache(backend, mode, layers=2, window=SMALL) for backend in (apple, host)]
    assert [d.kernel for d in caches[0].decisions] == ["encode-metal", "attend-metal"]
    k, v, q = (gaussian(1, heads, 160, 64, seed=seed) for seed, heads in enumerate((2, 2, 4)))
    at, launched = 0, shim.launches
    for count in (60, 40, 1, 1, 1, 4, MAX_ROWS, 1):
        part = slice(at, at + count)
        before = launched.get("combine", 0)
        for cache in caches:
            for layer in cache.layers:
                out = layer.step(q[:, :, part], k[:, :, part], v[:, :, part], 0.125)
                assert relative_error(out, exact_attention(host, layer, q[:, :, part], 0.125)) <= 1e-5
            cache.commit()
            if count == 40:
                cache.begin_decode()
            if count == 4:
                cache.trim(50)
        assert launched.get("combine", 0) - before == (2 if count <= MAX_ROWS else 0)
        at += count
    assert caches[0].stats() == caches[1].stats()
    assert (launched.get("encode", 0) > 0) == MODES[mode].quantized
    assert (launched.get("rotate", 0) > 0) == (mode == "turbo4")


def test_boundary_layers_stay_raw_under_the_same_kernels(host: Backend, apple: Backend) -> None:
    window = replace(SMALL, boundary_layers=1)
    cache = new_cache(apple, "turbo4", layers=3, window=window)
    k, v = gaussian(1, 2, 100, 64), gaussian(1, 2, 100, 64, seed=1)
    for layer in cache.layers:
        layer.append(k, v)
    cache.commit()
    q = gaussian(1, 4, 1, 64, seed=2)
    for layer, folded in zip(cache.layers, (0, 64, 0), strict=True):
        assert layer.rows_folded == folded
        assert relative_error(layer.attend(q, 0.125), exact_attention(host, layer, q, 0.125)) <= 1e-5


def test_a_row_that_is_not_finite_is_counted(apple: Backend) -> None:
    cache = new_cache(apple, "turbo4", window=SMALL)
    k = gaussian(1, 2, 100, 64)
    k[0, 1, 20, 5] = np.nan
    cache.layers[0].append(k, gaussian(1, 2, 100, 64, seed=1))
    cache.commit()
    assert cache.stats().nonfinite_rows == 1


# Decisions


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("mode", MODES)
def test_an_apple_gpu_gets_the_fused_kernels(apple: Backend, mode: str, dim: int, dtype: str) -> None:
    spec = replace(SPEC, mode=MODES[mode], head_dim=dim, dtype=dtype)
    for decision in decide(apple, default_registry(apple), spec, "fused"):
        assert (decision.kind, decision.storage, decision.rejected) == ("fused", "contiguous", ())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 112}, "head_dim 112: needs 64, 80, 96, 128 or 256"),
        ({"num_q_heads": 34}, "gqa_ratio 17: needs 1 to 16"),
        ({"v_head_dim": 128}, "v_head_dim 128: needs that of K, 64"),
    ],
)
def test_what_the_kernels_do_not_take_goes_to_the_graph_with_the_reason(
    apple: Backend, change: dict[str, int], reason: str
) -> None:
    spec = replace(SPEC, **change)
    attend_decision = make_cache(apple, spec).decisions[1]
    assert attend_decision.kernel == "attend-graph"
    assert attend_decision.rejected[0].reasons == (reason,)
    with pytest.raises(UnsupportedError, match=reason):
        make_cache(apple, spec, kernels="fused")


def test_more_query_rows_than_the_kernel_takes_are_announced(apple: Backend) -> None:
    decision = make_cache(apple, SPEC).decisions[1]
    assert decision.explain() == "attend: attend-metal (fused) up to 16 query rows, graph beyond"
    assert decision.to_dict()["max_rows"] == MAX_ROWS


def test_mlx_without_metal_takes_the_graph_and_says_why() -> None:
    pytest.importorskip("mlx")
    backend = load_backend("metal")
    if backend.device == "metal":
        pytest.skip("this machine has Metal")
    for decision in make_cache(backend, SPEC).decisions:
        assert decision.kind == "graph"
        assert decision.rejected[0].reasons == (f"arch {backend.arch}: needs an Apple GPU with Metal",)
    with pytest.raises(UnsupportedError, match=f"arch {backend.arch}: needs an Apple GPU with Metal"):
        make_cache(backend, SPEC, kernels="fused")
