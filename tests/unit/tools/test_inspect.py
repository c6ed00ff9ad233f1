"""What `penstock inspect` says of processes that wait, stop and die, and of segments that lie."""

import asyncio
import contextlib
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock
from penstock import LongRecords, _native, cli, lowlevel
from penstock.channel import Channel
from penstock.tools import inspect
from penstock.tools.format import in_seconds, in_units
from tests.conftest import eventually, spawn

SMALL_POOL = LongRecords(pool_nbytes=1 << 20)


# ── processes to look at ─────────────────────────────────────────────────────────────────────────────────────────────
def send_until_killed(channel: Channel, name: str) -> None:
    sender = channel.open_sender(name=name)
    while True:
        sender.send(b"x" * 1000)


def receive_until_killed(channel: Channel, name: str) -> None:
    receiver = channel.open_receiver(name=name)
    with contextlib.suppress(penstock.PenstockError):
        while True:
            receiver.receive()


def attach_and_sleep(channel: Channel, name: str) -> None:
    receiver = channel.open_receiver(name=name)
    threading.Event().wait()
    receiver.close()


def send_and_never_receive(to: Channel, back: Channel, name: str) -> None:
    receiver = back.open_receiver(name=name)
    send_until_killed(to, name)
    receiver.close()


def pass_on(source: Channel, to: Channel, answers: Channel, name: str) -> None:
    """Sends one answer, and then gets stuck in sending."""
    answering = answers.open_sender(name=name)
    answering.send(b"one")
    send_until_killed(to, name)


def hold(pool: lowlevel.Pool, nbytes: int) -> None:
    pool.join("holder")
    lease = pool.take(nbytes)
    with contextlib.suppress(penstock.MemoryExhausted):
        pool.take(nbytes)
    threading.Event().wait()
    lease.release()


