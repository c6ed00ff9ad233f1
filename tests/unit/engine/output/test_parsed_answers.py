"""Chunks of answers with reasoning and tool calls say what the whole answer says, also where an answer is resumed."""

import json
import re
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.engine.output.output_state import OutputState
from penstock.engine.protocol.answer_format import AnswerFormat
from penstock.engine.protocol.messages import (
    Abort,
    ChunkFormat,
    Ended,
    FinishReason,
    Logprobs,
    SamplingParams,
    Started,
    Style,
    Tokens,
)
from penstock.engine.text.answer_parser import ParsedAnswer, ToolCall, parse_answer
from penstock.engine.text.detokenizer import Vocabulary

HEAD = b'{"id":"x","object":"chat.completion.chunk"'
TYPES = {"weather": {"days": "integer"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa\\"r{is", "n": [1, {"é": 2}]}}\n</tool_call>'
PARAMETERS = "<parameter=city>\nSão\n</parameter>\n<parameter=days>\n3\n</parameter>"
ANSWERS = {
    "hermes": f'I look.\n{CALL}\n<tool_call>{{"name": "f"}}</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]',
    "llama3_json": '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}',
    "pythonic": "[weather(city='Pa\"ris', days=3), weather()]",
    "qwen3_xml": f"<tool_call>\n<function=weather>\n{PARAMETERS}\n</function>\n</tool_call>",
}


def cut(text: str) -> list[bytes]:
    """Cuts a text into tokens, some with a part of a mark or of a character."""
    return [token for part in re.findall(r"\w{1,4}|[<>/\"{}]{1,2}|.", text, re.DOTALL) for token in _halves(part)]


def _halves(part: str) -> list[bytes]:
    encoded = part.encode()
    return [encoded[:-1], encoded[-1:]] if len(encoded) > len(part) else [encoded]


class Scene:
    """An output processor with one sample. Its ids are the tokens of a text, in order."""

    def __init__(self, text: str, chunk_format: ChunkFormat, interval: int = 1, **params: Any) -> None:
        self.tokens = cut(text)
        self._vocabulary = Vocabulary([*self.tokens, b""])  # the last one is the end id
        self._format = chunk_format
        self._interval = interval
        self._params = SamplingParams(max_tokens=10_000, **params)
        self.aborts: list[Abort] = []
        self.reasoning: int | None = None

    def run(
        self, begin: int = 0, end: int | None = None, reason: FinishReason | None = FinishReason.STOP
    ) -> list[bytes]:
        """Returns the text of each Delta for the ids from `begin` to `end`; the ids before have been delivered."""
        state = OutputState(self._vocabulary, 4, self._interval)
        ids = range(len(self.tokens) + 1)[begin:end]
        texts = []
        for token_id in ids:
            is_first, is_last = token_id == begin, token_id == ids[-1] and reason is not None
            started = Started(1, 7, self._params, (), self._format, generated=tuple(range(begin)))
            tokens = Tokens(
                np.array([token_id], np.int32),
                np.array([1], np.uint16) if is_first else None,
                None if self._params.logprobs is None else _logprobs(token_id),
                started=(started,) if is_first else (),
                ended=(Ended(1, reason),) if is_last and reason is not None else (),
            )
            outputs = state.process(tokens)
            self.aborts += outputs.aborts
            for _, delta in outputs.deltas:
                texts.append(bytes(delta.text))
                if delta.finished is not None and delta.finished.reasoning is not None:
                    self.reasoning = int(delta.finished.reasoning[0])
        return texts


def _logprobs(token_id: int) -> Logprobs:
    return Logprobs(np.array([token_id], np.int32), np.array([-0.5], np.float32), np.array([1], np.int32))


def events(texts: list[bytes]) -> list[Any]:
    lines = b"".join(texts).decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def choices(texts: list[bytes]) -> list[Any]:
    return [event["choices"][0] for event in events(texts)]


def joined(texts: list[bytes]) -> ParsedAnswer:
    """Returns the answer as a client puts the chunks together."""
    content = reasoning = ""
    calls: list[ToolCall] = []
    for choice in choices(texts):
        delta = choice["delta"]
        content += delta.get("content", "")
        reasoning += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert (call["index"], call["type"]) == (len(calls), "function")
                calls.append(ToolCall(call["id"], call["function"]["name"], ""))
            last = calls[call["index"]]
            calls[call["index"]] = last._replace(arguments=last.arguments + call["function"]["arguments"])
    return ParsedAnswer(content, reasoning, calls)


def formats(tools: str, reasoning: str | None = "qwen3") -> tuple[AnswerFormat, ChunkFormat]:
    answer = AnswerFormat(tools, reasoning, call_ids="request", types=TYPES)
    return answer, ChunkFormat(Style.CHAT, HEAD, answer=answer)


@pytest.mark.parametrize("tools", ANSWERS)
@pytest.mark.parametrize("before", ["", "<think>\nI think <b>.\n</think>\n\n"], ids=["", "thinks"])
@pytest.mark.parametrize("interval", [1, 3])
def test_parsed_chunks_add_up_to_the_parsed_answer(tools: str, before: str, interval: int) -> None:
    answer, chunk_format = formats(tools)
    text = before + ANSWERS[tools]
    texts = Scene(text, chunk_format, interval).run()
    expected = parse_answer(answer, text)
    assert joined(texts) == expected and expected.calls
    assert json.loads(expected.calls[0].arguments)["city"] and bool(expected.reasoning) == bool(before)
    assert choices(texts)[-1]["finish_reason"] == "tool_calls"
    assert [choice["delta"].get("role") for choice in choices(texts)] == [
        "assistant",
        *[None] * (len(choices(texts)) - 1),
    ]


