"""Centres in prompt-cache files: the same rows back, damage told in one line, and files of before there were any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import SMALL
from test_prompt_cache import edited, ids, prefilled, same_rows

import kvcore
from kvcore.cache import CacheRows
from kvcore.errors import InputError, ModelError
from kvcore.layout import KVView, WindowPolicy
from kvcore.modes import MODES
from kvcore.promptcache import write_prompt_cache
from kvcore.weights.safetensors import CODE_DTYPES, DTYPES, open_safetensors


def saved(path: Path, model: kvcore.Model, change: Callable[[KVView], KVView] = lambda view: view) -> kvcore.Cache:
    """A file of 200 tokens in mode turbo4, 50 of which were trimmed and run again; views as ``change`` leaves them."""
    cache = prefilled(model, ids(200), "turbo4")
    cache.trim(100)
    model.prefill(ids(100, 1), cache)
    rows = cache.export()
    rows = CacheRows(tuple(change(view) for view in rows.views), rows.holes, rows.handed_over)
    tokens = [*ids(200)[:100], *ids(100, 1)]
    write_prompt_cache(path, model.backend.ops, rows, tokens, model._identity(MODES["turbo4"]), cache.spec.dtype)
    return cache


def test_the_pages_of_a_history_come_back(model: kvcore.Model, tmp_path: Path) -> None:
    model, path = replace(model, window=replace(SMALL, boundary_layers=0)), tmp_path / "cache"
    cache = saved(path, model)
    loaded, _ = model.load_cache(path, "turbo4")
    same_rows(model, loaded, cache)
    views = [each.export().views for each in (cache, loaded)]
    for one, other in zip(*views, strict=True):
        assert one.page_rows == other.page_rows == (32, 32, 32, 4, 32, 32)
        assert np.array_equal(one.k_centers, other.k_centers)
    file = open_safetensors(path)
    names = [name for name in file.entries if name.endswith((".center", ".page_rows"))]
    pages = {name: file.array(name, DTYPES | CODE_DTYPES) for name in names}
    assert {name: (str(x.dtype), x.shape) for name, x in pages.items()} == {
        "layers.0.k.folded.center": ("float16", (1, 2, 6, 64)),
        "layers.0.k.folded.page_rows": ("int32", (6,)),
        "layers.1.k.folded.center": ("float16", (1, 2, 6, 64)),
        "layers.1.k.folded.page_rows": ("int32", (6,)),
    }


def test_raw_layers_and_other_modes_have_no_centres(model: kvcore.Model, tmp_path: Path) -> None:
    for mode, window in (("turbo4", replace(SMALL, boundary_layers=1)), ("int8-turbo4", SMALL), ("turbo4-asym", SMALL)):
        own, path = replace(model, window=window), tmp_path / mode
        own.save_cache(path, prefilled(own, ids(100), mode), ids(100))
        assert not [name for name in open_safetensors(path).entries if "center" in name or "page_rows" in name]
        assert own.load_cache(path, mode)[0].tokens == 100


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"page_rows": (32, 32, 32, 4, 32, 31)}, r"the pages of layer 0 have \[32, .*, 31\] rows, 164 are quantized"),
        ({"page_rows": (32, 32, 32, 4, 64, 0)}, r"the pages of layer 0 have \[32, .*, 0\] rows, 164 are"),
        ({"page_rows": (32, 32, 33, 3, 32, 32)}, r"the pages of layer 0 have \[32, 32, 33, .*\] rows, 164 are"),
        ({"page_rows": (32, 32, 32, 4, 64)}, r"layers.0.k.folded.page_rows is int32 \(5,\), should be int32 \(6,\)"),
        ({"page_rows": ()}, "it has no tensor layers.0.k.folded.page_rows"),
        ({"k_centers": np.zeros((1, 2, 6, 64), np.float32)}, "center is float32 .* should be float16"),
        ({"k_centers": np.zeros((1, 2, 6, 32), np.float16)}, r"should be float16 \(1, 2, 6, 64\)"),
    ],
    ids=["sum", "empty page", "too long", "fewer", "none", "dtype", "width"],
)
def test_damaged_centres_are_one_line(model: kvcore.Model, tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    model, path = replace(model, window=SMALL), tmp_path / "cache"
    saved(path, model, lambda view: replace(view, **wrong))
    with pytest.raises(ModelError, match=message) as caught:
        model.load_cache(path, "turbo4")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_whose_pages_differ_are_damaged(model: kvcore.Model, tmp_path: Path) -> None:
    """Pages belong to all layers."""
    model, path, pages = (
        replace(model, window=SMALL),
        tmp_path / "cache",
        iter([(32, 32, 32, 4, 32, 32), (32,) * 5 + (4,)]),
    )
    saved(path, model, lambda view: replace(view, page_rows=next(pages)))
    with pytest.raises(ModelError, match=r"is damaged: the pages of its layers have different rows$"):
        model.load_cache(path, "turbo4")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "turbo4"])
def test_files_of_version_1_without_centres_are_read(model: kvcore.Model, tmp_path: Path, mode: str) -> None:
    path, cache = tmp_path / "cache", prefilled(model, ids(300), mode)
    model.save_cache(path, cache, ids(300))
    edited(path, lambda about: about.update(version=1))
    same_rows(model, model.load_cache(path, mode)[0], cache)


@pytest.mark.parametrize("window", [WindowPolicy(), WindowPolicy(boundary_layers=1)], ids=["folded", "boundary"])
def test_keys_without_centres_are_refused(model: kvcore.Model, tmp_path: Path, window: WindowPolicy) -> None:
    """As version 1 wrote them: turbo4's keys as they are, and a description that knows of no centre."""
    model, path = replace(model, window=window), tmp_path / "cache"
    model.save_cache(path, prefilled(model, ids(300), "turbo4"), ids(300))
    edited(path, lambda about: (about.update(version=1), about["layout"].pop("k_center")))
    message = r"format version 1, whose keys in mode turbo4 have no centres: .* 2 of them, so make the file again$"
    with pytest.raises(InputError, match=message) as caught:
        model.load_cache(path, "turbo4")
    assert str(caught.value).startswith(str(path))
    assert caught.value.exit_code == 2
    with pytest.raises(InputError, match="mode is turbo4 in the file and int8 here"):
        model.load_cache(path, "int8")
