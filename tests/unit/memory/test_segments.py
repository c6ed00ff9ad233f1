"""Segments: anonymous, claimed, sealed; the ways to other processes, and refused processes."""

import fcntl
import functools
import gc
import multiprocessing
import os
import re
import resource
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import penstock
from penstock import LayoutMismatch, LongRecords, MemoryExhausted, MemoryOptions, Ticket, _native, lowlevel
from penstock.channel import Channel
from penstock.lowlevel import Segment
from tests.conftest import descriptors, eventually
from tests.support.control_groups import memory_group
from tests.support.processes import DYING, IS_SANITIZED, forked, program, running, unshared

NOBODY = 65534
F_GET_SEALS, F_ADD_SEALS = 1034, 1033
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW = 1, 2, 4
MIB = 1 << 20


def write(segment: Segment, data: bytes) -> None:
    segment.view(writable=True)[: len(data)] = data


# ── what a segment is ────────────────────────────────────────────────────────────────────────────────────────────────
def test_segment_has_its_size_and_zero_bytes() -> None:
    for nbytes in (1, 100, 4096, 4097, 1_000_000):
        segment = Segment.create(nbytes, name="plain")
        assert (segment.nbytes, segment.name, segment.page_nbytes, segment.fallback) == (nbytes, "plain", 4096, "")
        assert segment.segment_nbytes >= nbytes
        assert bytes(segment.view()) == bytes(nbytes)


def test_written_bytes_appear_in_each_view() -> None:
    segment = Segment.create(100)
    reading = segment.view()
    write(segment, b"hello")
    assert bytes(reading[:5]) == b"hello"
    assert reading.readonly
    with pytest.raises(TypeError):
        reading[0] = 1


def test_a_view_keeps_the_mapping() -> None:
    segment = Segment.create(100)
    write(segment, b"kept")
    view = segment.view()[:4]
    del segment
    gc.collect()
    assert bytes(view) == b"kept"


def test_the_pages_are_claimed_at_creation() -> None:
    segment = Segment.create(8 * MIB)
    assert os.fstat(segment.fd).st_blocks * 512 >= 8 * MIB


def test_the_size_is_sealed() -> None:
    segment = Segment.create(4096)
    seals = fcntl.fcntl(segment.fd, F_GET_SEALS)
    assert seals & (SEAL_SEAL | SEAL_SHRINK | SEAL_GROW) == SEAL_SEAL | SEAL_SHRINK | SEAL_GROW
    size = os.fstat(segment.fd).st_size
    for nbytes in (0, 1, size - 4096, size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, nbytes)
    with pytest.raises(OSError):
        os.posix_fallocate(segment.fd, size, 4096)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, F_ADD_SEALS, 8)
    assert os.fstat(segment.fd).st_size == size


def test_segment_opens_only_for_its_user_and_is_not_inherited() -> None:
    segment = Segment.create(4096)
    assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(segment.fd)


def names_in(*folders: str) -> set[str]:
    names = set()
    for folder in folders:
        for base, below, files in os.walk(folder, onerror=lambda _: None):
            names |= {os.path.join(base, name) for name in (*below, *files)}
    return names


def test_channels_and_pools_create_no_files_and_no_sockets() -> None:
    def sockets() -> list[str]:
        return [target for target in descriptors() if "socket:" in target]

    named, open_sockets = names_in("/dev/shm"), sockets()
    in_tmp = set(os.listdir("/tmp"))
    pool = lowlevel.Pool.create(4096, name="nameless")
    with pool.take(10), penstock.Ring(name="nameless") as channel:
        receiver = channel.open_async_receiver()
        with channel.open_sender() as sender:
            sender.send(bytes(200_000))
        new = names_in("/dev/shm") - named
        assert not {name for name in new if "penstock" in name or "nameless" in name}
        assert not {name for name in set(os.listdir("/tmp")) - in_tmp if "penstock" in name or "nameless" in name}
        assert sockets() == open_sockets
        receiver.close()


