"""The seven modes by name, alias, pair of codec words and number of bits."""

from __future__ import annotations

import pytest

from kvcore.errors import InputError
from kvcore.modes import MODES, mode_from_bits, mode_from_codecs, resolve_mode

PAIRS = {
    "fp16": ("raw", "raw"),
    "int8": ("int8", "int8"),
    "turbo4-asym": ("raw", "turbo4"),
    "turbo3-asym": ("raw", "turbo3"),
    "turbo4": ("turbo4", "turbo4"),
    "turbo4-delegated": ("raw", "turbo4"),
    "int8-turbo4": ("int8", "turbo4"),
}


def test_there_are_seven_modes_with_these_codecs() -> None:
    assert {name: (mode.k, mode.v) for name, mode in MODES.items()} == PAIRS
    assert [name for name, mode in MODES.items() if mode.delegated] == ["turbo4-delegated"]
    assert [name for name, mode in MODES.items() if not mode.quantized] == ["fp16"]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("float16", "fp16"),
        ("i8", "int8"),
        ("fp16+turbo4", "turbo4-asym"),
        ("turbo3", "turbo3-asym"),
        ("fp16+turbo3", "turbo3-asym"),
        ("turbo4-sym", "turbo4"),
        ("fp16+turbo4-delegated", "turbo4-delegated"),
        ("k8v4", "int8-turbo4"),
        ("  Turbo4 ", "turbo4"),
        *((name, name) for name in PAIRS),
    ],
)
def test_a_name_or_an_alias_selects_its_mode(alias: str, name: str) -> None:
    said: list[str] = []
    assert resolve_mode(alias, said.append) is MODES[name]
    assert said == []


def test_q8_0_is_int8_with_a_notice() -> None:
    said: list[str] = []
    assert resolve_mode("q8_0", said.append) is MODES["int8"]
    assert len(said) == 1
    assert "q8_0 is taken as int8" in said[0]


def test_an_unknown_mode_lists_the_seven() -> None:
    with pytest.raises(InputError, match="unknown KV cache mode 'turbo5'") as caught:
        resolve_mode("turbo5")
    listed = str(caught.value).partition("choose one of ")[2].split(", ")
    assert sorted(listed) == sorted(PAIRS)


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "turbo4-delegated"])
def test_each_pair_of_words_selects_its_mode(name: str) -> None:
    assert mode_from_codecs(*MODES[name].pair) is MODES[name]


def test_raw_and_turbo4_select_the_asymmetric_mode_not_the_delegated_one() -> None:
    assert mode_from_codecs("fp16", "turbo4").name == "turbo4-asym"
    assert mode_from_codecs(None, "turbo4").name == "turbo4-asym"
    assert mode_from_codecs("float16", None).name == "fp16"


@pytest.mark.parametrize(("k", "v"), [("int8", "turbo3"), ("turbo4", "fp16"), ("turbo3", "turbo3"), ("turbo4", None)])
def test_B79_any_other_pair_is_an_error_that_lists_the_six(k: str, v: str | None) -> None:
    with pytest.raises(InputError, match=f"no mode stores K as {k} and V as {v or 'fp16'}") as caught:
        mode_from_codecs(k, v)
    listed = str(caught.value).rpartition(" are ")[2].split(", ")
    assert sorted(listed) == sorted(
        ["fp16/fp16", "int8/int8", "int8/turbo4", "fp16/turbo4", "fp16/turbo3", "turbo4/turbo4"]
    )


def test_an_unknown_codec_word_lists_the_four() -> None:
    with pytest.raises(InputError, match="unknown cache type 'q4_0': choose one of fp16, int8, turbo4, turbo3"):
        mode_from_codecs("fp16", "q4_0")


@pytest.mark.parametrize(("bits", "name"), [(16, "fp16"), (8, "int8"), (4, "turbo4"), (3, "turbo3-asym")])
def test_kv_bits_select_a_mode(bits: int, name: str) -> None:
    assert mode_from_bits(bits) is MODES[name]


@pytest.mark.parametrize("bits", [0, 2, 5, -8])
def test_other_kv_bits_list_what_exists(bits: int) -> None:
    with pytest.raises(InputError, match=rf"--kv-bits {bits}: choose one of 16 \(fp16\), 8 \(int8\)"):
        mode_from_bits(bits)
