"""Routes that load and unload LoRA adapters: there only where they are allowed, and whole even if an engine fails."""

import asyncio
import contextlib
import errno
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
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
from tests.support.loops import in_a_loop, until

SQL, NEWER = Adapter("sql", "/sql", b"1" * 32), Adapter("sql", "/newer", b"2" * 32)
NOTHING: Any = None


class Loader:
    """Stands for `client.adapters`. `fails`: no group can load an adapter."""

    def __init__(self) -> None:
        self.fails = False
        self.refuses = False  # groups that serve by now cannot load an adapter
        self.hanging = b""  # digest of the adapter that cannot be settled
        self.calls: list[tuple[str, str]] = []
        self.registry: AdapterRegistry | None = None
        self.unsettled: list[tuple[Adapter, ...]] = []  # of the registry, at each call

    async def load(self, adapter: Adapter, timeout: float) -> None:
        self._call("load", adapter)
        if self.fails:
            raise EngineError(400, "no such file")

    async def settle(self, adapter: Adapter, until: float, *, is_loaded: bool) -> None:
        self._call("settle" if is_loaded else "unload", adapter)
        if adapter.digest == self.hanging:
            raise EngineError(503, "group 0 has not answered in time")
        if is_loaded and self.refuses:
            raise EngineError(400, "other files")

    def _call(self, kind: str, adapter: Adapter) -> None:
        self.calls.append((kind, adapter.path))
        assert self.registry is not None
        self.unsettled.append(self.registry.read().unsettled)


def record_events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Returns a list of the events that the routes will log, each with the name of its adapter."""
    log: list[tuple[str, object]] = []
    record = "penstock.server.http.adapter_routes.event"
    monkeypatch.setattr(record, lambda name, *_, **fields: log.append((name, fields.get("adapter"))))
    return log


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

    @contextlib.asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        """Settles as a server process does from its start to its end."""
        task = asyncio.ensure_future(self.routes.settle())
        yield
        task.cancel()

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


@pytest.mark.parametrize(("failing", "text"), [("fails", "no such file"), ("refuses", "other files")])
@in_a_loop
async def test_adapter_that_an_engine_refuses_is_nowhere(scene: Scene, failing: str, text: str) -> None:
    """The second group has begun anew, and has read the registry before the adapter came."""
    setattr(scene.adapters, failing, True)
    with pytest.raises(EngineError, match=text):
        await scene.load(SQL)
    settled = [("settle", "/sql")] * scene.adapters.refuses
    assert scene.adapters.calls == [("load", "/sql"), *settled, ("unload", "/sql")]
    assert not scene.routes.by_name and not scene.registry.read().unsettled
    assert scene.is_unlocked()


@in_a_loop
async def test_last_adapter_that_has_room_is_replaced(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.http.adapter_routes.MAX_ADAPTERS", 1)
    await scene.load(SQL)
    with pytest.raises(ApiError, match="has already been loaded"):
        await scene.load(NEWER)
    with pytest.raises(ApiError, match="at most 1 adapters"):
        await scene.load(SQL._replace(name="too"))
    await scene.load(NEWER, in_place=True)
    assert scene.routes.by_name == {"sql": NEWER}


@pytest.mark.parametrize(
    ("is_own", "text"),
    [
        (False, r"another API server has changed adapters for 0\.2 s"),
        (True, r"other changes of adapters have taken 0\.2 s"),
    ],
    ids=["another server", "this server"],
)
@in_a_loop
async def test_change_waits_for_another_change_for_a_time_only(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_own: bool, text: str
) -> None:
    """As while an engine hangs, and the start of the server settles."""
    scene.routes._config = EngineConfig(model="/m", start_timeout=0.2)
    async with contextlib.AsyncExitStack() as other_change:
        if is_own:
            await other_change.enter_async_context(scene.routes._changing())
        else:
            other_change.enter_context(monkeypatch.context()).setattr(scene.registry, "lock", lambda: False)
        with pytest.raises(ApiError, match=text) as refused:
            await scene.load(SQL)
    assert refused.value.status == 503 and not scene.adapters.calls
    await scene.load(SQL)


@pytest.mark.parametrize("failing", ["fails", "refuses", "hanging"])
@in_a_loop
async def test_former_adapter_stays_when_a_group_does_not_follow(scene: Scene, failing: str) -> None:
    """No group can load the new files, or a group that began anew refuses the files, or gives no answer."""
    await scene.load(SQL)
    setattr(scene.adapters, failing, NEWER.digest if failing == "hanging" else True)
    with pytest.raises(EngineError):
        await scene.load(NEWER, in_place=True)
    assert scene.routes.by_name == {"sql": SQL} and ("unload", "/sql") not in scene.adapters.calls
    assert ("unload", "/newer") in scene.adapters.calls
    setattr(scene.adapters, failing, b"" if failing == "hanging" else False)
    await scene.load(NEWER, in_place=True)
    assert scene.routes.by_name == {"sql": NEWER} and scene.adapters.calls[-1] == ("unload", "/sql")


@in_a_loop
async def test_adapter_without_room_beside_itself_is_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry has an adapter that was named just now twice: with its name, and as unsettled."""
    nbytes = len(msgspec.msgpack.encode(scene.registry.read().with_unsettled(SQL)))
    monkeypatch.setattr("penstock.engine.cluster.adapter_registry.MAX_NBYTES", nbytes)
    with pytest.raises(ApiError, match=f"of adapters of at most {nbytes} bytes, got") as refused:
        await scene.load(SQL)
    assert refused.value.status == 400 and not scene.adapters.calls


