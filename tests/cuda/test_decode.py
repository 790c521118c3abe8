"""Attention over pages against float64 attention over what they hold: interpreted without a GPU, compiled on one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
triton = pytest.importorskip("triton", reason="the package triton is not installed")

import triton.language as tl
from paging import coded, int32

from kvcore.backends.cuda.attend import LaunchConfig, Pages, VRotation, attend_pages, choose_config
from kvcore.backends.cuda.kernels.decode import raw_programs
from kvcore.backends.cuda.kernels.gl import gl, jit
from kvcore.backends.cuda.native import PAGE, to_native
from kvcore.backends.cuda.ops import TorchOps
from kvcore.backends.reference import spec
from kvcore.layout import CENTRED_TURBO4, CODECS, Codec, Layout, Rotation

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


@dataclass
class Case:
    """Sequences of ``lengths`` rows, whole pages of them folded; what attention should see is in ``dense``."""

    k: str
    v: str
    dim: int = 64
    kv_heads: int = 1
    group: int = 4
    lengths: tuple[int, ...] = (300,)
    folded: tuple[int, ...] = (128,)
    sinks: int = 4
    rows: int = 1
    window: int | None = None
    v_rms: float = 1.0
    loud_page: bool = False
    centre: float | None = 2.0  # size of the mean that a turbo4 page's keys have; None: a codec without centres
    dead: tuple[int, int] = (0, 0)  # rows of every sequence that were trimmed

    def __post_init__(self) -> None:
        if (self.k, self.v) == ("raw", "raw"):
            self.folded = (0,) * len(self.lengths)

    @property
    def layout(self) -> Layout:
        k = CENTRED_TURBO4 if self.k == "turbo4" and self.centre is not None else CODECS[self.k]
        return Layout(k, CODECS[self.v], self.dim, self.dim)


def error(case: Case, device: str, config: LaunchConfig | None, *, double_v_scales: bool = False) -> float:
    """The worst ‖out − ref‖ / ‖ref‖ of a sequence and head."""
    rng = np.random.default_rng(0)
    dtype = torch.float16 if device == "cuda" else torch.float32
    ops = TorchOps(device)
    pages, dense = _pages(case, ops, rng, dtype)
    if double_v_scales:
        pages.v_scale.mul_(2)
    shape = (len(case.lengths), case.kv_heads, case.rows * case.group, case.dim)
    q = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(device, dtype)
    rotated = q
    if case.layout.k.codebook is not None:
        rotated = Rotation.create(ops, LAYER, "k", case.dim).apply(ops, q.float()).to(dtype)
    out = attend_pages(
        q,
        rotated,
        pages,
        case.layout,
        query_rows=case.rows,
        v_rotation=VRotation.create(LAYER, case.dim, device) if case.layout.v.codebook else None,
        window=case.window,
        config=config,
        out_dtype=torch.float32,
    )
    errors = [
        _sequence_error(case, out[b].cpu().numpy(), q[b].float().cpu().numpy(), *dense[b])
        for b in range(len(case.lengths))
    ]
    return float(np.max(errors))  # NaN is the worst


def _sequence_error(case: Case, out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
    if k.shape[1] == 0:
        assert not out.any(), "an empty sequence gives zeros"
        return 0.0
    by_head = q.reshape(case.kv_heads, case.rows, case.group, case.dim).transpose(0, 2, 1, 3)
    wide = by_head.reshape(1, case.kv_heads * case.group, case.rows, case.dim)
    ref = spec.attention(wide, k[None], v[None], case.dim**-0.5, case.window)[0]
    ref = ref.reshape(case.kv_heads, case.group, case.rows, case.dim).transpose(0, 2, 1, 3).reshape(q.shape)
    return float((np.linalg.norm(out - ref, axis=-1) / np.linalg.norm(ref, axis=-1)).max())


def _pages(
    case: Case, ops: TorchOps, rng: np.random.Generator, dtype: torch.dtype
) -> tuple[Pages, list[tuple[np.ndarray, np.ndarray]]]:
    """Pages in shuffled order; unused raw rows are NaN."""
    device = ops.device
    raw_counts = [-(-(n - f) // PAGE) for n, f in zip(case.lengths, case.folded, strict=True)]
    order = rng.permutation(sum(case.folded) // PAGE + 2).tolist()
    raw_order = rng.permutation(sum(raw_counts) + len(raw_counts) + 1).tolist()
    sequences = len(case.lengths)
    table = np.zeros((sequences, max(1, max(case.folded) // PAGE)), np.int64)
    raw_table = np.zeros((sequences, max(1, *raw_counts)), np.int64)
    sink_page = [raw_order.pop() for _ in range(sequences)]
    for b in range(sequences):
        for i in range(case.folded[b] // PAGE):
            table[b, i] = order.pop()
        for i in range(raw_counts[b]):
            raw_table[b, i] = raw_order.pop()
    planes: dict[str, torch.Tensor] = {}
    dense: list[list[np.ndarray]] = [[] for _ in range(sequences)]
    for part, codec in (("k", case.layout.k), ("v", case.layout.v)):
        raw = torch.full(
            (sum(raw_counts) + sequences + 1, case.kv_heads, PAGE, case.dim), float("nan"), device=device, dtype=dtype
        )
        for b, (length, folded) in enumerate(zip(case.lengths, case.folded, strict=True)):
            rows = rng.standard_normal((1, case.kv_heads, length, case.dim)).astype(np.float32)
            rows *= case.v_rms if part == "v" else 1.0
            if part == "k" and codec.centred:
                means = rng.standard_normal((1, case.kv_heads, -(-length // PAGE), case.dim)) * case.centre
                rows += np.repeat(means, PAGE, 2)[:, :, :length].astype(np.float32)
            if case.loud_page and part == "v":
                rows[:, :, :PAGE] *= 100
            x = torch.from_numpy(rows).to(device, dtype)
            sinks = min(case.sinks, folded)
            raw[sink_page[b], :, :sinks] = x[0, :, :sinks]
            for i in range(raw_counts[b]):
                piece = x[0, :, folded + i * PAGE : folded + (i + 1) * PAGE]
                raw[raw_table[b, i], :, : piece.shape[1]] = piece
            seen = x[0].float()
            if folded:
                seen = torch.cat(
                    [
                        seen[:, :sinks],
                        _fold(case, ops, part, codec, x, folded, table[b], planes)[:, sinks:],
                        seen[:, folded:],
                    ],
                    1,
                )
            living = [t for t in range(length) if not case.dead[0] <= t < case.dead[1]]
            dense[b].append(seen[:, living].double().cpu().numpy())
        planes[f"raw_{part}"] = raw
        planes.setdefault(part, raw)
        planes.setdefault(f"{part}_scale", raw)
        if part == "k" and codec.centred:
            planes.setdefault("k_center", raw[:, :, 0].half())  # nothing is folded
    counts = {"sinks": [min(case.sinks, f) for f in case.folded], "folded": case.folded, "length": case.lengths}
    pages = Pages(
        **planes,
        table=int32(table.tolist(), device),
        raw_table=int32(raw_table.tolist(), device),
        ranges=int32([_live(case, 0, min(case.sinks, f), table.shape[1]) for f in case.folded], device),
        raw_ranges=int32([_live(case, f, 0, raw_table.shape[1]) for f in case.folded], device),
        sink_page=int32(sink_page, device),
        **{name: int32(list(values), device) for name, values in counts.items()},
    )
    return pages, [(k, v) for k, v in dense]


def _live(case: Case, start: int, shadowed: int, pages: int) -> list[int]:
    """Live rows of each page from slot ``start`` on, as first | end << 16; sinks shadow the first ones."""
    ranges = []
    for page in range(pages):
        slots = range(start + page * PAGE, start + (page + 1) * PAGE)
        alive = [i for i, slot in enumerate(slots) if not case.dead[0] <= slot < case.dead[1]]
        alive = [i for i in alive if page > 0 or i >= shadowed]
        ranges.append(min(alive) | (max(alive) + 1) << 16 if alive else 0)
    return ranges


def _fold(
    case: Case,
    ops: TorchOps,
    part: str,
    codec: Codec,
    x: torch.Tensor,
    folded: int,
    table: np.ndarray,
    planes: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Store the folded rows natively, and return them decoded [H, folded, D] float32."""
    rotation = Rotation.create(ops, LAYER, part, case.dim) if codec.codebook else None
    canonical, decoded, centers = coded(ops, codec, x[:, :, :folded], rotation)
    native = to_native(codec, part, {name: p.unflatten(2, (-1, PAGE)) for name, p in canonical.items()})
    for name, plane in (native | ({} if centers is None else {"center": centers})).items():
        key = f"{part}_{name}" if name in ("scale", "center") else part
        if key not in planes:
            count = sum(case.folded) // PAGE + 2
            planes[key] = torch.zeros(
                count, *plane.shape[1:2], *plane.shape[3:], device=plane.device, dtype=plane.dtype
            )
        for i in range(folded // PAGE):
            planes[key][table[i]] = plane[0, :, i]
    return decoded[0]


@pytest.fixture(autouse=True)
def results_that_nobody_wrote_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is full of a maximum that would outweigh all others; NaN would weigh nothing."""
    for name in ("empty", "empty_like"):
        new = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, _new=new, **k: _new(*a, **k).fill_(1000))


def config(
    device: str, *, warps: int = 1, tiles: int = 2, raw_tiles: int = 1, splits: int = 2, columns: int = 8
) -> LaunchConfig | None:
    """A small grid for the interpreter; on a GPU the kernels' own choice."""
    return None if device == "cuda" else LaunchConfig(warps, splits + 2, 2, columns, tiles, raw_tiles=raw_tiles)


def check(case: Case, device: str, **launch: int) -> None:
    if case.layout.quantized:
        settings = config(device, **launch)
    else:
        settings = config(device, **(launch | {"splits": 0}))
    assert error(case, device, settings) < (1e-5 if device == "cpu" else 1e-3)


@each_pair
def test_ragged_batch_with_an_empty_sequence(k: str, v: str, device: str) -> None:
    """C6, C11: lengths 0, 1 and 300, shuffled pages, sinks, raw tail."""
    check(Case(k, v, lengths=(0, 1, 300), folded=(0, 0, 128), kv_heads=2, group=3), device)


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 256])
@each_pair
def test_head_sizes(k: str, v: str, dim: int, device: str) -> None:
    """On a GPU with one KV head for two warps a program, and with four for one."""
    if v == "turbo3" and dim % 64:
        pytest.skip("turbo3 pages need a multiple of 64")
    for kv_heads in (1, 4) if device == "cuda" else (1,):
        check(Case(k, v, dim=dim, group=3, kv_heads=kv_heads), device, tiles=1)


