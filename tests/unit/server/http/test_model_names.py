"""The names by which clients may call the model, over the routes that know them."""

import asyncio
import gc
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from penstock.engine.client.stream import EngineError
from penstock.engine.cluster.adapter_registry import AdapterList, AdapterRegistry
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.config import EngineConfig, SimulatedDevice
from penstock.engine.protocol.lora import Adapter
from penstock.server.chat.media_prompts import Prompt
from penstock.server.chat.prompt_builder import NumberTokenizer, PromptBuilder
from penstock.server.chat.request_schema import CompletionRequest
from penstock.server.http.app import ApiServer
from penstock.server.options import ServerOptions
from penstock.server.status.counters import ServerCounters
from tests.support.loops import in_a_loop

CONFIG = EngineConfig(model="/models/its-directory", simulated=SimulatedDevice())


class Client:
    def __init__(self, app: Any) -> None:
        self._app = app

    def get(self, path: str) -> tuple[int, str]:
        output: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            output.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
        asyncio.run(self._app(scope, receive, send))
        return output[0]["status"], b"".join(item.get("body", b"") for item in output).decode()

    def get_json(self, path: str) -> Any:
        return json.loads(self.get(path)[1])


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    options = ServerOptions(served_model_name=request.param)
    tally, board = ServerCounters(ServerCounters.create(1), 1, writable=True), StatusBoard(StatusBoard.create(1))
    absent: Any = None
    builder = PromptBuilder(CONFIG, NumberTokenizer(200))
    result = Client(ApiServer(CONFIG, options, absent, builder, tally, board, 0).app())
    yield result
    board.close()
    vars(result).clear()  # pytest holds the object until it has looked what is left
    del tally
    gc.collect()


@pytest.mark.parametrize("client", [("a", "b/c")], indirect=True)
def test_a_model_answers_to_each_of_its_names_and_to_its_directory(client: Client) -> None:
    assert [item["id"] for item in client.get_json("/v1/models")["data"]] == ["a", "b/c"]
    assert client.get_json("/v1/models/b/c")["id"] == "b/c"
    assert client.get_json(f"/v1/models/{CONFIG.model}")["id"] == "a"
    status, body = client.get("/v1/models/its-directory")
    assert status == 404
    assert json.loads(body)["error"]["message"] == "there is no model 'its-directory' here, but 'a' and 'b/c'"
    assert 'model_name="a"' in client.get("/metrics")[1]


@pytest.mark.parametrize("client", [()], indirect=True)
def test_a_model_without_a_name_has_that_of_its_directory(client: Client) -> None:
    assert [item["id"] for item in client.get_json("/v1/models")["data"]] == ["its-directory"]
    assert 'model_name="its-directory"' in client.get("/metrics")[1]


@in_a_loop
async def test_request_of_an_adapter_that_goes_meanwhile_is_not_of_the_model() -> None:
    """Each prompt of a request is submitted when it has a slot, perhaps long after the name was looked up."""
    submitted: list[bytes] = []

    async def submit(*_: Any, adapter: bytes, **__: Any) -> None:
        submitted.append(adapter)

    engine: Any = SimpleNamespace(submit=submit)
    tally, board = ServerCounters(ServerCounters.create(1), 1, writable=True), StatusBoard(StatusBoard.create(1))
    registry = AdapterRegistry.of([Adapter("sql", "/sql", b"s" * 32)])
    builder = PromptBuilder(CONFIG, NumberTokenizer(200))
    server = ApiServer(CONFIG, ServerOptions(), engine, builder, tally, board, 0, adapters=registry)

    async def send(name: str | None) -> None:
        request = CompletionRequest(prompt="a", model=name)
        await server._submit(request, request.sampling(), "r", "", None, Prompt([1]), None)

    for name in ("sql", None, CONFIG.model):
        await send(name)
    registry.write(AdapterList(()))
    with pytest.raises(EngineError, match="'sql' was unloaded") as refused:
        await send("sql")
    assert refused.value.status == 404 and submitted == [b"s" * 32, b"", b""]
    board.close()
    registry.close()
