"""ThreadTeam (native/engine/thread_team.h): a caller and a helper claim the chunks of one job after another."""

import pytest

from tests.model import orders
from tests.model.explorer import Process, Step, cas, load, must, store
from tests.model.scene import Scene

JOBS = 2


def claimed() -> Scene:
    """Each job has one chunk. The job is one word, as the caller writes it anew for each."""

    def calls() -> Step:
        for number in range(1, JOBS + 1):
            yield store("job", number)
            yield store("claims", (number, 1), orders.work.release)
            claims = yield cas("claims", (number, 1), (number, 0), orders.work.acq_rel)
            if claims == (number, 1):
                continue
            done = 0
            while done != number:
                done = yield load("done", orders.work.acquire)
            result = yield load("result")
            must(result == number, "the result is not there")

    def helps() -> Step:
        for _ in range(JOBS):
            claims = yield load("claims", orders.work.acquire)
            if claims[1] == 0:
                continue
            actual = yield cas("claims", claims, (claims[0], 0), orders.work.acq_rel)
            if actual != claims:
                continue
            job = yield load("job")
            must(job == claims[0], "the chunk is of another job")
            yield store("result", job)
            yield store("done", job, orders.work.release)

    words = {"job": 0, "claims": (0, 0), "result": 0, "done": 0}
    return Scene(words, [Process("calls", calls), Process("helps", helps)])


@pytest.mark.parametrize("memory", ["weaker"])
def test_each_chunk_is_computed_for_its_job_and_awaited(memory: str) -> None:
    claimed().holds(5, memory)
