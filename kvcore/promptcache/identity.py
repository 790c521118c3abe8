"""What a prompt cache was made with, and whether that is what a run has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvcore.errors import InputError
from kvcore.models.fields import quoted

# In the order in which a mismatch is told: name of the field, and what to do about it.
_ADVICE = {
    "model": "use the model that made the file",
    "rope": "use the model that made the file",
    "tokenizer": "use the tokenizer that made the file",
    "mode": "give --kv-cache-mode as in the file",
    "layout": "use the model that made the file",
    "window": "give --sink-tokens, --recent-tokens, --page-size and --boundary-layers as in the file",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What must agree. ``model`` and ``tokenizer`` are hashes, the others plain values."""

    model: str
    tokenizer: str
    rope: Mapping[str, object]
    mode: str
    layout: Mapping[str, object]
    window: Mapping[str, object]

    def check(self, other: Identity, where: str) -> None:
        """InputError, beginning with ``where``, that names both values of all that differs; ``self`` is the file's."""
        differs = [name for name in _ADVICE if getattr(self, name) != getattr(other, name)]
        if not differs:
            return
        if "mode" in differs and "layout" in differs:
            differs.remove("layout")  # which follows from the mode
        said = "; ".join(f"{name} is {_differing(getattr(self, name), getattr(other, name))}" for name in differs)
        advice = " and ".join(dict.fromkeys(_ADVICE[name] for name in differs))
        raise InputError(f"{where} does not fit this run: {said}: {advice}, or make the file again")

    def to_dict(self) -> dict[str, object]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


def _differing(file: object, here: object) -> str:
    """Both values; of mappings only what differs."""
    if isinstance(file, Mapping) and isinstance(here, Mapping):
        names = [name for name in {**file, **here} if file.get(name) != here.get(name)]
        pairs = [", ".join(f"{_shown(name)} {_shown(values.get(name))}" for name in names) for values in (file, here)]
        return f"{pairs[0]} in the file and {pairs[1]} here"
    return f"{_shown(file)} in the file and {_shown(here)} here"


def _shown(value: object) -> str:
    """In one line, whatever stands in a damaged file."""
    text = str(value)
    return text if text.isprintable() and len(text) <= 200 else quoted(value)
