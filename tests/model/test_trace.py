"""An end writes events into its ring while a tracer reads: what it takes for an event was written as one.

here     native
writes   trace.h   TraceRing::add
reads    trace.h   TraceReader::read, of the newest event; the ring has two
"""

import pytest

from tests.model import orders
from tests.model.explorer import Process, Step, fence, load, must, store
from tests.model.scene import Scene

EVENTS = 2
MUTATIONS = ["no fence before an event", "the cursor first", "the event that is being written counts", "no second look"]


def traced(mutation: str = "", events: int = 3) -> Scene:
    def writes() -> Step:
        for number in range(events):
            if mutation != "no fence before an event":
                yield fence(orders.trace.release)
            if mutation == "the cursor first":
                yield store("cursor", number + 1, orders.trace.release)
            yield store(("begin", number % EVENTS), number)
            yield store(("end", number % EVENTS), number)
            if mutation != "the cursor first":
                yield store("cursor", number + 1, orders.trace.release)

    def reads() -> Step:
        written = yield load("cursor", orders.trace.acquire)
        if written == 0:
            return
        number = written - 1
        begin = yield load(("begin", number % EVENTS))
        end = yield load(("end", number % EVENTS))
        yield fence(orders.trace.acquire)
        then = yield load("cursor")
        oldest = then + 1 - EVENTS
        if mutation == "the event that is being written counts":
            oldest = then - EVENTS
        is_kept = number >= oldest or mutation == "no second look"
        must(not is_kept or (begin, end) == (number, number), "an event that was overwritten is taken for another")

    words = {(half, place): -1 for half in ("begin", "end") for place in range(EVENTS)}
    return Scene({**words, "cursor": 0}, [Process("writes", writes), Process("reads", reads)])


@pytest.mark.parametrize("memory", ["sc", "tso", "weak", "weaker"])
def test_tracer_keeps_only_whole_events(memory: str) -> None:
    traced().holds(5, memory)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_tracer_with_a_planted_mistake_mixes_events(mutation: str) -> None:
    traced(mutation).fails("is taken for another", "weaker")
