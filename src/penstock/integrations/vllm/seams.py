"""The names, signatures and fields of vLLM that each part relies on, compared in place of versions.

A vLLM in which a name is missing, or has changed, keeps vLLM's part. A name that a newer vLLM has in addition is a
warning. `optional` names are missing in some versions from 0.28 to 0.33.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from types import CodeType
from typing import Any, Protocol

BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"
STORAGE = "vllm.distributed.device_communicators.shm_object_storage"
CACHE = "vllm.multimodal.cache"
CONFIG = "vllm.config"
TENSOR_IPC = "vllm.v1.engine.tensor_ipc"


class Seam(Protocol):
    @property
    def name(self) -> str:
        """Where it is: "module:attribute.attribute"."""

    def difference(self, value: Any) -> str | None:
        """Returns how the value differs from the expectation: the end of a sentence that begins with the name."""


@dataclasses.dataclass(frozen=True)
class Exists:
    """A name that exists."""

    name: str

    def difference(self, value: Any) -> str | None:
        return None


@dataclasses.dataclass(frozen=True)
class Signature:
    """A function with `parameters`, in order."""

    name: str
    parameters: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def difference(self, value: Any) -> str | None:
        actual = tuple(inspect.signature(value).parameters)
        required = tuple(name for name in actual if name not in self.optional)
        if required == self.parameters:
            return None
        return f"takes ({', '.join(actual)}), not ({', '.join(self.parameters)})"


@dataclasses.dataclass(frozen=True)
class Fields:
    """A dataclass with `fields`, in order."""

    name: str
    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def difference(self, value: Any) -> str | None:
        if not dataclasses.is_dataclass(value):
            return "is no dataclass"
        actual = tuple(field.name for field in dataclasses.fields(value))
        if tuple(name for name in actual if name in self.fields) == self.fields:
            return None
        return f"has the fields ({', '.join(actual)}), not ({', '.join(self.fields)})"

    def growth(self, value: Any) -> frozenset[str]:
        """Returns the fields that this integration does not know."""
        return frozenset(field.name for field in dataclasses.fields(value)) - {*self.fields, *self.optional}


@dataclasses.dataclass(frozen=True)
class HasFields:
    """A dataclass with at least `fields`, all of which are positional arguments."""

    name: str
    fields: tuple[str, ...]

    def difference(self, value: Any) -> str | None:
        if not dataclasses.is_dataclass(value):
            return "is no dataclass"
        actual = dataclasses.fields(value)
        if missing := sorted(set(self.fields) - {field.name for field in actual}):
            return f"has no field {', '.join(missing)}"
        if keywords := [field.name for field in actual if field.kw_only or not field.init]:
            return f"does not take its fields {', '.join(keywords)} as positional arguments"
        return None


@dataclasses.dataclass(frozen=True)
class Methods:
    """A class with `methods` as public names: all are replaced."""

    name: str
    methods: frozenset[str]

    def difference(self, value: Any) -> str | None:
        missing = sorted(self.methods - self._actual(value))
        return f"lacks {', '.join(missing)}" if missing else None

    def growth(self, value: Any) -> frozenset[str]:
        """Returns the public names that this integration does not know."""
        return self._actual(value) - self.methods

    @staticmethod
    def _actual(value: Any) -> frozenset[str]:
        return frozenset(name for cls in value.__mro__[:-1] for name in vars(cls) if not name.startswith("_"))


@dataclasses.dataclass(frozen=True)
class Mentions:
    """A function that contains `text` as a constant or an attribute: a field that is known by name."""

    name: str
    text: str

    def difference(self, value: Any) -> str | None:
        return None if self.text in _texts(inspect.unwrap(value).__code__) else f"does not mention {self.text!r}"


def _texts(code: CodeType) -> set[Any]:
    """Returns the constants and attributes of a function, and of the functions in it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_consts, *code.co_names}.union(*map(_texts, inner))