@contextlib.contextmanager
def closing(*ends: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for end in ends:
            end.close()


def finding(level: str, *words: str) -> Callable[[], str]:
    """The first sentence of that level with all these words in it, about this process and its children."""

    def look() -> str:
        sentences = inspect.look(os.getpid())["verdict"]
        fitting = [sentence["text"] for sentence in sentences if sentence["level"] == level]
        return next((text for text in fitting if all(word in text for word in words)), "")

    return look


def levels() -> set[str]:
    return {item["level"] for item in inspect.look(os.getpid())["verdict"]}


# ── reasons of a wait ────────────────────────────────────────────────────────────────────────────────────────────────
def test_wait_for_a_stopped_receiver_is_shown_with_names_and_lag() -> None:
    ring = penstock.Ring(name="x", capacity=4096)
    with spawn(attach_and_sleep, ring, "slow") as slow, spawn(send_until_killed, ring, "fast") as fast:
        eventually(lambda: ring.snapshot()["receivers"][0]["state"] == "live", within=20)
        assert slow.pid is not None
        os.kill(slow.pid, signal.SIGSTOP)
        text = eventually(finding("stuck", "sender 'fast'", "for room in ring 'x'", "stopped"), within=20)
        assert f"sender 'fast' (pid {fast.pid}) waits for room in ring 'x' since " in text
        assert f"receiver 0 'slow' (pid {slow.pid}, stopped) is 3 records (3." in text
        assert f"kill -CONT {slow.pid}" in text
        assert finding("warning", "'slow'", "is stopped")()


def test_two_processes_that_only_send_are_one_deadlock() -> None:
    there, back = penstock.Ring(name="there", capacity=4096), penstock.Ring(name="back", capacity=4096)
    with spawn(send_and_never_receive, there, back, "a"), spawn(send_and_never_receive, back, there, "b"):
        text = eventually(finding("deadlock", "'a'", "'b'"), within=20)
        assert "waits for room in ring 'there'" in text or "waits for room in ring 'back'" in text
        assert "a deadlock" in text
        sentences = inspect.look(os.getpid())["verdict"]
        assert [sentence["level"] for sentence in sentences if sentence["kind"] == "wait"] == ["deadlock"]


def test_stuck_process_is_shown_with_its_chain_of_waits() -> None:
    source, to = penstock.Ring(name="source"), penstock.Ring(name="to", capacity=4096)
    answers = penstock.Ring(name="answers")
    with (
        spawn(attach_and_sleep, to, "end"),
        spawn(pass_on, source, to, answers, "middle"),
        spawn(receive_until_killed, answers, "begin"),
    ):
        text = eventually(finding("stuck", "receiver 'begin'", "receiver 0 'end'"), within=20)
        first, second = text.index("sender 'middle'"), text.index("and itself waits for room in ring 'to'")
        assert text.index("for records of ring 'answers' since") < first < second < text.index("receiver 0 'end'")
        assert "sent last" in text


def test_receiver_of_a_quiet_sender_is_idle() -> None:
    ring = penstock.Ring(name="quiet")
    sender = ring.open_sender(name="us")
    with closing(sender), spawn(receive_until_killed, ring, "them"):
        text = eventually(finding("idle", "receiver 'them'", "ring 'quiet'"), within=20)
        assert "its sender 'us'" in text and "has not sent yet" in text
        assert levels() <= {"idle", "note"}


def test_receiver_whose_sender_never_opened_is_a_warning() -> None:
    ring = penstock.Ring(name="early")
    with spawn(receive_until_killed, ring, "them"):
        eventually(finding("warning", "receiver 'them'", "its sender has never attached"), within=20)
        assert finding("note", "no sender of ring 'early' has ever attached")()


def test_sender_whose_receiver_never_opened_is_stuck() -> None:
    broadcast = penstock.Broadcast(receivers=2, name="early", capacity=4096)
    with spawn(send_until_killed, broadcast, "them"):
        text = eventually(finding("stuck", "sender 'them'"), within=20)
        assert "receiver 0, which has never attached, is 3 records" in text
        assert finding("note", "0, 1 have never attached: 3 records kept for them")()


def answer_once(inbox: Channel, name: str) -> None:
    sender = inbox.open_sender(name=name)
    sender.send(b"one")
    threading.Event().wait()
    sender.close()


def test_stopped_sender_of_many_is_named_as_suspect() -> None:
    inbox = penstock.Inbox(senders=2, name="answers")
    with (
        spawn(answer_once, inbox, "good"),
        spawn(answer_once, inbox, "bad") as bad,
        spawn(receive_until_killed, inbox, "us"),
    ):
        eventually(lambda: [item["records"] for item in inbox.snapshot()["receivers"]] == [2], within=20)
        assert bad.pid is not None
        os.kill(bad.pid, signal.SIGSTOP)
        text = eventually(finding("warning", "receiver 'us'", "for records of inbox 'answers'"), within=20)
        assert f"its sender 'bad' (pid {bad.pid}, stopped) sent last " in text


def test_exhausted_pool_names_the_largest_holder() -> None:
    pool = lowlevel.Pool.create(1 << 20, name="full")
    with spawn(hold, pool, (1 << 20) - 64) as holder:
        text = eventually(finding("warning", "pool 'full'", "1 time"), within=20)
        assert f"'holder' (pid {holder.pid}) holds 1023.9 KiB of it in 1 block" in text


def take_and_wait(pool: lowlevel.Pool, name: str) -> None:
    pool.join(name)
    pool.take(4096, timeout=None)


def test_wait_for_memory_is_shown_with_the_holder_of_the_memory() -> None:
    pool = lowlevel.Pool.create(1 << 20, name="full")
    with spawn(hold, pool, (1 << 20) - 64) as holder:
        eventually(lambda: pool.stats().exhaustions == 1, within=20)
        with spawn(take_and_wait, pool, "taker") as taker:
            text = eventually(
                finding("stuck", f"'taker' (pid {taker.pid}) waits for memory of pool 'full' since"), within=20
            )
            assert f"'holder' (pid {holder.pid}) holds 1023.9 KiB of it in 1 block" in text
    pool.close()


async def receive_in_a_loop(channel: Channel) -> None:
    with contextlib.suppress(penstock.PenstockError):
        await channel.open_async_receiver(name="loop").receive()


def run_a_loop(channel: Channel) -> None:
    asyncio.run(receive_in_a_loop(channel))


def test_inspect_shows_a_wait_in_an_event_loop() -> None:
    ring = penstock.Ring(name="x")
    sender = ring.open_sender(name="us")
    with closing(sender), spawn(run_a_loop, ring):
        eventually(finding("idle", "receiver 'loop'", "for records of ring 'x' since"), within=20)


def test_dead_process_is_a_note_with_the_cause() -> None:
    ring = penstock.Ring(name="x")
    sender = ring.open_sender(name="us")
    with closing(sender), spawn(receive_until_killed, ring, "them") as them:
        eventually(lambda: ring.snapshot()["receivers"][0]["state"] == "live", within=20)
        them.kill()
        them.join()
        eventually(finding("note", f"'them' (pid {them.pid}) of ring 'x' died"), within=20)


def snapshot(name: str, inode: int, **more: Any) -> dict[str, Any]:
    """As the core gives it, for what is hard to bring about."""
    created = {
        "name": name,
        "kind": "pool",
        "inode": inode,
        "age_ns": 10**10,
        "peers": [],
        "asked": True,
        "held_by": [],
    }
    return {**created, **more}


def test_lock_of_a_stopped_peer_is_shown() -> None:
    pool = {"nbytes": 10, "taken_nbytes": 0, "blocks": 0, "max_blocks": 5, "exhaustions": 0, "lock_holder": 3}
    peer = {"index": 3, "pid": 999999999, "name": "sleepy", "state": "stopped", "how": "", "waiting_for_memory_ns": 0}
    result = inspect.verdict_of([snapshot("p", 1, pool=[{**pool, "holders": []}], peers=[peer])])
    assert result[0]["level"] == "stuck"
    assert result[0]["text"].startswith("the lock of the pool 'p' is held by 'sleepy' (pid 999999999, stopped)")


def store_of(pool: lowlevel.Pool) -> Any:
    return _native.Store(pool.place)


def keeping_pool(name: str, max_blocks: int = 16) -> lowlevel.Pool:
    shape = {"kind": 2, "max_peers": 8, "max_blocks": max_blocks, "has_grants": 1, "pool_nbytes": 1 << 16}
    return lowlevel.Pool(_native.Segment.create(name, {**shape, "buckets": 32}), "looker")


def key(number: int) -> bytes:
    return bytes([number]) * _native.KEY_NBYTES


def begin_and_sleep(pool: lowlevel.Pool) -> None:
    pool.join("slow writer")
    _, lease = store_of(pool).begin(key(0xCD), 5000)
    threading.Event().wait()
    lease.release()


def put(pool: lowlevel.Pool, number: int, nbytes: int) -> None:
    is_ours, lease = store_of(pool).begin(key(number), nbytes)
    assert is_ours
    store_of(pool).commit(lease)


def store_seen() -> dict[str, Any]:
    (store,) = inspect.look(os.getpid())["segments"][0]["store"]
    return dict(store)


def test_store_is_shown_with_its_counts_and_kept_values(capsys: pytest.CaptureFixture[str]) -> None:
    with keeping_pool("images") as pool:
        put(pool, 0xAB, 3000)
        put(pool, 0x01, 1000)
        held = store_of(pool).get(key(0xAB))
        assert store_of(pool).get(key(0x77)) is None
        store = store_seen()
        assert {word: store[word] for word in ("hits", "misses", "puts", "evictions", "keys", "nbytes")} == {
            "hits": 1, "misses": 2, "puts": 2, "evictions": 0, "keys": 2, "nbytes": 4000,
        }  # fmt: skip
        (observed,) = (item for item in store["items"] if item["key"] == "ab" * 32)
        assert {word: observed[word] for word in ("nbytes", "hits", "holders", "state", "writer")} == {
            "nbytes": 3000, "hits": 1, "holders": 1, "state": "ready", "writer": -1,
        }  # fmt: skip
        assert 0 <= observed["idle_ns"] <= observed["age_ns"] < 60e9
        inspect.show(inspect.look(os.getpid()))
        held.release()
        assert {item["holders"] for item in store_seen()["items"]} == {0}
    shown = capsys.readouterr().out
    assert "store of 'images': 2 keys, 3.9 KiB, 1 hits, 2 misses, 2 puts, 0 evictions (0 B)" in shown
    assert shown.index("abababababab…") < shown.index("010101010101…"), "what is held comes first"
    del held


def test_fill_of_a_stopped_peer_is_shown_with_name_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    with keeping_pool("images") as pool:
        pool.join("us")
        with spawn(begin_and_sleep, pool) as writer:
            eventually(lambda: store_seen()["items"], within=20)
            (item,) = store_seen()["items"]
            assert item["state"] == "filling"
            inspect.show(inspect.look(os.getpid()))
            assert f"being written by 'slow writer' (pid {writer.pid})" in capsys.readouterr().out
            assert not finding("warning", "is being written")(), "it is at work"
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGSTOP)
            text = eventually(finding("warning", "is being written"), within=20)
            assert text.startswith("key cdcdcdcdcdcd… of the store 'images' is being written since ")
            assert f"by 'slow writer' (pid {writer.pid}, stopped)" in text


