"""The kernels' text, without running it: words that Metal and the shim share, and address spaces."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from metal_shim import ATTRIBUTES, HEADER

from kvcore.backends.metal import kernels
from kvcore.backends.metal.capabilities import HEAD_DIMS
from kvcore.backends.metal.kernels import ATTEND, CODEC_NUMBERS, COMBINE, ENCODE, ROTATE, SOURCES, KernelSource

OPENCL = Path(__file__).parent / "opencl"

# Of the Metal Shading Language, by line: address spaces, types, functions, synchronization, SIMD-group functions.
# What is not here is not used.
LANGUAGE = frozenset(
    re.findall(
        r"\w+",
        """auto bool break const constexpr continue else false for if inline int float return struct template true
        typename void while""",
    )
)
METAL = frozenset(
    re.findall(
        r"\w+",
        """device constant thread threadgroup
        uint ushort int64_t float2 as_type
        min max abs rint precise exp2 sqrt
        threadgroup_barrier mem_flags mem_threadgroup
        simd_shuffle simd_shuffle_xor simd_sum simd_max""",
    )
)
GIVEN = frozenset(ATTRIBUTES)  # a thread's position: MLX declares it
TYPES = r"(?:auto|bool|int|uint|ushort|float|float2|int64_t|P|S|K|V|C|M|Step)"
DECLARED = (
    rf"\b{TYPES}\b[\s*&]*\b(\w+)\b(?=\s*[\[=;,(){{])",  # variables, parameters, members, functions
    r"\bstruct (\w+)",
    r"\b(?:typename|int|bool) (\w+)(?=[,>])",  # template parameters
    r"\bRows<[^;={]*> (\w+)",
    r"(?:const thread Step|thread float|const thread float|const thread [KVC])\s*& ?\(?&?(\w+)",
    r"thread float \(&(\w+)\)",
    r"\bvoid (\w+)\(",
    r"\b(PageRows<CODEC, P, S>|RawRows<P>|PageCenters<CENTRED, P, S>) (\w+)",
)
TEMPLATES = {
    "encode": ("T", "D", "CODEC"),
    "rotate": ("T", "D"),
    "attend": ("T", "R", "D", "K_CODEC", "V_CODEC", "CENTRED", "N"),
    "combine": ("T", "D", "ROTATED"),
}

each_source = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)


def code_of(source: KernelSource) -> str:
    return re.sub(r"//[^\n]*", "", f"{source.header}\n{source.body}")


def declared_in(source: KernelSource) -> set[str]:
    code = code_of(source)
    found = {name for pattern in DECLARED for match in re.findall(pattern, code) for name in _names(match)}
    arrays = {*source.inputs, *source.outputs, *(f"{name}_strides" for name in source.inputs)}
    return found | arrays | set(TEMPLATES[source.name]) | {"x", "y", "z"}


def _names(match: str | tuple[str, ...]) -> tuple[str, ...]:
    return (match,) if isinstance(match, str) else match


def unknown_words(source: KernelSource) -> set[str]:
    words = set(
        re.findall(
            r"(?<![\w.])[A-Za-z_]\w*", re.sub(r"\b0x[0-9a-fA-F]+u?|\b[\d.]+(?:e[+-]?\d+)?[fu]?\b", " ", code_of(source))
        )
    )
    return words - LANGUAGE - METAL - GIVEN - declared_in(source)


@each_source
def test_every_word_is_one_that_metal_and_the_shim_share(source: KernelSource) -> None:
    assert unknown_words(source) == set()


@pytest.mark.parametrize(
    "line",
    ["double y = 1.0f;", "float y = powr(2.0f, 3.0f);", "std::size_t n;", "float y = fast::exp2(1.0f);", "goto end;"],
)
def test_a_word_beyond_them_is_found(line: str) -> None:
    strange = KernelSource("encode", ENCODE.header, f"{ENCODE.body}\n{line}\n", ENCODE.inputs, ENCODE.outputs)
    assert unknown_words(strange)


def test_the_shim_defines_every_word_of_metal_that_is_allowed_and_used() -> None:
    shim = HEADER.read_text(encoding="utf-8")
    used = set(re.findall(r"\w+", "".join(map(code_of, SOURCES))))
    assert {word for word in METAL if not re.search(rf"\b{word}\b", shim) and word != "int64_t"} == set()
    assert set(METAL) - used == set()


@each_source
def test_literals_are_single_precision_and_no_file_is_included(source: KernelSource) -> None:
    """Metal has no double; the host passes the header."""
    code = code_of(source)
    assert re.findall(r"\b\d+\.\d*(?:e[+-]?\d+)?(?![\dfe])", code) == []
    assert "#" not in code


@each_source
def test_threadgroup_memory_is_declared_in_the_form_that_the_shim_reads(source: KernelSource) -> None:
    declared = re.findall(r"^[ \t]*threadgroup \w+ \w+\[.*$", source.body, re.MULTILINE)
    assert declared == re.findall(r"^threadgroup \w+ \w+\[.+\];$", source.body, re.MULTILINE)
    assert declared
    assert not re.search(r"threadgroup \w+ \w+\[", source.header)


@each_source
def test_every_array_and_template_value_is_used(source: KernelSource) -> None:
    """MLX declares a thread's position and strides only where the body, not a header, names them."""
    for name in (*source.inputs, *source.outputs):
        assert re.search(rf"\b{name}\b", source.body), name
    assert [name for name in ATTRIBUTES if name in source.header] == []


