"""Values of stores over a link: sends values of the local store by key, and pulls values for local processes.

A value is one block of a store, without absolute addresses. The link receives a value into a block of the local store;
processes that want the key wait meanwhile, as for any writer. Values cross in sequence, in pieces, behind all waiting
frames. The kernel takes a while to find the pages of a long value: a thread waits for the pages, and frames and
heartbeats pass meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from penstock import _native
from penstock.bridge import packets
from penstock.bridge.link_errors import ProtocolError
from penstock.bridge.link_spec import LinkStats, StoreValues
from penstock.bridge.packets import KEY_NBYTES, MAX_PAYLOAD, VALUE_HEAD, PacketQueue
from penstock.bridge.pull_channels import Pull, Pulled
from penstock.channel import FrameReceiver
from penstock.codec.catalogue import Catalogue
from penstock.codec.frame import FrameDecoder
from penstock.errors import ChannelError, DecodeError, EndOfChannel, MemoryExhausted, PeerDied, Timeout
from penstock.memory import Ref

RETRY_S = 0.02  # between two looks at a key that a local process is writing …
WANT_AGAIN_S = 1.0  # … until the value is wanted again: the writer may have died
QUICK_NBYTES = 1 << 20  # a value up to here gets its pages at once
MAX_WANTED = 1 << 12  # keys that the remote side may want before the first value


class _IncomingValue:
    """A value that the remote side has announced, and then sends."""

    def __init__(self, key: bytes, nbytes: int) -> None:
        self.key, self.nbytes = key, nbytes
        self.filled = 0
        self.block: _native.BlockLease | None = None  # of the store, to be filled; None: the value will not come
        self.error: Exception | None = None  # why not; None: a local process has written the value by now
        self.is_decided = False  # the search for room has ended
        self.is_answered = False

    def find_room(self, keeper: _native.Store) -> None:
        try:
            is_new, block = keeper.begin(self.key, self.nbytes, 0)
            if is_new:
                self.block = block
            else:
                block.release()
        except (MemoryExhausted, Timeout) as error:
            self.error = error
        finally:
            self.is_decided = True


class ValueExchange:
    def __init__(
        self, spec: StoreValues, name: str, queue: PacketQueue, stats: LinkStats, wake: Callable[[], None]
    ) -> None:
        self._store = spec.store
        self._keeper = _native.Store(spec.store.pool.place)
        self._queue, self._stats = queue, stats
        self._pulls = spec.pulls
        self.requests: FrameReceiver | None = None
        if self._pulls is not None:
            self._decoder = FrameDecoder(Catalogue(Pull))
            self.requests = FrameReceiver(self._pulls.requests, name=name)
            self._answers = [ring.open_sender(name=name) for ring in self._pulls.answers]
        self._asking: dict[bytes, list[Pull]] = {}  # the clients that wait for each key
        self._written_by_another: dict[bytes, float] = {}  # keys, and when that was seen first
        self._incoming: _IncomingValue | None = None
        self._finding: threading.Thread | None = None  # room for it
        self._wake = wake
        self._to_send: deque[bytes] = deque()  # keys
        self._announced: _native.BlockLease | None = None  # the value without an answer of the remote side
        self._rest = memoryview(b"")  # of the value under way; holds the lease
        self.retry_at = 0.0  # 0: no key is retried

    # ── the local node's values ──
    def on_want(self, key: bytes) -> None:
        if len(self._to_send) >= MAX_WANTED:
            raise ProtocolError(f"it wants more than {MAX_WANTED} values at a time")
        self._to_send.append(key)

    @property
    def has_more(self) -> bool:
        """Whether there is something to be sent."""
        return len(self._rest) > 0 or (self._announced is None and len(self._to_send) > 0)

    def put_piece(self) -> None:
        """Puts the next piece of a value into the queue, if there is room."""
        if not self._queue.has_room:
            return
        if self._rest:
            piece, self._rest = self._rest[:MAX_PAYLOAD], self._rest[MAX_PAYLOAD:]
            self._queue.put(packets.VALUE_PART, payload=piece)
        elif self._announced is None and self._to_send:
            self._announce(self._to_send.popleft())

    def on_answer(self, is_taken: bool) -> None:
        block, self._announced = self._announced, None
        if block is None:
            raise ProtocolError("it answered about a value that was not announced")
        if is_taken:
            self._stats.values_sent += 1
            self._rest = memoryview(block)
        else:
            self._stats.values_declined += 1
            block.release()

    def _announce(self, key: bytes) -> None:
        block = self._keeper.get(key)
        if block is None:
            text = f"'{self._store.name}' over there keeps nothing under it"
            return self._queue.put(packets.ABSENT, payload=key + packets.text_payload(text))
        self._queue.put(packets.VALUE, payload=VALUE_HEAD.pack(key, block.nbytes))
        self._announced = block

    # ── the clients of the local node ──
    def receive_requests(self) -> None:
        """Takes what clients ask."""
        while self.requests is not None:
            try:
                frame = self.requests.try_receive()
                if frame is None:
                    return
                pull = self._decoder.decode(frame)
            except (PeerDied, DecodeError):  # a client that has died waits for no answer
                continue
            except EndOfChannel:
                self.requests = None
                return
            if len(pull.key) == KEY_NBYTES and 0 <= pull.client < len(self._answers):
                self._ask(pull)

    def _ask(self, pull: Pull) -> None:
        waiting = self._asking.setdefault(pull.key, [])
        waiting.append(pull)
        if len(waiting) == 1 and not self._find(pull.key):
            self._queue.put(packets.WANT, payload=pull.key)

    def _find(self, key: bytes) -> bool:
        """Answers the clients of a key if the value is in the local store."""
        block = self._keeper.get(key)
        if block is not None:
            self._answer_with(key, block)
        return block is not None

    def _answer_with(self, key: bytes, block: _native.BlockLease) -> None:
        ref = Ref(*block.ref_numbers())
        for pull in self._asking.pop(key, ()):
            try:
                self._store.pool.grant_all(ref, [pull.peer])
            except (PeerDied, ValueError):  # the client has died, or named the index of a different client
                continue
            self._answer(pull, Pulled(pull.number))
        block.release()

    def _refuse(self, key: bytes, error: str, *, is_missing: bool = False) -> None:
        for pull in self._asking.pop(key, ()):
            self._answer(pull, Pulled(pull.number, error, is_missing))

    def _answer(self, pull: Pull, answer: Pulled) -> None:
        try:
            self._answers[pull.client].send_nowait(answer)
        except (PeerDied, ChannelError):  # the client has died, or its ring is full of answers to expired requests
            pass

    # ── the remote node's values ──
    def on_absent(self, payload: memoryview) -> None:
        key, text = bytes(payload[:KEY_NBYTES]), bytes(payload[KEY_NBYTES:]).decode(errors="replace")
        self._require_asked(key)
        self._stats.values_missing += 1
        self._refuse(key, text, is_missing=True)

    def on_value(self, payload: memoryview) -> None:
        key, nbytes = VALUE_HEAD.unpack(payload)
        if self._incoming is not None or not nbytes:
            raise ProtocolError(f"a value of {nbytes} bytes was announced within another one, or has none")
        self._require_asked(key)
        self._incoming = incoming = _IncomingValue(key, nbytes)
        if nbytes <= QUICK_NBYTES:
            incoming.find_room(self._keeper)
        else:
            self._finding = threading.Thread(target=self._find_room, args=(incoming,), name="room for a value")
            self._finding.start()

    def _find_room(self, incoming: _IncomingValue) -> None:
        incoming.find_room(self._keeper)
        self._wake()

    def answer_announced(self) -> None:
        """Says whether the value that was announced has a place, once that has been found out."""
        incoming = self._incoming
        if incoming is None or incoming.is_answered or not incoming.is_decided:
            return
        incoming.is_answered = True
        if incoming.block is not None:
            return self._queue.put(packets.TAKE)
        self._incoming = None
        self._queue.put(packets.DECLINE)
        key = incoming.key
        if isinstance(incoming.error, MemoryExhausted):
            self._refuse(key, str(incoming.error))
        elif incoming.error is not None:
            self._written_by_another[key] = time.monotonic()
            self.retry_at = time.monotonic() + RETRY_S
        elif not self._find(key):
            self._queue.put(packets.WANT, payload=key)  # it was here, and has been evicted since

    def _require_asked(self, key: bytes) -> None:
        if key not in self._asking:
            raise ProtocolError(f"a value came that was not wanted: {key.hex()[:16]}…")

    def place(self, nbytes: int) -> memoryview:
        incoming, block = self._require_room(nbytes)
        with memoryview(block) as whole:
            return whole[incoming.filled : incoming.filled + nbytes]

    def on_piece(self, payload: memoryview) -> None:
        """Takes a piece that has arrived whole."""
        with self.place(len(payload)) as place:
            place[:] = payload
        self.placed(len(payload))

    def placed(self, nbytes: int) -> None:
        incoming, block = self._require_room(nbytes)
        incoming.filled += nbytes
        if incoming.filled == incoming.nbytes:
            self._incoming = None
            self._stats.values_received += 1
            self._stats.value_nbytes_received += incoming.nbytes
            self._keeper.commit(block)
            self._answer_with(incoming.key, block)

    def _require_room(self, nbytes: int) -> tuple[_IncomingValue, _native.BlockLease]:
        incoming = self._incoming
        if incoming is None or incoming.block is None or not incoming.is_answered:
            raise ProtocolError("a piece of a value came without a value")
        if incoming.filled + nbytes > incoming.nbytes:
            raise ProtocolError(f"a value of {incoming.nbytes} bytes came with more")
        return incoming, incoming.block

    # ── what no bell rings for ──
    def look_again(self, now: float) -> None:
        """Looks again at keys that local processes were writing."""
        if not self.retry_at or now < self.retry_at:
            return
        for key, since in list(self._written_by_another.items()):
            if self._find(key) or key not in self._asking:
                del self._written_by_another[key]
            elif now - since > WANT_AGAIN_S:
                del self._written_by_another[key]
                self._queue.put(packets.WANT, payload=key)
        self.retry_at = now + RETRY_S if self._written_by_another else 0.0

    def close(self) -> None:
        """Gives up the value under way: a local process may write the key."""
        self._rest = memoryview(b"")
        self._announced = None
        if self._finding is not None:
            self._finding.join()
        if self._incoming is not None and self._incoming.block is not None:
            self._keeper.abandon(self._incoming.block)
            self._incoming = None
        if self.requests is not None:
            self.requests.close()
            for answers in self._answers:
                answers.close()
