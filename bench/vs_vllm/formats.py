"""The formats that are compared, and what each of them makes of the workload.

The messages are those of `vllm2024`, `vllm_end` (in the classes of `vllm_today`) and `ours`.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bench.vs_vllm import ours, vllm2024, vllm_end, vllm_today
from bench.vs_vllm.rounds import Local, Way
from bench.vs_vllm.vllm_peer import Remote
from bench.vs_vllm.workload import TEMPERATURE, TOP_P, VOCABULARY, Advance, Decode

OURS = "penstock"
WHOLE_PICKLE = "pickle of dataclasses, whole state (2024)"
WHOLE_NAMES = "msgpack with names, whole state"
WHOLE_ARRAYS = "msgpack without names, whole state"
GRAPH_PICKLE = "pickle 5, vLLM's fields"
GRAPH_MSGPACK = "msgpack arrays, vLLM's fields"
REAL = "pickle 5, vLLM itself"
REAL_MSGPACK = "msgpack arrays, vLLM itself"

ROOM = 64  # blocks that each request has been given before, where none is to fall due: for a thousand steps

Ways = Mapping[str, Way]


class Stepping:
    """The steps of one workload, told by `tell`; from the beginning again after the last. Each is made once."""

    def __init__(self, begin: Callable[[], Decode], steps: int, tell: Callable[[Decode, Advance], Any]) -> None:
        self._steps, self._tell = steps, tell
        self._decode = begin()
        self._made: list[Any] = []
        self._next = 0

    def __call__(self, messages: int) -> list[Any]:
        return [self._message() for _ in range(messages)]

    def _message(self) -> Any:
        if len(self._made) < self._steps:
            advance = self._decode.step()
            self._made.append(self._tell(self._decode, advance))
            self._decode.finish(advance)
        self._next += 1
        return self._made[(self._next - 1) % self._steps]


def structs_of(cls: type, known: dict[type, type] | None = None) -> type:
    """The msgspec struct, encoded as an array, with the fields of a dataclass and of those inside of it."""
    known = {} if known is None else known
    if cls not in known:
        hints = typing.get_type_hints(cls)
        fields = [(field.name, _exchanged(hints[field.name], known)) for field in dataclasses.fields(cls)]
        known[cls] = msgspec.defstruct(cls.__name__, fields, array_like=True)
    return known[cls]


def _exchanged(hint: Any, known: dict[type, type]) -> Any:
    if dataclasses.is_dataclass(hint):
        return structs_of(typing.cast("type", hint), known)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, dict):
        return origin[tuple(_exchanged(argument, known) for argument in arguments)]
    return hint


def as_structs(value: Any, known: Mapping[type, type]) -> Any:
    """The same objects, of the classes that `structs_of` has made."""
    if type(value) in known:
        return known[type(value)](
            *(as_structs(getattr(value, field.name), known) for field in dataclasses.fields(value))
        )
    if type(value) is list:
        return [as_structs(item, known) for item in value]
    if type(value) is dict:
        return {key: as_structs(item, known) for key, item in value.items()}
    return value


# ── a decode step ────────────────────────────────────────────────────────────────────────────────────────────────────
def steps(requests: int, *, is_spread: bool, steps: int) -> Ways:
    """To the workers. `steps`: how many come before the workload begins anew (a spread one has a cycle of 16)."""

    def begin() -> Decode:
        return Decode(requests, is_spread=is_spread)

    params = vllm2024.params_of(requests)
    # Not spread, the 14th step would need blocks.
    length = 16 if is_spread else 13

    def whole_state(decode: Decode, advance: Advance) -> Any:
        return vllm2024.whole_state(decode, params)

    classes: dict[type, type] = {}
    array = structs_of(vllm2024.ExecuteModelRequest, classes)

    def as_arrays(decode: Decode, advance: Advance) -> Any:
        return as_structs(vllm2024.whole_state(decode, params), classes)

    def state(tell: Callable[[Decode, Advance], Any]) -> Stepping:
        return Stepping(begin, length, tell)

    names = msgspec.msgpack.Decoder(vllm2024.ExecuteModelRequest)
    arrays: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(array)
    encoder = msgspec.msgpack.Encoder()
    return {
        WHOLE_PICKLE: Local(state(whole_state), pickle.dumps, pickle.loads),
        WHOLE_NAMES: Local(state(whole_state), encoder.encode, names.decode),
        WHOLE_ARRAYS: Local(state(as_arrays), encoder.encode, arrays.decode),
        GRAPH_PICKLE: Local(state(in_vllm_classes(vllm_end.scheduler_output)), dumps5, pickle.loads),
        REAL: Remote("scheduler_output", state(plain_step)),
        OURS: (ours.Steps if is_spread else ours.Steady)(
            Decode(requests, is_spread=is_spread, room=0 if is_spread else ROOM)
        ),
    }


def dumps5(message: Any) -> bytes:
    return pickle.dumps(message, 5)


def plain_step(decode: Decode, advance: Advance) -> dict[str, Any]:
    """As plain data, for another interpreter."""
    return {
        "names": [item.name for item in decode.running],
        "new_blocks": [advance.due.get(row) for row in range(len(decode.running))],
        "computed": [item.computed for item in decode.running],
        "outputs": [len(item.output) for item in decode.running],
        "sampled": advance.sampled,
    }


def in_vllm_classes(build: Callable[[Any, dict[str, Any]], Any]) -> Callable[[Decode, Advance], Any]:
    return lambda decode, advance: build(vllm_today, plain_step(decode, advance))


# ── what comes of it ─────────────────────────────────────────────────────────────────────────────────────────────────
def worker_outputs(requests: int) -> Ways:
    def begin() -> Decode:
        return Decode(requests, is_spread=True)

    def stepping(tell: Callable[[Decode, Advance], Any]) -> Stepping:
        return Stepping(begin, 16, tell)

    return {
        GRAPH_PICKLE: Local(stepping(in_vllm_classes(vllm_end.model_runner_output)), dumps5, pickle.loads),
        REAL: Remote("model_runner_output", stepping(plain_step)),
        OURS: ours.worker_outputs(begin()),
    }


def api_outputs(requests: int) -> Ways:
    def begin() -> Decode:
        return Decode(requests, is_spread=True)

    def stepping(tell: Callable[[Decode, Advance], Any]) -> Stepping:
        return Stepping(begin, 16, tell)

    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(vllm_today.EngineCoreOutputs)
    return {
        GRAPH_MSGPACK: Local(stepping(in_vllm_classes(vllm_end.engine_core_outputs)), encoder.encode, decoder.decode),
        REAL_MSGPACK: Remote("engine_core_outputs", stepping(plain_step)),
        OURS: ours.api_outputs(begin()),
    }


# ── a request ────────────────────────────────────────────────────────────────────────────────────────────────────────
def requests(tokens: int) -> Ways:
    prompt = [(7919 * index + 13) % VOCABULARY for index in range(tokens)]
    numbers = itertools.count()

    def new_requests(messages: int) -> Sequence[Any]:
        params = vllm2024.SamplingParams(temperature=TEMPERATURE, top_p=TOP_P)
        names = [f"cmpl-{next(numbers):032x}-0" for _ in range(messages)]
        return [vllm_today.NewRequest(name, list(prompt), None, params, 1234567.25) for name in names]

    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(vllm_today.NewRequest)
    return {
        "pickle 5": Local(new_requests, dumps5, pickle.loads),
        "msgpack with names": Local(new_requests, encoder.encode, decoder.decode),
        OURS: ours.requests(prompt),
    }


def params_nbytes() -> dict[str, int]:
    """Of default sampling parameters: bytes in a message."""
    params = vllm2024.SamplingParams()
    classes: dict[type, type] = {}
    structs_of(vllm2024.SamplingParams, classes)
    array = as_structs(params, classes)
    return {
        "pickle of a dataclass (2024)": len(pickle.dumps(params)),
        "msgpack with names": len(msgspec.msgpack.encode(params)),
        "msgpack without names": len(msgspec.msgpack.encode(array)),
        OURS: ours.params_nbytes(),
    }
