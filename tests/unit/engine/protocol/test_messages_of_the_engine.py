"""The engine's messages: every one travels as it is, columns cost what they should, and what is wrong has a place."""

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock import Buffer, DecodeError, Handle
from penstock.codec import Catalogue, FrameDecoder, FrameEncoder
from penstock.engine.protocol.messages import (
    DELTAS,
    INBOX,
    RESULTS,
    STEPS,
    TOKENS,
    Abort,
    AnswerFormat,
    Began,
    Begin,
    ChunkFormat,
    Delta,
    Ended,
    Failed,
    Finished,
    FinishReason,
    Inputs,
    Joined,
    Logprobs,
    OutputReady,
    Progress,
    Ready,
    Resume,
    SamplingParams,
    Started,
    Step,
    StepDone,
    Stop,
    Style,
    Submit,
    Tokens,
)
from penstock.lowlevel import Ref
from penstock.tensor import plan
from tests.support.columns import ints, slots


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def flat(frame: Any) -> bytes:
    return b"".join(memoryview(piece).cast("B") for piece in frame) if isinstance(frame, list) else bytes(frame)


def encoded(message: Any, channel: Any) -> bytes:
    return flat(FrameEncoder(Catalogue.of(channel)).encode(message))


def plain(value: Any) -> Any:
    """A message as lists, to be compared."""
    if isinstance(value, msgspec.Struct):
        return [type(value).__name__, *(plain(getattr(value, name)) for name in value.__struct_fields__)]
    return [value.dtype.str, value.tolist()] if isinstance(value, np.ndarray) else value


LAID = plan({"pixels": np.arange(9.0)})
INPUTS = Inputs(
    ints(2),
    (Handle(b"k" * 32, Ref(1 << 63, 5, 7, 0, 1 << 20)), Handle(None, LAID.layout, Buffer(np.arange(9.0)))),
    ints(5, 600),
    ints(576, 3),
)
ANSWER = AnswerFormat("qwen3_xml", "qwen3", True, "r", {"f": {"a": "string"}})
PARAMS = SamplingParams(n=2, stop=("\n",), logit_bias=((5, -1.0),), seed=3, max_tokens=None)
LOGPROBS = Logprobs(ints(1, 2, 3, 4), floats(-0.1, -2, -0.3, -4), ints(1, 7), ints(2, 2))


@pytest.mark.parametrize(
    ("message", "channel"),
    [
        (Submit(1, 7, np.arange(1000, dtype=np.int32), PARAMS, -3, "client", b"salt", INPUTS), INBOX),
        (Submit(0, 0, ints(), PARAMS), INBOX),
        (Abort(1, ints(7, 8)), INBOX),
        (Abort(1, ints(7, 8), slots(0, 3)), INBOX),
        (Submit(0, 0, ints(), PARAMS, chunk_format=ChunkFormat(Style.CHAT, b'{"id":"x"', 3, ANSWER)), INBOX),
        (
            Submit(
                0,
                1,
                ints(5),
                PARAMS,
                seed=(1 << 64) - 1,
                arrived_ns=1 << 60,
                progress=Progress(ints(-1, 2), ints(8, 9)),
            ),
            INBOX,
        ),
        (Ready(3, 1 << 40, 1 << 17), INBOX),
        (OutputReady(1, 3, 2), INBOX),
        (
            Step(
                1,
                2,
                joined=Joined(
                    slots(3),
                    ints(7),
                    (PARAMS,),
                    ints(2),
                    ints(5, 6),
                    ints(1),
                    ints(0),
                    seeds=np.array([(1 << 64) - 1], np.uint64),
                    generated_counts=ints(3),
                    generated=ints(7, 8, 9),
                ),
            ),
            STEPS,
        ),
        (Begin(0xFFFFFFFF, 0, 256, 1 << 20, 16), STEPS),
        (Stop("it is late"), STEPS),
        (StepDone(0xFFFFFFFF, 1 << 40, ints(5, 6, 7), LOGPROBS, slots(9)), RESULTS),
        (Tokens(ints(5, 6, 7)), TOKENS),
        (
            Tokens(
                ints(5, 6),
                slots(1, 4),
                LOGPROBS,
                (3,),
                (Started(1, 7, PARAMS, (5, 6), ChunkFormat(Style.COMPLETION, b'{"id":"x"'), 2, 1, 16, (8, 9)),),
                (Ended(4, FinishReason.STOP, 6), Ended(1, FinishReason.LENGTH)),
            ),
            TOKENS,
        ),
        (Delta(2, ints(7, 8, 3, 2, 50, 51, 52), "aé\n".encode() + b"b", slots(2, 1), slots(0, 1)), DELTAS),
        (
            Delta(
                1,
                ints(7, 0, 50),
                b"",
                finished=Finished(slots(0), np.array([FinishReason.STOP], np.uint8), ("\n",), ints(3)),
                logprobs=LOGPROBS,
                began=Began(slots(0), ints(16)),
            ),
            DELTAS,
        ),
        (Failed(7, 503, "its worker died"), DELTAS),
        (Failed(7, 503, "its output processor died", Resume.SUSPECT_RUNS), DELTAS),
    ],
    ids=lambda message: type(message).__name__ if isinstance(message, msgspec.Struct) else "",
)
def test_a_message_arrives_as_it_was_sent(message: Any, channel: Any) -> None:
    received = FrameDecoder(Catalogue.of(channel)).decode(encoded(message, channel))
    assert plain(received) == plain(message)


def test_an_abort_names_a_sample_of_each_request_or_none() -> None:
    with pytest.raises(ValueError, match="expected 2 samples, got a shape of"):
        Abort(1, ints(7, 8), slots(0))