def test_store_full_of_evictable_values_is_idle() -> None:
    with keeping_pool("images", max_blocks=4) as pool:
        for number in range(4):
            put(pool, number, 100)
        assert levels() <= {"idle"}
        leases = [store_of(pool).get(key(number)) for number in range(4)]
        assert finding("note", "the pool 'images' is nearly exhausted", "4 of 4 blocks")()
        for lease in leases:
            lease.release()
        del lease, leases


# ── where it looks ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_inspect_changes_nothing_in_a_segment() -> None:
    ring = penstock.Ring(name="x")
    with closing(ring.open_sender(name="a"), ring.open_receiver(name="b")):
        before = ring.snapshot()
        observed = inspect.look(os.getpid())
        after = ring.snapshot()
    for item in (before, after):
        item.pop("age_ns")
    assert before == after
    assert [segment["name"] for segment in observed["segments"]] == ["x"]
    assert observed["segments"][0]["held_by"] == [{"pid": os.getpid(), "fd": ring.fd}]


def test_idle_processes_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = penstock.Ring(name="first"), penstock.Ring(name="second")
    ends = first.open_sender(name="us"), second.open_sender(name="us")
    with (
        closing(*ends),
        spawn(receive_until_killed, first, "one reader"),
        spawn(receive_until_killed, second, "another reader"),
    ):
        eventually(lambda: finding("idle", "'one reader'")() and finding("idle", "'another reader'")(), within=20)
        snapshot = inspect.look(os.getpid())
        assert len([entry for entry in snapshot["verdict"] if entry["level"] == "idle"]) == 2  # --json has each
        inspect.show(snapshot)
    lines = capsys.readouterr().out.splitlines()
    idle = [line for line in lines if line.strip().startswith("idle:")]
    assert sorted(idle[0].partition("idle: ")[2].removesuffix(" wait for work").split(", ")) == [
        "'another reader'",
        "'one reader'",
    ]
    assert len(idle) == 1
    table = next(table for table in inspect.tables_of(snapshot) if table.title == "processes")
    assert lines[0] == f"no process is stuck: 2 segments, {len(table.rows)} processes"


