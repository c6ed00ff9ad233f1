"""vLLM's messages of a decode step, and a program that encodes and decodes them with vLLM's own classes.

The program runs in the interpreter that has vLLM, and imports nothing of ours. It reads a line of JSON with the kind of
message and its steps (`vllm_peer` writes it), and answers with a line of JSON: times and frames.
"""

from __future__ import annotations

import base64
import gc
import importlib
import json
import os
import pickle
import signal
import sys
import time
from typing import Any

now = time.perf_counter_ns


def scheduler_output(classes: Any, step: dict[str, Any]) -> Any:
    """Returns the scheduler's output of a decode step. `classes` has vLLM's classes as attributes."""
    names = step["names"]
    return classes.SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=classes.CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None if block is None else ([block],) for block in step["new_blocks"]],
            num_computed_tokens=step["computed"],
            num_output_tokens=step["outputs"],
        ),
        num_scheduled_tokens=dict.fromkeys(names, 1),
        total_num_scheduled_tokens=len(names),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[0],
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )


def model_runner_output(classes: Any, step: dict[str, Any]) -> Any:
    names = step["names"]
    return classes.ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[token] for token in step["sampled"]],
    )


def engine_core_outputs(classes: Any, step: dict[str, Any]) -> Any:
    outputs = [
        classes.EngineCoreOutput(request_id=name, new_token_ids=[token])
        for name, token in zip(step["names"], step["sampled"])
    ]
    return classes.EngineCoreOutputs(outputs=outputs, timestamp=1234567.25)


def coder(what: str) -> tuple[Any, Any]:
    """How vLLM writes and reads it."""
    if what == "engine_core_outputs":
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        return encoder.encode, lambda frames: decoder.decode(frames)
    return lambda message: pickle.dumps(message, 5), pickle.loads


def joined(encoded: Any) -> bytes:
    return b"".join(bytes(item) for item in encoded) if isinstance(encoded, (list, tuple)) else bytes(encoded)


BUILDERS = {  # of each kind of message: the module of vLLM's classes, and the function that builds it
    "scheduler_output": ("vllm.v1.core.sched.output", scheduler_output),
    "model_runner_output": ("vllm.v1.outputs", model_runner_output),
    "engine_core_outputs": ("vllm.v1.engine", engine_core_outputs),
}


def main() -> None:
    # Log lines are not answers: those go to a copy of the standard output that no library knows.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import vllm

    print(json.dumps({"ready": {"vllm": vllm.__version__}}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        module, build = BUILDERS[order["what"]]
        classes = importlib.import_module(module)
        messages = [build(classes, step) for step in order["steps"]]
        encode, decode = coder(order["what"])
        gc.collect()
        gc.disable()
        began = now()
        encoded = [encode(message) for message in messages]
        written = now()
        for item in encoded:
            decode(item)
        read = now()
        gc.enable()
        answer = {
            "encode_ns": (written - began) / len(messages),
            "decode_ns": (read - written) / len(messages),
            "frames": [base64.b64encode(joined(entry)).decode() for entry in encoded],
        }
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
