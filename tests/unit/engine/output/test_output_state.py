"""What an output processor tells the servers: rows and ends, and lines that are ready to be passed on."""

import json
from typing import Any

import numpy as np
import pytest

from penstock.engine.output.output_state import OutputState
from penstock.engine.protocol.messages import (
    ChunkFormat,
    FinishReason,
    Logprobs,
    Progress,
    SamplingParams,
    Style,
    Submit,
    Tokens,
)
from penstock.errors import DecodeError
from tests.property.speaking import EOS, MAX_MODEL_LEN, Got, Sample, Speaking

A, B, E_BEGINS, E_ENDS, EURO, QUOTE, SPECIAL = 0, 1, 2, 4, 6, 7, 8
HEAD = b'{"id":"x","object":"chat.completion.chunk"'


def saying(*ids: int, key: tuple[int, int, int] = (0, 1, 0), prompt: int = 5, then: int = A, **params: Any) -> Sample:
    script = [*ids, *[then] * MAX_MODEL_LEN]
    return Sample(key, SamplingParams(**{"ignore_eos": True, "max_tokens": len(ids), **params}), prompt, script)


def answered(*samples: Sample, chunk_format: ChunkFormat | None = None) -> list[Got]:
    engine = Speaking()
    for sample in samples:
        engine.ask(sample, chunk_format=chunk_format)
    engine.finish()
    return [engine.servers.got[sample.key] for sample in samples]