@pytest.mark.parametrize("group", [1, 7, 8, 16])
def test_C7_query_heads_per_kv_head(group: int, device: str) -> None:
    check(
        Case("turbo4", "turbo4", group=group, lengths=(400,), folded=(256,)),
        device,
        warps=2,
        columns=8 if group <= 8 else 16,
    )


@pytest.mark.parametrize(("programs", "raw_programs"), [(5, 2), (1, 0), (3, 0), (40, 0), (40, 1)])
@pytest.mark.parametrize(("warps", "tiles"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_launch_shapes(warps: int, tiles: int, programs: int, raw_programs: int, device: str) -> None:
    """Every division of the same work gives the same result."""
    case = Case("int8", "turbo4", lengths=(700,), folded=(512,))
    config = LaunchConfig(warps, programs, raw_programs, 8, tiles)
    assert error(case, device, config) < (1e-5 if device == "cpu" else 1e-3)


@pytest.mark.parametrize(
    ("warps", "tiles", "ring_tiles", "splits"),
    [
        (1, 2, 0, 2),
        (2, 2, 0, 3),
        (2, 2, 4, 1),
        *(
            pytest.param(*shape, marks=pytest.mark.full)
            for shape in [(1, 2, 4, 1), (2, 4, 0, 3), (4, 8, 0, 1), (1, 2, 1, 5)]
        ),
    ],
)
def test_each_page_has_its_own_centre(warps: int, tiles: int, ring_tiles: int, splits: int, device: str) -> None:
    """Programs that begin within a page, warps without a page, several pages for each."""
    case = Case("turbo4", "turbo4", centre=8.0, lengths=(800, 300), folded=(640, 128))
    config = LaunchConfig(warps, splits + 1, 1, 8, tiles, ring_tiles, 0)
    assert error(case, device, config) < (3e-6 if device == "cpu" else 2e-3)


@pytest.mark.parametrize(
    ("warps", "tiles", "ring_tiles", "pages"),
    [(1, 8, 0, 18), pytest.param(1, 1, 4, 18, marks=pytest.mark.full), (2, 1, 8, 35)],
)
def test_more_pages_than_one_product_of_centres_holds(
    warps: int, tiles: int, ring_tiles: int, pages: int, device: str
) -> None:
    """A warp takes the centres of its pages sixteen at a time; the last program begins within sixteen."""
    rows = pages * PAGE
    case = Case("turbo4", "turbo4", dim=32, centre=8.0, lengths=(rows, rows + 7), folded=(rows - PAGE, rows))
    config = LaunchConfig(warps, 2, 1, 8, tiles, ring_tiles, 0)
    assert error(case, device, config) < (3e-6 if device == "cpu" else 2e-3)


@pytest.mark.parametrize(("dim", "programs"), [(80, 1), (96, 3), (80, 12)])
def test_kinds_meet_in_a_program_where_the_merge_undoes_the_rotation(dim: int, programs: int, device: str) -> None:
    case = Case("turbo4", "turbo4", dim=dim, lengths=(0, 90, 300, 256), folded=(0, 0, 256, 256))
    assert error(case, device, LaunchConfig(1, programs, 0, 8, 2)) < (1e-5 if device == "cpu" else 1e-3)


@pytest.mark.parametrize("raw_programs", [0, 1, 4])
@pytest.mark.parametrize(("k", "v"), [("raw", "turbo4"), ("turbo4", "turbo4")])
def test_a_long_raw_tail_where_nothing_is_folded(k: str, v: str, raw_programs: int, device: str) -> None:
    """As before a prompt's hand-over in turbo4-delegated."""
    case = Case(k, v, dim=32, lengths=(900, 0, 300), folded=(0, 0, 128))
    config = LaunchConfig(1, 9, raw_programs, 8, 1)
    assert error(case, device, config) < (1e-5 if device == "cpu" else 1e-3)


@pytest.mark.parametrize(("k", "v", "dim"), [("raw", "raw", 32), ("turbo4", "turbo4", 64), ("turbo4", "turbo4", 80)])
def test_nan_in_a_query_or_a_raw_key_is_nan_where_it_was_seen(k: str, v: str, dim: int, device: str) -> None:
    """What samples the next token must see that logits are not finite."""
    case = Case(k, v, dim=dim, lengths=(140, 135), folded=(128, 128))
    dtype = torch.float16 if device == "cuda" else torch.float32
    pages, _ = _pages(case, TorchOps(device), np.random.default_rng(0), dtype)
    q = torch.ones(2, 1, case.group, dim, device=device, dtype=dtype)
    rotation = VRotation.create(LAYER, dim, device) if v == "turbo4" else None

    def nan_rows() -> list[list[bool]]:
        out = attend_pages(q, q, pages, case.layout, v_rotation=rotation, config=LaunchConfig(1, 3, 0, 8, 1))
        found = out.isnan()
        assert bool((found.all(-1) == found.any(-1)).all())
        return found.any(-1)[:, 0].tolist()

    assert nan_rows() == [[False] * 4] * 2
    q[0, 0, 2] = float("nan")
    assert nan_rows() == [[False, False, True, False], [False] * 4]
    q[0, 0, 2] = 1
    pages.raw_k[pages.raw_table[1, 0], 0, 5] = float("nan")
    assert nan_rows() == [[False] * 4, [True] * 4]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LaunchConfig(1, 2, 2, 8, 1), "2 of 2 programs for raw rows"),
        (LaunchConfig(1, 9, 3, 8, 1), "3 of 9 programs for raw rows"),
        (LaunchConfig(1, 9, 1, 8, 1, 2), "raw and turbo4 do not go through shared memory"),
    ],
)
def test_launches_that_the_kernels_do_not_know_are_refused(config: LaunchConfig, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        error(Case("raw", "turbo4"), "cpu", config)


def test_keys_of_turbo4_without_centres(device: str) -> None:
    check(Case("turbo4", "turbo4", centre=None, lengths=(400,), folded=(256,)), device)


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 259])
def test_C5_raw_lengths(length: int, device: str) -> None:
    check(Case("raw", "raw", lengths=(length,), folded=(0,)), device)


