"""Caches of processed images that the API servers, engine cores and workers of a machine share: one store for all.

    API server                         engine core                        workers
    put once, or found                 opens the reference, and holds     open the reference while
    item = reference, signed ────────► the value as long as its     ────► the core holds the value
    holds it until a core              request lives
    has opened it (Issues)

vLLM has no cache for several API servers or engines: each server sends each image again. With one server and one
engine, vLLM's storage keeps a value until every worker has read the value, so images of a request that is aborted early
stay for ever. With this module, the engine core holds images, and only while the core has the request.

The engine core decides. A reference to an evicted value (the server died, or sent the reference a minute ago) is a
cache miss of the request: vLLM answers the client with an error that can be retried, and the server puts the image
again. A worker cannot miss: the core holds forwarded images, through preemption and abort, until the request and each
step with the image are gone.

An image is stored with the prompt updates, so an API server need not process an image that a different server has put.
Updates that cannot be pickled stay with the server that made them, and all servers process the image.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import multiprocessing
import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-not-found]
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.cache import factories
from vllm.multimodal.cache.base import (
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    MultiModalCacheMissError,
)
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem
from vllm.utils.cache import CacheInfo
from vllm.utils.mem_constants import GiB_bytes, MiB_bytes
from vllm.v1.engine.exceptions import EngineDeadError

from penstock import ClosedError, Handle, Lease, Loan, MemoryExhausted, Missing, Timeout
from penstock.integrations.vllm.deaths import first_death
from penstock.integrations.vllm.image_values import ImageValues
from penstock.integrations.vllm.issues import Issues
from penstock.integrations.vllm.settings import fall_back, rebind
from penstock.integrations.vllm.signed_store import SHARED_IMAGES, SignedStore, ticket_of
from penstock.lowlevel import Ref

PART = "images"
CORE = "vllm engine core"  # the name of each core among the store's peers
MAX_ITEMS = 2048
MAX_PEERS = 64
SPARE_PEERS = 4  # a core that starts again attaches before the place of its predecessor is free
PUT_TIMEOUT = 1.0  # seconds to wait while another API server writes the same image
REFERENCE, SIGNATURE = "address", "signature"  # fields of an item: by "address" vLLM's scheduler knows it and keeps it

has_views = False  # replace() sets it, once for the process
shared: SignedStore | None = None  # the store that this process created
is_refused = False  # processes of the server cannot share a store: vLLM's cache stays, with private memory


def key_of(mm_hash: str) -> bytes:
    return hashlib.sha256(mm_hash.encode()).digest()


def name_the_death(method: Callable[..., Any]) -> Callable[..., Any]:
    """An API server that ends for a death closes its cache while threads prepare requests: the clients get vLLM's error
    of that death."""

    @functools.wraps(method)
    def call(self: SharedSenderCache, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except ClosedError as closed:
            if not first_death():
                raise
            raise EngineDeadError() from closed

    return call


class SharedSenderCache(BaseMultiModalProcessorCache):  # type: ignore[misc]
    """The part of the shared store in an API server: counts, and prompt updates that cannot be stored."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__()
        mm_config = vllm_config.model_config.get_multimodal_config()
        self.max_nbytes = mm_config.mm_shm_cache_max_object_size_mb * MiB_bytes
        self.signed = SignedStore.attach(SHARED_IMAGES, peer_name=f"vllm api server {os.getpid()}")
        self.store = self.signed.store
        self.issues = Issues(self.store, CORE)
        self._values = ImageValues(has_views=False)
        self._held_items: dict[str, tuple[Lease, Sequence[Any]]] = {}  # from is_cached_item until the item is used
        self._updates: OrderedDict[Ref, Sequence[Any]] = OrderedDict()  # of values put here without updates
        self._counts = self._reported = CacheInfo(hits=0, total=0)

    @name_the_death
    def is_cached_item(self, mm_hash: str) -> bool:
        if mm_hash not in self._held_items:
            item = self._find(mm_hash)
            if item is None:
                return False
            self._held_items[mm_hash] = item  # held: a server may want the room before the request is through
        return True

    @name_the_death
    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> tuple[Any, Sequence[Any]]:
        item = self._held_items.pop(mm_hash, None) or self._find(mm_hash)
        hits, total = self._counts
        self._counts = CacheInfo(hits=hits + (item is not None), total=total + 1)
        if item is None:
            assert mm_item is not None, f"vLLM asked whether {mm_hash} is cached, and it was not"
            item = self._put(mm_hash, *mm_item)
            if item is None:
                return mm_item  # type: ignore[no-any-return]
        lease, updates = item
        return self._reference(mm_hash, lease), updates

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        self.is_cached_item(mm_hash)

    def release_sender_touches(self) -> None:
        self._held_items.clear()

    @name_the_death
    def validate_input_item(self, mm_item: Any, mm_hash: str) -> None:
        """Issues once more a reference that a client sent back.

        Raises:
            ValueError: the reference was not issued for the image, or the image is gone.
        """
        if REFERENCE not in mm_item:
            return
        ref = read_reference(self.signed, mm_item, mm_hash)
        try:
            lease = Handle(None, ref).open(self.store)
        except Missing as missing:
            raise ValueError(f"the image {mm_hash} is not cached any more: send it again") from missing
        self.issues.add(lease, mm_item)

    def clear_cache(self) -> None:
        self._held_items.clear()
        self._updates.clear()
        self.store.clear()
        self._counts = self._reported = CacheInfo(hits=0, total=0)

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        counts, before = self._counts, self._reported
        if not delta:
            return counts
        self._reported = counts
        return counts - before

    def close(self) -> None:
        self._held_items.clear()
        self.issues.close()
        self.signed.close()

    def _find(self, mm_hash: str) -> tuple[Lease, Sequence[Any]] | None:
        """Returns a lease of the image and the prompt updates, if both are known."""
        try:
            lease = self.store.get(key_of(mm_hash))
        except Missing:
            return None
        updates = self._updates_of(lease)
        if updates is None:
            lease.release()
            return None
        return lease, updates

    def _updates_of(self, lease: Lease) -> Sequence[Any] | None:
        pickled = lease.value()[1]
        if pickled is not None:
            return cloudpickle.loads(pickled)  # type: ignore[no-any-return]
        return self._updates.get(lease.ref)

    def _put(self, mm_hash: str, item: Any, updates: Sequence[Any]) -> tuple[Lease, Sequence[Any]] | None:
        """Puts the image and returns a lease; None: the image must travel in the request."""
        tree, nbytes = self._values.encode(item)
        if nbytes > self.max_nbytes:
            fall_back(
                PART,
                f"an image exceeds --mm-shm-cache-max-object-size-mb ({self.max_nbytes} bytes), and travels by itself",
            )
            return None
        try:
            pickled = cloudpickle.dumps(updates)
        except Exception:  # of any class of a model's
            pickled = None
        self.issues.release_opened()
        try:
            loan = self.store.loan(key_of(mm_hash), [tree, pickled], timeout=PUT_TIMEOUT)
        except (MemoryExhausted, Timeout) as error:
            fall_back(
                PART, f"{type(error).__name__} in the store of {self.store.nbytes} bytes: images travel by themselves"
            )
            return None
        if not isinstance(loan, Loan):  # a different server was faster, and may have a different image under the hash
            other_updates = self._updates_of(loan)
            return None if other_updates is None else (loan, other_updates)
        lease = loan.commit()
        if pickled is None:
            self._updates[lease.ref] = updates
            if len(self._updates) > MAX_ITEMS:
                self._updates.popitem(last=False)
        return lease, updates

    def _reference(self, mm_hash: str, lease: Lease) -> MultiModalKwargsItem:
        ref = lease.ref
        fields = {
            REFERENCE: [ref.segment, ref.block, ref.generation, ref.offset, ref.nbytes],
            SIGNATURE: list(self.signed.sign(mm_hash, ref)),
        }
        item = MultiModalKwargsItem(
            {name: MultiModalFieldElem(data=data, field=MultiModalBatchedField()) for name, data in fields.items()}
        )
        self.issues.release_opened()
        self.issues.add(lease, item)
        return item


