"""instructor: each mode that a random model can follow, whole and streamed."""

import instructor
import openai
from client_cases import MESSAGES, MODEL, TO_THE_END, Forecast, run


def created(mode: instructor.Mode, **fields: object) -> object:
    client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, "logit_bias": TO_THE_END, **fields}
    return client.chat.completions.create(response_model=Forecast, max_retries=0, **fields)


def tools() -> None:
    assert isinstance(created(instructor.Mode.TOOLS), Forecast)


def tools_strict() -> None:
    assert isinstance(created(instructor.Mode.TOOLS_STRICT), Forecast)


def json_schema() -> None:
    assert isinstance(created(instructor.Mode.JSON_SCHEMA), Forecast)


def partial_by_tools() -> None:
    client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=instructor.Mode.TOOLS)
    parts = list(
        client.chat.completions.create_partial(
            model=MODEL,
            messages=MESSAGES,
            response_model=Forecast,
            max_tokens=300,
            max_retries=0,
            logit_bias=TO_THE_END,
        )
    )
    assert parts[-1].city in ("Rio", "Bern")


if __name__ == "__main__":
    run(tools, tools_strict, json_schema, partial_by_tools)
