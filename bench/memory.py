"""Memory that only a server process has: before, during and after large bodies and images, by `penstock serve`.

    python bench/memory.py [--model DIRECTORY] [--requests 8] [--at-once 4] [--rest 60]

Sends prompts of 7 MB to /tokenize and images of 40 megapixels in chats, some at a time, then nothing.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.tools.inspect import all_processes, private_nbytes_of
from penstock.tools.inspect.processes import with_descendants

MB = 1e6
TEXT_NBYTES = 7_000_000
SIDES = (7300, 5470)  # just under 40 million pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a model that takes images (default: the one that ships)")
    parser.add_argument("--requests", type=int, default=8, help="of each kind (8)")
    parser.add_argument("--at-once", type=int, default=4, help="requests at a time (4)")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds without requests, at the end (60)")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "penstock", "serve", *filter(None, [options.model]), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        measure(f"http://127.0.0.1:{port}", process.pid, options)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def measure(url: str, launcher: int, options: argparse.Namespace) -> None:
    while not is_ready(url):
        time.sleep(0.5)
    server = json.load(urllib.request.urlopen(url + "/health"))["servers"][0]["pid"]
    ask(url, *picture(64, 64, 0, "PNG"))
    watch = Highest(server)
    print(f"{'':34} private memory of the server process")
    print(f"{'serves, has seen one small image':34} {watch.now():6.0f} MB")
    kinds: list[tuple[str, Callable[[int], Any]]] = [
        ("prompts of 7 MB to /tokenize", lambda number: text(number)),
        ("JPEGs of 40 megapixels", lambda number: picture(*SIDES, number, "JPEG")),
        ("progressive JPEGs", lambda number: picture(*SIDES, number, "JPEG", progressive=True)),
        ("PNGs of 40 megapixels", lambda number: picture(*SIDES, number, "PNG", compress_level=1)),
    ]
    for name, body in kinds:
        began = time.monotonic()
        with ThreadPoolExecutor(options.at_once) as threads:
            statuses = list(threads.map(lambda number, body=body: ask(url, *body(number)), range(options.requests)))
        output = ", ".join(f"{statuses.count(status)} x {status}" for status in sorted(set(statuses)))
        highest = watch.highest()
        print(f"{name:34} {watch.now():6.0f} MB, highest {highest:.0f}: {output}, {time.monotonic() - began:.0f} s")
    for _ in range(6):
        time.sleep(options.rest / 6)
        print(f"{'then nothing':34} {watch.now():6.0f} MB")
    others = [pid for pid in with_descendants(launcher, all_processes()) if pid != server]
    print("others:", ", ".join(f"{(private_nbytes_of(pid) or 0) / MB:.0f} MB" for pid in others))
    watch.end()


class Highest:
    """Looks at a process 20 times a second."""

    def __init__(self, pid: int) -> None:
        self._pid, self._highest, self._is_over = pid, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def now(self) -> float:
        return (private_nbytes_of(self._pid) or 0) / MB

    def highest(self) -> float:
        """Since the last call."""
        highest, self._highest = self._highest, 0.0
        return highest

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.05):
            self._highest = max(self._highest, self.now())


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def text(number: int) -> tuple[str, dict[str, Any]]:
    words = f"{number} is the number of a long text about nothing in particular. "
    return "/tokenize", {"prompt": words * (TEXT_NBYTES // len(words))}


def picture(width: int, height: int, number: int, format: str, **options: Any) -> tuple[str, dict[str, Any]]:
    from PIL import Image

    raw = io.BytesIO()
    noise = Image.frombytes("RGB", (64, 64), os.urandom(3 * 64 * 64))
    noise.resize((width, height), Image.Resampling.NEAREST).save(raw, format, **options)
    url = f"data:image/{format.lower()};base64,{base64.b64encode(raw.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What do you see?"}]
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 4}


def ask(url: str, path: str, body: dict[str, Any]) -> int:
    try:
        request = urllib.request.Request(url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    main()
