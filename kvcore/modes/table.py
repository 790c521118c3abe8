"""The seven modes, their aliases, and how a command line's words select one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcore.errors import InputError
from kvcore.layout import CENTRED_TURBO4, CODECS, Codec, Layout


@dataclass(frozen=True, slots=True)
class Mode:
    """A pair of codecs. ``delegated``: V is quantized from the hand-over to decode on, not in prefill."""

    name: str
    k: str
    v: str
    aliases: tuple[str, ...] = ()
    delegated: bool = False

    def layout(self, head_dim: int, v_head_dim: int | None = None) -> Layout:
        """The layout of folded rows. UnsupportedError where a codec cannot store that width."""
        return Layout(self.k_codec, CODECS[self.v], head_dim, v_head_dim or head_dim)

    @property
    def k_codec(self) -> Codec:
        """turbo4 has its pages centred in K."""
        return CENTRED_TURBO4 if self.k == "turbo4" else CODECS[self.k]

    @property
    def quantized(self) -> bool:
        return (self.k, self.v) != ("raw", "raw")

    @property
    def pair(self) -> tuple[str, str]:
        """The codec words of ``--cache-type-k`` and ``--cache-type-v``."""
        return ("fp16" if self.k == "raw" else self.k, "fp16" if self.v == "raw" else self.v)


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("fp16", "raw", "raw", ("float16",)),
        Mode("int8", "int8", "int8", ("i8", "q8_0")),
        Mode("int8-turbo4", "int8", "turbo4", ("k8v4",)),
        Mode("turbo4-asym", "raw", "turbo4", ("fp16+turbo4",)),
        Mode("turbo4-delegated", "raw", "turbo4", ("fp16+turbo4-delegated",), delegated=True),
        Mode("turbo3-asym", "raw", "turbo3", ("turbo3", "fp16+turbo3")),
        Mode("turbo4", "turbo4", "turbo4", ("turbo4-sym",)),
    )
}

_BITS = {16: "fp16", 8: "int8", 4: "turbo4", 3: "turbo3-asym"}
_WORDS = {"fp16": "raw", "float16": "raw", "int8": "int8", "turbo4": "turbo4", "turbo3": "turbo3"}


def resolve_mode(name: str, notice: Callable[[str], None] = lambda _: None) -> Mode:
    """The mode of that name or alias. InputError lists the modes."""
    wanted = name.strip().lower()
    for mode in MODES.values():
        if wanted == mode.name or wanted in mode.aliases:
            if wanted == "q8_0":
                notice("q8_0 is taken as int8: one scale per token and head, not one per 32 values")
            return mode
    raise InputError(f"unknown KV cache mode '{name}': choose one of {', '.join(MODES)}")


def mode_from_codecs(k: str | None, v: str | None) -> Mode:
    """The mode of a pair of codec words; a word left out is taken as fp16. InputError lists the pairs."""
    words = (k or "fp16", v or "fp16")
    for word in words:
        if word not in _WORDS:
            raise InputError(f"unknown cache type '{word}': choose one of fp16, int8, turbo4, turbo3")
    wanted = tuple(_WORDS[word] for word in words)
    for mode in MODES.values():
        if (mode.k, mode.v) == wanted and not mode.delegated:
            return mode
    pairs = ", ".join("/".join(mode.pair) for mode in MODES.values() if not mode.delegated)
    raise InputError(f"no mode stores K as {words[0]} and V as {words[1]}: the K/V pairs are {pairs}")


def mode_from_bits(bits: int) -> Mode:
    """``--kv-bits``: 16 fp16, 8 int8, 4 turbo4, 3 turbo3-asym."""
    if bits not in _BITS:
        known = ", ".join(f"{b} ({name})" for b, name in _BITS.items())
        raise InputError(f"--kv-bits {bits}: choose one of {known}")
    return MODES[_BITS[bits]]
