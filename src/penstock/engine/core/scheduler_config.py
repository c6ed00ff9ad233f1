"""What a scheduler may do: the lengths and ids that the model allows, and how much one step computes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Ready


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`Scheduler` checks it against the batch."""

    max_model_len: int  # tokens of prompt and answer together
    max_num_batched_tokens: int = 2048  # that one step computes at most
    vocabulary: int = 1 << 31  # ids of prompts are below that
    eos_ids: tuple[int, ...] = ()
    has_prefix_cache: bool = True  # False: blocks are shared only within a request
    has_overlap: bool = True  # a step is planned while the one before it runs
    max_short_prompt: int | None = None  # prompts of more tokens share no blocks with those of fewer; None: all share
    full_step_tokens: int | None = None  # of prompts, with which a step admits no more of them; None: no limit
    output_processors: int = 1
    max_loras: int | None = None  # adapters in a batch; None: no limit
    computes_whole: bool = False  # all tokens of a prompt in one step: its tokens attend both ways
    repeats_singly: bool = False  # ids of the last block of a resumed sample are computed one a step, as before

    @classmethod
    def of(cls, config: EngineConfig, ready: Sequence[Ready]) -> SchedulerConfig:
        """Returns what the engine's options and its workers allow."""
        return cls(
            max_model_len=config.max_sequence_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocabulary=min(message.vocabulary for message in ready),
            eos_ids=config.end_ids,
            has_prefix_cache=config.enable_prefix_caching,
            has_overlap=config.async_scheduling,
            max_short_prompt=ready[0].max_short_prompt,
            full_step_tokens=ready[0].full_step_tokens,
            output_processors=max(1, config.output_processors),
            max_loras=config.lora.max_loras,
            computes_whole=config.is_encoder,
            repeats_singly=all(message.kv_epoch is not None and message.dtype != "float32" for message in ready),
        )