def test_an_unrelated_process_attaches_by_ticket() -> None:
    segment = Segment.create(5000, name="given")
    write(segment, b"hello")
    with program(READ, segment.ticket) as other:
        assert other.hear() == "hello given 5000"
        assert other.end() == 0
    assert bytes(segment.view()[:5]) == b"there"


# ── how it reaches others ────────────────────────────────────────────────────────────────────────────────────────────
READ = """
segment = lowlevel.Segment.attach(sys.argv[1])
say(bytes(segment.view()[:5]).decode(), segment.name, segment.nbytes)
segment.view(writable=True)[:5] = b"there"
"""


def test_a_ticket_survives_being_text() -> None:
    segment = Segment.create(10)
    ticket = segment.ticket
    assert re.fullmatch(r"penstock:\d+:\d+:\d+:\d+:[0-9a-f]+", str(ticket))
    assert Ticket.parse(str(ticket)) == Ticket.parse(f"  {ticket}\n") == ticket
    assert ticket.pid == os.getpid()
    assert isinstance(penstock.attach(str(ticket)), Segment)
    assert isinstance(penstock.attach(ticket), Segment)


def test_a_program_inherits_the_descriptor() -> None:
    segment = Segment.create(5000, name="inherited")
    write(segment, b"hello")
    source = """
        segment = penstock.attach(int(sys.argv[1]))
        say(bytes(segment.view()[:5]).decode(), segment.name, os.get_inheritable(segment.fd))
    """
    with program(source, segment.fd, pass_fds=[segment.fd]) as other:
        assert other.hear() == "hello inherited False"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_ring_pool_and_segment_reach_a_multiprocessing_child(method: str, tmp_path: Path) -> None:
    script = """
import multiprocessing, sys, warnings
import penstock
from penstock import lowlevel

def work(ring, pool, segment, said):
    assert bytes(segment.view()[:5]) == b"hello"
    with pool.take(10) as lease, ring.open_sender(name="child") as sender:
        sender.send(bytes(segment.view()[:5]) + said.encode())

if __name__ == "__main__":
    ring, pool, segment = penstock.Ring(), lowlevel.Pool.create(4096), lowlevel.Segment.create(10)
    segment.view(writable=True)[:5] = b"hello"
    with ring.open_receiver() as receiver:
        method = sys.argv[1]
        child = multiprocessing.get_context(method).Process(target=work, args=(ring, pool, segment, method))
        child.start()
        print(receiver.receive(timeout=20).decode(), flush=True)
        child.join()
        print(child.exitcode, flush=True)
"""
    path = tmp_path / "main.py"
    path.write_text(script)
    with running([sys.executable, "-W", "error", str(path), method]) as other:
        assert (other.hear(), other.hear()) == (f"hello{method}", "0")
        assert other.end() == 0
        assert other.errors() == ""  # no word from a resource tracker


@pytest.mark.parametrize("make", [lambda: Segment.create(10), lambda: lowlevel.Pool.create(10), penstock.Ring])
def test_pickling_is_refused_except_while_a_process_is_being_spawned(make: object) -> None:
    import copy
    import pickle

    shared = make()  # type: ignore[operator]
    for copier in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="only while a process is being spawned: give others its ticket"):
            copier(shared)
    left, right = multiprocessing.Pipe()
    with left, right, pytest.raises(TypeError, match="only while a process is being spawned"):
        left.send(shared)


def test_ends_and_leases_are_not_pickled() -> None:
    import pickle

    with penstock.Ring() as ring, ring.open_sender() as sender, ring.open_receiver() as receiver:
        for unique in (sender, receiver):
            with pytest.raises(TypeError):
                pickle.dumps(unique)


def test_kernel_frees_a_segment_with_its_last_holder() -> None:
    source = """
        segment = lowlevel.Segment.create(64 << 20)
        say(segment.ticket)
        hear()
    """

    def shared_memory() -> int:
        return int(re.search(r"Shmem:\s+(\d+)", Path("/proc/meminfo").read_text()).group(1)) * 1024  # type: ignore[union-attr]

    with program(source) as other:
        ticket = Ticket.parse(other.hear())
        segment = penstock.attach(ticket)
        other.kill()
        other.process.wait()
        with pytest.raises(LayoutMismatch, match=f"the owner of the ticket, pid {other.pid}, is gone"):
            penstock.attach(ticket)
        held = shared_memory()
        assert isinstance(segment, Segment)
        assert segment.nbytes == 64 << 20
        del segment
        gc.collect()
        eventually(lambda: shared_memory() < held - (32 << 20))


