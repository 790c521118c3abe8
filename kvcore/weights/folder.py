"""A model folder: which of its files count, and its tensors under Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from kvcore.errors import ModelError
from kvcore.models.fields import Fields, quoted
from kvcore.weights.json_file import read_json
from kvcore.weights.mlx import AffineFormat
from kvcore.weights.safetensors import Entry, SafetensorsFile, open_safetensors
from kvcore.weights.types import AffineWeight, DenseWeight, Weight

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHOWN = 5


@dataclass(frozen=True, slots=True)
class FolderTensors:
    """Tensors of a folder; ``formats`` holds the quantized modules, by module name."""

    files: Mapping[str, SafetensorsFile]
    formats: Mapping[str, AffineFormat]

    def entries(self) -> dict[str, Entry]:
        return {name: file.entries[name] for name, file in self.files.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the dequantized parameters; a quantized module's scales and biases are not listed."""
        shapes = {name: entry.shape for name, entry in self.entries().items()}
        for module, found in self.formats.items():
            groups = shapes.pop(f"{module}.scales")
            del shapes[f"{module}.biases"]
            shapes[f"{module}.weight"] = (groups[0], groups[1] * found.group_size)
        return shapes

    def load(self, name: str) -> Weight:
        module = name.removesuffix(".weight")
        found = self.formats.get(module)
        if found is None or module == name:
            return DenseWeight(self._array(name))
        return AffineWeight(
            cast("npt.NDArray[np.uint32]", self._array(name)),
            self._array(f"{module}.scales"),
            self._array(f"{module}.biases"),
            found.bits,
            found.group_size,
        )

    def _array(self, name: str) -> npt.NDArray[np.generic]:
        return self.files[name].array(name)


def check_folder(folder: Path) -> None:
    """ModelError, saying what is missing, what was found and what helps, unless ``folder`` can hold a model."""
    found = _listing(folder)
    weights = [name for name in found if name.endswith(".safetensors")]
    missing = [] if "config.json" in found else ["config.json"]
    missing += [] if weights or INDEX in found else [".safetensors weights"]
    if not missing:
        return
    there = ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
    raise ModelError(
        f"{folder} has no {' and no '.join(missing)} (found: {there or 'nothing'}); {_advice(folder, found)}"
    )


def _listing(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise ModelError(f"cannot read {folder}: {error.strerror or error}") from error


def _advice(folder: Path, found: list[str]) -> str:
    gguf = [name for name in found if name.endswith(".gguf")]
    if gguf:
        return f"give the file itself: --model {folder / gguf[0]}"
    if any(name.startswith("pytorch_model") for name in found) and "config.json" in found:
        load = f"LlamaForCausalLM.from_pretrained('{folder}').save_pretrained('{folder}')"
        return f'write them: python -c "from transformers import LlamaForCausalLM; {load}"'
    return f"fetch a whole model: hf download ORG/NAME --local-dir {folder}"


def open_files(folder: Path) -> tuple[dict[str, SafetensorsFile], tuple[str, ...]]:
    """The file of every tensor, and notices. Only files that the index names are read."""
    present = [name for name in _listing(folder) if name.endswith(".safetensors")]
    if (folder / INDEX).is_file():
        files, used = _indexed(folder)
    elif SINGLE in present or len(present) == 1:
        used = [SINGLE if SINGLE in present else present[0]]
        file = open_safetensors(folder / used[0])
        files = dict.fromkeys(file.entries, file)
    else:
        raise ModelError(f"{folder} has {len(present)} .safetensors files and no {INDEX} to say which count")
    ignored = [name for name in present if name not in used]
    by = INDEX if (folder / INDEX).is_file() else "the model"
    return files, (f"ignored in {folder} (not named by {by}): {', '.join(ignored)}",) if ignored else ()


def _indexed(folder: Path) -> tuple[dict[str, SafetensorsFile], list[str]]:
    where = str(folder / INDEX)
    weight_map = Fields(read_json(folder / INDEX), where).block("weight_map")
    names = sorted({_file_name(name, where) for name in weight_map.values()})
    if not names:
        raise ModelError(f"{where}: weight_map names no file")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        rest = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise ModelError(
            f"{folder}: missing {', '.join(missing[:SHOWN])}{rest}, of {len(names)} files that {INDEX} names"
        )
    opened = {name: open_safetensors(folder / name) for name in names}
    files = {tensor: opened[cast(str, name)] for tensor, name in weight_map.items()}
    for tensor, file in files.items():
        if tensor not in file.entries:
            raise ModelError(f"{file.path} lacks {quoted(tensor)}, which {INDEX} places there")
    return files, names


def _file_name(name: object, where: str) -> str:
    """A plain file name: an index must not reach outside its folder."""
    if not isinstance(name, str) or not name or name != Path(name).name or "\0" in name:
        raise ModelError(f"{where}: {quoted(name)} is not a file name")
    return name
