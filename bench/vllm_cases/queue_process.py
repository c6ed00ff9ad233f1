"""vLLM's queue in processes of their own, as its executor has them: a core that sends steps, workers that answer.

`python -m bench.vllm_cases.queue_process`, in the interpreter that has vLLM. It imports vLLM and its plugins once,
and forks a core and its workers for each number of workers asked for, as vLLM does on a GPU. Orders are lines of JSON
on its standard input; each has one line of JSON as its answer. Leaves to `queue_messages` what is sent.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from array import array
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from bench.harness.figures import Figures, differences, latency_figures, warm_up
from bench.harness.phases import collector_off, now, stamps
from bench.harness.role import die_with_parent
from bench.impls.tensors import compare, read_pages, weigh
from bench.vllm_cases import queue_messages as messages
from bench.vllm_cases import step_codec

BROADCAST_CHUNK_NBYTES = 16 << 20  # as vLLM's executor has it
REPLY_TIMEOUT = 60.0  # seconds
SPREAD_OUT = 0.005  # seconds, until every worker waits for the first step
SUCCESS = 0

fork = multiprocessing.get_context("fork")


class Order(NamedTuple):
    """What a core is asked to do. `case`: steps, paced, tensor, image, memory or codec."""

    case: str
    workers: int
    views: bool = False  # with vLLM's arena for tensors
    requests: int = 4
    messages: int = 1
    pace: float = 0.0  # seconds between the starts of two steps
    nbytes: int = 0
    within: float = 3.0  # seconds after which no further step is sent

    @property
    def is_cached(self) -> bool:
        """Whether images go by vLLM's cache in shared memory."""
        return self.case in ("image", "memory")

    @property
    def is_acknowledged(self) -> bool:
        return self.case != "paced"


class Report(NamedTuple):
    """What a worker saw."""

    arrivals: array[int]
    cpu: float
    wall: float


def queue_class() -> Any:
    from vllm.distributed.device_communicators import shm_broadcast

    return shm_broadcast.MessageQueue


# ── a worker ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Worker:
    def __init__(self, control: Connection, handle: Any, rank: int, cache: Any) -> None:
        self._control = control
        self._rank = rank
        self._frames = queue_class().create_from_handle(handle, rank)
        self._replies = queue_class()(1, 1)
        self._images = messages.ImageReceiver(cache) if cache is not None else None
        self._held: Any = None
        control.send(self._replies.export_handle())
        self._frames.wait_until_ready()
        self._replies.wait_until_ready()

    def run(self) -> None:
        while (order := self._control.recv()) is not None:
            if order == "weigh":
                self._control.send(weigh("Pss_Anon:", "Pss_Shmem:"))
                continue
            self._held = None
            with collector_off():
                self._perform(order)

    def _perform(self, order: Order) -> None:
        outputs = messages.outputs(order.requests) if self._rank == 0 else [None]
        arrivals = array("q")
        self._control.send(None)
        cpu, wall = time.process_time(), now()
        while (message := self._frames.dequeue(indefinite=True)) is not None:
            if order.nbytes:
                tensor = messages.tensor_of(message, self._images)
                read_pages(tensor)
                if not arrivals:
                    compare(tensor, order.nbytes)
                if order.case == "memory":
                    self._held = tensor
                del tensor
            arrivals.append(now())
            if order.is_acknowledged:
                self._replies.enqueue((SUCCESS, outputs[len(arrivals) % len(outputs)]))
            del message  # a view gives its memory back before the core goes on
        self._control.send(Report(arrivals, time.process_time() - cpu, (now() - wall) / 1e9))


def work(control: Connection, handle: Any, rank: int, cache: Any) -> None:
    die_with_parent()
    try:
        Worker(control, handle, rank, cache).run()
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
        raise


