"""vLLM's own classes, in an interpreter that has them: a program that makes, encodes and decodes what it is told.

Answers each line of JSON with one. Needs nothing of ours. Leaves to `vllm_peer` the orders.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import pickle
import signal
import sys
import time
from typing import Any

now = time.perf_counter_ns


def scheduler_output(step: dict[str, Any]) -> Any:
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    names = step["names"]
    return SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(
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


def model_runner_output(step: dict[str, Any]) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    names = step["names"]
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[token] for token in step["sampled"]],
    )


def engine_core_outputs(step: dict[str, Any]) -> Any:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    outputs = [
        EngineCoreOutput(request_id=name, new_token_ids=[token]) for name, token in zip(step["names"], step["sampled"])
    ]
    return EngineCoreOutputs(outputs=outputs, timestamp=1234567.25)


def coder(what: str) -> tuple[Any, Any]:
    """How vLLM writes and reads it."""
    if what == "engine_core_outputs":
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        return encoder.encode, lambda frames: decoder.decode(frames)
    return lambda message: pickle.dumps(message, 5), pickle.loads


def joined(encoded: Any) -> bytes:
    return b"".join(bytes(one) for one in encoded) if isinstance(encoded, (list, tuple)) else bytes(encoded)


MAKERS = {
    "scheduler_output": scheduler_output,
    "model_runner_output": model_runner_output,
    "engine_core_outputs": engine_core_outputs,
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
        made = [MAKERS[order["what"]](step) for step in order["steps"]]
        encode, decode = coder(order["what"])
        gc.collect()
        gc.disable()
        began = now()
        encoded = [encode(message) for message in made]
        written = now()
        for one in encoded:
            decode(one)
        read = now()
        gc.enable()
        answer = {
            "encode_ns": (written - began) / len(made),
            "decode_ns": (read - written) / len(made),
            "frames": [base64.b64encode(joined(one)).decode() for one in encoded],
        }
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
