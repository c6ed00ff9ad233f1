"""The directory of a model: the families that are supported, and the values of its config files.

Imports neither torch nor transformers, so that a model is refused before a process starts. A test holds the families
against transformers' own registry, and the table of docs/howto/serve.md against this one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
ENCODERS = {  # attend both ways, and make vectors and scores only: the beginning of the names of architectures
    "bert": "Bert",
    "modernbert": "ModernBert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
}
ENCODER_HEADS = ("Model", "ForMaskedLM")  # of a model for vectors: the head for masked words is not computed
CLASSIFIER = "ForSequenceClassification"
ROBERTA = ("roberta", "xlm-roberta")  # the first position has the number behind `pad_token_id`
_OTHER_HEAD = re.compile(r"For(?!CausalLM|ConditionalGeneration)\w+$")  # it classifies, say, and generates nothing

GENERATION = "generation_config.json"
CONFIG_FILES = (GENERATION, "config.json")  # the first that names an end id
MODULES = "modules.json"  # of sentence-transformers
MODE = "pooling_mode_"  # the beginning of a field for each mode of pooling
MODES = {"lasttoken": "lasttoken", "cls_token": "cls", "cls": "cls", "mean_tokens": "mean", "mean": "mean"}
SAMPLING_FIELDS = {  # of SamplingDefaults, and the names that they have in generation_config.json
    **{name: name for name in SamplingDefaults.__struct_fields__},
    "max_tokens": "max_new_tokens",
}


def require_family(
    model_type: str, architectures: Sequence[str] = (), quantization: Any = None, text_type: str = ""
) -> None:
    """Raises ValueError if a model with these fields of config.json, and of its text_config, cannot be served."""
    heads = [name for name in architectures if not _OTHER_HEAD.search(name) or model_type in ENCODERS]
    if model_type not in (*FAMILIES, *ENCODERS) or (architectures and not heads):
        raise ValueError(
            f"Model architectures {list(architectures)} (model_type {model_type!r}) are not supported; "
            f"supported are {', '.join(TEXT.values())}; with images {', '.join(VISION.values())}; for vectors and "
            f"scores {', '.join(ENCODERS)}"
        )
    if text_type not in ("", *TEXT) and not text_type.startswith(model_type):  # Qwen2-VL's is called qwen2_vl_text
        raise ValueError(
            f"{model_type!r} with text of model_type {text_type!r} is not supported; supported are {', '.join(TEXT)}"
        )
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if quantization is not None and (model_type, method) != ("gpt_oss", "mxfp4"):
        raise ValueError(f"{model_type!r}: weights quantized by {method!r} are not supported (quantization_config)")


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
    longest = _longest(directory)
    config = msgspec.structs.replace(config, max_model_len=min(config.max_model_len, longest or config.max_model_len))
    if _model_type(config) in ENCODERS:
        config = _with_encoder_defaults(config)
    end: int | list[int] | None = _read_field(directory, "eos_token_id", CONFIG_FILES, int | list[int])
    end_ids = {*config.end_ids, *(end if isinstance(end, list) else () if end is None else (end,))}
    return msgspec.structs.replace(
        config,
        end_ids=tuple(sorted(end_ids)),
        sampling_defaults=sampling_defaults(config),
        lora=with_digests(config.lora),
    )


def _with_encoder_defaults(config: EngineConfig) -> EngineConfig:
    """Returns the config of a model that attends both ways: a prompt is computed in one step, and nothing is kept."""
    is_classifier = bool(config.pooling) and any(name.endswith(CLASSIFIER) for name in _architectures(config))
    return msgspec.structs.replace(
        config,
        convert="classify" if is_classifier and config.convert == "auto" else config.convert,
        is_encoder=True,
        enable_prefix_caching=False,
        keep_kv_cache=False,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_model_len),
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
    """Returns the number of positions of a prompt; None: config.json does not have it."""
    longest: int | None = _read_field(directory, "max_position_embeddings", CONFIG_FILES[-1:], int)
    return None if longest is None else longest - first_position(directory)


def first_position(directory: Path) -> int:
    """Returns the number of a prompt's first position."""
    if _read_field(directory, "model_type", CONFIG_FILES[-1:], str) not in ROBERTA:
        return 0
    padding: int | None = _read_field(directory, "pad_token_id", CONFIG_FILES[-1:], int)
    return (1 if padding is None else padding) + 1


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


def _architectures(config: EngineConfig) -> list[str]:
    names: list[str] | None = _read_field(Path(config.model), "architectures", CONFIG_FILES[-1:], list[str])
    return names or []


# ── pooling ──
class _Module(msgspec.Struct):
    type: str
    path: str = ""


def is_pooling(config: EngineConfig) -> bool:
    """Returns whether the engine makes vectors or scores: by `runner`, modules.json of sentence-transformers, or the
    family. Raises ValueError."""
    if config.runner != "auto" or config.simulated is not None:
        return config.runner == "pooling"
    return _model_type(config) in ENCODERS or any(
        module.type.endswith(".Pooling") for module in _modules(Path(config.model))
    )


