"""The configuration of a process cluster, given once, when it starts: frozen, and checked where it enters.

The command line parses its options, and each process reads what it needs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.protocol.messages import MAX_SLOTS, SamplingParams

LOG_LEVELS = ("debug", "info", "warning", "error")
SHIPPED = str(Path(__file__).parents[2] / "shipped" / "penstock-shapes")  # so that there is always a model to serve
DTYPES = ("auto", "float32", "bfloat16", "float16")
ENCODER_MODES = ("weights", "data", "store")  # the first two are vLLM's
TRANSPORTS = ("auto", "store", "inline")
DEVICES = re.compile(r"cpu|cuda(:\d+)?")
MAX_LANES = 64  # of an inbox; native/layout.h
MAX_MODEL_LEN = 4096
_MANY = (1 << 31) - 1


class SimulatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated device: it computes nothing, a step takes its time on a clock, and tokens follow a rule."""

    step_seconds: float = 0.005
    token_seconds: float = 0.0  # more for each token that the step computes
    blocks: int = 65_536
    vocabulary: int = 32_000
    seed: int = 0
    end_id: int | None = None  # the token that ends a sample; None: the rule never gives one
    end_one_in: int = 64  # one token in so many is the end
    opens_images: bool = True  # and reads a byte of each page of theirs, when their request joins

    def __post_init__(self) -> None:
        _within(self, "step_seconds", float, 0, 3600)
        _within(self, "token_seconds", float, 0, 60)
        _within(self, "blocks", int, 1, _MANY)
        _within(self, "vocabulary", int, 1, _MANY)
        _within(self, "seed", int, 0, (1 << 64) - 1)
        _within(self, "end_one_in", int, 1, _MANY)
        _require_bool(self, "opens_images")
        if self.end_id is not None:
            _within(self, "end_id", int, 0, self.vocabulary - 1)


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of requests that do not give them. None: the default of `SamplingParams`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        SamplingParams(**self.given)

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """The machines of one server, each with a cluster of its own. Node 0, the home node, has the API servers.

    Each node has as many groups, and the home node reaches those of the others by bridges. Or, with
    `tensor_parallel_over_nodes`, each node has an equal part of the workers of each group, and all else is at home.
    """

    count: int
    rank: int = 0  # of the node to which this cluster belongs
    address: str  # at which the home node listens for the others
    port: int = 29501  # the first of as many ports as there are links: one for each group and other node
    # Paths on each node, of PEM files: this node's certificate and key, and the certificate of the authority of all
    # nodes. Empty: links are not encrypted.
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tensor_parallel_over_nodes: bool = False

    def __post_init__(self) -> None:
        _within(self, "count", int, 2, 16)
        _within(self, "rank", int, 0, self.count - 1)
        _within(self, "port", int, 1, 65535)
        _require_bool(self, "tensor_parallel_over_nodes")
        if not self.address:
            raise ValueError("expected address (--master-addr) of the home node, got none")
        given = [bool(path) for path in (self.tls_cert, self.tls_key, self.tls_ca)]
        if any(given) and not all(given):
            raise ValueError(
                "TLS between nodes needs all of tls_cert, tls_key and tls_ca (--nodes-tls-cert, --nodes-tls-key, "
                f"--nodes-tls-ca), got {self.tls_cert!r}, {self.tls_key!r}, {self.tls_ca!r}"
            )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster of processes of one node. Times are in seconds."""

    model: str = ""  # a directory; not needed by a simulated device
    simulated: SimulatedDevice | None = None  # None: the model is computed
    device: str = "cpu"
    dtype: str = "auto"
    threads: int | None = None  # of each worker, that compute on a CPU; None: what proves best when the model is loaded
    enforce_eager: bool = False  # on a device of CUDA: decode steps are not recorded as graphs and replayed

    api_server_count: int = 1  # processes that submit requests
    data_parallel_size: int = 1  # groups of this node: each a core, its workers and its output processors
    tensor_parallel_size: int = 1  # workers of each core
    output_processors: int = 1  # of each core; 0: their work is done in the core
    nodes: Nodes | None = None  # None: this node is the only one
    async_scheduling: bool = True  # a step is sent before the result of the one before it is in

    max_num_seqs: int = 256  # sequences that run, or are preempted, at a time: slots
    block_size: int = 16  # tokens
    num_gpu_blocks_override: int | None = (
        None  # of the cache; None: as many as can be filled and the device has room for
    )
    max_num_batched_tokens: int = 2048  # tokens that one step computes, at most
    max_model_len: int = MAX_MODEL_LEN  # tokens of a prompt and its answer; never more than the model has positions for
    enable_prefix_caching: bool = True
    end_ids: tuple[int, ...] = ()  # besides those that the model's own files name
    generation_config: str = "auto"  # sampling defaults are those of generation_config.json; "vllm": neutral ones
    sampling_defaults: SamplingDefaults = SamplingDefaults()  # of requests; from the model by `with_model_defaults`
    store_nbytes: int = 0  # of the store for images and videos; 0: there is none
    # How tensors of requests travel: in the store, all of them; inline, in messages; or auto: in the store if there is
    # one, and inline where it has no room.
    tensor_transport: str = "auto"
    huge_pages: bool = False  # of 2 MiB for that store, where there are any
    # How images are encoded: by every rank for itself (weights), divided among the ranks (data), or once for all
    # engines, in a store of encodings (store); None: see `encoder_tp_mode`.
    mm_encoder_tp_mode: str | None = None
    encoder_cache_nbytes: int = 1 << 28  # of that store; in the other modes, of each worker's cache of encodings
    numa_node: int | None = None  # where shared memory lies; None: near the process that touches it first
    max_concurrent_videos: int = 2  # that a server decodes at a time, each in a process that uses the store
    enable_prompt_embeds: bool = False  # completions may have embeddings instead of text

    start_timeout: float = 600.0  # until a group serves
    step_timeout: float = 30.0  # until a step's result is in, or a receiver takes what is sent to it
    shutdown_timeout: float = 30.0  # until open requests are answered, when the cluster is to end
    migration_limit: int = 3  # how often a request is resumed after the loss of its group; 0: never, and it is not kept
    migration_timeout: float = 600.0  # until another group takes a request that its group has lost; as start_timeout
    queue_timeout: float = 600.0  # until a group takes a new request, while a lost group is started again
    migration_max_seq_len: int | None = None  # tokens up to which a request is kept to be resumed; None: any number
    log_format: str = "text"  # or "json"
    log_level: str = "info"  # events below it are not logged; "debug" has the trace of what could not start

    def __post_init__(self) -> None:
        for name, low, high in (
            ("api_server_count", 1, 32),
            ("data_parallel_size", 1, 16),
            ("tensor_parallel_size", 1, 16),
            ("output_processors", 0, 8),
            ("max_num_seqs", 1, MAX_SLOTS - 1),
            ("block_size", 1, 4096),
            ("max_num_batched_tokens", 1, _MANY),
            ("max_model_len", 1, 1 << 30),
            ("store_nbytes", 0, 1 << 44),
            ("migration_limit", 0, _MANY),
            ("encoder_cache_nbytes", 0, 1 << 44),
            ("max_concurrent_videos", 1, 32),
        ):
            _within(self, name, int, low, high)
        for name in ("start_timeout", "step_timeout", "shutdown_timeout", "migration_timeout", "queue_timeout"):
            _within(self, name, float, 0, 1e6)
        for name in (
            "async_scheduling",
            "enable_prefix_caching",
            "enforce_eager",
            "huge_pages",
            "enable_prompt_embeds",
        ):
            _require_bool(self, name)
        for name in ("num_gpu_blocks_override", "threads", "migration_max_seq_len"):
            if getattr(self, name) is not None:
                _within(self, name, int, 1, _MANY)
        if self.numa_node is not None:
            _within(self, "numa_node", int, 0, 1023)
        if self.huge_pages and not self.store_nbytes:
            raise ValueError("huge_pages are for the store: store_nbytes (--mm-processor-cache-gb) is 0")
        for end_id in self.end_ids:
            if end_id < 0:
                raise ValueError(f"end_ids are numbers of tokens, not {end_id!r}")
        require_dtype(self.dtype)
        if not DEVICES.fullmatch(self.device):
            raise ValueError(f"device is cpu, cuda, or cuda:N for the device of that number, not {self.device!r}")
        _require_transport(self.tensor_transport, self.store_nbytes)
        _require_encoder_mode(self.mm_encoder_tp_mode, self.encoder_cache_nbytes)
        if self.generation_config not in ("auto", "vllm"):
            raise ValueError(f"generation_config is 'auto' or 'vllm', not {self.generation_config!r}")
        if self.log_format not in ("text", "json"):
            raise ValueError(f"log_format is 'text' or 'json', not {self.log_format!r}")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level is {', '.join(LOG_LEVELS)}, not {self.log_level!r}")
        if self.simulated is None and not self.model:
            raise ValueError("expected model, a directory, or simulated, got neither")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is at least max_num_seqs ({self.max_num_seqs}), "
                f"not {self.max_num_batched_tokens}"
            )
        self._require_divided_ranks()
        lanes = self.all_groups * (1 + self.output_processors) + 1
        if lanes > MAX_LANES:
            raise ValueError(
                f"data_parallel_size of all nodes x (1 + output_processors) is at most {MAX_LANES - 1}, as each of "
                f"them answers each server: not {lanes - 1}"
            )

    def _require_divided_ranks(self) -> None:
        """Raises ValueError unless the ranks can be divided among the nodes, if they are to be."""
        if self.nodes is None or not self.has_spread_ranks:
            return
        if self.tensor_parallel_size % self.nodes.count:
            raise ValueError(
                f"tensor_parallel_size is a multiple of the number of nodes ({self.nodes.count}) with "
                f"tensor_parallel_over_nodes, not {self.tensor_parallel_size}"
            )
        if self.mm_encoder_tp_mode == "store":
            raise ValueError(
                "mm_encoder_tp_mode 'store' needs all workers of an engine on one node, which share the store of "
                "encodings: expected weights or data with tensor_parallel_over_nodes"
            )

    # ── nodes ──
    @property
    def is_headless(self) -> bool:
        """Returns whether the API servers are on another node."""
        return self.nodes is not None and self.nodes.rank > 0

    @property
    def has_spread_ranks(self) -> bool:
        """Returns whether the workers of each group are divided among the nodes."""
        return self.nodes is not None and self.nodes.tensor_parallel_over_nodes

    @property
    def has_cores(self) -> bool:
        """Returns whether this node has the cores of its groups, and not only some of their workers."""
        return not (self.is_headless and self.has_spread_ranks)

    def ranks_of(self, node: int) -> range:
        """Returns the ranks of each group that are on a node."""
        if self.nodes is None or not self.has_spread_ranks:
            return range(self.tensor_parallel_size)
        number = self.tensor_parallel_size // self.nodes.count
        return range(node * number, (node + 1) * number)

    @property
    def ranks(self) -> range:
        """Returns the ranks of each group that are on this node."""
        return self.ranks_of(0 if self.nodes is None else self.nodes.rank)

    @property
    def rank_nodes(self) -> range:
        """Returns the other nodes that have ranks of the cores of this node."""
        return range(1, 1 if self.nodes is None or not self.has_spread_ranks or self.is_headless else self.nodes.count)

    @property
    def remote_groups(self) -> int:
        """Returns how many groups of other nodes this node reaches. Their numbers follow those of its own."""
        if self.nodes is None or self.is_headless or self.has_spread_ranks:
            return 0
        return self.data_parallel_size * (self.nodes.count - 1)

    @property
    def all_groups(self) -> int:
        """Returns the number of groups to which this node's servers send requests."""
        return self.data_parallel_size + self.remote_groups

    def node_of(self, group: int) -> int:
        """Returns the rank of the node that has a group, by the group's number on the home node."""
        return group // self.data_parallel_size

    def device_of(self, group: int, rank: int) -> str:
        """Returns the device of a worker: with `cuda`, each worker has its own."""
        ranks = self.ranks
        return f"cuda:{group * len(ranks) + rank - ranks.start}" if self.device == "cuda" else self.device

    @property
    def encoder_tp_mode(self) -> str:
        """Returns how images are encoded. The default is `store` where images are in a store and computed by a CPU, and
        all workers of a group are on one node."""
        if self.mm_encoder_tp_mode is not None:
            return self.mm_encoder_tp_mode
        if self.has_spread_ranks:
            return "weights"
        is_shared = self.device == "cpu" and self.simulated is None and self.store_nbytes and self.encoder_cache_nbytes
        return "store" if is_shared else "weights"

    @property
    def max_blocks_per_request(self) -> int:
        """Returns how many blocks one sample has at most."""
        return -(-self.max_model_len // self.block_size)


def require_dtype(name: str) -> None:
    """Raises ValueError."""
    if name not in DTYPES:
        raise ValueError(f"dtype is {', '.join(DTYPES)}, not {name!r}")


def _require_encoder_mode(mode: str | None, cache_nbytes: int) -> None:
    """Raises ValueError unless images can be encoded so."""
    if mode not in (None, *ENCODER_MODES):
        raise ValueError(f"mm_encoder_tp_mode is {', '.join(ENCODER_MODES)}, not {mode!r}")
    if mode == "store" and not cache_nbytes:
        raise ValueError(
            "mm_encoder_tp_mode 'store' needs a store of encodings: encoder_cache_nbytes (--encoder-cache-gb) is 0"
        )


def _require_transport(transport: str, store_nbytes: int) -> None:
    """Raises ValueError unless tensors can travel so."""
    if transport not in TRANSPORTS:
        raise ValueError(f"tensor_transport is {', '.join(TRANSPORTS)}, not {transport!r}")
    if transport == "store" and not store_nbytes:
        raise ValueError("tensor_transport 'store' needs a store: store_nbytes (--mm-processor-cache-gb) is 0")
    if transport == "inline" and store_nbytes:
        raise ValueError(
            f"tensor_transport 'inline' uses no store: expected store_nbytes (--mm-processor-cache-gb) of 0, "
            f"not {store_nbytes}"
        )


def _require_bool(struct: Any, name: str) -> None:
    """Raises TypeError."""
    if not isinstance(getattr(struct, name), bool):
        raise TypeError(f"{name} is True or False, not {getattr(struct, name)!r}")


def _within(struct: Any, name: str, kind: type, low: float, high: float) -> None:
    value: Any = getattr(struct, name)
    is_number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not is_number:
        raise TypeError(f"{name} is a {'whole ' if kind is int else ''}number, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} is between {low} and {high}, not {value}")
