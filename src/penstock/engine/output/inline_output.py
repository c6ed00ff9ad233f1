"""Output processing inside the core's loop, for an engine without output processors. It holds the core up meanwhile."""

from __future__ import annotations

from collections import deque

from penstock.engine.output.detokenizer import load_vocabulary
from penstock.engine.output.output_state import Outputs, OutputState
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import Announce, Begin, Step, StepDone


class InlineOutput:
    """The launcher hands this class to the core, which imports nothing of output."""

    def __init__(self, config: EngineConfig) -> None:
        self._state = OutputState(load_vocabulary(config), config.max_model_len, config.end_ids)
        self._steps: deque[Step] = deque()  # sent, and not done: the state follows one result behind

    def begin(self, begin: Begin) -> None:
        self._state.begin(begin.slots, begin.blocks, begin.block_size)

    def announce(self, message: Announce) -> None:
        self._state.announce(message)

    def forget_server(self, server: int) -> None:
        self._state.forget_server(server)

    def sent(self, step: Step) -> None:
        self._steps.append(step)

    def done(self, result: StepDone) -> Outputs:
        self._state.apply(self._steps.popleft())
        return self._state.done(result)
