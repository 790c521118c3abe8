"""Reading and writing safetensors against the safetensors package; hostile headers."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tiny import write_tiny_llama

from kvcore.errors import ModelError
from kvcore.weights import open_checkpoint
from kvcore.weights.safetensors import open_safetensors, write_safetensors


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "brain": rng.standard_normal(7).astype(ml_dtypes.bfloat16),
        "single": rng.standard_normal((2, 2, 2)).astype(np.float32),
        "words": rng.integers(0, 2**32, (3, 4), dtype=np.uint32),
        "scalar": np.array(3, np.float32),
        "none": np.empty((0, 4), np.float32),
    }


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and left[k].shape == right[k].shape and left[k].tobytes() == right[k].tobytes()
        for k in left
    )


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(arrays(), path, metadata={"format": "pt"})
    file = open_safetensors(path)
    assert same({name: file.array(name) for name in file.entries}, arrays())


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, arrays(), {"format": "pt"})
    assert same(safetensors.numpy.load_file(path), arrays())
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def file_of(path: Path, header: object, data: int = 64, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + b"\0" * data)
    return path


def entry(**changes: object) -> dict[str, object]:
    return {"t": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes}


def error_of(path: Path) -> str:
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(ModelError) as caught:
        open_safetensors(path)
    elapsed, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message.replace(str(path), "")) < 300
    assert elapsed < 5
    assert peak < 50e6
    return message


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", ["not valid JSON"]),
        (b"\xff", ["UTF-8"]),
        (b"[" * 100_000, ["not valid JSON"]),
        (b"1" * 10_000, ["not valid JSON"]),
        ([], ["JSON object"]),
        ({"t": 3}, ["'t'"]),
        (entry(dtype=3), ["'t'", "dtype", "3"]),
        (entry(shape=[2, -2]), ["'t'", "[2, -2]"]),
        (entry(shape="22"), ["'t'", "'22'"]),
        (entry(shape=[2, 2.0]), ["'t'", "[2, 2.0]"]),
        (entry(data_offsets=[0]), ["'t'", "[0]"]),
        (entry(data_offsets=[16, 0]), ["'t'", "[16, 0]"]),
        (entry(data_offsets=[0, 12]), ["'t'", "[0, 12]", "'F32'", "[2, 2]"]),
        (entry(shape=[2**40, 2**40]), ["'t'", "[1099511627776"]),
        (entry(shape=[2**40], data_offsets=[0, 2**42]), ["truncated", str(2**42)[:7]]),
        (entry() | {"u": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}}, ["'u' overlaps 't'"]),
        ({"t\n" * 9999: 3}, ["'t\\nt"]),
    ],
    ids=[
        "cut-json",
        "not-utf8",
        "deep-nesting",
        "long-number",
        "list",
        "entry-no-object",
        "dtype-number",
        "negative-shape",
        "shape-string",
        "shape-float",
        "one-offset",
        "reversed-offsets",
        "size-mismatch",
        "huge-shape",
        "beyond-end",
        "overlap",
        "long-name",
    ],
)
def test_M4_bad_header_is_one_line(tmp_path: Path, header: object, words: list[str]) -> None:
    message = error_of(file_of(tmp_path / "x.safetensors", header))
    for word in words:
        assert word in message


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 10**9], ids=["2^60", "minus-1", "billion"])
def test_M4_hostile_header_length(tmp_path: Path, length: int) -> None:
    assert f"header of {length} bytes" in error_of(file_of(tmp_path / "x.safetensors", {}, length=length))


def test_M4_cut_in_the_middle_names_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(arrays(), path)
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        message = error_of(path)
        assert "truncated" in message
        assert str(size) in message
    assert f"need {len(whole)} bytes, the file has {len(whole) - 1}" in message


def test_unaligned_data_and_other_dtypes(tmp_path: Path) -> None:
    raw = json.dumps(entry() | {"q": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [16, 20]}}).encode()
    raw += b" " * (3 - len(raw) % 4)
    path = file_of(tmp_path / "x.safetensors", raw)
    file = open_safetensors(path)
    assert file.array("t").flags.aligned
    np.testing.assert_array_equal(file.array("t"), np.zeros((2, 2)))
    with pytest.raises(ModelError, match="'q' has dtype 'F8_E4M3'"):
        file.array("q")


def outcome(folder: Path) -> str:
    """The error's message, or nothing where every weight loads."""
    try:
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.names():
            checkpoint.load(name)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_random_byte_flips_give_success_or_a_model_error(tmp_path: Path, file: str) -> None:
    folder = write_tiny_llama(
        tmp_path / "m", vocab=32, hidden=64, intermediate=64, quantize={"bits": 4, "group_size": 32}
    )
    raw = (folder / file).read_bytes()
    rng = np.random.default_rng(0)
    messages = []
    for _ in range(200):
        damaged = bytearray(raw)
        for place in rng.integers(0, min(len(raw), 4096), rng.integers(1, 4)):
            damaged[place] ^= 1 << rng.integers(0, 8)
        (folder / file).write_bytes(damaged)
        messages.append(outcome(folder))
    assert 50 < sum(bool(message) for message in messages) <= 200
    assert not any("\n" in message for message in messages)