@pytest.mark.parametrize(("k", "v"), [("int8", "int8"), ("int8", "turbo4"), ("turbo4", "turbo4")])
def test_tiles_through_shared_memory(k: str, v: str, device: str) -> None:
    """More tiles than slots, and none."""
    case = Case(k, v, lengths=(1, 700), folded=(0, 512), dead=(70, 300))
    assert error(case, device, LaunchConfig(1, 3, 2, 8, 1, 2, 0)) < (1e-5 if device == "cpu" else 1e-3)


@pytest.mark.parametrize("raw_programs", [0, 1])
def test_long_programs_take_shared_memory_and_short_ones_do_not(raw_programs: int, device: str) -> None:
    case = Case("turbo4", "turbo4", dim=32, lengths=(530, 400, 700), folded=(512, 384, 640))
    config = LaunchConfig(1, 2, raw_programs, 8, 1, 2, ring_from=256)
    assert error(case, device, config) < (1e-5 if device == "cpu" else 1e-3)


def test_several_query_rows_are_causal_among_themselves(device: str) -> None:
    check(Case("turbo4", "turbo4", lengths=(400, 261), folded=(256, 128), rows=4), device, columns=16)


@pytest.mark.parametrize("dead", [(70, 530), (30, 128), (500, 601)])
@pytest.mark.parametrize(("k", "v"), [("turbo4", "turbo4"), ("raw", "turbo3"), ("raw", "raw")])
def test_nobody_sees_trimmed_rows(k: str, v: str, dead: tuple[int, int], device: str) -> None:
    """A trimmed middle: within a page, over several pages, from the folded part into the raw tail."""
    check(Case(k, v, lengths=(700,), folded=(512,), dead=dead), device, raw_tiles=2)