# ── refused processes ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_another_user_is_refused() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    segment = Segment.create(4096)
    fd = os.dup(segment.fd)
    ticket = segment.ticket

    def attach_as_nobody() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with pytest.raises((LayoutMismatch, OSError)) as raised:
            penstock.attach(ticket)
        assert "only its own user can attach" in str(raised.value)
        with pytest.raises(LayoutMismatch, match=f"it belongs to user 0, this process is user {NOBODY}"):
            penstock.attach(fd)

    assert forked(attach_as_nobody) == 0
    os.close(fd)


def test_root_cannot_attach_a_segment_of_another_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    source = f"""
        os.setgid({NOBODY})
        os.setuid({NOBODY})
        segment = lowlevel.Segment.create(4096)
        say(segment.ticket)
        hear()
    """
    with program(source) as other:
        ticket = other.hear()
        with pytest.raises(LayoutMismatch, match=f"it belongs to user {NOBODY}, this process is user 0"):
            penstock.attach(ticket)


def test_another_pid_namespace_is_refused() -> None:
    segment = Segment.create(4096)
    attach = f"import penstock; penstock.attach({segment.fd})"
    command = ("--pid", "--fork", "--mount-proc", sys.executable, "-c", attach)
    ended = unshared(*command, pass_fds=[segment.fd])
    assert "LayoutMismatch" in ended.stderr
    assert "another pid namespace" in ended.stderr


@pytest.mark.parametrize("field", ["pid", "start", "fd", "inode", "nonce"])
def test_a_forged_ticket_is_refused_whatever_number_is_changed(field: str) -> None:
    segment = Segment.create(4096)
    good = segment.ticket
    for value in (0, -1, 1, 99999999, 2**31, 2**32, 2**63, 2**64):
        forged = msgspec.structs.replace(good, **{field: value})
        for where in (forged, str(forged)):
            with pytest.raises((LayoutMismatch, PermissionError)):
                penstock.attach(where)
    penstock.attach(good)


@pytest.mark.parametrize(
    "text", ["", "x", "penstock", "penstock:1:2:3", "penstock:1:2:3:4:5:6", "penstock:a:b:c:d:e", "shm:1:2:3:4:5", "\0"]
)
def test_malformed_ticket_is_refused(text: str) -> None:
    with pytest.raises(LayoutMismatch, match="expected a ticket, penstock:PID:START:FD:INODE:NONCE, got "):
        penstock.attach(text)


def test_ticket_is_stale_when_its_descriptor_was_reused() -> None:
    first = Segment.create(4096)
    ticket, number = first.ticket, first.fd
    del first
    gc.collect()
    with pytest.raises(LayoutMismatch, match="has closed it"):
        penstock.attach(ticket)
    second = Segment.create(4096)
    assert second.fd == number
    with pytest.raises(LayoutMismatch, match="has closed it: inode"):
        penstock.attach(ticket)


def test_a_ticket_with_the_nonce_of_another_is_refused() -> None:
    first, other = Segment.create(4096), Segment.create(4096)
    with pytest.raises(LayoutMismatch, match="the ticket is for another segment: nonce"):
        penstock.attach(msgspec.structs.replace(first.ticket, nonce=other.ticket.nonce))


def test_a_ticket_of_a_reused_pid_is_refused() -> None:
    segment = Segment.create(4096)
    with pytest.raises(LayoutMismatch, match=f"the owner of the ticket, pid {os.getpid()}, is gone"):
        penstock.attach(msgspec.structs.replace(segment.ticket, start=segment.ticket.start - 1))


