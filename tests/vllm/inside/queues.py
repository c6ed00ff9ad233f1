"""The queue of vLLM on a channel, run inside vLLM by test_queue.py: what falls back, what is raised, what arrives."""

import multiprocessing
import os
import pathlib
import resource
import signal
import sys
import threading
import time
import types
from importlib.metadata import version

import numpy as np
import pytest
import torch
from packaging.version import Version
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

import penstock
from penstock.integrations import vllm as plugin
from penstock.integrations.vllm import seams, settings
from penstock.integrations.vllm.queue import Handle, VllmQueue
from penstock.integrations.vllm.queue import MessageQueue as Ours

# The first versions that each part fits. Before 0.32 vLLM's storage of images signs nothing.
FIRST = {part: Version("0.32" if part == "images" else "0.28") for part in seams.SEAMS}
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def no_fall_backs(monkeypatch):
    settings.fall_backs.clear()
    monkeypatch.delenv("PENSTOCK_VLLM_STRICT", raising=False)


def pair(**options):
    writer = MessageQueue(1, 1, **options)
    return writer, MessageQueue.create_from_handle(writer.export_handle(), 0)


def is_vllms_own(queue):
    return queue._sender is None and queue._receiver is None


def crosses(writer, reader, message="message"):
    writer.enqueue(message)
    return reader.dequeue(timeout=10)


# ── what is replaced ──
def test_register_replaces_the_queue_wherever_it_was_imported_by_name():
    from vllm.v1.executor import multiproc_executor

    assert MessageQueue is shm_broadcast.MessageQueue is multiproc_executor.MessageQueue is Ours
    plugin.register()
    assert shm_broadcast.MessageQueue is Ours


@pytest.mark.parametrize("part", sorted(seams.SEAMS))
def test_this_vllm_has_the_names_each_part_relies_on(part):
    is_older = Version(version("vllm")) < FIRST[part]
    assert (seams.misfit(part) is not None) == is_older


def test_a_queue_with_another_signature_does_not_fit(monkeypatch):
    monkeypatch.setattr(Ours, "enqueue", lambda self, obj, deadline: None)
    assert "MessageQueue.enqueue takes (self, obj, deadline), not (self, obj, timeout)" in seams.misfit("queue")


# ── the writer falls back, and readers follow the handle ──
def test_a_queue_of_more_than_64_local_readers_is_vllms_own():
    writer = MessageQueue(65, 65, max_chunk_bytes=4096)
    assert is_vllms_own(writer) and not isinstance(writer.export_handle(), Handle)
    assert is_vllms_own(MessageQueue.create_from_handle(writer.export_handle(), 64))
    assert ["65" in sentence for _, sentence in settings.fall_backs] == [True]


def exhausted(**_):
    raise penstock.MemoryExhausted("a channel of 1.2 MiB does not fit: this machine has 0.3 MiB left")


@pytest.mark.parametrize("cause", ["no memory", "no memfd", "Ray"])
def test_a_queue_for_which_no_channel_can_be_made_is_vllms_own_and_works(cause, monkeypatch):
    if cause == "Ray":
        monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: True))
    elif cause == "no memory":
        monkeypatch.setattr(penstock, "Broadcast", exhausted)
    else:
        monkeypatch.setattr(penstock, "Broadcast", lambda **_: (_ for _ in ()).throw(OSError(38, "memfd_create")))
    writer, reader = pair(max_chunk_bytes=1 << 20)
    ready = threading.Thread(target=reader.wait_until_ready)
    ready.start()
    writer.wait_until_ready()
    ready.join()
    assert is_vllms_own(writer) and is_vllms_own(reader)
    assert crosses(writer, reader) == "message"
    assert sum(settings.fall_backs.values()) == 1
    monkeypatch.setenv("PENSTOCK_VLLM_STRICT", "1")
    with pytest.raises(RuntimeError, match="PENSTOCK_VLLM_STRICT=1"):
        MessageQueue(1, 1)


