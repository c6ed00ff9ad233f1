"""Values of stores over a link: serves those of this node by key, and pulls those that processes of this node ask for.

A value is one block of a store, which means the same at any address. It is received straight into the block of this
node's store that it will lie in; other processes that want the key wait for it meanwhile, as for any writer. Values
cross one after the other, in pieces, behind the frames that wait at the time.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from penstock import _native
from penstock.bridge import packets
from penstock.bridge.link_errors import ProtocolError
from penstock.bridge.link_spec import LinkStats, StoreValues
from penstock.bridge.packets import KEY_NBYTES, MAX_PAYLOAD, VALUE_HEAD, PacketQueue
from penstock.bridge.pull_channels import Pull, Pulled
from penstock.codec.catalogue import Catalogue
from penstock.codec.frame import FrameDecoder
from penstock.codec.frame_ends import FrameReceiver
from penstock.errors import ChannelError, DecodeError, EndOfChannel, MemoryExhausted, PeerDied, Timeout
from penstock.memory import Ref

RETRY_S = 0.02  # between two looks at a key that another process of this node is writing …
WANT_AGAIN_S = 1.0  # … until the value is wanted again: that process may have died
MAX_WANTED = 1 << 12  # keys that the other side may ask for before it has got a value


class _OutgoingValue(NamedTuple):
    view: memoryview  # the rest of a value; holds its lease


class _IncomingValue:
    """A value that is coming. `block` None: it is read and dropped, as `answer` says."""

    def __init__(self, key: bytes, nbytes: int) -> None:
        self.key, self.nbytes = key, nbytes
        self.filled = 0
        self.block: _native.BlockLease | None = None  # of the store, to be filled
        self.answer: str | None = None  # why it is not wanted; None: it is, or a process of this node has written it


class ValueExchange:
    def __init__(self, spec: StoreValues, name: str, queue: PacketQueue, stats: LinkStats) -> None:
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
        self._receiving: _IncomingValue | None = None
        self._to_send: deque[bytes] = deque()  # keys
        self._sending: _OutgoingValue | None = None
        self.retry_at = 0.0  # 0: nothing is to be looked at again

    # ── this node's values ──
    def on_want(self, key: bytes) -> None:
        if len(self._to_send) >= MAX_WANTED:
            raise ProtocolError(f"it wants more than {MAX_WANTED} values at a time")
        self._to_send.append(key)

    @property
    def has_more(self) -> bool:
        """Whether there is something to be sent."""
        return self._sending is not None or bool(self._to_send)

    def pump(self) -> None:
        """Puts the next piece of a value into the queue, if nothing waits there."""
        if self._queue.nbytes >= MAX_PAYLOAD:
            return
        if self._sending is None and self._to_send:
            self._begin(self._to_send.popleft())
        if self._sending is not None:
            piece, rest = self._sending.view[:MAX_PAYLOAD], self._sending.view[MAX_PAYLOAD:]
            self._queue.put(packets.VALUE_PIECE, payload=piece)
            self._sending = _OutgoingValue(rest) if rest else None

    def _begin(self, key: bytes) -> None:
        block = self._keeper.get(key)
        if block is None:
            text = f"'{self._store.name}' over there keeps nothing under it"
            return self._queue.put(packets.ABSENT, payload=key + packets.text_payload(text))
        self._queue.put(packets.VALUE, payload=VALUE_HEAD.pack(key, block.nbytes))
        self._sending = _OutgoingValue(memoryview(block))
        self._stats.values_sent += 1

    # ── the clients of this node ──
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
        """Answers the clients that ask for a key if its value is in the store of this node."""
        block = self._keeper.get(key)
        if block is not None:
            self._answer_with(key, block)
        return block is not None

    def _answer_with(self, key: bytes, block: _native.BlockLease) -> None:
        ref = Ref(*block.ref_numbers())
        for pull in self._asking.pop(key, ()):
            try:
                self._store.pool.grant_all(ref, [pull.peer])
            except (PeerDied, ValueError):  # the client has died, or says that it is another's place
                continue
            self._answer(pull, Pulled(pull.number))
        block.release()

    def _refuse(self, key: bytes, error: str, *, is_missing: bool = False) -> None:
        for pull in self._asking.pop(key, ()):
            self._answer(pull, Pulled(pull.number, error, is_missing))

    def _answer(self, pull: Pull, answer: Pulled) -> None:
        try:
            self._answers[pull.client].send_nowait(answer)
        except (PeerDied, ChannelError):  # it has died; or has let so many questions time out that its ring is full
            pass

    # ── the other node's values ──
    def on_absent(self, payload: memoryview) -> None:
        key, text = bytes(payload[:KEY_NBYTES]), bytes(payload[KEY_NBYTES:]).decode(errors="replace")
        self._require_asked(key)
        self._stats.values_missing += 1
        self._refuse(key, text, is_missing=True)

    def on_value(self, payload: memoryview) -> None:
        key, nbytes = VALUE_HEAD.unpack(payload)
        if self._receiving is not None:
            raise ProtocolError("a value came within another one")
        self._require_asked(key)
        if not nbytes:
            raise ProtocolError("a value of no bytes came")
        self._receiving = receiving = _IncomingValue(key, nbytes)
        try:
            is_new, block = self._keeper.begin(key, nbytes, 0)
        except MemoryExhausted as error:
            receiving.answer = str(error)
        except Timeout:
            self._written_by_another[key] = time.monotonic()
            self.retry_at = time.monotonic() + RETRY_S
        else:
            if is_new:
                receiving.block = block
            else:
                block.release()

    def _require_asked(self, key: bytes) -> None:
        if key not in self._asking:
            raise ProtocolError(f"a value came that was not wanted: {key.hex()[:16]}…")

    def place(self, nbytes: int) -> memoryview | None:
        receiving = self._require_room(nbytes)
        if receiving.block is None:
            return None
        with memoryview(receiving.block) as whole:
            return whole[receiving.filled : receiving.filled + nbytes]

    def on_piece(self, payload: memoryview) -> None:
        """Takes a piece that has arrived whole."""
        place = self.place(len(payload))
        if place is not None:
            with place:
                place[:] = payload
        self.placed(len(payload))

    def placed(self, nbytes: int) -> None:
        receiving = self._require_room(nbytes)
        receiving.filled += nbytes
        if receiving.filled == receiving.nbytes:
            self._receiving = None
            self._stats.values_received += 1
            self._stats.value_nbytes_received += receiving.nbytes
            self._finish(receiving)

    def _finish(self, receiving: _IncomingValue) -> None:
        if receiving.block is not None:
            self._keeper.commit(receiving.block)
            self._answer_with(receiving.key, receiving.block)
        elif receiving.answer is not None:
            self._refuse(receiving.key, receiving.answer)
        elif receiving.key not in self._written_by_another and not self._find(receiving.key):
            self._queue.put(packets.WANT, payload=receiving.key)  # it was here, and has been evicted since

    def _require_room(self, nbytes: int) -> _IncomingValue:
        receiving = self._receiving
        if receiving is None or receiving.filled + nbytes > receiving.nbytes:
            raise ProtocolError("a piece of a value came without a value, or beyond its end")
        return receiving

    # ── what no bell rings for ──
    def tick(self, now: float) -> None:
        """Looks again at keys that other processes of this node were writing."""
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
        """Gives up the value that is coming: another process may write its key."""
        self._sending = None
        if self._receiving is not None and self._receiving.block is not None:
            self._keeper.abandon(self._receiving.block)
            self._receiving = None
        if self.requests is not None:
            self.requests.close()
            for answers in self._answers:
                answers.close()
