"""An output processor: receives the new tokens of its samples from the core, and answers the servers.

The core decides which sample has which token, and which sample has ended by an id or its length. An output processor
finds stop strings, and aborts their samples in the core. `output_state` builds the answers, and the outbox handles
servers that read too slowly.
"""

from __future__ import annotations

import gc
from collections import deque

from penstock import Timeout, WouldBlock
from penstock.engine.cluster.group_ends import TOO_SLOW, GroupReceiver, GroupSender, Outbox
from penstock.engine.cluster.logs import event
from penstock.engine.cluster.process import starting
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import AGAIN, Cluster, ProcessId
from penstock.engine.output.output_state import OutputState
from penstock.engine.protocol.messages import Abort, Failed, OutputReady, Stop, Tokens
from penstock.engine.text.detokenizer import Vocabulary, load_vocabulary


def run(cluster: Cluster, me: ProcessId) -> OutputProcessor:
    """Runs an output processor until the core sends Stop. Returns the processor, with open ends."""
    with starting():
        output = OutputProcessor(cluster, me, load_vocabulary(cluster.config))
    gc.freeze()  # a collection that scanned the objects alive now would delay several steps
    while output.process_next():
        pass
    return output


class OutputProcessor:
    def __init__(self, cluster: Cluster, me: ProcessId, vocabulary: Vocabulary) -> None:
        config, group, name = cluster.config, cluster.groups[me.group], str(me)
        self._state = OutputState.of(config, vocabulary)
        self._outbox = Outbox(cluster, me)
        inbox = group.inbox.open_sender(cluster.output_lane(me.index), name=name)
        self._inbox = GroupSender(inbox, me, config.step_timeout)
        self._to_core: deque[Abort] = deque()  # without room until now
        self._row = StatusBoard(cluster.board, writable=True).output_row(cluster.output_place(me.group, me.index))
        self._row[0] = self._received = 0  # messages of this life
        self._tokens = GroupReceiver(group.tokens[me.index].open_receiver(name=name), me, config.start_timeout)
        self._inbox.send(OutputReady(me.index, me.incarnation, me.life), config.start_timeout)

    def process_next(self) -> bool:
        """Answers the next message; after a timeout, sends messages that had no room. Returns False after the last
        message. Raises PeerDied when the core has died."""
        wait = AGAIN if self._outbox.has_backlog or self._to_core else None
        try:
            message = self._tokens.receive(wait)
        except Timeout:
            self._outbox.flush()
            self._send_aborts()
        else:
            if isinstance(message, Stop):
                return False
            self._received += 1
            self._answer(message)
        if not self._outbox.has_backlog:
            self._row[0] = self._received
        return True

    def _answer(self, tokens: Tokens) -> None:
        answers = self._state.process(tokens)
        self._outbox.flush()
        for server, delta in answers.deltas:
            if not self._outbox.send(server, delta):
                event("server too slow", server=server)
                given_up = self._state.forget_server(server)
                self._to_core.append(Abort(server, given_up))
                for request in given_up.tolist():
                    self._outbox.send(server, Failed(request, *TOO_SLOW))
        self._to_core += answers.aborts
        self._send_aborts()

    def _send_aborts(self) -> None:
        """Sends aborts while room lasts: the core may be waiting until the output processor receives `Tokens`."""
        while self._to_core:
            try:
                self._inbox.send_nowait(self._to_core[0])
            except WouldBlock:
                return
            self._to_core.popleft()

    def close(self) -> None:
        for end in (self._tokens, self._inbox, self._outbox):
            end.close()