def crosses_with_few_addresses(pipe, room):
    addresses = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = addresses + int(room * addresses)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    writer, reader = pair(max_chunk_bytes=1 << 20)
    pipe.send((is_vllms_own(writer), is_vllms_own(reader), crosses(writer, reader), list(settings.fall_backs)))


@pytest.mark.parametrize(("room", "is_own"), [(1.0, False), (0.05, True)])  # a channel reserves an eighth of the limit
def test_a_queue_for_which_there_are_no_addresses_is_vllms_own(room, is_own):
    ours, remote = FORK.Pipe()
    child = FORK.Process(target=crosses_with_few_addresses, args=(remote, room), daemon=True)
    child.start()
    assert ours.poll(30)
    of_writer, of_reader, message, fall_backs = ours.recv()
    child.join()
    assert (of_writer, of_reader, message) == (is_own, is_own, "message")
    assert ["RLIMIT_AS" in sentence for _, sentence in fall_backs] == [True] * is_own


def test_a_reader_that_cannot_attach_names_the_switch():
    writer = MessageQueue(1, 1)
    handle = writer.export_handle()
    handle.ticket = "penstock:1:2:3:4:5"
    with pytest.raises(RuntimeError, match=r"cannot attach to its writer's memory: .*PENSTOCK_VLLM=0"):
        MessageQueue.create_from_handle(handle, 0)


def test_readers_of_other_machines_get_the_messages_by_vllms_socket():
    writer = MessageQueue(2, 1, local_reader_ranks=[3], connect_ip="127.0.0.1")
    local = MessageQueue.create_from_handle(writer.export_handle(), 3)
    remote = MessageQueue.create_from_handle(writer.export_handle(), 5)
    assert local._receiver is not None and is_vllms_own(remote)
    ready = threading.Thread(target=remote.wait_until_ready)
    ready.start()
    writer.wait_until_ready()
    ready.join()
    tensor = torch.arange(1 << 19, dtype=torch.int32)
    writer.enqueue(("step", tensor))
    for reader in (local, remote):
        word, received = reader.dequeue(timeout=10)
        assert word == "step" and torch.equal(received, tensor)


# ── what arrives ──
@pytest.mark.parametrize(
    ("views", "has_arena", "is_view"),
    [("arena", False, False), ("arena", True, True), ("always", False, True), ("never", True, False)],
)
def test_large_tensors_are_views_as_the_settings_and_the_arena_option_say(views, has_arena, is_view, monkeypatch):
    monkeypatch.setattr(Ours, "_settings", settings.Settings(views=views))
    writer, reader = pair(enable_shm_tensor_arena=has_arena)
    received = crosses(writer, reader, torch.ones(1 << 20))
    assert torch.equal(received, torch.ones(1 << 20))
    assert_writable = np.asarray if is_view else (lambda tensor: tensor.add_(1))
    assert_writable(received)
    addresses = [line.split()[0].split("-") for line in open("/proc/self/maps") if "memfd:penstock" in line]
    assert is_view == any(int(a, 16) <= received.data_ptr() < int(b, 16) for a, b in addresses)


def test_a_reader_that_keeps_every_view_never_stops_the_writer(monkeypatch):
    from penstock.integrations.vllm import queue

    monkeypatch.setattr(queue, "LONG_RECORDS", 8)
    monkeypatch.setattr(Ours, "_settings", settings.Settings(views="always"))
    writer, reader = pair()
    arrays = []
    for value in range(20):
        writer.enqueue(np.full(1 << 20, value, np.uint8), timeout=5)
        arrays.append(reader.dequeue(timeout=5))
    assert [int(array[-1]) for array in arrays] == list(range(20))
    assert sum(not array.flags.writeable for array in arrays) == 4


def test_room_that_is_acquired_arrives_as_it_was_written():
    writer, reader = pair(max_chunk_bytes=1 << 16)
    with writer.acquire_write(timeout=1) as view:
        view[:5] = b"hello"
    with reader.acquire_read(timeout=1) as view:
        assert bytes(view[:5]) == b"hello" and len(view) == 1 << 16


