"""DSPy: its adapters, by structured outputs and tools, which the provider must be declared to have.

Its agents take any JSON object, in which the random model does not find their fields.
"""

import os
from typing import Any

import dspy
from client_cases import MODEL, TO_THE_END, URL, Forecast, run, weather


class Ask(dspy.Signature):
    """How is the weather?"""

    question: str = dspy.InputField()
    forecast: Forecast = dspy.OutputField()


dspy.lm15.register_provider(
    dspy.lm15.ProviderDefinition.chat(
        dspy.lm15.AccessPolicy(provider="penstock", env_keys=("OPENAI_API_KEY",), base_url=URL),
        compat=dspy.lm15.OpenAIChatCompat.preset("openai"),
    ),
    supports=dspy.lm15.ModelSupport(function_calling=True, response_schema=True),
)
lm = dspy.LM(
    f"penstock/{MODEL}",
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


if __name__ == "__main__":
    run(text, json_adapter, chat_adapter, native_calls)
