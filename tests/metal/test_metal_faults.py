"""The harness can fail: faults put into the kernels' text are found, each by what the design says should find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from metal_centred import centred_attention, centred_view
from metal_shim import SCHEDULES, KernelFault, Placed, Shim
from oracle import SMALL, assert_planes_follow_spec, exact_attention, filled, gaussian, relative_error
from schedules import rotation_of

from kvcore.backends import Backend
from kvcore.backends.metal import attention
from kvcore.backends.metal.attention import attend
from kvcore.backends.metal.encode import encode
from kvcore.backends.metal.kernels import KernelSource
from kvcore.layout import CODECS

BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);"


@dataclass(frozen=True)
class Fault:
    """``text`` of a kernel, which stands there once, becomes ``other``."""

    name: str
    kernel: str
    text: str
    other: str

    def __str__(self) -> str:
        return self.name

    def change(self, source: KernelSource) -> KernelSource:
        if source.name != self.kernel:
            return source
        assert (source.header + source.body).count(self.text) == 1, f"{self.name}: the kernel has changed"
        header, body = (part.replace(self.text, self.other) for part in (source.header, source.body))
        return replace(source, header=header, body=body)


FAULTS = (
    Fault("no barrier after the table", "attend", f"v_levels);\n{BARRIER}", "v_levels);"),
    Fault("no barrier before the merge", "attend", f"{BARRIER}  // this one is written", ""),
    Fault("no barrier before the next merge", "attend", f"{BARRIER}  // the vector before has been read", ""),
    Fault("no barrier in the rotation", "combine", f"step *= 2) {{\n  {BARRIER}", "step *= 2) {"),
    Fault("no barrier between shares", "combine", "}\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n", "}\n"),
    Fault(
        "stride of K's rows",
        "attend",
        "k_codes_strides[2], k_scale_strides[2]",
        "k_codes_strides[2] + 4, k_scale_strides[2]",
    ),
    Fault("stride of V's scales", "attend", "v_scale_strides[2], v_table", "2, v_table"),
    Fault("stride of heads", "attend", "head * tail_k_strides[1]", "head * tail * D"),
    Fault("misaligned words", "attend", "codes + row * stride;", "codes + row * stride + 1;"),
    Fault("no causal mask", "attend", "return position <= own && (", "return ("),
    Fault("no window", "attend", "window == 0 || position > own - window", "true || position > own - window"),
    Fault("rows beyond the last", "attend", "bool live = mine < stop;", "bool live = true;"),
    Fault("no scale of K", "attend", "logit[n] * k_scale", "logit[n]"),
    Fault("sums not rescaled", "attend", "acc[n][i] *= shrink;", "acc[n][i] *= 1.0f;"),
    Fault("V not rotated back", "combine", "butterflies<D, THREADS>(row, worker);", ""),
    Fault("a barrier that not all meet", "attend", f"{BARRIER}  // this one is written", f"if (simd < 2) {BARRIER}"),
    Fault(
        "a shuffle that not all meet",
        "attend",
        "logit[n] = unit == s ? sum",
        "sum += lane ? simd_sum(sum) : sum; logit[n] = unit == s ? sum",
    ),
    Fault(
        "a row in threadgroup memory too many",
        "combine",
        "page_shares[simd * D + d] =",
        "page_shares[simd * D + d + D] =",
    ),
)
CENTRED_FAULTS = (
    Fault("no centre", "attend", "logit + values[", "logit + 0.0f * values["),
    Fault("the page of another row", "attend", "page_of[row] *", "page_of[row + 1] *"),
    Fault("stride of pages", "attend", "page_bias_strides[2], page_bias_strides[3]", "page_bias_strides[2], 2"),
    Fault("stride of vectors", "attend", "page_bias_strides[2], page_bias_strides[3]", "0, page_bias_strides[3]"),
    Fault("heads' centres", "attend", "head * page_bias_strides[1]", "0"),
    Fault("sequences' centres", "attend", "sequence * page_bias_strides[0]", "0"),
    Fault("centres times scales", "attend", "(logit[n] * k_scale, vector, row)", "(logit[n], vector, row) * k_scale"),
    Fault("vectors beyond the last", "attend", "min(step.vector + n, step.vectors - 1)", "step.vector + n"),
)
ENCODE_FAULTS = (
    Fault("no barrier before packing", "encode", "}\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n", "}\n"),
    Fault("no barrier in the rotation", "encode", f"step *= 2) {{\n  {BARRIER}", "step *= 2) {"),
    Fault("stride of rows", "encode", "index % tokens * rows_strides[2]", "index % tokens * D"),
    Fault("no round up", "encode", "half_value(bits) < x ? bits + 1u : bits", "bits"),
    Fault("rows beyond the last", "encode", "if (wanted < count) {", "{"),
    Fault("a tie goes up", "encode", "z > (levels", "z >= (levels"),
)


def found(check: Callable[[Shim], None], fault: Fault) -> list[str]:
    """The schedules under which a check fails, and how."""
    failures = []
    for schedule in SCHEDULES:
        try:
            check(Shim(schedule, seed=3, change=fault.change))
        except (KernelFault, AssertionError) as error:
            failures.append(f"{schedule}: {error}")
    return failures


@pytest.fixture(autouse=True)
def _long_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a simdgroup has several tiles of a split."""
    monkeypatch.setattr(attention, "THREADGROUPS", 1)


