"""OpenAI's client: chats, streams, tools, parsed answers, and a loop of calls and results; responses, the same."""

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


# ── responses ──
RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "input": MESSAGES,
    "max_output_tokens": 300,
    "extra_body": {"logit_bias": TO_THE_END},
}
RESPONSE_TOOL: Any = {"type": "function", **TOOL["function"]}


def response() -> None:
    short = {"model": MODEL, "input": "hi", "max_output_tokens": 5}
    first = client.responses.create(**short)
    assert first.status == "incomplete" and first.usage.output_tokens == 5
    second = client.responses.create(**short, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert client.responses.input_items.list(second.id).data[0].content[0].text == "hi"
    client.responses.delete(first.id)
    try:
        client.responses.create(**short, previous_response_id=second.id)
    except openai.BadRequestError as error:
        assert (error.param, error.code) == ("previous_response_id", "previous_response_not_found")
        return
    raise AssertionError("no error")


def response_parsed() -> None:
    answer = client.responses.parse(**RESPONSE, text_format=Forecast)
    assert isinstance(answer.output_parsed, Forecast)


def response_streamed() -> None:
    with client.responses.stream(**RESPONSE, text_format=Forecast) as events:
        kinds = {event.type for event in events}
        answer = events.get_final_response()
    assert isinstance(answer.output_parsed, Forecast)
    assert {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds


def response_calls_and_results() -> None:
    previous, answer_input = None, RESPONSE["input"]
    for turn in range(3):
        fields = {**RESPONSE, "input": answer_input, "previous_response_id": previous, "tools": [RESPONSE_TOOL]}
        answer = client.responses.create(**fields, tool_choice="required" if turn < 2 else "none")
        calls = [item for item in answer.output if item.type == "function_call"]
        assert bool(calls) == (turn < 2)
        answer_input = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": weather(**json.loads(call.arguments)),
            }
            for call in calls
        ]
        previous = answer.id


def response_calls_streamed() -> None:
    with client.responses.stream(**RESPONSE, tools=[RESPONSE_TOOL], tool_choice="required") as events:
        kinds = [event.type for event in events]
        (call, *_) = events.get_final_response().output
    assert "response.function_call_arguments.done" in kinds
    Forecast.model_validate_json(call.arguments)


if __name__ == "__main__":
    run(
        *(chat, stream, tools_auto_and_none, tools_required, stream_of_tools, parse_response_format, parse_tools),
        *(calls_and_results, legacy_functions_are_refused, response, response_parsed, response_streamed),
        *(response_calls_and_results, response_calls_streamed),
    )
