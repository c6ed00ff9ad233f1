"""A worker of vLLM without a model, for its executor: `EngineArgs(worker_cls="stub_worker.StubWorker")`."""

import os
import sys
import time

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

STEP = 0.005  # seconds
TOKEN = 65


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


class ServedWorker(StubWorker):
    """Enough for `vllm serve`: each request in a step gets one token."""

    def get_kv_cache_spec(self):
        return {"layer": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)}

    def get_supported_kv_cache_layouts(self):
        return ["LBHNC"]

    def determine_available_memory(self):
        return 1 << 20

    def initialize_from_config(self, kv_cache_config):
        pass

    def compile_or_warm_up_model(self):
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self):
        return ("generate",)

    def execute_model(self, scheduler_output):
        self.scheduled = list(scheduler_output.num_scheduled_tokens)
        return None if self.scheduled else EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar_output):
        time.sleep(STEP)
        indices = {request: index for index, request in enumerate(self.scheduled)}
        return ModelRunnerOutput(self.scheduled, indices, [[TOKEN] for _ in self.scheduled])
