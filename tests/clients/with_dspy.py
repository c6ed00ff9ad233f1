"""DSPy: its adapters, by structured outputs, which the model must be known to have, and an agent with a tool."""

import os
from typing import Any

import dspy
import litellm
from client_cases import MODEL, TO_THE_END, URL, Forecast, run, weather


class Ask(dspy.Signature):
    """How is the weather?"""

    question: str = dspy.InputField()
    forecast: Forecast = dspy.OutputField()


NAME = f"hosted_vllm/{MODEL}"
ABLE = {"supports_function_calling": True, "supports_response_schema": True}
litellm.register_model({NAME: {"litellm_provider": "hosted_vllm", "mode": "chat", **ABLE}})
lm = dspy.LM(
    NAME,
    api_base=URL,
    api_key=os.environ["OPENAI_API_KEY"],
    max_tokens=300,
    cache=False,
    num_retries=0,
    logit_bias=TO_THE_END,
)
dspy.configure(lm=lm)
QUESTION: dict[str, Any] = {"question": "How is the weather in Rio?"}


def text() -> None:
    assert isinstance(lm("hi")[0], str)


def json_adapter() -> None:
    with dspy.context(adapter=dspy.JSONAdapter()):
        assert isinstance(dspy.Predict(Ask)(**QUESTION).forecast, Forecast)


def chat_adapter() -> None:
    """The text of a random model has no field, so DSPy asks again by its JSON adapter."""
    with dspy.context(adapter=dspy.ChatAdapter()):
        assert isinstance(dspy.Predict(Ask)(**QUESTION).forecast, Forecast)


def native_calls() -> None:
    class Plan(dspy.Signature):
        """Which tool helps?"""

        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        calls: dspy.ToolCalls = dspy.OutputField()

    with dspy.context(adapter=dspy.JSONAdapter(use_native_function_calling=True)):
        plan = dspy.Predict(Plan)(**QUESTION, tools=[dspy.Tool(weather)], config={"tool_choice": "required"})
    assert plan.calls.tool_calls[0].name == "weather"


def react() -> None:
    with dspy.context(adapter=dspy.JSONAdapter()):
        answer = dspy.ReAct(Ask, tools=[weather], max_iters=2)(**QUESTION)
    assert isinstance(answer.forecast, Forecast)


if __name__ == "__main__":
    run(text, json_adapter, chat_adapter, native_calls, react)
