"""Options of the engine on a command line, and how they become an `EngineConfig`, which declares most of them."""

from __future__ import annotations

import argparse
import os
from typing import Annotated, Any

import msgspec

from penstock.engine.cluster.numa import node_of
from penstock.engine.launcher.hub_model import HubOptions
from penstock.engine.model_dir import require_length
from penstock.engine.protocol.config import SHIPPED, EngineConfig, SimulatedDevice
from penstock.engine.protocol.lora import LoraConfig
from penstock.engine.protocol.option import Option, add_options, option_values

GROUPS = ("model", "parallelism", "scheduling", "cache", "migration", "lora")  # and logging, which comes last

# For at most so many sequences, detokenizing in the core takes less processor time than a wake of an output processor.
# A step of the device hides the time.
MAX_SEQS_IN_CORE = 64


class DeviceModel(msgspec.Struct):
    """Decides whether `EngineConfig.simulated` is given."""

    device_model: Annotated[str, Option("model", choices=("real", "simulated"))] = "real"
    """Whether the device computes, or simulates steps by waiting and tokens by a rule"""


def add(parser: argparse.ArgumentParser, *groups: str) -> None:
    add_options(parser, groups, (EngineConfig, DeviceModel, SimulatedDevice, HubOptions, LoraConfig))


def model_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `EngineConfig` that say what computes the model. Raises ValueError."""
    if options.model == "":  # an unset variable of a shell, and not the bundled model
        raise ValueError("expected MODEL to be a directory or a name of the hub, got ''")
    if options.device_model == "simulated":
        return {"model": options.model or "", "simulated": SimulatedDevice(**option_values(SimulatedDevice, options))}
    return {"model": options.model or SHIPPED}


def engine_config(options: argparse.Namespace, **fields: Any) -> EngineConfig:
    """`fields` take precedence over the command line. Raises ValueError, TypeError."""
    lora = LoraConfig(**option_values(LoraConfig, options))
    values = {**option_values(EngineConfig, options), **model_fields(options), "lora": lora, **fields}
    if values.get("output_processors") == "auto":
        values["output_processors"] = 1 if values["max_num_seqs"] > MAX_SEQS_IN_CORE else 0
    if values.get("numa_node") == "auto":
        values["numa_node"] = node_of(os.sched_getaffinity(0))
    config = EngineConfig(**values)
    if config.simulated is None and options.max_model_len is not None:
        require_length(config)
    return config
