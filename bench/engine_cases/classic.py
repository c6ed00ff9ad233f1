"""The classic way, in the same engine: the workers remember nothing, and are told everything in every step.

The core makes of its schedule what vLLM sent in 2024 (bench/vs_vllm/vllm2024), pickles it, and sends it to all workers;
rank 0 pickles what was sampled. Everything else is ours: the scheduler, the simulated device, the answers' text, which
is made in the core's loop. Pickles travel by ZeroMQ's publish and subscribe.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.engine_cases import spent
from bench.vs_vllm import vllm2024
from penstock import Timeout
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.cluster.topology import Cluster, ProcessId
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.output.output_state import OutputState
from penstock.engine.protocol.messages import Begin, Ready, Step, StepDone, Stop
from penstock.engine.worker.simulated_device import SimulatedRunner


# ── the wire: the core's end, which takes the places of two channels' ends, and a worker's ───────────────────────────
class CoreWire:
    """Steps to all workers, results from rank 0."""

    def __init__(self, scratch: str, workers: int) -> None:
        import zmq

        self._workers = workers
        self._context = zmq.Context()
        self._results = self._bound(zmq.PULL, f"{scratch}/results")
        self._steps = self._bound(zmq.XPUB, f"{scratch}/steps")
        self._steps.setsockopt(zmq.XPUB_VERBOSE, 1)  # or we would hear of the first subscription alone
        self._is_closed = False

    def _bound(self, kind: int, path: str) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(f"ipc://{path}")
        return socket

    def meet(self) -> None:
        for _ in range(self._workers):
            assert self._steps.recv() == b"\x01", "each subscribes to everything"

    def send(self, message: Any, _: float) -> None:
        self._steps.send(pickle.dumps(message, 5))

    def receive(self, timeout: float) -> StepDone:
        if not self._results.poll(timeout * 1000):
            raise Timeout(f"no result within {timeout:g} s")
        leader, number, ids = pickle.loads(self._results.recv())
        return StepDone(leader, number, np.array(ids, np.int32))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._context.destroy(linger=1000)


class WorkerWire:
    def __init__(self, scratch: str, rank: int) -> None:
        import zmq

        self._context = zmq.Context()
        self._results = None
        if rank == 0:
            self._results = self._context.socket(zmq.PUSH)
            self._results.connect(f"ipc://{scratch}/results")
        self._steps = self._context.socket(zmq.SUB)
        self._steps.set_hwm(0)
        self._steps.connect(f"ipc://{scratch}/steps")
        self._steps.subscribe(b"")

    def receive(self) -> Any:
        return pickle.loads(self._steps.recv())

    def answer(self, leader: int, number: int, ids: list[int]) -> None:
        if self._results is not None:
            self._results.send(pickle.dumps((leader, number, ids), 5))

    def close(self) -> None:
        self._context.destroy(linger=1000)


# ── the core ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_core(scratch: str, cluster: Cluster, me: ProcessId) -> None:
    spent.run(ClassicCore(cluster, me, CoreWire(scratch, cluster.config.tensor_parallel_size)), scratch)


class ClassicCore(EngineCore):
    def __init__(self, cluster: Cluster, me: ProcessId, wire: CoreWire) -> None:
        self._wire = wire
        self._data: dict[int, tuple[str, vllm2024.SequenceData, vllm2024.SamplingParams]] = {}  # by slot
        super().__init__(cluster, me, OutputState.of(cluster.config) if cluster.config.output_processors == 0 else None)
        self._steps.close()
        self._results.close()
        self._steps = self._results = wire

    def _await_receivers(self) -> None:
        self._wire.meet()

    def _begin(self, begin: Begin) -> None:
        """The workers keep no state."""

    def _broadcast_step(self) -> None:
        scheduler = self._scheduler
        step = self._plan.build(self._sequence.leader, self._sequence.next_number)
        self._sequence.number = step.number
        self._in_flight_requests.on_step(step, False)
        self._batch.apply(step)
        self._wire.send((step.leader, step.number, self._whole_state(step)), self._config.step_timeout)
        self._outputs.queue(scheduler.on_sent(step), scheduler.closed)
        self._publish()

    def _whole_state(self, step: Step) -> vllm2024.ExecuteModelRequest:
        """Of all that run. The step has been applied."""
        schedule = self._batch
        for slot in [] if step.left is None else step.left.tolist():
            del self._data[slot]
        for slot in [] if step.joined is None else step.joined.slots.tolist():
            key = int(schedule.servers[slot]), int(schedule.requests[slot])
            data = vllm2024.SequenceData(schedule.prompts[slot].tolist(), [], 0.0, 0, vllm2024.SequenceStage.PREFILL)
            self._data[slot] = f"{key[0]}-{key[1]}", data, vllm2024.SamplingParams(max_tokens=None)
        slots = schedule.rows.tolist()
        counts, computed = schedule.counts[schedule.rows].tolist(), schedule.computed[schedule.rows].tolist()
        samples = set(schedule.sampled.tolist())
        groups = []
        for slot, count, after in zip(slots, counts, computed, strict=True):
            name, data, params = self._data[slot]
            data.num_computed_tokens = after - count
            is_prompt = data.num_computed_tokens < len(data.prompt_token_ids)
            data.stage = vllm2024.SequenceStage.PREFILL if is_prompt else vllm2024.SequenceStage.DECODE
            blocks = {slot: schedule.blocks_of(slot).tolist()}
            groups.append(
                vllm2024.SequenceGroupMetadata(
                    name, is_prompt, {slot: data}, params, blocks, slot in samples, token_chunk_size=count
                )
            )  # fmt: skip
        return vllm2024.ExecuteModelRequest(groups, running_queue_size=len(groups))

    def _process_result(self, done: StepDone) -> None:
        sampled = self._batch.sampled.tolist()  # there is no step after it yet
        for slot, token_id in zip(sampled, done.ids.tolist(), strict=True):
            self._data[slot][1].output_token_ids.append(token_id)
        super()._process_result(done)


# ── the workers ──────────────────────────────────────────────────────────────────────────────────────────────────────
def run_worker(scratch: str, cluster: Cluster, me: ProcessId) -> None:
    config, group = cluster.config, cluster.groups[me.group]
    assert config.simulated is not None, "this engine has no other device"
    device = SimulatedRunner(config.simulated, config.max_num_seqs)
    end = WorkerWire(scratch, me.index)
    row = StatusBoard(cluster.board, writable=True).row(me.group)
    inbox = group.inbox.open_sender(cluster.worker_lane(me.index), name=str(me))
    inbox.send(Ready(me.index, device.blocks, device.vocabulary), config.start_timeout)
    names: dict[int, str] = {}  # by slot: the request that the device knows
    while not isinstance(message := end.receive(), Stop):
        leader, number, request = message
        schedule, step = read_request(request, config.max_num_seqs, names)
        sampled = device.launch(schedule, step).result()
        end.answer(leader, number, sampled.ids.tolist())
        if me.index == 0:
            row[StatusBoard.BUSY_NS], row[StatusBoard.IDLE_NS] = int(device.busy * 1e9), int(device.idle * 1e9)
    end.close()
    inbox.close()


def read_request(request: vllm2024.ExecuteModelRequest, slots: int, names: dict[int, str]) -> tuple[Any, Any]:
    """As much of a schedule and its step as the device looks at."""
    counts, computed = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    rows, sizes, afters, sampled, joined, prompts = [], [], [], [], [], {}
    for group in request.seq_group_metadata_list:
        for slot, data in group.seq_data.items():
            rows.append(slot)
            sizes.append(group.token_chunk_size)
            afters.append(data.num_computed_tokens + group.token_chunk_size)
            if group.do_sample:
                sampled.append(slot)
            if names.get(slot) != group.request_id:
                names[slot] = group.request_id
                joined.append(slot)
                prompts[slot] = np.array(data.prompt_token_ids, np.int32)
    index = np.array(rows, np.intp)
    counts[index], computed[index] = sizes, afters
    schedule = SimpleNamespace(
        counts=counts,
        computed=computed,
        rows=index,
        sampled=np.array(sampled, np.intp),
        samples=np.zeros(slots, np.uint16),
        prompts=prompts,
    )
    newcomers = SimpleNamespace(slots=np.array(joined, np.uint16), parents=None, inputs=None) if joined else None
    step = SimpleNamespace(joined=newcomers)
    return schedule, step
