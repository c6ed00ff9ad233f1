"""A server of a few lines that answers as it is told, and `penstock bench serve` against it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from penstock import cli

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"

# One step of an answer: bytes to send, seconds to wait, or None: the connection is closed here.
Script = list[bytes | float | None]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**fields: Any) -> bytes:
    return chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")


def text(content: str = " word", reason: str | None = None, **more: Any) -> bytes:
    return event(choices=[{"index": 0, "text": content, "finish_reason": reason}], **more)


def usage(output: int, prompt: int = 5) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output}


def ending(output: int | None, reason: str = "length") -> bytes:
    """The end of a stream, with its usage, if there is one."""
    last = b"" if output is None else event(choices=[], usage=usage(output))
    return text("", reason) + last + chunk(b"data: [DONE]\n\n") + END


def refusal(status: str, body: bytes, *headers: bytes) -> bytes:
    head = b"".join(b"\r\n" + header for header in headers)
    return b"HTTP/1.1 %b%b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), head, len(body), body)


class Fake:
    """Answers each request by a script, which may depend on how many came before and on what is asked."""

    def __init__(self, script: Callable[[int, dict[str, Any]], Script]) -> None:
        self._script = script
        self.requests: list[tuple[str, dict[str, Any]]] = []  # path and body
        self.heads: list[str] = []
        self.connections = self.open = self.most_open = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass
        writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
        body = json.loads(await reader.readexactly(length) or b"{}")
        self.heads.append(head)
        self.requests.append((head.split()[1], body))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            for step in self._script(len(self.requests) - 1, body):
                if step is None:
                    return False
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    writer.write(step)
                    await writer.drain()
        finally:
            self.open -= 1
        return True


@contextlib.asynccontextmanager
async def faked(script: Callable[[int, dict[str, Any]], Script]) -> AsyncIterator[tuple[Fake, str]]:
    """And its URL."""
    fake = Fake(script)
    server = await asyncio.start_server(fake.answer, "127.0.0.1", 0)
    try:
        yield fake, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def faked_in_a_thread(script: Callable[[int, dict[str, Any]], Script]) -> Iterator[tuple[Fake, str]]:
    """The same, for what has a loop of its own."""
    up, down = threading.Event(), asyncio.Event()
    resolved: list[Any] = []

    async def serve() -> None:
        async with faked(script) as pair:
            resolved.extend((asyncio.get_running_loop(), pair))
            up.set()
            await down.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(10)
    try:
        yield resolved[1]
    finally:
        resolved[0].call_soon_threadsafe(down.set)
        thread.join(10)
    assert not thread.is_alive()


def bench(url: str, path: Path, *options: object) -> tuple[int, dict[str, Any]]:
    """The exit status, and what stands in the file of --json. Prompts are given, so that nothing is asked before."""
    (path / "prompts.jsonl").write_text('"hello"\n')
    figures = path / "figures.json"
    arguments = (
        "--base-url",
        url,
        "--model",
        "m",
        "--dataset-path",
        path / "prompts.jsonl",
        "--result-filename",
        figures,
    )
    status = cli.main(["bench", "serve", *map(str, (*arguments, *options))])
    return status, json.loads(figures.read_text())
