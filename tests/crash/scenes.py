"""The actors of a scene, the deaths, and what must be true of the actors that are left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import penstock
from penstock import LongRecords, _native, lowlevel
from penstock.channel import Channel
from tests.conftest import eventually
from tests.crash import actors
from tests.crash.zygote import Child, Zygote

TOLD_WITHIN = 0.1  # seconds from the moment at which the kernel shows that a process is gone
TOLD_WITHIN_WHEN_BUSY = 3.0  # when there are more runnable threads than processors: a thread must wait for one
SIZES = (0, 40, 3000, 5000, 40, 70000, 1)  # the ring takes up to 4096 inline; the rest goes to the pool
POOL_NBYTES = 4 << 20


def is_busy() -> bool:
    runnable = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    return runnable > len(os.sched_getaffinity(0)) + 1  # we are one of them


class Cast(Child):
    """A child with a part in a scene."""

    role: str
    index: int
    actor: int
    listeners: set[int]  # receivers that were there before it, and so get all it sends
    armed: str = ""


class Scene:
    """A channel (or a pool, and a broadcast of references into it) with a sender in each lane and all its receivers."""

    def __init__(self, zygote: Zygote, style: str, **options: Any) -> None:
        self.zygote = zygote
        self.style = style
        self.options = options
        self.board = actors.Board.create()
        shape: dict[str, Any] = {
            "capacity": 16 << 10,
            "long_records": LongRecords(pool_nbytes=64 << 20, max_records=64),
        }
        self.pool: lowlevel.Pool | None = None
        if style == "ring":
            self.channel: Channel = penstock.Ring(**shape)
        elif style == "inbox":
            self.channel = penstock.Inbox(senders=3, **shape)
        else:
            self.channel = penstock.Broadcast(receivers=3, **shape)
        if style == "pool":
            self.pool = lowlevel.Pool.create(POOL_NBYTES, name="pool", max_blocks=64, max_peers=16)
        self.roles = ("lender", "borrower") if style == "pool" else ("sender", "receiver")
        self.cast: list[Cast] = []
        self.dead: list[Cast] = []
        self._actors = 0

    # ── actors ──
    def add(self, role: str, index: int, **options: Any) -> Cast:
        writes = role in ("sender", "lender")
        for player in self.cast:
            player.heard()
        present = [player.actor for player in self.cast if player.role == "receiver" and player.is_ready]
        part = actors.Part(
            actor=self._actors,
            board=str(self.board.segment.ticket),
            where=str((self.pool or self.channel).ticket),
            index=index,
            lanes=self.channel.senders,
            sizes=SIZES,
            through=str(self.channel.ticket),
            **(self.options | options),
        )
        child = self.zygote.child(getattr(actors, role), part)
        child.__class__ = Cast
        assert isinstance(child, Cast)
        child.role, child.index, child.actor = role, index, self._actors
        child.listeners = set(present) if writes else set()
        self._actors += 1
        self.cast.append(child)
        return child

    def fill(self, victim: tuple[str, int] | None = None, **options: Any) -> Cast | None:
        """An actor in each place; the actor in the place of `victim` comes last, with these options."""
        writer, reader = self.roles
        for role, many in ((reader, self.channel.receivers), (writer, self.channel.senders)):
            for index in range(many):
                if victim != (role, index):
                    self.add(role, index).hear("ready")
        return self.add(*victim, **options) if victim else None

    def others(self, role: str) -> list[Cast]:
        """The actors at the far side."""
        other = self.roles[1 - self.roles.index(role)]
        return [player for player in self.cast if player.role == other]

    def bury(self, victim: Cast) -> float:
        gone_at = victim.gone_at()
        victim.heard()
        self.cast.remove(victim)
        self.dead.append(victim)
        return gone_at

    def peers_snapshot(self) -> dict[str, Any]:
        fd = os.dup((self.pool or self.channel).fd)
        return _native.snapshot(fd)

    # ── what must be true ──
    def must_be_told(self, victim: Cast, gone_at: float) -> None:
        """Every survivor at the far side is told, by name, in time."""
        busy = is_busy()
        for survivor in self.others(victim.role):
            while True:
                _, name, pid, at = survivor.hear("died")
                if pid == victim.pid:
                    break
            assert name == f"actor {victim.actor}"
            late = at - gone_at
            limit = TOLD_WITHIN_WHEN_BUSY if busy or is_busy() else TOLD_WITHIN
            assert late <= limit, f"{survivor.role} {survivor.index} was told {late * 1000:.1f} ms after the death"

    def must_be_reaped(self, victim: Cast) -> None:
        def is_reaped() -> bool:
            snapshot = self.peers_snapshot()
            peers = [peer for peer in snapshot["peers"] if peer["pid"] == victim.pid]
            holders = [holder["peer"] for holder in snapshot["pool"][0]["holders"]]
            return all(
                peer["state"] in ("dead", "left") and (peer["index"] not in holders or is_taken_again(snapshot, peer))
                for peer in peers
            )

        def is_taken_again(snapshot: dict[str, Any], peer: dict[str, Any]) -> bool:
            return any(
                successor["index"] == peer["index"] and successor["epoch"] > peer["epoch"]
                for successor in snapshot["peers"]
            )

        eventually(is_reaped, within=actors.WATCHDOG)

    def must_flow(self, records: int = 15, without: Cast | None = None) -> None:
        """Every reader gets more, except for an actor that may be dying."""
        readers = [player for player in self.cast if player.role == self.roles[1] and player is not without]
        before = {reader.actor: self.board.received(reader.actor) for reader in readers}

        def flows() -> bool:
            for player in self.cast:
                player.heard()
                assert player is without or player.is_alive(), (
                    f"{player.role} {player.index}, a survivor, ended; it said {player.messages}"
                )
            return all(self.board.received(actor) >= count + records for actor, count in before.items())

        eventually(flows, within=actors.WATCHDOG)

    def finish(self) -> None:
        """Ends the play, and accounts for every record and every block."""
        self.board.end()
        spans_of_readers: dict[int, dict[int, tuple[int, int]]] = {}
        for player in self.cast:
            if player.role == "receiver":
                spans_of_readers[player.actor] = player.hear("seen")[1]
            elif player.role == "borrower":
                player.hear("seen")
            else:
                player.hear("closed")
        for player in self.cast:
            player.gone_at()
            player.heard()
        for writer in self.dead + self.cast:
            if writer.role != "sender":
                continue
            sent = self.board.sent(writer.actor)
            ends = set()
            for reader, spans in spans_of_readers.items():
                if reader not in writer.listeners:
                    continue
                first, end = spans.get(writer.actor, (0, 0))
                assert first == 0, f"receiver {reader} missed the first {first} records of actor {writer.actor}"
                assert sent <= end <= sent + 1, (
                    f"actor {writer.actor} sent {sent} records, and receiver {reader} got {end}"
                )
                ends.add(end)
            assert len(ends) <= 1, f"receivers saw different ends of actor {writer.actor}: {ends}"
        self.must_be_empty()

    def must_be_empty(self) -> None:
        """No actor is left, so nothing is held. (One more peer comes first: it reaps the last dead.)"""
        for where in {id(self.channel): self.channel, id(self.pool): self.pool}.values():
            if where is None:
                continue
            attached = _native.Attachment(where._segment, "undertaker")
            eventually(lambda attached=attached: attached.stats()["blocks"] == 0, within=actors.WATCHDOG)
            stats = attached.stats()
            assert stats["holders"] == [], stats
            assert stats["taken_nbytes"] == 0, stats
            states = {peer["state"] for peer in attached.peers() if peer["index"] != attached.slot}
            assert states <= {"dead", "left"}, attached.peers()
            if where is self.pool:
                with_all = attached.take(POOL_NBYTES, 0)  # in one piece: no room is lost to the dead
                with_all.release()

    def close(self) -> None:
        for player in self.cast + self.dead:
            player.close()
        self.channel.close()
        if self.pool is not None:
            self.pool.close()

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
