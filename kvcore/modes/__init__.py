"""The cache modes: a codec for K, a codec for V and a window policy. A mode is data, never a class of its own."""

from kvcore.modes.center import centred_rows, page_centers, pages_of_rows, plain_centers
from kvcore.modes.codecs import CODEC_FUNCTIONS, CodecFunctions, Planes
from kvcore.modes.table import MODES, Mode, mode_from_bits, mode_from_codecs, resolve_mode

__all__ = [
    "CODEC_FUNCTIONS",
    "MODES",
    "CodecFunctions",
    "Mode",
    "Planes",
    "centred_rows",
    "mode_from_bits",
    "mode_from_codecs",
    "page_centers",
    "pages_of_rows",
    "plain_centers",
    "resolve_mode",
]
