"""The classic way, in the same engine: the workers remember nothing, and are told everything in every step.

The core makes of its schedule what vLLM sent in 2024 (bench/vs_vllm/vllm2024), pickles it, and sends it to all workers;
rank 0 pickles what was sampled. Everything else is ours: the scheduler, the simulated device, the answers' text, which
is made in the core's loop. Leaves to a wire how pickles travel: by ZeroMQ's publish and subscribe, with images out of
band and not copied by pyzmq, or by `broadcast_object_list` with gloo.
"""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
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
from penstock.engine.protocol.messages import Begin, Ready, Step, StepDone, Stop, Submit
from penstock.engine.worker.simulated_device import SimulatedRunner

PAGE_NBYTES = 4096
WITH_IMAGE = "with an image"  # the client of a request with an image that comes by the wire


# ── wires: the core's end, which takes the places of two channels' ends, and a worker's ──────────────────────────────
class _Core:
    """Steps to all workers, results from rank 0, images from the server."""

    def __init__(self, scratch: str, workers: int) -> None:
        import zmq

        self._zmq = zmq
        self._workers = workers
        self._context = zmq.Context()
        self._results = self._bound(zmq.PULL, f"{scratch}/results")
        self._images = self._bound(zmq.PULL, f"{scratch}/images")
        self._is_closed = False

    def _bound(self, kind: int, path: str) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(f"ipc://{path}")
        return socket

    def receive(self, timeout: float) -> StepDone:
        if not self._results.poll(timeout * 1000):
            raise Timeout(f"no result within {timeout:g} s")
        leader, number, ids = pickle.loads(self._results.recv())
        return StepDone(leader, number, np.array(ids, np.int32))

    def receive_image(self) -> Any:
        """Of the request that has just come: it was sent before that."""
        head, *buffers = self._images.recv_multipart(copy=False)
        return pickle.loads(head.buffer, buffers=[each.buffer for each in buffers])

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._context.destroy(linger=1000)


class ZeromqCore(_Core):
    def __init__(self, scratch: str, workers: int) -> None:
        super().__init__(scratch, workers)
        self._steps = self._bound(self._zmq.XPUB, f"{scratch}/steps")
        self._steps.setsockopt(self._zmq.XPUB_VERBOSE, 1)  # or we would hear of the first subscription alone

    def meet(self) -> None:
        for _ in range(self._workers):
            assert self._steps.recv() == b"\x01", "each subscribes to everything"

    def send(self, message: Any, _: float) -> None:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, 5, buffer_callback=buffers.append)
        self._steps.send_multipart([head, *(each.raw() for each in buffers)], copy=False)


class GlooCore(_Core):
    def meet(self) -> None:
        self._distributed = joined(self._results.getsockopt_string(self._zmq.LAST_ENDPOINT), 0, self._workers)

    def send(self, message: Any, _: float) -> None:
        self._distributed.broadcast_object_list([message], src=0)