class Pooling(NamedTuple):
    """How a vector is made of the hidden states of a prompt."""

    mode: str  # cls: of the first position; mean: the mean of all; lasttoken: of the last
    is_normalized: bool  # of length 1


def pooling_of(config: EngineConfig) -> Pooling:
    """Reads the files of sentence-transformers. Without these files, as in vLLM: the last position, or the first of a
    model that attends both ways, of length 1. Raises ValueError for anything else."""
    directory = Path(config.model)
    modules = _modules(directory)
    mode = "cls" if config.is_encoder else "lasttoken"
    for module in modules:
        name = module.type.rpartition(".")[2]
        if name not in ("Transformer", "Pooling", "Normalize"):
            raise ValueError(f"{directory / MODULES} names a module {name}, which is not supported")
        path = directory / module.path / "config.json"
        if name == "Pooling" and path.exists():
            fields = read_config(path)[0]
            modes = [key.removeprefix(MODE) for key, is_on in fields.items() if key.startswith(MODE) and is_on]
            modes = modes or [str(fields.get(MODE[:-1], mode))]
            supported = ("cls", "mean", "lasttoken") if config.is_encoder else ("lasttoken",)
            if len(modes) != 1 or MODES.get(modes[0]) not in supported:
                raise ValueError(f"{path} asks for pooling by {modes}: supported are {' and '.join(supported)}")
            mode = MODES[modes[0]]
    return Pooling(mode, not modules or any(module.type.endswith(".Normalize") for module in modules))


def require_pooling(config: EngineConfig) -> None:
    """Raises ValueError if the way of pooling is not supported, or the model makes no scores."""
    if config.pooling != "classify":
        pooling_of(config)
    elif config.is_encoder:
        is_sigmoid(config)
    else:
        classifier_ids(config)


def require_encoder(config: EngineConfig) -> None:
    """Raises ValueError if a model that attends both ways cannot be served."""
    family, architectures = _model_type(config), _architectures(config)
    has_classifier = config.pooling == "classify" and family != "modernbert"
    heads = (CLASSIFIER,) if has_classifier else ENCODER_HEADS
    known = [f"{ENCODERS[family]}{head}" for head in heads]
    if not config.pooling:
        raise ValueError(f"{architectures} attend both ways, and generate nothing: --runner pooling serves them")
    if architectures and not set(architectures) & set(known):
        raise ValueError(
            f"Model architectures {architectures} are not supported with convert {config.pooling!r}; supported are "
            f"{', '.join(known)}"
        )
    if config.tensor_parallel_size > 1:
        raise ValueError(
            f"{family!r} attends both ways: expected tensor_parallel_size 1, got {config.tensor_parallel_size}; "
            "--data-parallel-size serves it by several engines"
        )
    if config.lora.enable_lora:
        raise ValueError(f"{family!r} attends both ways: LoRA adapters are not supported")
    position = _read_field(Path(config.model), "position_embedding_type", CONFIG_FILES[-1:], str)
    if position not in (None, "absolute", "sans_pos"):
        raise ValueError(f"position_embedding_type {position!r} of {config.model}/config.json is not supported")


def is_sigmoid(config: EngineConfig) -> bool:
    """Returns whether a score is the sigmoid of the classifier's logit, as for a model without a named activation in
    sentence-transformers and vLLM; else a score is the logit. Raises ValueError for anything else."""
    path = Path(config.model) / "config.json"
    whole, _ = read_config(path)
    labels = whole.get("id2label")
    count = len(labels) if isinstance(labels, dict) else whole.get("num_labels", 2)
    if count != 1:
        raise ValueError(f"{path} has {count} labels: only classifiers with one label make scores")
    library = whole.get("sentence_transformers") or {}
    named = library.get("activation_fn") if isinstance(library, dict) else None
    named = named or whole.get("sbert_ce_default_activation_function")
    activation = str(named or "Sigmoid").rpartition(".")[2]
    if activation not in ("Sigmoid", "Identity"):
        raise ValueError(f"{path} names the activation {named!r}: supported are Sigmoid and Identity")
    return activation == "Sigmoid"


def second_text_offset(config: EngineConfig) -> int:
    """Returns the number to add to the ids of the second text of a pair, by which an encoder knows the type of a token;
    0: the family has a single type."""
    path, files = Path(config.model), CONFIG_FILES[-1:]
    if not config.is_encoder or _model_type(config) != "bert" or _read_field(path, "type_vocab_size", files, int) == 1:
        return 0
    return int(_read_field(path, "vocab_size", files, int))


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
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no narrower one
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from None
    tokenizer.no_truncation()  # the file may say so, as that of all-MiniLM-L6-v2: a long text would lose its end
    tokenizer.no_padding()
    return tokenizer


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