def test_a_process_without_segments_is_not_counted_in_the_headline(capsys: pytest.CaptureFixture[str]) -> None:
    with penstock.Ring(name="alone"), subprocess.Popen(["sleep", "60"]) as helper:
        try:
            snapshot = inspect.look(os.getpid())
            assert helper.pid in {process["pid"] for process in snapshot["processes"]}
            inspect.show(snapshot)
        finally:
            helper.kill()
    assert capsys.readouterr().out.startswith("no process is stuck: 1 segment, 1 process\n")


def test_a_peer_without_a_name_is_shown_by_its_name_in_another_segment() -> None:
    """Users of a store join without a name; the same process has one in a channel."""
    with penstock.Store(1 << 20, name="values") as store, penstock.Ring(name="x") as ring:
        with ring.open_sender(name="core 7"), store.put(np.zeros(50_000, np.uint8)):
            snapshot = inspect.look(os.getpid())
            (result,) = (segment for segment in snapshot["segments"] if segment["name"] == "values")
            assert [peer["name"] for peer in result["peers"]] == ["core 7"]
            assert [holder["name"] for holder in result["pool"][0]["holders"]] == ["core 7"]
            assert ["core 7"] in [process["peers"] for process in snapshot["processes"]]


def test_a_ticket_shows_its_own_segment_alone() -> None:
    item, other = penstock.Ring(name="one"), penstock.Ring(name="other")
    observed = inspect.look(item.ticket)
    assert [segment["name"] for segment in observed["segments"] if segment["asked"]] == ["one"]
    assert {table.title.partition(":")[0] for table in inspect.tables_of(observed) if "old" in table.title} == {
        "ring 'one'"
    }
    del other