def check_attention(host: Backend, shim: Shim) -> None:
    """Two sequences and heads in turbo4, pages and a tail; a causal step, one with a window."""
    k, v = gaussian(2, 2, 230, 64), gaussian(2, 2, 230, 64, seed=1)
    layer = filled(host, "turbo4", k, v, heads=(4, 2), window=SMALL).layers[0]
    q = gaussian(2, 4, 4, 64, seed=2)
    for window in (None, 40):
        out = attend(host.ops, q, layer.view(), 0.125, window, shim.run)
        assert relative_error(out, exact_attention(host, layer, q, 0.125, window)) <= 2e-6


def check_centred(host: Backend, shim: Shim) -> None:
    """Unequal pages of two sequences and heads under nine query vectors, which are two chunks of five."""
    view = centred_view(host, (70, 57, 41), batch=2, heads=2)
    q = gaussian(2, 6, 3, 64, seed=5)
    out = attend(host.ops, q, view, 0.125, None, shim.run)
    assert relative_error(out, centred_attention(q, view, 0.125)) <= 2e-6


def check_encode(host: Backend, shim: Shim) -> None:
    """A view of a larger buffer, with a number of rows that threadgroups do not divide."""
    buffer = gaussian(1, 3, 40, 96)[..., :64]
    buffer[0, 1, 2] = 0
    for codec in ("int8", "turbo4"):
        rows = buffer[:, :, :33]
        planes = encode(host.ops, CODECS[codec], rows, rotation_of(host, codec, 64), shim.run)
        assert_planes_follow_spec(codec, dict(planes), rows)
        zero = {"int8": 0, "turbo4": 0x77}[codec]
        assert (planes["codes"][0, 1, 2] == zero).all()


NOTHING = Fault("nothing", "none", "", "")


def test_without_a_fault_nothing_is_found(host: Backend) -> None:
    assert found(lambda shim: check_attention(host, shim), NOTHING) == []
    assert found(lambda shim: check_centred(host, shim), NOTHING) == []
    assert found(lambda shim: check_encode(host, shim), NOTHING) == []


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_in_attention_is_found(host: Backend, fault: Fault) -> None:
    assert found(lambda shim: check_attention(host, shim), fault)


@pytest.mark.parametrize("fault", CENTRED_FAULTS, ids=str)
def test_a_fault_in_what_centres_add_is_found(host: Backend, fault: Fault) -> None:
    assert found(lambda shim: check_centred(host, shim), fault)


@pytest.mark.parametrize("fault", ENCODE_FAULTS, ids=str)
def test_a_fault_in_encode_is_found(host: Backend, fault: Fault) -> None:
    assert found(lambda shim: check_encode(host, shim), fault)


def test_one_schedule_would_not_do(host: Backend) -> None:
    """In order, the first simdgroup writes before any other reads: a missing barrier shows in another order only."""
    fault = next(fault for fault in FAULTS if fault.name == "no barrier between shares")
    failures = found(lambda shim: check_attention(host, shim), fault)
    assert 0 < len(failures) <= len(SCHEDULES)
    assert any(not failure.startswith("in order") for failure in failures)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a barrier that not all meet", "simdgroup"),
        ("a shuffle that not all meet", "at different operations"),
        ("misaligned words", "misaligned word"),
    ],
)
def test_the_shim_says_what_is_wrong(host: Backend, name: str, words: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    assert any(words in failure for failure in found(lambda shim: check_attention(host, shim), fault))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_read_outside_of_a_buffer_is_a_fault(host: Backend, schedule: str) -> None:
    """Buffers end at a page that may not be touched; under the reversed schedule they begin at one."""
    beyond = "- 64" if schedule == "reversed" else "+ 64"
    fault = Fault(
        "a read beside q", "rotate", "float(q[at + d * q_strides[3]])", f"float(q[at + d * q_strides[3] {beyond}])"
    )
    k = gaussian(1, 1, 150, 64)
    layer = filled(host, "turbo4", k, k, heads=(1, 1), window=SMALL).layers[0]
    with pytest.raises(KernelFault, match="rotate: an access outside of a buffer"):
        attend(host.ops, gaussian(1, 1, 1, 64), layer.view(), 0.125, None, Shim(schedule, change=fault.change).run)


def test_an_array_is_placed_with_its_strides_and_nan_between() -> None:
    x = gaussian(3, 8)[:, :5]
    for at_end in (True, False):
        placed = Placed.copy_of(x, at_end)
        np.testing.assert_array_equal(placed.read(), x)
        assert placed.strides == (8, 1)
        assert np.isnan(np.lib.stride_tricks.as_strided(placed.read(), (1,), (4,))).sum() == 0
        placed.close()
