"""Prefill attention over pages against float64 attention over what they hold: interpreted without a GPU, compiled on
one. Everything that nothing has written, and every dead row, is poisoned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
triton = pytest.importorskip("triton", reason="the package triton is not installed")

from paging import coded, int32, poison
from torch import Tensor

from kvcore.backends.cuda import dense as dense_module
from kvcore.backends.cuda import prefill
from kvcore.backends.cuda.attend import Pages, VRotation
from kvcore.backends.cuda.native import PAGE, NativeLayout, to_native
from kvcore.backends.cuda.ops import TorchOps
from kvcore.backends.cuda.prefill import PrefillPlan, attend_prefill
from kvcore.backends.reference import spec
from kvcore.errors import KvcoreError
from kvcore.layout import CENTRED_TURBO4, CODECS, Layout, Rotation

LAYER = 3
PAIRS = [
    ("turbo4", "turbo4"),
    ("int8", "int8"),
    ("int8", "turbo4"),
    ("raw", "turbo4"),
    ("raw", "turbo3"),
    ("raw", "raw"),
]
each_pair = pytest.mark.parametrize(("k", "v"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
Ranges = list[tuple[int, int]]


@dataclass
class Case:
    """``past`` has (folded slots, raw slots older than the new rows) of each sequence, ``dead`` its live ranges."""

    k: str
    v: str
    dim: int = 64
    heads: int = 1
    group: int = 3
    n: int = 17
    past: tuple[tuple[int, int], ...] = ((128, 40),)
    sinks: int = 0
    live: list[tuple[Ranges, Ranges] | None] | None = None
    dtype: torch.dtype | None = None  # of raw rows: on a GPU float16, else float32, which is closer to the oracle
    v_rms: float = 1.0
    logit_std: float = 1.0
    loud_page: bool = False

    def __post_init__(self) -> None:
        if (self.k, self.v) == ("raw", "raw"):
            self.past = tuple((0, folded + raw) for folded, raw in self.past)

    @property
    def layout(self) -> Layout:
        k = CENTRED_TURBO4 if self.k == "turbo4" else CODECS[self.k]
        return Layout(k, CODECS[self.v], self.dim, self.dim)

    @property
    def host(self) -> list[tuple[int, int, int]]:
        return [(min(self.sinks, f), f, f + raw + self.n) for f, raw in self.past]

    def alive(self, b: int) -> np.ndarray:
        """Which slots of a sequence are live, by the ranges."""
        _, folded, length = self.host[b]
        own = self.live[b] if self.live else None
        if own is None:
            return np.ones(length, bool)
        alive = np.zeros(length, bool)
        for at, ranges in ((0, own[0]), (folded, own[1])):
            for e, (first, end) in enumerate(ranges):
                alive[at + e * PAGE + first : at + e * PAGE + end] = True
        alive[: self.host[b][0]] = True
        return alive


@dataclass
class Storage:
    """What `attend_prefill` reads, and what it should see: live rows ``seen`` [Hkv, rows, D] of K and V."""

    case: Case
    device: str
    pages: Pages
    q: Tensor
    q_rotated: Tensor
    seen: list[tuple[np.ndarray, np.ndarray]]
    slots: list[np.ndarray] = field(default_factory=list)

    def plan(self) -> PrefillPlan:
        return PrefillPlan.create(self.case.host, self.case.n, self.device, self.case.live)

    def attend(self, **options: Any) -> Tensor:
        case = self.case
        rotation = VRotation.create(LAYER, case.dim, self.device) if case.layout.v.codebook else None
        options = {"plan": self.plan(), "v_rotation": rotation} | options
        return attend_prefill(self.q, self.q_rotated, self.pages, case.layout, **options)

    def error(self, out: Tensor, window: int | None = None) -> float:
        """The worst ‖out − ref‖ / ‖ref‖ of a sequence and query head, over its query rows."""
        return max(self._error(b, out[b], window) for b in range(len(self.case.past)))

    def _error(self, b: int, out: Tensor, window: int | None) -> float:
        case = self.case
        shape = (case.heads, case.n, case.group, case.dim)
        q, got = (x.double().cpu().numpy().reshape(shape).swapaxes(1, 2) for x in (self.q[b], out))
        k, v = self.seen[b]
        if window is None:
            ref = spec.attention(q.reshape(1, -1, case.n, case.dim), k[None], v[None], case.dim**-0.5)
        else:
            ref = windowed(q.reshape(-1, case.n, case.dim), k, v, self.slots[b], window)
        ref = ref.reshape(got.shape)
        wrong = np.linalg.norm(got - ref, axis=(2, 3)) / np.linalg.norm(ref, axis=(2, 3))
        return float(np.nan_to_num(wrong, nan=np.inf).max())


def windowed(q: np.ndarray, k: np.ndarray, v: np.ndarray, slots: np.ndarray, window: int) -> np.ndarray:
    """Float64 attention in which a query at slot p sees live rows at p - window + 1 .. p."""
    group, own = q.shape[0] // k.shape[0], slots[-q.shape[1] :, None]
    wide_k, wide_v = (np.repeat(x, group, axis=0) for x in (k, v))
    logits = q @ wide_k.swapaxes(1, 2) / q.shape[2] ** 0.5
    logits = np.where((slots <= own) & (slots > own - window), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ wide_v


def storage(case: Case, device: str, seed: int = 0) -> Storage:
    rng = np.random.default_rng(seed)
    ops = TorchOps(device)
    dtype = case.dtype or (torch.float16 if device == "cuda" else torch.float32)
    entries = [(f // PAGE, -(-(length - f) // PAGE)) for _, f, length in case.host]
    planes, tables = _poisoned(case, ops, rng, dtype, entries)
    seen: list[list[np.ndarray]] = [[] for _ in case.past]
    for b, (sinks, folded, length) in enumerate(case.host):
        alive = torch.from_numpy(case.alive(b)).to(device)
        for part, rms in (("k", 1.0), ("v", case.v_rms)):
            x = rng.standard_normal((case.heads, length, case.dim)) * rms
            if case.loud_page and part == "v":
                x[:, : min(PAGE, length)] *= 100
            if part == "k" and case.layout.k.centred:
                means = 2 * rng.standard_normal((case.heads, -(-length // PAGE), case.dim))
                x += np.repeat(means, PAGE, 1)[:, :length]
            rows = torch.from_numpy(x).to(device, dtype)
            what = rows.float()
            if folded:
                what[:, sinks:folded] = _fold(case, ops, part, rows[:, :folded], alive, tables, b, planes)[:, sinks:]
            raw = planes[f"raw_{part}"]
            raw[tables["sink_page"][b], :, :sinks] = rows[:, :sinks]
            for slot in range(folded, length):
                if alive[slot]:
                    page = tables["raw_table"][b][(slot - folded) // PAGE]
                    raw[page, :, (slot - folded) % PAGE] = rows[:, slot]
            seen[b].append(what[:, alive].double().cpu().numpy())
    pages = _pages(case, planes, tables, device)
    q = rng.standard_normal((len(case.past), case.heads, case.n * case.group, case.dim)) * case.logit_std
    q = torch.from_numpy(q).to(device, dtype)
    rotated = q
    if case.layout.k.codebook is not None:
        rotated = Rotation.create(ops, LAYER, "k", case.dim).apply(ops, q.float())
        rotated = rotated if dtype == torch.float32 else rotated.half()
    slots = [np.flatnonzero(case.alive(b)) for b in range(len(case.past))]
    return Storage(case, device, pages, q, rotated, [(k, v) for k, v in seen], slots)


def _poisoned(
    case: Case, ops: TorchOps, rng: np.random.Generator, dtype: torch.dtype, entries: list[tuple[int, int]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Planes that nobody has written, and shuffled page numbers for them."""
    counts = [sum(e[kind] for e in entries) + 2 for kind in (0, 1)]
    counts[1] += len(entries)
    orders = [rng.permutation(count).tolist() for count in counts]
    tables: dict[str, Any] = {
        name: [[orders[kind].pop() for _ in range(e[kind])] for e in entries]
        for kind, name in enumerate(("table", "raw_table"))
    }
    tables["sink_page"] = [orders[1].pop() for _ in entries]
    native = NativeLayout(case.layout, str(dtype).removeprefix("torch."))
    planes = {}
    for names, count in (((native.planes, ""), counts[0]), ((native.raw_planes, "raw_"), counts[1])):
        for plane in names[0]:
            shape = (count, case.heads, *plane.shape)
            empty = torch.empty(shape, dtype=getattr(torch, plane.dtype), device=ops.device)
            planes[names[1] + plane.name] = poison(empty)
    for part in ("k", "v"):
        planes.setdefault(f"{part}_scale", planes[f"raw_{part}"])
    return planes, tables


