"""Routes that load and unload LoRA adapters: there only where they are allowed, and whole even if an engine fails."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")

from penstock.engine.client.stream import EngineError
from penstock.engine.cluster.adapter_registry import AdapterList, AdapterRegistry
from penstock.engine.protocol.config import EngineConfig, Nodes
from penstock.engine.protocol.lora import Adapter
from penstock.environment import ALLOW_RUNTIME_LORA
from penstock.server.errors import ApiError
from penstock.server.http.adapter_routes import AdapterRoutes, LoadAdapter
from tests.conftest import spawn
from tests.support.loops import in_a_loop

SQL, NEWER = Adapter("sql", "/sql", b"1" * 32), Adapter("sql", "/newer", b"2" * 32)
NOTHING: Any = None


class Loader:
    """Stands for `client.adapters`. `fails`: no group can load an adapter."""

    def __init__(self) -> None:
        self.fails = False
        self.hanging = b""  # digest of the adapter that cannot be unloaded
        self.calls: list[tuple[str, str]] = []
        self.registry: AdapterRegistry | None = None
        self.unnamed: list[tuple[Adapter, ...]] = []  # of the registry, at each call
        self.restarts = 0  # of groups, between a load and the look whether all have the adapter

    async def load(self, adapter: Adapter, loaded: dict[int, int], timeout: float) -> None:
        self._call("load", adapter)
        if self.fails:
            raise EngineError(400, "no such file")

    async def unload(self, adapter: Adapter, timeout: float) -> None:
        self._call("unload", adapter)
        if adapter.digest == self.hanging:
            raise EngineError(503, "group 0 has not answered in time")

    def _call(self, kind: str, adapter: Adapter) -> None:
        self.calls.append((kind, adapter.path))
        assert self.registry is not None
        self.unnamed.append(self.registry.read().unnamed)

    def has_all(self, loaded: dict[int, int]) -> bool:
        self.restarts -= 1
        return self.restarts < 0


def lock(registry: AdapterRegistry) -> None:
    sys.exit(not registry.lock())


class Scene:
    def __init__(self, registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
        self.adapters, self.registry = Loader(), registry
        self.adapters.registry = registry
        client: Any = self
        self.routes = AdapterRoutes(EngineConfig(model="/m"), client, NOTHING, ("m",), registry)
        monkeypatch.setattr(self.routes, "_read", lambda name, path: next(a for a in (SQL, NEWER) if a.path == path))

    def is_unlocked(self) -> bool:
        """Asks in another process: a lock does not exclude the process that holds the lock."""
        with spawn(lock, self.registry) as process:
            process.join()
            return process.exitcode == 0

    async def load(self, adapter: Adapter, *, in_place: bool = False) -> None:
        await self.routes._load_everywhere(LoadAdapter(adapter.name, adapter.path, in_place))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    registry = AdapterRegistry.of([])
    yield Scene(registry, monkeypatch)
    registry.close()


def test_routes_are_there_where_they_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = AdapterRegistry.of([])
    one_node, two_nodes = EngineConfig(model="m"), EngineConfig(model="m", nodes=Nodes(count=2, address="127.0.0.1"))
    for allowed, config, paths in (
        ("0", one_node, []),
        ("1", two_nodes, []),
        ("1", one_node, ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"]),
    ):
        monkeypatch.setenv(ALLOW_RUNTIME_LORA.name, allowed)
        assert [*AdapterRoutes(config, NOTHING, NOTHING, ("m",), registry).posts(NOTHING)] == paths
    registry.close()


@in_a_loop
async def test_adapter_that_an_engine_refuses_is_nowhere(scene: Scene) -> None:
    scene.adapters.fails = True
    with pytest.raises(EngineError, match="no such file"):
        await scene.load(SQL)
    assert scene.adapters.calls == [("load", "/sql"), ("unload", "/sql")]
    assert scene.registry.read() == AdapterList(()) and not scene.routes.by_name
    assert scene.is_unlocked()


@in_a_loop
async def test_adapter_that_cannot_be_replaced_stays(scene: Scene) -> None:
    await scene.load(SQL)
    with pytest.raises(ApiError, match="has already been loaded"):
        await scene.load(NEWER)
    scene.adapters.fails = True
    with pytest.raises(EngineError):
        await scene.load(NEWER, in_place=True)
    assert scene.routes.by_name == {"sql": SQL}
    scene.adapters.fails = False
    await scene.load(NEWER, in_place=True)
    assert scene.routes.by_name == {"sql": NEWER} and scene.adapters.calls[-1] == ("unload", "/sql")


@in_a_loop
async def test_last_adapter_that_has_room_is_replaced(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.http.adapter_routes.MAX_ADAPTERS", 1)
    await scene.load(SQL)
    with pytest.raises(ApiError, match="at most 1 adapters"):
        await scene.load(SQL._replace(name="too"))
    await scene.load(NEWER, in_place=True)
    assert scene.routes.by_name == {"sql": NEWER}


@in_a_loop
async def test_change_waits_for_another_server_for_a_time_only(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.routes._config = EngineConfig(model="/m", start_timeout=0.2)
    with monkeypatch.context() as context:
        context.setattr(scene.registry, "lock", lambda: False)
        with pytest.raises(ApiError, match=r"another API server has changed adapters for 0\.2 s") as refused:
            await scene.load(SQL)
    assert refused.value.status == 503 and not scene.adapters.calls
    await scene.load(SQL)


@in_a_loop
async def test_group_that_began_anew_meanwhile_is_asked_again(scene: Scene) -> None:
    scene.adapters.restarts = 2
    await scene.load(SQL)
    assert scene.adapters.calls == [("load", "/sql")] * 3


@in_a_loop
async def test_adapter_under_two_names_is_unloaded_with_the_second(scene: Scene) -> None:
    await scene.load(SQL)
    scene.registry.write(scene.registry.read().with_loaded(SQL._replace(name="too")))
    await scene.routes._unload_everywhere("sql")
    assert ("unload", "/sql") not in scene.adapters.calls
    await scene.routes._unload_everywhere("too")
    assert scene.adapters.calls[-1] == ("unload", "/sql") and not scene.routes.by_name
    with pytest.raises(ApiError, match="cannot be found"):
        await scene.routes._unload_everywhere("too")


# ── a server process that is killed during a change ──────────────────────────────────────────────────────────────────
@in_a_loop
async def test_registry_has_each_adapter_that_engines_have_without_a_name(scene: Scene) -> None:
    await scene.load(SQL)
    await scene.load(NEWER, in_place=True)
    await scene.routes._unload_everywhere("sql")
    calls = [("load", "/sql"), ("load", "/newer"), ("unload", "/sql"), ("unload", "/newer")]
    assert scene.adapters.calls == calls
    assert scene.adapters.unnamed == [(SQL,), (NEWER,), (SQL,), (NEWER,)]
    assert not scene.registry.read().unnamed


@pytest.mark.parametrize("is_named", [False, True])
@in_a_loop
async def test_next_process_unloads_what_has_no_name(scene: Scene, is_named: bool) -> None:
    names = (SQL._replace(name="too"),) if is_named else ()
    scene.registry.write(AdapterList(names, unnamed=(SQL,)))
    await scene.routes.settle()
    assert scene.adapters.calls == ([] if is_named else [("unload", "/sql")])
    assert scene.registry.read() == AdapterList(names)
    assert scene.is_unlocked()


@in_a_loop
async def test_next_process_leaves_a_change_to_the_process_with_the_lock(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.registry.write(AdapterList((), unnamed=(SQL,)))
    with monkeypatch.context() as context:
        context.setattr(scene.registry, "lock", lambda: False)
        await scene.routes.settle()
    assert not scene.adapters.calls and scene.registry.read().unnamed
    await scene.load(NEWER)
    assert scene.adapters.calls == [("unload", "/sql"), ("load", "/newer")]


@in_a_loop
async def test_adapters_behind_the_adapter_that_cannot_be_unloaded_are(scene: Scene) -> None:
    scene.registry.write(AdapterList((), unnamed=(SQL, NEWER)))
    scene.adapters.hanging = SQL.digest
    await scene.routes.settle()
    assert scene.adapters.calls == [("unload", "/sql"), ("unload", "/newer")]
    assert scene.registry.read().unnamed == (SQL,)


@in_a_loop
async def test_adapter_without_room_in_the_registry_is_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.registry.read()
    monkeypatch.setattr("penstock.engine.cluster.adapter_registry.MAX_NBYTES", 70)  # also moves the next version
    with pytest.raises(ApiError, match="expected names and paths of adapters of at most 70 bytes, got") as refused:
        await scene.load(SQL)
    assert refused.value.status == 400 and not scene.adapters.calls


@in_a_loop
async def test_next_process_settles_behind_a_change_of_its_own(scene: Scene) -> None:
    async with scene.routes._changing() as registry:
        registry.write(AdapterList((), unnamed=(SQL,)))
        settling = asyncio.ensure_future(scene.routes.settle())
        await asyncio.sleep(0.01)
        assert not scene.adapters.calls
    await settling
    assert scene.adapters.calls == [("unload", "/sql")]