def test_attach_refuses_another_kind_of_segment() -> None:
    segment, pool, ring = Segment.create(4096), lowlevel.Pool.create(4096), penstock.Ring()
    assert [type(penstock.attach(x.ticket)) for x in (segment, pool, ring)] == [Segment, lowlevel.Pool, penstock.Ring]
    for attach, wrong in (
        (Segment.attach, (pool, ring)),
        (lowlevel.Pool.attach, (segment, ring)),
        (functools.partial(penstock.attach, type=penstock.Buffer), (segment, pool)),
    ):
        for other in wrong:
            with pytest.raises(LayoutMismatch, match=r"expected a .*, got segment|expected a plain segment"):
                attach(other.ticket)


# ── foreign files ────────────────────────────────────────────────────────────────────────────────────────────────────
def memfd(data: bytes, seals: int = SEAL_SHRINK | SEAL_GROW) -> int:
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(fd, data)
    if seals:
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


def contents(shared: lowlevel.Segment | Channel) -> bytes:
    size = os.fstat(shared.fd).st_size
    return os.pread(shared.fd, min(size, 4 * MIB), 0)


def test_copy_of_a_segment_can_be_attached() -> None:
    data = contents(Segment.create(4096, name="copied"))
    assert penstock.attach(memfd(data)).name == "copied"


def test_a_foreign_file_is_refused_and_closed() -> None:
    data = contents(Segment.create(4096))
    reading, writing = os.pipe()
    foreign = [
        ("not sealed", memfd(data, 0)),
        ("not sealed", memfd(data, SEAL_SHRINK)),
        ("not sealed", os.open(sys.executable, os.O_RDONLY)),
        ("not sealed", reading),
        ("magic: expected 4b434f54534e4550, found", memfd(b"\x7fELF" + data[4:])),
        ("too short", memfd(data[:100])),
        (r"it has \d+ bytes and says \d+", memfd(data[:-4096])),
    ]
    for why, fd in foreign:
        with pytest.raises(LayoutMismatch, match=why):
            penstock.attach(fd)
        os.close(fd)
    os.close(writing)


def test_a_descriptor_that_is_not_open_is_an_os_error() -> None:
    for fd in (-1, 9999):
        with pytest.raises(OSError):
            penstock.attach(fd)


def test_another_version_or_build_is_refused_with_both() -> None:
    data = bytearray(contents(penstock.Ring(capacity=4096, long_records=LongRecords(pool_nbytes=4096))))
    version, fingerprint = struct.unpack_from("<II", data, 8)
    assert (version, fingerprint) == (_native.LAYOUT_VERSION, _native.LAYOUT_FINGERPRINT)
    struct.pack_into("<I", data, 8, version + 1)
    with pytest.raises(LayoutMismatch, match=rf"layout: expected version {version} .*, found version {version + 1}"):
        penstock.attach(forged := memfd(bytes(data)))
    os.close(forged)
    struct.pack_into("<II", data, 8, version, fingerprint ^ 1)
    with pytest.raises(LayoutMismatch, match=rf"\({fingerprint:08x}\), found .* \({fingerprint ^ 1:08x}\).*same build"):
        penstock.attach(forged := memfd(bytes(data)))
    os.close(forged)


def test_garbage_in_a_ring_raises_corrupt_record(seed: int) -> None:
    source = """
        import mmap, random
        choose = random.Random(int(sys.argv[1]))
        kinds = {}
        long_records = penstock.LongRecords(pool_nbytes=1 << 16, max_records=4)
        for _ in range(150):
            channel = penstock.Ring(capacity=4096, long_records=long_records)
            with channel.open_sender() as sender, channel.open_receiver() as receiver:
                for nbytes in (10, 500, 2000):
                    sender.send(bytes(nbytes))
                size = channel.snapshot()["nbytes"]  # without the part for events, behind the pool
                with mmap.mmap(channel.fd, size) as memory:
                    at = size - (1 << 16) - 4096
                    for _ in range(choose.choice([1, 3, 30])):
                        memory[at + choose.randrange(1024)] = choose.randrange(256)
                for _ in range(4):
                    try:
                        word = len(receiver.receive(timeout=0))
                    except penstock.PenstockError as error:
                        word = type(error).__name__
                    kinds[word] = kinds.get(word, 0) + 1
        say(kinds.get("CorruptRecord", 0) > 0, sorted(map(str, kinds)))
    """
    with program(source, seed) as other:
        assert other.hear().startswith("True")


