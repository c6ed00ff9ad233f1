"""An output processor: follows the core's steps and their results, and answers the servers.

Leaves to `answers` what they are told, and to the outbox who is slow.
"""

from __future__ import annotations

from penstock import EndOfChannel, PeerDied, Timeout, WouldBlock
from penstock.codec.follow import Follower, Following
from penstock.engine.answers import OutputState
from penstock.engine.directory import vocabulary
from penstock.engine.logs import event
from penstock.engine.outbox import Outbox
from penstock.engine.protocol import Step, StepDone, Stop
from penstock.engine.tree import AGAIN, Member, Tree, past_the_dead


def run(tree: Tree, me: Member) -> None:
    output = Output(tree, me)
    while output.turn():
        pass
    output.close()


class Output:
    def __init__(self, tree: Tree, me: Member) -> None:
        config, group, name = tree.config, tree.groups[me.group], str(me)
        self._me = me
        self._timeout = config.step_timeout
        share = me.index, config.output_processors
        self._state = OutputState(vocabulary(config), config.max_model_len, config.end_ids, *share)
        self._outbox = Outbox(tree, me)
        self._announced = group.announced[me.index].receiver(name=name)
        self._inbox = group.inbox.sender(tree.output_lane(me.index), name=name)
        self._results = group.results.receiver(1 + me.index, name=name)
        self._steps = group.steps.receiver(config.tensor_parallel + me.index, name=name)  # last: the core looks at it
        follower = Follower(self._state, name)
        self._following = Following(self._steps, follower, self._inbox.send_nowait)
        self._start_timeout = config.start_timeout

    def turn(self) -> bool:
        """One step, and its result. False: no more come. Raises PeerDied when the core or rank 0 has died."""
        wait = AGAIN if self._outbox.has_kept else None
        try:
            step = past_the_dead(self._me, lambda: self._following.receive(wait), self._start_timeout)
        except Timeout:
            self._outbox.send_kept()
            return True
        except EndOfChannel:
            return False
        if isinstance(step, Stop):
            return False
        if isinstance(step, Step) and step.joined is not None:
            self._hear_announcements()
        done: StepDone = past_the_dead(self._me, lambda: self._results.receive(self._timeout), self._timeout)
        answers = self._state.done(done)
        self._outbox.send_kept()
        for server, delta in answers.deltas:
            if not self._outbox.send(server, delta):
                event("server too slow", server=server)
                self._state.forget_server(server)
        if answers.halt is not None:
            self._inbox.send(answers.halt, self._timeout)
        return True

    def _hear_announcements(self) -> None:
        while True:
            try:
                self._state.announce(self._announced.receive_nowait())
            except WouldBlock:
                return
            except PeerDied as death:
                who = Member.of(death.name)
                if who is not None and who.kind == "server":
                    self._state.forget_server(who.index)
                    self._outbox.forget(who.index)

    def close(self) -> None:
        for end in (self._steps, self._results, self._inbox, self._announced, self._outbox):
            end.close()
