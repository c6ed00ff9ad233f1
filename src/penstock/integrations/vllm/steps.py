"""Steps as changes: a SchedulerOutput or a ModelRunnerOutput in a queue as the difference from an expectation.

A queue passes each message to `StepWriter.send`, which sends steps as a section (the change) and a body (the pickled
rest), and passes each received section to `StepReader.receive`. Both sides keep the expected next step. The writer's
expectation advances when the send has returned. After any exception the next step is sent whole, under a new leader, so
a reader that missed a step raises OutOfStep. Leaves to the codecs what a change means, and to the queue how a body is
pickled and how records travel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.codec.sequence import SequenceCheck, Sequenced, SequenceSender
from penstock.errors import DecodeError
from penstock.integrations.vllm.runner_output_codec import RunnerChange, RunnerOutputCodec
from penstock.integrations.vllm.scheduler_output_codec import SchedulerChange, SchedulerOutputCodec
from penstock.integrations.vllm.step_check import require_equal

# Sends a section, and a body pickled; None: no body. After the timeout.
Send = Callable[[bytes, "Any | None", "float | None"], None]


class WholeStep(Sequenced, tag=0, frozen=True, eq=False):
    """The body is the message itself."""


Section = WholeStep | SchedulerChange | RunnerChange
ENCODER = msgspec.msgpack.Encoder()
DECODER: msgspec.msgpack.Decoder[Section] = msgspec.msgpack.Decoder(Section)
Codec = SchedulerOutputCodec | RunnerOutputCodec


def load_codecs() -> tuple[SchedulerOutputCodec, RunnerOutputCodec]:
    """Returns the codecs of vLLM's classes; imports vLLM."""
    sched = importlib.import_module("vllm.v1.core.sched.output")
    outputs = importlib.import_module("vllm.v1.outputs")
    executor = importlib.import_module("vllm.v1.executor.multiproc_executor")
    return (
        SchedulerOutputCodec(sched.SchedulerOutput, sched.CachedRequestData),
        RunnerOutputCodec(outputs.ModelRunnerOutput, executor.WorkerProc.ResponseStatus.SUCCESS),
    )


class StepWriter:
    """Sends steps as changes. Only one thread at a time may call the methods, as with the queue."""

    def __init__(self, send: Send, codecs: Sequence[Codec], *, is_checked: bool = False) -> None:
        """With `is_checked` each change carries the message beside it, and the reader compares."""
        self._streams = [StepSender(codec, send, is_checked) for codec in codecs]

    def send(self, message: Any, timeout: float | None = None) -> bool:
        """Sends a message with a step, and returns True; returns False for a message without a step, unsent."""
        for stream in self._streams:
            if stream.codec.find_output(message) is not None:
                stream.send_message(message, timeout)
                return True
        return False

    @property
    def num_whole(self) -> int:
        """Counts the steps that went whole."""
        return sum(stream.num_whole for stream in self._streams)


class StepSender:
    """The steps of one kind in one queue."""

    def __init__(self, codec: Codec, send: Send, is_checked: bool) -> None:
        self.codec = codec
        self.num_whole = 0
        self._send = send
        self._is_checked = is_checked
        self._state: Any = None  # None: the next step goes whole
        self._record: tuple[bytes, Any | None] = b"", None
        self._sequence = SequenceSender(self)

    def send_message(self, message: Any, timeout: float | None) -> None:
        state, self._state = self._state, None  # until this step is known to have been sent
        encoded = None if state is None else self._encode(state, message)
        if encoded is None:
            self._send_whole(message, timeout)
            return
        change, extras, following = encoded
        body = (extras, message) if self._is_checked else extras or None
        self._record = ENCODER.encode(change), body
        self._sequence.send(change, timeout)
        self._state = following

    def _encode(self, state: Any, message: Any) -> Any:
        try:
            return self.codec.encode(state, message, self._sequence.leader, self._sequence.next_number)
        except (TypeError, ValueError, OverflowError):  # a value for which a change has no room
            return None

    def _send_whole(self, message: Any, timeout: float | None) -> None:
        # A new leader: a reader that missed the step must not apply the next change.
        self._sequence = SequenceSender(self)
        whole = WholeStep(self._sequence.leader, self._sequence.number)
        following = self.codec.begin(message)
        self._record = ENCODER.encode(whole), message
        self._sequence.send_whole(whole, timeout)
        self._state = following
        self.num_whole += 1

    def send(self, message: Sequenced, timeout: float | None = None) -> None:
        """Sends the record of a change or a whole step, for SequenceSender."""
        section, body = self._record
        self._send(section, body, timeout)


class StepReader:
    """Returns the messages of the sections and bodies that a StepWriter sent."""

    def __init__(self, codecs: tuple[SchedulerOutputCodec, RunnerOutputCodec]) -> None:
        self._streams = {codec: StepStream(codec) for codec in codecs}
        self._scheduler, self._runner = (self._streams[codec] for codec in codecs)

    def receive(self, section: bytes | memoryview, body: Any | None) -> Any:
        """Returns the message, which shares no object with the reader's state.

        Raises:
            OutOfStep: the change does not follow the last received change.
            StepMismatch: the message differs from the message sent with the change.
        """
        change = DECODER.decode(section)
        if isinstance(change, WholeStep):
            return self._begin(change, body)
        stream = self._scheduler if isinstance(change, SchedulerChange) else self._runner
        return stream.receive(change, body)

    def _begin(self, whole: WholeStep, message: Any) -> Any:
        for stream in self._streams.values():
            if stream.codec.find_output(message) is not None:
                return stream.begin(whole, message)
        raise DecodeError(f"expected a step in the whole {whole.number} of leader {whole.leader:08x}, got {message!r}")


class StepStream:
    """The steps of one kind from one queue."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._state: Any = None
        self._check = SequenceCheck()

    def begin(self, whole: WholeStep, message: Any) -> Any:
        self._check = SequenceCheck()
        self._state = self.codec.begin(message)
        self._check.begin(whole)
        return message

    def receive(self, change: Any, body: Any | None) -> Any:
        self._check.check(change)
        check, self._check = self._check, SequenceCheck()  # until the change is applied only a whole step may follow
        extras, expected = body if isinstance(body, tuple) else (body or {}, None)
        message, self._state = self.codec.decode(self._state, change, extras)
        if expected is not None:
            require_equal(message, expected, f"change {change.number} of leader {change.leader:08x}")
        self._check = check
        return message
