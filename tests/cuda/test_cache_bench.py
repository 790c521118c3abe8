"""What `kvcore bench cache` times is right: the same launches in Triton's interpreter, or compiled on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
pytest.importorskip("triton", reason="the package triton is not installed")

import kvcore.bench.cache as bench
from kvcore.errors import KvcoreError


def storage(mode: str, device: str, tokens: int) -> bench.Storage:
    return bench.Storage(mode, "float16", device, layers=1, batch=2, tokens=tokens, heads=1, group=2, dim=64)


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_an_append_writes_its_rows_and_counts_its_bytes(mode: str, device: str) -> None:
    variant = bench.append_variant(storage(mode, device, 256))
    assert variant.check == 0
    row = 2 * 2 * 64  # a row of both sequences
    # q (two heads), k and v are read; both are written, and q for raw rows and, where K is quantized, for pages.
    assert variant.moved == row * (4 + 4 + (2 if mode == "turbo4" else 0))


@pytest.mark.parametrize("mode", ["int8", "turbo4-asym"])
def test_a_fold_quantizes_every_page(mode: str, device: str) -> None:
    pages = storage(mode, device, 384)
    pages.native.planes["v_scale"].fill_(float("nan"))
    variant = bench.fold_variant(pages)
    assert variant.check <= 1e-3
    assert variant.row["tokens"] == 256
    folded = pages.tables.table[:, :2].long()
    assert pages.native.planes["v_scale"][0, folded].isfinite().all()


@pytest.mark.parametrize("mode", ["fp16", "turbo4"])
def test_a_trim_of_32k_tokens_copies_nothing(mode: str, device: str) -> None:
    """The row that is run on a GPU, with one small layer: 300 trims, over page borders."""
    trim = bench.trim.Trim(mode, "float16", device, layers=1, heads=1)
    found = bench.trim.row(trim, 300)
    assert (found["kernel"], found["tokens"], found["bytes_copied"], found["repeats"]) == ("trim", 32768, 0, 300)
    assert 0 < found["us_p10"] <= found["us"] <= found["us_p90"]
    assert found["us_p10"] < 50
    tables = trim.storage.tables
    assert tables.rows_folded(0) == (0 if mode == "fp16" else tables.length(0) - 128 - (303 % 128))
    assert {*found} <= {*bench.COLUMNS, "repeats"}


def test_a_trim_that_copies_rows_is_not_timed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trim = bench.trim.Trim("fp16", "float16", device, tokens=1024, layers=1, heads=1)
    drop = trim.storage.drop

    def slow(first: int, count: int) -> None:
        trim.storage.raw.planes["k"][:, 0] = 0
        drop(first, count)

    monkeypatch.setattr(trim.storage, "drop", slow)
    with pytest.raises(KvcoreError, match="trim, fp16: rows of the cache were copied: not timed"):
        bench.trim.row(trim, 5)


def test_a_wrong_fold_is_not_timed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_codes_off", lambda _: 0.5)
    with pytest.raises(KvcoreError, match="fold, int8: off by 5"):
        bench.fold_variant(storage("int8", device, 384))
