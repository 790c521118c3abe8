"""Append on the device: rotary embedding, raw rows at the right places, queries in both bases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from oracle import gaussian

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

from paging import Storage, int32, poison, storage, to_numpy, to_torch

from kvcore.backends.cuda.kernels.append import append, rope_angles
from kvcore.backends.cuda.kernels.rotate import rotation_matrices
from kvcore.backends.cuda.native import PAGE
from kvcore.backends.reference import spec
from kvcore.backends.reference.ops import NumpyOps
from kvcore.models import llama

LAYER = 3
# One rounding to the dtype, of values up to 8; Triton's interpreter truncates to bf16, which is two.
ROUNDING = {"float32": 2e-6, "float16": 2.0**-9, "bfloat16": 2.0**-5}


@dataclass
class Step:
    """n new tokens: projections as a model gives them, views of one [B, n, (Hq + 2 Hkv)·D] array."""

    pages: Storage
    q: np.ndarray  # [B, n, Hq, D]
    k: np.ndarray
    v: np.ndarray
    positions: list[int]
    q_out: torch.Tensor
    q_pages: torch.Tensor
    k_out: torch.Tensor

    def turned(self, x: np.ndarray, sequence: int) -> np.ndarray:
        """x [B, n, H, D] of a sequence after RoPE as the model computes it in float32: [H, n, D]."""
        n = x.shape[1]
        positions = np.arange(self.positions[sequence] - n, self.positions[sequence])
        angle = positions[:, None] * inv_freq(x.shape[-1])
        angles = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        wide = x[sequence].astype(np.float32).transpose(1, 0, 2)
        return llama._rotate(NumpyOps(), wide[None], angles)[0]


def inv_freq(dim: int) -> np.ndarray:
    return 10000.0 ** (-np.arange(0, dim, 2) / dim)


def step(
    device: str,
    dim: int,
    lengths: list[int],
    n: int,
    *,
    folded: list[int] | None = None,
    group: int = 2,
    heads: int = 2,
    dtype: str = "float32",
    rope: bool = True,
    rotated: bool = True,
) -> Step:
    """Append ``n`` rows to sequences that have ``lengths`` rows afterwards; positions differ from row numbers."""
    pages = storage("fp16", dim, lengths, device, folded=folded, heads=heads, dtype=dtype)
    batch, q_heads = len(lengths), group * heads
    fused = gaussian(batch, n, (q_heads + 2 * heads) * dim, dtype=dtype)
    parts = np.split(fused, [q_heads * dim, (q_heads + heads) * dim], -1)
    on_device = to_torch(fused, device).split([q_heads * dim, heads * dim, heads * dim], -1)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in on_device)
    positions = [length + 1000 * i for i, length in enumerate(lengths)]
    torch_dtype = getattr(torch, dtype)
    half = torch.float32 if dtype == "float32" else torch.float16
    outs = [
        poison(torch.empty(batch, heads, n, *rest, dtype=out_dtype, device=device))
        for rest, out_dtype in (((group, dim), torch_dtype), ((group, dim), half), ((dim,), torch_dtype))
    ]
    angles = rope_angles(torch.from_numpy(inv_freq(dim)).to(device), int32(positions, device), n) if rope else None
    matrix = rotation_matrices(LAYER + 1, "k", dim, torch_dtype, device)[LAYER] if rotated else None
    append(
        *(q, k, v, angles, pages.raw["k"][0], pages.raw["v"][0], pages.raw_table, pages.lengths, pages.folded),
        outs[0],
        q_pages=outs[1],
        k_matrix=matrix,
        k_out=outs[2],
    )
    q_np, k_np, v_np = (x.reshape(batch, n, -1, dim) for x in parts)
    return Step(pages, q_np, k_np, v_np, positions, *outs)


def assert_rows_are_in_place(done: Step, lengths: list[int], folded: list[int]) -> None:
    """New rows of K (after RoPE) and V at the end of each raw tail; nothing else in any raw page."""
    n = done.k.shape[1]
    for i, length in enumerate(lengths):
        if length == 0:
            continue
        first = length - folded[i] - n
        k, v = done.pages.rows("k", i, first, n)[0], done.pages.rows("v", i, first, n)[0]
        assert torch.equal(k, done.k_out[i])
        assert np.array_equal(to_numpy(v), done.v[i].transpose(1, 0, 2))
    written = n * done.k.shape[2] * sum(length > 0 for length in lengths)
    for part in "kv":
        assert int(done.pages.raw[part].isfinite().all(-1).sum()) == written


def assert_turned(done: Step, sequence: int, dtype: str) -> None:
    """q_out and k_out of a sequence are the model's, within one rounding."""
    batch_q = to_numpy(done.q_out[sequence]).astype(np.float64)  # [Hkv, n, G, D]
    heads, n, group, dim = batch_q.shape
    want = done.turned(done.q, sequence).reshape(heads, group, n, dim).transpose(0, 2, 1, 3)
    assert np.abs(batch_q - want).max() <= ROUNDING[dtype]
    got = to_numpy(done.k_out[sequence]).astype(np.float64)
    assert np.abs(got - done.turned(done.k, sequence)).max() <= ROUNDING[dtype]


