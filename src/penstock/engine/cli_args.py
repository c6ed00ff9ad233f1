"""What stands on the command line of whoever runs an engine, and what the engine is told by it."""

from __future__ import annotations

import argparse

from penstock.engine.model_dir import require_length
from penstock.engine.protocol.config import LOG_LEVELS, MAX_MODEL_LEN, SHIPPED, EngineConfig, SimulatedDevice

SAID = (
    *("model", "data_parallel", "tensor_parallel", "output_processors", "device", "dtype", "threads"),
    *("cuda_graphs", "slots", "max_model_len", "generation_config", "log_format", "log_level"),
)


def add(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", default="", help="the directory of a model (the one that ships)")
    add("--data-parallel", metavar="N", type=int, default=1, help="groups (1)")
    add("--tensor-parallel", metavar="N", type=int, default=1, help="workers of each group (1)")
    add("--output-processors", metavar="N", type=int, default=1, help="of each group; 0: in the core (1)")
    add("--device", default="cpu", help="cpu or cuda (cpu)")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (auto)")
    add("--threads", metavar="N", type=int, help="of each worker on a CPU (what proves best)")
    add(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="record steps of decoding, and replay them (on, where the device is cuda)",
    )
    add("--slots", metavar="N", type=int, default=256, help="samples that run at a time (256)")
    add(
        "--max-model-len",
        metavar="N",
        type=int,
        help=f"of prompt and answer (what the model knows, at most {MAX_MODEL_LEN})",
    )
    add(
        "--generation-config",
        choices=["auto", "vllm"],
        default="auto",
        help="where sampling defaults come from; auto: generation_config.json of the model, vllm: neutral ones (auto)",
    )
    add("--device-model", choices=["real", "simulated"], default="real", help="compute, or wait (real)")
    add("--step-ms", metavar="MS", type=float, default=5.0, help="of a simulated step (5)")
    add("--log-format", choices=["text", "json"], default="text")
    add("--log-level", choices=LOG_LEVELS, default="info", help="events below it are not logged (info)")


def engine_config(options: argparse.Namespace, *more: str) -> EngineConfig:
    """`more`: what else is said of it on this command line. Raises ValueError, TypeError."""
    said = {name: getattr(options, name) for name in (*SAID, *more)}
    if options.max_model_len is None:
        said["max_model_len"] = MAX_MODEL_LEN
    if options.device_model == "simulated":
        return EngineConfig(simulated=SimulatedDevice(step_seconds=options.step_ms / 1e3), **said)
    config = EngineConfig(**{**said, "model": options.model or SHIPPED})
    if options.max_model_len is not None:
        require_length(config)
    return config