def test_progress_has_the_ids_of_each_sample_that_is_not_over() -> None:
    samples = Progress(ints(2, -1, 0, 1), ints(7, 8, 9)).generated()
    assert [None if ids is None else ids.tolist() for ids in samples] == [[7, 8], None, [], [9]]


@pytest.mark.parametrize(
    ("counts", "ids", "why"),
    [
        ([2, -1], [7], r"expected 2 generated ids, got a shape of \(1,\)"),
        ([-1, -1], [], "expected a count of -1 or more for each sample, and one that is not over"),
        ([-2, 1], [7], "expected a count of -1 or more"),
        ([], [], "expected a count of -1 or more"),
        ([(1 << 31) - 1] * 3, [7], "expected 6442450941 generated ids"),
    ],
)
def test_progress_whose_counts_do_not_fit_its_ids_is_refused(counts: list[int], ids: list[int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Progress(ints(*counts), ints(*ids))


def test_a_request_has_the_progress_of_each_sample_or_of_none() -> None:
    with pytest.raises(ValueError, match="expected progress of 2 samples, got 1"):
        Submit(0, 1, ints(5), PARAMS, progress=Progress(ints(0), ints()))


def test_columns_of_a_delta_have_requests_lengths_and_ids() -> None:
    delta = Delta(2, ints(7, 8, 3, 2, 50, 51, 52), b"abcde", slots(2, 1))
    assert delta.requests.tolist() == [7, 8] and delta.text_lengths.tolist() == [3, 2]
    assert delta.ids.tolist() == [50, 51, 52]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([2, 5], "expected 6 numbers, got a shape of"),
        ([2, 6, [1]], "expected 2 counts, got a shape of"),
        ([2, 6, [1, 2]], "expected 7 numbers, got a shape of"),
        ([1 << 62, 6], "expected 13835058055282163712 numbers"),
        ([-1, 6], r"expected `int` >= 0 at \$\.rows"),
    ],
)
def test_a_delta_whose_columns_do_not_fit_is_refused(fields: list[Any], why: str) -> None:
    class Loose(msgspec.Struct, array_like=True):
        rows: int
        numbers: np.ndarray
        text: bytes
        counts: np.ndarray | None = None

    counts = slots(*fields[2]) if len(fields) > 2 else None
    encoder = FrameEncoder(Catalogue.of(DELTAS))
    fake = Loose(fields[0], np.zeros(fields[1], np.int32), b"", counts)
    frame = b"\x01" + msgspec.msgpack.Encoder(enc_hook=encoder._hook).encode(fake)
    with pytest.raises(DecodeError, match=why):
        FrameDecoder(Catalogue.of(DELTAS)).decode(frame)


def test_a_result_has_one_id_for_each_row_that_samples() -> None:
    done = StepDone(1, 1, ints(5, 6, 7))
    done.require_fit(3)
    for rows in (2, 4):
        with pytest.raises(DecodeError, match=rf"expected {rows} numbers, got a shape of \(3,\) at \$\.ids"):
            done.require_fit(rows)
    with pytest.raises(DecodeError, match=r"expected 3 numbers, got a shape of \(1, 3\) at \$\.ids"):
        msgspec.structs.replace(done, ids=done.ids.reshape(1, -1)).require_fit(3)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"n": 0}, "expected n between 1 and"),
        ({"temperature": -0.1}, "expected temperature between 0"),
        ({"temperature": float("nan")}, "expected temperature between 0"),
        ({"top_p": 0.0}, "expected top_p above 0"),
        ({"top_p": 1.1}, "expected top_p between 0 and 1"),
        ({"top_k": -1}, "expected top_k"),
        ({"presence_penalty": 2.5}, "expected presence_penalty between -2 and 2"),
        ({"max_tokens": 0}, "expected max_tokens between 1"),
        ({"min_tokens": 17}, r"expected min_tokens up to max_tokens \(16\), got 17"),
        ({"stop": ("",)}, "expected stop strings that are not empty"),
        ({"stop": ("x",), "detokenize": False}, "expected detokenize with stop strings"),
    ],
)
def test_meaningless_parameters_are_refused_at_creation_and_on_arrival(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SamplingParams(**wrong)
    defaults = msgspec.structs.asdict(SamplingParams())
    encoded = msgspec.msgpack.encode(list({**defaults, **wrong}.values()))
    with pytest.raises(msgspec.ValidationError, match=why):
        msgspec.msgpack.decode(encoded, type=SamplingParams)


def test_what_a_step_sampled_of_256_requests_fits_1100_bytes() -> None:
    assert len(encoded(StepDone(0xFFFFFFFF, 1 << 31, np.full(256, 150_000, np.int32)), RESULTS)) <= 1100


def test_outputs_of_256_requests_fit_5000_bytes() -> None:
    ids = np.full(256, 150_000, np.int32)
    numbers = np.concatenate([np.arange(256, dtype=np.int32), np.full(256, 5, np.int32), ids])
    assert len(encoded(Delta(256, numbers, b"token" * 256), DELTAS)) <= 5000


def test_a_million_ids_are_sent_as_they_lie_and_received_where_they_lie() -> None:
    prompt = np.arange(1_000_000, dtype=np.int32)
    frame = FrameEncoder(Catalogue.of(INBOX)).encode(Submit(0, 1, prompt, PARAMS))
    assert isinstance(frame, list) and any(piece is prompt for piece in frame)
    whole = flat(frame)
    received = FrameDecoder(Catalogue.of(INBOX)).decode(whole)
    assert np.shares_memory(received.prompt, np.frombuffer(whole, np.uint8))
    assert np.array_equal(received.prompt, prompt) and not received.prompt.flags.writeable
