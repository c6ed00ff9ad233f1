"""Memory that only a server process has: before, during and after large bodies and images, by `penstock serve`.

    scripts/bench memory [--model DIRECTORY] [--requests 8] [--at-once 4] [--rest 60]

Sends prompts of 7 MB to /tokenize and images of 40 megapixels in chats, some at a time, then nothing.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from bench.harness.run import Run, command_line
from bench.serve_cases.servers import NAME, Ours, Peak
from penstock.tools.inspect import private_nbytes_of

MB = 1e6
TEXT_NBYTES = 7_000_000
SIDES = (7300, 5470)  # just under 40 million pixels
Body = tuple[str, dict[str, Any]]  # path and JSON of a request


def text(number: int) -> Body:
    words = f"{number} is the number of a long text about nothing in particular. "
    return "/tokenize", {"model": NAME, "prompt": words * (TEXT_NBYTES // len(words))}


def picture(number: int, format: str, *, sides: tuple[int, int] = SIDES, **options: Any) -> Body:
    from PIL import Image

    raw = io.BytesIO()
    noise = Image.frombytes("RGB", (64, 64), os.urandom(3 * 64 * 64))
    noise.resize(sides, Image.Resampling.NEAREST).save(raw, format, **options)
    url = f"data:image/{format.lower()};base64,{base64.b64encode(raw.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What do you see?"}]
    return "/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 4}


KINDS: dict[str, Callable[[int], Body]] = {
    "prompts of 7 MB to /tokenize": text,
    "JPEGs of 40 megapixels": partial(picture, format="JPEG"),
    "progressive JPEGs": partial(picture, format="JPEG", progressive=True),
    "PNGs of 40 megapixels": partial(picture, format="PNG", compress_level=1),
}


def measure(run: Run, server: Ours) -> None:
    server.wait_for_an_answer()
    pid = server.pid_of("server")
    rows: list[tuple[str, list[str]]] = []

    def now() -> float:
        return (private_nbytes_of(pid) or 0) / MB

    def ask(body: Body) -> int:
        path, content = body
        return server.request("POST", path, content)[0]

    def tell(what: str, highest: float, answers: str = "", seconds: float = 0.0) -> None:
        mb = now()
        run.output.record("memory", "penstock", load=what, mb=mb, highest_mb=highest, seconds=seconds)
        rows.append((what, [f"{mb:.0f}", f"{highest:.0f}", answers, f"{seconds:.0f}"]))

    ask(picture(0, "PNG", sides=(64, 64)))
    tell("serves, has seen a small image", now())
    peak = Peak(now, 0.05)
    try:
        for name, body in KINDS.items():
            began = time.monotonic()
            with ThreadPoolExecutor(run.options.at_once) as threads:
                statuses = list(threads.map(lambda number, body=body: ask(body(number)), range(run.options.requests)))
            answers = ", ".join(f"{statuses.count(status)} x {status}" for status in sorted(set(statuses)))
            tell(name, peak.take(), answers, time.monotonic() - began)
        for _ in range(6):
            time.sleep(run.options.rest / 6)
            tell("then nothing", peak.take(), seconds=run.options.rest / 6)
    finally:
        peak.close()
    run.output.table("Private memory of the server process, MB", ["after", "highest", "answers", "s"], rows)
    others = [(private_nbytes_of(process.pid) or 0) / MB for _, process in server.processes() if process.pid != pid]
    run.output.say(f"other processes: {', '.join(f'{mb:.0f} MB' for mb in others)}")


def main(arguments: Sequence[str]) -> int:
    parser = command_line("memory", __doc__)
    parser.add_argument("--model", help="directory of a model that takes images (default: the one that ships)")
    parser.add_argument("--requests", type=int, default=8, help="of each kind (8)")
    parser.add_argument("--at-once", type=int, default=4, help="requests at a time (4)")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds without requests, at the end (60)")
    options = parser.parse_args(arguments)
    with Run("memory", options) as run:
        server = Ours.of([*filter(None, [options.model])], run.scratch / "log")
        try:
            measure(run, server)
        finally:
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
