"""The LoRA adapters of a server: their names for all routes, and the routes that load and unload adapters."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from logging import WARNING
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from penstock.engine.client.adapter_loader import REFUSED
from penstock.engine.client.client import Client
from penstock.engine.client.stream import EngineError
from penstock.engine.cluster.adapter_files import base_shapes, read_digest, require_adapter
from penstock.engine.cluster.adapter_registry import AdapterRegistry
from penstock.engine.cluster.logs import event
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.lora import MAX_ADAPTERS, Adapter
from penstock.environment import ALLOW_RUNTIME_LORA
from penstock.server.errors import ApiError, body_error
from penstock.server.http.endpoint import Admission, Answer, BodyReader, Endpoint

LOCK_POLL_S = 0.05  # seconds, while another server process changes adapters
SETTLE_RETRY_S = 10.0  # seconds, after a change that an engine has not followed
T = TypeVar("T")
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class LoadAdapter(msgspec.Struct):
    lora_name: Name
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapter(msgspec.Struct):
    lora_name: Name
    lora_int_id: int | None = None


class AdapterRoutes:
    def __init__(
        self,
        config: EngineConfig,
        client: Client,
        bodies: BodyReader,
        names: tuple[str, ...],
        registry: AdapterRegistry,
    ) -> None:
        """`names`: of the model; an adapter has another one."""
        self._config = config
        self._client = client
        self._bodies = bodies
        self._names = names
        self._registry = registry
        self._change = asyncio.Lock()
        self._failed = asyncio.Event()  # a change is to be tried again
        self._by_name: tuple[object, dict[str, Adapter]] = (None, {})

    @property
    def by_name(self) -> Mapping[str, Adapter]:
        adapters = self._registry.read().adapters
        if adapters is not self._by_name[0]:
            self._by_name = adapters, {adapter.name: adapter for adapter in adapters}
        return self._by_name[1]

    def posts(self, admission: Admission) -> dict[str, Endpoint]:
        if self._config.nodes is not None or not ALLOW_RUNTIME_LORA.read():
            return {}
        return {
            "/v1/load_lora_adapter": Endpoint(admission, "adapters", self._load),
            "/v1/unload_lora_adapter": Endpoint(admission, "adapters", self._unload),
        }

    async def _load(self, request: Request) -> Answer:
        async with self._bodies.receive(request) as body:
            fields = _decoded(body, LoadAdapter)
        # Shielded: the change goes on to its end if the client disconnects.
        await asyncio.shield(asyncio.ensure_future(self._load_everywhere(fields)))
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' added successfully.")

    async def _load_everywhere(self, fields: LoadAdapter) -> None:
        name, timeout = fields.lora_name, self._config.start_timeout
        async with self._changing() as registry:
            former = self.by_name.get(name)
            if name in (*self._names, self._config.model):
                raise ApiError(400, f"{name!r} is the name of the model: expected another name", param="lora_name")
            if former is not None and not fields.load_inplace:
                message = (
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                )
                raise ApiError(400, f"{message}set 'load_inplace' to True.", param="lora_name")
            if former is None and len(self.by_name) >= MAX_ADAPTERS:
                raise ApiError(400, f"expected at most {MAX_ADAPTERS} adapters", param="lora_name")
            adapter = await asyncio.to_thread(self._read, name, fields.lora_path)
            adapters = registry.read()
            try:
                registry.require_room(adapters.with_unsettled(adapter).with_named(adapter), former)
                registry.write(adapters.with_unsettled(adapter))
            except ValueError as error:
                raise ApiError(400, f"Loading lora {name} failed: {error}", param="lora_path") from None
            try:
                await self._client.adapters.load(adapter, timeout)
                registry.write(registry.read().with_named(adapter))
                await self._settle(registry, adapter)  # also groups that were started between these two
            except BaseException:
                await self._remove(registry, adapter, former)
                raise
            event("adapter is loaded", adapter=name, path=fields.lora_path)

    def _read(self, name: str, path: str) -> Adapter:
        """Raises ApiError unless the files are those of an adapter that fits the model."""
        directory = Path(path)
        try:
            # First: the shapes bound the file that is hashed.
            require_adapter(directory, base_shapes(Path(self._config.model)), self._config.lora.max_lora_rank)
            adapter = Adapter(name, path, read_digest(directory))
        except FileNotFoundError as error:
            raise ApiError(404, f"Loading lora {name} failed: No adapter found for {path}: {error}") from None
        except (ValueError, OSError) as error:
            raise ApiError(400, f"Loading lora {name} failed: {error}", param="lora_path") from None
        return adapter

    async def _remove(self, registry: AdapterRegistry, adapter: Adapter, former: Adapter | None) -> None:
        """Takes back an adapter that some groups may have: `unsettled` has the adapter then."""
        if self.by_name.get(adapter.name) == adapter != former:
            adapters = registry.read()
            registry.write(adapters.without(adapter) if former is None else adapters.with_named(former))
        await self._settle(registry)

    async def _unload(self, request: Request) -> Answer:
        async with self._bodies.receive(request) as body:
            name = _decoded(body, UnloadAdapter).lora_name
        await asyncio.shield(asyncio.ensure_future(self._unload_everywhere(name)))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _unload_everywhere(self, name: str) -> None:
        async with self._changing() as registry:
            adapter = self.by_name.get(name)
            if adapter is None:
                raise ApiError(404, f"The lora adapter '{name}' cannot be found.", param="lora_name")
            registry.write(adapters := registry.read().without(adapter))
            has_other_name = any(other.digest == adapter.digest for other in adapters.adapters)
            await self._settle(registry, None if has_other_name else adapter)
            event("adapter is unloaded", adapter=name)

    async def settle(self) -> None:
        """Ends changes that have failed, or of server processes that were killed. Runs until it is cancelled."""
        while True:
            self._failed.clear()
            try:
                async with self._change:  # the lock does not exclude changes of this process
                    if self._registry.read().unsettled and self._registry.lock():  # else another process settles
                        try:
                            await self._settle(self._registry)
                        finally:
                            self._registry.unlock()
            except OSError as error:
                event("adapters are not settled", WARNING, reason=error)
                self._failed.set()
            await self._failed.wait()
            await asyncio.sleep(SETTLE_RETRY_S)

    async def _settle(self, registry: AdapterRegistry, changed: Adapter | None = None) -> None:
        """Has engines load the unsettled adapters that have a name, and unload the others. An adapter for which that
        fails stays unsettled, and is tried again later. Raises EngineError if the adapter is `changed`."""
        adapters = registry.read()
        if not adapters.unsettled:
            return
        deadline = time.monotonic() + self._config.step_timeout
        named = {adapter.digest: adapter for adapter in adapters.adapters}
        unsettled = sorted(adapters.unsettled, key=lambda adapter: adapter != changed)
        failed: list[Adapter] = []
        failure: EngineError | None = None  # of `changed`
        for place, adapter in enumerate(unsettled):  # in turn: engines refuse a change that comes after a later change
            try:
                await self._client.adapters.settle(
                    named.get(adapter.digest, adapter), deadline, is_loaded=adapter.digest in named
                )
            except EngineError as error:
                event("adapter is not settled", WARNING, adapter=adapter.name, reason=error)
                if error.status != REFUSED:  # a group that cannot load an adapter refuses requests, with the reason
                    failed.append(adapter)
                if adapter == changed:  # the caller may take the change back: the former adapter is not unloaded
                    failed += unsettled[place + 1 :]
                    failure = error
                    break
        registry.write(replace(adapters, unsettled=tuple(failed)))
        if failed:
            self._failed.set()
        if failure is not None:
            raise failure

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[AdapterRegistry]:
        """Waits until no other request, and no other server process, changes adapters, and ends the change of a process
        that was killed. Raises ApiError if that takes longer than `start_timeout`: the process may be stopped."""
        timeout = self._config.start_timeout
        deadline = time.monotonic() + timeout
        try:
            await asyncio.wait_for(self._change.acquire(), timeout)
        except asyncio.TimeoutError:
            raise ApiError(503, f"other changes of adapters have taken {timeout:g} s: try again later") from None
        try:
            while not self._registry.lock():
                if time.monotonic() >= deadline:
                    raise ApiError(503, f"another API server has changed adapters for {timeout:g} s")
                await asyncio.sleep(LOCK_POLL_S)
            try:
                await self._settle(self._registry)
                yield self._registry
            finally:
                self._registry.unlock()
        finally:
            self._change.release()


def _decoded(body: bytearray, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise body_error(error) from None
