"""litellm: as OpenAI's server and as one of vLLM; streams, tools, parsed answers."""

import json
import os
from typing import Any

import litellm
from client_cases import MESSAGES, MODEL, TO_THE_END, URL, Forecast, run
from openai import pydantic_function_tool

litellm.suppress_debug_info = True
TOOL = pydantic_function_tool(Forecast, name="weather")


def completion(provider: str = "hosted_vllm", **fields: Any) -> Any:
    return litellm.completion(
        model=f"{provider}/{MODEL}",
        messages=MESSAGES,
        api_base=URL,
        api_key=os.environ["OPENAI_API_KEY"],
        max_tokens=300,
        max_retries=0,
        logit_bias=TO_THE_END,
        **fields,
    )


def both_providers() -> None:
    for provider in ("openai", "hosted_vllm"):
        assert completion(provider).usage.completion_tokens > 0


def stream() -> None:
    assert sum(1 for _ in completion(stream=True)) >= 1


def tools() -> None:
    message = completion(tools=[TOOL], tool_choice="required").choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Rio", "Bern")


def stream_of_tools() -> None:
    chunks = list(completion(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True))
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Rio", "Bern")


def response_format() -> None:
    Forecast.model_validate_json(completion(response_format=Forecast).choices[0].message.content)


if __name__ == "__main__":
    run(both_providers, stream, tools, stream_of_tools, response_format)
