"""The store of responses: two server processes attach to it, each with its own view."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

from penstock import Store
from penstock.server.errors import ApiError
from penstock.server.options import ServerOptions
from penstock.server.responses import response_store
from penstock.server.responses.response_store import (
    MAX_CHAIN,
    ResponseStore,
    create_response_id,
)
from penstock.server.responses.responses_request import ResponseItem
from penstock.server.server_start import open_response_store

KEY, ANOTHER = "key a", "key b"


@pytest.fixture
def stores() -> Iterator[list[ResponseStore]]:
    """The store as two processes have it."""
    opened = open_response_store(ServerOptions(max_stored_responses=8), 2)
    assert opened is not None
    views = [ResponseStore(store, 60.0) for store in (opened, Store.attach(opened.ticket))]
    del opened
    yield views
    views.clear()  # pytest holds the list until it has looked what is left


def add(store: ResponseStore, text: str, previous: str | None = None, owner: str = KEY) -> str:
    name = create_response_id()
    output = {"id": f"msg_{name.removeprefix('resp_')}_0", "type": "message", "role": "assistant", "content": "yes"}
    assert store.put_input(owner, name, [ResponseItem(role="user", content=text)], previous)
    assert store.put_response(owner, name, {"id": name, "output": [output], "more": [1]})
    return name


def texts(items: list[ResponseItem]) -> list[Any]:
    return [item.content for item in items]


def refused(status: int) -> Any:
    return pytest.raises(ApiError, match="not found" if status == 404 else "")


def test_another_process_finds_a_response_and_those_before(stores: list[ResponseStore]) -> None:
    here, there = stores
    first = add(here, "a")
    second = add(there, "b", first)
    assert texts(here.conversation(KEY, second)) == ["a", "yes", "b", "yes"]
    assert here.conversation(KEY, None) == []
    assert b'"more":[1]' in bytes(here.get(KEY, second).response)


def test_a_response_is_found_with_its_own_key_only(stores: list[ResponseStore]) -> None:
    name = add(stores[0], "a")
    for owner, other in ((ANOTHER, name), (KEY, "resp_x"), (KEY, ""), (KEY, "\ud800")):
        with pytest.raises(ApiError, match=r"previous response with id .* not found") as caught:  # as OpenAI answers
            stores[1].conversation(owner, other)
        error = caught.value
        assert (error.status, error.code) == (400, "previous_response_not_found")
        assert error.param == "previous_response_id"
    with refused(404):
        stores[0].delete(ANOTHER, name)
    stores[0].delete(KEY, name)
    with refused(404):
        stores[1].get(KEY, name)
    with refused(404):
        stores[1].delete(KEY, name)


def test_an_expired_response_is_not_found(stores: list[ResponseStore], monkeypatch: pytest.MonkeyPatch) -> None:
    name = add(stores[0], "a")
    late = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: late)
    with refused(404):
        stores[1].get(KEY, name)


def test_a_response_without_an_end_is_not_found(stores: list[ResponseStore]) -> None:
    name = create_response_id()
    assert stores[0].put_input(KEY, name, [], None)
    with refused(404):
        stores[0].get(KEY, name)


def test_the_least_recently_used_response_goes_first(stores: list[ResponseStore]) -> None:
    first = add(stores[0], "a")
    time.sleep(0.01)
    later = []
    for number in range(12):
        stores[1].get(KEY, first)
        later.append(add(stores[0], str(number)))
        time.sleep(0.01)
    assert texts(stores[0].conversation(KEY, first)) == ["a", "yes"]
    with refused(404):
        stores[0].get(KEY, later[0])
    stores[0].get(KEY, later[-1])


def test_a_response_longer_than_the_store_is_not_kept() -> None:
    with Store(1 << 20, name="responses", max_items=8) as opened:
        store = ResponseStore(opened, 60.0)
        assert not store.put_input(KEY, "resp_a", [ResponseItem(content="x" * (2 << 20))], None)


def test_a_circle_ends_with_an_error(stores: list[ResponseStore]) -> None:
    name = add(stores[0], "a", "resp_b")
    stores[0].put_input(KEY, "resp_b", [], name)
    stores[0].put_response(KEY, "resp_b", {"output": []})
    with pytest.raises(ApiError, match=f"at most {MAX_CHAIN}") as caught:
        stores[0].conversation(KEY, name)
    assert (caught.value.status, caught.value.param) == (400, "previous_response_id")


def test_references_are_items_of_stored_responses(stores: list[ResponseStore]) -> None:
    name = add(stores[0], "a").removeprefix("resp_")
    items = [ResponseItem(role="user", content="b"), ResponseItem(type="item_reference", id=f"msg_{name}_0")]
    assert texts(stores[1].resolve(KEY, items)) == ["b", "yes"]
    for item_id in (f"msg_{name}_1", "msg_x_0", "", None):
        with refused(404) as caught:
            stores[1].resolve(KEY, [ResponseItem(type="item_reference", id=item_id)])
        assert caught.value.param == "input[0].id"


def test_references_read_each_response_once(stores: list[ResponseStore], monkeypatch: pytest.MonkeyPatch) -> None:
    name = add(stores[0], "a").removeprefix("resp_")
    reads, get = list[str](), ResponseStore.get

    def counted(store: ResponseStore, owner: str, name: str, param: str | None = None) -> Any:
        reads.append(name)
        return get(store, owner, name, param)

    monkeypatch.setattr(ResponseStore, "get", counted)
    items = [ResponseItem(type="item_reference", id=f"msg_{name}_0")] * 500
    assert len(stores[1].resolve(KEY, items)) == 500 and len(reads) == 1


def test_references_to_too_many_responses_are_refused(
    stores: list[ResponseStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "MAX_REFERRED", 2)
    names = [add(stores[0], str(number)).removeprefix("resp_") for number in range(3)]
    items = [ResponseItem(type="item_reference", id=f"msg_{name}_0") for name in names]
    assert len(stores[1].resolve(KEY, items[1:])) == 2
    with pytest.raises(ApiError, match="at most 2 responses") as caught:
        stores[1].resolve(KEY, items)
    assert caught.value.status == 400


def test_without_a_store_nothing_is_found() -> None:
    store = ResponseStore(open_response_store(ServerOptions(response_store_nbytes=0), 2), 60.0)
    assert not store.is_open and not store.put_input(KEY, "resp_a", [], None)
    with pytest.raises(ApiError, match="--response-store-mb is 0"):
        store.conversation(KEY, "resp_a")
