"""Prompt-cache files: the same rows and answers on every backend, and refusals that name both values."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import BACKENDS, SMALL
from tiny import write_tiny_llama
from tiny_tokenizer import write_tiny_tokenizer

import kvcore
from kvcore.errors import InputError, KvcoreError, ModelError
from kvcore.layout import WindowPolicy
from kvcore.modes import MODES
from kvcore.runtime import common_prefix

ROOT = Path(__file__).resolve().parents[2]
TEN = kvcore.SamplingParams(max_tokens=10)
each_mode = pytest.mark.parametrize("mode", MODES)


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 256, count).tolist()


def tokens(generation: kvcore.Generation) -> list[int]:
    for _ in generation:
        pass
    return generation.token_ids


def prefilled(model: kvcore.Model, prompt: Sequence[int], mode: str, **settings: int) -> kvcore.Cache:
    cache = model.new_cache(mode, **settings)
    model.prefill(prompt, cache)
    return cache


def same_rows(model: kvcore.Model, a: kvcore.Cache, b: kvcore.Cache) -> None:
    assert replace(a.stats(), kv_bytes_allocated=0) == replace(b.stats(), kv_bytes_allocated=0)
    assert a.offset == b.offset
    for layer in range(len(a.layers)):
        for got, want in zip(a.dense(layer), b.dense(layer), strict=True):
            assert np.array_equal(model.backend.ops.to_numpy(got), model.backend.ops.to_numpy(want))


@pytest.mark.parametrize("window", [WindowPolicy(), SMALL], ids=["128", "32"])
@each_mode
def test_a_file_goes_on_as_the_cache_would(
    model: kvcore.Model, tmp_path: Path, mode: str, window: WindowPolicy
) -> None:
    """300 tokens, 40 more and ten to generate: the same answer as without the file, the same rows in the end."""
    model = replace(model, window=window)
    prompt, path = ids(300), tmp_path / "cache.safetensors"
    cache = prefilled(model, prompt, mode)
    assert model.save_cache(path, cache, prompt) == path.stat().st_size
    loaded, seen = model.load_cache(path, mode)
    assert list(seen) == prompt
    same_rows(model, loaded, cache)
    longer = [*prompt, *ids(40, 1)]
    assert tokens(model.generate(longer, TEN, cache=loaded)) == tokens(model.generate(longer, TEN, cache=cache))
    same_rows(model, loaded, cache)
    assert (cache.stats().rows_folded > 0) == MODES[mode].quantized
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("mode", ["fp16", "int8", "turbo4", "turbo3-asym"])
@pytest.mark.parametrize("reader", BACKENDS)
@pytest.mark.parametrize("writer", BACKENDS)
def test_what_one_backend_writes_another_reads(
    folder: Path, tmp_path: Path, writer: str, reader: str, mode: str
) -> None:
    models = []
    for name in (writer, reader):
        backend, device, package = BACKENDS[name]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
        models.append(kvcore.load(folder, backend=backend, device=device, window=SMALL))
    prompt, path = ids(150), tmp_path / "cache"
    cache = prefilled(models[0], prompt, mode)
    models[0].save_cache(path, cache, prompt)
    loaded, _ = models[1].load_cache(path, mode)
    assert loaded.stats().rows_folded == cache.stats().rows_folded == (96 if mode != "fp16" else 0)
    for one, other in zip(cache.export().views, loaded.export().views, strict=True):
        for name in ("sink_k", "sink_v", "tail_k", "tail_v"):
            if getattr(one, name) is not None:
                assert np.array_equal(
                    *(m.backend.ops.to_numpy(getattr(v, name)) for m, v in zip(models, (one, other), strict=True))
                )
        for name, plane in one.k_planes.items():
            other_plane = models[1].backend.ops.to_numpy(other.k_planes[name])
            assert np.array_equal(models[0].backend.ops.to_numpy(plane), other_plane)
        assert one.page_rows == other.page_rows == ((32,) * 3 if mode == "turbo4" else ())
        if mode == "turbo4":
            both = zip(models, (one.k_centers, other.k_centers), strict=True)
            assert np.array_equal(*(m.backend.ops.to_numpy(centers) for m, centers in both))
    longer = [*prompt, *ids(10, 1)]
    answers = [tokens(m.generate(longer, TEN, cache=c)) for m, c in zip(models, (cache, loaded), strict=True)]
    assert answers[0][:3] == answers[1][:3]


def test_L7_a_short_prompt_is_filed_without_padding(model: kvcore.Model, tmp_path: Path) -> None:
    prompt, path = [5, 6, 7], tmp_path / "cache"
    model.save_cache(path, prefilled(model, prompt, "int8"), prompt)
    cache, seen = model.load_cache(path, "int8")
    assert (cache.offset, cache.stats().kv_bytes, list(seen)) == (3, cache.stats().kv_bytes_raw, prompt)
    assert cache.rewind(2) == 2
    assert tokens(model.generate(prompt, TEN, cache=cache)) == tokens(model.generate(prompt, TEN))


@each_mode
def test_a_capped_cache_keeps_its_positions(model: kvcore.Model, tmp_path: Path, mode: str) -> None:
    model = replace(model, window=SMALL)
    prompt, path = ids(300), tmp_path / "cache"
    cache = prefilled(model, prompt, mode, max_kv_size=200)
    model.save_cache(path, cache, prompt)
    loaded, _ = model.load_cache(path, mode, max_kv_size=200)
    same_rows(model, loaded, cache)
    assert (loaded.offset, loaded.tokens) == (300, 200)
    longer = [*prompt, *ids(60, 1)]
    assert tokens(model.generate(longer, TEN, cache=loaded)) == tokens(model.generate(longer, TEN, cache=cache))
    with pytest.raises(
        InputError, match="it was cut to max_kv_size 200 with keep 4, here there is no cap: use the same"
    ):
        model.load_cache(path, mode)


def test_a_whole_cache_is_cut_to_the_run_s_cap(model: kvcore.Model, tmp_path: Path) -> None:
    prompt, path = ids(300), tmp_path / "cache"
    model.save_cache(path, prefilled(model, prompt, "fp16"), prompt)
    cache, _ = model.load_cache(path, "fp16", max_kv_size=100)
    assert (cache.offset, cache.tokens) == (300, 100)


def test_raw_rows_change_their_dtype_and_codes_do_not(folder: Path, model: kvcore.Model, tmp_path: Path) -> None:
    prompt, path = ids(300), tmp_path / "cache"
    cache = prefilled(model, prompt, "turbo4")
    model.save_cache(path, cache, prompt)
    half = kvcore.load(folder, backend="reference", dtype="float16")
    loaded, _ = half.load_cache(path, "turbo4")
    for one, other in zip(cache.export().views, loaded.export().views, strict=True):
        assert np.array_equal(one.k_planes["codes"], other.k_planes["codes"])
        assert np.array_equal(one.k_planes["scale"], other.k_planes["scale"])
        assert np.array_equal(one.tail_v.astype(np.float16), other.tail_v)


# What is refused


def test_L8_another_model_is_refused_with_both_fingerprints(model: kvcore.Model, tmp_path: Path) -> None:
    made = write_tiny_llama(tmp_path / "other", eos_token_id=None, seed=1)
    other = kvcore.load(write_tiny_tokenizer(made, eos="<end>"), backend="reference")
    assert other.config == model.config
    path = tmp_path / "cache"
    model.save_cache(path, prefilled(model, ids(10), "fp16"), ids(10))
    with pytest.raises(InputError) as caught:
        other.load_cache(path, "fp16")
    message = str(caught.value)
    assert f"model is {model.fingerprint} in the file and {other.fingerprint} here" in message
    assert "\n" not in message


def test_L9_other_settings_are_refused_with_both_values(model: kvcore.Model, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    model.save_cache(path, prefilled(model, ids(10), "int8"), ids(10))
    with pytest.raises(
        InputError, match=r"mode is int8 in the file and turbo4 here: give --kv-cache-mode as in the file"
    ):
        model.load_cache(path, "turbo4")
    with pytest.raises(
        InputError, match="window is recent_tokens 128, page_size 128 in the file and recent_tokens 32, page"
    ):
        replace(model, window=SMALL).load_cache(path, "int8")
    made = write_tiny_llama(tmp_path / "other", eos_token_id=None, rope_theta=500000.0)
    other = kvcore.load(write_tiny_tokenizer(made, eos="<end>"), backend="reference")
    with pytest.raises(InputError, match=r"rope is theta 10000.0 in the file and theta 500000.0 here"):
        other.load_cache(path, "int8")


def test_the_tokenizer_counts(model: kvcore.Model, tmp_path: Path) -> None:
    made = write_tiny_llama(tmp_path / "other", eos_token_id=None)
    other = kvcore.load(write_tiny_tokenizer(made, eos="<other>"), backend="reference")
    path = tmp_path / "cache"
    model.save_cache(path, prefilled(model, ids(10), "fp16"), ids(10))
    with pytest.raises(InputError, match=f"tokenizer is {model.tokenizer.digest()} in the file and "):
        other.load_cache(path, "fp16")


@pytest.mark.parametrize("damage", ["cut", "flip", "text", "empty", "foreign", "version", "long", "shape"])
def test_a_damaged_file_is_one_line(model: kvcore.Model, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "cache"
    model.save_cache(path, prefilled(model, ids(50), "int8"), ids(50))
    data = bytearray(path.read_bytes())
    match damage:
        case "cut":
            data = data[:-100]
        case "flip":
            data[-100] ^= 1
        case "text":
            data = bytearray(b"This is no cache at all, but a text.")
        case "empty":
            data = bytearray()
        case "foreign":
            data = bytearray((write_tiny_llama(tmp_path / "m") / "model.safetensors").read_bytes())
        case "version":
            data = data.replace(b'\\"version\\": 2', b'\\"version\\": 7')
        case "long":
            data[:8] = (2**60).to_bytes(8, "little")
        case "shape":
            data = data.replace(b'\\"offset\\": 50', b'\\"offset\\": 49')
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        model.load_cache(path, "int8")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the description in a file's metadata."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    about = json.loads(header["__metadata__"]["cache"])
    change(about)
    header["__metadata__"]["cache"] = json.dumps(about)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


FIELDS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "rotation": (
        lambda a: a["layout"].update(rotation="other"),
        "layout is rotation other in the file and rotation had",
    ),
    "levels": (lambda a: a["layout"]["v_levels"].append(9.0), "layout is v_levels .* in the file and v_levels .* here"),
    "codec": (lambda a: a["layout"].update(k="int8"), "layout is k int8 in the file and k turbo4 here"),
    "width": (lambda a: a["layout"].update(k_dim=32), "layout is k_dim 32 in the file and k_dim 64 here"),
    "page": (lambda a: a["window"].update(page_size=64), "window is page_size 64 in the file and page_size 128 here"),
    "sinks": (
        lambda a: a["window"].update(sink_tokens=8),
        "window is sink_tokens 8 in the file and sink_tokens 4 here",
    ),
    "mode": (lambda a: a.update(mode="turbo5"), "mode is turbo5 in the file and turbo4 here"),
    "layers": (lambda a: a.update(layers=3), "it has 3 layers, the model 2"),
    "version": (lambda a: a.update(version=3), "format version 3, this kvcore reads 1 and 2"),
    "centre": (lambda a: a["layout"].pop("k_center"), "layout is k_center None in the file and k_center mean of"),
    "dropped": (lambda a: a["layout"].pop("rotation"), "layout is rotation None in the file and rotation hadamard"),
    "no window": (lambda a: a.pop("window"), "its description lacks or misspells 'window'"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_B113_each_field_of_the_description_counts(model: kvcore.Model, tmp_path: Path, field: str) -> None:
    path = tmp_path / "cache"
    model.save_cache(path, prefilled(model, ids(300), "turbo4"), ids(300))
    edited(path, lambda about: about.update(note="an unknown field is of no account"))
    assert model.load_cache(path, "turbo4")[0].tokens == 300
    change, message = FIELDS[field]
    edited(path, change)
    with pytest.raises(InputError, match=message) as caught:
        model.load_cache(path, "turbo4")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "holes",
    [
        [[5, -1]],
        [[-5, 50]],
        [[999, 50]],
        [[4, 60], [4, -10]],
        [[4, 50.5]],
        [[30, 25], [4, 25]],
        [[4, float("inf")]],
        [4],
    ],
)
def test_holes_that_are_none_are_damage(model: kvcore.Model, tmp_path: Path, holes: list[Any]) -> None:
    path = tmp_path / "cache"
    cache = model.new_cache("fp16", max_kv_size=40, keep=4)
    for start in range(0, 90, 30):
        model.forward(np.array([ids(90)[start : start + 30]]), cache)
    model.save_cache(path, cache, ids(90))
    loaded, _ = model.load_cache(path, "fp16", max_kv_size=40)
    assert loaded.holes == ((4, 50),)
    edited(path, lambda about: about.update(holes=holes))
    with pytest.raises(ModelError, match="is damaged"):
        model.load_cache(path, "fp16", max_kv_size=40)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, float("inf")) for name in ("layers", "offset", "crc32", "cap", "version")),
        *(
            (name, "a\nb")
            for name in ("dtype", "model", "tokenizer", "mode", "version", "handed_over", "rope", "window")
        ),
    ],
)
def test_what_a_description_may_not_say_is_told_in_one_line(
    model: kvcore.Model, tmp_path: Path, field: str, value: object
) -> None:
    path = tmp_path / "cache"
    model.save_cache(path, prefilled(model, ids(20), "int8"), ids(20))
    wrong = {"cap": [value, value], "rope": {str(value): 1}}.get(field, value)
    edited(path, lambda about: about.update({field: wrong}))
    with pytest.raises((InputError, ModelError)) as caught:
        model.load_cache(path, "int8")
    assert "\n" not in str(caught.value)


@each_mode
def test_B118_every_cache_of_a_session_comes_back(model: kvcore.Model, tmp_path: Path, mode: str) -> None:
    """One that was trimmed, a fork, the one that it was forked from, one of a short prompt."""
    model = replace(model, window=SMALL)
    prompt = ids(150)
    first, trimmed, short = prefilled(model, prompt, mode), prefilled(model, prompt, mode), prefilled(model, [7], mode)
    fork = first.fork()
    model.prefill(ids(20, 2), fork)
    trimmed.trim(60)
    seen = {"first": prompt, "fork": [*prompt, *ids(20, 2)], "trimmed": prompt[:90], "short": [7]}
    for (name, tokens_seen), cache in zip(seen.items(), (first, fork, trimmed, short), strict=True):
        cache.begin_decode()
        model.save_cache(tmp_path / name, cache, tokens_seen)
        loaded, found = model.load_cache(tmp_path / name, mode)
        assert list(found) == tokens_seen
        longer = [*tokens_seen, *ids(5, 3)]
        assert tokens(model.generate(longer, TEN, cache=loaded)) == tokens(model.generate(longer, TEN, cache=cache))


def test_ids_that_do_not_fit_the_rows(model: kvcore.Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="9 token ids for a cache at position 10: give the id of each position"):
        model.save_cache(tmp_path / "cache", prefilled(model, ids(10), "fp16"), ids(9))


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "is a folder: name a file"), ("no/cache", "there is no folder")],
    ids=["folder", "missing"],
)
def test_a_place_where_no_file_can_be(model: kvcore.Model, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model.save_cache(tmp_path / name, prefilled(model, ids(10), "fp16"), ids(10))


@pytest.mark.parametrize(("a", "b", "shared"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 4, 3], 1)])
def test_common_prefix(a: list[int], b: list[int], shared: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == shared


# Power cuts and full disks


def test_a_full_disk_leaves_the_old_file(model: kvcore.Model, tmp_path: Path) -> None:
    """Played by a limit on the size of files."""
    path = tmp_path / "cache"
    model.save_cache(path, prefilled(model, ids(10), "fp16"), ids(10))
    before, cache = path.read_bytes(), prefilled(model, ids(200), "fp16")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(
            KvcoreError, match=r"cannot write .*: File too large; what was there is unchanged"
        ) as caught:
            model.save_cache(path, cache, ids(200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 1
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_writer_killed_200_times_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    script = ROOT / "tests" / "promptcache" / "kill_writers.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "cache"), "200"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["killed"] == 200 == seen["old"] + seen["new"]
    assert min(seen["old"], seen["new"]) > 0, "the kills came at one place only"
    assert seen["most_files"] == 2, "a killed writer's file is cleared by the next one"
    assert (seen["files"], seen["last"]) == (1, 201)


def test_only_what_dead_writers_of_the_same_file_left_is_cleared(model: kvcore.Model, tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [f".cache.{dead.pid}.tmp", f".cache.{os.getpid()}.tmp", f".cache.{os.getppid()}.tmp"]
    names += [f".other.{dead.pid}.tmp", ".cache.notes.tmp", f".cache.{10**30}.tmp"]
    for name in names:
        (tmp_path / name).write_bytes(b"left")
    model.save_cache(tmp_path / "cache", prefilled(model, ids(3), "fp16"), ids(3))
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"cache", f".cache.{os.getppid()}.tmp", f".other.{dead.pid}.tmp", ".cache.notes.tmp"}