# ── wishes about memory ──────────────────────────────────────────────────────────────────────────────────────────────
def free_huge_pages() -> int:
    path = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return int(path.read_text()) if path.exists() else 0


def test_fallback_names_missing_huge_pages() -> None:
    segment = Segment.create(3 * MIB, memory=MemoryOptions(huge_pages=True))
    if segment.fallback:
        assert segment.fallback == "ordinary pages: not enough huge pages"
        assert segment.page_nbytes == 4096
    else:
        assert segment.page_nbytes == 2 * MIB
    write(segment, b"either way")
    assert bytes(segment.view()[:10]) == b"either way"


def test_required_huge_pages_raise_with_advice_when_missing() -> None:
    if free_huge_pages() >= 4:
        assert Segment.create(3 * MIB, memory=MemoryOptions(huge_pages="require")).page_nbytes == 2 * MIB
    else:
        with pytest.raises(MemoryExhausted, match=r"raise vm.nr_hugepages or leave huge_pages out") as raised:
            Segment.create(3 * MIB, name="huge", memory=MemoryOptions(huge_pages="require"))
        assert raised.value.requested >= 3 * MIB
        assert raised.value.free < 3 * MIB
        with pytest.raises(MemoryExhausted):
            penstock.Ring(memory=MemoryOptions(huge_pages="require"), long_records=LongRecords(pool_nbytes=MIB))
        with pytest.raises(MemoryExhausted):
            lowlevel.Pool.create(MIB, memory=MemoryOptions(huge_pages="require"))


def test_fallback_names_a_missing_numa_node() -> None:
    here = Segment.create(4096, memory=MemoryOptions(numa_node=0))
    assert here.fallback in ("", "no NUMA node 0")  # "": or a kernel without NUMA
    far = Segment.create(4096, memory=MemoryOptions(numa_node=1000))
    assert far.fallback == "no NUMA node 1000"
    write(far, b"works")


def test_required_numa_node_raises_when_missing() -> None:
    with pytest.raises(ValueError, match="this machine has no NUMA node 1000 that this process may use"):
        Segment.create(4096, memory=MemoryOptions(numa_node=1000, numa_required=True))


