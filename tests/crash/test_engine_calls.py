"""Processes are killed within streamed tool calls: each answer is, byte for byte, that of a run without a death."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")

from penstock.engine.client.client import Client
from penstock.engine.protocol.answer_format import AnswerFormat
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import ChunkFormat, SamplingParams, Style
from penstock.engine.text.grammar import build_grammar
from penstock.engine.text.grammar_fields import GrammarSource
from tests.crash.test_engine_grammars import simulated_config
from tests.crash.test_engine_migration import kill
from tests.support.engine import PATIENCE, START, Running, launched
from tests.support.grammars import VOCABULARY
from tests.support.loops import in_a_loop

CALL = r'<tool_call>\{"name": "f", "arguments": \{"a": "([ab]|\\n){60,70}", "b": \[1, 2\]\}\}</tool_call>'
TEXT = rf"<think>[ab]{{3}}</think>{CALL}\n{CALL}"
ANSWER = AnswerFormat("hermes", "qwen3", call_ids="request")
REQUESTS = 6


class Answers:
    """Streams of calls, one by a client; the lines of each sample as they come."""

    def __init__(self) -> None:
        self.lines = [[b"", b""] for _ in range(REQUESTS)]
        self.reasoning = [0] * REQUESTS

    async def read(self, client: Client, number: int) -> None:
        grammar = build_grammar(GrammarSource("regex", TEXT, "regex"))
        params = SamplingParams(n=2, max_tokens=400, temperature=1.0, seed=number)
        prompt = [VOCABULARY - 1 - number, *range(10, 40)]
        chunk_format = ChunkFormat(Style.CHAT, b'{"id":"1"', answer=ANSWER)
        options: dict[str, Any] = {"chunk_format": chunk_format, "grammar": grammar, "timeout": START + PATIENCE}
        async with await client.submit(prompt, params, **options) as stream:
            async for chunk in stream:
                self.lines[number][chunk.sample] += chunk.utf8
            self.reasoning[number] = stream.reasoning_tokens

    def are_in_calls(self) -> bool:
        samples = [lines for answer in self.lines for lines in answer]
        return all(b'"tool_calls":[{"index":0,"function":' in lines for lines in samples)

    async def run(self, config: EngineConfig, strike: Callable[[Running], Any] | None) -> "Answers":
        async with launched(config) as engine, Client(engine.launcher.cluster, 0) as client:
            tasks = [asyncio.ensure_future(self.read(client, number)) for number in range(REQUESTS)]
            while strike is not None and not self.are_in_calls():
                await asyncio.sleep(0.01)
            assert strike is None or not any(task.done() for task in tasks)
            if strike is not None:
                strike(engine)
            await asyncio.wait_for(asyncio.gather(*tasks), START + PATIENCE)
        return self


def calls(lines: bytes) -> dict[str, str]:
    """Returns the arguments by the ids of the calls."""
    ids: list[str] = []
    arguments: list[str] = []
    for event in lines.decode().split("\n\n")[:-1]:
        choice = json.loads(event.removeprefix("data: "))["choices"][0]
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                ids.append(call["id"])
                arguments.append("")
            arguments[call["index"]] += call["function"]["arguments"]
    assert choice["finish_reason"] == "tool_calls"
    return dict(zip(ids, arguments, strict=True))


@pytest.mark.timeout(300)
@in_a_loop
async def test_calls_are_the_same_when_a_process_is_killed_within(tmp_path: Path) -> None:
    config = simulated_config(tmp_path)
    expected = await Answers().run(config, None)
    for samples in expected.lines:
        arguments = [calls(lines) for lines in samples]
        assert all(len(json.loads(text)["a"]) >= 60 for part in arguments for text in part.values())
        assert len({call_id for part in arguments for call_id in part}) == 4
    assert expected.reasoning == [2 * len("<think>aaa</think>")] * REQUESTS
    for kind in ("output", "worker"):
        actual = await Answers().run(config, lambda engine: kill(engine, kind, 0))  # noqa: B023
        assert actual.lines == expected.lines, kind
        assert actual.reasoning == expected.reasoning, kind
