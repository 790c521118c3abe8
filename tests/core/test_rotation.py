"""R = (H ⊗ C)·diag(signs): orthonormal for every multiple of 8, the same matrix on every backend."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import HEAD_DIMS, gaussian

from kvcore.backends import Backend
from kvcore.backends.reference import spec
from kvcore.layout import Rotation, hadamard_dct, rotation_signs


@pytest.mark.parametrize(("part", "minus"), [("k", "0001110110111011"), ("v", "1101000110111000")])
def test_the_signs_of_layer_0_are_those_of_the_design(part: str, minus: str) -> None:
    signs = rotation_signs(0, part, 16)
    assert "".join("1" if s < 0 else "0" for s in signs) == minus


def test_signs_differ_by_layer_and_part_and_extend_with_the_width() -> None:
    rows = [rotation_signs(layer, part, 64) for layer in range(20) for part in "kv"]
    assert len({row.tobytes() for row in rows}) == 40
    assert np.array_equal(rotation_signs(7, "v", 256)[:64], rotation_signs(7, "v", 64))
    assert set(np.concatenate(rows).tolist()) == {-1.0, 1.0}
    assert abs(np.concatenate(rows).mean()) < 0.05


@pytest.mark.parametrize("dim", [8, 24, 40, *HEAD_DIMS, 160])
def test_the_matrix_is_orthonormal(dim: int) -> None:
    matrix = hadamard_dct(dim).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=2e-7 * np.sqrt(dim))


def test_hadamard_is_in_sylvester_order() -> None:
    """H[i, j] = (-1)^popcount(i & j) / √D."""
    dim = 64
    want = [[(-1) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]
    np.testing.assert_allclose(hadamard_dct(dim), np.array(want) / 8, atol=1e-7)


@pytest.mark.parametrize(("dim", "power", "odd"), [(24, 8, 3), (80, 16, 5), (96, 32, 3), (112, 16, 7)])
def test_the_odd_rest_is_a_dct_ii_with_frequencies_as_rows(dim: int, power: int, odd: int) -> None:
    """Element (i·m + j, k·m + l) is H[i, k]·C[j, l]."""
    matrix = hadamard_dct(dim).astype(np.float64)
    rng = np.random.default_rng(dim)
    for _ in range(50):
        i, k = (int(n) for n in rng.integers(0, power, 2))
        j, m = (int(n) for n in rng.integers(0, odd, 2))
        hadamard = (-1) ** (i & k).bit_count() / np.sqrt(power)
        norm = np.sqrt((1 if j == 0 else 2) / odd)
        cosine = norm * np.cos(np.pi * j * (2 * m + 1) / (2 * odd))
        assert matrix[i * odd + j, k * odd + m] == pytest.approx(hadamard * cosine, abs=1e-7)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_apply_is_the_matrix_and_undo_its_transpose(backend: Backend, dim: int) -> None:
    ops, x = backend.ops, gaussian(2, 3, 5, dim)
    rotation = Rotation.create(ops, 5, "k", dim)
    matrix = spec.rotation_matrix(5, "k", dim)
    turned = rotation.apply(ops, ops.asarray(x))
    np.testing.assert_allclose(ops.to_numpy(turned), x.astype(np.float64) @ matrix.T, atol=4e-6)
    np.testing.assert_allclose(ops.to_numpy(rotation.undo(ops, turned)), x, atol=4e-6)
    np.testing.assert_allclose(ops.to_numpy(rotation.undo(ops, ops.asarray(x))), x @ matrix, atol=4e-6)
