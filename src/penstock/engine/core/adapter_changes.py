"""LoRA adapters that are loaded and unloaded while a group serves: on all of its ranks, or on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from penstock.engine.cluster.adapter_registry import AdapterList
from penstock.engine.cluster.logs import event
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.protocol.messages import AdapterChange, AdapterState, Ready


class AdapterChanges:
    """Workers load an adapter between two steps. An adapter is unloaded when no request has it any more."""

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: int,
        broadcast: Callable[[AdapterChange], None],
        answer: Callable[[int, AdapterState], object],
    ) -> None:
        """`broadcast`: to all workers; `answer`: to a server."""
        self._scheduler = scheduler
        self._ranks = ranks
        self._broadcast = broadcast
        self._answer = answer
        self._open: dict[tuple[int, int, bytes], tuple[AdapterChange, dict[int, str]]] = {}
        self._last_number = 0  # of a change
        self.leaving: dict[bytes, AdapterChange] = {}  # adapters that requests may still have

    def adopt(self, ready: Sequence[Ready], adapters: AdapterList) -> None:
        """Takes over what workers have loaded at their start, but for adapters that were unloaded meanwhile. All ranks
        load the adapters that a rank lacks. `adapters`: read when servers know that the group serves, so they send the
        group all later changes."""
        errors = self._scheduler.adapter_errors
        errors.update({adapter.digest: unloaded_text(adapter.name) for adapter in adapters.unloaded})
        named = {adapter.digest: adapter for adapter in adapters.adapters}
        names = {adapter.digest: adapter.name for adapter in (*adapters.unloaded, *adapters.unsettled)}
        ranks = [{state.digest: state.error for state in message.adapters} for message in ready]
        for digest in set[bytes]().union(*ranks):
            errors[digest] = next(filter(None, (states.get(digest) for states in ranks)), "")
            if digest not in named:
                name = names.get(digest, digest.hex())
                errors[digest] = unloaded_text(name)
                self.leaving[digest] = AdapterChange(0, 0, name, "", digest, is_loaded=False)
        for adapter in named.values():
            if not all(adapter.digest in states for states in ranks):
                self._load(AdapterChange(0, 0, *adapter, is_loaded=True))

    @property
    def is_loading(self) -> bool:
        return bool(self._open)

    def _load(self, change: AdapterChange) -> None:
        self._open[change.server, change.number, change.digest] = change, {}
        self._broadcast(change)

    def begin(self, change: AdapterChange) -> None:
        """Handles a change from a server. A change of a server that was killed may come after a later change of another
        server, and is refused."""
        if change.number < self._last_number:
            error = "another server has changed adapters since"
            self._answer(change.server, AdapterState(change.digest, error, number=change.number))
            return
        self._last_number = change.number
        if change.is_loaded:
            self.leaving.pop(change.digest, None)
            self._load(change)
            return
        if change.digest in self._scheduler.adapter_errors or change.digest in self._loading:
            self._scheduler.adapter_errors[change.digest] = unloaded_text(change.name)
            self.leaving[change.digest] = change
        self.release()
        self._answer(change.server, AdapterState(change.digest, number=change.number))

    def on_state(self, state: AdapterState) -> None:
        """Handles the answer of a rank."""
        key = state.server, state.number, state.digest
        change, errors = self._open.get(key, (None, {}))
        errors[state.rank] = state.error
        if change is None or len(errors) < self._ranks:
            return
        del self._open[key]
        error, reason = next(filter(None, errors.values()), ""), "requested" if change.number else "in the registry"
        event("adapter not loaded" if error else "adapter loaded", adapter=change.name, reason=error or reason)
        if change.digest in self.leaving:  # since the load began: `release` unloads it
            error = error or unloaded_text(change.name)
        elif error and change.digest not in self._loading:  # ranks are loading the adapter again
            self._broadcast(replace(change, is_loaded=False))
        self._scheduler.adapter_errors[change.digest] = error
        if change.number:
            self._answer(change.server, AdapterState(change.digest, error, number=change.number))

    @property
    def _loading(self) -> set[bytes]:
        return {change.digest for change, _ in self._open.values()}

    def release(self) -> None:
        """Lets workers unload the adapters that no open request has."""
        loading = self._loading
        for digest in [each for each in self.leaving if each not in loading and not self._scheduler.has_adapter(each)]:
            change = self.leaving.pop(digest)
            event("adapter unloaded", adapter=change.name)
            self._broadcast(change)


def unloaded_text(name: str) -> str:
    return f"the LoRA adapter {name!r} was unloaded"
