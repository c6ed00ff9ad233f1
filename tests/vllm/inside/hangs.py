"""vLLM's executor with two workers without a model, that hangs on purpose: MODEL SCENE. Prints the pids of the workers.

Scenes: "collective" (rank 1 skips an all-reduce), "loop" (rank 0 computes in Python for ever), "stopped" (by SIGSTOP).
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

from penstock.integrations.vllm import register

STEPS = 20


def main(model, scene):
    sys.path.insert(0, str(Path(__file__).parent))
    register()
    multiprocessing.current_process().name = "EngineCore"
    from executor_deaths import config_of
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor(config_of(model, 2))
    for number in range(STEPS):
        executor.collective_rpc("step", args=(number,), unique_reply_rank=0)
    print("WORKERS " + json.dumps([worker.proc.pid for worker in executor.workers]), flush=True)
    if scene == "collective":
        executor.collective_rpc("join_group", args=(os.environ["RENDEZVOUS"],))
    if scene == "stopped":
        os.kill(executor.workers[0].proc.pid, signal.SIGSTOP)
    method = {"collective": "skip_all_reduce", "loop": "loop", "stopped": "step"}[scene]
    threading.Thread(
        target=executor.collective_rpc, args=(method,), kwargs={"args": (0,), "unique_reply_rank": 0}, daemon=True
    ).start()
    print("HANGS", flush=True)
    sys.stdin.readline()
    for worker in executor.workers:
        worker.proc.kill()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
