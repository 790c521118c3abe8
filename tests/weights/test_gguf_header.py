"""Hostile, truncated and odd GGUF headers: one line that names file and field, quickly, without allocation."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tiny import write_tiny_gguf

from kvcore.errors import ModelError
from kvcore.weights import open_checkpoint
from kvcore.weights.gguf_header import read_gguf_header

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def u32(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def tensor(name: str | bytes, dims: list[int], offset: int = 0, kind: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_file(
    path: Path,
    pairs: list[bytes] = [],  # noqa: B006
    tensors: list[bytes] = [],  # noqa: B006
    *,
    data: int = 0,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> Path:
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    raw = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count) + b"".join(pairs + tensors)
    raw += b"\0" * (-len(raw) % 32 + data)
    path.write_bytes(raw)
    return path


def error_of(path: Path) -> str:
    """The message, one short line with the file's name, within 5 s and 50 MB."""
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    elapsed, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message.replace(str(path), "")) < 300
    assert elapsed < 5
    assert peak < 50e6
    return message


def test_reads_metadata_and_tensors(tmp_path: Path) -> None:
    strings = struct.pack("<IQ", STRING, 2) + string("a") + string("é")
    path = gguf_file(
        tmp_path / "x.gguf",
        [
            u32("n", 7),
            pair("eps", F32, struct.pack("<f", 1e-5)),
            pair("flag", BOOL, b"\1"),
            pair("text", STRING, string("hello")),
            pair("words", ARRAY, strings),
            pair("ids", ARRAY, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        ],
        [tensor("t", [4, 2])],
        data=32,
    )
    header = read_gguf_header(path)
    assert header.metadata == {
        "n": 7,
        "eps": 1e-5,
        "flag": True,
        "text": "hello",
        "words": ["a", "é"],
        "ids": [1, -2, 3],
    }
    assert header.tensors["t"].shape == (2, 4)
    assert header.tensors["t"].nbytes == 32


@pytest.mark.parametrize("kind", [U32, U64], ids=["uint32", "uint64"])
@pytest.mark.parametrize("alignment", [1, 64], ids=str)
def test_B163_harmless_alignment_loads(tmp_path: Path, alignment: int, kind: int) -> None:
    payload = struct.pack("<I" if kind == U32 else "<Q", alignment)
    pairs = [pair("general.alignment", kind, payload)]
    path = gguf_file(tmp_path / "x.gguf", pairs, [tensor("t", [4])], data=16 + 2 * 64)
    assert read_gguf_header(path).tensors["t"].start % alignment == 0


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([pair("general.alignment", STRING, string("32"))], ["general.alignment", "'32'"]),
        ([u32("general.alignment", 0)], ["general.alignment", "0"]),
        ([u32("general.alignment", 3)], ["general.alignment", "3"]),
        ([u32("general.alignment", 2**31)], ["general.alignment", "2147483648"]),
        ([pair("general.alignment", BOOL, b"\1")], ["general.alignment", "True"]),
        ([u32("a", 1), u32("a", 2)], ["duplicate metadata key 'a'"]),
        ([pair(b"\xff\xfe", U32, b"\0\0\0\0")], ["metadata key 0", "UTF-8"]),
        ([pair("a\nb" * 1000, 99, b"")], ["unsupported type 99"]),
        ([pair("a", 99, b"")], ["metadata 'a'", "type 99"]),
        ([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1))], ["metadata 'a'", "type 9"]),
        ([pair("a", ARRAY, struct.pack("<IQ", U32, 2**62))], ["metadata 'a'", "needs at least"]),
        ([pair("a", ARRAY, struct.pack("<IQ", STRING, 2**61))], ["metadata 'a'", "needs at least"]),
        ([pair("a", STRING, struct.pack("<Q", 2**63))], ["metadata 'a'", "needs at least"]),
        ([struct.pack("<Q", 2**60)], ["metadata key 0", "1152921504606846976"]),
        ([string("k" * 70000)], ["metadata key 0", "70000"]),
    ],
    ids=[
        "alignment-string",
        "alignment-0",
        "alignment-3",
        "alignment-2^31",
        "alignment-bool",
        "duplicate-key",
        "key-not-utf8",
        "key-with-newlines",
        "unknown-type",
        "nested-array",
        "huge-array",
        "huge-string-array",
        "huge-string",
        "huge-key",
        "long-key",
    ],
)
def test_B163_bad_metadata(tmp_path: Path, pairs: list[bytes], words: list[str]) -> None:
    message = error_of(gguf_file(tmp_path / "x.gguf", pairs, data=64))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([tensor("t", [4, 0])], ["'t'", "[4, 0]"]),
        ([tensor("t", [0, 4], kind=8)], ["'t'", "[0, 4]"]),
        ([tensor("t", [2**63])], ["'t'", "9223372036854775808"]),
        ([tensor("t", [2**32, 2**32])], ["truncated", "73786976294838"]),
        ([tensor("t", [])], ["'t'", "0 dimensions"]),
        ([tensor("t", [1] * 5)], ["'t'", "5 dimensions"]),
        ([tensor("t", [33], kind=8)], ["'t'", "[33]", "multiple of 32", "Q8_0"]),
        ([tensor("t", [4], kind=77)], ["'t'", "unknown type 77"]),
        ([tensor("t", [4], offset=3)], ["'t'", "offset 3", "32"]),
        ([tensor("t", [4]), tensor("u", [4])], ["overlaps"]),
        ([tensor("t", [4]), tensor("t", [4], offset=32)], ["'t'", "twice"]),
        ([tensor("t" * 10240, [4])], ["name of tensor 0", "10240"]),
        ([tensor("t", [4], offset=2**40)], ["truncated", str(2**40 + 16)[:6]]),
    ],
    ids=[
        "dims-4-0",
        "dims-0-4",
        "dims-2^63",
        "dims-product-2^64",
        "no-dims",
        "5-dims",
        "not-whole-blocks",
        "unknown-type",
        "unaligned-offset",
        "same-offset",
        "same-name",
        "name-of-10KB",
        "offset-beyond-end",
    ],
)
def test_B163_bad_tensor_table(tmp_path: Path, tensors: list[bytes], words: list[str]) -> None:
    message = error_of(gguf_file(tmp_path / "x.gguf", [], tensors, data=256))
    for word in words:
        assert word in message


