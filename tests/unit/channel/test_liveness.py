"""Liveness: a system call that fails is no evidence of a death. What stays unknown keeps what it holds."""

import errno
import os
import re
import resource
import signal
import sys
import textwrap

import pytest

from penstock import _native
from penstock.lowlevel import Pool
from tests.conftest import eventually
from tests.support.processes import DYING, IS_SANITIZED, Program, program, unshared

MIB = 1 << 20

HOLDER = """
pool = lowlevel.Pool.attach(sys.argv[1], peer_name="holder")
lease = pool.take(1 << 20)
with memoryview(lease) as view:
    view[:] = b"A" * len(view)
say("holds")
hear()
with memoryview(lease) as view:
    say("intact" if bytes(view) == b"A" * len(view) else "changed")
pool.take(64).release()
say("takes")
hear()
"""

needs_descriptors = pytest.mark.skipif(IS_SANITIZED, reason="the sanitizer asks of an address through a pipe")

# fill() leaves no descriptor free, but for so many; empty() gives them back.
EXHAUSTED = """
hogs = []
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def fill(but=0):
    with contextlib.suppress(OSError):
        while True:
            hogs.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(but):
        os.close(hogs.pop())

def empty():
    while hogs:
        os.close(hogs.pop())

def states():
    return {peer.name: peer.state for peer in pool.peers()}
"""

# deny() makes a system call fail from now on. The numbers are those of x86-64 and aarch64.
DENYING = """
import ctypes, errno, struct

def deny(number, error):
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filters", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Program(len(code), ctypes.addressof(filters))), 0, 0) == 0

PIDFD_OPEN = 434
"""


def require_intact(holder: Program) -> None:
    holder.say("look")
    assert (holder.hear(), holder.hear()) == ("intact", "takes")


def code(*parts: str) -> str:
    return "".join(textwrap.dedent(part) for part in parts)


@needs_descriptors
def test_peer_that_cannot_be_watched_keeps_its_blocks() -> None:
    source = """
        pool = lowlevel.Pool.attach(sys.argv[1], peer_name="exhausted")
        pool.join()
        fill()
        say("full")
        hear()
        time.sleep(0.3)  # several times as long as until the next look
        leases = []
        with contextlib.suppress(penstock.MemoryExhausted):
            while True:
                leases.append(pool.take(1 << 18))
                with memoryview(leases[-1]) as view:
                    view[:] = b"B" * len(view)
        say(states()["holder"], len(leases))
        hear()
        empty()
        say("empty")
        hear()
        wait_for(lambda: states()["holder"] == "dead")
        say("dead")
        hear()
    """
    pool = Pool.create(2 * MIB + 4096)
    with program(code(EXHAUSTED, source), pool.ticket) as exhausted:
        assert exhausted.hear() == "full"
        with program(HOLDER, pool.ticket, env=DYING) as holder:
            assert holder.hear() == "holds"
            exhausted.say("take all")
            assert exhausted.hear() == "unknown 4"  # of the other MiB
            require_intact(holder)
            exhausted.say("empty")
            assert exhausted.hear() == "empty"
            assert pool.stats().blocks == 5
            holder.kill()
            exhausted.say("look")  # no other peer is there to see it
            assert exhausted.hear() == "dead"


@needs_descriptors
def test_lock_of_a_holder_in_unknown_state_is_not_taken_over() -> None:
    source = """
        pool = lowlevel.Pool.attach(sys.argv[1], peer_name="waiter")
        pool.join()
        fill()
        say("full")
        hear()
        try:
            pool.take(64)
        except penstock.Timeout as error:
            say(error)
    """
    holder_source = """
        pool = lowlevel.Pool.attach(sys.argv[1], peer_name="holder")
        pool.join()
        penstock._native.arm_point("pool.locked", "stop", 1)
        pool.take(64)
        say("goes on")
        hear()
    """
    pool = Pool.create(MIB, name="locked")
    with program(code(EXHAUSTED, source), pool.ticket) as waiter:
        assert waiter.hear() == "full"
        with program(holder_source, pool.ticket) as holder:
            eventually(holder.is_stopped)
            waiter.say("take")
            assert re.fullmatch(
                rf"a lock of 'locked' is held by 'holder' \(pid {holder.pid}, not known to live: pidfd_open: "
                r"Too many open files \(RLIMIT_NOFILE is 128\): raise it\) for .* m?s",
                waiter.hear(),
            )
            holder.kill(signal.SIGCONT)
            assert holder.hear() == "goes on"


