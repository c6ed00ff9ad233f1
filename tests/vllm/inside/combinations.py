"""One combination of vLLM's options without the plugin, and with it: combinations.py FOLDER MODEL NAME PARTS.

Prints "ANSWERS PARTS JSON" for both. Both are forks of one process with vLLM imported, as are their engine cores and
workers: the answers take seconds, and the imports would take a minute. A refusal of vLLM's is the answer.
"""

import asyncio
import faulthandler
import json
import os
import sys
from pathlib import Path

from offline import keep_method

LIMIT = 180  # seconds, without the plugin and with it
PROMPTS = ["hello", "The quick brown fox", "0, 1, 2, 3,"]
LONG_PROMPTS = [letter * 300 for letter in "abc"]  # some blocks of the KV cache
GRAMMAR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
}
ADAPTER = {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
OPTIONS = {
    "adapters": {"tensor_parallel_size": 2, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
    "call": {"tensor_parallel_size": 2},
    "connector": {"distributed_executor_backend": "mp", "enable_prefix_caching": False},  # ranks share files
    "data": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "grammar": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "sleep": {"tensor_parallel_size": 2},
    "sleep mode": {"tensor_parallel_size": 2, "enable_sleep_mode": True},
    "text": {"tensor_parallel_size": 2},
}


def greedy(**more):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=32, ignore_eos=not more, **more)


def token_ids(llm, prompts=PROMPTS, params=None, **more):
    outputs = llm.generate(prompts, params or greedy(), use_tqdm=False, **more)
    return [list(output.outputs[0].token_ids) for output in outputs]


# ── a function for each combination: its answers ──
def adapters(llm, folder):
    from vllm.lora.request import LoRARequest

    requests = [None, *(LoRARequest(f"adapter {seed}", seed, write_adapter(folder, seed)) for seed in (1, 2))]
    return [token_ids(llm, lora_request=[request] * len(PROMPTS)) for request in requests] + [
        token_ids(llm, [PROMPTS[0]] * len(requests), lora_request=requests)
    ]


def write_adapter(folder, seed):
    import torch
    from safetensors.torch import save_file

    path = Path(folder) / f"adapter{seed}"
    path.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name, size in (("q_proj", 256), ("v_proj", 128)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, 256) / 8
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, 8) / 8
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    return str(path)


def text_of_rank(worker, factor):
    """A call of a user's own, with a large reply that differs by rank."""
    return worker.rank * factor, str(worker.rank) * (2 << 20)


def call(llm, folder):
    replies = llm.collective_rpc(text_of_rank, args=(7,))
    return [token_ids(llm), [(number, len(text), text[:1]) for number, text in replies], token_ids(llm)]


def connector(llm, folder):
    """The second answers read the KV cache of the first from files."""
    first = token_ids(llm, LONG_PROMPTS)
    files = sorted(path.name for path in Path(folder).rglob("*.safetensors"))
    assert files
    return [files, first, token_ids(llm, LONG_PROMPTS)]


def grammar(llm, folder):
    from vllm.sampling_params import StructuredOutputsParams

    params = greedy(structured_outputs=StructuredOutputsParams(json=GRAMMAR))
    return token_ids(llm, PROMPTS * 2, [params, greedy()] * len(PROMPTS))


def pipeline(llm, folder):
    return token_ids(llm)


def sleep(llm, folder):
    answers = [token_ids(llm)]
    for level in (0, 1):
        llm.sleep(level=level)
        llm.wake_up(tags=["scheduling"] if level == 0 else None)
        answers.append(token_ids(llm))
    return answers


def text(llm, folder):
    outputs = [llm.generate(prompt, greedy(), use_tqdm=False)[0] for prompt in PROMPTS]
    return [output.outputs[0].text for output in outputs]


async def data(options):
    """Each prompt on each of the two engines."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    async def answer(prompt, rank):
        async for output in llm.generate(prompt, greedy(), f"{prompt} {rank}", data_parallel_rank=rank):
            last = output
        return list(last.outputs[0].token_ids)

    try:
        return await asyncio.gather(*(answer(prompt, rank) for prompt in PROMPTS for rank in range(2)))
    finally:
        llm.shutdown()


def answers_of(name, model, folder):
    from vllm import LLM

    options = {"model": model, "dtype": "float32", "max_model_len": 512, "enforce_eager": True, "seed": 0}
    options |= OPTIONS[name]
    if name == "data":
        return asyncio.run(data(options))
    if name == "connector":
        extra = {"shared_storage_path": folder}
        options["kv_transfer_config"] = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    try:
        llm = LLM(**options)
    except ValueError as error:
        return str(error)
    return globals()[name](llm, folder)


def fork(folder, model, name, parts):
    """Returns the exit status of a fork that prints the answers."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    os.environ["PENSTOCK_VLLM"] = parts
    folder = Path(folder) / (parts if parts == "0" else "ours")
    folder.mkdir()
    print(f"ANSWERS {parts} {json.dumps(answers_of(name, model, str(folder)))}", flush=True)
    sys.exit()


if __name__ == "__main__":
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # of a call of a user's own
    import vllm.model_executor.models.llama
    import vllm.v1.engine.async_llm
    import vllm.v1.worker.cpu_worker  # noqa: F401

    keep_method("fork")
    *arguments, last = sys.argv[1:]
    sys.exit(fork(*arguments, "0") or fork(*arguments, last))
