"""Models with sliding windows: all layers (mistral) or some (ministral), beside transformers; rows that go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llamas import SMALL, Transformers, divergence, in_mode, load_on, logits, random_ids, tiny_folder
from tiny import TinyLlama

import kvcore
from kvcore.backends import Backend
from kvcore.layout import Cap
from kvcore.models.config import LlamaConfig
from kvcore.modes import MODES

WINDOW = 40
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "ministral": {"sliding_window": WINDOW, "layer_types": ("full_attention", "sliding_attention")},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
FAST = (("mistral", "turbo4"), ("ministral", "int8"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sliding")
    plain = {"plain": tiny_folder(root / "plain", eos_token_id=None)}
    return plain | {kind: tiny_folder(root / kind, eos_token_id=None, **shape) for kind, shape in KINDS.items()}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, kvcore.Model]:
    return {kind: kvcore.load(path, backend="reference", window=SMALL) for kind, path in folders.items()}


@each_kind
def test_B27_logits_are_those_of_transformers(backend: Backend, folders: dict[str, Path], kind: str) -> None:
    """90 tokens at once, in chunks below and above the window, and the last ones one by one."""
    model, ids = load_on(backend, folders[kind], dtype="float32"), random_ids(90)
    want = Transformers.tiny(TinyLlama(eos_token_id=None, **KINDS[kind])).logits(ids)
    plain = logits(load_on(backend, folders["plain"], dtype="float32"), ids)
    np.testing.assert_allclose(plain[:WINDOW], want[:WINDOW], atol=2e-4)
    assert np.abs(plain[-1] - want[-1]).max() > 0.05, "the window changes nothing: the test says nothing"
    for chunk in (90, 33):
        np.testing.assert_allclose(logits(model, ids, chunk=chunk), want, atol=2e-4)
    cache = model.new_cache()
    got = [logits(model, ids[:86], chunk=50, cache=cache), logits(model, ids[86:], chunk=1, cache=cache)]
    np.testing.assert_allclose(np.concatenate(got), want, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param(kind, mode, marks=[] if (kind, mode) in FAST else pytest.mark.full)
        for kind in KINDS
        for mode in MODES
    ],
)
def test_every_mode_slides(models: dict[str, kvcore.Model], kind: str, mode: str) -> None:
    """Quantized rows inside the window: little is lost. Where all layers slide, no more rows live than they see."""
    wide = {"sliding_window": 150, "layer_types": KINDS[kind].get("layer_types")}
    config = replace(models[kind].config, layer_windows=(None if kind == "ministral" else 150, 150))
    model, ids = replace(models[kind], config=config), random_ids(300)
    raw = Transformers.tiny(TinyLlama(eos_token_id=None, **wide)).logits(ids)
    model = in_mode(model, mode, SMALL)
    cache = model.new_cache()
    cache.begin_decode()
    got = logits(model, ids, chunk=32, cache=cache)
    stats = cache.stats()
    assert (cache.offset, stats.tokens) == (300, 150 if kind == "mistral" else 300)
    assert (stats.rows_folded >= 86) == MODES[mode].quantized
    assert divergence(raw, got).mean() <= (1e-6 if mode == "fp16" else 0.05)


@pytest.mark.parametrize("mode", ["fp16", "int8-turbo4", "turbo4-delegated"])
def test_a_sliding_cache_stays_as_small_as_its_window(models: dict[str, kvcore.Model], mode: str) -> None:
    """Bytes, rewinding, a change of mode and a fork after 400 tokens."""
    model = models["mistral"]
    cache = model.new_cache(mode)
    assert cache.spec.cap == Cap(WINDOW, 0)
    sizes = []
    for start in range(0, 400, 50):
        model.forward(random_ids(50, seed=start)[None], cache)
        cache.begin_decode()
        sizes.append(cache.stats().kv_bytes_allocated)
    assert (cache.tokens, cache.offset) == (WINDOW, 400)
    assert sizes[-1] == sizes[2]
    other, fork = model.convert_cache(cache, "int8"), cache.fork()
    assert cache.rewind(390) == 390
    assert (fork.offset, fork.tokens, other.offset, other.tokens) == (400, WINDOW, 400, WINDOW)
    for each in (cache, other, fork):
        assert np.isfinite(model.forward(np.array([[7]]), each)).all()


@pytest.mark.parametrize(
    ("size", "keep", "cap"), [(30, 4, Cap(30, 4)), (44, 4, Cap(40, 0)), (500, 4, Cap(40, 0)), (43, 4, Cap(43, 4))]
)
def test_the_narrower_of_cap_and_window_decides(
    models: dict[str, kvcore.Model], size: int, keep: int, cap: Cap
) -> None:
    assert models["mistral"].new_cache(max_kv_size=size, keep=keep).spec.cap == cap
    assert models["ministral"].new_cache(max_kv_size=size, keep=keep).spec.cap == Cap(size, keep)


@each_kind
def test_a_sliding_prompt_cache_goes_on_from_its_file(
    models: dict[str, kvcore.Model], folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    model, ids = models[kind], random_ids(120).tolist()
    cache = model.new_cache("int8")
    model.prefill(ids, cache)
    model.save_cache(tmp_path / "cache", cache, ids)
    loaded, _ = model.load_cache(tmp_path / "cache", "int8")
    assert (loaded.offset, loaded.tokens) == (cache.offset, cache.tokens)
    np.testing.assert_array_equal(*(model.forward(np.array([[9, 8, 7]]), each) for each in (cache, loaded)))
    with pytest.raises(kvcore.InputError, match="model is"):
        models["plain"].load_cache(tmp_path / "cache", "int8")


@each_kind
def test_a_converted_checkpoint_slides_too(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    from kvcore.weights import open_checkpoint
    from kvcore.weights.save import write_hf

    write_hf(open_checkpoint(folders[kind]), tmp_path / "out")
    got, want = (open_checkpoint(path).config for path in (tmp_path / "out", folders[kind]))
    assert got == want
    assert isinstance(got, LlamaConfig)
    assert got.layer_windows == ((WINDOW, WINDOW) if kind == "mistral" else (None, WINDOW))
