"""The registry of LoRA adapters: whole versions, one writer at a time, in whatever process."""

import multiprocessing
import os
import threading
from collections.abc import Iterator

import msgspec
import pytest

from penstock.engine.cluster import adapter_registry
from penstock.engine.cluster.adapter_registry import MAX_UNLOADED, AdapterList, AdapterRegistry
from penstock.engine.protocol.lora import Adapter


def adapter(name: str, number: int = 0) -> Adapter:
    return Adapter(name, f"/adapters/{name}", bytes([number]) * 32)


@pytest.fixture
def registry() -> Iterator[AdapterRegistry]:
    result = AdapterRegistry.of([adapter("sql", 1)])
    yield result
    result.close()


def test_reader_gets_the_last_version(registry: AdapterRegistry) -> None:
    reader = AdapterRegistry(os.dup(registry._fd))
    assert reader.read().adapters == (adapter("sql", 1),)
    assert reader.read() is reader.read()
    registry.write(registry.read().with_named(adapter("poems", 2)))
    assert reader.read().adapters == (adapter("sql", 1), adapter("poems", 2))
    registry.write(registry.read().without(adapter("sql", 1)))
    unsettled = adapter("poems", 2), adapter("sql", 1)
    assert reader.read() == AdapterList((adapter("poems", 2),), (adapter("sql", 1),), unsettled)
    reader.close()


def test_adapter_in_place_of_another_leaves_the_former_name(registry: AdapterRegistry) -> None:
    first, second = adapter("sql", 1), adapter("sql", 2)
    adapters = registry.read().with_named(second)
    assert adapters == AdapterList((second,), (first,), (second, first))
    assert adapters.with_named(first) == AdapterList((first,), (second,), (first, second))
    for number in range(100):
        adapters = adapters.with_named(adapter("many", number + 10))
    assert len(adapters.unloaded) == MAX_UNLOADED and len(adapters.adapters) == 2


def test_adapter_is_unsettled_until_its_change_ends_in_all_engines() -> None:
    adapters = AdapterList((), unsettled=(adapter("sql", 1),))
    loaded = adapters.with_unsettled(adapter("poems", 2)).with_named(adapter("poems", 2))
    assert loaded.unsettled == (adapter("sql", 1), adapter("poems", 2))


def test_full_registry_forgets_unloaded_adapters_before_it_refuses(
    registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = AdapterList(tuple(adapter(f"{number}", number) for number in range(20)))
    registry.write(full)
    monkeypatch.setattr(adapter_registry, "MAX_NBYTES", len(msgspec.msgpack.encode(full)))
    registry.write(full.without(adapter("7", 7)))
    assert registry.read().unsettled == (adapter("7", 7),) and not registry.read().unloaded
    with pytest.raises(ValueError, match=r"expected names and paths of adapters of at most \d+ bytes, got"):
        registry.write(registry.read().with_unsettled(adapter("poems", 30)))
    assert registry.read().unsettled == (adapter("7", 7),)


def test_no_reader_sees_a_part_of_a_version(registry: AdapterRegistry) -> None:
    lists = [AdapterList(tuple(adapter(f"{number}", number) for number in range(size))) for size in (1, 200)]
    registry.write(lists[0])
    reader, is_over = AdapterRegistry(os.dup(registry._fd)), threading.Event()

    def write() -> None:
        for number in range(2000):
            registry.write(lists[number % 2])
        is_over.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not is_over.is_set():
        assert reader.read() in lists
    thread.join()
    reader.close()


def hold(registry: AdapterRegistry, is_held: "multiprocessing.synchronize.Event") -> None:
    assert registry.lock()
    is_held.set()
    threading.Event().wait()


def test_lock_of_a_dead_process_is_free(registry: AdapterRegistry) -> None:
    context = multiprocessing.get_context("spawn")
    is_held = context.Event()
    process = context.Process(target=hold, args=(registry, is_held))
    process.start()
    assert is_held.wait(60) and not registry.lock()
    process.kill()
    process.join()
    assert registry.lock()
    registry.unlock()
    process.close()
