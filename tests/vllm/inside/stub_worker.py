"""A worker of vLLM without a model, for its executor: `EngineArgs(worker_cls="stub_worker.StubWorker")`."""

import os
import sys

import torch
from vllm.v1.worker.worker_base import WorkerBase


class StubWorker(WorkerBase):
    def init_device(self):
        pass

    def load_model(self):
        pass

    def modules(self):
        return list(sys.modules)

    def step(self, number):
        return number

    def collective(self, fifo):
        """Rank 0 waits in it for the other ranks, which never come. No signal but SIGKILL ends that wait."""
        while self.rank == 0:
            try:
                os.read(os.open(fifo, os.O_RDWR), 1)
            except SystemExit:
                continue
        return None

    # ── hangs on purpose ──
    def join_group(self, path):
        torch.distributed.init_process_group("gloo", f"file://{path}", world_size=2, rank=self.rank)

    def skip_all_reduce(self, number):
        if self.rank == 0:
            torch.distributed.all_reduce(torch.zeros(1))

    def loop(self, number):
        while self.rank == 0:
            number += 1
