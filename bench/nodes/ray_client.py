"""Requests to a replica through Serve, and to an engine itself: streams and whole answers, with their times."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIMEOUT = aiohttp.ClientTimeout(total=120)


@dataclass
class Answer:
    """What came of one request."""

    status: int = 0
    text: str = ""
    events: int = 0
    error: str = ""  # said by the server, or of the connection
    is_whole: bool = False
    first_s: float = 0.0  # from the request to the first piece of text
    seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)


def session() -> aiohttp.ClientSession:
    """A connection for each request, as clients behind a balancer have."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=TIMEOUT)


async def complete(
    client: aiohttp.ClientSession, url: str, prompt: str, tokens: int, *, stream: bool = True, **headers: str
) -> Answer:
    """Asks for a completion. Raises nothing: an answer that is not whole says why."""
    body = {"prompt": prompt, "max_tokens": tokens, "stream": stream, "temperature": 0, "ignore_eos": True}
    answer, began = Answer(), time.monotonic()
    try:
        async with client.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            answer.status, answer.headers = response.status, dict(response.headers)
            if stream and response.status == 200:
                await _read_events(response, answer, began)
            else:
                _read_whole(await response.json(content_type=None), answer)
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, json.JSONDecodeError) as error:
        answer.is_whole, answer.error = False, answer.error or f"{type(error).__name__}: {error}"
    answer.seconds = time.monotonic() - began
    return answer


async def _read_events(response: aiohttp.ClientResponse, answer: Answer, began: float) -> None:
    async for line in response.content:
        if line == b"data: [DONE]\n":
            answer.is_whole = not answer.error
        elif line.startswith(b"data: "):
            parsed: dict[str, Any] = json.loads(line[6:])
            if "error" in parsed:
                answer.error = parsed["error"]["message"]
                continue
            answer.events += 1
            answer.first_s = answer.first_s or time.monotonic() - began
            answer.text += parsed["choices"][0]["text"]


def _read_whole(output: dict[str, Any], answer: Answer) -> None:
    if "error" in output:
        answer.error = output["error"]["message"]
    else:
        answer.text, answer.is_whole = output["choices"][0]["text"], True
