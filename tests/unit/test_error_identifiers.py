"""Identifiers in error texts: a user can import or type each of them.

An identifier is an option (`--x`), a dotted name, a name with an underscore or with a capital inside, or a method as in
`.detach()`. Python texts are those of `raise` statements; native texts are the literals of statements that make errors.
"""

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import penstock
from penstock import bridge, lowlevel
from penstock.cli import parser
from penstock.cli.argument_parser import ArgumentParser
from penstock.engine.cluster.adapter_files import AdapterSettings
from penstock.engine.protocol.config import EngineConfig, Nodes, SamplingDefaults, SimulatedDevice
from penstock.engine.protocol.lora import LoraConfig
from penstock.engine.protocol.sampling_params import SamplingParams
from penstock.engine.text.grammar_fields import ResponseFormat, StructuredOutputs
from penstock.environment import VARIABLES
from penstock.server.chat.request_schema import FIELDS, Sampling
from penstock.server.http.adapter_routes import LoadAdapter, UnloadAdapter
from penstock.server.messages import messages_request  # noqa: F401  # adds its fields
from penstock.server.options import ServerOptions
from penstock.server.responses.responses_request import ResponseItem
from penstock.tensor import cuda

ROOT = Path(__file__).parents[2]
IDENTIFIER = re.compile(
    r"(?<![\w$./<'-])"
    r"(--[a-z][a-z0-9-]+|\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|\.?[A-Za-z_]\w*(?=\(\))|[A-Za-z]\w*_\w+|[A-Z]?[a-z]+[A-Z]\w+)"
)
NATIVE_ERROR = re.compile(r"(?:Error\(Fault|PyErr_\w+\(|os_error\(|type_error\(|stale\()[^;]*;")
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')

# Each with the reason why a reader knows the identifier.
EXCEPTIONS = {
    **dict.fromkeys((".detach", ".to_dense", "torch.save", "tensor.detach"), "torch, which need not be installed here"),
    **dict.fromkeys(("NumPy", "PyAV", "vLLM"), "names of products"),
    **dict.fromkeys(("config.json", "video_preprocessor_config.json"), "files of a model"),
    **dict.fromkeys(
        "max_position_embeddings model_type num_attention_heads num_key_value_heads rope_type weight_map "
        "original_max_position_embeddings position_embedding_type quantization_config".split(),
        "settings in files of a model",
    ),
    ".function.name": "the end of a path in a request",
    "qwen3_xml": "a value of --tool-call-parser",
    **dict.fromkeys(("CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE"), "environment variables of CUDA and NCCL"),
    "StepDone": "the message that a core awaits of its worker: docs/operations names it",
    "array_like": "an option of msgspec.Struct",
    "example.org": "a host",
    "http_options": "an option of Ray Serve",
    "memfd_create": "a system call",
    "model_fingerprint": "a fact that nodes compare: docs/howto/many-nodes.md",
    "target_load": "a parameter of penstock.integrations.ray_serve, which needs Ray",
    **dict.fromkeys(("image_grid_thw", "video_grid_thw"), "tensors of transformers' processors"),
    **dict.fromkeys(("lora_0", "lora_A", "lora_B"), "tensors in files of PEFT; 0 stands for either"),
    "init_lora_weights": "a setting in files of PEFT",
    "LoRA": "the name of a method",
    "classifier_from_token": "a setting in config.json",
    **dict.fromkeys(("image_url", "text.verbosity"), "fields within fields of OpenAI's API"),
    "context_management.edits": "a field within a field of Anthropic's API",
    **dict.fromkeys(("data_offsets",), "a field of the safetensors format"),
    **dict.fromkeys(("invalid_api_key", "model_not_found", "previous_response_not_found"), "codes of OpenAI's API"),
}


def python_texts() -> Iterator[tuple[str, str]]:
    """Yields place and text of each `raise` statement; a replacement field counts as 0."""
    for path in sorted((ROOT / "src" / "penstock").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            for part in ast.walk(node.exc):
                if isinstance(part, ast.JoinedStr):
                    text = "".join(
                        str(value.value) if isinstance(value, ast.Constant) else "0" for value in part.values
                    )
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", part.value


def native_texts() -> Iterator[tuple[str, str]]:
    for path in sorted([*(ROOT / "native").glob("*.h"), *(ROOT / "native").glob("*.cpp")]):
        source = re.sub(r"//[^\n]*", "", path.read_text())
        for error in NATIVE_ERROR.finditer(source):
            for literal in LITERAL.findall(re.sub(r"\.with\(\"\w+\"", "", error[0])):
                yield f"native/{path.name}", re.sub(r"%[-0-9.*]*(?:ll|z)?[a-zA-Z]", "0", literal)


def identifiers() -> dict[str, str]:
    """Returns each identifier of an error text, with a place."""
    texts = [*python_texts(), *native_texts()]
    return {identifier: place for place, text in texts for identifier in IDENTIFIER.findall(text)}


def parameters_of(function: Any) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def typed_names() -> set[str]:
    """Returns the names that a user imports or types: public objects with members and parameters, options, settings,
    environment variables, fields of HTTP requests."""
    names = set(dir(builtins)) | {variable.name for variable in VARIABLES}
    names |= {*LoadAdapter.__struct_fields__, *UnloadAdapter.__struct_fields__}
    for module in (penstock, lowlevel, cuda, bridge):
        for name in module.__all__:
            public = getattr(module, name)
            names |= {name} | parameters_of(public)
            members = (
                [member for member in dir(public) if not member.startswith("_")] if inspect.isclass(public) else []
            )
            for member in members:
                names |= {member, f"{name}.{member}"} | parameters_of(getattr(public, member, None))
    for config in (EngineConfig, LoraConfig, Nodes, SamplingDefaults, SamplingParams, ServerOptions, SimulatedDevice):
        names |= set(config.__struct_fields__)
    for request in (Sampling, ResponseFormat, StructuredOutputs, *Sampling.__subclasses__()):
        names |= {field.encode_name for field in msgspec.structs.fields(request)}
    names.update(*FIELDS.values(), *(kind.__struct_fields__ for kind in (ResponseItem, AdapterSettings)))
    return names | option_strings(parser())


def option_strings(command: ArgumentParser) -> set[str]:
    """Returns the options of a command and of its subcommands."""
    own = {option for action in command.arguments for option in action.option_strings}
    return own.union(*(option_strings(subcommand) for _, subcommand in command.commands.values()))


def is_in_library(identifier: str) -> bool:
    """Returns whether a dotted name can be imported from NumPy or msgspec."""
    head, *members = identifier.split(".")
    value: Any = {"np": np, "numpy": np, "msgspec": msgspec}.get(head)
    for member in members:
        value = getattr(value, member, None)
    return value is not None


def test_identifiers_of_error_texts_can_be_imported_or_typed() -> None:
    names, found_in = typed_names(), identifiers()
    unknown = {name for name in found_in if name not in names and not is_in_library(name)}
    assert len(found_in) > 80, "looked at nothing"
    strange = {name: found_in[name] for name in unknown - EXCEPTIONS.keys()}
    assert not strange, "; ".join(f"{name} {place}" for name, place in strange.items())
    assert not EXCEPTIONS.keys() - unknown, "exceptions that are no longer needed"


def test_identifiers_in_a_text_are_found() -> None:
    text = "expected top_k at $.joined.params_of of Step: see --max-model-len, CudaPool.attach, .detach() or 'a_b'"
    assert IDENTIFIER.findall(text) == ["top_k", "--max-model-len", "CudaPool.attach", ".detach"]
