"""Files for the weights of a node: one for each rank, which the workers of all groups and lives share.

The launcher holds the files, and a worker fills each of them once (`worker/shared_weights.py`).
"""

from __future__ import annotations

import fcntl
import os
from logging import WARNING
from pathlib import Path

from penstock.engine.cluster.kept_memory import MemoryFile, read_versions
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.model_fingerprint import files_state

F_SEAL_FUTURE_WRITE = 0x10  # of Linux 5.1, and Python 3.13
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE


class WeightFile(MemoryFile):
    """A file that one worker at a time may fill, until it is sealed. The lock of a process that dies is free."""

    FLAGS = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING

    def fileno(self) -> int:
        return self._fd

    def is_sealed(self) -> bool:
        return fcntl.fcntl(self._fd, fcntl.F_GET_SEALS) & SEALS == SEALS

    def read(self, nbytes: int, at: int) -> bytes:
        return os.pread(self._fd, nbytes, at)

    def seal(self) -> None:
        """Lets no process write to the file any more, but by mappings that are there. Raises OSError."""
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)


class NodeWeights:
    """The files of the launcher, for the files of the model as they are when a worker starts."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._versions = read_versions()
        self._state: object = None
        self._files: dict[int, WeightFile] = {}

    def file_of(self, rank: int) -> WeightFile | None:
        """Returns the file of a rank. Another file follows when the model, or a package that loads it, has changed: a
        sealed one keeps its content. None, with a line in the log: the system has no memory or descriptors left."""
        try:
            state = files_state(self._model), self._versions
            if state != self._state:
                self.close()
                self._state = state
            if rank not in self._files:
                self._files[rank] = WeightFile.create("weights", str(rank))
            return self._files[rank]
        except OSError as error:
            event("weights are not shared", WARNING, rank=rank, reason=error)
            return None

    def renew(self) -> None:
        """Reads the versions of packages again: processes that start from now on run those."""
        self._versions = read_versions()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
