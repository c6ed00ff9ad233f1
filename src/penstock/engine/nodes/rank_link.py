"""The link between two processes of a group with workers on several nodes: each stands for the remote part.

    home node                                          a node with workers only
    core ─► steps, once for each node ───────► remote_ranks ══════► remote_core ─► steps ─► each local worker
    core ◄─ inbox ◄─────────────────────────── remote_ranks ◄══════ remote_core ◄─ inbox ◄─ each local worker
            SERVING of the group's row ──────► remote_ranks ══════► remote_core
            losses ◄────────────────────────── remote_ranks ◄══════ remote_core

Frames pass unchanged. One link is one incarnation of the group on both nodes. Leaves the messages between ranks to
torch.distributed: the link brings the port at which the ranks meet.
"""

from __future__ import annotations

import msgspec

from penstock.bridge import LinkSpec
from penstock.engine.nodes.group_link import HEARTBEAT_S, SILENCE_S, model_facts, model_word
from penstock.engine.protocol.config import EngineConfig, Nodes

STEPS_NAME, INBOX_NAME, SERVING_NAME = "steps", "inbox", "serving"  # in the link
# Options that decide the shapes of a step, the arithmetic, or the collective operations of a rank.
COMMON_OPTIONS = (
    *("data_parallel_size", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *(
        "block_size",
        "num_gpu_blocks_override",
        "dtype",
        "collectives",
        "threads",
        "enforce_eager",
        "end_ids",
        "simulated",
    ),
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
