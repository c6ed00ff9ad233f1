"""LlamaIndex: chats, streams, completions, tools and structured answers."""

import os
from typing import Any, Literal

from client_cases import MODEL, TO_THE_END, URL, Forecast, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

MESSAGES = [ChatMessage(role="user", content="How is the weather in Rio?")]


def weather(city: Literal["Rio", "Bern"], days: Literal[1, 2, 3]) -> str:
    """Weather of a city. LlamaIndex evaluates annotations here, and none that is text."""
    return f"sunny in {city} for {days} days"


TOOL = FunctionTool.from_defaults(weather)


def llm(max_tokens: int = 300, bias: dict[str, int] = TO_THE_END, **fields: Any) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=URL,
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=max_tokens,
        max_retries=0,
        context_window=4000,
        additional_kwargs={"logit_bias": bias},
        **fields,
    )


def chat_and_stream() -> None:
    short = llm(max_tokens=5, bias={})
    assert short.chat(MESSAGES).raw.usage.completion_tokens > 0
    assert sum(1 for _ in short.stream_chat(MESSAGES)) >= 1


def complete() -> None:
    assert isinstance(llm().complete("hi").text, str)


def tools() -> None:
    answer = llm().chat_with_tools([TOOL], chat_history=MESSAGES, tool_required=True)
    (call,) = llm().get_tool_calls_from_response(answer)
    assert call.tool_name == "weather" and call.tool_kwargs["city"] in ("Rio", "Bern")


def stream_of_tools() -> None:
    *_, last = llm().stream_chat_with_tools([TOOL], chat_history=MESSAGES, tool_required=True)
    assert llm().get_tool_calls_from_response(last)[0].tool_kwargs["city"] in ("Rio", "Bern")


def predict_and_call() -> None:
    assert "sunny" in str(llm().predict_and_call([TOOL], chat_history=MESSAGES, tool_required=True))


def structured_by_tools() -> None:
    assert isinstance(llm().as_structured_llm(Forecast).chat(MESSAGES).raw, Forecast)


def structured_by_schema() -> None:
    answer = llm(should_use_structured_outputs=True).as_structured_llm(Forecast).chat(MESSAGES)
    assert isinstance(answer.raw, Forecast)


if __name__ == "__main__":
    run(chat_and_stream, complete, tools, stream_of_tools, predict_and_call, structured_by_tools, structured_by_schema)