def lines(actual: Got) -> list[Any]:
    """What a server passes on, as a client reads it."""
    events = actual.text.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize(
    "chunk_format", [None, ChunkFormat(Style.CHAT, HEAD, 0), ChunkFormat(Style.COMPLETION, HEAD, 0)]
)
def test_native_rows_get_the_answers_of_columns(
    chunk_format: ChunkFormat | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers() -> list[Got]:
        return answered(
            saying(A, EURO, QUOTE, SPECIAL, B, E_BEGINS, E_ENDS, B),
            saying(A, SPECIAL, 99, B, key=(0, 2, 0), skip_special_tokens=False),
            saying(B, QUOTE, A, B, A, B, A, key=(0, 3, 0), stop=("bab",)),
            chunk_format=chunk_format,
        )

    process_table_texts = OutputState._process_table_texts
    with monkeypatch.context() as patched:
        patched.setattr(OutputState, "_process_table_texts", lambda *_: None)
        in_columns = answers()
    taken: list[bool] = []

    def recorded(state: OutputState, slots: Any, tokens: Tokens) -> Any:
        outputs = process_table_texts(state, slots, tokens)
        taken.append(outputs is not None)
        return outputs

    monkeypatch.setattr(OutputState, "_process_table_texts", recorded)
    assert answers() == in_columns
    assert {*taken} == {True, False}


# ── plain ──


def test_stop_string_in_the_last_token_is_the_reason_without_an_abort() -> None:
    engine = Speaking()
    engine.ask(saying(A, B, stop=("ab",)))
    for _ in range(2):
        engine.step()
        engine.hear()
    actual = engine.servers.got[0, 1, 0]
    assert (actual.text, actual.end) == (b"", (FinishReason.STOP, "ab")) and not engine.aborts


def test_events_have_as_many_tokens_as_the_interval() -> None:
    engine = Speaking(interval=4)
    chunk_format = ChunkFormat(Style.CHAT, HEAD, 0)
    engine.ask(saying(*[A, B] * 6), chunk_format=chunk_format)
    engine.ask(saying(*[A, B] * 2, key=(0, 2, 0), logprobs=1), chunk_format=chunk_format)
    engine.ask(saying(*[A, B] * 6, key=(0, 3, 0), stop=("bab",)), chunk_format=chunk_format)
    engine.finish()
    plain, likely, stopped = ([line["choices"][0] for line in lines(engine.servers.got[0, n, 0])] for n in (1, 2, 3))
    assert [choice["delta"]["content"] for choice in plain] == ["a", "baba", "baba", "bab"]
    assert [choice["finish_reason"] for choice in plain] == [None, None, None, "length"]
    assert [choice["delta"]["content"] for choice in likely] == ["a", "b", "a", "b"]
    assert "".join(choice["delta"].get("content", "") for choice in stopped) == "a"
    assert stopped[-1]["finish_reason"] == "stop" and engine.servers.got[0, 3, 0].end == (FinishReason.STOP, "bab")


def test_output_that_waits_for_its_interval_comes_with_an_error() -> None:
    engine = Speaking(interval=100)
    engine.ask(saying(*[A, B] * 6))
    engine.ask(saying(*[B] * 12, key=(0, 2, 0), logprobs=1))
    for _ in range(5):
        engine.step()
        engine.hear()
    assert engine.servers.got[0, 1, 0].ids == [A]
    engine.fails = {(0, 1, 0): FinishReason.ERROR}
    engine.finish()
    failed, other = engine.servers.got[0, 1, 0], engine.servers.got[0, 2, 0]
    assert (failed.ids, failed.text, failed.end) == ([A, B, A, B, A], b"ababa", (FinishReason.ERROR, None))
    assert other.logprobs == [[B, B + 1]] * 12 and other.text == b"b" * 12


def test_each_output_answers_its_share_of_the_requests() -> None:
    engine = Speaking(outputs=2)
    for request in range(4):
        engine.ask(saying(A, key=(0, request, 0), logprobs=1))
    took: list[list[int]] = []
    for state in engine.states:
        requests: list[int] = []
        took.append(requests)
        process = state.process

        def recorded(tokens: Tokens, requests: list[int] = requests, process: Any = process) -> Any:
            answers = process(tokens)
            requests += [request for _, delta in answers.deltas for request in delta.requests.tolist()]
            return answers

        state.process = recorded  # type: ignore[method-assign]
    engine.finish()
    assert took == [[0, 2], [1, 3]]
    assert [engine.servers.got[0, request, 0].logprobs for request in range(4)] == [[[A, A + 1]]] * 4


def test_a_server_that_is_forgotten_is_answered_no_more() -> None:
    engine = Speaking()
    engine.ask(saying(A, A, A, key=(0, 1, 0)))
    engine.ask(saying(B, B, B, key=(1, 1, 0)))
    engine.step()
    engine.hear()
    assert engine.states[0].forget_server(1).tolist() == [1]
    engine.scheduler.abort(1, 1)
    engine.step()
    engine.hear()
    engine.ask(saying(B, key=(1, 9, 0)))
    engine.finish()
    assert engine.servers.got[0, 1, 0].text == b"aaa"
    assert engine.servers.got[1, 1, 0].text == b"b" and engine.servers.got[1, 1, 0].end is None
    assert engine.servers.got[1, 9, 0].text == b"b", "its slot is another one's now"


# ── messages that do not fit ──
@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        (Tokens(np.array([A, B], np.int32)), "expected 1 numbers"),
        (
            Tokens(np.array([A], np.int32), logprobs=Logprobs(*(np.zeros(2, t) for t in "ifi"))),
            "expected 1 counts and ranks",
        ),
        (
            Tokens(
                np.array([A], np.int32),
                logprobs=Logprobs(
                    np.zeros(2, np.int32), np.zeros(3, np.float32), np.zeros(1, np.int32), np.array([2], np.int32)
                ),
            ),
            "expected 2 ids and values, got 2, 3",
        ),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(tokens: Tokens, why: str) -> None:
    engine = Speaking()
    engine.ask(saying(A, A))
    engine.step()
    engine.hear()
    with pytest.raises(DecodeError, match=why):
        engine.states[0].process(tokens)


# ── ready-made lines ──
def test_chat_chunks_begin_with_the_role_and_end_with_the_reason() -> None:
    (actual,) = answered(
        saying(E_BEGINS, E_ENDS, QUOTE, QUOTE, 9, EOS, ignore_eos=False, max_tokens=20),
        chunk_format=ChunkFormat(Style.CHAT, HEAD),
    )
    first, *others = lines(actual)
    assert first["id"] == "x" and first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": "é"}, "logprobs": None, "finish_reason": None}
    ]
    assert [chunk["choices"][0]["delta"] for chunk in others] == [
        {"content": ' "b'},
        {"content": ' "b'},
        {"content": "ba\n"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in others] == [None, None, None, "stop"]
    assert actual.ids == [E_BEGINS, E_ENDS, QUOTE, QUOTE, 9, EOS]


def test_a_completion_comes_as_lines_with_text() -> None:
    (actual,) = answered(saying(A, SPECIAL, B, EURO), chunk_format=ChunkFormat(Style.COMPLETION, b'{"id":"y"'))
    assert [chunk["choices"][0] for chunk in lines(actual)] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "b", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "€", "logprobs": None, "finish_reason": "length"},
    ]