def test_memory_of_a_ticket_is_that_of_its_segment_alone() -> None:
    ring, pages = penstock.Ring(name="one"), os.memfd_create("penstock kv pages: 0.0")
    os.write(pages, bytes(4096))
    assert set(inspect.look(os.getpid())["memory"]) == {"channels", "kv pages"}
    assert inspect.look(ring.ticket)["memory"] == {"channels": ring.segment_nbytes}
    os.close(pages)


def test_descendants_of_a_process_are_inspected_too() -> None:
    ring = penstock.Ring(name="mine")
    with spawn(receive_until_killed, ring, "child") as child:

        def has_found_it() -> bool:
            result = inspect.look(os.getpid())["processes"]
            return [item["peers"] for item in result if item["pid"] == child.pid] == [["child"]]

        eventually(has_found_it, within=20)
        assert child.pid is not None
        assert inspect.look(child.pid)["segments"][0]["name"] == "mine"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("999999999", "there is no process 999999999"),
        ("penstock:999999999:1:2:3:a", "there is no process 999999999"),
        (f"penstock:{os.getpid()}:1:2:3:a", "is gone: the number belongs to another one by now"),
    ],
)
def test_missing_process_is_one_line_and_status_two(
    target: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", target]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_a_process_without_segments_is_one_line_and_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    with spawn(time.sleep, 60) as process:
        assert cli.main(["inspect", str(process.pid)]) == 2
    output = capsys.readouterr().err
    assert "has no segment of penstock open" in output
    assert output.count("\n") == 1


def test_a_ticket_whose_segment_is_closed_is_one_line_and_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    other = penstock.Ring(name="other")
    ticket = str(penstock.Ring(name="gone").ticket)
    assert cli.main(["inspect", ticket]) == 2
    assert "has closed the segment" in capsys.readouterr().err
    del other


def test_nonsense_is_refused_with_status_two() -> None:
    for target in ("nonsense", "-1", "penstock:1:2", "1.5"):
        with pytest.raises(SystemExit) as refused:
            cli.main(["inspect", target])
        assert refused.value.code == 2


# ── how it is shown ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_json_has_the_segments_and_the_findings(capsys: pytest.CaptureFixture[str]) -> None:
    ring = penstock.Ring(name="x")
    with closing(ring.open_sender(name="a")):
        assert cli.main(["inspect", str(os.getpid()), "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert set(parsed) == {"target", "verdict", "processes", "segments", "memory", "unreadable"}
    assert parsed["segments"][0]["senders"][0]["name"] == "a"
    assert all(set(item) == {"level", "kind", "text", "pids"} for item in parsed["verdict"])


@pytest.mark.parametrize("has_rich", [True, False])
def test_inspect_shows_segments_with_and_without_rich(
    has_rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    ring = penstock.Ring(name="[red]x")
    with closing(ring.open_sender(name="[/b]a")), lowlevel.Pool.create(1 << 16, name="p", peer_name="holder") as pool:
        lease = pool.take(100)
        assert cli.main(["inspect", str(os.getpid())]) == 0
        lease.release()
        del lease
    shown = capsys.readouterr().out
    for words in ("no process is stuck", "ring '[red]x'", "[/b]a", "sender 0", "pool of 'p'", "holder", "100 B"):
        assert words in shown


class Step(msgspec.Struct, array_like=True):
    number: int


class Stop(msgspec.Struct, array_like=True):
    reason: str


def test_channel_of_messages_is_shown_with_their_classes(capsys: pytest.CaptureFixture[str]) -> None:
    ring, plain = penstock.Ring(Step | Stop, name="steps"), penstock.Ring(name="bytes")
    observed = inspect.look(os.getpid())
    assert {item["name"]: item.get("messages") for item in observed["segments"]} == {
        "steps": ["Step", "Stop"],
        "bytes": None,
    }
    inspect.show(observed)
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ring ")]
    assert [title.partition(", carries ")[2] for title in titles] == ["", "Step, Stop"]
    with mmap.mmap(ring.fd, min(os.fstat(ring.fd).st_size, 8 << 20)) as memory:
        at = memory.find(b'"messages"')
        assert at > 0, "the description lies further behind"
        memory[at + 1] = 0
    (broken,) = (item for item in inspect.look(os.getpid())["segments"] if item["name"] == "steps")
    assert broken["messages"] == []
    assert "has no description of its messages" in broken["messages_error"]
    inspect.show(inspect.look(os.getpid()))
    assert "carries messages of which nothing is known" in capsys.readouterr().out
    del plain


def test_numbers_are_shown_in_readable_units() -> None:
    assert [in_units(n) for n in (0, 1023, 1024, 5 << 20, -1)] == ["0 B", "1023 B", "1.0 KiB", "5.0 MiB", "16384 PiB"]
    assert [in_seconds(n) for n in (0, 999, 1500, 999_900, 3.2e9, 12e9, 90e9, 7200e9)] == [
        "0 µs", "0.999 µs", "1.5 µs", "1000 µs", "3.2 s", "12 s", "1.5 min", "2.0 h",
    ]  # fmt: skip


# ── segments that lie ────────────────────────────────────────────────────────────────────────────────────────────────
def test_inspect_shows_a_segment_of_garbage(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Anybody in a segment may write anything into its control part; the looker must neither crash nor believe it."""
    chance = random.Random(seed)
    for _ in range(60):
        channels = [
            penstock.Ring(name="ring", capacity=4096, long_records=SMALL_POOL),
            penstock.Broadcast(receivers=3, name="broadcast", capacity=4096, long_records=SMALL_POOL),
            penstock.Inbox(senders=3, name="inbox", capacity=4096, long_records=SMALL_POOL),
        ]
        pool = lowlevel.Pool.create(1 << 16, name="pool", max_blocks=16, max_peers=8)
        keeping = keeping_pool("store")
        shape_ends = 4096  # the header before it is checked once, and refused if it is impossible
        for fd in [*(channel.fd for channel in channels), pool.fd, keeping.fd]:
            with mmap.mmap(fd, min(os.fstat(fd).st_size, 96 << 10)) as memory:
                for _ in range(chance.choice((1, 30, 3000))):
                    at = chance.randrange(shape_ends, len(memory) - 8) // 4 * 4
                    word = chance.choice((0, 1, 2**63, 2**64 - 1, chance.getrandbits(64), os.getpid() << 38 | 1 << 60))
                    memory[at : at + 8] = word.to_bytes(8, "little")
        observed = inspect.look(os.getpid())
        assert len(observed["segments"]) == 5
        json.dumps(observed)
        inspect.show(observed)
        capsys.readouterr()


def test_control_characters_of_names_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ring = penstock.Ring(name="x")
    with closing(ring.open_sender(name="evil")), mmap.mmap(ring.fd, 16 << 10) as memory:
        at = memory.find(b"evil")
        memory[at : at + 4] = b"\x1b[2\xff"
        assert cli.main(["inspect", str(os.getpid())]) == 0
        assert inspect.look(os.getpid())["segments"][0]["senders"][0]["name"].startswith("?[2")
    assert "\x1b" not in capsys.readouterr().out


def test_a_segment_of_another_build_is_named_and_does_not_hide_the_others() -> None:
    ring, other = penstock.Ring(name="fine"), penstock.Ring(name="other")
    with mmap.mmap(other.fd, 4096) as memory:
        memory[8] ^= 0xFF  # the version
        observed = inspect.look(os.getpid())
        assert [segment["name"] for segment in observed["segments"]] == ["fine"]
        assert "both sides need the same build" in observed["unreadable"][0]
    del ring


# ── the rest of the command ──────────────────────────────────────────────────────────────────────────────────────────
def test_inspect_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_exception_of_an_end_is_in_the_table() -> None:
    with penstock.Ring(name="failing") as ring:
        with contextlib.suppress(RuntimeError), ring.open_sender(name="worker 0"):
            raise RuntimeError("no such layer")
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "inspect", str(os.getpid())], capture_output=True, text=True, timeout=60
        )
    assert "dead: RuntimeError: no such layer" in done.stdout, done.stdout + done.stderr


def test_inspect_of_queues_of_bytes_does_not_import_numpy() -> None:
    with penstock.Broadcast(receivers=1, name="steps"):
        command = [sys.executable, "-X", "importtime", "-m", "penstock", "inspect", str(os.getpid())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "broadcast 'steps'" in done.stdout
    assert "penstock.tools.inspect" in done.stderr and "numpy" not in done.stderr
