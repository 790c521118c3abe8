"""Packing of 4- and 3-bit indices: the byte order that files hold, on every backend."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracle import unpack_bits

from kvcore.backends import Backend
from kvcore.backends.reference import spec
from kvcore.layout import TURBO3, TURBO4, Codebook
from kvcore.modes.turbo import pack_indices, quantize, unpack_levels

shapes = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(1, 16).map(lambda n: 8 * n))
few = settings(max_examples=40, deadline=None)
each_width = pytest.mark.parametrize("bits", [4, 3])


def indices_of(bits: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.uint8, shapes, elements=st.integers(0, 2**bits - 1))


@each_width
@few
@given(data=st.data())
def test_packing_is_one_little_endian_bit_stream_per_row(backend: Backend, bits: int, data: st.DataObject) -> None:
    indices = data.draw(indices_of(bits))
    packed = backend.ops.to_numpy(pack_indices(backend.ops, backend.ops.asarray(indices), bits))
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed, spec.pack_bits(indices, bits))


@each_width
@few
@given(data=st.data())
def test_unpacking_any_bytes_gives_the_levels_of_their_indices(
    backend: Backend, bits: int, data: st.DataObject
) -> None:
    book = TURBO4 if bits == 4 else TURBO3
    widths = st.integers(1, 16).map(lambda n: n * bits)
    codes = data.draw(arrays(np.uint8, st.tuples(st.just(1), st.integers(1, 3), widths)))
    levels = backend.ops.to_numpy(unpack_levels(backend.ops, backend.ops.asarray(codes), book))
    np.testing.assert_array_equal(levels, book.as_array()[unpack_bits(codes, bits)])


@pytest.mark.parametrize(
    ("bits", "indices", "packed"),
    [
        (4, [1, 2, 15, 0, 0, 15, 8, 7], [0x21, 0x0F, 0xF0, 0x78]),
        (3, [0, 1, 2, 3, 4, 5, 6, 7], [0x88, 0xC6, 0xFA]),  # 0xFAC688 is the 24-bit word
        (3, [7, 0, 0, 0, 0, 0, 0, 0], [0x07, 0x00, 0x00]),
        (3, [0, 0, 7, 0, 0, 7, 0, 0], [0xC0, 0x81, 0x03]),
    ],
    ids=["4-bit", "3-bit", "3-bit-first", "3-bit-across-bytes"],
)
def test_packing_gives_these_bytes(backend: Backend, bits: int, indices: list[int], packed: list[int]) -> None:
    array = backend.ops.asarray(np.array([indices], np.uint8))
    assert backend.ops.to_numpy(pack_indices(backend.ops, array, bits)).tolist() == [packed]


@pytest.mark.parametrize("book", [TURBO4, TURBO3], ids=["turbo4", "turbo3"])
def test_an_index_counts_the_midpoints_strictly_below(backend: Backend, book: Codebook) -> None:
    """A tie goes down: a midpoint itself belongs to the lower level."""
    middle = np.array(book.midpoints, np.float32)
    around = np.stack([np.nextafter(middle, -np.inf), middle, np.nextafter(middle, np.inf)])
    got = backend.ops.to_numpy(quantize(backend.ops, backend.ops.asarray(around), book))
    lower = np.arange(len(middle))
    assert got.tolist() == [lower.tolist(), lower.tolist(), (lower + 1).tolist()]


@pytest.mark.parametrize("book", [TURBO4, TURBO3], ids=["turbo4", "turbo3"])
def test_each_level_quantizes_to_its_own_index(backend: Backend, book: Codebook) -> None:
    got = backend.ops.to_numpy(quantize(backend.ops, backend.ops.asarray(book.as_array()), book))
    assert got.tolist() == list(range(2**book.bits))
    far = backend.ops.asarray(np.array([-1e9, 1e9], np.float32))
    assert backend.ops.to_numpy(quantize(backend.ops, far, book)).tolist() == [0, 2**book.bits - 1]
