"""The link between the two processes that stand for each other's side of one group: its workers are on several nodes.

    home node                                          a node that has workers only
    core ─► steps, once for each such node ─► remote_ranks ══════► remote_core ─► steps ─► each of its workers
    core ◄─ inbox ◄─────────────────────────── remote_ranks ◄══════ remote_core ◄─ inbox ◄─ each of its workers
            SERVING of the group's row ──────► remote_ranks ══════► remote_core
            losses ◄────────────────────────── remote_ranks ◄══════ remote_core

Frames pass as they are. One link is one incarnation of the group on both nodes. Leaves to torch.distributed what ranks
say to each other: the link brings the port at which they meet.
"""

from __future__ import annotations

import msgspec

from penstock.bridge import LinkSpec
from penstock.engine.nodes.group_link import HEARTBEAT_S, SILENCE_S, model_facts, model_word
from penstock.engine.protocol.config import EngineConfig, Nodes

STEPS_NAME, INBOX_NAME, SERVING_NAME = "steps", "inbox", "serving"  # in the link
# Options that decide the shapes of a step, its arithmetic, or which collective operations a rank takes part in.
COMMON_OPTIONS = (
    *("data_parallel_size", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("block_size", "num_gpu_blocks_override", "dtype", "device", "threads", "enforce_eager", "end_ids", "simulated"),
    *("enable_prompt_embeds", "encoder_tp_mode", "encoder_cache_nbytes"),
)


def rank_port(nodes: Nodes, group: int, node: int) -> int:
    """Returns the port of the home node for the ranks of a group on another node."""
    return nodes.port + group * (nodes.count - 1) + node - 1


def rank_link(config: EngineConfig, group: int, node: int, name: str) -> LinkSpec:
    """Returns what both sides say of themselves. Raises ValueError and OSError for files of the model."""
    facts = {option: msgspec.json.encode(getattr(config, option)).decode() for option in COMMON_OPTIONS}
    facts["nodes"] = str(0 if config.nodes is None else config.nodes.count)
    facts |= model_facts(config, model_word(config))
    return LinkSpec(
        link=f"ranks of group {group} on node {node}",
        name=name,
        same=facts,
        heartbeat_s=HEARTBEAT_S,
        silence_s=SILENCE_S,
    )
