"""Chat templates: Jinja in a sandbox, with the extras that templates on the Hugging Face hub rely on.

The environment is that of transformers' ``apply_chat_template`` (``utils/chat_template_utils.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvcore.errors import InputError, ModelError

_INSTEAD = "pass another with --chat-template, or use --raw"


class ChatTemplate:
    """A chat template and the special tokens it may name.

    It is compiled at its first use, so that a broken one leaves raw prompts alone; ``compile`` does it early.

    Args:
        source: the Jinja text.
        where: the file (or option) it came from, for messages.
        variables: what the template can name besides the messages: ``bos_token``, ``eos_token``, ...
    """

    def __init__(self, source: str, where: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self.where = where
        self._variables = dict(variables)
        self._template: Template | None = None

    def compile(self) -> Template:
        """Parse the template.

        Raises:
            ModelError: it is not valid Jinja.
        """
        if self._template is None:
            try:
                self._template = _environment().from_string(self.source)
            except TemplateSyntaxError as error:
                raise ModelError(
                    f"{self.where}: the chat template has a syntax error, line {error.lineno}: {_line(error)}; "
                    f"{_INSTEAD}"
                ) from error
        return self._template

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True, **variables: object
    ) -> str:
        """The prompt for ``messages``, special tokens as text.

        Raises:
            ModelError: the template is not valid Jinja.
            InputError: the template rejects the messages, or fails on them.
        """
        template = self.compile()
        context = {"tools": None, "documents": None, **self._variables, **variables}
        context |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return template.render(context)
        except _RejectedError as error:
            raise InputError(f"{self.where}: the chat template rejects these messages: {_line(error)}") from error
        except Exception as error:  # a template is a program of its own and can fail in any way
            raise InputError(f"{self.where}: the chat template failed: {_line(error)}; {_INSTEAD}") from error


class _RejectedError(TemplateError):
    """The template called ``raise_exception``."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which a prompt must keep."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _RejectedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
