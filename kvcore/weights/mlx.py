"""MLX-quantized checkpoints: a module ``m`` has ``m.weight`` (packed codes), ``m.scales`` and ``m.biases``.

The tensors' shapes say how many bits a module has. ``quantization`` in config.json may say so too; then both
must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcore.errors import ModelError
from kvcore.models.fields import Fields, quoted
from kvcore.weights.affine import AFFINE_BITS, AFFINE_GROUP_SIZES
from kvcore.weights.expected import Shapes
from kvcore.weights.safetensors import Entry


@dataclass(frozen=True, slots=True)
class AffineFormat:
    """How one module is quantized."""

    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group_size}"


@dataclass(frozen=True, slots=True)
class ModuleSetting:
    """What config.json says of one module; None where it does not say."""

    quantized: bool
    bits: int | None = None
    group_size: int | None = None

    def allows(self, found: AffineFormat) -> bool:
        return self.bits in (None, found.bits) and self.group_size in (None, found.group_size)

    def __str__(self) -> str:
        if not self.quantized:
            return "not quantized"
        bits = "" if self.bits is None else f"{self.bits} bits"
        groups = "" if self.group_size is None else f"groups of {self.group_size}"
        return " in ".join(part for part in (bits, groups) if part)


def module_settings(config: Mapping[str, object], where: str) -> dict[str, ModuleSetting]:
    """Per-module settings of ``quantization`` (or ``quantization_config``, its older name).

    ModelError, by name, for quantization methods other than MLX's affine one.
    """
    fields = Fields(config, where)
    key = "quantization" if fields.get("quantization") is not None else "quantization_config"
    block = fields.block(key)
    _check_setting(Fields(block, f"{where}: {key}"))
    settings = {}
    for module, value in block.items():
        if isinstance(value, bool):
            settings[module] = ModuleSetting(value)
        elif isinstance(value, Mapping):
            inner = Fields(value, f"{where}: {key} of {quoted(module)}")
            bits, group_size = _check_setting(inner)
            settings[module] = ModuleSetting(True, bits, group_size)
    return settings


def _check_setting(fields: Fields) -> tuple[int | None, int | None]:
    method = fields.get("quant_method")
    if method is not None:
        raise ModelError(
            f"{fields.where}: quantization method {quoted(method)} is not supported (supported: MLX affine; "
            "or give the unquantized checkpoint)"
        )
    mode = fields.text("mode", "affine")
    if mode != "affine":
        raise ModelError(f"{fields.where}: mode {quoted(mode)} is not supported (supported: affine)")
    return _one_of(fields, "bits", AFFINE_BITS), _one_of(fields, "group_size", AFFINE_GROUP_SIZES)


def _one_of(fields: Fields, key: str, allowed: tuple[int, ...]) -> int | None:
    if fields.get(key) is None:
        return None
    value = fields.count(key)
    if value not in allowed:
        raise ModelError(f"{fields.where}: {key} {value} is not supported (supported: {allowed})")
    return value


def module_formats(
    entries: Mapping[str, Entry], shapes: Shapes, settings: Mapping[str, ModuleSetting], where: str
) -> dict[str, AffineFormat]:
    """The format of each quantized module by its name; ``shapes`` are those of the dequantized parameters.

    ModelError where tensors of a module do not fit each other or contradict its setting. A module that
    ``shapes`` does not list is left to the check for superfluous tensors.
    """
    formats = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or name not in entries:
            continue
        setting = settings.get(module)
        found = _module_format(entries, module, shape, where) if f"{module}.scales" in entries else None
        if found is None:
            _check_dense(entries[name].dtype, module, setting, where)
            continue
        if setting is not None and not (setting.quantized and setting.allows(found)):
            raise ModelError(f"{where}: {module}: config.json says {setting}, but the tensors hold {found}")
        formats[module] = found
    return formats


def _check_dense(dtype: str, module: str, setting: ModuleSetting | None, where: str) -> None:
    if dtype == "U32":
        raise ModelError(f"{where}: missing: {module}.scales")
    if setting is not None and setting.bits is not None:
        raise ModelError(f"{where}: {module}: config.json says {setting}, but the tensor is {dtype} and has no scales")


def _module_format(entries: Mapping[str, Entry], module: str, shape: tuple[int, ...], where: str) -> AffineFormat:
    """Bits = packed columns * 32 / inputs, group size = inputs / columns of scales."""
    if f"{module}.biases" not in entries:
        raise ModelError(f"{where}: missing: {module}.biases")
    codes, scales, biases = (entries[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
    parts = {"codes": codes, "scales": scales, "biases": biases}
    listed = ", ".join(f"{part} {entry.dtype} {list(entry.shape)}" for part, entry in parts.items())
    problem = ModelError(f"{where}: {module}: {listed} are no affine quantization of {list(shape)}")
    packed = codes.dtype == "U32" and len(codes.shape) == 2 == len(shape)
    if not packed or scales.dtype not in ("F32", "F16", "BF16"):
        raise problem
    if (scales.dtype, scales.shape) != (biases.dtype, biases.shape):
        raise problem
    out, inputs = shape
    groups = scales.shape[-1] if len(scales.shape) == 2 else 0
    if codes.shape[0] != out or not groups or scales.shape[0] != out:
        raise problem
    bits, bits_rest = divmod(codes.shape[1] * 32, inputs)
    group_size, group_rest = divmod(inputs, groups)
    if bits_rest or group_rest or bits not in AFFINE_BITS or group_size not in AFFINE_GROUP_SIZES:
        raise problem
    return AffineFormat(bits, group_size)
