"""An output processor: follows the core's steps and their results, and answers the servers.

It waits for nobody but the core and rank 0. Leaves to `answers` what servers are told, and to the outbox who is slow.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from typing import TypeAlias

from penstock import DecodeError, EndOfChannel, PeerDied, Timeout, WouldBlock
from penstock.codec.follow import Follower, Following
from penstock.engine.answers import OutputState
from penstock.engine.directory import vocabulary
from penstock.engine.logs import event
from penstock.engine.outbox import TOO_SLOW, Outbox
from penstock.engine.protocol import Abort, Announce, Failed, Halt, Step, StepDone, Stop
from penstock.engine.text import Vocabulary
from penstock.engine.tree import AGAIN, Member, Tree, past_the_dead

LISTEN_AGAIN = 1.0  # seconds; to servers, while the core has nothing to say: it may have refused what they announced

ToCore: TypeAlias = Halt | Abort


def run(tree: Tree, me: Member) -> None:
    output = Output(tree, me, vocabulary(tree.config))
    gc.freeze()  # what is there now stays: a collection that looked at all of it would hold up several steps
    while output.turn():
        pass
    output.close()


class Output:
    def __init__(self, tree: Tree, me: Member, vocabulary: Vocabulary) -> None:
        config, group, name = tree.config, tree.groups[me.group], str(me)
        self._me = me
        self._timeout = config.step_timeout
        share = me.index, config.output_processors
        self._state = OutputState(vocabulary, config.max_model_len, config.end_ids, *share)
        self._outbox = Outbox(tree, me)
        self._announced = group.announced[me.index].receiver(name=name)
        self._inbox = group.inbox.sender(tree.output_lane(me.index), name=name)
        self._to_core: deque[ToCore] = deque()  # for which there was no room yet
        self._results = group.results.receiver(1 + me.index, name=name)
        self._steps = group.steps.receiver(config.tensor_parallel + me.index, name=name)  # last: the core looks at it
        follower = Follower(self._state, name)
        self._following = Following(self._steps, follower, self._inbox.send_nowait)
        self._start_timeout = config.start_timeout

    def turn(self) -> bool:
        """One step, and its result. False: no more come. Raises PeerDied when the core or rank 0 has died."""
        wait = AGAIN if self._outbox.has_kept or self._to_core else LISTEN_AGAIN
        try:
            step = past_the_dead(self._me, lambda: self._following.receive(wait), self._start_timeout)
        except Timeout:
            self._hear_announcements()
            self._outbox.send_kept()
            self._tell_core()
            return True
        except EndOfChannel:
            return False
        if isinstance(step, Stop):
            return False
        if isinstance(step, Step) and step.joined is not None:
            self._hear_announcements()
        done: StepDone = past_the_dead(self._me, lambda: self._results.receive(self._timeout), self._timeout)
        if (done.leader, done.number) != (step.leader, step.number):
            raise RuntimeError(f"expected the StepDone of step {step.number}, got that of {done.number}")
        answers = self._state.done(done)
        self._outbox.send_kept()
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
        return True

    def _tell_core(self) -> None:
        """As much as there is room for: the core may be waiting for us to take its steps."""
        while self._to_core:
            try:
                past_the_dead(self._me, lambda: self._inbox.send_nowait(self._to_core[0]), self._timeout)
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
