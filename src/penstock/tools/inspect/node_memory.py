"""The shared memory of a node by kind: segments, and files in memory that processes keep for the processes after them.

The name of such a file is `penstock KIND: LABEL`. The content is not read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from penstock.errors import PenstockError
from penstock.tools.inspect.processes import process_of
from penstock.tools.inspect.segments import Json, Place, descriptors_of, snapshot_of

KEPT_FILE = re.compile(r"/memfd:penstock ([a-z ]{1,32}): ")
BLOCK_NBYTES = 512  # of `st_blocks`


def memory_by_kind(segments: Iterable[Json], pids: Iterable[int]) -> dict[str, int]:
    """Returns the bytes of memory that segments and kept files of processes occupy, by kind. Each file counts once. A
    file that the parent of a process has, too, belongs to the parent: a launcher gives its files to workers."""
    nbytes = Counter[str]()
    for segment in segments:
        nbytes[kind_of(segment)] += segment["claimed_nbytes"]
    owners = set(pids)
    files = {place: (kind, size) for pid in owners for place, kind, size in kept_files_of(pid)}
    for process in filter(None, map(process_of, owners)):
        if process.parent not in owners:
            for place, _, _ in kept_files_of(process.parent):
                files.pop(place, None)
    for kind, size in files.values():
        nbytes[kind] += size
    return dict(nbytes)


def memory_of(pid: int) -> dict[str, int]:
    """Returns the bytes of the segments and kept files that a process has open, by kind."""
    segments: dict[Place, Json] = {}
    try:
        for number, place in descriptors_of(pid):
            if place not in segments:
                with contextlib.suppress(FileNotFoundError):  # it has been closed meanwhile
                    segments[place] = snapshot_of(pid, number, place)
    except (OSError, PenstockError, ValueError):  # the process has ended, or belongs to another user
        return {}
    return memory_by_kind(segments.values(), [pid])


def kind_of(segment: Json) -> str:
    return "stores" if "store" in segment else "channels" if "senders" in segment else "pages"


def kept_files_of(pid: int) -> Iterator[tuple[Place, str, int]]:
    """Yields place, kind and bytes of each kept file that a process has open; none if the process cannot be read."""
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for number in numbers:
        path = f"/proc/{pid}/fd/{number}"
        try:
            if match := KEPT_FILE.match(os.readlink(path)):
                status = os.stat(path)
                yield (status.st_dev, status.st_ino), match[1], status.st_blocks * BLOCK_NBYTES
        except OSError:
            continue  # closed meanwhile
