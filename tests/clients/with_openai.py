"""OpenAI's client: chats, streams, tools, parsed answers, and a loop of calls and results."""

import json
from typing import Any

import openai
from client_cases import MESSAGES, MODEL, TO_THE_END, Forecast, run, weather

client = openai.OpenAI(max_retries=0, timeout=60)
TOOL: Any = openai.pydantic_function_tool(Forecast, name="weather")
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, "logit_bias": TO_THE_END}


def chat() -> None:
    answer = client.chat.completions.create(**{**CHAT, "max_tokens": 5, "logit_bias": {}})
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 5


def stream() -> None:
    events = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert events[-1].usage.completion_tokens > 0


def tools_auto_and_none() -> None:
    for choice in ("auto", "none"):
        assert client.chat.completions.create(**CHAT, tools=[TOOL], tool_choice=choice).choices[0].message


def tools_required() -> None:
    answer = client.chat.completions.create(**CHAT, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
    Forecast.model_validate_json(call.function.arguments)


def stream_of_tools() -> None:
    with client.chat.completions.stream(
        **CHAT, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}
    ) as events:
        kinds = {event.type for event in events}
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance(call.function.parsed_arguments, Forecast)


def parse_response_format() -> None:
    answer = client.chat.completions.parse(**CHAT, response_format=Forecast)
    assert isinstance(answer.choices[0].message.parsed, Forecast)


def parse_tools() -> None:
    answer = client.chat.completions.parse(**CHAT, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Forecast)


def calls_and_results() -> None:
    """What runTools does: calls functions until the answer has no call."""
    messages: list[Any] = list(MESSAGES)
    for turn in range(3):
        choice = "required" if turn < 2 else "none"
        answer = client.chat.completions.create(**{**CHAT, "messages": messages}, tools=[TOOL], tool_choice=choice)
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            result = weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert not messages[-1].tool_calls and len(messages) >= 6


def legacy_functions_are_refused() -> None:
    try:
        client.chat.completions.create(**CHAT, functions=[{"name": "f", "parameters": {}}])
    except openai.BadRequestError as error:
        assert error.param == "functions" and "use tools" in error.message
        return
    raise AssertionError("no error")


if __name__ == "__main__":
    run(
        *(chat, stream, tools_auto_and_none, tools_required, stream_of_tools, parse_response_format, parse_tools),
        *(calls_and_results, legacy_functions_are_refused),
    )