# ── the end ──
def test_shutdown_wakes_a_reader_that_waits():
    _writer, reader = pair()
    threading.Timer(0.2, reader.shutdown).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue(indefinite=True)
    assert time.monotonic() - began < 5


def idle_reader(handle, attached):
    _reader = MessageQueue.create_from_handle(handle, 0)
    attached.send("attached")
    signal.pause()


def test_enqueue_raises_after_a_reader_died_and_sends_nothing_more():
    writer = MessageQueue(2, 2)
    other = MessageQueue.create_from_handle(writer.export_handle(), 1)
    ours, remote = FORK.Pipe()
    child = FORK.Process(target=idle_reader, args=(writer.export_handle(), remote), name="VllmWorker-0", daemon=True)
    child.start()
    assert ours.recv() == "attached"
    writer.wait_until_ready()
    child.kill()
    child.join()
    with pytest.raises(RuntimeError, match=f"VllmWorker-0.*{child.pid}"):
        for _ in range(1000):
            writer.enqueue("step", timeout=5)
            other.dequeue(timeout=5)
            time.sleep(0.001)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="VllmWorker-0"):
            writer.enqueue("step", timeout=5)
    with pytest.raises(RuntimeError, match="VllmWorker-0"):
        other.dequeue(timeout=5)


def test_the_group_of_an_idle_writer_gets_the_death_of_a_reader():
    writer = MessageQueue(1, 1)
    ours, remote = FORK.Pipe()
    child = FORK.Process(target=idle_reader, args=(writer.export_handle(), remote), name="VllmWorker-0", daemon=True)
    child.start()
    assert ours.recv() == "attached"
    threading.Timer(0.2, child.kill).start()
    with pytest.raises(penstock.PeerDied, match="VllmWorker-0"):
        writer.end_group.wait(10)
    child.join()


def idle_writer(pipe):
    writer = MessageQueue(1, 1)
    pipe.send(writer.export_handle())
    signal.pause()


def test_dequeue_raises_when_the_writer_has_died():
    ours, remote = FORK.Pipe()
    child = FORK.Process(target=idle_writer, args=(remote,), name="EngineCore", daemon=True)
    child.start()
    reader = MessageQueue.create_from_handle(ours.recv(), 0)
    threading.Timer(0.2, child.kill).start()
    with pytest.raises(RuntimeError, match=f"EngineCore.*{child.pid}"):
        reader.dequeue(indefinite=True)
    child.join()


def test_the_warning_of_a_long_wait_names_the_process_that_is_behind(monkeypatch, caplog):
    monkeypatch.setattr(shm_broadcast, "VLLM_RINGBUFFER_WARNING_INTERVAL", 0.05)
    writer = MessageQueue(1, 1)
    ours, remote = FORK.Pipe()
    child = FORK.Process(target=idle_reader, args=(writer.export_handle(), remote), name="VllmWorker-7", daemon=True)
    child.start()
    assert ours.recv() == "attached"
    with caplog.at_level("INFO"), pytest.raises(TimeoutError):
        for _ in range(10_000):
            writer.enqueue(b"x" * 1000, timeout=0.2)
    child.kill()
    child.join()
    sentences = [record.getMessage() for record in caplog.records]
    sentence = next(line for line in sentences if line.startswith("No available shared memory broadcast block found"))
    assert "VllmWorker-7" in sentence and str(child.pid) in sentence


def test_nothing_lies_in_dev_shm():
    before = set(os.listdir("/dev/shm"))
    writer, reader = pair()
    assert crosses(writer, reader, np.zeros(1 << 21)).nbytes == 1 << 24
    assert set(os.listdir("/dev/shm")) <= before


def test_a_queue_has_a_vllm_class_for_those_who_ask():
    writer, reader = pair()
    assert isinstance(writer, VllmQueue) and isinstance(reader, VllmQueue)