def test_first_chunk_of_each_sample_has_index_and_role() -> None:
    samples = [saying(A, B, key=(0, 1, which), n=3) for which in range(3)]
    engine = Speaking()
    engine.ask(*samples, chunk_format=ChunkFormat(Style.CHAT, HEAD, 4))
    engine.finish()
    for which, sample in enumerate(samples):
        choices = [chunk["choices"][0] for chunk in lines(engine.servers.got[sample.key])]
        assert [choice["index"] for choice in choices] == [4 + which, 4 + which]
        assert [choice["delta"].get("role") for choice in choices] == ["assistant", None]
        assert [choice["finish_reason"] for choice in choices] == [None, "length"]


def test_log_probabilities_of_a_chat_stand_in_its_lines() -> None:
    (actual,) = answered(saying(E_BEGINS, E_ENDS, logprobs=1), chunk_format=ChunkFormat(Style.CHAT, HEAD))
    choices = [chunk["choices"][0] for chunk in lines(actual)]
    assert [choice["delta"]["content"] for choice in choices] == ["", "é"]
    assert choices[0]["logprobs"] == {
        "content": [
            {
                "token": "\ufffd",
                "logprob": -0.5,
                "bytes": [0xC3],
                "top_logprobs": [{"token": "", "logprob": -0.5, "bytes": []}],
            }
        ]
    }
    assert not actual.logprobs, "and not once more in columns"


def test_log_probabilities_of_a_completion_stand_in_its_lines() -> None:
    (actual,) = answered(saying(EURO, A, logprobs=1), chunk_format=ChunkFormat(Style.COMPLETION, b'{"id":"y"'))
    assert [chunk["choices"][0]["logprobs"] for chunk in lines(actual)] == [
        {"text_offset": [0], "token_logprobs": [-0.5], "tokens": ["€"], "top_logprobs": [{"€": -0.5, ' "b': -0.5}]},
        {"text_offset": [1], "token_logprobs": [-0.5], "tokens": ["a"], "top_logprobs": [{"a": -0.5, "b": -0.5}]},
    ]


def test_logprobs_of_a_sample_do_not_change_other_samples() -> None:
    ids = (EURO, QUOTE, E_BEGINS, E_ENDS, SPECIAL, A, B)
    ways = [(style, likely) for style in (None, *Style) for likely in (None, 1)]
    keys = [(0, number, 0) for number in range(len(ways))]

    def answers_of(which: list[int]) -> list[Got]:
        engine = Speaking()
        for number in which:
            style, likely = ways[number]
            written = None if style is None else ChunkFormat(style, HEAD)
            engine.ask(saying(*ids, key=keys[number], logprobs=likely), chunk_format=written, begins=number)
        engine.finish()
        return [engine.servers.got[keys[number]] for number in which]

    together = answers_of(list(range(len(ways))))
    assert together == [answers_of([number])[0] for number in range(len(ways))]
    texts = dict(zip(ways, together, strict=True))
    for style in (Style.CHAT, Style.COMPLETION):
        with_them = [chunk["choices"][0].pop("logprobs") for chunk in lines(texts[style, 1])]
        assert all(with_them) and len(with_them) == len(ids)
        assert not any(chunk["choices"][0]["logprobs"] for chunk in lines(texts[style, None]))
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in lines(texts[Style.COMPLETION, 1])]
    assert offsets == [[0], [1], [4], [4], [5], [5], [6]]


