"""The baselines are what they are called: compared with the code that defines them, or by hand."""

from __future__ import annotations

import importlib.util

import gguf
import ml_dtypes
import numpy as np
import pytest
from oracle import gaussian, relative_mse

from kvcore.backends import Backend
from kvcore.eval import grids
from kvcore.eval.baselines import BASELINES, baseline_variant, mlx_affine
from kvcore.eval.codecs import product_codec, product_variant
from kvcore.eval.rows import RawRows
from kvcore.eval.trials import TRIALS, centred, channel_scaled
from kvcore.modes import MODES

ROWS = gaussian(1, 2, 128, 64, seed=3, rms=2.0) * np.linspace(0.1, 3, 64, dtype=np.float32)


def round_trip(backend: Backend, name: str, part: str = "k", rows: np.ndarray = ROWS) -> np.ndarray:
    codec = BASELINES[name][part == "v"]
    trip = codec.bind(backend.ops, 0, part, rows.shape[-1])
    return backend.ops.to_numpy(trip(backend.ops.asarray(rows)))


@pytest.mark.parametrize(("name", "kind"), [("llama-q8_0", "Q8_0"), ("llama-q4_0", "Q4_0")])
def test_llama_cpp_blocks_are_ggufs(backend: Backend, name: str, kind: str) -> None:
    """The gguf package's own quantizer, which llama.cpp keeps equal to its C code."""
    qtype = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(ROWS, qtype)
    want = gguf.quants.dequantize(packed, qtype)
    assert packed.shape[-1] == BASELINES[name][0].row_bytes(64, "float16")
    np.testing.assert_allclose(round_trip(backend, name), want, rtol=1e-6)


@pytest.mark.parametrize(("bits", "size"), [(4, 32), (4, 64), (8, 32), (8, 64)])
def test_affine_is_mlxs(backend: Backend, bits: int, size: int) -> None:
    if importlib.util.find_spec("mlx") is None:
        pytest.skip("the package mlx is not installed")
    import mlx.core as mx

    codes, scales, biases = mx.quantize(mx.array(ROWS.reshape(-1, 64)), group_size=size, bits=bits)
    want = np.array(mx.dequantize(codes, scales, biases, group_size=size, bits=bits)).reshape(ROWS.shape)
    got = backend.ops.to_numpy(mlx_affine(backend.ops, backend.ops.asarray(ROWS), bits, size))
    step = np.abs(np.array(scales)).max()
    off = np.abs(got - want)
    assert off.max() <= 1.01 * step, "at most a code apart, where rounding the scale to fp16 turns one over"
    assert np.quantile(off, 0.95) <= 0.02 * step if bits == 4 else np.quantile(off, 0.5) <= 0.2 * step


def test_e4m3_is_ml_dtypes(backend: Backend) -> None:
    x = np.concatenate([gaussian(4000, seed=1), gaussian(4000, seed=2) * 100, gaussian(4000, seed=3) * 0.01])
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    got = backend.ops.to_numpy(grids.e4m3(backend.ops, backend.ops.asarray(x)))
    np.testing.assert_array_equal(got, want)


def test_kivi_groups_tokens_for_k_and_channels_for_v(backend: Backend) -> None:
    for part, axis in (("k", 3), ("v", 4)):
        shape = (1, 2, 4, 32, 64, 1) if part == "k" else (1, 2, 128, 2, 32)
        groups = ROWS.reshape(shape)
        low, high = groups.min(axis, keepdims=True), groups.max(axis, keepdims=True)
        off = np.abs(round_trip(backend, "kivi-4bit-g32", part).reshape(shape) - groups)
        assert (off <= 0.51 * (high - low) / 15 + 2e-3).all()
        assert off.mean() > 0.2 * ((high - low) / 15).mean()


def test_a_group_cut_short_at_the_end(backend: Backend) -> None:
    whole = round_trip(backend, "kivi-4bit-g32", rows=ROWS[:, :, :96])
    cut = round_trip(backend, "kivi-4bit-g32", rows=ROWS[:, :, :80])
    assert cut.shape == (1, 2, 80, 64)
    np.testing.assert_array_equal(cut[:, :, :64], whole[:, :, :64])


