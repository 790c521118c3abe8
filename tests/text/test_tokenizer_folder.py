"""Tokenizers from folders: files, BOS, chats, saving, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import CHAT_TEMPLATE, write_tiny_tokenizer

from kvcore.errors import InputError, ModelError
from kvcore.text import Tokenizer, load_tokenizer
from kvcore.weights import FolderTokenizer

BOS, EOS = 1, 2
HI = [{"role": "user", "content": "hi"}]
WITHOUT_BOS = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in config.items() if value is not ...}
    path.write_text(json.dumps(kept), encoding="utf-8")


@given(text=st.text())
def test_any_text_comes_back(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text)
    assert ids[:1] == [BOS]
    assert max(ids) < tiny.vocab_size == 256
    assert tiny.decode(ids) == text


@pytest.mark.parametrize("vocab_size", [248, 256, 512, 900])
def test_tiny_tokenizer_has_the_size_asked_for(tmp_path: Path, vocab_size: int) -> None:
    assert Tokenizer.from_folder(write_tiny_tokenizer(tmp_path, vocab_size=vocab_size)).vocab_size == vocab_size


@pytest.mark.parametrize("add_bos", [True, False], ids=["bos", "no-bos"])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, WITHOUT_BOS], ids=["template-with-bos", "template-without"])
def test_M6_B53_exactly_one_bos(tmp_path: Path, template: str, add_bos: bool) -> None:
    tokenizer = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path, chat_template=template, add_bos=add_bos))
    wanted = 1 if add_bos or template is CHAT_TEMPLATE else 0
    assert tokenizer.encode_chat(HI)[:2].count(BOS) == wanted
    assert tokenizer.encode("hi")[:2].count(BOS) == int(add_bos)
    assert tokenizer.encode("<s>hi")[:2].count(BOS) == 1


def test_chat_ids_are_those_of_the_rendered_text(tiny: Tokenizer) -> None:
    assert tiny.render_chat(HI) == "<s>[user]hi</s>[assistant]"
    assert tiny.render_chat(HI, add_generation_prompt=False) == "<s>[user]hi</s>"
    ids = tiny.encode_chat(HI)
    assert ids == tiny.encode(tiny.render_chat(HI))
    assert ids.count(EOS) == 1
    assert tiny.decode(ids, skip_special_tokens=False) == "<s>[user]hi</s>[assistant]"


ADDS_BOS = {
    "configuration-overrides-post-processor": ({"add_bos_token": False}, True, False),
    "configuration-adds": ({"add_bos_token": True}, False, True),
    "post-processor-alone": ({"add_bos_token": ...}, True, True),
    "neither": ({"add_bos_token": ...}, False, False),
    "post-processor-names-the-token": ({"add_bos_token": ..., "bos_token": ...}, True, True),
    "no-bos-token": ({"add_bos_token": True, "bos_token": None}, False, False),
}


@pytest.mark.parametrize(("changes", "post_processor", "adds"), ADDS_BOS.values(), ids=ADDS_BOS.keys())
def test_who_decides_on_bos(tmp_path: Path, changes: dict[str, Any], post_processor: bool, adds: bool) -> None:
    edit_config(write_tiny_tokenizer(tmp_path, add_bos=post_processor), **changes)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.adds_bos is adds
    assert (tokenizer.encode("hi")[0] == BOS) is adds


def test_special_tokens_as_objects_and_from_their_own_file(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, add_bos=False)
    edit_config(tmp_path, bos_token={"content": "<|im_start|>", "lstrip": False}, eos_token=...)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}}), encoding="utf-8"
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (3, (4,))


def test_a_role_makes_a_token_special(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "</s>"]
    path.write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode([EOS, *tokenizer.encode("a")]) == "a"


def test_saved_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    path.write_text(json.dumps(content), encoding="utf-8")
    assert len(Tokenizer.from_folder(tmp_path).encode("x" * 50)) == 51


TEMPLATES = {
    "text": ("in config", None, "in config"),
    "named": (
        [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}],
        None,
        "plain",
    ),
    "named-without-default": ([{"name": "rag", "template": "first"}], None, "first"),
    "own-file-wins": ("in config", "in file", "in file"),
    "own-file-alone": (..., "in file", "in file"),
}


@pytest.mark.parametrize(("in_config", "in_file", "text"), TEMPLATES.values(), ids=TEMPLATES.keys())
def test_where_templates_stand(tmp_path: Path, in_config: Any, in_file: str | None, text: str) -> None:
    edit_config(write_tiny_tokenizer(tmp_path), chat_template=in_config)
    if in_file is not None:
        (tmp_path / "chat_template.jinja").write_text(in_file, encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(HI) == text
    assert Tokenizer.from_folder(tmp_path, chat_template="given").render_chat(HI) == "given"


def test_template_in_chat_template_json(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}', encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).render_chat(HI) == "from json"


def test_folder_of_a_checkpoint(tmp_path: Path) -> None:
    source = FolderTokenizer(write_tiny_tokenizer(tmp_path, chat_template=CHAT_TEMPLATE))
    assert load_tokenizer(source).render_chat(HI) == "<s>[user]hi</s>[assistant]"
    assert load_tokenizer(source, "given").render_chat(HI) == "given"


def test_M7_B55_no_chat_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path))
    assert not tokenizer.has_chat_template
    assert tokenizer.encode("raw works")[0] == BOS
    with pytest.raises(InputError, match=r"has no chat template.*--chat-template.*--raw"):
        tokenizer.encode_chat(HI)


def test_B56_broken_template_names_its_file_and_leaves_raw_prompts_alone(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("raw works")[0] == BOS
    with pytest.raises(ModelError, match=r"chat_template\.jinja: the chat template has a syntax error, line 1"):
        tokenizer.encode_chat(HI)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, None], ids=["chat", "no-template"])
def test_save_and_load_again(tmp_path: Path, template: str | None) -> None:
    tokenizer = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path / "a", chat_template=template))
    tokenizer.save(tmp_path / "b")
    again = Tokenizer.from_folder(tmp_path / "b")
    assert again.encode("héllo <|im_end|> 😀") == tokenizer.encode("héllo <|im_end|> 😀")
    assert again.eos_token_ids == tokenizer.eos_token_ids == (EOS,)
    assert again.has_chat_template is (template is not None)
    if template is not None:
        assert again.encode_chat(HI) == tokenizer.encode_chat(HI)


def test_save_keeps_a_template_given_instead(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path / "a", chat_template="old")
    Tokenizer.from_folder(tmp_path / "a", chat_template="new").save(tmp_path / "b")
    assert Tokenizer.from_folder(tmp_path / "b").render_chat(HI) == "new"


def test_transformers_agrees(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.from_folder(write_tiny_tokenizer(tmp_path / "a", chat_template=CHAT_TEMPLATE))
    tokenizer.save(tmp_path / "b")
    for folder in ("a", "b"):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert theirs("the héllo 😀").input_ids == tokenizer.encode("the héllo 😀")
        chat = theirs.apply_chat_template(HI, add_generation_prompt=True, return_dict=True)
        assert chat["input_ids"] == tokenizer.encode_chat(HI)


DAMAGE = {
    "missing": ("tokenizer.json", None, "has no tokenizer.json; copy it"),
    "empty": ("tokenizer.json", b"", "tokenizer.json cannot be read as a tokenizer"),
    "cut": ("tokenizer.json", b'{"version": "1.0", "mod', "tokenizer.json cannot be read as a tokenizer"),
    "not-utf8": ("tokenizer.json", b"\xff\xfe", "tokenizer.json cannot be read as a tokenizer"),
    "config-cut": ("tokenizer_config.json", b'{"bos_token": ', "tokenizer_config.json cannot be read as JSON"),
    "config-not-utf8": (
        "tokenizer_config.json",
        b'{"a": "\xff"}',
        "tokenizer_config.json cannot be read as JSON",
    ),
    "config-list": ("tokenizer_config.json", b"[]", "tokenizer_config.json is not a JSON object"),
    "template-not-utf8": ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read as text"),
}


@pytest.mark.parametrize(("name", "content", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_M4_damaged_files_are_named_in_one_line(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sentencepiece_model_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(ModelError, match=r"only tokenizer\.model \(SentencePiece\).*tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_lone_surrogate(tiny: Tokenizer) -> None:
    with pytest.raises(InputError, match="lone surrogate at character 2"):
        tiny.encode("ab\ud83d")


def test_importing_text_needs_no_framework() -> None:
    code = "import sys, kvcore.text; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "kvcore.text.tokenizer" in loaded
    assert {"torch", "mlx", "transformers", "huggingface_hub", "gguf"}.isdisjoint(loaded)
