"""What lines say of log-probabilities: made together, and byte for byte what each row would say by itself."""

import random

import msgspec
import numpy as np
import pytest

from penstock.engine.output.logprobs_json import LogprobsWriter
from penstock.engine.protocol.messages import Logprobs
from penstock.engine.text.detokenizer import Vocabulary

PIECES = [
    b"a",
    "é".encode()[:1],
    "日本".encode(),
    b"</s>",
    b"",
    b'"\\',
    b"100%",
    b"%b%%",
    b"\0\n\r\x7f",
    "\u2028".encode(),
]
VOCABULARY = Vocabulary([*PIECES, b"\xff"], special=(3,))
VALUES = [0.0, -0.0, -3.0, -0.5, -1e-5, -123456.7, -9999.5, float("-inf"), float("nan")]


def shown(token: int) -> bytes:
    return VOCABULARY.token_bytes(token)


def chat_plainly(ids: list[int], values: list[float]) -> bytes:
    entries = [
        b'{"token":%b,"bytes":%b,"logprob":%.6g'
        % (msgspec.json.encode(shown(token).decode(errors="replace")), msgspec.json.encode(list(shown(token))), value)
        for token, value in zip(ids, values, strict=True)
    ]
    best = b",".join(entry + b"}" for entry in entries[1:])
    return b'{"content":[%b,"top_logprobs":[%b]}]}' % (entries[0], best)


def completion_plainly(ids: list[int], values: list[float], offset: int) -> bytes:
    names = [msgspec.json.encode(shown(token).decode(errors="replace")) for token in ids]
    best = {name: b"%b:%.6g" % (name, value) for name, value in zip(names, values, strict=True)}
    return b'{"text_offset":[%d],"token_logprobs":[%.6g],"tokens":[%b],"top_logprobs":[{%b}]}' % (
        *(offset, values[0], names[0]),
        b",".join(best.values()),
    )


def columns(rows: list[tuple[list[int], list[float]]]) -> Logprobs:
    ids = np.array([token for ids, _ in rows for token in ids], np.int32)
    values = np.array([value for _, values in rows for value in values], np.float32)
    return Logprobs(ids, values, np.ones(len(rows), np.int32), np.array([len(ids) for ids, _ in rows], np.int32))


def random_row(chance: random.Random) -> tuple[list[int], list[float]]:
    count = chance.choice([1, 2, 3, 6, 21])
    ids = [chance.choice([chance.randrange(len(PIECES) + 1), -1, 1 << 30]) for _ in range(count)]
    values = [chance.choice([*VALUES, -chance.random() * 10 ** chance.randint(-9, 4)]) for _ in range(count)]
    return ids, np.array(values, np.float32).tolist()


def least(values: list[float]) -> list[float]:
    return [max(value, -9999.0) for value in values]


@pytest.mark.parametrize("seed", range(20))
def test_logprobs_json_of_a_batch_equals_that_of_each_row(seed: int) -> None:
    chance = random.Random(seed)
    rows = [random_row(chance) for _ in range(chance.choice([1, 2, 40]))]
    offsets = [chance.choice([0, 7, 1 << 40]) for _ in rows]
    likely = LogprobsWriter(VOCABULARY)
    for _ in range(2):  # the second time from what stands ready
        assert likely.of_chats(columns(rows)) == [chat_plainly(ids, least(values)) for ids, values in rows]
        assert likely.of_completions(columns(rows), offsets) == [
            completion_plainly(ids, least(values), offset) for (ids, values), offset in zip(rows, offsets, strict=True)
        ]
