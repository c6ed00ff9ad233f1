"""What vLLM sent to its workers in each step when public issue #6241 looked (2024-07): the whole state, as dataclasses.

Names and fields are theirs, as far as a decode step shows them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.vs_vllm.workload import TEMPERATURE, TOP_P, Decode


@dataclass
class SamplingParams:
    n: int = 1
    best_of: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: list[int] | None = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_text_buffer_length: int = 0
    all_stop_token_ids: list[int] = field(default_factory=list)


class SequenceStage(enum.Enum):
    PREFILL = 1
    DECODE = 2


@dataclass
class SequenceData:
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    cumulative_logprob: float
    num_computed_tokens: int
    stage: SequenceStage


@dataclass
class SequenceGroupState:
    num_steps: int = 1
    current_step: int = 0


@dataclass
class SequenceGroupMetadata:
    request_id: str
    is_prompt: bool
    seq_data: dict[int, SequenceData]
    sampling_params: SamplingParams
    block_tables: dict[int, list[int]]
    do_sample: bool = True
    pooling_params: int | None = None
    token_chunk_size: int = 1
    lora_request: int | None = None
    computed_block_nums: list[int] = field(default_factory=list)
    state: SequenceGroupState = field(default_factory=SequenceGroupState)
    multi_modal_data: int | None = None
    encoder_seq_data: int | None = None
    cross_block_table: int | None = None


@dataclass
class ExecuteModelRequest:
    seq_group_metadata_list: list[SequenceGroupMetadata]
    blocks_to_swap_in: list[int] = field(default_factory=list)
    blocks_to_swap_out: list[int] = field(default_factory=list)
    blocks_to_copy: list[int] = field(default_factory=list)
    virtual_engine: int = 0
    num_lookahead_slots: int = 0
    running_queue_size: int = 0
    previous_hidden_states: int | None = None
    num_steps: int = 1
    finished_requests_ids: list[str] = field(default_factory=list)


def whole_state(decode: Decode, params: Sequence[SamplingParams]) -> ExecuteModelRequest:
    """As it is before the step. Request numbers are 0, 1, …, as they were in the issue's script."""
    groups = [
        SequenceGroupMetadata(
            request_id=str(row),
            is_prompt=False,
            seq_data={
                row: SequenceData(list(seq.prompt), list(seq.output), seq.logprob, seq.computed, SequenceStage.DECODE)
            },
            sampling_params=params[row],
            block_tables={row: list(seq.blocks)},
        )
        for row, seq in enumerate(decode.running)
    ]  # fmt: skip
    return ExecuteModelRequest(groups, running_queue_size=len(groups))


def params_of(requests: int) -> list[SamplingParams]:
    """Each request has its own copy, as it had there."""
    created: list[Any] = [SamplingParams(temperature=TEMPERATURE, top_p=TOP_P) for _ in range(requests)]
    return created