@pytest.mark.parametrize("name", BASELINES)
def test_zeros_and_large_rows_come_back(backend: Backend, name: str) -> None:
    rows = np.zeros((1, 1, 32, 64), np.float32)
    np.testing.assert_array_equal(round_trip(backend, name, rows=rows), rows)
    rows = gaussian(1, 1, 32, 64, rms=1000.0)
    assert relative_mse(round_trip(backend, name, rows=rows), rows) < 0.02


BYTES = {  # per token and KV head at D = 64, K and V, counted by hand
    "llama-q8_0": 2 * 2 * 34,
    "llama-q4_0": 2 * 2 * 18,
    "mlx-8bit-g64": 2 * (64 + 4),
    "mlx-8bit-g32": 2 * (64 + 8),
    "mlx-4bit-g64": 2 * (32 + 4),
    "mlx-4bit-g32": 2 * (32 + 8),
    "kivi-4bit-g32": 2 * (32 + 8),
    "fp8-e4m3": 2 * (64 + 2),
}


def test_bytes_count_scales_and_zeros() -> None:
    assert {name: baseline_variant(name, RawRows()).row_bytes(64) for name in BASELINES} == BYTES
    assert product_variant(MODES["turbo4"], RawRows()).row_bytes(64) == 69
    assert product_variant(MODES["turbo4"], RawRows(page=32)).row_bytes(64) == 72
    assert product_variant(MODES["turbo4"], RawRows(page=1)).row_bytes(64) == 69
    assert product_variant(MODES["turbo3-asym"], RawRows()).row_bytes(128) == 306
    assert centred(product_codec("turbo4")).row_bytes(64, "float16") == 34 + 1


def test_bytes_at_a_context_are_those_of_a_cache() -> None:
    turbo4 = product_variant(MODES["turbo4"], RawRows())
    assert turbo4.cache_bytes(1024, 64) * 1024 == 896 * 69 + (128 + 4) * 256
    assert turbo4.cache_bytes(255, 64) == 256
    assert product_variant(MODES["turbo4"], RawRows.none()).cache_bytes(1024, 64) == 69


def test_centring_takes_a_common_offset_away(backend: Backend) -> None:
    rows = ROWS + 20 * gaussian(1, 2, 1, 64, seed=9)
    plain, moved = (
        codec.bind(backend.ops, 0, "k", 64)(backend.ops.asarray(rows))
        for codec in (product_codec("turbo4"), centred(product_codec("turbo4")))
    )
    errors = [((backend.ops.to_numpy(x) - rows) ** 2).mean() for x in (plain, moved)]
    assert errors[1] < errors[0] / 20


def test_scaling_channels_by_themselves_evens_their_relative_error(backend: Backend) -> None:
    trip = channel_scaled(product_codec("turbo4")).bind(backend.ops, 0, "k", 64)
    got = backend.ops.to_numpy(trip(backend.ops.asarray(ROWS)))
    relative = ((got - ROWS) ** 2).sum((0, 1, 2)) / (ROWS**2).sum((0, 1, 2))
    assert relative.max() < 3 * relative.min()


def test_a_fixed_scale_is_the_first_pages(backend: Backend) -> None:
    ops = backend.ops
    rows = np.concatenate([ROWS, 50 * ROWS[..., ::-1]], 2)
    fixed, own = (channel_scaled(product_codec("turbo4"), fixed=each).bind(ops, 0, "k", 64) for each in (True, False))
    whole = ops.to_numpy(fixed(ops.asarray(rows)))
    np.testing.assert_allclose(whole[:, :, :128], ops.to_numpy(own(ops.asarray(ROWS))), rtol=1e-4, atol=1e-4)
    later = ops.to_numpy(fixed(ops.asarray(rows[:, :, 128:])))
    np.testing.assert_allclose(whole[:, :, 128:], later, rtol=1e-4, atol=1e-3)
    assert relative_mse(whole, rows) > relative_mse(ops.to_numpy(own(ops.asarray(rows))), rows)


def test_every_trial_names_what_it_costs() -> None:
    dearer = {name: k.row_bytes(64, "float16") + v.row_bytes(64, "float16") for name, (k, v) in TRIALS.items()}
    base = {name: 68 if name.startswith("turbo4") else 100 for name in TRIALS}
    assert {name: dearer[name] - base[name] for name in TRIALS} == {
        "turbo4-plain": 0,
        "turbo4+centre-v": 2,
        "turbo4+centre-k-32": 4,
        "turbo4+scale-k-half": 2,
        "turbo4+scale-k-half-fixed": 1,
        "int8-turbo4+centre-v": 1,
    }
