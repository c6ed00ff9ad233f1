"""Fields of a request that no struct of `request_schema` has: refused, ignored, or unknown.

The tables hold every field of OpenAI's API and of what vLLM and SGLang add to it; docs/howto/serve.md lists them and
/openapi.json is made from them. A field that would change the answer is refused by its name, unless its value is
neutral. A field that cannot change an answer of this server is ignored. Any other name is unknown: the answer names it
in a header and the log does so once, since it may be a field that is misspelled.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from penstock.engine.cluster.logs import event
from penstock.server.errors import ApiError

HEADER = "x-ignored-fields"
MAX_NAMES = 8  # of unknown fields that one answer names
MAX_CHARACTERS = 64  # of one of them
MAX_REMEMBERED = 256  # unknown names per process that are logged, and for which the nearest known one is looked up

_EMPTY: tuple[Any, ...] = (False, 0, "", [], {})

# Each with its neutral values, besides null: an answer without the field is the one that was asked for.
NEUTRAL_ONLY: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": _EMPTY,
    "echo": _EMPTY,  # by completions it is honoured
    "function_call": ("none", "auto"),
    "functions": _EMPTY,
    "modalities": ([], ["text"]),
    "moderation": (),
    "suffix": _EMPTY,
    "tool_choice": ("none", "auto"),
    "tools": _EMPTY,
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "chat_template": _EMPTY,
    "documents": _EMPTY,
    "ec_transfer_params": _EMPTY,
    "guided_whitespace_pattern": _EMPTY,
    "kv_transfer_params": _EMPTY,
    "logits_processors": _EMPTY,
    "logprob_token_ids": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "prompt_embeds": _EMPTY,  # by completions it is honoured
    "repetition_detection": _EMPTY,
    "return_prompt_text": _EMPTY,
    "return_token_strs": _EMPTY,
    "return_tokens_as_token_ids": _EMPTY,
    "routed_experts_prompt_start": _EMPTY,
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (-1,),
    "use_beam_search": _EMPTY,
    "vllm_xargs": _EMPTY,
    "watermarking": _EMPTY,
    # SGLang
    "custom_logit_processor": _EMPTY,
    "custom_params": _EMPTY,
    "lora_path": _EMPTY,
    "no_stop_trim": _EMPTY,
    "return_hidden_states": _EMPTY,
    "return_routed_experts": _EMPTY,
    "session_params": _EMPTY,
    "stop_regex": _EMPTY,
    # llama.cpp and text-generation-inference
    "grammar": _EMPTY,
    "mirostat": _EMPTY,
    "no_repeat_ngram_size": _EMPTY,
    "typical_p": (*_EMPTY, 1),
}

Neutral = Annotated[Any, msgspec.Meta(description="refused, unless the value changes nothing")]
INSTEAD = {"functions": "tools", "function_call": "tool_choice"}  # fields that are honoured, of chats

# Whatever their value. Of `stream_options` those that it has besides `include_usage`.
IGNORED: frozenset[str] = frozenset(
    {
        # OpenAI: what is kept, billed or counted elsewhere, and hints
        *("metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store"),
        "stream_options.include_obfuscation",
        # vLLM and SGLang: where and in which pieces an answer is made, and what only fields read that are refused
        *("data_parallel_rank", "guided_decoding_backend", "include_reasoning"),
        *(
            "length_penalty",
            "return_cached_tokens_details",
            "return_mm_kwargs",
            "return_token_offsets",
            "rid",
        ),
        *("routed_dp_rank", "separate_reasoning", "session_id", "stream_interval", "stream_reasoning"),
    }
)

_NAMES: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PRINTABLE = re.compile(r"[!-~]+")


def unknown_fields(body: bytes | bytearray | memoryview, known: Collection[str]) -> list[str]:
    """Returns the names that are unknown, in their order. `known`: fields that are honoured; `body`: a JSON object.

    Raises ApiError for a field that is not supported, with a value that is not neutral.
    """
    fields = _NAMES.decode(body)
    if "stream_options" in fields and "stream_options" in known:
        options = msgspec.json.decode(fields["stream_options"], type=dict[str, msgspec.Raw] | None) or {}
        fields.update((f"stream_options.{name}", value) for name, value in options.items())
    unknown = []
    for name, value in fields.items():
        if name in known or name in IGNORED:
            continue
        if name in NEUTRAL_ONLY:
            require_neutral(name, msgspec.json.decode(value))
        else:
            unknown.append(name)
    return unknown


def require_neutral(name: str, value: Any) -> None:
    """Raises ApiError if the value of a field in NEUTRAL_ONLY is not neutral."""
    if not is_neutral(value, NEUTRAL_ONLY[name]):
        raise refused(name, f": use {INSTEAD[name]}" if name in INSTEAD else _way_out(NEUTRAL_ONLY[name]))


def require_neutral_fields(
    body: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]], instead: Mapping[str, str]
) -> None:
    """Raises ApiError for a field of `neutral` with another value than the neutral ones. `instead`: ways out."""
    for name, values in neutral.items():
        if not is_neutral(getattr(body, name), values):
            raise refused(name, instead.get(name, ""))


def refused(where: str, way_out: str = "") -> ApiError:
    """Returns the error for a field that is not supported."""
    return ApiError(400, f"{where} is not supported{way_out}", param=where)


def strict(kind: type[msgspec.Struct], options: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Returns `kind` with the other fields of all tables, which decodes a body and finds unknown fields in one pass.

    `options`: the struct of `stream_options`.
    """

    def extended(base: type[msgspec.Struct], names: Iterable[str], more: Iterable[tuple[str, Any, Any]] = ()) -> Any:
        fields = [*((name, Any, None) for name in names), *more]
        return msgspec.defstruct(base.__name__, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True)

    outer = [name for name in IGNORED if "." not in name]
    inner = [name.partition(".")[2] for name in IGNORED if "." in name]
    has_options = "stream_options" in kind.__struct_fields__
    more = [("stream_options", extended(options, inner) | None, None)] if has_options else []
    names = (name for name in (*NEUTRAL_ONLY, *outer) if name not in kind.__struct_fields__)
    return extended(kind, names, more)  # type: ignore[no-any-return]


