"""smolagents: a model by itself, and an agent that calls tools."""

import os
from typing import Any

from client_cases import MODEL, TO_THE_END, URL, run
from smolagents import OpenAIServerModel, Tool


class Weather(Tool):
    name = "weather"
    description = "Weather of a city."
    inputs = {"days": {"type": "boolean", "description": "whether for several days"}}  # noqa: RUF012
    output_type = "string"

    def forward(self, days: bool) -> str:
        return f"sunny {days}"


model = OpenAIServerModel(
    MODEL,
    api_base=URL,
    api_key=os.environ["OPENAI_API_KEY"],
    max_tokens=300,
    logit_bias=TO_THE_END,
    client_kwargs={"max_retries": 0},
)


def message(**fields: Any) -> Any:
    return model([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], **fields)


def generate() -> None:
    assert isinstance(message().content, str)


def tools() -> None:
    calls = message(tools_to_call_from=[Weather()]).tool_calls
    assert calls and calls[0].function.name == "weather"


def agent_runs_a_step() -> None:
    from smolagents import ToolCallingAgent

    agent = ToolCallingAgent(tools=[Weather()], model=model, max_steps=1, verbosity_level=0)
    steps = list(agent.run("hi", stream=True))
    assert any(type(step).__name__ == "ToolCall" or getattr(step, "tool_calls", None) for step in steps)


if __name__ == "__main__":
    run(generate, tools, agent_runs_a_step)