def test_sixteen_query_rows_take_several_column_blocks(device: str) -> None:
    check(Case("int8", "int8", lengths=(400,), folded=(256,), rows=16), device, columns=16)


def test_B27_a_sliding_window_sees_exactly_its_rows(device: str) -> None:
    check(Case("turbo4", "turbo4", lengths=(700,), folded=(512,), window=200), device)


@pytest.mark.parametrize("v_rms", [1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("v", ["turbo4", "int8"])
def test_small_values_do_not_underflow(v: str, v_rms: float, device: str) -> None:
    check(Case("int8", v, v_rms=v_rms, lengths=(500,), folded=(384,)), device)


def test_one_page_a_hundred_times_the_others(device: str) -> None:
    check(Case("turbo4", "turbo4", loud_page=True, lengths=(500,), folded=(384,)), device)


def test_B99_value_scales_are_used(device: str) -> None:
    """All scales doubled: with everything folded the output doubles, so it is off by itself."""
    case = Case("int8", "int8", lengths=(256,), folded=(256,), sinks=0)
    settings = config(device)
    assert error(case, device, settings) < 1e-3
    assert error(case, device, settings, double_v_scales=True) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("dim", [64, 128, 256])
@each_pair
def test_the_chosen_grid_never_exceeds_what_the_combining_program_holds(k: str, v: str, dim: int) -> None:
    layout = Layout(CODECS[k], CODECS[v], dim, dim)
    for processors in (1, 20, 132):
        for rows in (1, 3, 8, 63, 64, 128, 512, 5000):
            for columns in (1, 4, 10, 16, 64):
                chosen = choose_config(layout, rows, columns, processors, 131072)
                assert 1 <= chosen.programs - chosen.raw_programs <= 128
                assert chosen.raw_programs in ((0, 1, 4) if layout.quantized else (0,))
                assert chosen.columns in (8, 16)


@jit
def _divide(OUT, raw_steps, steps, programs, LEAST: tl.constexpr):
    gl.store(OUT, raw_programs(raw_steps, steps, programs, LEAST))


@pytest.mark.parametrize(("programs", "least"), [(26, 1), (33, 1), (132, 4)])
@pytest.mark.parametrize("raw_steps", [0, 1, 9, 17, 2000])
def test_no_kind_of_rows_waits_long_for_the_other(raw_steps: int, programs: int, least: int, device: str) -> None:
    """Even shares are the least that the longest program can have; it has twice that, and a step for each kind."""
    out = torch.zeros((), dtype=torch.int32, device=device)
    for steps in (0, 1, 60, 124, 128, 252, 1020, 3000):
        _divide[(1,)](out, raw_steps, steps, programs, least, num_warps=1)
        raw = int(out)
        assert least <= raw <= programs - (steps > 0)
        longest = max(-(-raw_steps // raw), -(-steps // max(1, programs - raw)))
        assert longest <= 2 * -(-(raw_steps + steps) // programs) + 1


def test_launches_that_were_measured_on_an_h200() -> None:
    """Two warps where rows are few; a kind of rows a program where programs are short; shared memory where long."""
    turbo4, int8 = (Layout(CODECS[x], CODECS[x], 128, 128) for x in ("turbo4", "int8"))

    def shapes(layout: Layout, tokens: int, *rows: int) -> list[LaunchConfig]:
        return [choose_config(layout, n, 4, 132, tokens) for n in rows]

    assert [x.warps for x in shapes(turbo4, 8192, 1, 3, 4, 8, 128)] == [2, 2, 1, 1, 1]
    found = shapes(int8, 131072, 4, 8, 32, 64, 128, 512, 2000)
    assert [x.programs for x in found] == [132, 132, 33, 16, 8, 2, 1]
    assert [x.raw_programs for x in found] == [4, 4, 1, 0, 0, 0, 0]
    assert not any(x.ring_tiles for x in found)
    assert [x.ring_tiles for x in shapes(turbo4, 32768, 3, 8, 32, 128)] == [0, 0, 4, 4]
    assert [x.ring_tiles for x in shapes(turbo4, 131072, 3, 8, 32, 128)] == [0, 4, 4, 4]
    assert [x.ring_tiles for x in shapes(turbo4, 4096, 8, 32, 128, 512)] == [0, 0, 0, 4]
    raw = Layout(CODECS["raw"], CODECS["raw"], 64, 64)
    assert [x.raw_tiles for x in shapes(raw, 8192, 3, 8, 48, 192)] == [1, 1, 2, 2]
    assert [x.programs for x in shapes(raw, 8192, 3, 8, 48, 192)] == [128, 128, 22, 11]
