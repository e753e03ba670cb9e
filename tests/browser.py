"""A headless Chromium, driven through its debugging pipe: nothing but the browser itself is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


class Browser:
    """One page; use as a context manager.

    Args:
        size: of the window, in pixels.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read, self._commands = os.pipe()
        self._answers, write = os.pipe()
        options = [*OPTIONS, f"--window-size={size[0]},{size[1]}", f"--user-data-dir={self._folder.name}"]
        # The browser reads from 3 and writes to 4.
        command = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "-", str(EXECUTABLE), *options]
        self._process = subprocess.Popen(
            [*command, "--remote-debugging-pipe"], pass_fds=(read, write), stderr=subprocess.DEVNULL
        )
        os.close(read)
        os.close(write)
        self._buffer, self._last, self._session = b"", 0, ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._folder.cleanup()

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression that JSON can hold."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression: str, wanted: Callable[[Any], bool], seconds: float) -> Any:
        """The first value of the expression that is `wanted`.

        Raises:
            TimeoutError: there was none in time; with the last one.
        """
        deadline = time.monotonic() + seconds
        while not wanted(value := self.evaluate(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} is {value!r} after {seconds} s")
            time.sleep(0.2)
        return value

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:  # events come in between
            answer = json.loads(self._next())
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _next(self) -> bytes:
        while b"\0" not in self._buffer:
            read = os.read(self._answers, 1 << 16)
            if not read:
                raise RuntimeError(f"{EXECUTABLE} ended with status {self._process.wait()}")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return message
