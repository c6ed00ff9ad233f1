"""Kills workers of vLLM's executor, which have no model: COUNT SEED MODEL WORKERS. SIGTERM: the next kill is the last.

Prints as JSON, for each scene, the seconds from each kill until the failure callback was called and until the waiting
call raised, the seconds until the kernel had ended the process, the errors that are not as promised, and what was left
behind. Workers are forks of this process, which imports what they import: a kill takes half a second.
"""

import gc
import importlib
import json
import multiprocessing
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from penstock.integrations.vllm import register

LIMIT = 5.0
SCENES = ("busy", "collective", "first", "idle")


def config_of(model, workers):
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=model,
        tensor_parallel_size=workers,
        distributed_executor_backend="mp",
        worker_cls="stub_worker.StubWorker",
        max_model_len=64,
        dtype="float32",
        enforce_eager=True,
    )
    config = arguments.create_engine_config()
    # On a CPU vLLM sets it to spawn as it checks the configuration; each worker would import vLLM anew.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return config


class Call(threading.Thread):
    """The engine core: calls workers until a call raises."""

    def __init__(self, executor, scene, fifo):
        super().__init__(daemon=True)
        self.executor, self.scene, self.fifo = executor, scene, fifo
        self.error, self.ended_at = None, None

    def run(self):
        try:
            if self.scene == "collective":
                self.executor.collective_rpc("collective", args=(self.fifo,), unique_reply_rank=0)
            for number in range(10_000_000):
                assert self.executor.collective_rpc("step", args=(number,), unique_reply_rank=0) == number
        except Exception as error:
            self.error, self.ended_at = error, time.monotonic()


class End(threading.Thread):
    """Waits until the kernel has ended a process."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.descriptor, self.at = os.pidfd_open(pid), None
        self.start()

    def run(self):
        select.select([self.descriptor], [], [])
        self.at = time.monotonic()
        os.close(self.descriptor)


def scene_of(executor, scene, chance, fifo):
    """Kills a worker in the scene. Returns seconds until the callback, and until the call; until the end of the worker;
    and what is wrong."""
    called_at = []
    executor.register_failure_callback(lambda: called_at.append(time.monotonic()))
    call = Call(executor, scene, fifo)
    # In a collective the first rank waits for the others.
    victim = executor.workers[chance.randrange(1 if scene == "collective" else 0, len(executor.workers))]
    if scene != "idle":
        call.start()
    if scene != "first":
        time.sleep(0.02 + chance.random() * 0.05)
    end = End(victim.proc.pid)
    killed_at = time.monotonic()
    victim.proc.kill()
    if scene != "idle":
        call.join(LIMIT)
    while not called_at and time.monotonic() < killed_at + LIMIT:
        time.sleep(0.001)
    end.join(LIMIT)
    took, ended = [called_at[0] - killed_at if called_at else None], end.at - killed_at
    if scene == "idle":
        return took, ended, None
    took.append(call.ended_at - killed_at if call.ended_at else None)
    error = call.error
    promised = (f"VllmWorker-{victim.rank}", victim.rank, victim.proc.pid, 9)
    actual = tuple(getattr(error, name, None) for name in ("name", "rank", "pid"))
    if (*actual, getattr(getattr(error, "cause", None), "signal", None)) != promised:
        return took, ended, f"{scene}: {type(error).__name__}: {error}"
    return took, ended, None


def belongings():
    """What would show that something was left: files of shared memory, segments, children."""
    names = [path for name in os.listdir("/proc/self/fd") if os.path.exists(path := f"/proc/self/fd/{name}")]
    segments = [path for path in map(os.readlink, names) if "memfd:penstock" in path]
    return len(os.listdir("/dev/shm")), len(segments), len(multiprocessing.active_children())


def kill_one_of(config, scene, chance, fifo):
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor(config)
    workers = executor.workers
    try:
        return scene_of(executor, scene, chance, fifo)
    finally:
        for worker in workers:
            worker.proc.kill()
            worker.proc.join()
        executor.shutdown()


def prepare_forks(config):
    """Imports here what a worker imports after its fork, and looks for kernels here alone: no kernel runs."""
    from vllm.platforms import current_platform
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor(config)
    for name in executor.collective_rpc("modules", unique_reply_rank=0):
        if name not in sys.modules:
            with suppress(ImportError):
                importlib.import_module(name)
    executor.shutdown()
    current_platform.register_triton_kernel_overrides = lambda: None  # walks over all modules of a worker
    gc.freeze()  # a collection in a fork would copy all pages


def main(count, seed, model, workers):
    sys.path.insert(0, str(Path(__file__).parent))
    register()
    config = config_of(model, workers)
    prepare_forks(config)
    chance = random.Random(seed)
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    took, ended, wrong, before = {scene: [] for scene in SCENES}, [], [], belongings()
    with tempfile.TemporaryDirectory() as folder:
        fifo = os.path.join(folder, "fifo")
        os.mkfifo(fifo)
        for index in range(count):
            scene = SCENES[index % len(SCENES)]
            durations, end, error = kill_one_of(config, scene, chance, fifo)
            took[scene].append(durations)
            ended.append(end)
            if error is not None:
                wrong.append(error)
            if is_over.is_set():
                break
    gc.collect()  # the executor, its calls and its threads know each other
    left = [now - then for now, then in zip(belongings(), before)]
    print("DEATHS " + json.dumps({"took": took, "ended": ended, "wrong": wrong, "left": left}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