# ── frames ──
# ── resumed ──
def resumed(sample: Sample, count: int, chunk_format: ChunkFormat | None = None) -> tuple[Got, Got]:
    """What the whole sample says, and what it said before and after a loss that came after `count` ids."""
    before, after = Speaking(), Speaking()
    before.ask(sample, chunk_format=chunk_format)
    actual = before.servers.got[sample.key] = Got()
    while len(actual.ids) < count:
        before.step()
        before.hear()
    assert actual.end is None
    ids = np.array(actual.ids, np.int32)
    after.servers.got[sample.key] = actual
    after.samples[sample.key] = sample
    prompt, progress = np.zeros(sample.prompt, np.int32), Progress(np.array([count], np.int32), ids)
    after.scheduler.submit(Submit(*sample.key[:2], prompt, sample.params, chunk_format=chunk_format, progress=progress))
    after.finish()
    return answered(sample, chunk_format=chunk_format)[0], actual


@pytest.mark.parametrize(
    "chunk_format",
    [
        None,
        ChunkFormat(Style.CHAT, HEAD),
        ChunkFormat(Style.CHAT, HEAD, has_ids=True, prompt_tokens=9),
        ChunkFormat(Style.COMPLETION, HEAD),
    ],
    ids=["text", "chat", "chat with ids", "completion"],
)
@pytest.mark.parametrize(
    "sample",
    [
        saying(E_BEGINS, E_ENDS, E_BEGINS, A, E_BEGINS, E_ENDS, B),
        saying(A, B, A, A, B, A, B, A, B, stop=("abab",)),
        saying(A, B, A, A, B, A, B, A, B, stop=("abab",), min_tokens=8, include_stop_str_in_output=True),
        saying(A, B, A, B, A, A, B, A, A, stop=("aba",), min_tokens=5, logprobs=2),
        saying(SPECIAL, SPECIAL, E_BEGINS, E_ENDS, A, logprobs=1),
        saying(SPECIAL, A, A, detokenize=False),
    ],
    ids=["half characters", "stop string", "min_tokens", "min_tokens and a stop", "logprobs", "no text"],
)
def test_resumed_sample_continues_its_text(sample: Sample, chunk_format: ChunkFormat | None) -> None:
    for count in range(1, len(answered(sample)[0].ids)):
        whole, cut = resumed(sample, count, chunk_format)
        assert (cut.ids, cut.text, cut.end, cut.logprobs) == (whole.ids, whole.text, whole.end, whole.logprobs), count


def test_cached_tokens_are_sent_once_and_not_for_a_resumed_sample() -> None:
    engine = Speaking()
    first, second = saying(*[A] * 6, prompt=9), saying(*[A] * 6, key=(0, 2, 0), prompt=9)
    engine.ask(first)
    engine.finish()
    engine.ask(second)
    engine.finish()
    assert engine.servers.got[second.key].cached == 8 and not engine.states[0]._cached
    progress = Progress(np.array([2], np.int32), np.array([A, A], np.int32))
    engine.samples[0, 3, 0] = first
    engine.scheduler.submit(Submit(0, 3, np.zeros(9, np.int32), first.params, progress=progress))
    engine.finish()
    assert (engine.servers.got[0, 3, 0].ids, engine.servers.got[0, 3, 0].cached) == ([A] * 4, 0)
