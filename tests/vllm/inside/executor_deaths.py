"""Kills workers of vLLM's executor, which have no model: busy, in a collective, in the first step, and idle.

Times each kill until the waiting call raised, until the failure callback was called, and until the kernel had ended
the process. A kill costs a fraction of a second: workers are forks of a process that has imported what they import.
"""

import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import wait

import campaign
from offline import keep_method

from penstock.environment import VLLM_DEATHS
from penstock.integrations.vllm import deaths

LIMIT = 5.0
SCENES = ("busy", "collective", "first", "idle")


def config_of(model, workers):
    from vllm.engine.arg_utils import EngineArgs

    keep_method("fork")  # each worker would import vLLM anew
    arguments = EngineArgs(
        model=model,
        tensor_parallel_size=workers,
        distributed_executor_backend="mp",
        worker_cls="stub_worker.StubWorker",
        max_model_len=64,
        dtype="float32",
        enforce_eager=True,
    )
    return arguments.create_engine_config()


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
        wait([self.descriptor])
        self.at = time.monotonic()
        os.close(self.descriptor)


def times_of(executor, victim, scene, chance, fifo):
    """Kills the worker in the scene. Returns the seconds until each effect, and the error of the waiting call."""
    called, called_at = threading.Event(), []
    executor.register_failure_callback(lambda: (called_at.append(time.monotonic()), called.set()))
    call = Call(executor, scene, fifo)
    if scene != "idle":
        call.start()
    if scene != "first":
        time.sleep(0.02 + chance.random() * 0.05)
    end = End(victim.proc.pid)
    killed_at = time.monotonic()
    victim.proc.kill()
    if scene != "idle":
        call.join(LIMIT)
    called.wait(LIMIT)
    end.join(LIMIT)
    moments = {"the callback": called_at[0] if called_at else None, "the end of the process": end.at}
    if scene != "idle":
        moments["the error"] = call.ended_at
    return {name: None if at is None else at - killed_at for name, at in moments.items()}, call.error


def fault_of(scene, victim, error):
    """Returns what is not as promised in the error, or in the text for the clients; None: all is."""
    pid = victim.proc.pid
    text = f"VllmWorker-{victim.rank} (rank {victim.rank}, pid {pid}) died: killed by SIGKILL"
    if deaths.first_death() != text:
        return f"{scene}: clients of {text!r} read {deaths.first_death()!r}"
    promised = (f"VllmWorker-{victim.rank}", victim.rank, pid, 9)
    actual = tuple(getattr(error, name, None) for name in ("name", "rank", "pid"))
    actual += (getattr(getattr(error, "cause", None), "signal", None),)
    if scene != "idle" and actual != promised:
        return f"{scene}: {type(error).__name__}: {error}"
    return None


def clean_board():
    """Forks kill at the same time, so each has a board of deaths."""
    if not os.environ.get(VLLM_DEATHS.name, "").startswith(f"/proc/{os.getpid()}/"):
        os.environ.pop(VLLM_DEATHS.name, None)
        deaths.open_board()
    with deaths.opened(os.environ[VLLM_DEATHS.name]) as board:
        board.truncate(0)


def kill_worker(scenes, config, index, chance):
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    clean_board()
    scene = scenes[index % len(scenes)]
    with tempfile.TemporaryDirectory() as folder:
        fifo = os.path.join(folder, "fifo")
        os.mkfifo(fifo)
        executor = MultiprocExecutor(config)
        workers = executor.workers
        # In a collective the first rank waits for the others.
        victim = workers[chance.randrange(1 if scene == "collective" else 0, len(workers))]
        try:
            took, error = times_of(executor, victim, scene, chance, fifo)
            return {"scene": scene, "took": took, "wrong": fault_of(scene, victim, error)}
        except Exception:
            return {"scene": scene, "took": {}, "wrong": traceback.format_exc()}
        finally:
            for worker in workers:
                worker.proc.kill()
            for worker in workers:
                worker.proc.join()
            executor.shutdown()


def prepare_forks(config):
    """Imports here what a worker imports after its fork, and looks for kernels here alone: no kernel runs."""
    from vllm.platforms import current_platform
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor(config)
    names = executor.collective_rpc("modules", unique_reply_rank=0)
    executor.shutdown()
    current_platform.register_triton_kernel_overrides = lambda: None  # walks over all modules of a worker
    campaign.import_modules(names)


if __name__ == "__main__":
    from vllm.plugins import load_general_plugins

    options = campaign.arguments_of(__doc__, SCENES)
    sys.path.insert(0, campaign.folder_of_this())
    multiprocessing.current_process().name = "EngineCore"
    load_general_plugins()
    config = config_of(options.model, options.workers)
    prepare_forks(config)
    campaign.run(options, lambda index, chance: kill_worker(options.scenes, config, index, chance))
