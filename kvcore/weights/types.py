"""What a loaded tensor is: dense, or MLX's affine form.

Backends receive these and nothing else, so a file format never shows beyond this package.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.weights.affine import affine_value, columns, unpack


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    """A plain array: float32, float16 or ml_dtypes.bfloat16, any shape."""

    array: npt.NDArray[np.generic]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the stored form."""
        return self.array.nbytes

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The values in float32."""
        return self.array.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class AffineWeight:
    """A matrix [out, in] in MLX's affine form: ``w = scale * code + bias``, scale and bias per column group.

    ``codes`` uint32 [out, in * bits / 32]: each row is a little-endian stream of ``bits``-wide codes.
    ``scales``, ``biases`` [out, in / group_size]: float16, bfloat16 or float32, both of one dtype.
    """

    codes: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.generic]
    biases: npt.NDArray[np.generic]
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        out, width = self.shape
        expected = (out, width // self.group_size)
        if width % self.group_size or self.scales.shape != expected or self.biases.shape != expected:
            raise ValueError(
                f"{self.bits}-bit codes {self.codes.shape} in groups of {self.group_size} need scales and "
                f"biases {expected}, got {self.scales.shape} and {self.biases.shape}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix that the codes stand for."""
        return self.codes.shape[0], columns(self.codes.shape[1], self.bits)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored form: codes, scales and biases."""
        return self.codes.nbytes + self.scales.nbytes + self.biases.nbytes

    def unpacked(self) -> npt.NDArray[np.uint8]:
        """The codes [out, in], a byte each."""
        return unpack(self.codes, self.bits)

    def rows(self, index: slice | npt.NDArray[np.integer]) -> AffineWeight:
        """The chosen rows, still packed: codes, scales and biases move together."""
        return AffineWeight(self.codes[index], self.scales[index], self.biases[index], self.bits, self.group_size)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """float32 [out, in]. With 16-bit scales the products are exact, so only the sum rounds."""
        return affine_value(self.unpacked(), self.scales, self.biases, self.group_size)


Weight = DenseWeight | AffineWeight