def read_reference(signed: SignedStore, item: MultiModalKwargsItem, mm_hash: str) -> Ref:
    """Returns the reference in an item. Raises ValueError unless the reference was issued for the image."""
    numbers, signature = (item[name].data if name in item else () for name in (REFERENCE, SIGNATURE))
    try:
        ref = Ref(*numbers)
        is_issued = hmac.compare_digest(bytes(signature), signed.sign(mm_hash, ref))
    except (TypeError, ValueError):
        is_issued = False
    if not is_issued:
        raise ValueError(f"a reference of image {mm_hash} that no API server of this tree has issued")
    return ref


class HeldItem(MultiModalKwargsItem):  # type: ignore[misc]
    """A reference in the engine core, with a lease of the value. Only the reference is sent on."""

    lease: Lease

    def __reduce__(self) -> tuple[Any, ...]:
        return MultiModalKwargsItem, (self.data,)


class SharedCoreCache(BaseMultiModalReceiverCache):  # type: ignore[misc]
    """Holds the images of the requests of one engine core."""

    def __init__(self) -> None:
        super().__init__()
        self.signed = SignedStore.attach(SHARED_IMAGES, peer_name=CORE)

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        if mm_item is None or REFERENCE not in mm_item:
            return mm_item
        ref = read_reference(self.signed, mm_item, mm_hash)
        held = HeldItem(mm_item.data)
        try:
            held.lease = Handle(None, ref).open(self.signed.store)
        except Missing as missing:
            raise MultiModalCacheMissError([mm_hash]) from missing
        return held

    def touch_receiver_cache_item(self, mm_hash: str, mm_item: Any = None) -> None:
        pass

    def clear_cache(self) -> None:
        pass


