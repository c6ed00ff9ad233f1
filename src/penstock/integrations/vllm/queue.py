"""vLLM's MessageQueue: local readers on a Broadcast, and remote readers on vLLM's socket.

The writer decides. If the writer cannot create a channel, the queue and the handle are vLLM's, and readers follow the
handle. Leaves to records.py the bytes of a message, and to steps.py the changes of steps.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np
from vllm.distributed.device_communicators import shm_broadcast

import penstock
from penstock.channel import Latency
from penstock.environment import VLLM
from penstock.errors import ClosedError, EndOfChannel, PeerDied, PenstockError, Timeout
from penstock.integrations.vllm import deaths, records, seams
from penstock.integrations.vllm.settings import LOGGER, Settings, fall_back, rebind
from penstock.lowlevel import BlockLease, ByteReceiver, ByteSender

VllmQueue: Any = shm_broadcast.MessageQueue  # as it was before replace()
VllmHandle: Any = shm_broadcast.Handle

STEPS = "penstock.integrations.vllm.steps"
LONG_RECORDS = 1024  # in a queue's pool; readers that hold more than a fair share get copies

_numbers = itertools.count()  # of the groups that this process began
_groups: dict[tuple[int, str], penstock.EndGroup] = {}  # by pid, as a fork is another process, and by name
_joined: dict[int, str] = {}  # by pid: the group of the executor that this process works for


@dataclass
class Handle(VllmHandle):  # type: ignore[misc]
    """vLLM's handle, with the channel's ticket and the rule for views in place, for local readers."""

    ticket: str = ""
    group: str = ""  # of the executor's queues: a death in one of them ends the waits of all
    views: records.Views = "readonly"
    has_steps: bool = False


class MessageQueue(VllmQueue):  # type: ignore[misc]
    """A queue of vLLM on a channel; without a sender and a receiver all calls are vLLM's own."""

    _settings = Settings()  # of this process: replace()

    # vLLM's create_from_handle makes instances without calling __init__.
    _sender: ByteSender | None = None
    _receiver: ByteReceiver | None = None
    _steps: Any = None
    _shown: list[weakref.ref[Any]]  # records with views of a reader
    _max_views: int  # such records, before a reader gets copies

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int = 24 << 20,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        channel = self._create_channel(n_local_reader) if n_local_reader else None
        if channel is None:
            # Versions before 0.31 lack the arena, and never ask for one.
            arena = {"enable_shm_tensor_arena": True} if enable_shm_tensor_arena else {}
            super().__init__(
                n_reader, n_local_reader, local_reader_ranks, max_chunk_bytes, max_chunks, connect_ip, **arena
            )
            return
        ranks = list(range(n_local_reader)) if local_reader_ranks is None else local_reader_ranks
        if len(ranks) != n_local_reader:
            raise ValueError(f"a queue of {n_local_reader} local readers needs as many ranks, not {ranks}")
        self.n_local_reader, self.n_remote_reader = n_local_reader, n_reader - n_local_reader
        self.shutting_down = False
        self._is_writer, self._is_local_reader, self._is_remote_reader = True, False, False
        self._max_record_nbytes = max_chunk_bytes
        # For remote readers: a queue of vLLM's without local readers.
        self._remote = VllmQueue(self.n_remote_reader, 0, connect_ip=connect_ip) if self.n_remote_reader else None
        self._channel = channel
        group = _joined.get(os.getpid()) or f"{os.getpid()}.{next(_numbers)}"
        self._sender = channel.open_sender(name=_process_name(), group=_group(group))
        LOGGER.info("penstock carries a queue of vLLM to %d local readers, as '%s'", n_local_reader, channel.name)
        self._reducers = records.tensor_reducers()
        self.handle = Handle(
            local_reader_ranks=ranks,
            ticket=str(channel.ticket),
            group=group,
            views=_views(self._settings.views, enable_shm_tensor_arena),
            has_steps="steps" in self._settings.parts and not self.n_remote_reader,
        )
        if self._remote is not None:
            remote = self._remote.export_handle()
            self.handle.remote_subscribe_addr = remote.remote_subscribe_addr
            self.handle.remote_addr_ipv6 = remote.remote_addr_ipv6
        if self.handle.has_steps:
            steps = importlib.import_module(STEPS)
            self._steps = steps.StepWriter(self._send, steps.load_codecs(), is_checked=self._settings.check_steps)

    def _create_channel(self, receivers: int) -> Any:
        """Returns the channel of a queue with `receivers` local readers; None if the queue must be vLLM's."""
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            fall_back(
                "queue", "workers of Ray may be in other pid namespaces, where a ticket of penstock leads nowhere"
            )
            return None
        try:
            return penstock.Broadcast(
                receivers=receivers,
                name=f"vllm {_process_name()}",
                latency=cast(Latency, self._settings.latency),
                long_records=penstock.LongRecords(max_records=LONG_RECORDS),
            )
        except (PenstockError, ValueError, OSError) as error:
            fall_back("queue", f"no channel for {receivers} local readers: {error}")
            return None

    @staticmethod
    def create_from_handle(handle: Any, rank: int) -> Any:
        if not isinstance(handle, Handle) or rank not in handle.local_reader_ranks:
            return VllmQueue.create_from_handle(handle, rank)
        queue = MessageQueue.__new__(MessageQueue)
        queue.handle = handle
        queue.shutting_down = False
        queue.n_local_reader, queue.n_remote_reader = len(handle.local_reader_ranks), 0
        queue._is_writer, queue._is_local_reader, queue._is_remote_reader = False, True, False
        queue.local_reader_rank = handle.local_reader_ranks.index(rank)
        try:
            channel = penstock.attach(handle.ticket)
        except (PenstockError, OSError) as error:
            raise RuntimeError(
                f"reader {rank} of a queue of vLLM cannot attach to its writer's memory: {error}. Processes of one user"
                f" and one pid namespace can; where there are others, run vLLM with {VLLM.name}=0"
            ) from error
        queue._channel = channel
        if not handle.group.startswith(f"{os.getpid()}."):
            _joined[os.getpid()] = handle.group
        queue._receiver = channel.open_receiver(
            queue.local_reader_rank, name=_process_name(), group=_group(handle.group)
        )
        queue._max_views = max(1, LONG_RECORDS // 2 // queue.n_local_reader)
        queue._shown = []
        if handle.has_steps:
            steps = importlib.import_module(STEPS)
            queue._steps = steps.StepReader(steps.load_codecs())
        return queue

    # ── beginning and end ──
    def wait_until_ready(self) -> None:
        if self._sender is not None:
            self._channel.wait_for_receivers()
            if self._remote is not None:
                self._remote.wait_until_ready()
        elif self._receiver is None:
            super().wait_until_ready()

    @property
    def end_group(self) -> penstock.EndGroup | None:
        """The group of the executor's queues. None: the queue is vLLM's own."""
        return None if self._sender is None else _group(self.handle.group)

    def shutdown(self) -> None:
        self.shutting_down = True
        if self._receiver is not None:
            self._receiver.close()  # wakes a waiting thread
        elif self._sender is not None:
            self._sender.close()  # readers get "cancelled", and no death
        else:
            super().shutdown()

    # ── writing ──
    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        if self._sender is None:
            assert self._receiver is None, "only the writer of a queue can enqueue"
            super().enqueue(obj, timeout)
            return
        if self._steps is None or not self._steps.send(obj, timeout):
            self._send(b"", obj, timeout)
        if self._remote is not None:
            self._remote.enqueue(obj, timeout)

    def _send(self, section: bytes, body: Any, timeout: float | None) -> None:
        sender = self._sender
        assert sender is not None
        record = records.encode(body, section=section, reducers=self._reducers)
        self._wait(lambda seconds: sender.send(record, seconds), timeout, should_warn=True)

    @contextmanager
    def acquire_write(self, timeout: float | None = None) -> Iterator[memoryview]:
        sender = self._sender
        if sender is None:
            assert self._receiver is None, "only the writer of a queue can acquire room to write"
            with super().acquire_write(timeout) as view:
                yield view
            return
        nbytes = self._max_record_nbytes
        with self._wait(lambda seconds: sender.reserve(nbytes, seconds), timeout, should_warn=True) as reservation:
            with memoryview(reservation) as view:
                yield view

    # ── reading ──
    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        receiver = self._receiver
        if receiver is None:
            if self._sender is not None:
                raise RuntimeError("only readers of a queue can dequeue")
            return super().dequeue(timeout, indefinite)
        try:
            record = receiver.try_receive_frame()
        except (PeerDied, ClosedError, EndOfChannel) as end:
            self._raise_end(end)
        if record is None:
            record = self._wait(receiver.receive_frame, timeout, should_warn=not indefinite)
        section, body = records.decode(*self._shown_as(record))
        return self._steps.receive(section, body) if section else body

    def _shown_as(self, record: bytes | BlockLease) -> tuple[Any, records.Views]:
        """Returns the record, and the buffers shown in place: none while readers hold too many views."""
        if isinstance(record, bytes):
            return record, "none"
        self._shown = [view for view in self._shown if view() is not None]
        views: records.Views = self.handle.views if len(self._shown) < self._max_views else "none"
        whole = np.frombuffer(memoryview(record), np.uint8)
        if views != "none":
            self._shown.append(weakref.ref(whole))
        return whole, views

    @contextmanager
    def acquire_read(self, timeout: float | None = None, indefinite: bool = False) -> Iterator[memoryview]:
        receiver = self._receiver
        if receiver is None:
            assert self._sender is None, "only readers of a queue can acquire a message"
            with super().acquire_read(timeout, indefinite) as view:
                yield view
            return
        with self._wait(receiver.receive_view, timeout, should_warn=not indefinite) as lease:
            with memoryview(lease) as view:
                yield view

    def broadcast_object(self, obj: Any = None) -> Any:
        if self._sender is not None:
            self.enqueue(obj)
            return obj
        return self.dequeue() if self._receiver is not None else super().broadcast_object(obj)

    # ── waiting ──
    def _wait(self, call: Callable[[float | None], Any], timeout: float | None, *, should_warn: bool) -> Any:
        """Returns the result of the call, with warnings during a long wait.

        Raises:
            TimeoutError: from the call.
            RuntimeError: a process of the queue's group died, or an end was closed. A death is final: later messages
                would reach only a part of the readers.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        left = timeout
        while True:
            interval = shm_broadcast.VLLM_RINGBUFFER_WARNING_INTERVAL
            is_last = not should_warn or (left is not None and left <= interval)
            try:
                return call(left if is_last else interval)
            except Timeout as late:
                if is_last:
                    raise
                # vLLM's sentence, for searches, and the name of the awaited process.
                LOGGER.info("%s %s", shm_broadcast.LONG_WAIT_TIME_LOG_MSG % interval, late)
            except (PeerDied, ClosedError, EndOfChannel) as end:
                self._raise_end(end)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())

    def _raise_end(self, end: PenstockError) -> NoReturn:
        _joined.pop(os.getpid(), None)  # a later queue of this process is not one of a dead executor's
        if isinstance(end, PeerDied):
            raise deaths.process_died(end) from end
        # The other end may have been closed by a process that knew of a death first.
        if death := deaths.death_behind(_group(self.handle.group), 0 if self.shutting_down else deaths.CAUSE_S):
            raise death from end
        raise RuntimeError(f"cancelled: {end}") from end


def _views(setting: str, has_arena: bool) -> records.Views:
    if setting == "never":
        return "none"
    return "all" if has_arena or setting == "always" else "readonly"


def _process_name() -> str:
    return multiprocessing.current_process().name


def _group(name: str) -> penstock.EndGroup:
    return _groups.setdefault((os.getpid(), name), penstock.EndGroup())


def replace(settings: Settings) -> None:
    """Replaces vLLM's MessageQueue, also in modules that have imported the class by name."""
    MessageQueue._settings = settings
    rebind(VllmQueue, MessageQueue)
    if (sentence := seams.misfit("deaths")) is None:
        deaths.replace()
    else:
        fall_back("deaths", sentence)
