"""Checks before any process starts: the model's files and family, the options, the device.

Neither torch nor transformers is imported, so that a mistake is reported within a second. A fact that cannot be known
here is no error here: the process that meets it reports it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.cluster.adapter_files import base_shapes, require_adapter
from penstock.engine.cluster.cuda_devices import Devices, cuda_devices, numbers_of, torch_build
from penstock.engine.cluster.numa import require_node
from penstock.engine.cluster.weight_files import read_weights
from penstock.engine.model_dir import (
    expected,
    read_config,
    require_encoder,
    require_family,
    require_pooling,
    tokenizer_path,
)
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.worker.weight_slices import HeadSlices

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")  # of a model that is computed
MIN_TORCH = 2, 11  # the oldest release of torch for the kernels
MIN_TRITON = 3, 6  # which that torch brings
MAX_CUDA_SEQS = 4096  # for which kernels plan attention
OTHER_FILES = ("tokenizer_config.json", "chat_template.json", "processor_config.json", "preprocessor_config.json")


def require_startable(config: EngineConfig) -> None:
    """Raises ValueError, ImportError and OSError if a configuration (of `with_model_defaults`) can never work."""
    if config.simulated is None:
        require_packages(PACKAGES)
        require_model(config)
    require_blocks(config)
    if config.numa_node is not None:
        require_node(config.numa_node)
    if config.simulated is None and config.device.startswith("cuda"):
        require_cuda(config)


def require_packages(names: Iterable[str], user: str = "a model") -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{user} needs {' and '.join(missing)}, not installed here")


# ── the model ────────────────────────────────────────────────────────────────────────────────────────────────────────
def require_model(config: EngineConfig) -> None:
    directory = Path(config.model)
    path = directory / "config.json"
    if not path.exists():
        raise ValueError(f"{path} is missing: expected the directory of a model, with its config.json")
    whole, text = read_config(path)
    if config.is_encoder:
        require_encoder(config)
    require_family(
        str(whole.get("model_type")),
        _convert(whole.get("architectures") or [], list[str], f"architectures of {path}"),
        whole.get("quantization_config"),
        str(text.get("model_type", "")),
    )
    if config.pooling:
        require_pooling(config)
    _require_heads(text or whole, config.tensor_parallel_size)
    read_weights(directory)
    if config.lora.lora_modules:
        base = base_shapes(directory)
        for adapter in config.lora.adapters:
            require_adapter(Path(adapter.path), base, config.lora.max_lora_rank)
    for name in OTHER_FILES:
        if (directory / name).exists():
            read_config(directory / name)


def _require_heads(text: Mapping[str, Any], ranks: int) -> None:
    """Checks heads that config.json names. Without them transformers has defaults, which only the worker knows."""
    queries, keys = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if isinstance(queries, int) and isinstance(keys, int) and queries > 0 and keys > 0:
        HeadSlices(queries, keys).require(ranks)


def require_tokenizer(config: EngineConfig) -> None:
    """Raises ValueError unless tokenizer.json exists and has a model. The tokenizers library may still refuse it."""
    path = tokenizer_path(config)
    if not path.exists():
        raise ValueError(f"{path} is missing: a server needs the model's tokenizer")
    with expected(str(path)):
        msgspec.json.decode(path.read_bytes(), type=_Tokenizer)


class _Tokenizer(msgspec.Struct):
    """Of a file of the tokenizers library. Its words are not decoded, as there may be hundreds of thousands."""

    model: dict[str, msgspec.Raw]


def _convert(value: Any, kind: Any, subject: str) -> Any:
    with expected(subject):
        return msgspec.convert(value, kind)


# ── options and devices ──────────────────────────────────────────────────────────────────────────────────────────────
def require_blocks(config: EngineConfig) -> None:
    """Raises ValueError unless one request of `max_model_len` tokens fits into the KV cache."""
    blocks = (
        config.num_gpu_blocks_override
        if config.simulated is None
        else min(config.num_gpu_blocks_override or 1 << 31, config.simulated.blocks)
    )
    if blocks is not None and blocks < config.max_blocks_per_request:
        raise ValueError(
            f"the model's max seq len ({config.max_model_len}) is larger than the maximum number of tokens that can be "
            f"stored in KV cache ({blocks * config.block_size}): "
            f"--num-gpu-blocks-override {config.max_blocks_per_request} or more, "
            f"or --max-model-len {blocks * config.block_size} or less"
        )


def _problem_of(name: str, devices: Devices) -> str:
    """Returns why a device cannot be used; empty: no reason is known."""
    if devices.number is None:
        return ""
    if devices.number == 0:
        return "no CUDA device can be used"
    if name.isdecimal():
        if int(name) < devices.number:
            return ""
        hint = " (a process uses one slice, by CUDA_VISIBLE_DEVICES=MIG-…, with one worker)"
        return f"the number {name} names no device{hint if devices.has_slices else ''}"
    return "" if numbers_of(name, devices.uuids) or not devices.uuids else f"the UUID {name} names no device"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def require_cuda(config: EngineConfig) -> None:
    devices = cuda_devices()
    option = f"--devices {config.devices}" if config.devices else f"--device {config.device}"
    for name in config.device_names:
        if problem := _problem_of(name, devices):
            other = " and --tensor-transport auto do" if config.tensor_transport == "device" else " does"
            raise ValueError(f"{option}: {problem}: {devices.reason}; --device cpu{other} without")
    _require_builds(option, devices)
    if config.collectives != "gloo":
        _require_separate(config, option, devices)
    compilers = (os.environ.get("CC") or "cc", "gcc", "clang")
    if not any(map(shutil.which, compilers)):
        raise ValueError(
            f"{option}: no C compiler is found ({', '.join(compilers)}), with which Triton builds its "
            "launchers: apt-get install gcc, or set CC"
        )
    if config.max_num_seqs > MAX_CUDA_SEQS:
        raise ValueError(
            f"--max-num-seqs {config.max_num_seqs}: a CUDA device computes at most {MAX_CUDA_SEQS} sequences in a step"
        )


def _require_builds(option: str, devices: Devices) -> None:
    """Raises ValueError if the driver, torch or Triton is too old."""
    build = torch_build()
    if build is not None and _release(build.version) < MIN_TORCH:
        raise ValueError(
            f"{option}: torch {build.version} is too old for a CUDA device: {'.'.join(map(str, MIN_TORCH))} or later"
        )
    if build is not None and build.cuda and devices.cuda is not None and _release(build.cuda)[0] > devices.cuda[0]:
        driver = ".".join(map(str, devices.cuda))
        raise ValueError(
            f"{option}: the driver is too old: it knows CUDA {driver}, and torch {build.version} is built for CUDA "
            f"{build.cuda}: install a newer driver, or torch for CUDA {driver}"
        )
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"{option}: Triton is not installed, which compiles the kernels: torch for CUDA brings it; "
            "pip install triton, or --device cpu does without"
        )
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # installed under another name: the worker finds out
        return
    if _release(triton) < MIN_TRITON:
        raise ValueError(
            f"{option}: Triton {triton} is too old for the kernels: pip install 'triton>="
            f"{'.'.join(map(str, MIN_TRITON))}', or the torch that brings it"
        )


def _require_separate(config: EngineConfig, option: str, devices: Devices) -> None:
    """Raises ValueError if NCCL would refuse two workers of one device, or take a slow way between two devices."""
    numbers = [devices.number_of(name) for name in config.device_names]
    twice = next((number for number in numbers if number is not None and numbers.count(number) > 1), None)
    if twice is not None:
        raise ValueError(
            f"{option}: two workers have device {twice}, which NCCL refuses: expected a device for each worker, or "
            "--collectives gloo"
        )
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":  # the user knows
        return
    for group in range(0, len(numbers), len(config.ranks)):
        ranks = numbers[group : group + len(config.ranks)]
        for pair in ((a, b) for a in ranks for b in ranks if a is not None and b is not None):
            if pair in devices.apart:
                raise ValueError(
                    f"{option}: device {pair[0]} cannot reach the memory of device {pair[1]} (nvidia-smi topo -p2p r): "
                    "expected devices of one group that can, or NCCL_P2P_DISABLE=1, with which their sums go through "
                    "the host"
                )