def _fold(
    case: Case,
    ops: TorchOps,
    part: str,
    rows: Tensor,
    alive: Tensor,
    tables: dict[str, Any],
    b: int,
    planes: dict[str, Tensor],
) -> Tensor:
    """Store folded rows [Hkv, slots, D] natively, dead and shadowed ones poisoned; return them decoded."""
    codec = case.layout.k if part == "k" else case.layout.v
    rotation = Rotation.create(ops, LAYER, part, case.dim) if codec.codebook else None
    canonical, decoded, centers = coded(ops, codec, rows[None], rotation)
    dead = ~alive[: rows.shape[1]]
    dead[: case.host[b][0]] = True
    name = "scale" if codec.quantized else "rows"
    canonical[name] = canonical[name].masked_fill(dead[:, None], float("nan"))
    native = to_native(codec, part, {key: x.unflatten(2, (-1, PAGE)) for key, x in canonical.items()})
    for key, plane in (native | ({} if centers is None else {"center": centers})).items():
        for e, page in enumerate(tables["table"][b]):
            planes[f"{part}_{key}" if key in ("scale", "center") else part][page] = plane[0, :, e]
    return decoded[0]


def _pages(case: Case, planes: dict[str, Tensor], tables: dict[str, Any], device: str) -> Pages:
    def table(rows: list[list[int]]) -> Tensor:
        width = max(1, *map(len, rows))
        return int32([row + [1 << 30] * (width - len(row)) for row in rows], device)

    state = {name: int32([row[i] for row in case.host], device) for i, name in enumerate(("sinks", "folded", "length"))}
    packed: list[list[list[int]]] = [[], []]  # `attend_prefill` knows the ranges from its plan
    for b in range(len(case.past)):
        for kind, name in enumerate(("table", "raw_table")):
            packed[kind].append([PAGE << 16] * len(tables[name][b]))
    return Pages(
        **planes,
        table=table(tables["table"]),
        raw_table=table(tables["raw_table"]),
        ranges=table(packed[0]),
        raw_ranges=table(packed[1]),
        sink_page=int32(tables["sink_page"], device),
        **state,
    )