@pytest.mark.parametrize("tools", ANSWERS)
@pytest.mark.parametrize("params", [{}, {"logprobs": 1}, {"stop": ("zz", "ris}")}], ids=["", "logprobs", "stop"])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"has_ids": True, "prompt_tokens": 9}], ids=["", "fields"])
def test_parsed_answer_goes_on_when_resumed_after_any_id(
    tools: str, params: dict[str, Any], interval: int, fields: dict[str, Any]
) -> None:
    _, chunk_format = formats(tools)
    chunk_format = replace(chunk_format, **fields)
    scene = Scene("<think>é</think>" + ANSWERS[tools], chunk_format, interval, **params)
    whole, reasoning = b"".join(scene.run()), scene.reasoning
    step = interval * (7 if params else 1)  # an interval has ended at each
    for count in range(1, len(scene.tokens), step):
        before = scene.run(end=count, reason=None)
        scene.reasoning = None
        assert b"".join([*before, *scene.run(begin=count)]) == whole, count
        assert scene.reasoning == reasoning


@pytest.mark.parametrize("tools", ANSWERS)
@pytest.mark.parametrize("params", [{}, {"logprobs": 1}, {"stop": ("zz", "3")}], ids=["", "logprobs", "stop"])
@pytest.mark.parametrize("interval", [1, 3])
def test_parsed_chunks_have_all_ids_and_count_them(tools: str, params: dict[str, Any], interval: int) -> None:
    _, chunk_format = formats(tools)
    text = "<think>é</think>" + ANSWERS[tools]
    plain = Scene(text, chunk_format, interval, **params).run()
    texts = Scene(text, replace(chunk_format, has_ids=True, prompt_tokens=9), interval, **params).run()
    ids: list[int] = []
    for event in events(texts):
        ids += event["choices"][0]["token_ids"]
        assert event["usage"] == {"prompt_tokens": 9, "completion_tokens": len(ids), "total_tokens": 9 + len(ids)}
    assert ids == [*range(len(ids))] and joined(texts) == joined(plain)
    if "stop" not in params:
        assert len(ids) == len(cut(text)) + 1


@pytest.mark.parametrize("style", [Style.CHAT, Style.TEXT])
def test_reasoning_is_counted_in_ids_up_to_its_end(style: Style) -> None:
    text = "<think>one two é</think>three"
    chunk_format = ChunkFormat(style, HEAD, answer=AnswerFormat("hermes", "qwen3"))
    for interval in (1, 4):
        scene = Scene(text, chunk_format, interval)
        texts = scene.run()
        assert scene.reasoning == len(cut("<think>one two é</think>"))
        assert style == Style.CHAT or b"".join(texts).decode() == text
    unended = Scene("<think>one", chunk_format)
    unended.run()
    assert unended.reasoning == len(unended.tokens) + 1
    plain = Scene("one", chunk_format)
    plain.run()
    assert plain.reasoning is None


def test_call_that_is_cut_by_its_length_ends_with_length() -> None:
    answer, chunk_format = formats("hermes")
    scene = Scene(ANSWERS["hermes"], chunk_format)
    count = next(at for at in range(len(scene.tokens)) if b"".join(scene.tokens[:at]).endswith(b"Pa"))
    texts = scene.run(end=count, reason=FinishReason.LENGTH)
    assert choices(texts)[-1]["finish_reason"] == "length"
    assert joined(texts).calls[0].arguments == '{"city": "Pa'
    assert joined(texts) == parse_answer(answer, b"".join(scene.tokens[:count]).decode())


def test_stop_string_within_a_call_ends_the_call() -> None:
    answer, chunk_format = formats("hermes")
    scene = Scene(ANSWERS["hermes"], chunk_format, stop=("r{",))
    texts = scene.run()
    assert joined(texts) == parse_answer(answer, ANSWERS["hermes"].partition("r{")[0])
    assert len(scene.aborts) == 1


def test_logprobs_of_a_parsed_answer_stay_with_their_ids() -> None:
    _, chunk_format = formats("hermes")
    scene = Scene(f"<think>a</think>{CALL}", chunk_format, logprobs=1)
    written = choices(scene.run())
    assert len(written) == len(scene.tokens) + 1, "a chunk for each id, also for ids of marks"
    tokens = [bytes(entry["bytes"]) for choice in written for entry in choice["logprobs"]["content"]]
    assert tokens == [*scene.tokens, b""]


def test_most_rows_of_a_parsed_answer_come_from_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    _, chunk_format = formats("hermes", reasoning=None)
    text = "plain words " * 50 + '<tool_call>{"name": "f", "arguments": {"text": "' + "yes no " * 50 + '"}}</tool_call>'
    parsed = []
    original = OutputState._parse

    def parse(self: OutputState, *arguments: Any) -> Any:
        parsed.append(arguments)
        return original(self, *arguments)

    monkeypatch.setattr(OutputState, "_parse", parse)
    scene = Scene(text, chunk_format)
    scene.run()
    assert len(parsed) < 40 < len(scene.tokens) / 9
