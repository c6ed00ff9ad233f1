"""iceoryx2, publish-subscribe with an event that wakes the subscribers, as its documentation shows.

Lossless: no overflow, and a publisher that retries until delivered. A service's memory is cut into equal pieces of the
largest size, so small and large frames have a service each. Receivers get a view, no copy.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

from bench import impls
from bench.impls import REPLY_NBYTES, Meet, Seat, Unavailable, Wires

SMALL_NBYTES = 65536
SMALL_DEPTH = 64
LARGE_DEPTH = 2


def check() -> None:
    try:
        import iceoryx2  # noqa: F401
    except ImportError:
        raise Unavailable("iceoryx2 is not installed") from None


def lay(receivers: int, scratch: Path) -> Wires:
    name = f"penstock-bench/{os.getpid()}/{time.monotonic_ns()}"
    return Wires([name] * (receivers + 1))


class _Services:
    """The services of one session as one process sees them: two sizes and an event each way."""

    def __init__(self, name: str, receivers: int) -> None:
        import iceoryx2

        iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
        self.iceoryx2 = iceoryx2
        self.node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        self.small = self._frames(f"{name}/small", SMALL_DEPTH, 1, receivers)
        self.large = self._frames(f"{name}/large", LARGE_DEPTH, 1, receivers)
        self.replies = self._frames(f"{name}/replies", SMALL_DEPTH, receivers, 1)
        self.sent = self._event(f"{name}/sent", 1, receivers)
        self.replied = self._event(f"{name}/replied", receivers, 1)

    def _frames(self, name: str, depth: int, publishers: int, subscribers: int) -> Any:
        return (
            self.node.service_builder(self.iceoryx2.ServiceName.new(name))
            .publish_subscribe(self.iceoryx2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(depth)
            .max_publishers(publishers)
            .max_subscribers(subscribers)
            .max_nodes(64)
            .open_or_create()
        )

    def _event(self, name: str, notifiers: int, listeners: int) -> Any:
        return (
            self.node.service_builder(self.iceoryx2.ServiceName.new(name))
            .event()
            .max_notifiers(notifiers)
            .max_listeners(listeners)
            .max_nodes(64)
            .open_or_create()
        )

    def publisher(self, service: Any, nbytes: int, *, grows: bool = False) -> Any:
        strategy = self.iceoryx2.AllocationStrategy
        return (
            service.publisher_builder()
            .initial_max_slice_len(nbytes)
            .allocation_strategy(strategy.PowerOfTwo if grows else strategy.Static)
            .backpressure_strategy(self.iceoryx2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )


def _publish(publisher: Any, frame: bytes) -> None:
    nbytes = len(frame)
    sample = publisher.loan_slice_uninit(nbytes)
    ctypes.memmove(sample.payload_ptr, frame, nbytes)
    sample.assume_init().send()


class Sender(impls.Sender):
    def __init__(self, name: str, seat: Seat, meet: Meet) -> None:
        services = _Services(name, seat.receivers)
        self._services = services
        self._receivers = seat.receivers
        self._small = services.publisher(services.small, SMALL_NBYTES)
        self._large = services.publisher(services.large, 1 << 20, grows=True)
        self._replies = services.replies.subscriber_builder().create()
        self._sent = services.sent.notifier_builder().create()
        self._replied = services.replied.listener_builder().create()
        self._publisher = self._small
        meet("every port is there")
        for port in (self._small, self._large):
            port.update_connections()
        self._replies.has_samples()
        meet("every port has met the others")

    def expect(self, nbytes: int) -> None:
        self._publisher = self._small if nbytes <= SMALL_NBYTES else self._large

    def send(self, frame: bytes) -> None:
        _publish(self._publisher, frame)
        self._sent.notify()

    def gather(self) -> None:
        missing = self._receivers
        while missing:
            if self._replies.receive() is None:
                self._replied.blocking_wait()
            else:
                missing -= 1

    def reserved_nbytes(self) -> int:
        total = 0
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "iox2" in line:
                first, last = (int(position, 16) for position in line.split(maxsplit=1)[0].split("-"))
                total += last - first
        return total

    def close(self) -> None:
        for port in (self._small, self._large, self._replies, self._sent, self._replied):
            port.delete()


class Receiver(impls.Receiver):
    def __init__(self, name: str, seat: Seat, meet: Meet) -> None:
        services = _Services(name, seat.receivers)
        self._services = services
        self._small = services.small.subscriber_builder().create()
        self._large = services.large.subscriber_builder().create()
        self._replies = services.publisher(services.replies, REPLY_NBYTES)
        self._sent = services.sent.listener_builder().create()
        self._replied = services.replied.notifier_builder().create()
        self._subscriber = self._small
        self._sample: Any = None
        meet("every port is there")
        self._replies.update_connections()
        for port in (self._small, self._large):
            port.has_samples()  # a subscriber that never looked is not connected: its frames would be dropped
        meet("every port has met the others")

    def expect(self, nbytes: int) -> None:
        self._subscriber = self._small if nbytes <= SMALL_NBYTES else self._large

    def receive(self) -> memoryview:
        self._sample = None  # give the last one back
        receive = self._subscriber.receive
        sample = receive()
        while sample is None:
            self._sent.blocking_wait()
            sample = receive()
        self._sample = sample
        view: memoryview = sample.payload().as_memory_view()
        return view

    def reply(self, frame: bytes) -> None:
        _publish(self._replies, frame)
        self._replied.notify()

    def close(self) -> None:
        self._sample = None
        for port in (self._small, self._large, self._replies, self._sent, self._replied):
            port.delete()