def assert_rotated(done: Step, dtype: str) -> None:
    """q_pages is R_K q of the rounded q, which leaves float32 accuracy and one rounding to fp16."""
    q = to_numpy(done.q_out).astype(np.float64)
    want = q @ spec.rotation_matrix(LAYER, "k", q.shape[-1]).T
    error = np.abs(to_numpy(done.q_pages).astype(np.float64) - want)
    # A float32 sum of D terms, no partial sum larger than ‖q‖: its roundings add up like √D of them.
    sums = 2.0**-24 * q.shape[-1] ** 0.5 * np.linalg.norm(q, axis=-1, keepdims=True)
    assert (error <= (sums if dtype == "float32" else 2.0**-9)).all()


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_step_writes_rows_and_both_queries(device: str, dtype: str, dim: int) -> None:
    """Ragged lengths, two tokens, the second sequence's across a page boundary, with folded rows before its tail."""
    lengths, folded = [2, 2 * PAGE + 129, 77], [0, PAGE, 0]
    done = step(device, dim, lengths, 2, folded=folded, dtype=dtype, heads=1)
    assert_rows_are_in_place(done, lengths, folded)
    for i in range(3):
        assert_turned(done, i, dtype)
    assert_rotated(done, dtype)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("n", [1, 16])
def test_any_number_of_query_heads_shares_a_kv_head(device: str, n: int, group: int) -> None:
    done = step(device, 64, [300, 20], n, group=group)
    assert_rows_are_in_place(done, [300, 20], [0, 0])
    for i in range(2):
        assert_turned(done, i, "float32")
    assert_rotated(done, "float32")


def test_an_idle_sequence_gets_no_rows(device: str) -> None:
    lengths = [5, 0, 129]
    done = step(device, 64, lengths, 1)
    assert_rows_are_in_place(done, lengths, [0, 0, 0])
    assert_turned(done, 2, "float32")


def test_a_prefilled_chunk_fills_pages_in_shuffled_order(device: str) -> None:
    lengths, folded = [300, 650], [0, 2 * PAGE]
    done = step(device, 64, lengths, 290, folded=folded, heads=1, group=3)
    assert_rows_are_in_place(done, lengths, folded)
    for i in range(2):
        assert_turned(done, i, "float32")


def test_without_angles_q_and_k_are_stored_as_they_come(device: str) -> None:
    done = step(device, 80, [130], 3, rope=False, rotated=False)
    assert_rows_are_in_place(done, [130], [0])
    assert np.array_equal(to_numpy(done.k_out[0]), done.k[0].transpose(1, 0, 2))
    q = done.q[0].reshape(3, 2, 2, 80).transpose(1, 0, 2, 3)
    assert np.array_equal(to_numpy(done.q_out[0]), q)


