"""A fork server that the next launcher of this process uses, too: its imports take seconds of processor time.

It has also imported what test modules import: a process that runs a function of a test module imports only that module.
"""

import asyncio
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from penstock.engine.cluster.spawning import inherited
from penstock.engine.launcher import early_fork_server, fork_server, launcher
from penstock.engine.launcher.fork_server import ForkServer, ForkServerProcess
from tests import conftest

import_programs = launcher.import_programs


def import_all(imports: Callable[[], object]) -> None:
    """Runs in the fork server."""
    from tests.support import engine  # noqa: F401

    imports()


def inherited_of_any_test() -> tuple[object, ...]:
    environment, *others = inherited()
    assert isinstance(environment, dict)
    return {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}, *others


class KeptForkServer(ForkServer):
    """`imports` of launcher have the config: processes with a model are kept apart from those without. A fork server
    with imports of a test is not kept."""

    idle: ClassVar[dict[bool, ForkServerProcess]] = {}
    belongings: ClassVar[dict[bool, Counter[str]]] = {}

    def __init__(self, imports: Callable[[], object], start_timeout: float) -> None:
        assert isinstance(imports, functools.partial)
        self._is_kept = imports.func is import_programs
        super().__init__(functools.partial(import_all, imports) if self._is_kept else imports, start_timeout)
        self._has_model = imports.args[-1].simulated is None
        self._descriptors: Counter[str] = Counter()

    def start(self) -> None:
        if not self._is_kept:
            super().start()
            return
        server = self.idle.get(self._has_model)
        if server is not None and not is_usable(server):
            self.take(self._has_model).end()
        elif server is not None:
            self._descriptors = self.belongings[self._has_model]
            self._server = self.take(self._has_model)
            asyncio.get_running_loop().add_reader(server.pidfd, self._lose, "")
            return
        before = conftest.descriptors()
        super().start()
        self._descriptors = conftest.descriptors() - before

    def close(self) -> None:
        server = self._server
        is_reusable = server is not None and self._is_kept and server.is_ready and is_usable(server)
        if server is None or not is_reusable or self._has_model in self.idle:
            super().close()
            return
        self._waiting.clear()
        self._server = None
        asyncio.get_running_loop().remove_reader(server.pidfd)
        pid = f"child {server.process.pid} "
        child = Counter({text: count for text, count in conftest.children().items() if text.startswith(pid)})
        self.idle[self._has_model], self.belongings[self._has_model] = server, self._descriptors | child
        conftest.left_on_purpose.update(self.belongings[self._has_model])

    @classmethod
    def take(cls, has_model: bool) -> ForkServerProcess:
        conftest.left_on_purpose.subtract(cls.belongings.pop(has_model))
        return cls.idle.pop(has_model)

    @classmethod
    def end(cls) -> None:
        for has_model in [*cls.idle]:
            cls.take(has_model).end()


def is_usable(server: ForkServerProcess) -> bool:
    is_alive = os.waitid(os.P_PIDFD, server.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return is_alive and not server.is_stopped and server.inherited == inherited_of_any_test()


@pytest.fixture(scope="session")
def kept_fork_server() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    for module in (early_fork_server, fork_server):
        patch.setattr(module, "inherited", inherited_of_any_test)
    patch.setattr(launcher, "ForkServer", KeptForkServer)
    yield
    patch.undo()
    KeptForkServer.end()
