"""The page at /, in a real Chromium."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from browser import Page, chromium, find_chromium
from live import TEXT, Live

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if importlib.util.find_spec("websockets") is None:
        pytest.skip("the package websockets is not installed")
    binary = find_chromium()
    if binary is None:
        pytest.skip("Chromium is not installed")
    with chromium(binary, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def say(page: Page, text: str) -> None:
    page.evaluate(f"document.getElementById('input').value = {json.dumps(text)}")
    page.evaluate("document.getElementById('send').click()")


def texts(page: Page, kind: str) -> Any:
    return page.evaluate(f"[...document.querySelectorAll('.message.{kind}')].map((e) => e.textContent)")


def shown(page: Page, name: str) -> str:
    return str(page.evaluate(f"document.getElementById('{name}').textContent"))


def idle(page: Page) -> None:
    page.wait("!document.getElementById('send').hidden")


def test_a_chat_with_its_numbers(page: Page, fake: Live) -> None:
    page.open(fake.url)
    page.wait("document.getElementById('model').textContent === 'tiny'")
    for i, text in enumerate(("hi", "again"), 1):
        say(page, text)
        page.wait(f"document.querySelectorAll('.message.assistant').length === {i}")
        idle(page)
    assert texts(page, "user") == ["hi", "again"]
    assert texts(page, "assistant") == [TEXT, TEXT]
    sent = fake.engine.submitted[-1]
    assert shown(page, "prompt-tokens") == str(len(sent.prompt))
    assert shown(page, "cached") == str(len(sent.prompt) // 2)
    assert float(shown(page, "speed")) > 0
    assert shown(page, "mode") == "fp16"
    assert re.fullmatch(r"[\d.]+ ([KMGT]i)?B", shown(page, "kv-bytes"))
    assert page.errors == []


def test_an_answer_is_text_and_never_html(page: Page, serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(EVIL)
    page.open(live.url)
    say(page, EVIL)
    page.wait("document.querySelectorAll('.message.assistant').length === 1")
    idle(page)
    assert texts(page, "user") == texts(page, "assistant") == [EVIL]
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert page.evaluate("document.title") == "kvcore"
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')")
    page.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert page.evaluate("document.title") == "kvcore"  # the policy forbids it even then
    page.errors.clear()


def test_a_key_is_typed_in_and_errors_are_shown(page: Page, serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(api_key="sk-page")
    page.open(live.url)
    say(page, "hi")
    page.wait("document.querySelectorAll('.message.error').length === 1")
    assert "API key" in texts(page, "error")[0]
    idle(page)
    page.evaluate("document.getElementById('key').value = 'sk-page'")
    say(page, "hi")
    page.wait("document.querySelectorAll('.message.assistant').length === 1")
    idle(page)
    assert texts(page, "assistant") == [TEXT]
    page.errors.clear()  # the console reports the status 401


def test_stop_ends_the_request(page: Page, serve_fake: Callable[..., Live]) -> None:
    live = serve_fake(script=lambda _request: [77] * 100_000, engine={"step_seconds": 0.01})
    page.open(live.url)
    say(page, "hi")
    page.wait("(document.querySelector('.message.assistant')?.textContent.length ?? 0) > 3")
    assert float(shown(page, "speed")) > 0
    page.evaluate("document.getElementById('stop').click()")
    idle(page)
    assert live.idle()
    page.evaluate("document.getElementById('reset').click()")
    assert page.evaluate("document.querySelectorAll('.message').length") == 0
    assert page.errors == []


def test_the_page_needs_nothing_from_elsewhere(fake: Live) -> None:
    response = fake.http.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("index.html", "chat.js", "chat.css"):
        text = (files("kvcore.server") / "page" / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://|@import|innerHTML|outerHTML|document\.write", text)
    assert Path(str(files("kvcore.server") / "page")).is_dir()