def limit(case: Case, device: str) -> float:
    """Float32 rows are compared closely; of the others, design.md's limits."""
    if case.dtype == torch.bfloat16:
        return 4e-3
    if device == "cpu" and case.dtype is None:
        return 1e-5
    return 2e-3 if case.layout.quantized else 1e-3


def check(case: Case, device: str, **options: Any) -> None:
    stored = storage(case, device)
    out = stored.attend(**options)
    assert out.shape == stored.q.shape
    assert out.dtype == stored.q.dtype
    assert stored.error(out, options.get("window")) < limit(case, device)


@each_pair
def test_ragged_sequences(k: str, v: str, device: str) -> None:
    """An empty past, one without folded rows, two alike, and a longer one; two KV heads."""
    check(Case(k, v, heads=2, past=((0, 0), (0, 5), (128, 3), (128, 3), (256, 77)), sinks=4), device)


@pytest.mark.parametrize(
    ("n", "past"),
    [(1, (0, 0)), (1, (384, 127)), (17, (128, 0)), (63, (0, 129)), (63, (384, 1)), (300, (0, 0)), (300, (128, 127))],
)
def test_numbers_of_rows(n: int, past: tuple[int, int], device: str) -> None:
    check(Case("turbo4", "turbo4", n=n, past=(past,)), device)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@each_pair
def test_head_sizes(k: str, v: str, dim: int, device: str) -> None:
    if v == "turbo3" and dim % 64:
        pytest.skip("turbo3 pages need a multiple of 64")
    check(Case(k, v, dim=dim, past=((128, 1),), sinks=4), device)


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_query_heads_per_kv_head(group: int, device: str) -> None:
    check(Case("int8", "turbo4", group=group, heads=2), device)
    check(Case("raw", "raw", group=group, heads=2), device)


DEAD = [
    ([(60, 128), (0, 128), (128, 128), (5, 6)], [(0, 128), (0, 128)]),  # trimmed: the oldest, a whole page, all but one
    ([(4, 128), (0, 70), (90, 128), (0, 128)], [(33, 128), (0, 128)]),  # a hole across pages, the oldest of the tail
    None,
]


