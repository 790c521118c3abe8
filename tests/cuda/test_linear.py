"""Products with affine weights as stored tiles, against float64: interpreted without a GPU, compiled on one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ml_dtypes import bfloat16

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from kvcore.backends.cuda.kernels.gate import gate_rows
from kvcore.backends.cuda.linear import WeightTiles, linear_tiles, reasons_against
from kvcore.backends.cuda.linear_config import LinearConfig, RowsConfig, WideConfig, choose_config
from kvcore.errors import UnsupportedError
from kvcore.weights.affine import pack
from kvcore.weights.types import AffineWeight, DenseWeight, Weight


def random_weight(out: int, inputs: int, bits: int, group: int, seed: int = 0) -> AffineWeight:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (out, inputs), np.uint8)
    scales = rng.uniform(0.5, 1.5, (out, inputs // group)).astype(np.float16) * np.float16(1 / 2**bits)
    biases = -scales * np.float16(2 ** (bits - 1)) + rng.normal(0, 0.01, scales.shape).astype(np.float16)
    return AffineWeight(pack(codes, bits), scales, biases.astype(np.float16), bits, group)


def tiles_of(*weights: Weight, device: str, dtype: torch.dtype = torch.float16) -> WeightTiles:
    return WeightTiles.create(weights, device, dtype)


def error(
    weight: AffineWeight, rows: int, device: str, config: LinearConfig | None = None, *, bias: bool = False
) -> float:
    """The worst ‖y − ref‖ / ‖ref‖ of a row."""
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.standard_normal((rows, weight.shape[1])).astype(np.float16)).to(device)
    added = torch.from_numpy(rng.standard_normal(weight.shape[0]).astype(np.float16)).to(device) if bias else None
    y = linear_tiles(x, tiles_of(weight, device=device), bias=added, config=config)
    ref = x.double().cpu().numpy() @ weight.dequantize().astype(np.float64).T
    if added is not None:
        ref += added.double().cpu().numpy()
    return float((np.linalg.norm(y.double().cpu().numpy() - ref, axis=1) / np.linalg.norm(ref, axis=1)).max())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_widths_and_groups(bits: int, group: int, device: str) -> None:
    assert error(random_weight(48, 384, bits, group), 1, device, RowsConfig(2, 1, 1)) < 1e-3


@pytest.mark.parametrize("rows", [2, 8, 9, 16, 19])
def test_several_rows(rows: int, device: str) -> None:
    """19 are more than this kernel takes at once."""
    assert error(random_weight(32, 256, 4, 64), rows, device, RowsConfig(4, 2, 2)) < 1e-3


SHARED, APART = WideConfig(4, 2, 2), WideConfig(2, 2, 1, apart=True)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_widths_and_groups_with_more_rows(bits: int, group: int, device: str) -> None:
    weight = random_weight(48, 384, bits, group)
    assert error(weight, 17, device, SHARED, bias=True) < 1e-3
    assert error(weight, 17, device, APART, bias=True) < 1e-3


@pytest.mark.parametrize("config", [None, SHARED, APART], ids=["chosen", "shared", "apart"])
@pytest.mark.parametrize("rows", [3, 16, 17, 33, 64, 65, 130])
def test_more_rows(rows: int, config: LinearConfig | None, device: str) -> None:
    """One launch, and several."""
    assert error(random_weight(32, 256, 4, 64), rows, device, config) < 1e-3


@pytest.mark.parametrize(("out", "inputs"), [(16, 64), (40, 320), (576, 1536)])
def test_shapes_that_do_not_divide(out: int, inputs: int, device: str) -> None:
    """Outputs that fill no tile, steps that the warps cannot share evenly, more warps and stages than steps."""
    assert error(random_weight(out, inputs, 4, 64), 1, device, bias=True) < 1e-3


@pytest.mark.parametrize("config", [SHARED, APART, WideConfig(8, 1, 4)])
@pytest.mark.parametrize(("out", "inputs"), [(16, 64), (40, 320), (104, 576)])
def test_shapes_that_do_not_divide_with_more_rows(out: int, inputs: int, config: LinearConfig, device: str) -> None:
    assert error(random_weight(out, inputs, 4, 64), 20, device, config, bias=True) < 1e-3


def relative(y: torch.Tensor, ref: np.ndarray) -> float:
    return float(np.linalg.norm(y.double().cpu().numpy() - ref) / np.linalg.norm(ref))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("config", [RowsConfig(2, 1, 1), SHARED, APART])
def test_a_norm_before_and_an_addition_after(config: LinearConfig, device: str) -> None:
    """Rows of very different size: each has a norm of its own."""
    weight, rng = random_weight(48, 320, 4, 64), np.random.default_rng(2)
    x = rng.standard_normal((3, 320)) * np.array([[0.01], [1.0], [300.0]])
    norm, added = rng.uniform(0.5, 2, 320), rng.standard_normal((3, 48))
    tensors = [torch.from_numpy(a.astype(np.float16)).to(device) for a in (x, norm, added)]
    x, norm, added = (t.double().cpu().numpy() for t in tensors)
    y = linear_tiles(
        tensors[0],
        tiles_of(weight, device=device),
        norm=(tensors[1], 1e-5),
        added=tensors[2],
        config=config,
    )
    normed = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * norm
    ref = normed @ weight.dequantize().astype(np.float64).T + added
    assert max(relative(y[i], ref[i]) for i in range(3)) < 1e-3


def test_matrices_one_after_the_other(device: str) -> None:
    weights = [random_weight(out, 128, 4, 64, seed) for seed, out in enumerate((48, 16, 16))]
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 128)).astype(np.float16)).to(device)
    y = linear_tiles(x, tiles_of(*weights, device=device), config=RowsConfig(2, 2, 1))
    ref = x.double().cpu().numpy() @ np.concatenate([w.dequantize() for w in weights]).astype(np.float64).T
    assert relative(y, ref) < 1e-3


@pytest.mark.parametrize("config", [RowsConfig(2, 2, 1), SHARED, APART])
def test_a_gated_activation(config: LinearConfig, device: str) -> None:
    gate, up = random_weight(40, 192, 4, 64, 1), random_weight(40, 192, 4, 64, 2)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 192)).astype(np.float16)).to(device)
    tiles = WeightTiles.create_gated(gate, up, device, torch.float16)
    y = linear_tiles(x, tiles, out_dtype=torch.float32, config=config)
    x64 = x.double().cpu().numpy()
    ref = silu(x64 @ gate.dequantize().astype(np.float64).T) * (x64 @ up.dequantize().astype(np.float64).T)
    assert y.shape == (5, 40)
    assert relative(y, ref) < 1e-3


def test_weights_that_differ_stay_apart() -> None:
    with pytest.raises(UnsupportedError, match=r"\(128, 4, 64, 'float16'\), \(128, 8, 64, 'float16'\)"):
        tiles_of(*(random_weight(16, 128, bits, 64) for bits in (4, 8)), device="cpu")


def test_a_scale_that_is_lost_shows(device: str) -> None:
    weight = random_weight(32, 256, 4, 64)
    tiles = tiles_of(weight, device=device)
    tiles.sides[..., 0] *= 1.1
    x = torch.ones(1, 256, dtype=torch.float16, device=device)
    ref = weight.dequantize().astype(np.float64).sum(1)
    off = np.linalg.norm(linear_tiles(x, tiles)[0].double().cpu().numpy() - ref) / np.linalg.norm(ref)
    assert off > 0.05


def test_bytes_are_those_of_the_stored_form(device: str) -> None:
    weight = random_weight(64, 512, 4, 64)
    assert tiles_of(weight, device=device).nbytes == weight.nbytes


def test_misfits_have_reasons() -> None:
    weight = random_weight(16, 96, 4, 32)
    assert reasons_against(weight, torch.float16) == ["96 inputs: need a multiple of 64"]
    with pytest.raises(UnsupportedError, match="96 inputs: need a multiple of 64; dequantize it"):
        tiles_of(weight, device="cpu")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_both_dtypes_at_every_width(bits: int, dtype: str, device: str) -> None:
    """Dense weights of the same dtype too; more rows than a launch takes."""
    weight: Weight = random_weight(40, 192, min(bits, 8), 64)
    if bits == 16:
        weight = DenseWeight(np.random.default_rng(3).standard_normal((40, 192)).astype(np.float32))
    tiles = tiles_of(weight, device=device, dtype=getattr(torch, dtype))
    assert tiles.bits == bits
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((19, 192))).to(device, getattr(torch, dtype))
    y = linear_tiles(x, tiles, out_dtype=torch.float32, config=RowsConfig(2, 2, 1))
    dense = tiles.rows(None, torch.float32).double().cpu().numpy()
    # Nibbles in float16 carry up to 1024 too much through the float32 sums.
    assert relative(y, x.double().cpu().numpy() @ dense.T) < (5e-5 if (bits, dtype) == (4, "float16") else 1e-5)
    want = weight.dequantize()
    if bits == 16:
        want = torch.from_numpy(want).to(getattr(torch, dtype)).double().numpy()
    assert np.abs(dense - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sides", ["float16", "bfloat16"])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_numbers_of_the_wide_kernel_are_rounded_once(bits: int, sides: str, dtype: str, device: str) -> None:
    """What it multiplies is what a dense product in that dtype would; a few numbers may round the other way."""
    kind = getattr(torch, dtype)
    weight: Weight = random_weight(40, 192, min(bits, 8), 64)
    if bits == 16:
        weight = DenseWeight(np.random.default_rng(3).standard_normal((40, 192)).astype(np.float32))
    elif sides == "bfloat16":
        weight = replace(weight, scales=weight.scales.astype(bfloat16), biases=weight.biases.astype(bfloat16))
    tiles = tiles_of(weight, device=device, dtype=kind)
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((33, 192))).to(device, kind)
    ref = x.double().cpu().numpy() @ tiles.rows(None, kind).double().cpu().numpy().T
    for config in (SHARED, APART):
        assert relative(linear_tiles(x, tiles, out_dtype=torch.float32, config=config), ref) < 2e-5


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [3, 6])
def test_rows_of_a_matrix(bits: int, group: int, device: str) -> None:
    weight = random_weight(40, 2176, bits, group)  # more inputs than a program takes
    ids = torch.tensor([[0, 39, 8], [17, 17, 31]], device=device)
    got = tiles_of(weight, device=device).rows(ids, torch.float32)
    assert got.shape == (2, 3, 2176)
    assert np.allclose(got.cpu().numpy(), weight.dequantize()[ids.cpu().numpy()], atol=1e-6)


def test_rows_of_a_gate_come_before_those_of_up(device: str) -> None:
    gate, up = random_weight(24, 128, 8, 64, 1), random_weight(24, 128, 8, 64, 2)
    got = WeightTiles.create_gated(gate, up, device, torch.float16).rows(None, torch.float32)
    assert np.allclose(got.cpu().numpy(), np.concatenate([gate.dequantize(), up.dequantize()]), atol=1e-6)


@pytest.mark.parametrize("config", [RowsConfig(2, 2, 1), SHARED, APART])
def test_a_gated_activation_with_biases(config: LinearConfig, device: str) -> None:
    rng = np.random.default_rng(5)
    gate, up = (DenseWeight(rng.standard_normal((24, 128)).astype(np.float32) / 8) for _ in range(2))
    x = torch.from_numpy(rng.standard_normal((3, 128)).astype(np.float16)).to(device)
    bias = torch.from_numpy(rng.standard_normal(48).astype(np.float16)).to(device)
    tiles = WeightTiles.create_gated(gate, up, device, torch.float16)
    y = linear_tiles(x, tiles, bias=bias, out_dtype=torch.float32, config=config)
    both = x.double().cpu().numpy() @ tiles.rows(None, torch.float64).cpu().numpy().T + bias.double().cpu().numpy()
    assert relative(y, silu(both[:, :24]) * both[:, 24:]) < 1e-5


def test_a_gate_over_many_rows(device: str) -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 3, 4100)) * 4).to(device, torch.float16)
    gate, up = x.double().cpu().numpy()[..., :2050], x.double().cpu().numpy()[..., 2050:]
    assert relative(gate_rows(x), silu(gate) * up) < 1e-3


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32, 33, 64, 200])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("tiles", [1, 256, 384, 1792, 8016])
def test_a_config_takes_the_rows_that_it_is_chosen_for(tiles: int, bits: int, rows: int) -> None:
    """One launch for up to 64 rows; and one row of codes, but for the largest product, has its norm in the launch."""
    for chunks in (1, 64, 224):
        for normed in (False, True):
            config = choose_config(tiles, chunks, bits, rows, normed=normed, processors=132)
            assert config.max_rows >= min(rows, 64)
            if rows == 1 and tiles < 8016:
                assert isinstance(config, RowsConfig)
