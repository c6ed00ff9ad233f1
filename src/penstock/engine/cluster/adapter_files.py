"""The files of a LoRA adapter, as PEFT writes them. A launcher checks their headers, and workers read the weights.

An adapter changes linear layers of a decoder: y = W x + scale * B A x. A layer is named by its path in the decoder, as
in `layers.0.self_attn.q_proj`.
"""

from __future__ import annotations

import hashlib
import math
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from penstock.engine.cluster.weight_files import read_header, read_weights

N = TypeVar("N", int, float)
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_SETTINGS_NBYTES = 1 << 20
_DECODER = r"(?:model\.|language_model\.|text_model\.)*"  # in front of a layer's path
_LAYER = r"layers\.\d+\.(?!\S*\bexperts\.)[\w.]+\.(?:[qkvo]|gate|up|down)_proj"
_FACTOR = re.compile(rf"base_model\.model\.{_DECODER}({_LAYER})\.lora_([AB])\.weight")
_BASE_WEIGHT = re.compile(rf"{_DECODER}({_LAYER})\.weight")
# Fields with which PEFT computes more than the formula above, and their neutral values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    **dict.fromkeys(
        (
            *("alora_invocation_tokens", "arrow_config", "fan_in_fan_out", "layer_replication", "lora_bias"),
            *("modules_to_save", "target_parameters", "trainable_token_indices", "use_dora", "use_qalora"),
        ),
        (),
    ),
}
_INITIAL = (True, False, "eva", "gaussian", "orthogonal")  # other ways to begin a training change the model, too


class AdapterSettings(msgspec.Struct, frozen=True):
    """The fields of adapter_config.json that say how an adapter computes."""

    peft_type: str
    r: Rank = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, float] | None = None

    def rank_of(self, layer: str) -> int:
        return _by_pattern(self.rank_pattern, layer, self.r)

    def scale_of(self, layer: str) -> float:
        rank = self.rank_of(layer)
        return _by_pattern(self.alpha_pattern, layer, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _by_pattern(patterns: Mapping[str, N] | None, layer: str, default: N) -> N:
    """Returns the value of the first pattern that fits a layer, as PEFT finds it."""
    values = (value for key, value in (patterns or {}).items() if _pattern(key).match(f"model.{layer}"))
    return next(values, default)


def _pattern(key: str) -> re.Pattern[str]:
    """Raises re.error, also for a pattern with a global flag, as "(?i)q_proj"."""
    return re.compile(rf"(.*\.)?({key})$")


class LowRank(NamedTuple):
    """What an adapter adds to one layer: names of the tensors A [rank, inputs] and B [outputs, rank]."""

    layer: str
    a: str
    b: str
    scale: float


def read_settings(directory: Path) -> AdapterSettings:
    """Raises ValueError, which names the file and the field, for what is not supported; and OSError."""
    path = directory / SETTINGS
    _require_file(path, MAX_SETTINGS_NBYTES)
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        settings = msgspec.convert(fields, AdapterSettings)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is invalid: {error}") from None
    for pattern in (*(settings.rank_pattern or ()), *(settings.alpha_pattern or ())):
        try:
            _pattern(pattern)
        except re.error as error:
            raise ValueError(f"{path}: {pattern!r} is no pattern: {error}") from None
    if settings.peft_type != "LORA":
        raise ValueError(f"{path}: peft_type {settings.peft_type!r} is not supported: expected 'LORA'")
    for name, neutral in _NEUTRAL.items():
        if fields.get(name) and fields[name] not in neutral:
            raise ValueError(f"{path}: {name} {fields[name]!r} is not supported")
    if fields.get("init_lora_weights", True) not in _INITIAL:
        raise ValueError(f"{path}: init_lora_weights {fields['init_lora_weights']!r} is not supported")
    return settings


def _require_file(path: Path, max_nbytes: float = math.inf) -> None:
    """Raises ValueError for a pipe or a device, which may be read for ever, and for a longer file; and OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a file")
    if status.st_size > max_nbytes:
        raise ValueError(f"{path} has {status.st_size} bytes, more than {max_nbytes}")


def read_digest(directory: Path) -> bytes:
    """Returns a hash of an adapter's files. Raises ValueError for what is no file, and OSError."""
    _require_file(directory / SETTINGS, MAX_SETTINGS_NBYTES)
    _require_file(directory / WEIGHTS)
    return digest_of((directory / SETTINGS).read_bytes(), (directory / WEIGHTS).read_bytes())


def digest_of(settings: bytes, weights: bytes) -> bytes:
    return hashlib.sha256(hashlib.sha256(settings).digest() + hashlib.sha256(weights).digest()).digest()


def find_low_ranks(directory: Path, shapes: Mapping[str, Sequence[int]], settings: AdapterSettings) -> list[LowRank]:
    """Returns what an adapter adds to each layer. `shapes`: of the tensors in its file. Raises ValueError."""
    path, factors = directory / WEIGHTS, dict[str, dict[str, str]]()
    for name in shapes:
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise ValueError(f"{path}: {name} is not supported: expected lora_A and lora_B of layers of the decoder")
        factors.setdefault(match[1], {})[match[2]] = name
    if not factors:
        raise ValueError(f"{path} has no tensors")
    low_ranks = []
    for layer, names in factors.items():
        if len(names) < 2:
            raise ValueError(f"{path}: {layer} has lora_{min(names)} alone")
        rank = settings.rank_of(layer)
        a, b = (tuple(shapes[names[factor]]) for factor in "AB")
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise ValueError(f"{path}: expected A [{rank}, …] and B […, {rank}] of {layer}, got {a} and {b}")
        low_ranks.append(LowRank(layer, names["A"], names["B"], settings.scale_of(layer)))
    return low_ranks


def base_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each weight of the decoder's layers, as the files of a model have them. Raises ValueError,
    OSError."""
    tensors = {name: tensor for header in read_weights(model).headers for name, tensor in header.tensors.items()}
    matches = ((_BASE_WEIGHT.fullmatch(name), tensor.shape) for name, tensor in tensors.items())
    return {match[1]: shape for match, shape in matches if match is not None}


def require_adapter(directory: Path, base: Mapping[str, tuple[int, ...]], max_rank: int) -> None:
    """Raises ValueError unless an adapter fits a model with weights of these shapes; and OSError."""
    settings = read_settings(directory)
    path = directory / WEIGHTS
    _require_file(path)
    shapes = {name: tensor.shape for name, tensor in read_header(path).tensors.items()}
    for layer, a, b, _ in find_low_ranks(directory, shapes, settings):
        rank = shapes[a][0]
        if rank > max_rank:
            raise ValueError(f"{path}: {layer} has rank {rank}, more than --max-lora-rank {max_rank}")
        whole = base.get(layer)
        if whole is None or len(whole) != 2:
            raise ValueError(f"{path}: the model has no linear layer {layer}")
        if (shapes[b][0], shapes[a][1]) != whole:
            raise ValueError(
                f"{path}: {layer} has {shapes[a][1]} inputs and {shapes[b][0]} outputs, "
                f"and {whole[1]} and {whole[0]} in the model"
            )
