"""LangChain: chats, streams, batches, tools, structured output in its three ways, and an agent."""

from client_cases import MODEL, TO_THE_END, Forecast, run, weather
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=MODEL, max_tokens=300, max_retries=0, logit_bias=TO_THE_END)
short = ChatOpenAI(model=MODEL, max_tokens=8, max_retries=0)
TOOL = tool(weather)


def invoke() -> None:
    assert short.invoke("hi").usage_metadata["output_tokens"] == 8


def stream_and_batch() -> None:
    assert sum(1 for _ in short.stream("hi")) > 1
    assert len(short.batch(["a", "b", "c"])) == 3


def structured_output_by_json_schema() -> None:
    assert isinstance(model.with_structured_output(Forecast, method="json_schema").invoke("hi"), Forecast)


def structured_output_by_function_calling() -> None:
    assert isinstance(model.with_structured_output(Forecast, method="function_calling").invoke("hi"), Forecast)


def structured_output_by_strict_function_calling() -> None:
    structured = model.with_structured_output(Forecast, method="function_calling", strict=True)
    assert isinstance(structured.invoke("hi"), Forecast)


def structured_output_by_json_mode() -> None:
    structured = model.with_structured_output(Forecast, method="json_mode", include_raw=True)
    assert structured.invoke("json")["raw"].content.startswith("{")


def tools() -> None:
    bound = model.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = bound.invoke("hi").tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rio", "Bern")
    chunks = list(bound.stream("hi"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.tool_calls[0]["name"] == "weather" and len(chunks) > 3


def calls_and_results() -> None:
    message = model.bind_tools([TOOL], tool_choice="required").invoke("hi")
    results = [ToolMessage(TOOL.invoke(call["args"]), tool_call_id=call["id"]) for call in message.tool_calls]
    answer = short.bind_tools([TOOL], tool_choice="none").invoke([HumanMessage("hi"), message, *results])
    assert isinstance(answer, AIMessage) and not answer.tool_calls


def agent() -> None:
    from langchain.agents import create_agent

    result = create_agent(short, tools=[TOOL]).invoke({"messages": [{"role": "user", "content": "hi"}]})
    assert len(result["messages"]) >= 2


def agent_with_answer_by_tool() -> None:
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ToolStrategy

    result = create_agent(model, tools=[], response_format=ToolStrategy(Forecast)).invoke(
        {"messages": [{"role": "user", "content": "hi"}]}
    )
    assert isinstance(result["structured_response"], Forecast)


if __name__ == "__main__":
    run(
        *(invoke, stream_and_batch, structured_output_by_json_schema, structured_output_by_function_calling),
        *(structured_output_by_strict_function_calling, structured_output_by_json_mode, tools, calls_and_results),
        *(agent, agent_with_answer_by_tool),
    )
