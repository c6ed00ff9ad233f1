"""A ModelRunnerOutput as a change: the token ids, and the fields that differ from the last output."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, NamedTuple

from penstock.codec.sequence import Sequenced
from penstock.integrations.vllm.plain_fields import Extras, PlainChanges, PlainFields
from penstock.integrations.vllm.row_runs import Runs, apply_runs, find_runs
from penstock.integrations.vllm.token_rows import PackedTokens, pack_tokens, unpack_tokens

ROWS = ("req_ids", "req_id_to_index", "sampled_token_ids")
TOKENS = -1  # among the fields that are pickled: token ids that cannot be packed


class RunnerChange(Sequenced, tag=2, frozen=True, eq=False):
    """How a ModelRunnerOutput differs from the last one."""

    rows: Runs | None  # the requests as runs of the last requests
    keys: Runs | None  # the index's keys, as runs of the last keys; []: the requests in order
    tokens: PackedTokens | None
    plain: PlainChanges


class LastOutput(NamedTuple):
    """The likely content of the next output. The lists and the dict are never handed out."""

    ids: list[str]
    keys: list[str]  # of the index
    positions: list[int]  # its values
    by_id: dict[str, int]
    plain: PlainFields


class RunnerOutputCodec:
    """Makes changes of outputs and outputs of changes; keeps no state."""

    def __init__(self, output_class: type, success: object) -> None:
        self._output_class = output_class
        self._success = success  # the status of a reply with an output
        fields = [field.name for field in dataclasses.fields(output_class)]
        self._num_fields = len(fields)
        plain = [name for name in fields if name not in ROWS]
        self._plain_of = operator.attrgetter(*plain)
        places = {name: index for index, name in enumerate((*plain, *ROWS))}
        self._output_at = operator.itemgetter(*(places[name] for name in fields))

    def find_output(self, message: Any) -> Any | None:
        """Returns the ModelRunnerOutput of a worker's reply, None of any other message."""
        is_output = (
            type(message) is tuple
            and len(message) == 2
            and message[0] is self._success
            and type(message[1]) is self._output_class
        )
        return message[1] if is_output else None

    def begin(self, message: Any) -> LastOutput | None:
        """Returns the state after a whole output; None for an output with unknown fields."""
        output = message[1]
        if not self._is_known(output):
            return None
        return LastOutput(
            list(output.req_ids), *_split(output.req_id_to_index), PlainFields.begin(self._plain_of(output))
        )

    def encode(
        self, state: LastOutput, message: Any, leader: int, number: int
    ) -> tuple[RunnerChange, Extras, LastOutput] | None:
        """Returns the change, the fields to pickle, and the new state; None: the output must be sent whole."""
        output = message[1]
        ids, index = output.req_ids, output.req_id_to_index
        rows = keys = None
        is_usual = ids == state.ids and list(index) == state.keys and list(index.values()) == state.positions
        if not is_usual:
            if not self._is_known(output):
                return None
            rows = find_runs(state.ids, ids)
            index_keys = list(index)
            keys = [] if index_keys == ids else find_runs(state.keys, index_keys)
        elif len(vars(output)) != self._num_fields:
            return None
        changes, extras, plain = state.plain.encode(self._plain_of(output))
        tokens = pack_tokens(output.sampled_token_ids)
        if tokens is None:
            extras[TOKENS] = output.sampled_token_ids
        change = RunnerChange(leader, number, rows, keys, tokens, changes)
        if is_usual:
            return change, extras, state if plain is state.plain else state._replace(plain=plain)
        return change, extras, _following(state, list(ids), *_split(index), plain)

    def decode(self, state: LastOutput, change: RunnerChange, extras: Extras) -> tuple[Any, LastOutput]:
        """Returns the message, sharing nothing with the state, and what is then the last."""
        tokens = extras.pop(TOKENS) if change.tokens is None else unpack_tokens(change.tokens)
        values, plain = state.plain.decode(change.plain, extras)
        if change.rows is None or change.keys is None:
            following = state if plain is state.plain else state._replace(plain=plain)
            ids, index = state.ids.copy(), state.by_id.copy()
        else:
            ids = apply_runs(state.ids, change.rows)
            position_of = dict(zip(ids, range(len(ids)), strict=True))
            keys = apply_runs(state.keys, change.keys) if change.keys else ids
            index = {key: position_of[key] for key in keys}
            following = _following(state, ids.copy(), *_split(index), plain)
        values += ids, index, tokens
        return (self._success, self._output_class(*self._output_at(values))), following

    def _is_known(self, output: Any) -> bool:
        """Returns whether the fields are those of the class, and the index has the position of each request."""
        ids, index = output.req_ids, output.req_id_to_index
        return (
            len(vars(output)) == self._num_fields
            and len(ids) == len(index)
            and list(map(index.get, ids)) == list(range(len(ids)))
        )


def _split(index: dict[str, int]) -> tuple[list[str], list[int], dict[str, int]]:
    return list(index), list(index.values()), dict(index)


def _following(
    state: LastOutput, ids: list[str], keys: list[str], positions: list[int], by_id: dict[str, int], plain: PlainFields
) -> LastOutput:
    if not ids:
        return state._replace(plain=plain)  # an output without requests
    return LastOutput(ids, keys, positions, by_id, plain)