class SharedWorkerCache(BaseMultiModalReceiverCache):  # type: ignore[misc]
    """Opens the references from an engine core."""

    def __init__(self) -> None:
        super().__init__()
        self.signed = SignedStore.attach(SHARED_IMAGES, peer_name="vllm worker")
        self._values = ImageValues(has_views=has_views)

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        if mm_item is None or REFERENCE not in mm_item:
            return mm_item
        ref = read_reference(self.signed, mm_item, mm_hash)
        with Handle(None, ref).open(self.signed.store) as lease:
            return self._values.decode(lease.value()[0])

    def touch_receiver_cache_item(self, mm_hash: str, mm_item: Any = None) -> None:
        pass

    def clear_cache(self) -> None:
        pass


# ── which processes share a store ──
def share_store(model_config: ModelConfig, parallel_config: ParallelConfig) -> None:
    """Creates the store of the processes of the server, if the configuration asks for a shared store.

    Does nothing in a process of a server with a store: API servers create their configuration again.
    """
    global shared, is_refused
    mm_config = model_config.multimodal_config
    ticket = ticket_of(SHARED_IMAGES)
    is_inherited = multiprocessing.parent_process() is not None and ticket is not None and ticket.pid != os.getpid()
    if mm_config is None or is_inherited:
        return
    os.environ.pop(SHARED_IMAGES, None)
    shared, is_refused = None, False
    if mm_config.mm_processor_cache_type != "shm" or mm_config.mm_processor_cache_gb <= 0:
        return
    local, engines = parallel_config.data_parallel_size_local, parallel_config.data_parallel_size
    peers = 1 + parallel_config._api_process_count + local * (1 + parallel_config.world_size) + SPARE_PEERS
    nbytes = int(mm_config.mm_processor_cache_gb * GiB_bytes)
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_ray = "ray" in (parallel_config.data_parallel_backend, parallel_config.distributed_executor_backend)
    is_elsewhere = parallel_config.nnodes > 1 or (local < engines and not parallel_config.local_engines_only)
    if is_ray or is_elsewhere:
        refuse("engines may run on other nodes, which share no memory")
    elif peers > MAX_PEERS:
        refuse(f"{peers} processes would share a store of at most {MAX_PEERS}")
    elif addresses != resource.RLIM_INFINITY and nbytes > addresses // 8:
        refuse(f"a store of {nbytes} bytes is more than an eighth of RLIMIT_AS ({addresses}): `ulimit -v` is too low")
    else:
        try:
            shared = SignedStore.create(
                SHARED_IMAGES,
                nbytes,
                name="vllm images",
                peer_name="vllm",
                max_items=MAX_ITEMS,
                max_peers=peers,
            )
        except (MemoryError, OSError) as error:
            refuse(f"no store: {error}")


def refuse(sentence: str) -> None:
    """Leaves images to vLLM's cache, which with several API servers or engines sends each image again."""
    global is_refused
    is_refused = True
    fall_back(PART, sentence)


def is_shared(vllm_config: VllmConfig) -> bool:
    return SHARED_IMAGES in os.environ and vllm_config.model_config.supports_multimodal_inputs


def replace(views: bool) -> None:
    """Makes the factories of vLLM's caches return ours where processes share a store."""
    global has_views
    has_views = views
    create_config = EngineArgs.create_engine_config
    processor, engine, worker = (
        factories.processor_cache_from_config,
        factories.engine_receiver_cache_from_config,
        factories.worker_receiver_cache_from_config,
    )

    @functools.wraps(create_config)
    def create_engine_config(self: EngineArgs, *arguments: Any, **keywords: Any) -> VllmConfig:
        config = create_config(self, *arguments, **keywords)
        share_store(config.model_config, config.parallel_config)
        return config

    def processor_cache_from_config(vllm_config: VllmConfig) -> Any:
        return SharedSenderCache(vllm_config) if is_shared(vllm_config) else processor(vllm_config)

    def engine_receiver_cache_from_config(vllm_config: VllmConfig) -> Any:
        return SharedCoreCache() if is_shared(vllm_config) else engine(vllm_config)

    def worker_receiver_cache_from_config(vllm_config: VllmConfig, shared_worker_lock: Any) -> Any:
        return SharedWorkerCache() if is_shared(vllm_config) else worker(vllm_config, shared_worker_lock)

    EngineArgs.create_engine_config = create_engine_config
    for original, replacement in (
        (processor, processor_cache_from_config),
        (engine, engine_receiver_cache_from_config),
        (worker, worker_receiver_cache_from_config),
    ):
        rebind(original, replacement)