@in_a_loop
async def test_adapter_under_two_names_is_unloaded_with_the_second(scene: Scene) -> None:
    await scene.load(SQL)
    scene.registry.write(scene.registry.read().with_named(SQL._replace(name="too")))
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
    assert scene.adapters.calls == [
        *[("load", "/sql"), ("settle", "/sql")],
        *[("load", "/newer"), ("settle", "/newer"), ("unload", "/sql")],
        ("unload", "/newer"),
    ]
    replaced = NEWER, SQL
    assert scene.adapters.unsettled == [(SQL,), (SQL,), (NEWER,), replaced, replaced, (NEWER,)]
    assert not scene.registry.read().unsettled


@pytest.mark.parametrize("names", [(), (SQL,), (SQL._replace(name="too", path="/too"),)])
@in_a_loop
async def test_next_process_loads_what_has_a_name_and_unloads_others(scene: Scene, names: tuple[Adapter, ...]) -> None:
    scene.registry.write(AdapterList(names, unsettled=(SQL,)))
    async with scene.settling():
        await until(lambda: not scene.registry.read().unsettled)
    assert scene.adapters.calls == ([("settle", adapter.path) for adapter in names] or [("unload", "/sql")])
    assert scene.registry.read() == AdapterList(names)
    assert scene.is_unlocked()


@in_a_loop
async def test_next_process_leaves_a_change_to_the_process_with_the_lock(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.registry.write(AdapterList((), unsettled=(SQL,)))
    attempts: list[bool] = []
    with monkeypatch.context() as context:
        context.setattr(scene.registry, "lock", lambda: bool(attempts.append(True)))
        async with scene.settling():
            await until(lambda: attempts)
    assert not scene.adapters.calls and scene.registry.read().unsettled
    await scene.load(NEWER)
    assert scene.adapters.calls == [("unload", "/sql"), ("load", "/newer"), ("settle", "/newer")]


@in_a_loop
async def test_adapters_behind_the_adapter_that_cannot_be_unloaded_are(scene: Scene) -> None:
    scene.registry.write(AdapterList((), unsettled=(SQL, NEWER)))
    scene.adapters.hanging = SQL.digest
    async with scene.settling():
        await until(lambda: scene.registry.read().unsettled == (SQL,))
    assert scene.adapters.calls == [("unload", "/sql"), ("unload", "/newer")]


@in_a_loop
async def test_change_succeeds_beside_an_adapter_that_cannot_be_unloaded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one is named in the log, and tried again, also if no change follows."""
    monkeypatch.setattr("penstock.server.http.adapter_routes.SETTLE_RETRY_S", 0.0)
    log = record_events(monkeypatch)
    scene.registry.write(AdapterList((), unsettled=(SQL,)))
    scene.adapters.hanging = SQL.digest
    async with scene.settling():
        await scene.load(NEWER)
        await scene.routes._unload_everywhere("sql")
        assert ("adapter is not settled", "sql") in log and scene.registry.read().unsettled == (SQL,)
        scene.adapters.hanging = b""
        await until(lambda: not scene.registry.read().unsettled)


@in_a_loop
async def test_adapter_that_cannot_be_unloaded_fails_its_own_change(scene: Scene) -> None:
    await scene.load(SQL)
    scene.adapters.hanging = SQL.digest
    with pytest.raises(EngineError, match="group 0 has not answered in time"):
        await scene.routes._unload_everywhere("sql")
    assert not scene.routes.by_name and scene.registry.read().unsettled == (SQL,)


@in_a_loop
async def test_registry_that_cannot_be_read_is_logged_and_tried_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.server.http.adapter_routes.SETTLE_RETRY_S", 0.0)
    log = record_events(monkeypatch)
    scene.registry.write(AdapterList((), unsettled=(SQL,)))

    def fail() -> bool:
        raise OSError(errno.ENOLCK, "no locks available")

    with monkeypatch.context() as context:
        context.setattr(scene.registry, "lock", fail)
        settling = asyncio.ensure_future(scene.routes.settle())
        await until(lambda: ("adapters are not settled", None) in log)
    await until(lambda: not scene.registry.read().unsettled)
    settling.cancel()
    assert scene.adapters.calls == [("unload", "/sql")]


@in_a_loop
async def test_next_process_settles_behind_a_change_of_its_own(scene: Scene) -> None:
    async with scene.routes._changing() as registry:
        registry.write(AdapterList((), unsettled=(SQL,)))
        settling = asyncio.ensure_future(scene.routes.settle())
        await asyncio.sleep(0.01)
        assert not scene.adapters.calls
    await until(lambda: scene.adapters.calls == [("unload", "/sql")])
    settling.cancel()