SEAMS: dict[str, tuple[Seam, ...]] = {
    "queue": (
        Methods(
            f"{BROADCAST}:MessageQueue",
            frozenset(
                "ReadTimeoutWithWarnings acquire_read acquire_write broadcast_object create_from_handle "
                "create_from_process_group create_from_process_group_single_reader dequeue enqueue export_handle recv "
                "shutdown wait_until_ready".split()
            ),
        ),
        Signature(
            f"{BROADCAST}:MessageQueue.__init__",
            ("self", "n_reader", "n_local_reader", "local_reader_ranks", "max_chunk_bytes", "max_chunks", "connect_ip"),
            optional=("enable_shm_tensor_arena",),
        ),
        Signature(f"{BROADCAST}:MessageQueue.create_from_handle", ("handle", "rank")),
        Signature(f"{BROADCAST}:MessageQueue.wait_until_ready", ("self",)),
        Signature(f"{BROADCAST}:MessageQueue.shutdown", ("self",)),
        Signature(f"{BROADCAST}:MessageQueue.acquire_write", ("self", "timeout")),
        Signature(f"{BROADCAST}:MessageQueue.acquire_read", ("self", "timeout", "indefinite")),
        Signature(f"{BROADCAST}:MessageQueue.enqueue", ("self", "obj", "timeout")),
        Signature(f"{BROADCAST}:MessageQueue.dequeue", ("self", "timeout", "indefinite")),
        Signature(f"{BROADCAST}:MessageQueue.broadcast_object", ("self", "obj")),
        Signature(f"{BROADCAST}:MessageQueue.export_handle", ("self",)),
        Fields(
            f"{BROADCAST}:Handle",
            (
                "local_reader_ranks",
                "buffer_handle",
                "local_subscribe_addr",
                "local_notify_addr",
                "remote_subscribe_addr",
                "remote_addr_ipv6",
            ),
            optional=("tensor_arena_handle",),
        ),
        Exists(f"{BROADCAST}:VLLM_RINGBUFFER_WARNING_INTERVAL"),
        Exists(f"{BROADCAST}:LONG_WAIT_TIME_LOG_MSG"),
    ),
    "images": (
        Signature(f"{STORAGE}:SingleWriterShmRingBuffer.__init__", ("self", "data_buffer_size", "name", "create")),
        Methods(
            f"{STORAGE}:SingleWriterShmRingBuffer",
            frozenset("access_buf allocate_buf byte2int clear close free_buf get_auth_secret handle int2byte".split()),
        ),
        Signature(
            f"{STORAGE}:SingleWriterShmObjectStorage.__init__",
            ("self", "max_object_size", "n_readers", "ring_buffer", "serde_class", "reader_lock"),
        ),
        Methods(
            f"{STORAGE}:SingleWriterShmObjectStorage",
            frozenset(
                "clear close copy_to_buffer create_from_handle default_is_free_check free_unused get get_cached "
                "get_signature handle increment_reader_flag increment_writer_flag is_cached put release_touches touch "
                "verify_signature".split()
            ),
        ),
        Signature(f"{STORAGE}:SingleWriterShmObjectStorage.put", ("self", "key", "value")),
        Signature(
            f"{STORAGE}:SingleWriterShmObjectStorage.get", ("self", "address", "monotonic_id", "signature", "key")
        ),
        Signature(
            f"{STORAGE}:SingleWriterShmObjectStorage.touch", ("self", "key", "address", "monotonic_id", "signature")
        ),
        Signature(f"{STORAGE}:MsgpackSerde.serialize", ("self", "value")),
        Fields(
            f"{STORAGE}:ShmObjectStorageHandle",
            ("max_object_size", "n_readers", "ring_buffer_handle", "serde_class", "reader_lock"),
        ),
        # The field by which vLLM's scheduler knows an image that is kept elsewhere.
        Mentions("vllm.multimodal.utils:strip_covered_mm_data", "address"),
        Exists(f"{CACHE}.shm:SingleWriterShmRingBuffer"),
        Exists(f"{CACHE}.shm:SingleWriterShmObjectStorage"),
        Methods(
            f"{CACHE}.base:BaseMultiModalProcessorCache",
            frozenset(
                "cache_if_fits clear_cache close get_and_update get_and_update_item invalidate is_cached "
                "is_cached_item make_stats release_sender_touches touch_sender_cache_item validate_input_item".split()
            ),
        ),
        Methods(
            f"{CACHE}.base:BaseMultiModalReceiverCache",
            frozenset(
                "cache_if_fits clear_cache get_and_update get_and_update_features get_and_update_item "
                "touch_receiver_cache_item".split()
            ),
        ),
        Exists(f"{CACHE}.base:MultiModalCacheMissError"),
        Signature(f"{CACHE}.factories:processor_cache_from_config", ("vllm_config",)),
        Signature(f"{CACHE}.factories:engine_receiver_cache_from_config", ("vllm_config",)),
        Signature(f"{CACHE}.factories:worker_receiver_cache_from_config", ("vllm_config", "shared_worker_lock")),
        Exists("vllm.engine.arg_utils:EngineArgs.create_engine_config"),
        # The number of API servers, which decides in vLLM whether each process has a cache; vLLM has no public name.
        Exists(f"{CONFIG}:ParallelConfig._api_process_count"),
        Exists(f"{CONFIG}:ParallelConfig.data_parallel_external_lb"),
        Exists(f"{CONFIG}:ParallelConfig.data_parallel_size_local"),
        Exists(f"{CONFIG}:ParallelConfig.data_parallel_backend"),
        Exists(f"{CONFIG}:ParallelConfig.local_engines_only"),
        Exists(f"{CONFIG}:ParallelConfig.nnodes"),
        Exists(f"{CONFIG}.multimodal:MultiModalConfig.mm_processor_cache_type"),
        Exists(f"{CONFIG}.multimodal:MultiModalConfig.mm_shm_cache_max_object_size_mb"),
    ),
    "tensors": (
        Methods(f"{TENSOR_IPC}:TensorIpcSender", frozenset({"new_message", "set_target_engine"})),
        Signature(f"{TENSOR_IPC}:TensorIpcSender.__init__", ("self", "queue")),
        Signature(f"{TENSOR_IPC}:TensorIpcSender.__call__", ("self", "tensor")),
        Signature(f"{TENSOR_IPC}:TensorIpcSender.set_target_engine", ("self", "target_engine")),
        Signature(f"{TENSOR_IPC}:TensorIpcReceiver.__call__", ("self", "dtype", "shape", "meta")),
        Signature("vllm.v1.engine.core:EngineCoreProc.preprocess_add_request", ("self", "request")),
        Mentions("vllm.v1.engine.core:EngineCoreProc.__init__", "tensor_ipc_receiver"),
        Signature(f"{CONFIG}:ModelConfig.verify_with_parallel_config", ("self", "parallel_config")),
        Exists(f"{CONFIG}.multimodal:MultiModalConfig.mm_tensor_ipc"),
        Signature(f"{CONFIG}.multimodal:MultiModalConfig.get_mm_processor_device_type", ("self",)),
    ),
    # With the queue: the way of a death to vLLM's clients.
    "deaths": (
        Signature("vllm.v1.executor.multiproc_executor:MultiprocExecutor.shutdown", ("self",)),
        Signature(
            "vllm.v1.executor.multiproc_executor:MultiprocExecutor.register_failure_callback", ("self", "callback")
        ),
        # Attributes of instances, which deaths.py reads: an AttributeError there would be the end of the server.
        Mentions("vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc", "is_failed"),
        Mentions("vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc", "rpc_broadcast_mq"),
        Mentions("vllm.v1.executor.multiproc_executor:MultiprocExecutor.get_response_mqs", "workers"),
        Mentions("vllm.v1.engine.utils:CoreEngineProcManager.__init__", "processes"),
        Mentions("vllm.v1.utils:APIServerProcessManager.__init__", "processes"),
        Mentions("vllm.v1.engine.async_llm:AsyncLLM.__init__", "output_processor"),
        Mentions("vllm.v1.engine.async_llm:AsyncLLM.__init__", "engine_core"),
        HasFields("vllm.v1.engine.core_client:BackgroundResources", ("engine_manager",)),
        Signature("vllm.v1.engine.utils:CoreEngineProcManager.shutdown", ("self", "timeout")),
        Signature("vllm.v1.utils:APIServerProcessManager.shutdown", ("self", "timeout")),
        Mentions("vllm.v1.utils:APIServerProcessManager.__init__", "sock"),
        Mentions("vllm.v1.utils:APIServerProcessManager.__init__", "ApiServer_"),
        Mentions("vllm.v1.engine.core:EngineCoreProc.__init__", "output_queue"),
        Exists("vllm.v1.engine.core:EngineCoreProc.ENGINE_CORE_DEAD"),
        Signature("vllm.v1.engine.core:EngineCoreProc.run_busy_loop", ("self",)),
        Signature("vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop", ("self",)),
        Exists("vllm.v1.engine.coordinator:DPCoordinatorProc.run_coordinator"),
        Signature("vllm.v1.engine.async_llm:AsyncLLM.shutdown", ("self", "timeout")),
        Mentions("vllm.v1.engine.async_llm:AsyncLLM.shutdown", "output_handler"),
        Signature("vllm.v1.engine.output_processor:OutputProcessor.propagate_error", ("self", "e")),
        Exists("vllm.v1.engine.exceptions:EngineDeadError"),
    ),
    # Fields without a name here are sent unchanged.
    "steps": (
        HasFields(
            "vllm.v1.core.sched.output:SchedulerOutput",
            ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
        ),
        HasFields(
            "vllm.v1.core.sched.output:CachedRequestData",
            ("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"),
        ),
        HasFields(
            "vllm.v1.core.sched.output:NewRequestData",
            ("req_id", "prompt_token_ids", "num_computed_tokens"),
        ),
        HasFields(
            "vllm.v1.outputs:ModelRunnerOutput",
            ("req_ids", "req_id_to_index", "sampled_token_ids"),
        ),
        Exists("vllm.v1.executor.multiproc_executor:WorkerProc.ResponseStatus.SUCCESS"),
    ),
}


