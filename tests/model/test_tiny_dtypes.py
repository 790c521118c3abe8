"""Every file dtype in every compute dtype, mode and backend: it runs, stores what was asked, and stays close."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llamas import SMALL, divergence, in_mode, load_on, logits, random_ids, tiny_folder

import kvcore
from kvcore.backends import Backend
from kvcore.modes import MODES

DTYPES = ("float32", "float16", "bfloat16")
IDS = random_ids(80)  # with a window and pages of 32, one page is folded after 64 tokens
FOLDED = 32
# Mean KL to the same weights and mode in float32 on the reference; measured at most 6e-13, 3e-5 and 2.3e-4.
ROUNDING = {"float32": 1e-10, "float16": 6e-5, "bfloat16": 5e-4}

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_file = pytest.mark.parametrize("stored", DTYPES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {dtype: tiny_folder(tmp_path_factory.mktemp(dtype), dtype=dtype) for dtype in DTYPES}


@each_file
@each_dtype
def test_B34_every_mode_runs_in_every_dtype(
    backend: Backend, reference: Backend, folders: dict[str, Path], stored: str, dtype: str
) -> None:
    """The cache's planes have the dtype that was asked for, and rounding is all that the dtype changes."""
    model = load_on(backend, folders[stored], dtype=dtype, window=SMALL)
    wide = load_on(reference, folders[stored], dtype="float32", window=SMALL)
    for mode in MODES:
        cache = model.new_cache(mode)
        cache.begin_decode()
        got = logits(model, IDS, chunk=16, cache=cache)
        want = logits(in_mode(wide, mode), IDS, chunk=16, cache=begun(wide, mode))
        assert np.isfinite(got).all(), mode
        assert divergence(want, got).mean() <= ROUNDING[dtype], mode
        view = cache.layers[0].view()
        assert backend.ops.dtype(view.tail_k) == backend.ops.dtype(view.tail_v) == dtype
        assert cache.stats().rows_folded == (FOLDED if mode != "fp16" else 0)
        assert cache.stats().kv_bytes_raw == 2 * 80 * 2 * 2 * 64 * {"float32": 4}.get(dtype, 2)


def begun(model: kvcore.Model, mode: str) -> kvcore.Cache:
    cache = model.new_cache(mode)
    cache.begin_decode()
    return cache


@pytest.mark.parametrize("mode", ["fp16", "int8"])
def test_B35_float32_scales_with_bf16_compute(backend: Backend, tmp_path: Path, mode: str) -> None:
    """A quantized linear layer returns the compute dtype, so that writing to a 16-bit cache is no error."""
    folder = tiny_folder(tmp_path, dtype="float32", quantize={"bits": 4, "group_size": 64})
    model = load_on(backend, folder, dtype="bfloat16")
    cache = model.new_cache(mode)
    got = logits(model, random_ids(296), cache=cache)[-1:]
    for token in range(4):
        got = model.forward(np.array([[token + 5]]), cache)[0]
    assert got.dtype == np.float32
    assert np.isfinite(got).all()
    view = cache.layers[1].view()
    assert {backend.ops.dtype(x) for x in (view.tail_k, view.tail_v)} == {"bfloat16"}
    if mode == "int8":
        assert cache.stats().rows_folded == 128
        assert {backend.ops.dtype(x) for x in (view.sink_k, view.sink_v)} == {"bfloat16"}
        assert backend.ops.dtype(view.k_planes["codes"]) == "int8"
    q = backend.ops.zeros((1, 4, 1, 64), "bfloat16")
    assert backend.ops.dtype(cache.layers[1].attend(q, 0.125)) == "bfloat16"
    wide = load_on(backend, folder, dtype="float32")
    assert divergence(logits(wide, random_ids(296))[-1], logits(model, random_ids(296))[-1]) <= 5e-4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_B34_wider_weights_are_rounded_to_the_compute_dtype(
    backend: Backend, folders: dict[str, Path], dtype: str
) -> None:
    """So a float32 file computes as the file that was saved in that dtype."""
    wide, narrow = (load_on(backend, folders[stored], dtype=dtype) for stored in ("float32", dtype))
    np.testing.assert_array_equal(logits(wide, IDS), logits(narrow, IDS))


def test_B34_dtype_aliases_mean_the_dtypes(reference: Backend, folders: dict[str, Path]) -> None:
    for alias, dtype in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        model = load_on(reference, folders["float32"], dtype=alias)
        assert replace(model).new_cache().spec.dtype == dtype
