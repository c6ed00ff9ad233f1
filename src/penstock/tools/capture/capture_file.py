"""A recording: the records of channels in a file, to be measured again later or on another machine.

    penstock recording 1\\n                                      the version; another one is refused
    {"penstock": "0.1.0", "channels": [...]}\\n                  one line of JSON: name, kind, description of messages
    then one entry for each record, all numbers little-endian:
        channel u16 · lane u16 · what u32 · sequence u64 · committed_ns u64 · nbytes u64 · so many bytes
    what: 0 a record; 1 a record that was gone before it could be copied (no bytes);
          2 so many records (in `sequence`) were overwritten before they were seen (no bytes)

A file may end in the middle of an entry, because its writer was killed: whole entries are read, and `left_over` counts
the rest.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import penstock
from penstock.tools.capture.measure_error import NotACaptureFile

VERSION = 1
BEGINNING = b"penstock recording "
ENTRY = struct.Struct("<HHIQQQ")
RECORD, GONE, MISSED = range(3)
MAX_HEAD_NBYTES = 1 << 24  # bytes of the two lines; there is no description as long as that


class CapturedChannel(NamedTuple):
    """A channel that is captured, or was recorded."""

    name: str
    kind: str  # "ring", "broadcast", "inbox"
    schema: bytes  # the channel's description of its messages; empty: plain bytes


class CaptureEntry(NamedTuple):
    """One record of a channel (an index of the sources); without a frame it was gone before it could be copied.

    `missed` is how many records before this look were overwritten unseen; such an entry stands for no record.
    """

    source: int
    lane: int
    sequence: int
    committed_ns: int
    frame: bytes | None
    missed: int = 0


class CaptureWriter:
    """Writes entries to a recording."""

    def __init__(self, path: Path, sources: list[CapturedChannel]) -> None:
        about = {
            "penstock": penstock.__version__,
            "channels": [
                {"name": source.name, "kind": source.kind, "schema": base64.b64encode(source.schema).decode()}
                for source in sources
            ],
        }
        self._file: BinaryIO = path.open("wb")
        self._file.write(BEGINNING + b"%d\n" % VERSION + json.dumps(about).encode() + b"\n")

    def write(self, entry: CaptureEntry) -> None:
        if entry.missed:
            kind, sequence, frame = MISSED, entry.missed, b""
        else:
            kind, sequence, frame = RECORD if entry.frame is not None else GONE, entry.sequence, entry.frame or b""
        head = ENTRY.pack(entry.source, entry.lane, kind, sequence, entry.committed_ns, len(frame))
        self._file.write(head)
        self._file.write(frame)

    def close(self) -> None:
        self._file.close()


class CaptureFile:
    """A recording with a valid head. Raises NotACaptureFile, OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.left_over = 0  # bytes at the end that are not a whole entry; known when all have been read
        with path.open("rb") as file:
            self.sources = self._read_head(file)
            self._begin = file.tell()

    def _read_head(self, file: BinaryIO) -> list[CapturedChannel]:
        line = file.readline(64)
        if not line.startswith(BEGINNING) or not line.endswith(b"\n"):
            raise NotACaptureFile(f"{self._path} is not a recording of penstock")
        version = line[len(BEGINNING) : -1].decode(errors="replace")
        if version != str(VERSION):
            raise NotACaptureFile(
                f"{self._path} is a recording of version {version!r}; penstock {penstock.__version__} reads version "
                f"{VERSION}"
            )
        line = file.readline(MAX_HEAD_NBYTES)
        try:
            if not line.endswith(b"\n"):
                raise ValueError("the line is cut off")
            return [
                CapturedChannel(
                    str(channel["name"]), str(channel["kind"]), base64.b64decode(channel["schema"], validate=True)
                )
                for channel in json.loads(line)["channels"]
            ]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise NotACaptureFile(f"{self._path} has a head that cannot be read: {error!r}") from None

    def __iter__(self) -> Iterator[CaptureEntry]:
        """Yields the entries. Raises NotACaptureFile at a malformed one."""
        self.left_over = 0
        with self._path.open("rb") as file:
            nbytes_left = os.fstat(file.fileno()).st_size - self._begin
            file.seek(self._begin)
            while nbytes_left:
                head = file.read(ENTRY.size)
                if len(head) < ENTRY.size:
                    self.left_over = nbytes_left
                    return
                source, lane, kind, sequence, committed_ns, nbytes = ENTRY.unpack(head)
                if source >= len(self.sources) or kind > MISSED or (kind != RECORD and nbytes):
                    at = file.tell() - ENTRY.size
                    raise NotACaptureFile(f"{self._path} holds no entry at byte {at}, where one must be")
                if ENTRY.size + nbytes > nbytes_left:
                    self.left_over = nbytes_left
                    return
                nbytes_left -= ENTRY.size + nbytes
                if kind == MISSED:
                    yield CaptureEntry(source, lane, 0, committed_ns, None, missed=sequence)
                else:
                    yield CaptureEntry(
                        source, lane, sequence, committed_ns, file.read(nbytes) if kind == RECORD else None
                    )
