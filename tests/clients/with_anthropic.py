"""Anthropic's client: messages, streams, tools, a loop of calls and results, and counts of tokens."""

import os
from typing import Any

import anthropic
from client_cases import MESSAGES, MODEL, TO_THE_END, URL, Forecast, run, weather

client = anthropic.Anthropic(
    base_url=URL.removesuffix("/v1"), api_key=os.environ["OPENAI_API_KEY"], max_retries=0, timeout=60
)
TOOL: Any = {"name": "weather", "description": "Weather of a city.", "input_schema": Forecast.model_json_schema()}
MESSAGE: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_tokens": 300,
    "extra_body": {"logit_bias": TO_THE_END},
}
FORCED: Any = {"type": "any", "disable_parallel_tool_use": True}


def message() -> None:
    answer = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=5, system="Be brief.")
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 5
    assert answer.content[0].type == "text"


def stream() -> None:
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=20) as events:
        text = "".join(events.text_stream)
        answer = events.get_final_message()
    assert answer.content[0].text == text and answer.usage.output_tokens == 20


def tools() -> None:
    answer = client.messages.create(**MESSAGE, tools=[TOOL], tool_choice=FORCED)
    (use,) = answer.content
    assert answer.stop_reason == "tool_use" and use.name == "weather"
    Forecast.model_validate(use.input)


def stream_of_tools() -> None:
    with client.messages.stream(**MESSAGE, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}) as events:
        kinds = {event.type for event in events}
        (use,) = events.get_final_message().content
    assert "input_json" in kinds
    Forecast.model_validate(use.input)


def calls_and_results() -> None:
    messages: list[Any] = list(MESSAGES)
    for turn in range(3):
        choice = FORCED if turn < 2 else {"type": "none"}
        answer = client.messages.create(**{**MESSAGE, "messages": messages}, tools=[TOOL], tool_choice=choice)
        messages.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert bool(uses) == (turn < 2)
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": weather(**use.input)} for use in uses]
        messages.append({"role": "user", "content": results or "thanks"})


def counts() -> None:
    count = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    answer = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    usage = answer.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def errors() -> None:
    for fields, kind in (({"model": "other"}, anthropic.NotFoundError), ({"max_tokens": 0}, anthropic.BadRequestError)):
        try:
            client.messages.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 5, **fields})
        except kind as error:
            assert error.body["error"]["message"]
            continue
        raise AssertionError("no error")


if __name__ == "__main__":
    run(message, stream, tools, stream_of_tools, calls_and_results, counts, errors)
