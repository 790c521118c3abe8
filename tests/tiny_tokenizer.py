"""A byte-level tokenizer of a few hundred tokens, for tiny models."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kvcore.text.detokenizer import byte_level_alphabet

# UTF-8 never uses these bytes, so 243 byte tokens spell any text and 13 of 256 ids are left for other tokens.
_UNUSED_BYTES = {0xC0, 0xC1, *range(0xF5, 0x100)}
_COMMON_MERGES = (
    ("t", "h"),
    ("h", "e"),
    ("i", "n"),
    ("e", "r"),
    ("a", "n"),
    ("Ġ", "t"),
    ("Ġ", "a"),
    ("o", "n"),
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tiny_tokenizer(
    folder: str | Path,
    *,
    vocab_size: int = 256,
    chat_template: str | None = None,
    bos: str = "<s>",
    eos: str = "</s>",
    add_bos: bool = True,
) -> Path:
    """Write tokenizer.json and tokenizer_config.json; return the folder.

    Ids are 0 <pad>, 1 ``bos``, 2 ``eos``, 3 <|im_start|>, 4 <|im_end|>, then 243 bytes, then merges until there
    are ``vocab_size`` (at least 248, at most 900) tokens.
    """
    specials = ["<pad>", bos, eos, "<|im_start|>", "<|im_end|>"]
    alphabet = {byte: char for char, byte in byte_level_alphabet().items() if byte not in _UNUSED_BYTES}
    tokens = [*specials, *(alphabet[byte] for byte in sorted(alphabet))]
    if not len(tokens) <= vocab_size <= 900:
        raise ValueError(f"vocab_size {vocab_size} is not in [{len(tokens)}, 900]")
    pairs = dict.fromkeys((*_COMMON_MERGES, *product(ascii_lowercase, ascii_lowercase)))
    merges = list(pairs)[: vocab_size - len(tokens)]
    tokens += [left + right for left, right in merges]
    backend = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, tokens.index(bos))]
        )
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
    }
    config |= {"pad_token": "<pad>", "add_bos_token": add_bos}
    if chat_template is not None:
        config["chat_template"] = chat_template
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder
