"""An output processor: applies the core's steps with their results, and answers the servers.

It handles a step together with its result. While results arrive it blocks on the results alone, and no step wakes it:
each step was sent before its result. While the engine is idle it blocks on the steps, since the core sends first.
`output_state` makes the answers, and the outbox handles servers that read too slowly.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from typing import TypeAlias

from penstock import DecodeError, EndOfChannel, PeerDied, Receiver, Timeout, WouldBlock
from penstock.codec.sequence import SequenceCheck
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.outbox import TOO_SLOW, Outbox
from penstock.engine.cluster.process import starting
from penstock.engine.cluster.topology import AGAIN, Cluster, ProcessId, retry_past_stale_deaths
from penstock.engine.output.detokenizer import Vocabulary, load_vocabulary
from penstock.engine.output.output_state import OutputState
from penstock.engine.protocol.messages import Abort, Announce, Begin, Failed, Halt, Step, StepDone, Stop

LOOK_AGAIN = 0.03  # seconds; while no result comes: a death of the core, or its last word, is told on the other channel
LISTEN_AGAIN = 1.0  # seconds; to servers, while the core has nothing to say: it may have refused what they announced

ToCore: TypeAlias = Halt | Abort


def run(tree: Cluster, me: ProcessId) -> None:
    with starting():
        output = OutputProcessor(tree, me, load_vocabulary(tree.config))
    gc.freeze()  # what is there now stays: a collection that looked at all of it would hold up several steps
    while output.turn():
        pass
    output.close()


class _Steps:
    """What the core sends, in its order; it can be looked at before it is used."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._kept: deque[Step | Begin] = deque()  # taken from the channel, and not yet used
        self.has_ended = False  # what is kept is all that comes

    @property
    def has_step(self) -> bool:
        return any(isinstance(one, Step) for one in self._kept)

    def receive_nowait(self) -> Step | Begin:
        if not self._kept:
            self._take(0.0)
        return self._kept.popleft()

    def wait(self, timeout: float) -> None:
        """Until there is a step."""
        while not self.has_step:
            self._take(timeout)

    def look(self) -> None:
        """Takes what is there. Raises PeerDied when the core has died, and does not come back with more."""
        try:
            while True:
                self._keep(self._receiver.receive_nowait())
        except WouldBlock:
            pass
        except EndOfChannel:
            self.has_ended = True

    def _take(self, timeout: float) -> None:
        self._keep(self._receiver.receive(timeout))
        if self.has_ended:
            raise EndOfChannel("the core has said that no more steps come")

    def _keep(self, message: Step | Begin | Stop) -> None:
        if isinstance(message, Stop):
            self.has_ended = True
        else:
            self._kept.append(message)

    def close(self) -> None:
        self._receiver.close()


