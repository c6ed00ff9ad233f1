"""A small ring with both ends open."""

import contextlib
from collections.abc import Iterator
from typing import Any

import penstock
from penstock import LongRecords

CAPACITY = 4096
SMALL_POOL = LongRecords(pool_nbytes=1 << 20)


@contextlib.contextmanager
def ring(type: Any = bytes, **options: Any) -> Iterator[tuple[penstock.Ring[Any], Any, Any]]:
    channel = penstock.Ring(type, **{"capacity": CAPACITY, "long_records": SMALL_POOL, **options})
    with channel.open_sender() as sender, channel.open_receiver() as receiver:
        yield channel, sender, receiver