@each_pair
def test_dead_rows_are_not_seen(k: str, v: str, device: str) -> None:
    raw = (k, v) == ("raw", "raw")
    live = [own and (([], [*own[0], *own[1]]) if raw else own) for own in DEAD]
    case = Case(k, v, n=20, past=((512, 140),) * 3, live=live, sinks=0 if raw else 4)
    if raw:
        case.live = [own and ([], [*own[1], *[(0, 128)] * 4]) for own in live]
    check(case, device)


def test_rows_that_a_plan_leaves_out_would_show(device: str) -> None:
    """Control: with every row taken for live, the poison of dead ones comes through."""
    stored = storage(Case("turbo4", "turbo4", n=20, past=((512, 100),), live=DEAD[:1], sinks=4), device)
    blind = PrefillPlan.create(stored.case.host, 20, device)
    assert stored.error(stored.attend(plan=blind)) == float("inf")


@each_pair
@pytest.mark.parametrize("kib", [16, 60])
def test_a_small_workspace_gives_the_same(k: str, v: str, kib: int, device: str) -> None:
    """Blocks of 16 to 120 rows: folded pages are cut, and new rows are spread over blocks."""
    case = Case(k, v, n=40, past=((128, 33), (128, 33), (0, 5)), sinks=4)
    check(case, device, workspace_bytes=kib << 10)


def test_dense_rows_stay_within_the_workspace(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = prefill.gather

    def watched(*args: Any, **options: Any) -> Any:
        dense = real(*args, **options)
        sizes.append(dense.k.nbytes + dense.v.nbytes)
        return dense

    monkeypatch.setattr(prefill, "gather", watched)
    check(Case("int8", "int8", heads=2, n=70, past=((128, 33),) * 2), device, workspace_bytes=60 << 10)
    assert len(sizes) > 4  # 16-bit rows take fewer blocks than the interpreter's float32
    assert max(sizes) <= 60 << 10


def test_chunks_of_a_prompt_equal_the_whole(device: str) -> None:
    """Nothing is folded, so how a prompt is cut must not matter."""
    whole = storage(Case("raw", "raw", n=300, past=((0, 0),), heads=2), device)
    expected = whole.attend().unflatten(2, (300, -1))
    pieces = []
    for end in (100, 200, 300):
        chunk = Case("raw", "raw", n=100, past=((0, end - 100),), heads=2)
        q = whole.q.unflatten(2, (300, -1))[:, :, end - 100 : end].flatten(2, 3)
        part = Storage(chunk, device, whole.pages, q, q, whole.seen)
        pieces.append(part.attend().unflatten(2, (100, -1)))
    difference = torch.cat(pieces, 2).float() - expected.float()
    assert float(difference.norm() / expected.float().norm()) < 1e-3


@pytest.mark.parametrize("window", [1, 30, 100, 200, 1000])
@pytest.mark.parametrize("kib", [64, 1 << 18])
def test_a_window_sees_exactly_its_rows(window: int, kib: int, device: str) -> None:
    case = Case("turbo4", "turbo4", n=40, past=((256, 50), (128, 10)), sinks=4)
    check(case, device, window=window, workspace_bytes=kib << 10)


def test_windows_count_slots_and_skip_dead_rows(device: str) -> None:
    check(Case("int8", "turbo4", n=20, past=((512, 140),) * 3, live=DEAD, sinks=4), device, window=300)


def test_an_idle_sequence_gives_zeros(device: str) -> None:
    stored = storage(Case("turbo4", "turbo4", past=((128, 3), (128, 3))), device)
    plan = PrefillPlan.create([stored.case.host[0], (0, 0, 0)], stored.case.n, device)
    out = stored.attend(plan=plan)
    assert not out[1].any()
    torch.testing.assert_close(out[0], stored.attend()[0], rtol=1e-3, atol=1e-3)


def test_B99_value_scales_are_used(device: str) -> None:
    """Control: with every scale doubled, what is folded counts twice."""
    stored = storage(Case("int8", "int8", past=((384, 0),), n=1), device)
    stored.pages.v_scale.mul_(2)
    assert stored.error(stored.attend()) > 0.9


# Precision in 16 bits, with PyTorch's flash attention or what rounds as it does


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, return_debug_mask: bool, scale: float
) -> tuple[Tensor, ...]:
    """Flash attention's contract and its rounding: 16-bit operands and probabilities, sums in float32."""
    assert q.dtype == k.dtype == v.dtype != torch.float32
    assert q.shape[1] % k.shape[1] == 0
    assert q.stride(-1) == k.stride(-1) == 1
    assert not causal or k.shape[2] >= q.shape[2]
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    logits = q.float() @ wide_k.mT * scale
    if causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        logits = logits.masked_fill(hidden, float("-inf"))
    p = torch.exp(logits - logits.amax(-1, keepdim=True))
    out = (p.to(q.dtype).float() @ wide_v) / p.sum(-1, keepdim=True)
    return out.to(q.dtype), logits.logsumexp(-1), torch.empty(0)


