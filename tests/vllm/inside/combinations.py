"""One combination of vLLM's options in LLM(), offline: combinations.py MODEL NAME. Prints its answers as JSON."""

import json
import os
import sys

PROMPTS = ["hello", "The quick brown fox", "0, 1, 2, 3,"]
GRAMMAR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
}
OPTIONS = {
    "pipeline": {"pipeline_parallel_size": 2},
    "grammar": {"tensor_parallel_size": 2},
    "rpc": {"tensor_parallel_size": 2},
    "sleep": {"tensor_parallel_size": 2, "enable_sleep_mode": True},
}


def weights_of(worker, factor):
    """A call of a user's own: large, and other on each rank."""
    import numpy

    return worker.rank * factor, numpy.arange(1 << 19, dtype=numpy.float32) * (worker.rank + 1)


def answers(llm, name):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if name == "rpc":
        replies = llm.collective_rpc(weights_of, args=(7,))
        return [(number, array.shape, float(array.sum())) for number, array in replies]
    grammar = StructuredOutputsParams(json=GRAMMAR) if name == "grammar" else None
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=grammar is None, structured_outputs=grammar)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


if __name__ == "__main__":
    model, name = sys.argv[1:]
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM

    llm = LLM(model, dtype="float32", max_model_len=512, enforce_eager=True, seed=0, **OPTIONS[name])
    print("ANSWERS " + json.dumps(answers(llm, name)))
