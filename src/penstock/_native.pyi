"""
The native core of penstock: segments, pools, peers, channels. Use it through the package.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from typing_extensions import Buffer


LAYOUT_VERSION: int = 7

LAYOUT_FINGERPRINT: int = 450785746

MAX_PEERS: int = 128

MAX_RECEIVERS: int = 64

MAX_SENDERS: int = 64

MAX_BLOCKS: int = 65536

MAX_NBYTES: int = 17592186044416

MAX_SCHEMA_NBYTES: int = 1048576

MAX_NAME_NBYTES: int = 31

MAX_GRANULES: int = 32768

SEGMENT: int = 1

POOL: int = 2

CHANNEL: int = 3

RING: int = 1

BROADCAST: int = 2

INBOX: int = 3

POINTS: tuple = ...

def arm_point(name: str, action: str, countdown: int = 1, delay_us: int = 0) -> None:
    """
    For tests: what happens when this process passes the point for the countdown-th time.
    """

def memory_available() -> tuple[int, str]:
    """Bytes, and what limits them: a part of a sentence."""

def max_spin() -> tuple[int, str | None]:
    """
    Nanoseconds that a wait spins at most with latency="auto", and what limits them: a sentence.
    """

def total_memory() -> int: ...

def process_identity() -> tuple: ...

def start_ticks(pid: int) -> int:
    """
    Clock ticks since boot at which a process started. Raises OSError if that cannot be read.
    """

def open_process(pid: int, start: int) -> int:
    """
    A pidfd of the process with this pid and start time, which the caller closes; -1: it is gone. Raises OSError if that cannot be found out.
    """

def snapshot(fd: int) -> dict:
    """
    Everything a segment tells of itself, read-only, without joining it. Takes the descriptor over.
    """

def crc32c(data: Buffer, before: int = 0) -> int:
    """The CRC-32C of bytes; before: that of the bytes before them."""

def require_numbers(format: str) -> None:
    """
    Raises TypeError unless a buffer of this format holds bytes or numbers.
    """

def nothing() -> None:
    """Does nothing: what a call costs."""

class Segment:
    """One anonymous shared mapping: sized, its pages claimed, sealed."""

    @staticmethod
    def create(name: str, shape: dict, huge_nbytes: int = 0, huge_required: bool = False, numa_node: int = -1, numa_required: bool = False, prefault: bool = True, schema: bytes = ...) -> Segment: ...

    @staticmethod
    def adopt(fd: int, is_observer: bool = False) -> Segment:
        """
        Takes the descriptor over. An observer maps everything read-only, so it cannot join as a peer.
        """

    @staticmethod
    def attach(pid: int, start: int, fd: int, inode: int, nonce: int) -> Segment: ...

    def ticket(self) -> tuple: ...

    def bytes(self, is_writable: bool) -> Bytes: ...

    def mapping(self, is_writable: bool, is_made: bool = False) -> tuple[int, int] | None:
        """
        Where the data part is mapped in this process, and how long it is. is_made: mapped for it, if it is not.
        """

    @property
    def fd(self) -> int: ...

    @property
    def name(self, /) -> str: ...

    @property
    def nonce(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def claimed_nbytes(self) -> int: ...

    def claim_all(self) -> None:
        """
        Claims all pages of a pool that grows, as registering them with a device would.
        """

    @property
    def page_nbytes(self) -> int: ...

    @property
    def fallback(self) -> str: ...

    @property
    def pool_nbytes(self) -> int: ...

    @property
    def is_elsewhere(self) -> bool: ...

    @property
    def keeps(self) -> bool: ...

    @property
    def kind(self) -> int: ...

    @property
    def schema(self, /) -> Buffer: ...

    @property
    def style(self) -> int: ...

    @property
    def lanes(self) -> int: ...

    @property
    def receivers(self) -> int: ...

    @property
    def inline_limit(self) -> int: ...

class Bytes:
    pass

class BlockLease:
    """
    The right to touch some shared bytes, as an object that exports them. Released once; by itself with its last view.

    Examples:
        >>> pool = Pool.create(1 << 20)
        >>> with pool.take(5) as lease:
        ...     memoryview(lease)[:] = b'hello'
        ...     bytes(lease)
        b'hello'
    """

    def release(self) -> None: ...

    def __enter__(self) -> BlockLease: ...

    def __exit__(self, *args) -> None: ...

    def copy_into(self, buffer: Buffer, start: int = 0, nbytes: int | None = None) -> int:
        """
        Copies bytes of the lease into a writable buffer. A long copy lets other threads run Python.

        Args:
            buffer: contiguous, at least as long as what is copied.
            start: of the first byte to be copied.
            nbytes: to be copied; None: all from `start`.

        Returns:
            The number of bytes copied.

        Raises:
            ClosedError: the lease has been released.
            ValueError: the lease, or the buffer, is shorter.
            BufferError: the buffer is read-only.

        Examples:
            >>> pool = Pool.create(1 << 20)
            >>> with pool.take(5) as lease:
            ...     memoryview(lease)[:] = b'hello'
            ...     part = bytearray(3)
            ...     lease.copy_into(part, start=1, nbytes=3), bytes(part)
            (3, b'ell')
        """

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

    def __repr__(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def is_writable(self) -> bool: ...

    @property
    def is_released(self) -> bool: ...

    def ref_numbers(self) -> tuple: ...

    def grant(self, to: int) -> None: ...

class EndGroup:
    """
    Ends of this process that share a fate. The first death in a channel of one of them ends the waits of all: each raises PeerDied with that death, a receiver after the last record that is there. A death is final for the group; one that a channel ignores, or that came before its end was opened, breaks no group.

    Examples:
        >>> steps, replies = Broadcast(receivers=2), [Ring() for rank in range(2)]
        >>> group = EndGroup()
        >>> sender = steps.open_sender(group=group)
        >>> receivers = [ring.open_receiver(group=group) for ring in replies]
        >>> steps.open_receiver(1, name='worker 1').fail(RuntimeError('no such layer'))
        >>> receivers[0].receive()
        Traceback (most recent call last):
            ...
        penstock.errors.PeerDied: receiver 1 of 'broadcast', 'worker 1' ...
    """

    def __init__(self) -> None: ...

    def wait(self, timeout: float | None = None) -> None:
        """
        Waits in no channel. Raises PeerDied at the first death, and returns when the timeout has passed.

        Args:
            timeout: seconds; None: for ever.

        Raises:
            PeerDied: an end in a channel of the group has died.

        Examples:
            >>> ring, group = Ring(), EndGroup()
            >>> sender = ring.open_sender(group=group)
            >>> group.wait(timeout=0.01)
            >>> ring.open_receiver(name='worker 1').fail(RuntimeError('no such layer'))
            >>> group.wait()
            Traceback (most recent call last):
                ...
            penstock.errors.PeerDied: receiver 0 of 'ring', 'worker 1' ...
        """

    def __repr__(self) -> str: ...

class Attachment:
    """This process in a segment, as one of its peers."""

    def __init__(self, segment: Segment, name: str = '', group: EndGroup | None = None) -> None: ...

    @property
    def slot(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def is_ours(self) -> bool: ...

    def bell_fd(self) -> int: ...

    def peers(self) -> list: ...

    def take(self, nbytes: int, timeout: float | None = 0) -> BlockLease: ...

    def open(self, segment: int, block: int, generation: int, offset: int, nbytes: int) -> BlockLease: ...

    def grant(self, segment: int, block: int, generation: int, offset: int, nbytes: int, to: int) -> None: ...

    def grant_all(self, segment: int, block: int, generation: int, offset: int, nbytes: int, to: list[int] | None) -> int:
        """
        To each of these peers, or to none; None: to every other peer that is live. Returns the number of grants.
        """

    def revoke(self, segment: int, block: int, generation: int, offset: int, nbytes: int, to: int) -> bool: ...

    def unused_grants(self, segment: int, block: int, generation: int, offset: int, nbytes: int, to: int) -> int: ...

    def stats(self) -> dict: ...

    def trim(self, keep: int = 0) -> int: ...

def leave_abandoned_ends_open() -> None:
    """
    From now on, open ends of this process stay open until the process ends, also without a reference.
    """

def fail_open_ends(error: BaseException) -> None:
    """
    Ends all open ends of this process by an error: for a process that is about to end.
    """

class Reservation:
    """
    Room for one record, filled in place: `ByteSender.reserve`. Visible after commit(); a `with` block commits, or aborts if it raises.

    Examples:
        >>> ring = Ring()
        >>> room = ring.open_sender().reserve(100)
        >>> with memoryview(room) as view:
        ...     view[:5] = b'hello'
        >>> room.commit(5)
        >>> ring.open_receiver().receive()
        b'hello'
    """

    def commit(self, nbytes: int | None = None) -> None:
        """
        Sends the record: the first `nbytes` of the room; None: all of them. Raises BufferError while a view lives, which could still write.
        """

    def abort(self) -> None: ...

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

    def __enter__(self) -> Reservation: ...

    def __exit__(self, *args) -> None: ...

    def __repr__(self) -> str: ...

class Sender:
    """
    The end of a channel that sends bytes: besides the methods of `Sender`, `reserve` lends room for a record.

    Examples:
        >>> ring = Ring()
        >>> sender = ring.open_sender()
        >>> with sender.reserve(4) as room:
        ...     memoryview(room)[:] = b'step'
        >>> ring.open_receiver().receive()
        b'step'
    """

    def __init__(self, attachment: Attachment, index: int = -1) -> None: ...

    def send(self, message: Buffer | Sequence[Buffer], timeout: float | None = None) -> None:
        """
        Sends one record: a buffer, or several gathered into one. Blocks while there is no room, until `timeout` seconds have passed.
        Raises Timeout naming the slowest receiver, PeerDied once per receiver that died, EndOfChannel when all have closed.
        """

    def send_nowait(self, message: Buffer | Sequence[Buffer]) -> None:
        """
        The same, but raises WouldBlock instead of blocking; also where a stopped peer holds a lock, which it names. (It waits for such a lock for at most 1 ms, or 20 ms while the holder is runnable.)
        """

    def try_send(self, message: Buffer | Sequence[Buffer]) -> bool: ...

    def reserve(self, nbytes: int, timeout: float | None = None) -> Reservation:
        """Room for one record of `nbytes`, to be filled in place and committed."""

    @property
    def is_locked_out(self) -> bool:
        """
        Whether the last attempt found a lock held by a stopped peer: nothing wakes for that.
        """

    def arm(self) -> bool: ...

    def disarm(self, is_over: bool) -> None: ...

    def timeout_error(self, waited: float) -> None: ...

    def close(self) -> None:
        """
        Ends the channel in peace: receivers read what is there, then EndOfChannel.
        """

    def __enter__(self) -> Sender: ...

    def __exit__(self, *args) -> None: ...

    def fail(self, error: object) -> None:
        """
        Ends the channel by an error: the other side gets PeerDied with the error's class and text.
        """

    @property
    def is_closed(self) -> bool: ...

    @property
    def index(self) -> int: ...

    def __repr__(self) -> str: ...

    @property
    def name(self, /) -> str: ...

class Receiver:
    """
    The end of a channel that receives bytes: besides the methods of `Receiver`, `receive_view` leases a record where it lies.

    Examples:
        >>> ring = Ring()
        >>> ring.open_sender().send(b'step')
        >>> with ring.open_receiver().receive_view() as lease:
        ...     bytes(lease)
        b'step'
    """

    def __init__(self, attachment: Attachment, index: int = -1) -> None: ...

    def receive(self, timeout: float | None = None) -> bytes:
        """
        The next record, copied. Blocks until there is one, or `timeout` seconds have passed.
        Raises Timeout, PeerDied after the last record of a sender that died, EndOfChannel after the last of one that closed.
        """

    def receive_view(self, timeout: float | None = None) -> BlockLease:
        """
        The next record where it lies: a read-only lease. A record in the ring keeps its room until the lease is released.
        """

    def receive_nowait(self) -> bytes: ...

    def receive_view_nowait(self) -> BlockLease: ...

    def receive_frame(self, timeout: float | None = None) -> bytes | BlockLease:
        """
        The next record: a short one copied, one that lies in the pool where it lies.
        """

    def receive_frame_nowait(self) -> bytes | BlockLease: ...

    def try_receive(self) -> bytes | None: ...

    def try_receive_view(self) -> BlockLease | None: ...

    def try_receive_frame(self) -> bytes | BlockLease | None: ...

    @property
    def is_locked_out(self) -> bool:
        """
        Whether the last attempt found a lock held by a stopped peer: nothing wakes for that.
        """

    def arm(self) -> bool: ...

    def disarm(self, is_over: bool) -> None: ...

    def timeout_error(self, waited: float) -> None: ...

    def close(self) -> None:
        """Leaves the channel: the sender no longer waits for this receiver."""

    def __enter__(self) -> Receiver: ...

    def __exit__(self, *args) -> None: ...

    def fail(self, error: object) -> None:
        """
        Ends the channel by an error: the other side gets PeerDied with the error's class and text.
        """

    def __iter__(self) -> Iterator[bytes]: ...

    def __next__(self) -> bytes: ...

    @property
    def is_closed(self) -> bool: ...

    def exhaust(self) -> None:
        """
        Closes an end after EndOfChannel. Further calls, also of other threads, raise EndOfChannel.
        """

    @property
    def index(self) -> int: ...

    @property
    def source(self) -> int:
        """The sender (its index) of the record that was received last."""

    def __repr__(self) -> str: ...

    @property
    def name(self, /) -> str: ...

class Tap:
    """
    Looks at the records of a channel as they pass, without a trace in it: it joins nothing, writes nothing, and no process waits for it.
    It sees what is sent from now on; from_start: what some receiver has still to read, too.

    Examples:
        >>> import os
        >>> from penstock._native import Segment as NativeSegment
        >>> ring = Ring()
        >>> tap = Tap(NativeSegment.adopt(os.dup(ring.fd), is_observer=True))
        >>> ring.open_sender().send(b'step')
        >>> [record for *_, record in tap.read()]
        [b'step']
    """

    def __init__(self, segment: Segment, from_start: bool = False) -> None: ...

    def read(self, most: int = 1024) -> list[tuple[int, int, int, bytes | None]]:
        """
        Up to `most` records that have come since the last time: lane, sequence, when it was committed (ns, monotonic), and its bytes; None in their place where a long record was given back before it could be copied. Never blocks. Raises CorruptRecord for what is no record, and goes on after it.
        """

    @property
    def missed(self) -> int:
        """
        Records that were overwritten before they were read, as of the last read().
        """

    def __repr__(self) -> str: ...

KEY_NBYTES: int = 32

class Store:
    """Blocks of a pool that are kept under a key after their last lease."""

    def __init__(self, attachment: Attachment) -> None: ...

    def get(self, key: bytes) -> BlockLease | None: ...

    def get_value(self, key: bytes, is_granted: bool = False) -> Lease | None: ...

    @property
    def is_ours(self) -> bool:
        """Not of the process before a fork()."""

    def begin(self, key: bytes | None, nbytes: int, timeout: float | None = None) -> tuple[bool, BlockLease]:
        """
        Returns True and a writable lease, to be written and committed; or False and a lease of the value that is there. Waits while another process writes it, or for room. Without a key: a block that is neither committed nor abandoned.
        """

    def commit(self, lease: BlockLease) -> bool:
        """
        Publishes what was written; the lease, which must have no views, is for reading from now on. Returns False if the key was removed meanwhile.
        """

    def abandon(self, lease: BlockLease) -> None:
        """
        Lets another process write the value, as the end of a lease without a commit does.
        """

    def evict(self, key: bytes) -> bool: ...

    def remove(self, key: bytes) -> bool: ...

    def count(self, hits: int, misses: int) -> None:
        """
        Counts values that the process holds already, and values that it makes without the store.
        """

    def clear(self) -> int: ...

    def stats(self) -> dict: ...

class TraceReader:
    """
    Reads the events that the ends of a channel write while they are traced: what was sent, taken and waited for, and when. It joins nothing, and no process waits for it.

    Examples:
        >>> ring = Ring()
        >>> reader = TraceReader(ring._segment)
        >>> reader.extend()
        False
        >>> ring.open_sender().send(b'step')
        >>> [(end, len(events) // TRACE_EVENT_NBYTES) for end, events in reader.read()]
        [(0, 3)]
    """

    def __init__(self, segment: Segment) -> None:
        """
        Claims the memory of the events. Raises MemoryExhausted, and ValueError for a segment that is not a channel, or is mapped for reading only.
        """

    def extend(self) -> bool:
        """
        Has the ends write events until two seconds from now. Returns False if they did not until now: events may lack, but at the first call.
        """

    def read(self) -> list[tuple[int, bytes]]:
        """
        The events since the last call, in order, of each end that has any: the senders first, then the receivers. Never blocks.
        """

    @property
    def missed(self) -> int:
        """Events that were overwritten before they were read."""

    @property
    def corrupt(self) -> int:
        """Events that no end has written like that."""

TRACE_EVENT_NBYTES: int = 32

def use_kinds(kinds: list[tuple[int, Any, Any]], numpy_of: Callable[[int], Any], torch_of: Callable[[Any, int], Any]) -> None:
    """
    Says, once, which numbers there are: for each code from 1 the itemsize, the dtype of its bits, and that of NumPy or None: then `numpy_of` gives it. torch_of: makes a tensor of an array of bits.
    """

def use_values(ref_of: Callable[..., Any], read: Callable[[Any, Any, bool], Any]) -> None:
    """
    Sets the class of references, made of five numbers, and the function that reads a value that is not plain.
    """

class Lease:
    """
    A value, held: the memory is not reused while the lease, or an array of the value, lives.

    Examples:
        >>> store = Store(1 << 20)
        >>> with store.put({"pixels": np.arange(4)}) as lease:
        ...     lease.value()["pixels"]
        array([0, 1, 2, 3])
    """

    def __init__(self, block: BlockLease) -> None: ...

    @staticmethod
    def of_message(message: Any, nbytes: int) -> Lease:
        """Of a value that travels inline, which holds its message."""

    def value(self, as_: Literal['numpy', 'torch', 'bits'] = 'numpy', *, writable: bool = False) -> Any:
        """
        Returns the value, with tensors that are read-only views of the memory where it lies, which they hold.

        Args:
            as_: the library that the tensors are of: "numpy"; "torch"; or "bits", where kinds that NumPy has no word for are
                unsigned integers. A write through a torch tensor ends this process: torch has no read-only tensors.
            writable: the tensors are private copies.

        Raises:
            DecodeError: the bytes are no value; the text has the path to what is wrong.
            ClosedError: the lease has been released.

        Examples:
            >>> lease = Store(1 << 20).put([np.zeros(2), "text"])
            >>> lease.value()
            [array([0., 0.]), 'text']
        """

    @property
    def ref(self, /) -> Any:
        """
        Where the value lies: numbers of a block, or the message that it came in.
        """

    @property
    def nbytes(self) -> int:
        """Of the value, its layout included."""

    def hold(self) -> Lease:
        """The same value, held once more: each hold is released by itself."""

    def release(self) -> None:
        """
        Holds the value no longer. Arrays that were taken from it still do, each until it is gone.

        Examples:
            >>> lease = Store(1 << 20).put(np.zeros(3))
            >>> zeros = lease.value()
            >>> lease.release()
            >>> float(zeros.sum())
            0.0
        """

    def __enter__(self) -> Lease: ...

    def __exit__(self, *args) -> None: ...

    def __repr__(self) -> str: ...
