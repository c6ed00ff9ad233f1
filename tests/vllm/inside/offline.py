"""Greedy answers of LLM() with two workers, as JSON, and how these were started: offline.py MODEL PROMPTS METHOD.

On a CPU vLLM always spawns: it sets the variable while it checks its configuration. METHOD is what the variable is set
to after that, so that "fork" forks, as it does on a device.
"""

import json
import os
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"


def keep_method(method):
    check = current_platform.check_and_update_config

    def checked(vllm_config):
        check(vllm_config)
        os.environ[VARIABLE] = method

    current_platform.check_and_update_config = checked


def descendants(pid):
    for name in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(name)
        yield from descendants(int(name))


def start_of(pid):
    """A process that was forked has the addresses of its parent; its command is not compared, as vLLM renames it."""
    process = Path(f"/proc/{pid}")
    if b"resource_tracker" in (process / "cmdline").read_bytes():
        return "tracker"
    return "fork" if (process / "auxv").read_bytes() == Path("/proc/self/auxv").read_bytes() else "spawn"


if __name__ == "__main__":
    model, prompts, method = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    keep_method(method)
    llm = LLM(model, tensor_parallel_size=2, dtype="float32", max_model_len=512, enforce_eager=True, seed=0)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    print("ANSWERS " + json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
    print("STARTS " + json.dumps(sorted(start_of(pid) for pid in descendants(os.getpid()))))
