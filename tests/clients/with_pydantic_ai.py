"""pydantic-ai: text, streams, and its three ways to an answer of a type."""

import asyncio

from client_cases import MODEL, TO_THE_END, Forecast, run
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel

model = OpenAIChatModel(MODEL)
LONG, SHORT = {"max_tokens": 300, "logit_bias": TO_THE_END}, {"max_tokens": 8}


def text() -> None:
    assert isinstance(Agent(model).run_sync("hi", model_settings=SHORT).output, str)


def stream() -> None:
    async def stream_text() -> list[str]:
        async with Agent(model).run_stream("hi", model_settings=SHORT) as result:
            return [part async for part in result.stream_text()]

    assert asyncio.run(stream_text())


def tool_output() -> None:
    assert isinstance(
        Agent(model, output_type=ToolOutput(Forecast)).run_sync("hi", model_settings=LONG).output, Forecast
    )


def native_output() -> None:
    agent = Agent(model, output_type=NativeOutput(Forecast))
    assert isinstance(agent.run_sync("hi", model_settings=LONG).output, Forecast)


def stream_of_tool_output() -> None:
    async def stream_output() -> list[Forecast]:
        async with Agent(model, output_type=Forecast).run_stream("hi", model_settings=LONG) as result:
            return [part async for part in result.stream_output()]

    assert isinstance(asyncio.run(stream_output())[-1], Forecast)


if __name__ == "__main__":
    run(text, stream, tool_output, native_output, stream_of_tool_output)
