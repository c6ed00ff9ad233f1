"""Where the KV cache of a rank lies: in a file of the launcher, which the next life of the worker adopts."""

from __future__ import annotations

import hashlib
from logging import WARNING

from penstock.engine.cluster.kept_memory import VERSIONS, KeptMemory, MemoryFile
from penstock.engine.cluster.logs import event

LAYOUT = 1  # of keys and values in a block; another number discards what earlier workers have left


class KVPages:
    """Pages of the launcher's file, or none. After `open`, `epoch` names their content; None: no worker adopts it."""

    def __init__(self, file: MemoryFile | None, *parts: object) -> None:
        """`parts`: what decides keys and values of a block, beside ids and inputs, and their layout."""
        self._file = file
        self._key = hashlib.sha256(repr((LAYOUT, VERSIONS, *parts)).encode()).digest()
        self.epoch: bytes | None = None

    @property
    def num_blocks(self) -> int:
        """Returns the number of blocks in the file; 0: no former life has left pages of this key."""
        if self._file is None:
            return 0
        key, _, count = self._file.read_header()
        return count if key == self._key else 0

    def discard(self) -> None:
        """Gives the memory of former pages back."""
        if self._file is not None:
            self._file.empty()

    def open(self, blocks: int, nbytes: int) -> memoryview | None:
        """Returns the memory; None: there is no file, or the file cannot be used."""
        if self._file is None:
            return None
        try:
            memory = KeptMemory(self._file, self._key, blocks, nbytes)
        except (OSError, OverflowError) as error:
            event("kv cache is not kept", WARNING, reason=error)
            return None
        self.epoch = memory.epoch
        return memory.content
