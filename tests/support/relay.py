"""A TCP relay between two sides: each direction can be cut (bytes vanish, or arrive after the cut; both sockets stay
open) or delayed, and the connection can be reset, at both sides or at one, and bits can be flipped."""

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator

TO_LISTENER, TO_CONNECTOR = 0, 1
LOOK_S = 0.005
LAST_BYTES_S = 0.5
ABORTING = struct.pack("ii", 1, 0)  # SO_LINGER: a close is a reset


class Relay:
    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self.is_cut = [False, False]  # by direction
        self.holds_bytes = False  # bytes of a cut direction are passed on when it is cut no longer, as by TCP
        self.delay_s = 0.0
        self.flips = [0, 0]  # bits that are still to be flipped, by direction, one in each of the next parts
        self.nbytes = [0, 0]
        self.connections = 0
        self.reset_at: tuple[int, int] | None = (
            None  # direction, and its bytes after which the connection is reset, once
        )
        self.refuses = False  # connections are closed as they come
        self.resets_handshakes = False  # each connection is reset as the listener answers
        self._resets: list[tuple[int, ...]] = []  # asked for: the sides that are to see each
        self._left_open: list[socket.socket] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._listening.settimeout(0.05)
        while not self._is_over:
            try:
                near, _ = self._listening.accept()
            except TimeoutError:
                continue
            if self.refuses:
                near.close()
                continue
            self.connections += 1
            if self.resets_handshakes:
                self.reset_at = TO_CONNECTOR, self.nbytes[TO_CONNECTOR] + 1
            with near, contextlib.suppress(ConnectionRefusedError):  # the listener is not there yet
                with socket.create_connection(self.target) as far:
                    self._pass(near, far)

    def reset(self, *sides: int) -> None:
        """Resets the connection at the sides (by the direction that leads there; both, if none is named). Over the
        connection of a side that is not named nothing comes any more. Returns when the relay has done it."""
        self._resets.append(sides or (TO_LISTENER, TO_CONNECTOR))
        while self._resets:
            time.sleep(LOOK_S / 10)

    def _reset(self, near: socket.socket, far: socket.socket, sides: tuple[int, ...]) -> None:
        for side, end in ((TO_CONNECTOR, near), (TO_LISTENER, far)):
            if side in sides:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORTING)
            else:
                self._left_open.append(end.dup())

    def _before_reset(self, direction: int, part: bytes) -> bytes:
        """Returns the bytes to be passed on before the reset."""
        if self.reset_at is None or self.reset_at[0] != direction:
            return part
        return part[: max(0, self.reset_at[1] - self.nbytes[direction])]

    def _pass(self, near: socket.socket, far: socket.socket) -> None:
        ends = {near: (far, TO_LISTENER), far: (near, TO_CONNECTOR)}
        late: deque[tuple[float, socket.socket, bytes]] = deque()
        held: tuple[list[tuple[socket.socket, bytes]], ...] = ([], [])  # by direction
        ends_at = 0.0  # time to which the last bytes of a side are awaited, after the other side has ended
        while (
            not self._is_over
            and ends
            and (len(ends) == 2 or any(self.is_cut) or any(held) or late or time.monotonic() < ends_at)
        ):
            for direction in (TO_LISTENER, TO_CONNECTOR):
                if not self.is_cut[direction]:
                    late.extend((time.monotonic() + self.delay_s, *each) for each in held[direction])
                    held[direction].clear()
            if self._resets:
                self._reset(near, far, self._resets[0])
                near.close()
                far.close()
                self._resets.pop(0)
                return
            for source in select.select(list(ends), [], [], LOOK_S)[0]:
                target, direction = ends[source]
                try:
                    part = source.recv(1 << 16)
                except ConnectionError:  # the other end sees a reset, too
                    return self._reset(near, far, (TO_LISTENER, TO_CONNECTOR))
                whole, part = len(part), self._before_reset(direction, part)
                if len(part) < whole:
                    self.reset_at = None
                    target.sendall(part)
                    return self._reset(near, far, (TO_LISTENER, TO_CONNECTOR))
                if part and self.flips[direction]:
                    self.flips[direction] -= 1
                    bit = random.randrange(8 * len(part))
                    part = (int.from_bytes(part, "little") ^ 1 << bit).to_bytes(len(part), "little")
                if not self.is_cut[direction]:
                    self.nbytes[direction] += len(part)
                    late.append((time.monotonic() + self.delay_s, target, part))
                elif self.holds_bytes:
                    held[direction].append((target, part))
                if not part:
                    del ends[source]
            while late and time.monotonic() >= late[0][0]:
                _, target, part = late.popleft()
                with contextlib.suppress(OSError):
                    target.sendall(part)
                    if not part:
                        ends_at = time.monotonic() + LAST_BYTES_S
                        target.shutdown(socket.SHUT_WR)

    def cut(self, *directions: int) -> None:
        for direction in directions:
            self.is_cut[direction] = True

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        for end in self._left_open:
            end.close()
        self._listening.close()


@contextlib.contextmanager
def relay(target: tuple[str, int]) -> Iterator[Relay]:
    relay = Relay(target)
    try:
        yield relay
    finally:
        relay.close()
