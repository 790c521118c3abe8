"""A headless Chromium, driven through the DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. `evaluate` runs JavaScript; `errors` are what the page raised or the console reported."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._next = socket, 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.05)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        self._socket.send(json.dumps({"id": self._next, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=120))
            if message.get("id") == self._next:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]))


@contextmanager
def chromium(binary: str, profile: Path) -> Iterator[Page]:
    from websockets.sync.client import connect

    command = [binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--no-proxy-server"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = _port(profile / "DevToolsActivePort", process)
        targets = httpx.get(f"http://127.0.0.1:{port}/json/list", trust_env=False).json()
        target = next(target for target in targets if target["type"] == "page")
        with connect(target["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(60)


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "Chromium has ended"
        if file.is_file() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        time.sleep(0.1)
    raise AssertionError("Chromium did not start")