@needs_descriptors
def test_join_with_few_descriptors_works_or_leaves_nothing() -> None:
    source = """
        pool = lowlevel.Pool.attach(sys.argv[1], peer_name="guest")
        refused = 0
        for free in range(8):
            fill(but=free)
            before = len(hogs)
            try:
                pool.join()
                pool.close()
            except OSError as error:
                assert "Too many open files (RLIMIT_NOFILE is 128): raise it" in str(error), error
                refused += 1
            empty()
            pool = lowlevel.Pool.attach(sys.argv[1], peer_name="guest")
        first = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            fill(but=1)
            with contextlib.suppress(OSError):
                pool.join()
                say("joined")
            empty()
        say(refused, len(os.listdir("/proc/self/fd")) - first)
    """
    pool = Pool.create(MIB, name="guarded")
    pool.join("host")
    with program(code(EXHAUSTED, source), pool.ticket) as guest:
        refused, more = guest.hear().split()
        assert int(refused) >= 2
        assert more == "0"
        assert [peer.state for peer in pool.peers() if peer.name == "guest" and peer.state != "left"] == []


@pytest.mark.parametrize("name", ["EPERM", "ENOSYS", "EMFILE", "ENFILE", "ENOMEM"])
def test_a_process_that_may_not_open_a_pidfd_is_refused(name: str) -> None:
    source = """
        deny(PIDFD_OPEN, getattr(errno, sys.argv[2]))
        pool = lowlevel.Pool.attach(int(sys.argv[1]), peer_name="denied")
        try:
            pool.take(64)
        except OSError as error:
            say(error)
    """
    pool = Pool.create(MIB, name="guarded", peer_name="holder")
    with pool.take(MIB) as lease, memoryview(lease) as view:
        view[:4] = b"kept"
        with program(code(DENYING, source), pool.fd, name, pass_fds=[pool.fd]) as denied:
            text = denied.hear()
            number = getattr(errno, name)
            assert text.startswith("deaths of peers cannot be watched: pidfd_open: " + os.strerror(number))
        assert view[:4] == b"kept"
    assert [(peer.name, peer.state) for peer in pool.peers()] == [("holder", "live")]


@needs_descriptors
def test_unreadable_owner_of_a_ticket_is_not_reported_gone() -> None:
    source = """
        fill()
        try:
            penstock.attach(sys.argv[1])
        except OSError as error:
            say(error)
    """
    pool = Pool.create(MIB)
    with program(code(EXHAUSTED, source), pool.ticket) as other:
        assert other.hear() == (
            f"[Errno {errno.EMFILE}] the owner of the ticket, pid {os.getpid()}, cannot be found: pidfd_open: "
            "Too many open files (RLIMIT_NOFILE is 128): raise it"
        )


def test_another_time_namespace_is_refused() -> None:
    pool = Pool.create(MIB, peer_name="holder")
    pool.join()
    attach = f"from penstock import lowlevel; lowlevel.Pool.attach({pool.fd}).join()"
    command = ("--time", "--fork", "--boottime", "1000", sys.executable, "-c", attach)
    ended = unshared(*command, pass_fds=[pool.fd])
    assert "LayoutMismatch" in ended.stderr
    assert "another time namespace" in ended.stderr
    assert [peer.state for peer in pool.peers()] == ["live"]
    attach = f"import penstock; penstock.attach('{pool.ticket}')"
    ended = unshared("--time", "--fork", "--boottime", "1000", sys.executable, "-c", attach)
    assert f"pid {os.getpid()}, is gone, or lives in another pid or time namespace" in ended.stderr


def test_a_proc_of_another_pid_namespace_is_refused() -> None:
    join = "from penstock import lowlevel; lowlevel.Pool.create(4096).join()"
    ended = unshared("--pid", "--fork", sys.executable, "-c", join)
    assert "OSError: /proc shows another pid namespace: pid 1 here is" in ended.stderr


def test_process_without_a_spare_thread_is_refused_and_may_retry() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: it becomes a user for whom RLIMIT_NPROC counts")
    source = """
        most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        os.setresuid(65534, 65534, 65534)
        pool = lowlevel.Pool.create(4096)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, most))
        before = len(os.listdir("/proc/self/fd")), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        for _ in range(3):
            try:
                pool.join()
            except OSError as error:
                say(error)
        say(before == (len(os.listdir("/proc/self/fd")), signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        threads = len(os.listdir("/proc/self/task"))
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        pool.join()
        say(len(os.listdir("/proc/self/task")) - threads, [peer.state for peer in pool.peers()])
    """
    with program(source) as poor:
        for _ in range(3):
            assert poor.hear() == (
                f"[Errno {errno.EAGAIN}] deaths of peers cannot be watched: pthread_create: "
                "Resource temporarily unavailable "
                "(RLIMIT_NPROC is 1; pids.max of the control group counts too): raise it"
            )
        assert poor.hear() == "True"
        assert poor.hear() == "1 ['live']"


def test_a_process_is_opened_by_its_pid_and_start_or_known_to_be_gone() -> None:
    pid, start = _native.process_identity()
    fd = _native.open_process(pid, start)
    os.close(fd)
    assert _native.open_process(pid, start - 1) == -1
    assert _native.open_process(2**22 + 1, start) == -1
    assert _native.open_process(0, start) == -1
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd, limit[1]))
        with pytest.raises(OSError, match=rf"pid {pid}: pidfd_open: Too many open files \(RLIMIT_NOFILE is {fd}\)"):
            _native.open_process(pid, start)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
