"""Text: tokenizers from folders and GGUF files, chat templates, streamed decoding, stop strings."""

from __future__ import annotations

from kvcore.text.answer import Answer
from kvcore.text.chat_template import ChatTemplate
from kvcore.text.detokenizer import Detokenizer
from kvcore.text.stop import StopMatcher
from kvcore.text.tokenizer import Tokenizer
from kvcore.weights import FolderTokenizer, GgufTokenizer

__all__ = ["Answer", "ChatTemplate", "Detokenizer", "StopMatcher", "Tokenizer", "load_tokenizer"]


def load_tokenizer(source: FolderTokenizer | GgufTokenizer, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint; ``chat_template`` is Jinja text to use instead of its own.

    Raises:
        ModelError: the tokenizer is missing, damaged or of a kind that is not supported.
    """
    match source:
        case FolderTokenizer(path):
            return Tokenizer.from_folder(path, chat_template=chat_template)
        case GgufTokenizer(metadata, path):
            return Tokenizer.from_gguf(metadata, str(path), chat_template=chat_template)