def test_the_query_of_unrotated_pages_is_q_in_fp16(device: str) -> None:
    """int8 K: no rotation, but fp16 where raw rows are bf16."""
    done = step(device, 64, [130], 2, dtype="bfloat16", rotated=False)
    assert done.q_pages.dtype == torch.float16
    assert torch.equal(done.q_pages.float(), done.q_out.float())


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # inf - inf, where the row is turned
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
def test_C3_a_non_finite_query_and_row_stay_alone(device: str, bad: float) -> None:
    plain = step(device, 64, [40, 50], 1, group=3)
    pages = plain.pages
    q, k, v = (to_torch(x.copy(), device) for x in (plain.q, plain.k, plain.v))
    q[0, 0, 1, 3] = k[1, 0, 0, 5] = v[1, 0, 1, 6] = bad
    angles = rope_angles(torch.from_numpy(inv_freq(64)).to(device), int32(plain.positions, device), 1)
    q_out, q_pages = torch.empty_like(plain.q_out), torch.empty_like(plain.q_pages)
    matrix = rotation_matrices(LAYER + 1, "k", 64, torch.float32, device)[LAYER]
    tables = (pages.raw["k"][0], pages.raw["v"][0], pages.raw_table, pages.lengths, pages.folded)
    append(q, k, v, angles, *tables, q_out, q_pages=q_pages, k_matrix=matrix)
    differs = (q_pages != plain.q_pages).any(-1)
    assert differs.nonzero().tolist() == [[0, 0, 0, 1]]
    assert pages.rows("k", 1, 49, 1)[0, :, 0].isfinite().all(-1).tolist() == [False, True]
    assert pages.rows("v", 1, 49, 1)[0, :, 0].isfinite().all(-1).tolist() == [True, False]
    assert pages.rows("k", 0, 39, 1).isfinite().all()


@pytest.mark.parametrize("position", [1, 1000, 131_072, 1_000_003])
def test_angles_keep_their_phase_in_long_contexts(device: str, position: int) -> None:
    """float32 products would be off by 0.004 rad at 131,072."""
    cos, sin = rope_angles(torch.from_numpy(inv_freq(64)).to(device), int32([position, position + 5], device), 3)
    want = np.array([[p - 3, p - 2, p - 1] for p in (position, position + 5)])[..., None] * inv_freq(64)
    assert cos.dtype == torch.float32
    assert np.abs(to_numpy(cos) - np.cos(want)).max() < 4e-7
    assert np.abs(to_numpy(sin) - np.sin(want)).max() < 4e-7


def test_inputs_may_have_any_strides_but_a_dense_last_axis(device: str) -> None:
    """[B, H, n, D] views give what [B, n, H, D] arrays give."""
    done = step(device, 64, [10, 20], 3)
    pages = storage("fp16", 64, [10, 20], device)
    q, k, v = (
        to_torch(np.ascontiguousarray(x.transpose(0, 2, 1, 3)), device).transpose(1, 2)
        for x in (done.q, done.k, done.v)
    )
    angles = rope_angles(torch.from_numpy(inv_freq(64)).to(device), int32(done.positions, device), 3)
    q_out = torch.empty_like(done.q_out)
    append(q, k, v, angles, pages.raw["k"][0], pages.raw["v"][0], pages.raw_table, pages.lengths, pages.folded, q_out)
    assert torch.equal(q_out, done.q_out)
    for part in "kv":
        for i, length in enumerate((10, 20)):
            assert torch.equal(pages.rows(part, i, length - 3, 3), done.pages.rows(part, i, length - 3, 3))


def test_B31_rows_beyond_2_to_the_31_elements_are_written(device: str) -> None:
    """The last page of a pool of more than 2^31 elements, of which one page is touched."""
    count = 2**31 // (PAGE * 256) + 2
    large = torch.empty(count, 1, PAGE, 256, dtype=torch.float16, device=device)
    x = to_torch(gaussian(1, 1, 1, 256, dtype="float16"), device)
    table, q_out = int32([[0, count - 1]], device), torch.empty(1, 1, 1, 1, 256, dtype=torch.float16, device=device)
    append(x, x, x, None, large, large, table, int32([PAGE + 8], device), int32([0], device), q_out)
    assert torch.equal(large[count - 1, 0, 7], x[0, 0, 0])


def test_projections_of_more_than_2_to_the_31_elements_are_read(device: str) -> None:
    """Three tokens so far apart that the last one's offset does not fit in 32 bits."""
    stride = 2**30 + 64
    large = torch.empty(2 * stride + 64, dtype=torch.float16, device=device)
    x = large.as_strided((1, 3, 1, 64), (0, stride, 64, 1))
    x.copy_(to_torch(gaussian(1, 3, 1, 64, dtype="float16"), device))
    pages = storage("fp16", 64, [3], device, heads=1, dtype="float16")
    q_out = torch.empty(1, 1, 3, 1, 64, dtype=torch.float16, device=device)
    append(x, x, x, None, pages.raw["k"][0], pages.raw["v"][0], pages.raw_table, pages.lengths, pages.folded, q_out)
    for got in (q_out[0, 0, :, 0], pages.rows("k", 0, 0, 3)[0, 0], pages.rows("v", 0, 0, 3)[0, 0]):
        assert torch.equal(got, x[0, :, 0])