def joined(endpoint: str, rank: int, workers: int) -> Any:
    """torch.distributed, when all have come. They meet in a file beside the sockets."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    place = os.path.dirname(endpoint.removeprefix("ipc://"))
    torch.distributed.init_process_group(
        "gloo", f"file://{place}/gloo", timeout=timedelta(minutes=5), rank=rank, world_size=1 + workers
    )
    return torch.distributed


class _Worker:
    def __init__(self, scratch: str, rank: int, workers: int) -> None:
        import zmq

        self._context = zmq.Context()
        self._zmq, self._rank, self._workers = zmq, rank, workers
        self._endpoint = f"ipc://{scratch}/results"
        if rank == 0:
            self._results = self._context.socket(zmq.PUSH)
            self._results.connect(self._endpoint)

    def answer(self, leader: int, number: int, ids: list[int]) -> None:
        if self._rank == 0:
            self._results.send(pickle.dumps((leader, number, ids), 5))

    def close(self) -> None:
        self._context.destroy(linger=1000)


class ZeromqWorker(_Worker):
    def __init__(self, scratch: str, rank: int, workers: int) -> None:
        super().__init__(scratch, rank, workers)
        self._steps = self._context.socket(self._zmq.SUB)
        self._steps.set_hwm(0)
        self._steps.connect(f"ipc://{scratch}/steps")
        self._steps.subscribe(b"")

    def meet(self) -> None:
        """It has been told by subscribing."""

    def receive(self) -> Any:
        head, *buffers = self._steps.recv_multipart(copy=False)
        return pickle.loads(head.buffer, buffers=[each.buffer for each in buffers])


class GlooWorker(_Worker):
    def meet(self) -> None:
        self._distributed = joined(self._endpoint, 1 + self._rank, self._workers)

    def receive(self) -> Any:
        result: list[Any] = [None]
        self._distributed.broadcast_object_list(result, src=0)
        return result[0]


WIRES: dict[str, tuple[Any, Any]] = {"zeromq": (ZeromqCore, ZeromqWorker), "gloo": (GlooCore, GlooWorker)}


# ── the core ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def run_core(wire: str, scratch: str, cluster: Cluster, me: ProcessId) -> None:
    spent.run(ClassicCore(cluster, me, WIRES[wire][0](scratch, cluster.config.tensor_parallel_size)), scratch)


class ClassicCore(EngineCore):
    def __init__(self, cluster: Cluster, me: ProcessId, wire: Any) -> None:
        self._wire = wire
        self._data: dict[int, tuple[str, vllm2024.SequenceData, vllm2024.SamplingParams]] = {}  # by slot
        self._images: dict[tuple[int, int], Any] = {}  # by server and request, until they have been sent
        super().__init__(cluster, me, OutputState.of(cluster.config) if cluster.config.output_processors == 0 else None)
        self._steps.close()
        self._results.close()
        self._steps = self._results = wire

    def _await_receivers(self) -> None:
        self._wire.meet()

    def _begin(self, begin: Begin) -> None:
        """The workers keep no state."""

    def _process(self, message: Any) -> None:
        if isinstance(message, Submit) and message.client == WITH_IMAGE:
            self._images[message.server, message.request] = self._wire.receive_image()
        super()._process(message)

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
        images = {}
        for slot in [] if step.joined is None else step.joined.slots.tolist():
            key = int(schedule.servers[slot]), int(schedule.requests[slot])
            data = vllm2024.SequenceData(schedule.prompts[slot].tolist(), [], 0.0, 0, vllm2024.SequenceStage.PREFILL)
            self._data[slot] = f"{key[0]}-{key[1]}", data, vllm2024.SamplingParams(max_tokens=None)
            if key in self._images:
                images[slot] = self._images.pop(key)
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
                    name, is_prompt, {slot: data}, params, blocks, slot in samples, token_chunk_size=count,
                    multi_modal_data=images.get(slot),
                )
            )  # fmt: skip
        return vllm2024.ExecuteModelRequest(groups, running_queue_size=len(groups))

    def _process_result(self, done: StepDone) -> None:
        sampled = self._batch.sampled.tolist()  # there is no step after it yet
        for slot, token_id in zip(sampled, done.ids.tolist(), strict=True):
            self._data[slot][1].output_token_ids.append(token_id)
        super()._process_result(done)


# ── the workers ──────────────────────────────────────────────────────────────────────────────────────────────────────
def run_worker(wire: str, scratch: str, cluster: Cluster, me: ProcessId) -> None:
    config, group = cluster.config, cluster.groups[me.group]
    assert config.simulated is not None, "this engine has no other device"
    device = SimulatedRunner(config.simulated, config.max_num_seqs)
    end = WIRES[wire][1](scratch, me.index, config.tensor_parallel_size)
    row = StatusBoard(cluster.board, writable=True).row(me.group)
    inbox = group.inbox.open_sender(cluster.worker_lane(me.index), name=str(me))
    inbox.send(Ready(me.index, device.blocks, device.vocabulary), config.start_timeout)
    end.meet()
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
        if group.multi_modal_data is not None:
            touch(group.multi_modal_data)
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


def touch(image: Any) -> int:
    """Reads a byte of each of its pages."""
    return int(np.asarray(image).reshape(-1).view(np.uint8)[::PAGE_NBYTES].max())
