"""Products with affine weights as stored tiles, against float64: interpreted without a GPU, compiled on one."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from kvcore.backends.cuda.affine import AffineTiles, LinearConfig, linear_tiles, reasons_against
from kvcore.errors import UnsupportedError
from kvcore.weights.affine import pack
from kvcore.weights.types import AffineWeight


def random_weight(out: int, inputs: int, bits: int, group: int, seed: int = 0) -> AffineWeight:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (out, inputs), np.uint8)
    scales = rng.uniform(0.5, 1.5, (out, inputs // group)).astype(np.float16) * np.float16(1 / 2**bits)
    biases = -scales * np.float16(2 ** (bits - 1)) + rng.normal(0, 0.01, scales.shape).astype(np.float16)
    return AffineWeight(pack(codes, bits), scales, biases.astype(np.float16), bits, group)


def error(
    weight: AffineWeight, rows: int, device: str, config: LinearConfig | None = None, *, bias: bool = False
) -> float:
    """The worst ‖y − ref‖ / ‖ref‖ of a row."""
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.standard_normal((rows, weight.shape[1])).astype(np.float16)).to(device)
    added = torch.from_numpy(rng.standard_normal(weight.shape[0]).astype(np.float16)).to(device) if bias else None
    y = linear_tiles(x, AffineTiles.create(weight, device), bias=added, config=config)
    ref = x.double().cpu().numpy() @ weight.dequantize().astype(np.float64).T
    if added is not None:
        ref += added.double().cpu().numpy()
    return float((np.linalg.norm(y.double().cpu().numpy() - ref, axis=1) / np.linalg.norm(ref, axis=1)).max())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_widths_and_groups(bits: int, group: int, device: str) -> None:
    assert error(random_weight(48, 384, bits, group), 1, device, LinearConfig(2, 3)) < 1e-3


@pytest.mark.parametrize("rows", [2, 8, 9, 16])
def test_several_rows(rows: int, device: str) -> None:
    assert error(random_weight(32, 256, 4, 64), rows, device, LinearConfig(4, 2)) < 1e-3


@pytest.mark.parametrize(("out", "inputs"), [(16, 64), (40, 320), (576, 1536)])
def test_shapes_that_do_not_divide(out: int, inputs: int, device: str) -> None:
    """Outputs that fill no tile, steps that the warps cannot share evenly, more warps and stages than steps."""
    assert error(random_weight(out, inputs, 4, 64), 1, device, bias=True) < 1e-3


def relative(y: torch.Tensor, ref: np.ndarray) -> float:
    return float(np.linalg.norm(y.double().cpu().numpy() - ref) / np.linalg.norm(ref))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def test_a_norm_before_and_an_addition_after(device: str) -> None:
    """Rows of very different size: each has a norm of its own."""
    weight, rng = random_weight(48, 320, 4, 64), np.random.default_rng(2)
    x = rng.standard_normal((3, 320)) * np.array([[0.01], [1.0], [300.0]])
    norm, added = rng.uniform(0.5, 2, 320), rng.standard_normal((3, 48))
    tensors = [torch.from_numpy(a.astype(np.float16)).to(device) for a in (x, norm, added)]
    x, norm, added = (t.double().cpu().numpy() for t in tensors)
    y = linear_tiles(
        tensors[0],
        AffineTiles.create(weight, device),
        norm=(tensors[1], 1e-5),
        added=tensors[2],
        config=LinearConfig(2, 3),
    )
    normed = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * norm
    ref = normed @ weight.dequantize().astype(np.float64).T + added
    assert max(relative(y[i], ref[i]) for i in range(3)) < 1e-3


def test_matrices_one_after_the_other(device: str) -> None:
    weights = [random_weight(out, 128, 4, 64, seed) for seed, out in enumerate((48, 16, 16))]
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 128)).astype(np.float16)).to(device)
    y = linear_tiles(x, AffineTiles.stacked(weights, device), config=LinearConfig(2, 2))
    ref = x.double().cpu().numpy() @ np.concatenate([w.dequantize() for w in weights]).astype(np.float64).T
    assert relative(y, ref) < 1e-3


def test_a_gated_activation(device: str) -> None:
    gate, up = random_weight(40, 192, 4, 64, 1), random_weight(40, 192, 4, 64, 2)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 192)).astype(np.float16)).to(device)
    tiles = AffineTiles.create_gated(gate, up, device)
    y = linear_tiles(x, tiles, out_dtype=torch.float32, config=LinearConfig(2, 2))
    wide = x.double().cpu().numpy()
    ref = silu(wide @ gate.dequantize().astype(np.float64).T) * (wide @ up.dequantize().astype(np.float64).T)
    assert y.shape == (5, 40)
    assert relative(y, ref) < 1e-3


def test_weights_that_differ_stay_apart() -> None:
    with pytest.raises(UnsupportedError, match=r"\(128, 4, 64\), \(128, 8, 64\)"):
        AffineTiles.stacked([random_weight(16, 128, bits, 64) for bits in (4, 8)], "cpu")


def test_a_scale_that_is_lost_shows(device: str) -> None:
    weight = random_weight(32, 256, 4, 64)
    tiles = AffineTiles.create(weight, device)
    tiles.sides[..., 0] *= 1.1
    x = torch.ones(1, 256, dtype=torch.float16, device=device)
    ref = weight.dequantize().astype(np.float64).sum(1)
    off = np.linalg.norm(linear_tiles(x, tiles)[0].double().cpu().numpy() - ref) / np.linalg.norm(ref)
    assert off > 0.05


def test_bytes_are_those_of_the_stored_form(device: str) -> None:
    weight = random_weight(64, 512, 4, 64)
    assert AffineTiles.create(weight, device).nbytes == weight.nbytes


def test_misfits_have_reasons() -> None:
    weight = random_weight(16, 96, 4, 32)
    assert reasons_against(weight) == ["96 inputs: need a multiple of 64"]
    with pytest.raises(UnsupportedError, match="96 inputs: need a multiple of 64; dequantize it"):
        AffineTiles.create(weight, "cpu")