class OutputProcessor:
    def __init__(self, tree: Cluster, me: ProcessId, vocabulary: Vocabulary) -> None:
        config, group, name = tree.config, tree.groups[me.group], str(me)
        self._me = me
        self._timeout = config.step_timeout
        share = me.index, config.output_processors
        self._state = OutputState(vocabulary, config.max_model_len, config.end_ids, *share)
        self._outbox = Outbox(tree, me)
        self._announced = group.announced[me.index].open_receiver(name=name)
        self._inbox = group.inbox.open_sender(tree.output_lane(me.index), name=name)
        self._to_core: deque[ToCore] = deque()  # for which there was no room yet
        self._results = group.results.open_receiver(1 + me.index, name=name)
        steps = group.steps.open_receiver(
            config.tensor_parallel_size + me.index, name=name
        )  # last: the core looks at it
        self._steps = _Steps(steps)
        self._sequence = SequenceCheck()
        self._start_timeout = config.start_timeout
        self._is_resting = True  # no step is without its result, and none has come for a while
        self._deadline = 0.0  # for the next result, while we do not rest

    def turn(self) -> bool:
        """The next result, with its step; or, if none comes, what else there is to do. False: no more come.

        Raises PeerDied when the core or rank 0 has died, and Timeout for a result that does not come.
        """
        is_kept = self._outbox.has_backlog or bool(self._to_core)
        try:
            if self._is_resting:
                self._wait_for_step(AGAIN if is_kept else LISTEN_AGAIN)
            wait = AGAIN if is_kept else LOOK_AGAIN
            done: StepDone = retry_past_stale_deaths(self._me, lambda: self._results.receive(wait), self._timeout)
        except Timeout as silence:
            self._housekeeping()
            return self._is_resting or self._has_more(silence)
        except EndOfChannel as end:
            return self._has_more(end)
        self._answer(done)
        return True

    def _wait_for_step(self, wait: float) -> None:
        """Until the core has a step. Raises EndOfChannel when it has no more."""
        retry_past_stale_deaths(self._me, lambda: self._steps.wait(wait), self._start_timeout)
        self._is_resting = False
        self._deadline = time.monotonic() + self._timeout

    def _has_more(self, silence: Timeout | EndOfChannel) -> bool:
        """No result has come: what does the core say? Raises PeerDied where it has died, and `silence` where a result
        is missing that will not come."""
        retry_past_stale_deaths(self._me, self._steps.look, self._start_timeout)
        if not self._steps.has_step:
            self._is_resting = True
            return not self._steps.has_ended
        if isinstance(silence, EndOfChannel):
            raise silence
        if time.monotonic() >= self._deadline:
            raise Timeout(f"a step is without its result for {self._timeout:g} s: {silence}") from None
        return True

    def _answer(self, done: StepDone) -> None:
        step = retry_past_stale_deaths(self._me, self._next_step, self._timeout)
        if (done.leader, done.number) != (step.leader, step.number):
            raise RuntimeError(f"expected the StepDone of step {step.number}, got that of {done.number}")
        if step.joined is not None:
            self._hear_announcements()
        answers = self._state.done(done)
        self._outbox.flush()
        for server, delta in answers.deltas:
            if not self._outbox.send(server, delta):
                event("server too slow", server=server)
                given_up = self._state.forget_server(server)
                self._to_core.append(Abort(server, given_up))
                for request in given_up.tolist():
                    self._outbox.send(server, Failed(request, *TOO_SLOW))
        if answers.halt is not None:
            self._to_core.append(answers.halt)
        self._tell_core()
        self._deadline = time.monotonic() + self._timeout

    def _next_step(self) -> Step:
        """Applied. Raises OutOfStep where one is missing."""
        message = self._steps.receive_nowait()
        if isinstance(message, Begin):
            self._sequence.begin(message)
            self._state.begin(message.slots, message.blocks, message.block_size)
            message = self._steps.receive_nowait()
        assert isinstance(message, Step), "a core begins once"
        self._sequence.check(message)
        self._state.apply(message)
        return message

    def _housekeeping(self) -> None:
        """What may be done at any time, and at last when there is time."""
        self._hear_announcements()
        self._outbox.flush()
        self._tell_core()

    def _tell_core(self) -> None:
        """As much as there is room for: the core may be waiting for us to take its steps."""
        while self._to_core:
            try:
                retry_past_stale_deaths(self._me, lambda: self._inbox.send_nowait(self._to_core[0]), self._timeout)
            except WouldBlock:
                return
            self._to_core.popleft()

    def _hear_announcements(self) -> None:
        """All that were sent before the requests that have joined just now."""
        while True:
            try:
                announce: Announce = self._announced.receive_nowait()
                if announce.server != self._announced.source:
                    raise DecodeError(f"expected {self._announced.source}, got {announce.server} at $.server")
                self._state.announce(announce)
            except WouldBlock:
                return
            except DecodeError as error:  # costs that message alone
                event("not a message", logging.ERROR, server=self._announced.source, error=str(error))
            except PeerDied as death:
                self._state.forget_announcements(death.index)

    def close(self) -> None:
        for end in (self._steps, self._results, self._inbox, self._announced, self._outbox):
            end.close()
