"""The directory of a model: the families that are supported, and the values of its config files.

Imports neither torch nor transformers, so that a model is refused before a process starts. A test holds the families
against transformers' own registry, and the table of docs/howto/serve.md against this one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.cluster.adapter_files import SETTINGS, WEIGHTS, read_digest
from penstock.engine.protocol.config import EngineConfig, SamplingDefaults
from penstock.engine.protocol.lora import LoraConfig

TEXT = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
VISION = {  # and images
    "idefics3": "Idefics3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
}
VIDEO = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm")  # and videos
FAMILIES = {**TEXT, **VISION}
_OTHER_HEAD = re.compile(r"For(?!CausalLM|ConditionalGeneration)\w+$")  # it classifies, say, and generates nothing

GENERATION = "generation_config.json"
CONFIG_FILES = (GENERATION, "config.json")  # the first that names an end id
MODULES = "modules.json"  # of sentence-transformers
MODE = "pooling_mode_"  # the beginning of a field for each mode of pooling
SAMPLING_FIELDS = {  # of SamplingDefaults, and the names that they have in generation_config.json
    **{name: name for name in SamplingDefaults.__struct_fields__},
    "max_tokens": "max_new_tokens",
}


def require_family(
    model_type: str, architectures: Sequence[str] = (), is_quantized: bool = False, text_type: str = ""
) -> None:
    """Raises ValueError if a model of this config.json cannot be served. `text_type`: of its text_config, if any."""
    heads = [architecture for architecture in architectures if not _OTHER_HEAD.search(architecture)]
    if model_type not in FAMILIES or (architectures and not heads):
        raise ValueError(
            f"Model architectures {list(architectures)} (model_type {model_type!r}) are not supported; "
            f"supported are {', '.join(TEXT.values())}; with images {', '.join(VISION.values())}"
        )
    if text_type not in ("", *TEXT) and not text_type.startswith(model_type):  # Qwen2-VL's is called qwen2_vl_text
        raise ValueError(
            f"{model_type!r} with text of model_type {text_type!r} is not supported; supported are {', '.join(TEXT)}"
        )
    if is_quantized:
        raise ValueError(f"{model_type!r}: quantized weights are not supported (quantization_config in config.json)")


def with_model_defaults(config: EngineConfig) -> EngineConfig:
    """Returns the config with the model's end-of-sequence ids and sampling defaults, and at most its maximum length.

    Raises ValueError.
    """
    if config.simulated is not None:
        simulated = config.simulated
        simulated_ends = () if simulated.end_id is None else (simulated.end_id,)
        if config.model and tokenizer_path(config).exists():  # so that every generated id has a text
            known = load_tokenizer(config).get_vocab_size()
            simulated = msgspec.structs.replace(simulated, vocabulary=min(simulated.vocabulary, known))
        return msgspec.structs.replace(
            config,
            simulated=simulated,
            end_ids=tuple(sorted({*config.end_ids, *simulated_ends})),
            sampling_defaults=sampling_defaults(config),
        )
    directory = Path(config.model)
    if not directory.is_dir():
        raise ValueError(f"expected the directory of a model, got {config.model!r}")
    if is_pooling(config):  # without text, there is no work for output processors
        config = msgspec.structs.replace(config, runner="pooling", output_processors=0)
    end: int | list[int] | None = _read_field(directory, "eos_token_id", CONFIG_FILES, int | list[int])
    end_ids = {*config.end_ids, *(end if isinstance(end, list) else () if end is None else (end,))}
    longest = _longest(directory)
    return msgspec.structs.replace(
        config,
        end_ids=tuple(sorted(end_ids)),
        max_model_len=min(config.max_model_len, longest or config.max_model_len),
        sampling_defaults=sampling_defaults(config),
        lora=with_digests(config.lora),
    )


def with_digests(lora: LoraConfig) -> LoraConfig:
    """Returns the adapters with hashes of their files. Raises ValueError."""
    if lora.digests or not lora.lora_modules:
        return lora
    directories = [Path(adapter.path) for adapter in lora.adapters]
    for path in (directory / name for directory in directories for name in (SETTINGS, WEIGHTS)):
        if not path.exists():
            raise ValueError(f"{path} is missing: expected the directory of a LoRA adapter in PEFT's format")
    return msgspec.structs.replace(lora, digests=tuple(map(read_digest, directories)))


def require_length(config: EngineConfig) -> None:
    """Checks a --max-model-len of the command line. Raises ValueError if the model has fewer positions."""
    longest = _longest(Path(config.model))
    if longest is not None and config.max_model_len > longest:
        raise ValueError(
            f"User-specified max_model_len ({config.max_model_len}) is greater than the model's "
            f"(max_position_embeddings={longest} in {config.model}/config.json): --max-model-len {longest} or less"
        )


def _longest(directory: Path) -> int | None:
    """Returns `max_position_embeddings`; None: config.json does not have it."""
    longest: int | None = _read_field(directory, "max_position_embeddings", CONFIG_FILES[-1:], int)
    return longest


def sampling_defaults(config: EngineConfig) -> SamplingDefaults:
    """Returns the sampling defaults of generation_config.json and, first, of `override_generation_config`. As in vLLM,
    `do_sample` is ignored. Raises ValueError."""
    path = Path(config.model) / GENERATION
    fields: dict[str, Any] = {}
    if config.generation_config == "auto" and config.simulated is None and path.exists():
        fields = read_config(path)[0]
        _converted(fields, f"{path} (--generation-config vllm does without it)")
    overrides = config.override_generation_config or {}
    unknown = sorted(overrides.keys() - SAMPLING_FIELDS.values())
    if unknown:
        known = ", ".join(SAMPLING_FIELDS.values())
        raise ValueError(f"expected {known} in override_generation_config, got {unknown[0]!r}")
    return _converted({**fields, **overrides}, "override_generation_config")


def _converted(fields: Mapping[str, Any], subject: str) -> SamplingDefaults:
    values = {name: fields.get(key) for name, key in SAMPLING_FIELDS.items()}
    if values["top_k"] == -1:  # as some files name "all"
        values["top_k"] = 0
    with expected(subject):
        return msgspec.convert(values, SamplingDefaults)


def takes_images(config: EngineConfig) -> bool:
    """Returns whether requests may have images; a simulated device takes none. Raises ValueError."""
    return _model_type(config) in VISION


def takes_videos(config: EngineConfig) -> bool:
    """Returns whether requests may have videos. Raises ValueError."""
    return _model_type(config) in VIDEO


def _model_type(config: EngineConfig) -> str:
    """Returns the `model_type` of config.json; "": a simulated device, or there is no such file."""
    path = Path(config.model) / "config.json"
    if config.simulated is not None or not path.exists():
        return ""
    whole, _ = read_config(path)
    return str(whole.get("model_type"))


# ── pooling ──
class _Module(msgspec.Struct):
    type: str
    path: str = ""


def is_pooling(config: EngineConfig) -> bool:
    """Returns whether the engine makes vectors or scores: as `runner` says, or modules.json of sentence-transformers.
    Raises ValueError."""
    if config.runner != "auto" or config.simulated is not None:
        return config.runner == "pooling"
    return any(module.type.endswith(".Pooling") for module in _modules(Path(config.model)))


def require_pooling(config: EngineConfig) -> None:
    """Raises ValueError if the model pools otherwise than by the last position, or the tokenizer has no token for yes
    or no."""
    if config.pooling == "classify":
        classifier_ids(config)
        return
    directory = Path(config.model)
    for module in _modules(directory):
        name = module.type.rpartition(".")[2]
        if name not in ("Transformer", "Pooling", "Normalize"):
            raise ValueError(
                f"{directory / MODULES} names a module {name}: only pooling of the last token is supported"
            )
        path = directory / module.path / "config.json"
        if name == "Pooling" and path.exists():
            fields = read_config(path)[0].items()
            modes = [key.removeprefix(MODE) for key, is_on in fields if key.startswith(MODE) and is_on]
            if modes != ["lasttoken"]:
                raise ValueError(f"{path} asks for pooling by {modes}: only pooling of the last token is supported")


def classifier_ids(config: EngineConfig) -> tuple[int, int]:
    """Returns the ids of no and yes, by `classifier_from_token` in config.json, a field of vLLM, or by these words.
    Raises ValueError."""
    words = _read_field(Path(config.model), "classifier_from_token", CONFIG_FILES[-1:], tuple[str, str])
    words = words or ("no", "yes")
    no, yes = map(load_tokenizer(config).token_to_id, words)
    if no is None or yes is None:
        raise ValueError(
            f"the tokenizer of {config.model} has no token {words[0 if no is None else 1]!r}: expected "
            "classifier_from_token in config.json, the tokens of no and yes"
        )
    return no, yes


def _modules(directory: Path) -> list[_Module]:
    path = directory / MODULES
    if not path.exists():
        return []
    with expected(str(path)):
        return msgspec.json.decode(path.read_bytes(), type=list[_Module])


def hidden_size_of(config: EngineConfig) -> int | None:
    """Returns `hidden_size`; None: of a simulated device, or config.json leaves it to a default. Raises ValueError."""
    if config.simulated is not None:
        return None
    hidden_size: int | None = _read_field(Path(config.model), "hidden_size", CONFIG_FILES[-1:], int)
    return hidden_size


def load_tokenizer(config: EngineConfig) -> Any:
    """Loads tokenizer.json. Raises ValueError if it is missing or malformed."""
    from tokenizers import Tokenizer

    path = tokenizer_path(config)
    if not path.exists():
        raise ValueError(f"{path} is missing: the model has no tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no narrower one
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from None


def tokenizer_path(config: EngineConfig) -> Path:
    return Path(config.model) / "tokenizer.json"


def _read_field(directory: Path, name: str, files: Iterable[str], kind: Any) -> Any:
    """Returns a field of the first of these files that has it, at its top or in `text_config`; None: none has it.
    Raises ValueError."""
    for file in files:
        path = directory / file
        if not path.exists():
            continue
        for part in read_config(path):
            if part.get(name) is not None:
                with expected(f"{name} of {path}"):
                    return msgspec.convert(part[name], kind)
    return None


def read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields at the top of a JSON file, and those of its `text_config`. Raises ValueError."""
    with expected(str(path)):
        whole = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return whole, msgspec.convert(whole.get("text_config") or {}, dict[str, Any])


@contextlib.contextmanager
def expected(subject: str) -> Iterator[None]:
    try:
        yield
    except msgspec.DecodeError as error:
        raise ValueError(f"{subject} is invalid: {error}") from None
