"""Servers that put images into a store, cores that pass on where they lie, workers that look: all to be killed.

Nothing is reliable here but the store. Messages are sent twice, late, out of order, or to a process that died; requests
end at any stage, and none of that is acknowledged.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

import penstock
from penstock import Handle, Missing, Scope, Store
from penstock.lowlevel import Segment
from tests.crash.actors import RECEIVED, SENT, Board, insist

SERVERS, CORES, WORKERS = 4, 2, 2  # workers of each core
KEYS = 40
NBYTES = 3 << 19  # less than all of it together, so that some is evicted, and some finds no room
MAX_OPEN = 8  # requests of one server
LOST = (penstock.Timeout, penstock.WouldBlock, penstock.EndOfChannel, penstock.PeerDied)


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """A request; `actor` and `number` are its name. `contents`: what each handle must show."""

    server: int
    actor: int
    number: int
    contents: tuple[int, ...]
    handles: tuple[Handle, ...]


class End(msgspec.Struct, array_like=True, frozen=True):
    actor: int
    number: int


class Done(msgspec.Struct, array_like=True, frozen=True):
    actor: int
    number: int


ASKED = Ask | End
ANSWERED = Done


class Role(msgspec.Struct):
    board: str
    store: str
    inboxes: tuple[str, ...]  # of the cores
    steps: tuple[str, ...]  # from the cores
    answers: tuple[str, ...]  # inboxes of the servers
    index: int
    actor: int


def image(content: int) -> dict[str, Any]:
    """Of 0 to 150 KB."""
    return {"pixels": np.full(content * content * 97 % 150_000 // 4, content, np.int32), "content": content}


def must_show(value: Any, content: int) -> None:
    assert value["content"] == content, f"content {value['content']} where {content} was sent"
    must_be_whole(value["pixels"], content)


def must_be_whole(pixels: Any, content: int) -> None:
    assert pixels.size == content * content * 97 % 150_000 // 4 and (pixels == content).all(), f"{content} is torn"


class Carrier:
    def __init__(self, talk: Connection, role: Role) -> None:
        self.talk, self.role = talk, role
        self.board = Board(Segment.attach(role.board))
        self.chance = random.Random(role.actor)

    def is_likely(self, probability: float) -> bool:
        return self.chance.random() < probability

    def sender_of(self, ticket: str, messages: Any, index: int) -> Any:
        channel = penstock.attach(ticket, messages)
        return insist(lambda: channel.open_sender(index))

    def receiver_of(self, ticket: str, messages: Any, index: int | None = None) -> Any:
        channel = penstock.attach(ticket, messages)
        return insist(lambda: channel.open_receiver(index))

    def note(self, cell: int, count: int) -> None:
        self.board.note(self.role.actor, cell, count)

    def ready(self) -> None:
        self.talk.send(("ready", os.getpid()))

    def rest(self, open_scopes: int = 0) -> None:
        """All requests have ended, and we live on: what we hold now would never come back."""
        self.talk.send(("quiet", open_scopes))
        self.talk.recv()
        self.talk.send(("closed",))


# ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Server(Carrier):
    def __init__(self, talk: Connection, role: Role) -> None:
        super().__init__(talk, role)
        self.store = Store.attach(role.store, peer_name=f"server {role.index}")
        self.scopes: weakref.WeakSet[Scope] = weakref.WeakSet()
        self.found_no_room = 0
        self.cores = [self.sender_of(ticket, ASKED, role.index) for ticket in role.inboxes]
        self.answers = self.receiver_of(role.answers[role.index], ANSWERED)
        self.open: dict[int, tuple[Scope, int, float]] = {}  # with its core, and when it times out
        self.late: list[tuple[int, msgspec.Struct]] = []
        self.number = self.aborts = 0

    def tell(self, core: int, message: msgspec.Struct) -> None:
        """Once, twice, later, or never."""
        if self.is_likely(0.1):
            self.late.append((core, message))
            if self.is_likely(0.5):
                return
        if len(self.late) > 5:
            self.chance.shuffle(self.late)
            self.tell_now(*self.late.pop())
        self.tell_now(core, message)

    def tell_now(self, core: int, message: msgspec.Struct) -> None:
        with contextlib.suppress(*LOST):
            self.cores[core].send(message, timeout=0.05)

    def abort(self, scope: Scope, core: int, number: int, is_told: bool = True) -> None:
        scope.release()
        self.aborts += 1
        self.note(SENT, self.aborts)
        if is_told:
            self.tell(core, End(self.role.actor, number))

    def ask(self) -> None:
        self.number += 1
        scope, core, number = (
            Scope(self.store, inline_nbytes=2000, timeout=0.002),
            self.chance.randrange(CORES),
            self.number,
        )
        self.scopes.add(scope)
        contents, handles = [], []
        for _ in range(self.chance.randint(1, 3)):
            if self.is_likely(0.05):
                return self.abort(scope, core, number, is_told=False)
            content = self.chance.randrange(KEYS)
            key = None if self.is_likely(0.2) else content.to_bytes(32, "big")
            contents.append(content)
            before = scope.stats().inline_full
            handles.append(scope.put(image(content), key=key))
            self.found_no_room += scope.stats().inline_full - before
        ask = Ask(self.role.index, self.role.actor, number, tuple(contents), tuple(handles))
        if self.is_likely(0.1):  # the end comes before the beginning
            self.abort(scope, core, number)
            return self.tell(core, ask)
        self.tell(core, ask)
        if self.is_likely(0.05):
            self.tell(1 - core, ask)  # tried again elsewhere
        if self.is_likely(0.2):
            return self.abort(scope, core, number)
        self.open[number] = scope, core, time.monotonic() + self.chance.random() * 0.05

    def look_after(self, most: int) -> None:
        """Ends samples that are done, that take too long, and that have to make room."""
        with contextlib.suppress(*LOST):
            while True:
                done = self.answers.receive_nowait()
                if done.actor == self.role.actor and done.number in self.open:
                    scope, core, number = *self.open.pop(done.number)[:2], done.number
                    scope.release()
                    self.tell(core, End(self.role.actor, number))
        now = time.monotonic()
        for number, (scope, core, deadline) in list(self.open.items()):
            if now > deadline or len(self.open) > most or self.is_likely(0.02):
                del self.open[number]
                self.abort(scope, core, number)

    def serve(self) -> None:
        self.ready()
        while not self.board.is_over:
            self.ask()
            self.look_after(MAX_OPEN)
            self.note(RECEIVED, self.found_no_room)
            if self.is_likely(0.1):
                time.sleep(self.chance.random() * 0.002)
        self.look_after(0)
        self.rest(sum(not scope.is_released for scope in self.scopes))


def server(talk: Connection, role: Role) -> None:
    Server(talk, role).serve()


# ── cores ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Core(Carrier):
    """A core opens no store."""

    def __init__(self, talk: Connection, role: Role) -> None:
        super().__init__(talk, role)
        self.inbox = self.receiver_of(role.inboxes[role.index], ASKED)
        self.steps = self.sender_of(role.steps[role.index], ASKED, 0)
        self.live: OrderedDict[tuple[int, int], Ask] = OrderedDict()
        self.late: list[msgspec.Struct] = []

    def pass_on(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(*LOST):
            self.steps.send(message, timeout=0.05)

    def work(self) -> None:
        self.ready()
        passed = 0
        while not self.board.is_over:
            try:
                message = self.inbox.receive(timeout=0.05)
            except penstock.Timeout:
                continue
            except LOST:
                time.sleep(0.001)
                continue
            name = message.actor, message.number
            if isinstance(message, Ask):
                self.live[name] = message
                if len(self.live) > 100:
                    self.live.popitem(last=False)
            else:
                self.live.pop(name, None)
            if self.is_likely(0.1):
                self.late.append(message)
            else:
                self.pass_on(message)
            if self.live and self.is_likely(0.05):  # preempted, and resumed: all workers get it once more
                self.pass_on(self.chance.choice(list(self.live.values())))
            if len(self.late) > 5:
                self.chance.shuffle(self.late)
                self.pass_on(self.late.pop())
            passed += 1
            self.note(SENT, passed)
            del message
        self.rest()


def core(talk: Connection, role: Role) -> None:
    Core(talk, role).work()


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Worker(Carrier):
    def __init__(self, talk: Connection, role: Role) -> None:
        super().__init__(talk, role)
        self.store = Store.attach(role.store, peer_name=f"worker {role.index}")
        self.missing = self.opened = 0
        self.steps = self.receiver_of(role.steps[role.index // WORKERS], ASKED, role.index % WORKERS)
        self.servers = [self.sender_of(ticket, ANSWERED, role.index) for ticket in role.answers]
        self.held: OrderedDict[tuple[int, int], list[tuple[Any, int]]] = OrderedDict()

    def let_go(self, name: tuple[int, int]) -> None:
        for pixels, content in self.held.pop(name, ()):
            must_be_whole(pixels, content)  # whatever happened to its server, its key, and its core

    def run(self, ask: Ask) -> None:
        name = ask.actor, ask.number
        for handle, content in zip(ask.handles, ask.contents, strict=True):
            if self.is_likely(0.3):
                continue  # its prefix is cached: the image is not needed
            try:
                lease = handle.open(self.store)
            except Missing:
                self.missing += 1
                continue
            self.opened += 1
            with lease:
                value = lease.value()
                must_show(value, content)
                if self.is_likely(0.3):
                    self.held.setdefault(name, []).append((value["pixels"], content))
        while len(self.held) > 3:
            self.let_go(next(iter(self.held)))
        if self.is_likely(0.8):
            with contextlib.suppress(*LOST):
                self.servers[ask.server].send_nowait(Done(*name))

    def work(self) -> None:
        self.ready()
        while not self.board.is_over:
            try:
                message = self.steps.receive(timeout=0.05)
            except penstock.Timeout:
                continue
            except LOST:
                time.sleep(0.001)
                continue
            if isinstance(message, Ask):
                self.run(message)
            else:
                self.let_go((message.actor, message.number))
            del message
            self.note(SENT, self.missing)
            self.note(RECEIVED, self.opened)
        for name in list(self.held):
            self.let_go(name)
        self.rest()


def worker(talk: Connection, role: Role) -> None:
    Worker(talk, role).work()


PARTS: dict[str, Callable[[Connection, Role], None]] = {
    **{f"server {index}": server for index in range(SERVERS)},
    **{f"core {index}": core for index in range(CORES)},
    **{f"worker {index}": worker for index in range(CORES * WORKERS)},
}
