"""OpenAI's agents, by responses: an answer, a tool, an output of a type, a stream, and a conversation on the server."""

import asyncio
from typing import Any

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from client_cases import MODEL, TO_THE_END, Forecast, run, weather

set_tracing_disabled(True)
QUESTION = "How is the weather in Rio?"
SETTINGS = {"max_tokens": 300, "extra_body": {"logit_bias": TO_THE_END}}


def agent(**fields: Any) -> Any:
    settings = ModelSettings(**{**SETTINGS, **fields.pop("settings", {})})
    return Agent(name="reporter", instructions="Be brief.", model=MODEL, model_settings=settings, **fields)


def answer() -> None:
    result = Runner.run_sync(agent(settings={"max_tokens": 5, "extra_body": {}}), QUESTION)
    assert isinstance(result.final_output, str) and result.last_response_id.startswith("resp_")


def tool() -> None:
    fields = {"tools": [function_tool(weather)], "tool_use_behavior": "stop_on_first_tool"}
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    result = Runner.run_sync(agent(settings=forced, **fields), QUESTION)
    assert result.final_output.startswith("sunny in ")


def tool_and_answer() -> None:
    """The choice of the tool is reset after the call."""
    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    result = Runner.run_sync(agent(settings=settings, tools=[function_tool(weather)]), QUESTION, max_turns=4)
    assert any(item.type == "tool_call_output_item" for item in result.new_items)


def typed_output() -> None:
    assert isinstance(Runner.run_sync(agent(output_type=Forecast), QUESTION).final_output, Forecast)


def stream() -> None:
    async def events() -> set[str]:
        result = Runner.run_streamed(agent(output_type=Forecast), QUESTION)
        kinds = {event.data.type async for event in result.stream_events() if event.type == "raw_response_event"}
        assert isinstance(result.final_output, Forecast)
        return kinds

    assert "response.output_text.delta" in asyncio.run(events())


def conversation() -> None:
    first = Runner.run_sync(agent(output_type=Forecast), QUESTION)
    again = Runner.run_sync(agent(output_type=Forecast), "And there?", previous_response_id=first.last_response_id)
    tokens = [result.raw_responses[0].usage.input_tokens for result in (first, again)]
    assert tokens[1] > tokens[0]


if __name__ == "__main__":
    run(answer, tool, tool_and_answer, typed_output, stream, conversation)
