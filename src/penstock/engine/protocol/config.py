"""The configuration of an engine on one node: frozen, and checked when it is created.

Each field that a user may set declares its option: the parsers of `penstock serve` and `penstock generate`, the checks
and the tables of the documents are made of these declarations.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.engine.protocol.lora import LoraConfig
from penstock.engine.protocol.messages import MAX_SLOTS, SamplingParams
from penstock.engine.protocol.option import (
    GIB,
    MAX_SECONDS,
    MS,
    Option,
    check_options,
    option_field,
    parse_human_int,
    parse_object,
)
from penstock.environment import TENSOR_TRANSPORT

SHIPPED = str(Path(__file__).parents[2] / "shipped" / "penstock-shapes")  # a default model
DTYPE_SYNONYMS = {"half": "float16", "float": "float32"}
ENCODER_MODES = ("weights", "data", "store")  # the first two are vLLM's
DEVICES = re.compile(r"cpu|cuda(:\d+)?")
DEVICE_NAME = re.compile(r"\d+|GPU-[0-9a-fA-F-]{8,36}")  # of `--devices`: a number, or the UUID as nvidia-smi prints it
TRANSPORTS = "auto", "store", "inline", "device"
MAX_LANES = 64  # of an inbox; native/layout.h
MAX_MODEL_LEN = 4096
MAX_INT = (1 << 31) - 1


class SimulatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated device: it computes nothing, a step takes its time on a clock, and tokens follow a rule."""

    step_seconds: Annotated[float, Option("model", name="step-ms", unit=MS, ge=0, le=3600)] = 0.005
    """Time that a step of the simulated device takes"""
    token_seconds: Annotated[float, Option(ge=0, le=60)] = 0.0
    """Seconds by which each token that a step computes prolongs it"""
    blocks: Annotated[int, Option(ge=1, le=MAX_INT)] = 65_536
    """Number of blocks of the KV cache"""
    vocabulary: Annotated[int, Option(ge=1, le=MAX_INT)] = 32_000
    """Number of token ids"""
    seed: Annotated[int, Option(ge=0, le=(1 << 64) - 1)] = 0
    """Seed of the rule"""
    end_id: Annotated[int | None, Option(ge=0)] = None
    """Token that ends a sample; None: the rule never gives one"""
    end_one_in: Annotated[int, Option(ge=1, le=MAX_INT)] = 64
    """Number of tokens of which one is the end"""
    opens_images: Annotated[bool, Option()] = True
    """Read a byte of each page of an image when its request joins"""

    def __post_init__(self) -> None:
        check_options(self)
        if self.end_id is not None and self.end_id >= self.vocabulary:
            raise ValueError(f"expected end_id to be below vocabulary ({self.vocabulary}), got {self.end_id}")


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
        SamplingParams(**self.explicit)

    @property
    def explicit(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """The machines of one server, each with an engine of its own. Node 0, the home node, has the API servers.

    Each node has as many groups, and the home node reaches those of the others by bridges. Or, with
    `tensor_parallel_over_nodes`, each node has an equal part of the workers of each group, and all else is at home.
    """

    count: Annotated[int, Option("nodes", name="nnodes", short="-n", default=1, ge=2, le=16)]
    """Number of nodes (machines) with engines, which divide --data-parallel-size evenly; this command runs on each of
    them, with the same options"""
    rank: Annotated[int, Option("nodes", name="node-rank", short="-r", ge=0)] = 0
    """Rank of this node; the node of rank 0 has the API servers"""
    address: Annotated[str, Option("nodes", name="master-addr", metavar="HOST", default="127.0.0.1")]
    """Address at which the node of rank 0 listens for the others"""
    port: Annotated[int, Option("nodes", name="master-port", ge=1, le=65535)] = 29501
    """First of its ports, one for each engine of other nodes, or for each engine and other node with
    --tensor-parallel-over-nodes"""
    tls_cert: Annotated[str, Option("nodes", name="nodes-tls-cert", metavar="PATH", if_absent="not encrypted")] = ""
    """PEM file of the certificate of this node; links between nodes are TLS 1.3 then"""
    tls_key: Annotated[str, Option("nodes", name="nodes-tls-key", metavar="PATH", if_absent="not encrypted")] = ""
    """PEM file of the private key of that certificate, without a passphrase; links between nodes are TLS 1.3 then"""
    tls_ca: Annotated[str, Option("nodes", name="nodes-tls-ca", metavar="PATH", if_absent="not encrypted")] = ""
    """PEM file of the certificate of the authority that has signed those of all nodes; links between nodes are TLS 1.3
    then"""
    tensor_parallel_over_nodes: Annotated[bool, Option("nodes", action="store_true")] = False
    """Divide the workers of each engine (--tensor-parallel-size) among the nodes, for a model that fits on no single
    one: not over Ethernet, where the all-reduces of each layer take longer than its arithmetic"""

    def __post_init__(self) -> None:
        check_options(self)
        if self.rank >= self.count:
            raise ValueError(f"expected rank (--node-rank) from 0 to {self.count - 1}, got {self.rank}")
        if not self.address:
            raise ValueError("expected address (--master-addr) of the home node, got none")
        tls_files = [bool(path) for path in (self.tls_cert, self.tls_key, self.tls_ca)]
        if any(tls_files) and not all(tls_files):
            raise ValueError(
                "TLS between nodes needs all of tls_cert, tls_key and tls_ca (--nodes-tls-cert, --nodes-tls-key, "
                f"--nodes-tls-ca), got {self.tls_cert!r}, {self.tls_key!r}, {self.tls_ca!r}"
            )


def parse_or_auto(text: str) -> int | str:
    """Returns the number, or `auto`, for which `engine_config` chooses a number."""
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number, or auto, got {text!r}")
    return text if text == "auto" else int(text)


def parse_dtype(text: str) -> str:
    return DTYPE_SYNONYMS.get(text, text)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of an engine on one node."""

    model: Annotated[str, Option("model", metavar="MODEL", nargs="?", if_absent="the bundled model")] = ""
    """Directory of the model (configuration, weights in safetensors, tokenizer), or its name on a hub, as in
    Qwen/Qwen3-0.6B"""
    simulated: SimulatedDevice | None = None
    """The device that simulates the model; None: the model is computed"""
    dtype: Annotated[
        str, Option("model", choices=("auto", "float32", "bfloat16", "float16"), metavar="TYPE", parse=parse_dtype)
    ] = "auto"
    """Type of weights and activations: auto, float32, bfloat16, float16, half, float; auto is that in config.json"""
    max_model_len: Annotated[
        int, Option("model", ge=1, le=1 << 30, parse=parse_human_int, if_absent=f"the model's, at most {MAX_MODEL_LEN}")
    ] = MAX_MODEL_LEN
    """Maximum number of tokens of a prompt and its answer; 1k is 1,000 and 1K is 1,024"""
    generation_config: Annotated[str, Option("model", choices=("auto", "vllm"))] = "auto"
    """Source of sampling defaults: auto reads generation_config.json of the model, vllm uses OpenAI's"""
    override_generation_config: Annotated[
        dict[str, Any] | None, Option("model", metavar="JSON", parse=parse_object, if_absent="none")
    ] = None
    """Sampling defaults that take precedence over that source, by the names of generation_config.json, as in
    {"temperature": 0.5}"""
    runner: Annotated[str, Option("model", choices=("auto", "generate", "pooling"))] = "auto"
    """What the engine makes of a prompt: generate makes an answer, pooling a vector or a score; auto is pooling for a
    model with modules.json, as sentence-transformers writes it"""
    convert: Annotated[str, Option("model", choices=("auto", "none", "embed", "classify"))] = "auto"
    """What pooling makes: embed makes a vector of the hidden states; classify makes a score, by the classifier of the
    model, or as the probability of yes before no; auto is classify for a model with a classifier, else embed"""
    enforce_eager: Annotated[bool, Option("model")] = False
    """Run every step eagerly on a CUDA device; steps are not replayed from CUDA graphs"""
    device: Annotated[str, Option("model", metavar="DEVICE")] = "cpu"
    """Device that computes: cpu; cuda, a device for each worker from number 0 on; or cuda:N, the same from number N on.
    Several have not been tried"""
    devices: Annotated[str, Option("model", metavar="LIST", if_absent="those of --device")] = ""
    """CUDA devices of this node's workers, in turn: numbers or UUIDs, as in 2,3"""

    lora: LoraConfig = LoraConfig()
    """LoRA adapters of the model"""
    tensor_parallel_size: Annotated[int, Option("parallelism", short="-tp", ge=1, le=16)] = 1
    """Number of workers that share the model of each engine"""
    collectives: Annotated[str, Option("parallelism", choices=("auto", "nccl", "gloo"))] = "auto"
    """Library by which the workers of an engine add up: auto, nccl (CUDA devices, one for each worker), gloo (through
    the host; several workers may share a CUDA device); auto is nccl on CUDA devices, else gloo"""
    data_parallel_size: Annotated[
        int, Option("parallelism", short="-dp", ge=1, le=16, if_absent="one on each node")
    ] = 1
    """Number of engines, each with the whole model; for a command, of all nodes together"""
    output_processors: Annotated[int, Option("parallelism", ge=0, le=8, parse=parse_or_auto, default="auto")] = 1
    """Number of detokenizer processes per engine: a number, 0 for detokenization in the core, or auto, which is 0 with
    --max-num-seqs of up to 64 and 1 otherwise"""
    threads: Annotated[
        int | None, Option("parallelism", ge=1, le=MAX_INT, if_absent="the fastest, measured at the start")
    ] = None
    """Number of threads with which each worker computes on a CPU"""
    numa_node: Annotated[int | None, Option("parallelism", ge=0, le=1023, parse=parse_or_auto, default="auto")] = None
    """NUMA node on which shared memory lies: a number, or auto, which is the node of this process's processors if they
    are all of one node"""
    api_server_count: Annotated[int, Option("server", short="-asc", ge=1, le=32)] = 1
    """Number of API server processes, which share the port"""
    fork_server: Annotated[str, Option("server", choices=("auto", "off"))] = "auto"
    """Fork the processes of an engine on CPUs from a process that has imported their modules; off: each imports them"""
    nodes: Nodes | None = None
    """The machines of the server; None: this node is the only one"""

    max_num_seqs: Annotated[int, Option("scheduling", ge=1, le=MAX_SLOTS - 1)] = 256
    """Maximum number of sequences in a batch"""
    max_num_batched_tokens: Annotated[int, Option("scheduling", ge=1, le=MAX_INT, parse=parse_human_int)] = 2048
    """Maximum number of tokens that one step computes; 2k is 2,000 and 2K is 2,048"""
    async_scheduling: Annotated[bool, Option()] = True
    """Send a step before the result of the step before it is in"""
    stream_interval: Annotated[int, Option("scheduling", ge=1, le=MAX_INT)] = 1
    """Number of tokens of each event of a stream; the first event has one token, the last may have fewer. Events with
    log-probabilities have one"""

    block_size: Annotated[int, Option("cache", ge=1, le=4096)] = 16
    """Number of tokens in a block of the KV cache"""
    gpu_memory_utilization: Annotated[float, Option("cache", ge=0.01, le=1)] = 0.9
    """Share of a CUDA device's memory that a worker uses for weights, steps and KV cache; what other processes hold of
    the device counts as used"""
    num_gpu_blocks_override: Annotated[
        int | None,
        Option("cache", ge=1, le=MAX_INT, if_absent="as many as can be filled and the device has room for"),
    ] = None
    """Number of blocks of each engine's KV cache, on a CPU too"""
    enable_prefix_caching: Annotated[bool, Option("cache")] = True
    """Share KV cache blocks between requests with the same beginning of a prompt"""
    keep_kv_cache: Annotated[bool, Option("cache")] = True
    """Keep the KV cache of an engine that computes on CPUs when one of its processes is killed from outside, or the
    engine is restarted; not with several nodes"""
    share_weights: Annotated[bool, Option("cache")] = True
    """Keep weights converted, sliced or packed for CPUs in memory that all engines share and that outlives processes"""

    end_ids: tuple[int, ...] = ()
    """Tokens that end a sample, besides those that the model's own files name"""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """Sampling defaults of requests, which `with_model_defaults` reads from the model"""
    is_encoder: bool = False
    """Whether the model attends both ways, which `with_model_defaults` reads: each prompt is computed in one step"""
    store_nbytes: Annotated[
        int,
        Option(
            "multimodal",
            ge=0,
            le=1 << 44,
            name="mm-processor-cache-gb",
            unit=GIB,
            parse=float,
            if_absent="0.25 GiB if the model takes images or --enable-prompt-embeds is given, or for pooling, else 0",
        ),
    ] = 0
    """Size of the store for processed images, videos and prompt embeddings, which all processes share; 0 disables
    it"""
    mm_encoder_tp_mode: Annotated[
        str | None,
        Option(
            "multimodal",
            choices=ENCODER_MODES,
            if_absent="store on a CPU where images are in a store, data on CUDA devices of one machine, else weights",
        ),
    ] = None
    """How images are encoded: weights (each worker of an engine encodes all images), data (the workers of an engine
    divide the images among them), or store (as data, and once for all engines)"""
    encoder_cache_nbytes: Annotated[
        int, Option("multimodal", ge=0, le=1 << 44, name="encoder-cache-gb", unit=GIB, parse=float)
    ] = 1 << 28
    """Size of the store for encodings, which all workers share; with weights and data, of each worker's own cache
    of encodings"""
    huge_pages: Annotated[bool, Option("multimodal")] = False
    """Use pages of 2 MiB for that store, all of which are claimed at the start"""
    enable_prompt_embeds: Annotated[bool, Option("multimodal")] = False
    """Take embeddings instead of text in completions, as safetensors or npy in base64"""
    tensor_transport: Annotated[
        str,
        Option("multimodal", choices=TRANSPORTS, metavar="WAY", if_absent=f"{TENSOR_TRANSPORT.name}, or auto"),
    ] = "auto"
    """How media and prompt embeddings travel: store, inline (in messages), auto (in the store if there is one, and
    inline where it has no room), or device (as auto; by a program's `DeviceScope`, from a device)"""
    image_processor_device: Annotated[str, Option("multimodal", choices=("cpu", "cuda"))] = "cpu"
    """Where images are resized and normalised: cpu (by threads of the API servers), or cuda (by a process beside each
    API server, on a worker's device, in as much memory of devices as the store has of the host's; this needs
    --tensor-transport device, and has run on doubles of a device only)"""
    max_concurrent_videos: Annotated[int, Option("multimodal", ge=1, le=32)] = 2
    """Maximum number of videos that an API server process decodes at a time, each in a process of its own"""

    start_timeout: Annotated[float, Option(ge=0, le=MAX_SECONDS)] = 600.0
    """Seconds until a group serves"""
    step_timeout: Annotated[float, Option(ge=0, le=MAX_SECONDS)] = 30.0
    """Seconds until a step's result is in, or a receiver takes a message"""
    shutdown_timeout: Annotated[float, Option("server", ge=0, le=MAX_SECONDS, metavar="SECONDS")] = 30.0
    """Seconds to wait at shutdown for open requests to be answered"""
    migration_limit: Annotated[int, Option("migration", ge=0, le=MAX_INT)] = 3
    """Maximum number of times that a request is resumed after the loss of its engine; 0 fails it at the first"""
    migration_timeout: Annotated[float, Option("migration", ge=0, le=MAX_SECONDS, metavar="SECONDS")] = 600.0
    """Seconds for which such a request waits for an engine that serves"""
    queue_timeout: Annotated[float, Option("migration", ge=0, le=MAX_SECONDS, metavar="SECONDS")] = 600.0
    """Seconds for which a new request waits while a lost engine is started again, before 503 with Retry-After; 0
    refuses it at once, and a replica of Ray Serve has 1 as its default"""
    migration_max_seq_len: Annotated[
        int | None, Option("migration", ge=1, le=MAX_INT, parse=parse_human_int, if_absent="no limit")
    ] = None
    """Maximum number of tokens, prompt and answers, of a request that is kept to be resumed; a longer one fails with
    its engine"""
    log_format: Annotated[str, Option("logging", choices=("text", "json"))] = "text"
    """Form of log lines"""
    log_level: Annotated[str, Option("logging", choices=("debug", "info", "warning", "error"))] = "info"
    """Lowest level that is logged"""

    def __post_init__(self) -> None:
        check_options(self)
        if self.simulated is None and not self.model:
            raise ValueError("expected model, a directory, or simulated, got neither")
        if self.simulated is not None and self.lora.lora_modules:
            raise ValueError("lora_modules need a model that is computed: a simulated device has no weights")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"expected max_num_batched_tokens of max_num_seqs ({self.max_num_seqs}) or more, "
                f"got {self.max_num_batched_tokens}"
            )
        if not DEVICES.fullmatch(self.device):
            raise ValueError(f"expected device to be cpu, cuda, or cuda:N for device number N, got {self.device!r}")
        self._check_devices()
        if any(end_id < 0 for end_id in self.end_ids):
            raise ValueError(f"expected end_ids of 0 or more, got {self.end_ids}")
        self._check_stores()
        self._check_nodes()
        self._check_pooling()

    def _check_devices(self) -> None:
        if self.collectives == "nccl" and self.device == "cpu":
            raise ValueError("collectives 'nccl' need CUDA devices: expected auto or gloo with device 'cpu'")
        if not self.devices:
            return
        if self.device != "cuda":
            raise ValueError(f"devices {self.devices!r} need device 'cuda', got {self.device!r}")
        names = self.device_names
        wrong = [name for name in names if not DEVICE_NAME.fullmatch(name)]
        if wrong:
            raise ValueError(
                f"expected numbers or UUIDs (GPU-…, see nvidia-smi -L) of whole devices in devices, got {wrong[0]!r}: "
                "a slice (MIG-…) is chosen by CUDA_VISIBLE_DEVICES, and has the number 0 then"
            )
        if len(names) != self.num_workers:
            raise ValueError(f"expected a device for each of {self.num_workers} workers, got devices {self.devices!r}")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None and self.collectives != "gloo":
            raise ValueError(
                f"device {twice} is twice in devices, which NCCL refuses: expected a device for each worker, or "
                "collectives 'gloo'"
            )

    def _check_stores(self) -> None:
        if self.tensor_transport == "store" and not self.store_nbytes:
            raise ValueError("tensor_transport 'store' needs a store: store_nbytes (--mm-processor-cache-gb) is 0")
        if self.tensor_transport == "inline" and self.store_nbytes:
            raise ValueError(
                "tensor_transport 'inline' uses no store: expected store_nbytes (--mm-processor-cache-gb) of 0, "
                f"got {self.store_nbytes}"
            )
        if self.tensor_transport == "device" and not (self.store_nbytes and self.device != "cpu"):
            raise ValueError("tensor_transport 'device' needs device 'cuda', and a store (--mm-processor-cache-gb)")
        if self.image_processor_device != "cpu" and (self.tensor_transport != "device" or self.nodes is not None):
            raise ValueError("image_processor_device 'cuda' needs tensor_transport 'device', and workers on one node")
        if self.huge_pages and not self.store_nbytes:
            raise ValueError("huge_pages are for the store: store_nbytes (--mm-processor-cache-gb) is 0")
        if self.mm_encoder_tp_mode == "store" and not self.encoder_cache_nbytes:
            raise ValueError(
                "mm_encoder_tp_mode 'store' needs a store of encodings: encoder_cache_nbytes (--encoder-cache-gb) is 0"
            )

    def _check_nodes(self) -> None:
        lanes = self.all_groups * (1 + self.output_processors) + 1
        if lanes > MAX_LANES:
            raise ValueError(
                f"expected data_parallel_size of all nodes x (1 + output_processors) of at most {MAX_LANES - 1}, as "
                f"each of them answers each server, got {lanes - 1}"
            )
        if self.nodes is None or not self.has_spread_ranks:
            return
        if self.tensor_parallel_size % self.nodes.count:
            raise ValueError(
                f"expected tensor_parallel_size to be a multiple of the number of nodes ({self.nodes.count}) with "
                f"tensor_parallel_over_nodes, got {self.tensor_parallel_size}"
            )
        if self.mm_encoder_tp_mode == "store":
            raise ValueError(
                "mm_encoder_tp_mode 'store' needs all workers of an engine on one node, which share the store of "
                "encodings: expected weights or data with tensor_parallel_over_nodes"
            )

    def _check_pooling(self) -> None:
        if self.runner != "pooling":
            if self.convert in ("embed", "classify"):
                raise ValueError(f"convert {self.convert!r} needs runner 'pooling', got {self.runner!r}")
            return
        if self.convert == "none":
            raise ValueError("expected convert embed or classify with runner 'pooling', got 'none'")
        if self.simulated is not None or self.device != "cpu" or self.nodes is not None:
            raise ValueError("runner 'pooling' needs a model that CPUs of this machine compute")

    @property
    def pooling(self) -> str:
        """Returns what the engine makes of a prompt instead of an answer, embed or classify; "": it generates."""
        if self.runner != "pooling":
            return ""
        return "classify" if self.convert == "classify" else "embed"

    @property
    def max_sequence_len(self) -> int:
        """Returns the most tokens of a sample: those of the model, and for pooling the id that means nothing."""
        return self.max_model_len + bool(self.pooling)

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
        """Returns whether this node has cores, and not only workers."""
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
        """Returns the remote nodes with ranks of this node's cores."""
        return range(1, 1 if self.nodes is None or not self.has_spread_ranks or self.is_headless else self.nodes.count)

    @property
    def remote_groups(self) -> int:
        """Returns how many remote groups this node reaches. Remote groups have the numbers after the local groups."""
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

    @property
    def keeps_kv_cache(self) -> bool:
        return self.keep_kv_cache and self.nodes is None and self.simulated is None and self.device == "cpu"

    @property
    def num_workers(self) -> int:
        """Returns the number of workers on this node."""
        return self.data_parallel_size * len(self.ranks)

    @property
    def device_names(self) -> list[str]:
        """Returns numbers, or UUIDs, of the CUDA devices of this node's workers; empty: a CPU computes."""
        if self.devices:
            return [name.strip() for name in self.devices.split(",")]
        if self.device == "cpu":
            return []
        first = int(self.device.partition(":")[2] or 0)
        return [str(first + worker) for worker in range(self.num_workers)]

    def device_of(self, group: int, rank: int) -> str:
        """Returns the device of a worker, with the device's number or UUID."""
        ranks = self.ranks
        return "cpu" if self.device == "cpu" else f"cuda:{self.device_names[group * len(ranks) + rank - ranks.start]}"

    @property
    def encoder_tp_mode(self) -> str:
        """Returns how images are encoded. Where all workers of a group are on one node, the default is `data` on CUDA
        devices, and `store` on a CPU if images are in a store."""
        if self.mm_encoder_tp_mode is not None:
            return self.mm_encoder_tp_mode
        if self.has_spread_ranks:
            return "weights"
        if self.device != "cpu":
            return "data"
        is_shared = self.simulated is None and self.store_nbytes and self.encoder_cache_nbytes
        return "store" if is_shared and not self.pooling else "weights"

    @property
    def max_blocks_per_request(self) -> int:
        """Returns how many blocks one sample has at most."""
        return -(-self.max_sequence_len // self.block_size)


def require_dtype(name: str) -> None:
    """Raises ValueError."""
    option_field(EngineConfig, "dtype").check(name)
