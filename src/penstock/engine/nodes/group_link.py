"""The link between the bridge of a group, on the home node, and the group's uplink: the agreement of both sides.

    home node                                       the group's node
    server ─► inbox of the group ─► bridge ══════► uplink ─► inbox of the core
    server ◄─ its inbox of deltas ◄─ bridge ◄══════ uplink ◄─ inbox in the place of the server's
              row of the board    ◄─ bridge ◄══════ uplink ◄─ row of the board
              losses              ◄─ bridge ◄══════ uplink

Frames pass unchanged. The home node listens, and remote nodes connect.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.bridge import LinkSpec, Tls
from penstock.engine.cluster.model_fingerprint import WHOLE_FILES, file_hash, model_fingerprint
from penstock.engine.cluster.status_board import CORE, RANK_0, StatusBoard
from penstock.engine.protocol.config import EngineConfig, Nodes
from penstock.environment import NODE_SECRET

SECRET_NBYTES = 32
HEARTBEAT_S, SILENCE_S = 0.5, 2.0
ROW_NAME, LOSSES_NAME = "row", "losses"  # in the link
# Options that the servers, on the home node, and the cores, on all nodes, must have in common.
COMMON_OPTIONS = (
    *("api_server_count", "data_parallel_size", "output_processors", "max_model_len", "max_num_seqs"),
    *("dtype", "end_ids", "enable_prompt_embeds", "simulated"),
)
# Words of a row that pass to the home node, which writes the rest of the row.
ROW_PLACES = [
    word
    for counter in StatusBoard.DECLARED
    if counter.spec.owner in (CORE, RANK_0)
    for word in range(counter, counter + counter.spec.words)
]


def node_secret() -> bytes:
    """Returns the secret that all nodes share. Raises ValueError."""
    text = NODE_SECRET.read()
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_NBYTES:
        raise ValueError(
            f"expected {SECRET_NBYTES} bytes as {2 * SECRET_NBYTES} hexadecimal digits in {NODE_SECRET.name}, the same "
            f"on all nodes, got {len(text)} characters: openssl rand -hex {SECRET_NBYTES} draws them"
        )
    return secret


def node_tls(nodes: Nodes) -> Tls | None:
    """Returns the certificates of this node; None: links are not encrypted. Raises ValueError."""
    if not nodes.tls_cert:
        return None
    tls = Tls(nodes.tls_cert, nodes.tls_key, nodes.tls_ca)
    try:
        tls.context(is_server=True)
    except OSError as error:
        raise ValueError(f"TLS between nodes (--nodes-tls-cert, --nodes-tls-key, --nodes-tls-ca): {error}") from None
    return tls


def port_of(nodes: Nodes, data_parallel_size: int, group: int) -> int:
    """Returns the port of a remote group, by the group's number on the home node."""
    return nodes.port + group - data_parallel_size


def home_number(config: EngineConfig, group: int) -> int:
    """Returns the number of a local group on the home node."""
    return group + (0 if config.nodes is None else config.nodes.rank * config.data_parallel_size)


def model_word(config: EngineConfig) -> int:
    """Returns `ModelFingerprint.word` of the files of the model now; 0: a simulated device reads none. Raises
    ValueError and OSError."""
    return 0 if config.simulated is not None else model_fingerprint(Path(config.model)).word


def model_facts(config: EngineConfig, model: int) -> dict[str, str]:
    """Returns what two nodes compare of their models. Where `model_fingerprint` alone differs, the weights do."""
    facts = {name: file_hash(Path(config.model) / name) for name in WHOLE_FILES} if config.model else {}
    return {**facts, "model_fingerprint": f"{model:016x}"}


def group_link(config: EngineConfig, group: int, name: str, model: int) -> LinkSpec:
    """Returns the facts that both sides compare. `group`: the number on the home node. `model`: of the home node's
    files, and of the files that the group has loaded."""
    facts = {option: msgspec.json.encode(getattr(config, option)).decode() for option in COMMON_OPTIONS}
    facts["nodes"] = str(0 if config.nodes is None else config.nodes.count)
    facts |= model_facts(config, model)
    return LinkSpec(link=f"group {group}", epoch=0, name=name, same=facts, heartbeat_s=HEARTBEAT_S, silence_s=SILENCE_S)