@pytest.mark.parametrize("count", [2**63, 2**64 - 1, 10**9], ids=["negative", "minus-1", "billion"])
@pytest.mark.parametrize("which", ["tensor_count", "metadata_kv_count"])
def test_M4_hostile_counts(tmp_path: Path, which: str, count: int) -> None:
    counts = (count, 0) if which == "tensor_count" else (0, count)
    message = error_of(gguf_file(tmp_path / "x.gguf", counts=counts, data=64))
    assert f"{which} {count}" in message


@pytest.mark.parametrize("version", [1, 4, 3 << 24], ids=["1", "4", "big-endian"])
def test_other_versions_are_refused(tmp_path: Path, version: int) -> None:
    message = error_of(gguf_file(tmp_path / "x.gguf", version=version, data=64))
    assert f"version {version}" in message
    assert ("big-endian" in message) == (version > 4)


def test_B68_empty_and_text_files(tmp_path: Path) -> None:
    empty, text = tmp_path / "empty.gguf", tmp_path / "x.gguf"
    empty.touch()
    text.write_text("Hello, this is text.")
    assert "empty" in error_of(empty)
    assert "b'Hell'" in error_of(text)


@pytest.mark.smollm2
@pytest.mark.parametrize("cut", ["10-bytes", "1-KiB", "half", "one-byte-short"])
def test_B68_truncated_model_names_needed_and_actual_size(tmp_path: Path, smollm2: Path, cut: str) -> None:
    whole = smollm2.read_bytes()
    size = {"10-bytes": 10, "1-KiB": 1024, "half": len(whole) // 2, "one-byte-short": len(whole) - 1}[cut]
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:size])
    message = error_of(path)
    assert "truncated" in message
    assert f"the file has {size}" in message
    if size > 2**20:
        assert f"need {len(whole)} bytes" in message


@pytest.mark.smollm2
def test_opening_the_real_model_is_fast(smollm2: Path) -> None:
    open_checkpoint(smollm2)
    begin = time.perf_counter()
    open_checkpoint(smollm2)
    assert time.perf_counter() - begin < 0.5


def outcome(path: Path) -> str:
    """The error's message, or nothing where every weight loads."""
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            checkpoint.load(name)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("reach", [4096, 65536], ids=["header", "64-KiB"])
def test_random_byte_flips_give_success_or_a_model_error(tmp_path: Path, reach: int) -> None:
    raw = write_tiny_gguf(tmp_path / "tiny.gguf", vocab=32, hidden=64, intermediate=64).read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "flipped.gguf"
    messages = []
    for _ in range(200):
        damaged = bytearray(raw)
        for place in rng.integers(0, min(len(raw), reach), rng.integers(1, 4)):
            damaged[place] ^= 1 << rng.integers(0, 8)
        path.write_bytes(damaged)
        messages.append(outcome(path))
    assert 0 < sum(bool(message) for message in messages) < 200
    assert not any("\n" in message for message in messages)
