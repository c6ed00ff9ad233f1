"""What the native modules hold is gone when the interpreter ends: nanobind counts its objects then."""

import os
import subprocess
import sys

# Nothing is closed, and globals and a cycle hold all of it to the end.
PROGRAM = """
import numpy as np

import penstock
from penstock import lowlevel
from penstock.engine._native import BlockCache, PrefixHasher

store = penstock.Store(1 << 20)
stored = store.put({"pixels": np.ones((2, 3), np.float32), "sizes": [2, 3]}, key=bytes(32))
value = stored.value()
loans = [store.loan(key, np.zeros(4, np.float32)) for key in (bytes([1]) * 32, None)]
being_made = [loan.value() for loan in loans]
scope = penstock.Scope(store, inline_nbytes=100)
handles = [scope.put(np.zeros(size)) for size in (1, 1000)]
opened = [handle.open(store) for handle in handles]
seen = [lease.value() for lease in opened]
pool = lowlevel.Pool.create(1 << 20)
lease = pool.take(4096)
view = memoryview(lease)
ring = penstock.Ring()
sender, receiver = ring.open_sender(), ring.open_receiver()
sender.send(b"x" * 1000)
record = receiver.receive_view()
buffers = penstock.Ring(penstock.Buffer)
to, of = buffers.open_sender(), buffers.open_receiver()
to.send(penstock.Buffer(b"x" * 1000))
buffer = of.receive()
hasher = PrefixHasher(BlockCache(4), 2, 4)


class Cycle:
    pass


cycle = Cycle()
cycle.held = [cycle, stored, value, loans, being_made, lease, view, sender, receiver, record, hasher]
cycle.more = [scope, handles, opened, seen, to, of, buffer]
"""

DAEMON = """
import threading

from penstock import lowlevel

pool, is_taken = lowlevel.Pool.create(1 << 20), threading.Event()


def hold():
    lease = pool.take(4096)
    is_taken.set()
    threading.Event().wait()


threading.Thread(target=hold, daemon=True).start()
is_taken.wait()
"""


def stderr_of(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_native_objects_are_freed_when_a_program_ends_without_close() -> None:
    assert stderr_of(PROGRAM, PENSTOCK_LEAK_WARNINGS="1") == ""


def test_leak_warnings_are_shown_only_when_enabled() -> None:
    assert "leaked instance" in stderr_of(DAEMON, PENSTOCK_LEAK_WARNINGS="1")
    assert stderr_of(DAEMON) == ""
