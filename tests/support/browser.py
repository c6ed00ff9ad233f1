"""A headless Chromium for tests, spoken to through two pipes: nothing listens, and nothing has to be installed but it.

`Browser.find()` says where one is, if there is one.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE = 60.0  # seconds; for an answer on a busy machine
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LEAST_FD = 20  # above those that the browser has them by


class Browser:
    """One page. `with Browser(folder) as page:`"""

    @staticmethod
    def find() -> str | None:
        return next(filter(None, map(shutil.which, NAMES)), None)

    def __init__(self, folder: Path) -> None:
        path = self.find()
        assert path is not None, "whoever asks for it has looked whether there is one"
        theirs_in, self._out = _pipe()
        self._in, theirs_out = _pipe()
        command = [
            *(path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"),
        ]
        actions = [
            (os.POSIX_SPAWN_DUP2, theirs_in, 3),
            (os.POSIX_SPAWN_DUP2, theirs_out, 4),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        self._pid = os.posix_spawn(path, command, dict(os.environ), file_actions=actions, setpgroup=0)
        os.close(theirs_in)
        os.close(theirs_out)
        self._got = b""
        self._number = 0
        self._session = ""
        self.complaints: list[str] = []  # of the page: what was thrown, what was refused
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = ""
        with contextlib.suppress(OSError, AssertionError):
            self._ask("Browser.close")
        deadline = time.monotonic() + 5
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.killpg(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # those that it has left behind
        os.close(self._in)
        os.close(self._out)

    # ── what a person does ──
    def go(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    def size(self, width: int, height: int) -> None:
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("Emulation.setEmulatedMedia", features=features)

    def evaluate(self, expression: str) -> Any:
        result = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """Asks until it is true, and returns it."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"it did not come to {expression}: {self.evaluate(BODY)}"
            time.sleep(0.05)
        return value

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    # ── the protocol ──
    def _ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._hear()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(answer["params"]["exceptionDetails"]))
            elif answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.complaints.append(answer["params"]["entry"]["text"])

    def _hear(self) -> Any:
        while b"\0" not in self._got:
            assert select.select([self._in], [], [], PATIENCE)[0], "the browser does not answer"
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._got += more
        message, _, self._got = self._got.partition(b"\0")
        return json.loads(message)


BODY = "document.body ? document.body.innerText.slice(0, 2000) : ''"


def _pipe() -> tuple[int, int]:
    ends = []
    for fd in os.pipe():
        ends.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LEAST_FD))
        os.close(fd)
    return ends[0], ends[1]