def misfits(part: str) -> list[str]:
    """Returns a sentence about each name of vLLM that does not fit the part."""
    sentences = []
    for seam in SEAMS[part]:
        try:
            difference = seam.difference(_value(seam))
        except (AttributeError, ModuleNotFoundError):
            sentences.append(f"this vLLM has no {seam.name}")
            continue
        if difference is not None:
            sentences.append(f"in this vLLM {seam.name} {difference}")
    return sentences


def misfit(part: str) -> str | None:
    """Returns the first of `misfits`; None if all names fit."""
    return next(iter(misfits(part)), None)


def growths(part: str) -> list[str]:
    """Returns a sentence about each class that has more names than the part knows, where all names fit."""
    sentences = []
    for seam in SEAMS[part]:
        if not isinstance(seam, (Fields, Methods)):
            continue
        value = _value(seam)
        is_replaced = value.__module__.startswith("penstock.")  # vLLM may load its plugins more than once
        if not is_replaced and (names := seam.growth(value)):
            sentences.append(f"in this vLLM {seam.name} also has {', '.join(sorted(names))}")
    return sentences


def _value(seam: Seam) -> Any:
    module_name, _, path = seam.name.partition(":")
    value: Any = importlib.import_module(module_name)
    for name in path.split("."):
        value = getattr(value, name)
    return value
