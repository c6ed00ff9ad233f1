"""What a scheduler may do: the lengths and ids that the model allows, and how much one step computes."""

from __future__ import annotations

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`Scheduler` checks it against the batch."""

    max_model_len: int  # tokens of prompt and answer together
    max_num_batched_tokens: int = 2048  # that one step computes at most
    vocabulary: int = 1 << 31  # ids of prompts are below that
    eos_ids: tuple[int, ...] = ()
    has_prefix_cache: bool = True  # False: blocks are shared only within a request
    has_overlap: bool = True  # a step is planned while the one before it runs
    max_short_prompt: int | None = None  # prompts of more tokens share no blocks with those of fewer; None: all share
    output_processors: int = 1
