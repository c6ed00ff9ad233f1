"""vLLM's shared-memory image cache on a Store: its storage and its ring buffer, by both names.

vLLM's sender and receiver caches stay, and keep values in a Store. A handle stays (address, monotonic id, signature).
Each issued handle grants every attached reader one `open`: a value may be evicted after all living readers have opened
the value.

The writer decides: if the writer could not create a store, readers follow to vLLM's ring buffer. Servers use the caches
of image_caches.py. This module serves users of vLLM's classes by name, such as vLLM's tests, and keeps the promise of
these classes: a value stays until every reader has read the value.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Callable
from multiprocessing.synchronize import Lock
from typing import Any, cast

from vllm.distributed.device_communicators import shm_object_storage as vllm_storage
from vllm.multimodal.cache import shm

from penstock import Lease, MemoryExhausted, Missing
from penstock.integrations.vllm import image_caches
from penstock.integrations.vllm.image_values import ImageValues, are_views_safe
from penstock.integrations.vllm.settings import Settings, fall_back
from penstock.integrations.vllm.signed_store import SignedStore, store_variable

PART = "images"
SLACK_NBYTES = 64 << 10  # beside vLLM's size: values begin at multiples of 64 bytes, and have a layout
MAX_ITEMS = 2048
MAX_PEERS = 32
KEY = struct.Struct("<QQ16x")  # monotonic id, address

VllmRing: Any = vllm_storage.SingleWriterShmRingBuffer
VllmStorage: Any = vllm_storage.SingleWriterShmObjectStorage
has_views = False  # replace() sets it, once for the process


class SingleWriterShmRingBuffer:
    """The store, by the name of vLLM's ring buffer; without a store, vLLM's ring buffer."""

    def __new__(cls, data_buffer_size: int, name: str | None = None, create: bool = False) -> Any:
        ring = super().__new__(cls)
        ring.name = name or secrets.token_hex(8)
        variable = store_variable(ring.name)
        if create:
            os.environ.pop(variable, None)  # of an earlier cache of this process
            if image_caches.is_refused:
                return VllmRing(data_buffer_size, name, create)
            try:
                ring.signed = SignedStore.create(
                    variable,
                    data_buffer_size + SLACK_NBYTES,
                    name="vllm images",
                    peer_name="vllm api server",
                    max_items=MAX_ITEMS,
                    max_peers=MAX_PEERS,
                )
            except (MemoryError, OSError) as error:
                fall_back(PART, f"no store: {error}")
                return VllmRing(data_buffer_size, name, create)
        elif variable in os.environ:
            ring.signed = SignedStore.attach(variable, peer_name="vllm worker")
            ring.signed.store.peers()  # attaches now: only attached readers get grants
        else:
            return VllmRing(data_buffer_size, name, create)
        return ring

    def __init__(self, data_buffer_size: int, name: str | None = None, create: bool = False) -> None:
        self.name: str
        self.signed: SignedStore
        self.data_buffer_size = data_buffer_size
        self.is_writer = create
        self.metadata: dict[int, int] = {}  # vLLM's own, of chunks; a store has none

    def handle(self) -> tuple[int, str]:
        return self.data_buffer_size, self.name

    def get_auth_secret(self) -> bytes:
        return self.signed.secret

    def close(self) -> None:
        self.signed.close()


class SingleWriterShmObjectStorage(VllmStorage):  # type: ignore[misc]
    """vLLM's storage of objects by key: an index of the writer, with values in a store."""

    def __new__(
        cls, max_object_size: int, n_readers: int, ring_buffer: Any, *more: Any, **options: Any
    ) -> SingleWriterShmObjectStorage:
        if isinstance(ring_buffer, SingleWriterShmRingBuffer):
            return cast("SingleWriterShmObjectStorage", super().__new__(cls))
        return cast(
            "SingleWriterShmObjectStorage", VllmStorage(max_object_size, n_readers, ring_buffer, *more, **options)
        )

    def __init__(
        self,
        max_object_size: int,
        n_readers: int,
        ring_buffer: SingleWriterShmRingBuffer,
        serde_class: type[Any] = vllm_storage.MsgpackSerde,
        reader_lock: Lock | None = None,
    ) -> None:
        super().__init__(max_object_size, n_readers, ring_buffer, serde_class, reader_lock)
        self.store = ring_buffer.signed.store
        self._values = ImageValues(self.ser_de, has_views=has_views)
        self._next_id = 0
        self._next_address = 0
        self._pinned: dict[str, Lease] = {}  # touched, and neither looked up nor released since
        self._unread: dict[int, tuple[Lease, int]] = {}  # by id: held for a number of absent readers
        self._cleared: list[bytes] = []  # given up with the next put, when no reader has a grant
        self._prune_at = MAX_ITEMS

    # ── the writer ──
    def put(self, key: str, value: Any) -> tuple[int, int]:
        if self.is_cached(key):
            raise ValueError(f"'{key}' already exists in the storage")
        tree, nbytes = self._values.encode(value)
        nbytes += self.flag_bytes
        if nbytes > self.max_object_size:
            fall_back(PART, f"a value exceeds max object size ({self.max_object_size} bytes), and travels by itself")
            raise ValueError(f"a value of {nbytes} bytes exceeds max object size ({self.max_object_size} bytes)")
        self._cleared = [cleared for cleared in self._cleared if not self._is_gone(cleared)]
        address, monotonic_id = self._next_address, self._next_id
        try:
            lease = self.store.put(tree, key=KEY.pack(monotonic_id, address), timeout=0)
        except MemoryExhausted as error:  # vLLM's cache sends the value instead
            fall_back(
                PART, f"the store of {self.store.nbytes} bytes is full of values in use; values travel by themselves"
            )
            raise error
        self._next_id, self._next_address = monotonic_id + 1, address + 1
        self.key_index[key] = (address, monotonic_id)
        self.id_index[monotonic_id] = key
        self._issue(monotonic_id, lease)
        if len(self.key_index) >= self._prune_at:
            self._prune()
        return address, monotonic_id

    def is_cached(self, key: str) -> bool:
        lease = self._find(key)
        if lease is not None:
            lease.release()
        return lease is not None

    def get_cached(self, key: str) -> tuple[int, int]:
        lease = self._find(key)
        if lease is None:
            raise KeyError(key)
        address, monotonic_id = self.key_index[key]
        self._issue(monotonic_id, lease)
        self._pinned.pop(key, None)
        return address, monotonic_id

    def release_touches(self) -> None:
        self._pinned.clear()

    def free_unused(self) -> None:
        """Gives up the oldest values, as many as two of the largest size, as vLLM does."""
        freed = 0
        for key in list(self.key_index):
            if freed >= 2 * self.max_object_size:
                return
            lease = self._find(key)
            if lease is None:
                continue
            nbytes = lease.nbytes
            lease.release()
            address, monotonic_id = self.key_index[key]
            if self.store.evict(KEY.pack(monotonic_id, address)):
                self._forget(key)
                freed += nbytes

    def clear(self) -> None:
        if not self.is_writer:
            return
        for key, (address, monotonic_id) in list(self.key_index.items()):
            self._cleared.append(KEY.pack(monotonic_id, address))
            self._forget(key)
        self._pinned.clear()
        self._unread.clear()
        self._next_address = 0

    def _issue(self, monotonic_id: int, lease: Lease) -> None:
        """Lets each reader open the value once more. The lease is taken over."""
        self.increment_writer_flag(monotonic_id)
        missing = self.n_readers - self.store.grant_all(lease)
        if missing <= 0:
            lease.release()
            return
        held, waiting = self._unread.get(monotonic_id, (lease, 0))
        self._unread[monotonic_id] = (held, waiting + missing)

    def _is_gone(self, key: bytes) -> bool:
        self.store.evict(key)
        try:
            self.store.get(key).release()
        except Missing:
            return True
        return False

    def _find(self, key: str) -> Lease | None:
        """Returns a lease of the current value of a key; None, and the key is forgotten, if it was evicted."""
        entry = self.key_index.get(key)
        if entry is None:
            return None
        address, monotonic_id = entry
        try:
            return self.store.get(KEY.pack(monotonic_id, address))
        except Missing:
            self._forget(key)
            return None

    def _forget(self, key: str) -> None:
        _, monotonic_id = self.key_index.pop(key)
        del self.id_index[monotonic_id]
        self.writer_flag.pop(monotonic_id, None)

    def _prune(self) -> None:
        for key in list(self.key_index):
            self.is_cached(key)
        self._prune_at = 2 * len(self.key_index) + MAX_ITEMS

    # ── readers ──
    def get(self, address: int, monotonic_id: int, signature: list[int] | None = None, key: str | None = None) -> Any:
        if not self.is_writer:
            self.verify_signature(key, address, monotonic_id, signature)
        # A reader uses up a grant. The writer has no grants, and only looks.
        with self._opened(address, monotonic_id, self.store.get if self.is_writer else self.store.open) as lease:
            if self.is_writer:
                self._read_in_place(monotonic_id)
            return self._values.decode(lease.value())

    def touch(self, key: str, address: int = 0, monotonic_id: int = 0, signature: list[int] | None = None) -> None:
        if self.is_writer:
            lease = self._find(key)
            if lease is not None:
                self._pinned[key] = lease
            return
        self.verify_signature(key, address, monotonic_id, signature)
        self._opened(address, monotonic_id, self.store.get).release()

    def _opened(self, address: int, monotonic_id: int, how: Callable[[bytes], Lease]) -> Lease:
        try:
            return how(KEY.pack(monotonic_id, address))
        except (Missing, struct.error):
            raise ValueError(f"the value of '{address}:{monotonic_id}' has been modified or is invalid") from None

    def _read_in_place(self, monotonic_id: int) -> None:
        """The writer reads in place of a reader that is not attached."""
        lease, waiting = self._unread.pop(monotonic_id, (None, 0))
        if lease is not None and waiting > 1:
            self._unread[monotonic_id] = (lease, waiting - 1)

    @staticmethod
    def create_from_handle(handle: vllm_storage.ShmObjectStorageHandle) -> Any:
        ring = SingleWriterShmRingBuffer(*handle.ring_buffer_handle)
        return SingleWriterShmObjectStorage(
            handle.max_object_size, handle.n_readers, ring, handle.serde_class, handle.reader_lock
        )


def replace(settings: Settings) -> None:
    """Binds our storage over vLLM's, and our caches where vLLM has none that processes share."""
    global has_views
    if vllm_storage.SingleWriterShmRingBuffer is SingleWriterShmRingBuffer:
        return  # vLLM loads its plugins more than once
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "forkserver":
        fall_back(PART, "a fork server does not pass on the environment, by which processes find the store")
        return
    has_views = are_views_safe(settings)
    vllm_storage.SingleWriterShmRingBuffer = shm.SingleWriterShmRingBuffer = SingleWriterShmRingBuffer
    vllm_storage.SingleWriterShmObjectStorage = shm.SingleWriterShmObjectStorage = SingleWriterShmObjectStorage
    image_caches.replace(has_views)