def test_simdgroups_and_codecs_have_the_numbers_that_the_host_takes() -> None:
    def constant(name: str) -> int:
        return int(re.search(rf"constant constexpr int {name} = (\d+);", ATTEND.header)[1])

    assert constant("SIMDS") == kernels.SIMDS
    assert constant("SIMDS") * constant("LANES") == kernels.THREADS
    assert {name: constant(name.upper()) for name in CODEC_NUMBERS} == CODEC_NUMBERS


# Address spaces, by clang

ATTENDED = (
    *(("raw", "raw", 0), ("int8", "int8", 0), ("int8", "turbo4", 0), ("turbo4", "turbo4", 0), ("turbo4", "turbo4", 1)),
    ("raw", "turbo3", 0),
)
CODES = {"raw": "half", "int8": "int8_t", "turbo4": "uint8_t", "turbo3": "uint8_t"}


def opencl_text(source: KernelSource, types: dict[str, str], few: tuple[str, ...], values: dict[str, object]) -> str:
    """A kernel with one instance's types; ``few`` names arrays so short that MLX passes them as constants."""
    parameters = []
    for name in source.inputs:
        parameters.append(f"const {'constant' if name in few else 'device'} {types.get(name, 'float')}* {name}")
        if f"{name}_strides" in source.body:
            parameters.append(f"const constant int64_t* {name}_strides")
    parameters += [f"device {types.get(name, 'float')}* {name}" for name in source.outputs]
    parameters += [f"{kind} {name}" for name, kind in ATTRIBUTES.items()]
    constants = [
        f"typedef {value} {name};" if isinstance(value, str) else f"static constexpr __constant int {name} = {value};"
        for name, value in values.items()
    ]
    signature = f"kernel void instance({', '.join(parameters)}) {{"
    return "\n".join(['#include "prelude.h"', source.header, *constants, signature, source.body, "}"])


def instances() -> list[tuple[KernelSource, str]]:
    made = []
    for dim in HEAD_DIMS:
        base = {"T": "half", "R": "half", "D": dim}
        for codec in ("int8", "turbo4", "turbo3"):
            types = {"rows": "half", "codes": CODES[codec], "scale": "half", "dims": "int"}
            text = opencl_text(ENCODE, types, ("factor", "dims"), {**base, "CODEC": CODEC_NUMBERS[codec]})
            made.append((ENCODE, text))
        made.append((ROTATE, opencl_text(ROTATE, {"q": "half", "dims": "int"}, ("factor", "dims"), base)))
        for rotated in (0, 1):
            types = {"out": "half", "dims": "int"}
            made.append((COMBINE, opencl_text(COMBINE, types, ("dims",), {**base, "ROTATED": rotated})))
        for k, v, centred in ATTENDED:
            raw = dict.fromkeys(("q", "sink_k", "sink_v", "tail_k", "tail_v", "k_scale", "v_scale"), "half")
            types = {**raw, "k_codes": CODES[k], "v_codes": CODES[v], "page_of": "int", "dims": "int"}
            values = {**base, "K_CODEC": CODEC_NUMBERS[k], "V_CODEC": CODEC_NUMBERS[v], "CENTRED": centred, "N": 4}
            made += [
                (ATTEND, opencl_text(ATTEND, types, few, values))
                for few in (("factor",), ("factor", "k_scale", "v_scale"))
            ]
    return made


def complaints(text: str) -> list[str]:
    from clang.cindex import Index

    arguments = [
        "-x",
        "cl",
        "-cl-std=clc++2021",
        "-target",
        "spir64",
        "-nostdinc",
        f"-I{OPENCL}",
        "-Wall",
        "-Wno-unused",
    ]
    unit = Index.create().parse("kernel.cl", args=arguments, unsaved_files=[("kernel.cl", text)])
    return [f"{d.location.line}: {d.spelling}" for d in unit.diagnostics if d.severity >= 2]


@pytest.mark.skipif(importlib.util.find_spec("clang") is None, reason="the package libclang is not installed")
class TestAddressSpaces:
    def test_no_pointer_leaves_its_address_space(self) -> None:
        for source, text in instances():
            assert complaints(text) == [], source.name

    @pytest.mark.parametrize(
        ("text", "other"),
        [
            ("(const device uint*)codes_of_row + unit * 2", "(const threadgroup uint*)codes_of_row + unit * 2"),
            ("const threadgroup float2* table;", "const device float2* table;"),
            ("thread float (&acc)[N][UNIT],", "device float (&acc)[N][UNIT],"),
        ],
    )
    def test_one_that_does_is_found(self, text: str, other: str) -> None:
        (whole, *_) = (whole for source, whole in instances() if source is ATTEND and "int8_t* k_codes" in whole)
        assert text in whole
        assert complaints(whole.replace(text, other))