def is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    """Returns whether a value is null or one of `neutral`, compared as in JSON: true is not 1."""
    return value is None or any(
        value == neutral_value and isinstance(value, bool) == isinstance(neutral_value, bool)
        for neutral_value in neutral
    )


def _way_out(neutral: tuple[Any, ...]) -> str:
    """Returns the values that would pass, as a clause; empty if the field can only be left out."""
    values = [json.dumps(value) for value in neutral if value not in _EMPTY]
    return f": expected {' or '.join(values)}, or nothing" if values else ""


def properties() -> dict[str, Any]:
    """Returns the properties of these fields for /openapi.json."""
    refused: dict[str, Any] = {name: {"enum": [None, *neutral]} for name, neutral in NEUTRAL_ONLY.items()}
    ignored: dict[str, Any] = {name: {"description": "ignored"} for name in IGNORED if "." not in name}
    return dict(sorted((refused | ignored).items()))


class UnknownFields:
    """Reports unknown fields: to the client in each answer, and in the log once for each name."""

    def __init__(self, known: Iterable[str]) -> None:
        self._known = sorted({*known, *NEUTRAL_ONLY, *IGNORED})
        self._descriptions: dict[str, str] = {}

    def describe(self, names: Sequence[str], **context: object) -> str:
        """Returns the value of the header. `context`: fields of the line in the log."""
        described = [self._describe(name, context) for name in names[:MAX_NAMES]]
        more = len(names) - len(described)
        return ", ".join(described) + (f" and {more} more" if more else "")

    def _describe(self, name: str, context: Mapping[str, object]) -> str:
        if name in self._descriptions:
            return self._descriptions[name]
        shown = name if _PRINTABLE.fullmatch(name) else json.dumps(name)
        shown = shown if len(shown) <= MAX_CHARACTERS else f"{shown[:MAX_CHARACTERS]}..."
        if len(self._descriptions) == MAX_REMEMBERED or len(name) > MAX_CHARACTERS:
            return shown
        (nearest,) = difflib.get_close_matches(name, self._known, 1) or ("",)
        event("field ignored", logging.WARNING, field=shown, nearest=nearest, **context)
        self._descriptions[name] = f"{shown} (did you mean {nearest}?)" if nearest else shown
        return self._descriptions[name]