# ── the core ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class Core:
    def __init__(self, order: Order) -> None:
        workers = order.workers
        self._images = messages.ImageSender(workers) if order.is_cached else None
        self._frames = queue_class()(
            workers,
            workers,
            max_chunk_bytes=BROADCAST_CHUNK_NBYTES,
            connect_ip="127.0.0.1",
            enable_shm_tensor_arena=order.views,
        )
        handle = self._frames.export_handle()
        self._workers = [self._fork(handle, rank) for rank in range(workers)]
        self._replies = [queue_class().create_from_handle(control.recv(), 0) for control in self._workers]
        self._frames.wait_until_ready()
        for replies in self._replies:
            replies.wait_until_ready()

    def _fork(self, handle: Any, rank: int) -> Connection:
        near, far = fork.Pipe()
        cache = self._images.for_workers if self._images is not None else None
        fork.Process(target=work, args=(far, handle, rank, cache), daemon=True).start()
        far.close()
        return near

    def perform(self, order: Order) -> Figures:
        if order.case == "memory":
            return self._weigh(order)
        skipped = warm_up(order.messages)
        begins, dones, reports = self._send(order)
        sent = len(begins)
        if sent <= skipped:
            raise TimeoutError(f"{sent} of {order.messages} steps within {order.within:g} s")
        last = [max(arrivals) for arrivals in zip(*(report.arrivals for report in reports), strict=True)]
        cores = [report.cpu / report.wall for report in reports]
        figures = {
            **latency_figures(differences(begins, last)[skipped:], "one_way_"),
            "worker_cores": sum(cores) / len(cores),
            "messages": sent - skipped,
        }
        if order.is_acknowledged:
            figures |= latency_figures(differences(begins, dones)[skipped:], "round_trip_")
        return figures

    def _send(self, order: Order) -> tuple[array[int], array[int], list[Report]]:
        steps = messages.steps(order, self._images)
        begins, dones = stamps(order.messages), stamps(order.messages)
        with collector_off():
            for control in self._workers:
                control.send(order)
            for control in self._workers:
                control.recv()
            time.sleep(SPREAD_OUT)
            sent = self._send_each(order, steps, begins, dones)
            self._frames.enqueue(None)
        return begins[:sent], dones[:sent], [control.recv() for control in self._workers]

    def _send_each(self, order: Order, steps: Iterator[Any], begins: array[int], dones: array[int]) -> int:
        """Returns the number of steps sent within the order's time."""
        frames, replies, sent = self._frames, self._replies, 0
        due = now()
        end = due + int(order.within * 1e9)
        while sent < order.messages and (sent < 2 or now() < end):
            step = next(steps)
            if order.pace:
                due = max(due + int(order.pace * 1e9), now())  # late: no burst to catch up
                time.sleep(max(0, due - now()) / 1e9)
            begins[sent] = now()
            frames.enqueue(messages.call(step, self._images))
            if order.is_acknowledged:
                for each in replies:
                    status, _ = each.dequeue(timeout=REPLY_TIMEOUT)
                    assert status == SUCCESS
            dones[sent] = now()
            sent += 1
        return sent

    def _weigh(self, order: Order) -> Figures:
        """How many times an image lies in memory while all workers hold it. The core's own does not count."""

        def total() -> int:
            for control in self._workers:
                control.send("weigh")
            return weigh("Pss_Anon:", "Pss_Shmem:") + sum(control.recv() for control in self._workers)

        small = order._replace(nbytes=order.nbytes // 16)
        self._send(small)  # what is imported with the first is not its memory
        if self._images is not None:
            self._images.prepare(order.nbytes)
        before = total()
        self._send(order)
        return {"copies": (total() - before) / order.nbytes}

    def close(self) -> None:
        for control in self._workers:
            control.send(None)
        vars(self).clear()
        gc.collect()  # vLLM's queue removes its shared memory when it is collected


def lead(control: Connection, order: Order) -> None:
    """The life of a core: performs orders until there are no more."""
    die_with_parent()
    try:
        core = Core(order)
        while order is not None:
            control.send(("figures", core.perform(order)))
            order = control.recv()
        core.close()
    except EOFError:
        pass
    except BaseException:
        control.send(("failed", traceback.format_exc(limit=-4)))
        sys.stderr.flush()
        os._exit(1)


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────────
class Cores:
    """A core for each kind of order, forked when it is first asked for; those of one case are up at the same time."""

    def __init__(self) -> None:
        self._cores: dict[tuple[int, bool, bool], tuple[Any, Connection]] = {}

    def perform(self, order: Order) -> dict[str, Any]:
        if order.case == "codec":  # which needs no other process
            return {"figures": step_codec.measure(order.requests, order.messages)}
        key = order.workers, order.views, order.is_cached
        if key not in self._cores:
            near, far = fork.Pipe()
            process = fork.Process(target=lead, args=(far, order))
            process.start()
            far.close()
            self._cores[key] = process, near
        else:
            self._cores[key][1].send(order)
        process, control = self._cores[key]
        try:
            kind, answer = control.recv()
        except EOFError:
            process.join()
            kind, answer = "failed", f"the core ended with {process.exitcode}"
        if kind == "failed":
            self._end(key)
        return {kind: answer}

    def close(self) -> dict[str, Any]:
        for key in list(self._cores):
            self._end(key)
        return {"closed": True}

    def _end(self, key: tuple[int, bool, bool]) -> None:
        process, control = self._cores.pop(key)
        if process.is_alive():
            control.send(None)
        process.join(5.0)
        process.kill()
        process.join()
        control.close()


def main(arguments: Sequence[str]) -> None:
    # Log lines are not answers: those go to a copy of the standard output that no library knows.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    messages.import_classes()
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    gc.collect()
    gc.freeze()  # no process that is forked looks at any of this again
    print(json.dumps({"ready": queue_class().__module__}), file=answers, flush=True)
    cores = Cores()
    for line in sys.stdin:
        order = json.loads(line)
        answer = cores.close() if order == "close" else cores.perform(Order(**order))
        print(json.dumps(answer), file=answers, flush=True)
    cores.close()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
