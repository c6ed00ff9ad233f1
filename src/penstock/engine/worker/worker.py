"""The worker process: applies the core's steps, launches them on its device, and sends their results (rank 0).

It waits for the next step. A thread waits for the end of the oldest step in flight, and sends the result. When the core
dies, the worker ends with PeerDied, and the launcher restarts the group.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock import EndOfChannel, Handle, Lease, MemoryExhausted, Missing, PeerDied, Store, Timeout
from penstock.bridge import Puller
from penstock.codec.sequence import SequenceCheck
from penstock.engine.cluster.counter import Row
from penstock.engine.cluster.group_ends import GroupReceiver, GroupSender
from penstock.engine.cluster.logs import event, tensor_event
from penstock.engine.cluster.process import starting
from penstock.engine.cluster.rendezvous import Rendezvous
from penstock.engine.cluster.status_board import DEVICE_COUNTS, StatusBoard
from penstock.engine.cluster.topology import AGAIN, Cluster, ProcessId
from penstock.engine.protocol.batch_state import BatchState
from penstock.engine.protocol.config import EngineConfig
from penstock.engine.protocol.messages import AdapterChange, AdapterState, Begin, Ready, Step, StepDone, Stop
from penstock.engine.worker.device import Device, PendingStep, SamplerOutput
from penstock.engine.worker.simulated_device import SimulatedRunner

if TYPE_CHECKING:  # these import torch
    from penstock.engine.worker.cuda.step_graphs import GraphRecorder
    from penstock.engine.worker.encoding_exchange import EncoderOptions

LOOKS = 10_000  # spins of a thread that waits for others: about 0.1 ms. Without any, a short step takes twice as long
PULL_TIMEOUT = 5.0  # seconds; for a value of the home node
FAILURE_POLL_S = 0.2  # seconds, while a thread waits for the device: the thread may have failed


def run(cluster: Cluster, me: ProcessId) -> Worker:
    """Runs a worker until the core sends Stop. Returns it: its ends stay open."""
    gc.disable()  # imports make objects that stay: collections would be a fifth of the start
    with starting():
        device = device_of(cluster, me)
    worker = Worker(cluster, me, device)
    gc.freeze()  # objects alive now stay alive: a collection that scanned them would delay several steps
    gc.enable()
    worker.run()
    if isinstance(device, SimulatedRunner):
        event("device stopped", busy=device.busy, idle=device.idle, idle_share=device.idle_share)
    return worker


def device_of(cluster: Cluster, me: ProcessId) -> Device:
    """Creates the worker's device. Blocks until all ranks have joined, and the model is loaded."""
    config = cluster.config
    puller = None
    if cluster.store is not None and cluster.pulls:
        puller = Puller(cluster.pulls[me.group], me.index, cluster.store, name=str(me))

    def open_handle(handle: Handle) -> Lease:
        tensor_event("tensors received", handle)
        if cluster.store is None or puller is None:
            return handle.open(cluster.store)
        return open_or_pull(handle, cluster.store, puller)

    if config.simulated is not None:
        await_rendezvous(cluster, me)
        return SimulatedRunner(
            config.simulated, config.max_num_seqs, open_handle=open_handle, model=config.model, end_ids=config.end_ids
        )
    set_openmp_waits()
    # Imported here: only workers need torch.
    from penstock.engine.worker.model_runner import ModelRunner
    from penstock.engine.worker.pooler import Pooler
    from penstock.engine.worker.tensor_parallel import TPGroup

    pooler = Pooler.of(config, cluster.store)
    if config.is_encoder and pooler is not None:
        from penstock.engine.worker.encoder_runner import EncoderRunner

        await_rendezvous(cluster, me)
        return EncoderRunner(config, pooler, cluster.weights)

    device, files = config.device_of(me.group, me.index), cluster.kv_files_of(me.group)
    event("device is imported", logging.DEBUG)
    rendezvous = await_rendezvous(cluster, me)
    ranks = TPGroup(me.index, config.tensor_parallel_size, rendezvous, device, config.collectives)
    return ModelRunner(
        config.model,
        slots=config.max_num_seqs,
        ranks=ranks,
        device=device.partition(":")[0],
        dtype=config.dtype,
        block_size=config.block_size,
        blocks=config.num_gpu_blocks_override,
        max_blocks=config.max_num_seqs * config.max_blocks_per_request,  # which is what all requests can fill
        max_blocks_per_request=config.max_blocks_per_request,
        token_budget=config.max_num_batched_tokens,
        memory_utilization=config.gpu_memory_utilization,
        open_handle=open_handle,
        threads=config.threads,
        processes=len(config.ranks) * config.data_parallel_size,
        end_ids=config.end_ids,
        recorder=recorder_of(config),
        encoder=encoder_options_of(cluster),
        takes_embeds=config.enable_prompt_embeds,
        kv_file=None if files is None else files.pages[me.index],
        adapters=None if cluster.adapters is None else cluster.adapters.read().adapters,
        weight_file=cluster.weights,
        pooler=pooler,
        store=cluster.store,
        receives_tensors=config.tensor_transport == "device",
    )


