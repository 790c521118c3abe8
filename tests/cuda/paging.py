"""Paged storage for the kernel tests: shuffled tables, poisoned planes, and the way back to canonical planes."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from kvcore.backends.cuda.native import PAGE, NativeLayout, to_canonical
from kvcore.backends.cuda.ops import TorchOps
from kvcore.layout import Codec, Layout, Rotation
from kvcore.modes import CODEC_FUNCTIONS, MODES, centred_rows, page_centers, plain_centers


def to_torch(x: np.ndarray, device: str) -> Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def to_numpy(x: Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.cpu().numpy()


def int32(values: object, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def coded(
    ops: TorchOps, codec: Codec, rows: Tensor, rotation: Rotation | None
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Whole pages ``rows`` [B, H, n, D] by graph operations: canonical planes, the rows decoded, and the centres [B, H,
    pages, D] of a centred codec."""
    functions, centers = CODEC_FUNCTIONS[codec.name], None
    if codec.centred:
        assert rotation is not None
        centers = page_centers(ops, rows, rotation, PAGE)
        rows = centred_rows(ops, rows, centers, rotation, PAGE)
    planes = functions.encode(ops, rows, rotation)
    decoded = functions.decode(ops, planes, rotation)
    if centers is not None and rotation is not None:
        decoded = decoded + plain_centers(ops, centers, rotation).repeat_interleave(PAGE, 2)
    return planes, decoded, centers


def poison(x: Tensor) -> Tensor:
    """Every byte 0xff: NaN in each float dtype."""
    x.view(torch.uint8).fill_(0xFF)
    return x


@dataclass
class Storage:
    """Sequences with ``lengths`` rows each, ``folded`` of which are in native pages; raw pages hold the others."""

    native: NativeLayout
    raw: dict[str, Tensor]
    planes: dict[str, Tensor]
    raw_table: Tensor
    table: Tensor
    lengths: Tensor
    folded: Tensor

    def canonical(self, part: str, sequence: int, page: int) -> dict[str, np.ndarray]:
        """The planes of a sequence's native page: [layers, Hkv, 128, width]."""
        codec, dim = self.codec(part)
        at = int(self.table[sequence, page])
        if not codec.quantized:
            return {"rows": to_numpy(self.planes[part][:, at])}
        native = {"codes": self.planes[part][:, at], "scale": self.planes[f"{part}_scale"][:, at]}
        return {name: to_numpy(x) for name, x in to_canonical(codec, part, native, dim).items()}

    def center(self, sequence: int, page: int) -> np.ndarray:
        """K's centre of a sequence's native page: [layers, Hkv, D]."""
        return to_numpy(self.planes["k_center"][:, int(self.table[sequence, page])])

    def codec(self, part: str) -> tuple[Codec, int]:
        layout = self.native.layout
        return (layout.k, layout.k_dim) if part == "k" else (layout.v, layout.v_dim)

    def write_rows(self, part: str, sequence: int, rows: np.ndarray) -> None:
        """``rows`` [layers, Hkv, tail, D] into the sequence's raw pages."""
        for start in range(0, rows.shape[2], PAGE):
            chunk = to_torch(np.ascontiguousarray(rows[:, :, start : start + PAGE]), self.lengths.device.type)
            self.raw[part][:, int(self.raw_table[sequence, start // PAGE]), :, : chunk.shape[2]] = chunk

    def rows(self, part: str, sequence: int, first: int, count: int) -> Tensor:
        """Raw rows first .. first + count of the tail: [layers, Hkv, count, D]."""
        token = torch.arange(first, first + count)
        pages = self.raw_table[sequence].cpu()[token // PAGE].long()
        return self.raw[part][:, pages, :, token % PAGE].permute(1, 2, 0, 3)


def storage(
    mode: str,
    dim: int,
    lengths: list[int],
    device: str,
    *,
    folded: list[int] | None = None,
    dtype: str = "float32",
    heads: int = 2,
    layers: int = 1,
    seed: int = 0,
    layout: Layout | None = None,
) -> Storage:
    """Everything poisoned; page numbers shuffled over all sequences, with some left over. ``layout``: another than the
    mode's."""
    native = NativeLayout(layout or MODES[mode].layout(dim), dtype)
    folded = folded or [0] * len(lengths)
    rng = np.random.default_rng(seed)
    width = -(-max(*lengths, 1) // PAGE) + 1
    count = len(lengths) * width + 3
    tables = [rng.permutation(count)[: len(lengths) * width].reshape(len(lengths), width).tolist() for _ in range(2)]
    raw, planes = (
        {
            plane.name: poison(
                torch.empty(layers, count, heads, *plane.shape, dtype=getattr(torch, plane.dtype), device=device)
            )
            for plane in part
        }
        for part in (native.raw_planes, native.planes)
    )
    raw_table, table, *state = (int32(x, device) for x in (*tables, lengths, folded))
    return Storage(native, raw, planes, raw_table, table, *state)
