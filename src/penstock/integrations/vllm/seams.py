"""What each part relies on in vLLM: names, signatures and fields, compared in place of versions.

A vLLM that differs in one of them keeps its own part. `optional` is what some versions from 0.28 to 0.33 lack.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any, Protocol

BROADCAST = "vllm.distributed.device_communicators.shm_broadcast"


class Seam(Protocol):
    @property
    def name(self) -> str:
        """Where it is: "module:attribute.attribute"."""

    def difference(self, value: Any) -> str | None:
        """Returns how the value differs from what is relied on: the end of a sentence that begins with its name."""


@dataclasses.dataclass(frozen=True)
class Exists:
    """A name that is there."""

    name: str

    def difference(self, value: Any) -> str | None:
        return None


@dataclasses.dataclass(frozen=True)
class Signature:
    """A function with these parameters, in this order."""

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
    """A dataclass with these fields, in this order."""

    name: str
    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def difference(self, value: Any) -> str | None:
        if not dataclasses.is_dataclass(value):
            return "is no dataclass"
        actual = tuple(field.name for field in dataclasses.fields(value))
        if tuple(name for name in actual if name not in self.optional) == self.fields:
            return None
        return f"has the fields ({', '.join(actual)}), not ({', '.join(self.fields)})"


@dataclasses.dataclass(frozen=True)
class HasFields:
    """A dataclass that has these fields among others, and takes all of its fields as positional arguments."""

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
    """A class with these public names, and no others: each of them is replaced."""

    name: str
    methods: frozenset[str]

    def difference(self, value: Any) -> str | None:
        actual = {name for cls in value.__mro__[:-1] for name in vars(cls) if not name.startswith("_")}
        missing, unknown = sorted(self.methods - actual), sorted(actual - self.methods)
        words = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"also has {', '.join(unknown)}"] * bool(unknown)
        return " and ".join(words) or None


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
    ),
    "images": (),
    "tensors": (),
    # Fields that are not named here travel as they are.
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


def misfit(part: str) -> str | None:
    """Returns a sentence about the first name of vLLM that differs from what the part relies on; None if all fit."""
    for seam in SEAMS[part]:
        module_name, _, path = seam.name.partition(":")
        value: Any = importlib.import_module(module_name)
        for name in path.split("."):
            if not hasattr(value, name):
                return f"this vLLM has no {seam.name}"
            value = getattr(value, name)
        if difference := seam.difference(value):
            return f"in this vLLM {seam.name} {difference}"
    return None
