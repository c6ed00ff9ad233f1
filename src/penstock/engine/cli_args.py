"""Command-line options of the engine, and how they become an `EngineConfig`.

Options that vLLM also has carry its names, units and meaning.
"""

from __future__ import annotations

import argparse
import os
import re

from penstock.engine.cluster.numa import node_of
from penstock.engine.model_dir import require_length
from penstock.engine.protocol.config import DTYPES, LOG_LEVELS, MAX_MODEL_LEN, SHIPPED, EngineConfig, SimulatedDevice

CONFIG_OPTIONS = (
    *("model", "data_parallel_size", "tensor_parallel_size", "output_processors", "device", "threads"),
    *("enforce_eager", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override", "block_size"),
    *("enable_prefix_caching", "max_model_len", "generation_config", "numa_node", "log_format", "log_level"),
    *("migration_limit", "migration_timeout", "migration_max_seq_len", "queue_timeout"),
)
DTYPE_SYNONYMS = {"half": "float16", "float": "float32"}
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT]?)")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the groups of the engine, but for `add_logging`'s, which comes last."""
    _add_model(parser)
    _add_parallelism(parser)
    _add_scheduling(parser)
    _add_cache(parser)
    _add_migration(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        default="",
        help="Directory of the model: configuration, weights in safetensors, tokenizer (default: the bundled model)",
    )
    add(
        "--dtype",
        metavar="TYPE",
        default="auto",
        help=f"Type of weights and activations: {', '.join((*DTYPES, *DTYPE_SYNONYMS))}; auto is that in config.json "
        "(default: %(default)s)",
    )
    add(
        "--max-model-len",
        metavar="N",
        type=human_int,
        help="Maximum number of tokens of a prompt and its answer; 1k is 1,000 and 1K is 1,024 "
        f"(default: the model's, at most {MAX_MODEL_LEN})",
    )
    add(
        "--generation-config",
        choices=["auto", "vllm"],
        default="auto",
        help="Source of sampling defaults: auto reads generation_config.json of the model, vllm uses OpenAI's "
        "(default: %(default)s)",
    )
    add(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Run every step eagerly on a CUDA device; decode steps are not replayed from CUDA graphs (default: off)",
    )
    add(
        "--device",
        default="cpu",
        help="Device that computes: cpu, or cuda, which has never run on a device (default: %(default)s)",
    )
    add(
        "--device-model",
        choices=["real", "simulated"],
        default="real",
        help="Whether the device computes, or simulates steps by waiting and tokens by a rule (default: %(default)s)",
    )
    add(
        "--step-ms",
        metavar="MS",
        type=float,
        default=5.0,
        help="Milliseconds that a step of the simulated device takes (default: %(default)s)",
    )


def _add_parallelism(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("parallelism").add_argument
    add(
        "--tensor-parallel-size",
        "-tp",
        metavar="N",
        type=int,
        default=1,
        help="Number of workers that share the model of each engine (default: %(default)s)",
    )
    add(
        "--data-parallel-size",
        "-dp",
        metavar="N",
        type=int,
        help="Number of engines, each with the whole model, of all nodes together (default: one on each node)",
    )
    add(
        "--output-processors",
        metavar="N",
        type=int,
        default=1,
        help="Number of detokenizer processes per engine; 0 runs detokenization in the core (default: %(default)s)",
    )
    add(
        "--threads",
        metavar="N",
        type=int,
        help="Number of threads with which each worker computes on a CPU (default: the fastest, measured at the start)",
    )
    add(
        "--numa-node",
        metavar="N",
        type=numa_node,
        default="auto",
        help="NUMA node on which shared memory lies: a number, or auto, which is the node of this process's processors "
        "if they are all of one node (default: %(default)s)",
    )


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("scheduling").add_argument
    add(
        "--max-num-seqs",
        metavar="N",
        type=int,
        default=256,
        help="Maximum number of sequences in a batch (default: %(default)s)",
    )
    add(
        "--max-num-batched-tokens",
        metavar="N",
        type=human_int,
        default=2048,
        help="Maximum number of tokens that one step computes; 2k is 2,000 and 2K is 2,048 (default: %(default)s)",
    )


def _add_cache(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("cache").add_argument
    add(
        "--block-size",
        metavar="N",
        type=int,
        default=16,
        help="Number of tokens in a block of the KV cache (default: %(default)s)",
    )
    add(
        "--num-gpu-blocks-override",
        metavar="N",
        type=int,
        help="Number of blocks of each engine's KV cache, on a CPU too "
        "(default: as many as can be filled and the device has room for)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Share KV cache blocks between requests with the same beginning of a prompt (default: on)",
    )


def _add_migration(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("migration").add_argument
    add(
        "--migration-limit",
        metavar="N",
        type=int,
        default=3,
        help="Maximum number of times that a request is resumed after the loss of its engine; 0 fails it at the first "
        "(default: %(default)s)",
    )
    add(
        "--migration-timeout",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="Seconds for which such a request waits for an engine that serves (default: %(default)s)",
    )
    add(
        "--queue-timeout",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="Seconds for which a new request waits while a lost engine is started again, before 503 with Retry-After; "
        "0 refuses it at once (default: %(default)s; 1 in a replica of Ray Serve)",
    )
    add(
        "--migration-max-seq-len",
        metavar="N",
        type=human_int,
        help="Maximum number of tokens, prompt and answers, of a request that is kept to be resumed; a longer one "
        "fails with its engine (default: no limit)",
    )


def add_logging(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("logging").add_argument
    add("--log-format", choices=["text", "json"], default="text", help="Form of log lines (default: %(default)s)")
    add("--log-level", choices=LOG_LEVELS, default="info", help="Lowest level that is logged (default: %(default)s)")


def human_int(text: str) -> int:
    """Returns the number that `4096`, `4k` (4,000), `4.5k` or `4K` (4,096) says, with k, m, g and t, as in vLLM."""
    match = _HUMAN.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"a whole number like 4096, 4k (4,000) or 4K (4,096), not {text!r}")
    decimal, power, binary, shift = match.groups()
    if decimal is not None:
        return round(float(decimal) * 1000.0 ** ("kmgt".index(power) + 1))
    return int(binary) << 10 * " KMGT".index(shift or " ")


def numa_node(text: str) -> int | None:
    """Returns the number that `0` says; for `auto`, that of the node to which all processors of this process belong."""
    if text == "auto":
        return node_of(os.sched_getaffinity(0))
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number, or auto, not {text!r}")
    return int(text)


def engine_config(options: argparse.Namespace, *more: str) -> EngineConfig:
    """`more`: what else is said of it on this command line. Raises ValueError, TypeError."""
    fields = {name: getattr(options, name) for name in (*CONFIG_OPTIONS, *more)}
    fields["dtype"] = DTYPE_SYNONYMS.get(options.dtype, options.dtype)
    if options.data_parallel_size is None:
        fields["data_parallel_size"] = 1
    if options.max_model_len is None:
        fields["max_model_len"] = MAX_MODEL_LEN
    if options.device_model == "simulated":
        return EngineConfig(simulated=SimulatedDevice(step_seconds=options.step_ms / 1e3), **fields)
    config = EngineConfig(**{**fields, "model": options.model or SHIPPED})
    if options.max_model_len is not None:
        require_length(config)
    return config