# ── too little memory ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(IS_SANITIZED, reason="a sanitizer's own memory counts against the limit")
def test_a_limit_on_address_space_is_an_error_with_both_numbers() -> None:
    def create() -> None:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        room = max(256 * MIB, mapped // 4)  # a channel maps an eighth of the limit
        limit = mapped + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for _ in range(2):
            with pytest.raises(MemoryExhausted, match="RLIMIT_AS is ") as raised:
                Segment.create(room + 44 * MIB)
            assert raised.value.requested >= room + 44 * MIB
            assert raised.value.free <= limit
        write(Segment.create(MIB), b"still works")
        with penstock.Ring() as ring, ring.open_sender() as sender, ring.open_receiver() as receiver:
            sender.send(bytes(200_000))
            assert len(receiver.receive(timeout=1)) == 200_000

    assert forked(create) == 0


@pytest.mark.skipif(IS_SANITIZED, reason="a sanitizer's own memory counts against the limit")
def test_a_writable_view_that_cannot_be_mapped_is_an_error() -> None:
    def view() -> None:
        segment = Segment.create(64 * MIB)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        limit = mapped + 32 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with pytest.raises(MemoryExhausted, match=r"mmap: Cannot allocate memory \(RLIMIT_AS is "):
            segment.view(writable=True)
        assert len(segment.view()) == 64 * MIB

    assert forked(view) == 0


def test_a_limit_on_file_size_is_an_error_with_both_numbers() -> None:
    def create() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        with pytest.raises(MemoryExhausted, match="RLIMIT_FSIZE is 1048576") as raised:
            Segment.create(2 * MIB, name="long")
        assert raised.value.requested >= 2 * MIB
        assert raised.value.free == MIB
        Segment.create(MIB // 2)

    assert forked(create) == 0


def test_full_dev_shm_is_neither_needed_nor_changed() -> None:
    fill = "mount -t tmpfs -o size=1m tmpfs /dev/shm && head -c 2000000 /dev/zero >/dev/shm/foreign 2>/dev/null"
    work = """
import os, penstock
from penstock import lowlevel
before = os.stat("/dev/shm/foreign").st_size, os.statvfs("/dev/shm").f_bfree
pool = lowlevel.Pool.create(8 << 20)
with pool.take(8 << 20) as lease, penstock.Ring() as ring, ring.open_sender() as sender:
    memoryview(lease)[:] = bytes(8 << 20)
    sender.send(bytes(4 << 20))
    with ring.open_receiver() as receiver:
        print(len(receiver.receive(timeout=5)), before[1], flush=True)
assert before == (os.stat("/dev/shm/foreign").st_size, os.statvfs("/dev/shm").f_bfree)
assert os.listdir("/dev/shm") == ["foreign"]
"""
    script = f"{fill}; test -s /dev/shm/foreign && exec {sys.executable} -c '{work}'"
    ended = unshared("--mount", "sh", "-c", script)
    assert (ended.stdout, ended.stderr, ended.returncode) == (f"{4 << 20} 0\n", "", 0)


def test_control_group_limit_is_an_error_with_both_numbers_not_a_kill() -> None:
    source = """
        with open(sys.argv[1], "w") as group:
            group.write(str(os.getpid()))
        mib = 1 << 20
        for create in (lowlevel.Segment.create, lowlevel.Pool.create):
            try:
                create(200 * mib)
                say("created")
            except penstock.MemoryExhausted as error:
                say("its control group" in str(error), error.requested >= 200 * mib, 0 < error.free < 128 * mib)
        some = lowlevel.Segment.create(8 * mib)
        some.view(writable=True)[:] = bytes(8 * mib)
        with penstock.Ring() as ring, ring.open_sender() as sender, ring.open_receiver() as receiver:
            held, count = [], 0
            try:
                while True:
                    sender.send(bytes(4 * mib), timeout=5)
                    held.append(receiver.receive_view(timeout=5))
            except penstock.MemoryExhausted as error:
                say("its control group" in str(error), 2 <= len(held) < 32, error.requested >= 4 * mib)
            held.clear()
            sender.send(b"and on")
            say(receiver.receive(timeout=5).decode())
            sender.send(bytes(4 * mib), timeout=5)
            say(len(receiver.receive(timeout=5)))
    """
    with memory_group(128 * MIB) as group, program(source, group / "cgroup.procs") as other:
        assert [other.hear() for _ in range(5)] == ["True True True"] * 3 + ["and on", str(4 * MIB)]
        assert other.end() == 0


# ── what is not in the package ───────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("attach", [penstock.attach, Segment.attach, lowlevel.Pool.attach, penstock.Store.attach])
def test_refused_descriptor_stays_open(attach: Callable[[int], object]) -> None:
    ring = penstock.Ring()
    reading, writing = os.pipe()
    forged = os.memfd_create("penstock:forged")
    refused = [reading, writing, forged] + ([os.dup(ring.fd)] if attach is not penstock.attach else [])
    before = len(os.listdir("/proc/self/fd"))
    for fd in refused:
        with pytest.raises((LayoutMismatch, OSError)):
            attach(fd)
        os.fstat(fd)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in refused:
        os.close(fd)


def test_accepted_descriptor_is_owned_by_the_segment() -> None:
    ring = penstock.Ring()
    fd = os.dup(ring.fd)
    penstock.attach(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_writing_through_a_read_only_view_kills_the_writer() -> None:
    segment = Segment.create(4096)
    write(segment, b"whole")
    source = """
        import ctypes, numpy
        segment = penstock.attach(sys.argv[1])
        ctypes.memset(numpy.frombuffer(segment.view(), numpy.uint8).ctypes.data, 0, 1)
    """
    with program(source, segment.ticket, env=DYING) as other:
        assert other.process.wait() == -11
    assert bytes(segment.view()[:5]) == b"whole"
