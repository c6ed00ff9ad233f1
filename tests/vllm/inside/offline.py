"""Greedy answers of LLM() with two workers, as JSON: offline.py MODEL PROMPTS."""

import json
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, prompts = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(model, tensor_parallel_size=2, dtype="float32", max_model_len=512, enforce_eager=True, seed=0)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    print("ANSWERS " + json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
