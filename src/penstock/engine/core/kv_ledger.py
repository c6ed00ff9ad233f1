"""Opens the ledger of a group's blocks, in a file of the launcher, for the block cache of the core."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from logging import WARNING

import numpy as np

from penstock.engine._native import BlockCache, ledger_nbytes
from penstock.engine.cluster.counter import Row
from penstock.engine.cluster.kept_memory import KeptMemory, KVFiles
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.status_board import CHANGED, DAMAGED, StatusBoard
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.messages import Ready

RESUMED_FOUND, RESUMED_COMPUTED = StatusBoard.RESUMED_TOKENS.at.values()
VERSION = 2  # of the entries, and of what hashes cover


def open_cache(files: KVFiles | None, ready: Sequence[Ready], batch: BatchState, row: Row) -> BlockCache:
    """Returns the block cache. Where all ranks keep their pages, it begins with the valid blocks of the former life,
    and counts them in `row`."""
    blocks, slots, block_size = batch.blocks, batch.slots, batch.block_size
    epochs = [message.kv_epoch for message in sorted(ready, key=lambda message: message.rank)]
    if files is None:
        return BlockCache(blocks)
    if None in epochs:  # the others overwrite their pages, and no block is withdrawn: no later life may adopt them
        files.ledger.empty()
        return BlockCache(blocks)
    # Pages of a rank that were emptied have another epoch: all ranks adopt their pages, or none.
    parts = (struct.pack("<QQQQ", VERSION, blocks, slots, block_size), *filter(None, epochs))
    nbytes = ledger_nbytes(blocks, slots, block_size)
    try:
        memory = KeptMemory(files.ledger, hashlib.sha256(b"".join(parts)).digest(), blocks, nbytes)
    except OSError as error:
        event("kv cache is not kept", WARNING, reason=error)
        files.ledger.empty()  # as above
        return BlockCache(blocks)
    cache = BlockCache(blocks, np.frombuffer(memory.content, np.uint8), slots, block_size)
    reason = CHANGED if memory.is_discarded else DAMAGED if cache.damage else ""
    if reason:
        event("kv cache is discarded", WARNING, reason=reason, detail=cache.damage or "of another model, shape or size")
        row[StatusBoard.KV_DISCARDS.at[reason]] = 1
    if discard := row[StatusBoard.KV_DISCARD]:  # by the launcher
        row[StatusBoard.KV_DISCARDS + discard - 1] = 1
    row[StatusBoard.KV_ADOPTED] = cache.num_adopted
    event("kv cache is kept", adopted=cache.num_adopted, blocks=blocks)
    return cache
