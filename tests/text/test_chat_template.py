"""Chat templates: the environment, and errors in one line that name the file."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from kvcore.errors import InputError, ModelError
from kvcore.text import ChatTemplate

HI = [{"role": "user", "content": "<b>é</b>"}]
ENVIRONMENT = {
    "tojson-keeps-html-and-accents": ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<b>é</b>"}'),
    "tojson-options": ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
    "trimmed-blocks": ("{% if true %}\na\n  {% endif %}\nb", "a\nb"),
    "loop-controls": ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    "generation-tag": ("{% generation %}{% set x = 1 %}a{{ x }}{% endgeneration %}", "a1"),
    "special-tokens": ("{{ bos_token }}|{{ eos_token }}|{{ unk_token }}", "<s>|</s>|"),
    "no-tools": ("{{ tools is none }} {{ documents is none }}", "True True"),
    "generation-prompt": ("{{ add_generation_prompt }}", "True"),
    "date": ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
    "keyword": ("{{ thinking }}", "on"),
    "sandbox": ("{{ ''.__class__ }}", ""),
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "dir/file.jinja", {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(("source", "text"), ENVIRONMENT.values(), ids=ENVIRONMENT.keys())
def test_environment(source: str, text: str) -> None:
    assert template(source).render(HI, thinking="on") == text


def test_environment_equals_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for source, _ in ENVIRONMENT.values():
        theirs, _ = utils.render_jinja_template(
            [HI],
            chat_template=source,
            add_generation_prompt=True,
            thinking="on",
            bos_token="<s>",
            eos_token="</s>",
        )
        assert template(source).render(HI, thinking="on") == theirs[0]


ERRORS = {
    "syntax": ("a\n{% if %}", ModelError, "syntax error, line 2: Expected an expression"),
    "unclosed": ("{% for m in messages %}", ModelError, "syntax error, line 1: Unexpected end of template"),
    "raise_exception": (
        "{{ raise_exception('roles\nmust alternate') }}",
        InputError,
        "rejects .* roles must alternate",
    ),
    "undefined": ("{{ messages[0]['name'] + 'x' }}", InputError, "failed: .*has no attribute 'name'"),
    "type": ("{{ 1 + 'x' }}", InputError, "failed: unsupported operand"),
    "unsafe": ("{{ messages.append(1) }}", InputError, "failed: .*is unsafe;"),
}


@pytest.mark.parametrize(("source", "kind", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_B56_errors_name_the_file_in_one_line(source: str, kind: type[InputError], message: str) -> None:
    with pytest.raises(kind, match=rf"^dir/file\.jinja: .*{message}") as caught:
        template(source).render(HI)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_B56_a_broken_template_can_be_found_before_the_first_chat() -> None:
    broken = template("{{ }")
    with pytest.raises(ModelError):
        broken.compile()


def test_messages_are_data_not_template() -> None:
    text = template("{{ messages | tojson }}").render([{"role": "user", "content": "{{ 1 + 1 }}"}])
    assert json.loads(text)[0]["content"] == "{{ 1 + 1 }}"
