"""A TCP relay between two sides: each direction can be cut (bytes vanish, both sockets stay open) or delayed."""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

TO_LISTENER, TO_CONNECTOR = 0, 1
LOOK_S = 0.005


class Relay:
    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self.is_cut = [False, False]  # by direction
        self.delay_s = 0.0
        self.nbytes = [0, 0]
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
            with near, contextlib.suppress(ConnectionRefusedError):  # the listener is not there yet
                with socket.create_connection(self._target) as far:
                    self._pass(near, far)

    def _pass(self, near: socket.socket, far: socket.socket) -> None:
        ends = {near: (far, TO_LISTENER), far: (near, TO_CONNECTOR)}
        late: deque[tuple[float, socket.socket, bytes]] = deque()
        while not self._is_over:
            for source in select.select(list(ends), [], [], LOOK_S)[0]:
                target, direction = ends[source]
                try:
                    part = source.recv(1 << 16)
                except ConnectionError:
                    return
                if not part and not any(self.is_cut):
                    return
                if not self.is_cut[direction]:
                    self.nbytes[direction] += len(part)
                    late.append((time.monotonic() + self.delay_s, target, part))
                if not part:
                    del ends[source]
            while late and time.monotonic() >= late[0][0]:
                _, target, part = late.popleft()
                with contextlib.suppress(ConnectionError):
                    target.sendall(part)

    def cut(self, *directions: int) -> None:
        for direction in directions:
            self.is_cut[direction] = True

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self._listening.close()


@contextlib.contextmanager
def relay(target: tuple[str, int]) -> Iterator[Relay]:
    one = Relay(target)
    try:
        yield one
    finally:
        one.close()
