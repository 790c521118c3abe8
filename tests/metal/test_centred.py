"""Keys whose pages have a centre: attention by the Metal kernels against the definition, and folding what is left."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from metal_centred import LAYER, centred_attention, centred_view
from metal_shim import Recorder
from oracle import DTYPES, assert_planes_follow_spec, cast, encode, fp16_steps, gaussian, relative_error
from schedules import attended, compile_for, encoded

from kvcore.backends import Backend, load_backend
from kvcore.backends.metal.attention import FEW, attend, center_biases
from kvcore.backends.metal.capabilities import MAX_ROWS
from kvcore.layout import CODECS, KVView, Layout

LIMITS = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 4e-3}


@dataclass(frozen=True)
class Case:
    """What is attended to, and by how many query rows and heads."""

    name: str
    page_rows: tuple[int, ...]
    dim: int = 64
    batch: int = 1
    heads: int = 1
    group: int = 2
    rows: int = 1
    window: int | None = None
    keep: int = 0
    tail: int = 5
    sinks: int = 4
    size: float = 1.0
    dtype: str = "float32"
    v_codec: str = "turbo4"

    def __str__(self) -> str:
        return self.name

    def view(self, host: Backend) -> KVView:
        names = ("dim", "batch", "heads", "tail", "sinks", "size", "dtype", "v_codec")
        made = centred_view(host, self.page_rows, **{name: getattr(self, name) for name in names})
        return replace(made, keep=self.keep)

    def query(self) -> np.ndarray:
        return cast(gaussian(self.batch, self.heads * self.group, self.rows, self.dim, seed=5), self.dtype)


EQUAL, UNEQUAL = (64, 64, 64), (128, 57, 128)
CASES = (
    Case("equal pages", EQUAL),
    Case("unequal pages", UNEQUAL),
    Case("one page", (32,)),
    Case("a page of one row and an empty one", (32, 1, 0, 70)),
    Case("fewer rows than sinks in page 0", (3, 40, 9)),
    Case("without sinks", UNEQUAL, sinks=0),
    Case("without a tail", EQUAL, tail=0),
    Case("fewer biases and rows than MLX passes as arrays", (6,), group=1),
    Case("several sequences and heads", UNEQUAL, batch=2, heads=3),
    Case("D 80", UNEQUAL, dim=80, batch=2, heads=2, group=4),
    Case("D 128", UNEQUAL, dim=128, batch=2, heads=2, group=4),
    Case("D 80, rows", EQUAL, dim=80, rows=3, heads=2),
    Case("D 128, rows", UNEQUAL, dim=128, rows=3, heads=2),
    Case("vectors in chunks", UNEQUAL, heads=2, rows=5, group=7),
    Case("most vectors", (40, 33), rows=MAX_ROWS, group=3),
    Case("more query rows than tail", UNEQUAL, rows=4, tail=1),
    Case("a window", UNEQUAL, rows=4, window=100, heads=2),
    Case("a window with rows kept", UNEQUAL, rows=4, window=100, keep=40, sinks=0),
    Case("centres of zero", UNEQUAL, size=0.0),
    Case("large centres", UNEQUAL, size=50.0, rows=4, heads=2),
    Case("large centres at D 128", EQUAL, size=50.0, dim=128),
    Case("float16", UNEQUAL, dtype="float16", dim=128),
    Case("bfloat16", UNEQUAL, dtype="bfloat16", dim=128),
    Case("V in int8", UNEQUAL, v_codec="int8"),
)


@pytest.fixture(scope="module", autouse=True)
def _compiled(host: Backend) -> None:
    compile_for(
        lambda run, case=case: attend(host.ops, case.query(), case.view(host), 1.0, case.window, run) for case in CASES
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_follows_the_definition(host: Backend, case: Case) -> None:
    """A large centre makes large logits, whose rounding shows."""
    q, view, scale = case.query(), case.view(host), case.dim**-0.5
    out = attended(host, q, view, scale, case.window)
    limit = LIMITS[case.dtype] * (1 + case.size if case.size > 10 else 1)
    assert relative_error(out, centred_attention(q, view, scale, case.window)) <= limit


def test_centres_change_what_comes_out(host: Backend) -> None:
    """The same planes with other centres, or with pages cut elsewhere, are other keys."""
    case = next(case for case in CASES if case.name == "several sequences and heads")
    q, view = case.query(), case.view(host)
    out = attended(host, q, view, 0.125)
    for other in (replace(view, k_centers=view.k_centers[:, :, ::-1]), replace(view, page_rows=(128, 128, 57))):
        changed = attended(host, q, other, 0.125)
        assert relative_error(changed, centred_attention(q, other, 0.125)) <= LIMITS["float32"]
        assert relative_error(changed, out.astype(np.float64)) > 0.01


def test_centres_of_zero_leave_every_bit_as_it_is_without_them(host: Backend) -> None:
    case = next(case for case in CASES if case.name == "centres of zero")
    q, view = case.query(), case.view(host)
    plain = replace(view, layout=Layout(CODECS["turbo4"], CODECS["turbo4"], 64, 64), k_centers=None, page_rows=())
    np.testing.assert_array_equal(attended(host, q, view, 0.125), attended(host, q, plain, 0.125))


def test_a_centre_that_is_not_finite_spoils_no_row_that_does_not_see_its_page(host: Backend) -> None:
    case = next(case for case in CASES if case.name == "a window")
    q, view = case.query(), case.view(host)
    k_centers = np.array(view.k_centers)
    k_centers[:, :, 0] = np.nan
    out = attended(host, q, replace(view, k_centers=k_centers), 0.125, 100)
    assert relative_error(out, centred_attention(q, view, 0.125, 100)) <= LIMITS["float32"]


def test_while_the_sinks_hold_every_folded_row_centres_are_not_read(host: Backend) -> None:
    view = centred_view(host, (4,))
    q, recorder = gaussian(1, 2, 1, 64), Recorder()
    attend(host.ops, q, view, 0.125, None, recorder.run)
    assert [dict(key.template).get("CENTRED") for key in recorder.keys] == [False, None]
    assert relative_error(attended(host, q, view, 0.125), centred_attention(q, view, 0.125)) <= LIMITS["float32"]


def test_biases_are_never_so_few_that_MLX_would_pass_them_as_constants(host: Backend) -> None:
    for name in ("reference", "metal"):
        if name == "metal":
            pytest.importorskip("mlx")
        ops = load_backend(name).ops
        for case in CASES:
            view, turned = case.view(host), case.query().astype(np.float32)
            on_device = replace(view, k_centers=ops.asarray(view.k_centers))
            bias, page_of = map(ops.to_numpy, center_biases(ops, ops.asarray(turned), on_device))
            assert min(bias.size, page_of.size) >= FEW
            vectors = turned.reshape(case.batch, case.heads, -1, case.dim).astype(np.float64)
            want = vectors @ view.k_centers.astype(np.float64).swapaxes(2, 3)
            pages = len(case.page_rows)
            np.testing.assert_allclose(bias[..., :pages], want, rtol=1e-5, atol=1e-5 * max(1, np.abs(want).max()))
            assert bias.dtype == np.float32
            assert page_of.dtype == np.int32
            np.testing.assert_array_equal(np.bincount(page_of[: view.folded], minlength=pages), case.page_rows)


# Folding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 50.0])
def test_rows_in_float32_without_their_centre_fold_as_on_the_graph(host: Backend, dtype: str, size: float) -> None:
    """The cache takes a page's mean off in float32, whatever the rows' dtype was."""
    rows = cast(gaussian(2, 2, 64, 80) + size * gaussian(2, 2, 1, 80, seed=1), dtype).astype(np.float32)
    rest = rows - rows.mean(2, keepdims=True, dtype=np.float32)
    assert rest.dtype == np.float32
    got = encoded(host, "turbo4", rest, layer=LAYER, centred=True)
    want = encode(host, "turbo4", rest, layer=LAYER)
    assert_planes_follow_spec("turbo4", got, rest, layer=LAYER)
    assert (got["codes"] != want["codes"]).mean() < 1e-3
    assert fp16_steps(got["scale"], want["scale"]).max() <= 1
