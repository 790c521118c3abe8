"""One tokenizer for every model format: text and chats to token ids, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken

from kvcore.errors import InputError, ModelError
from kvcore.text.chat_template import ChatTemplate
from kvcore.text.detokenizer import TokenPieces
from kvcore.text.gguf_tokenizer import read_vocabulary

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """Tokenizes prompts and chats, and decodes ids.

    A prompt begins with exactly one BOS if the model wants one, whether or not its text or its chat template
    wrote it already. Nothing is appended, as a prompt is there to be continued.

    Attributes:
        where: the folder or file it came from.
        adds_bos: prompts begin with ``bos_token_id``.
        bos_token_id: beginning of text, or None.
        eos_token_ids: ids that end generation by the tokenizer's word; the model's configuration may add some.
        special_tokens: texts by role (``bos_token``, ``eos_token``, ``unk_token``, ``pad_token``).
        chat_template: None where the model has none.
        pieces: the bytes of each token, and which tokens are special.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        where: str,
        special_tokens: Mapping[str, str],
        adds_bos: bool,
        eos_token_ids: tuple[int, ...] | None = None,
        chat_template: ChatTemplate | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._backend = backend
        self._settings = dict(settings or {})
        self.where = where
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.bos_token_id = self._role_id("bos_token")
        self.adds_bos = adds_bos and self.bos_token_id is not None
        if eos_token_ids is None:
            eos = self._role_id("eos_token")
            eos_token_ids = () if eos is None else (eos,)
        self.eos_token_ids = eos_token_ids
        self.pieces = TokenPieces(backend, where)

    @classmethod
    def from_folder(cls, path: str | Path, *, chat_template: str | None = None) -> Self:
        """Load ``tokenizer.json`` and what stands beside it.

        Args:
            path: a model's folder.
            chat_template: Jinja text to use instead of the model's own.

        Raises:
            ModelError: a file is missing or damaged, or the kind of tokenizer is not supported.
        """
        folder = Path(path)
        backend = _load_backend(folder)
        settings = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") | settings)
        known = {role: text for role, text in special_tokens.items() if backend.token_to_id(text) is not None}
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in known.values()])
        first = _leading_special_token(backend)
        if first is not None:
            known.setdefault("bos_token", first)
        adds_bos = settings.get("add_bos_token")
        template = _folder_template(folder, settings, known)
        if chat_template is not None:
            template = ChatTemplate(chat_template, "--chat-template", known)
        return cls(
            backend,
            where=str(folder),
            special_tokens=known,
            adds_bos=adds_bos if isinstance(adds_bos, bool) else first == known.get("bos_token", ""),
            chat_template=template,
            settings=settings,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], where: str, *, chat_template: str | None = None) -> Self:
        """Build the tokenizer that a GGUF file's metadata describes.

        Args:
            metadata: GGUF key-value pairs as plain Python values.
            where: the file's name, for messages.
            chat_template: Jinja text to use instead of ``tokenizer.chat_template``.

        Raises:
            ModelError: a key is missing or of the wrong type, or the kind of tokenizer is not supported.
        """
        vocabulary = read_vocabulary(metadata, where)
        source = metadata.get("tokenizer.chat_template")
        template = ChatTemplate(source, where, vocabulary.special_tokens) if isinstance(source, str) else None
        if chat_template is not None:
            template = ChatTemplate(chat_template, "--chat-template", vocabulary.special_tokens)
        return cls(
            vocabulary.backend,
            where=where,
            special_tokens=vocabulary.special_tokens,
            adds_bos=vocabulary.adds_bos,
            eos_token_ids=vocabulary.eos_token_ids,
            chat_template=template,
            settings={"add_bos_token": vocabulary.adds_bos},
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def digest(self) -> str:
        """A hash of everything that decides which ids a text gets."""
        return hashlib.blake2b(self._backend.to_str().encode() + b"%d" % self.adds_bos, digest_size=16).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt. The text of a special token becomes that token.

        Raises:
            InputError: the text holds half a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text is not valid Unicode: a lone surrogate at character {error.start}; remove it"
            ) from error
        ids = self._backend.encode(text, add_special_tokens=False).ids
        bos = self.bos_token_id
        return [bos, *ids] if self.adds_bos and bos is not None and ids[:1] != [bos] else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        **template_variables: object,
    ) -> list[int]:
        """Token ids of a chat: rendered by the chat template, then tokenized. Raises as ``render_chat``."""
        return self.encode(
            self.render_chat(messages, add_generation_prompt=add_generation_prompt, **template_variables)
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        **template_variables: object,
    ) -> str:
        """The prompt text of a chat.

        Args:
            messages: mappings with ``role`` and ``content``.
            add_generation_prompt: end with the beginning of the assistant's turn.
            template_variables: further variables that the template may read.

        Raises:
            InputError: there is no chat template, or it rejects the messages.
            ModelError: the template is not valid Jinja.
        """
        if self.chat_template is None:
            raise InputError(f"{self.where} has no chat template; give one with --chat-template, or use --raw")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, **template_variables)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that form no character become U+FFFD."""
        skipped = self.pieces.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join(self.pieces[token_id] for token_id in ids if token_id not in skipped)
        if self.pieces.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` for ``from_folder`` and transformers."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(target / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings |= self._settings | self.special_tokens
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template.source
        text = json.dumps(settings, ensure_ascii=False, indent=2)
        (target / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _role_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            raise ModelError(
                f"{folder} has only tokenizer.model (SentencePiece), which is not read; put the "
                "model's tokenizer.json beside it (transformers' AutoTokenizer writes one with save_pretrained)"
            )
        raise ModelError(
            f"{folder} has no tokenizer.json; copy it there from where the model was downloaded or converted"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        reason = " ".join(str(error).split())
        raise ModelError(f"{path} cannot be read as a tokenizer ({reason}); download it again") from error
    # Files saved during training may cut or pad every text to a length.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _leading_special_token(backend: tokenizers.Tokenizer) -> str | None:
    """The token that the post-processor puts before a text."""
    encoding = backend.encode("a")
    return encoding.tokens[0] if encoding.special_tokens_mask[:1] == [1] else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; download it again")
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; each stands as text or as an object with ``content``."""
    found = {}
    for role in _ROLES:
        value = settings.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            found[role] = text
    return found


def _folder_template(folder: Path, settings: Mapping[str, Any], variables: Mapping[str, str]) -> ChatTemplate | None:
    """The chat template of a folder: its own file, else the one in the configuration."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), str(path), variables)
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read as text ({error}); download it again") from error
    for name, content in (
        ("tokenizer_config.json", settings),
        ("chat_template.json", _read_json(folder / "chat_template.json")),
    ):
        source = _default_template(content.get("chat_template"))
        if source is not None:
            return ChatTemplate(source, str(folder / name), variables)
    return None


def _default_template(value: object) -> str | None:
    """Among several named templates the one called ``default`` is for plain chats; without it, the first is."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default", next(iter(named.values()), None))
    return value if isinstance(value, str) else None