def import_engine() -> None:
    """Imports what `device_of` imports, for any model."""
    set_openmp_waits()
    from penstock.engine.worker import model_runner, tensor_parallel  # noqa: F401


def import_device(config: EngineConfig) -> None:
    """Imports what `device_of` and the model of its device import. Computes nothing, and opens no device."""
    if config.simulated is None:
        import_engine()
        from penstock.engine.worker import encoder_runner  # noqa: F401
        from penstock.engine.worker.model_loader import import_family

        import_family(Path(config.model))


def set_openmp_waits() -> None:
    """For the environment of torch, which reads it when it is loaded. Threads of a product that wait for each other
    spin for about as long as it takes to wake a thread, then yield their processor to the core and the servers, which
    prepare the next step."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", str(LOOKS))


def await_rendezvous(cluster: Cluster, me: ProcessId) -> Rendezvous | None:
    """Returns where the ranks meet. On a node that has workers only, blocks until the group's link to the home node has
    brought the port."""
    config = cluster.config
    if config.has_cores:
        return cluster.rendezvous
    assert config.nodes is not None, "a node without cores is one of several"
    row = StatusBoard(cluster.board).row(me.group)
    while not (port := row[StatusBoard.RENDEZVOUS]):
        time.sleep(AGAIN)
    return Rendezvous(config.nodes.address, port, None)


def open_or_pull(handle: Handle, store: Store, puller: Puller) -> Lease:
    """Opens a value that the home node has put into its store: has it pulled into the store of this node, once for all
    workers. Raises Missing."""
    try:
        return handle.open(store)
    except Missing:
        if handle.key is None:  # it cannot be named on this node
            raise
    deadline = time.monotonic() + PULL_TIMEOUT
    while True:
        try:
            return puller.get(handle.key, max(0.0, deadline - time.monotonic()))
        except PeerDied as death:  # of the uplink before, which is reported once; its successor is there, or comes
            if time.monotonic() >= deadline:
                raise Missing(f"a value of the home node has not come: {death}") from None
            time.sleep(AGAIN)
        except (Timeout, EndOfChannel, MemoryExhausted) as error:
            raise Missing(f"a value of the home node has not come: {error}") from error


def encoder_options_of(cluster: Cluster) -> EncoderOptions:
    from penstock.engine.worker.encoding_exchange import EncoderOptions

    config = cluster.config
    # Half of a step's time: the other half is left to encode what another engine has not.
    return EncoderOptions(
        config.encoder_tp_mode, cluster.encodings, config.encoder_cache_nbytes, timeout=config.step_timeout / 2
    )


def recorder_of(config: EngineConfig) -> GraphRecorder | None:
    """Returns the recorder of graphs for this process's device; None: the device is no CUDA device, or
    `enforce_eager` is set, or gloo adds up on the host, which waits for the device."""
    if not config.device.startswith("cuda"):
        return None
    if config.collectives == "gloo" and config.tensor_parallel_size > 1:
        event("steps are not recorded", why="collectives gloo")
        return None
    if config.enforce_eager:
        event("steps are not recorded", why="enforce_eager")
        return None
    from penstock.engine.worker.cuda.graphs import CudaGraphs

    return CudaGraphs()


class Worker:
    def __init__(self, cluster: Cluster, me: ProcessId, device: Device) -> None:
        config, group = cluster.config, cluster.groups[me.group]
        self._device = device
        self._pending = PendingSteps(self._answer)
        self._timeout = config.step_timeout
        row = StatusBoard(cluster.board, writable=True).row(me.group)
        self._stats = DeviceStats(device, row) if me.index == 0 else None
        name, patience = str(me), config.start_timeout
        steps = group.steps.open_receiver(cluster.steps_receiver(me.index), name=name)
        self._steps = GroupReceiver(steps, me, patience)
        self._inbox = GroupSender(group.inbox.open_sender(cluster.worker_lane(me.index), name=name), me, patience)
        self._results = GroupSender(group.results.open_sender(name=name), me, patience) if me.index == 0 else None
        facts = device.blocks, device.vocabulary, device.max_short_prompt, device.model, device.dtype, device.kv_epoch
        ready = Ready(me.index, *facts, device.full_step_tokens, device.adapters)
        self._rank = me.index
        self._inbox.send(ready, config.start_timeout)
        event("worker ready", blocks=device.blocks)
        first = self._steps.receive()
        self._is_stopped = isinstance(first, Stop)
        if self._is_stopped:
            return
        if not isinstance(first, Begin):
            raise RuntimeError(f"expected Begin as the core's first message, got {type(first).__name__}")
        self._batch = BatchState(first.slots, first.blocks, first.block_size, config.max_blocks_per_request)
        self._sequence = SequenceCheck()
        self._sequence.begin(first)

    def run(self) -> None:
        """Runs steps until the core sends Stop. Raises PeerDied if the core dies."""
        while not self._is_stopped:
            self._turn()
        self._pending.finish()

    def _turn(self) -> None:
        """Launches the next step."""
        is_waiting = self._pending.is_waiting()
        try:
            step = self._steps.receive(FAILURE_POLL_S if is_waiting else self._device.tune_after)
        except Timeout:
            if not is_waiting:
                self._device.tune()
            return
        except EndOfChannel:
            self._is_stopped = True
            return
        if isinstance(step, Stop):
            self._is_stopped = True
            return
        if isinstance(step, AdapterChange):
            self._change_adapter(step)
            return
        self._sequence.check(step)  # else the cache would not hold what the core believes
        assert isinstance(step, Step), "Begin is the first message, and has been received"
        self._batch.apply(step)
        began = time.monotonic_ns()
        pending = self._device.launch(self._batch, step)
        if self._stats is not None:
            self._stats.launched(self._batch, step, began)
        self._pending.add(step, pending)

    def _change_adapter(self, change: AdapterChange) -> None:
        error = self._device.change_adapter(change)
        if change.is_loaded:
            state = AdapterState(change.digest, error, self._rank, change.server, change.number)
            self._inbox.send(state, self._timeout)

    def _answer(self, step: Step, sampled: SamplerOutput) -> None:
        """Sends the result of a step."""
        if self._results is None:
            return
        assert self._stats is not None, "rank 0 sends results and counts them"
        self._stats.done(sampled, time.monotonic_ns())  # first: the core's next step follows the result
        self._results.send(build_result(step, sampled), self._timeout)


class PendingSteps:
    """Answers steps in the order of their launches.

    A step that is done when it has been launched is answered at once, as those of a CPU are. A thread waits for others:
    so a result does not wait for the launch of the next step, and no thread polls the device. The core bounds their
    number: it sends a step while at most one is unanswered.
    """

    def __init__(self, answer: Callable[[Step, SamplerOutput], None]) -> None:
        """`answer`: the worker's thread and the waiting thread call it in turn."""
        self._answer = answer
        self._waiting: deque[Step] = deque()
        self._queue: queue.SimpleQueue[tuple[Step, PendingStep] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def is_waiting(self) -> bool:
        """Returns whether a step is unanswered. Raises the error of the thread."""
        if self._failure is not None:
            raise self._failure
        return bool(self._waiting)

    def add(self, step: Step, pending: PendingStep) -> None:
        """Answers the step, or lets the thread do so. Raises the error of the thread."""
        if not self.is_waiting() and isinstance(pending, SamplerOutput):
            self._answer(step, pending)
            return
        self._waiting.append(step)
        self._queue.put((step, pending))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="results", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Blocks until all steps are answered. Raises the error of the thread."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
        self.is_waiting()

    def _run(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                step, pending = entry
                self._answer(step, pending.result())
                self._waiting.popleft()
        except BaseException as error:
            self._failure = error


def build_result(step: Step, sampled: SamplerOutput) -> StepDone:
    """Builds the message with what a step has sampled, and with the slots that have failed."""
    failed = reasons = None
    if sampled.failed:
        failed = np.array(sorted(sampled.failed), np.uint16)
        reasons = np.array([sampled.failed[slot] for slot in failed.tolist()], np.uint8)
    return StepDone(
        step.leader,
        step.number,
        sampled.ids,
        logprobs=sampled.logprobs,
        failed=failed,
        reasons=reasons,
        prompt_logprobs=sampled.prompt_logprobs,
        vectors=sampled.vectors,
    )


class DeviceStats:
    """Counts busy time, idle time and tokens of a device on the status board, as rank 0 measures them.

    Counts each step when it is `launched`, and when its result is in (`done`), in another thread perhaps: the two write
    different counters. A simulated device knows its times exactly.
    """

    def __init__(self, device: Device, row: Row) -> None:
        self._simulated = device if isinstance(device, SimulatedRunner) else None
        self._encodings = device.encodings
        self._grammars = device.grammars
        self._row = row
        self._former = {word: row[word] for word in DEVICE_COUNTS}  # of the processes before
        row[StatusBoard.GRAMMARS_OPEN] = 0
        self._counts: tuple[int, ...] = ()  # of this process, as they are on the board
        self._begun: deque[int | None] = deque()  # of each step in flight, when it was launched; None: it is empty
        self._free_at = 0  # when the last one was seen to be done
        self._is_awaited = False  # the last step had rows

    def launched(self, batch: BatchState, step: Step, began: int) -> None:
        """`batch` has just applied the step; at `began` it was handed to the device."""
        rows = batch.rows.size
        if self._simulated is None and self._is_awaited and rows and not self._begun:
            self._row[StatusBoard.IDLE_NS] += began - self._free_at
        self._is_awaited = rows > 0
        self._begun.append(began if rows else None)
        joined = 0 if step.joined is None else step.joined.slots.size
        joined += 0 if step.resumed is None else step.resumed.slots.size
        tokens = rows if step.advances is None else int(batch.counts.sum())
        if tokens:
            StatusBoard.STEP_TOKENS.observe(self._row, tokens)
        # A row that samples computes one token of its answer, and all other tokens of the step are of prompts. But a
        # row that has joined samples for the first time with the last token of its prompt.
        self._row[StatusBoard.COMPUTED] += tokens - batch.sampled.size + joined

    def done(self, sampled: SamplerOutput, now: int) -> None:
        """Counts the result of the oldest step in flight."""
        row, began = self._row, self._begun[0]
        if self._simulated is not None:
            row[StatusBoard.BUSY_NS] = int(self._simulated.busy * 1e9)
            row[StatusBoard.IDLE_NS] = int(self._simulated.idle * 1e9)
        elif began is not None:
            row[StatusBoard.BUSY_NS] += now - max(began, self._free_at)
        self._free_at = now
        self._begun.popleft()  # last: another thread may count a launch, and computes idle time if none is left
        row[StatusBoard.SAMPLED] += sampled.ids.size
        encodings, grammars = self._encodings, self._grammars
        row[StatusBoard.GRAMMARS_OPEN] = grammars.open
        counts: tuple[int, ...] = (encodings.encoded, encodings.hits, encodings.unshared)
        counts += (grammars.compiled, grammars.compile_ns, grammars.masks, grammars.mask_ns)
        if counts != self._counts:
            self._counts = counts
            for (word, former), count in zip(self._former.items(), counts, strict=True):
                row[word] = former + count
