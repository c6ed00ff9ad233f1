"""The classes of the messages that vLLM (0.32) sends: outputs of the scheduler, of the model, and to the API server.

Names and fields are vLLM's. They stand in for its package, which need not be installed; `vllm_end` builds the messages.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass
class CachedRequestData:
    req_ids: list[str]
    resumed_req_ids: set[str]
    new_token_ids: list[list[int]]
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_encoder_inputs: dict[str, list[int]]
    finished_req_ids: set[str]
    free_encoder_mm_hashes: list[str]
    scheduled_encoder_input_stats: Any = None
    preempted_req_ids: set[str] | None = None
    has_structured_output_requests: bool = False
    pending_structured_output_tokens: bool = False
    num_invalid_spec_tokens: dict[str, int] | None = None
    kv_connector_metadata: Any = None
    has_sync_kv_loads: bool = False
    aux_output_connector_metadata: Any = None
    ec_connector_metadata: Any = None
    ec_manager_metadata: Any = None
    new_block_ids_to_zero: list[int] | None = None
    kv_cache_block_copies: list[Any] | None = None
    kv_connector_block_state: Any = None
    num_spec_tokens_to_schedule: int = 0
    num_common_prefix_blocks: list[int] = field(default_factory=lambda: [0])


@dataclass
class ModelRunnerOutput:
    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: Any = None
    prompt_logprobs_dict: dict[str, Any] = field(default_factory=dict)
    prompt_token_id_logprobs_dict: dict[str, Any] = field(default_factory=dict)
    pooler_output: list[Any] | None = None
    kv_connector_output: Any = None
    ec_connector_output: Any = None
    num_nans_in_logits: dict[str, int] | None = None
    cudagraph_stats: Any = None
    aux_output_connector_output: Any = None
    sampling_masks: Any = None


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: Any = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: Any = None
    timestamp: float = 0.0
    utility_output: Any = None
    finished_requests: set[str] | None = None


@dataclass
class NewRequest:
    """EngineCoreRequest, as the API server sends it: only the fields that are not empty here."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: list[Any] | None
    sampling_params: Any
    arrival_time: float
    client_index: int = 0
    priority: int = 0