@pytest.fixture
def flash_attention(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash)
        for module in (dense_module, prefill):
            monkeypatch.setattr(module, "flash_serves", lambda q: q.dtype != torch.float32)


half_types = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@half_types
@each_pair
@pytest.mark.usefixtures("flash_attention")
def test_16_bit_rows(k: str, v: str, dtype: torch.dtype, device: str) -> None:
    case = Case(k, v, dtype=dtype, n=40, past=((256, 20), (0, 0)), sinks=4)
    check(case, device)
    check(case, device, workspace_bytes=32 << 10)


@half_types
@pytest.mark.parametrize(("v_rms", "logit_std"), [(1, 1), (1, 3), (1e-2, 3), (1e-3, 1), (1e-3, 3)])
@pytest.mark.parametrize("v", ["turbo4", "int8"])
@pytest.mark.usefixtures("flash_attention")
def test_small_values_and_sharp_logits(v: str, v_rms: float, logit_std: float, dtype: torch.dtype, device: str) -> None:
    check(Case("int8", v, dtype=dtype, v_rms=v_rms, logit_std=logit_std, past=((384, 20),)), device)


@half_types
@pytest.mark.usefixtures("flash_attention")
def test_one_page_a_hundred_times_the_others(dtype: torch.dtype, device: str) -> None:
    for k, v in PAIRS:
        check(Case(k, v, dtype=dtype, loud_page=True, past=((256, 20),), sinks=4), device)


@pytest.mark.usefixtures("flash_attention")
def test_tiny_values_keep_their_precision_in_bf16(device: str) -> None:
    check(Case("turbo4", "turbo4", dtype=torch.bfloat16, v_rms=1e-5, past=((384, 0),), n=17), device)


@pytest.mark.usefixtures("flash_attention")
def test_keys_beyond_fp16_stay_finite(device: str) -> None:
    """Rotated keys can exceed the largest fp16 number although the rows do not."""
    case = Case("turbo4", "turbo4", dtype=torch.float16, past=((384, 0),))
    stored = storage(case, device)
    stored.pages.k_scale.copy_(torch.full_like(stored.pages.k_scale, 3e4))
    small = stored.q_rotated / 1e5
    out = attend_prefill(
        stored.q, small, stored.pages, case.layout, plan=stored.plan(), v_rotation=VRotation.create(LAYER, 64, device)
    )
    assert out.isfinite().all()


# Failures


def test_memory_that_runs_out_once_costs_nothing_but_blocks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = prefill.gather, [torch.OutOfMemoryError("once")]

    def once(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*args, **options)

    monkeypatch.setattr(prefill, "gather", once)
    check(Case("turbo4", "turbo4"), device)


def test_memory_that_runs_out_again_is_one_line(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("always")

    stored = storage(Case("turbo4", "turbo4"), device)
    monkeypatch.setattr(prefill, "gather", never)
    with pytest.raises(KvcoreError, match=r"^out of GPU memory in prefill: 17 rows.*smaller chunks") as caught:
        stored.attend()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("state", "ranges", "message"),
    [
        ((0, 100, 200), None, "whole pages"),
        ((0, 128, 140), None, "17 raw rows"),
        ((0, 0, 40), ([], [(0, 30)]), "not all of the 17 new rows are live"),
        ((0, 256, 300), ([(0, 128)], [(0, 128)]), "1 ranges for 2 pages"),
    ],
)
def test_plans_that_contradict_themselves(state: tuple[int, int, int], ranges: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefillPlan.create([state], 17, "cpu", None if ranges is None else [ranges])
