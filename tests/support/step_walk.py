"""A walk over schedules of vLLM's own scheduler, each step and each reply sent as a change and compared: for the peer.

python step_walk.py MODEL faults|plain STEPS SEED…: prints a line of JSON for each seed. A model runner that computes
nothing answers. Requests are aborted and preempted; what a reader gets it overwrites. With faults, some sends fail, and
one of the readers misses steps.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from penstock.errors import OutOfStep
from penstock.integrations.vllm.step_check import find_difference
from penstock.integrations.vllm.steps import StepReader, StepWriter, load_codecs

BLOCK = 16
SUCCESS = WorkerProc.ResponseStatus.SUCCESS
VOCABULARY = 1000
DRAFTS = 3


class Grammar:
    """Accepts every token."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def is_terminated(self) -> bool:
        return False


class Walk:
    """One scheduler, chosen by the seed, and the messages that an executor and a worker would send."""

    def __init__(self, model: str, seed: int, **choices: Any) -> None:
        self.random = random.Random(seed)
        self.model = model
        self.counts: Counter[str] = Counter()
        self.choices: dict[str, Any] = {
            "is_async": self.random.random() < 0.5,
            "is_v2": self.random.random() < 0.5,
            "has_prefix_cache": self.random.random() < 0.7,
            "has_drafts": self.random.random() < 0.35,
            "stages": self.random.choice((1, 1, 1, 2)),
            "policy": self.random.choice(("fcfs", "priority")),
            "has_images": "qwen" in model.lower(),
            "num_blocks": self.random.choice((60, 120, 2000)),
            "max_num_seqs": self.random.choice((4, 16, 48)),
            "max_tokens": self.random.choice((64, 256, 2048)),
            "arrivals": self.random.choice((0.6, 1.0, 2.0)),
            **choices,
        }
        if self.choices["has_drafts"]:
            self.choices.update(is_async=False, stages=1)
        self.scheduler = self._create_scheduler()
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.count = 0
        self.batch: list[str] = []  # the model runner's rows: the last one fills a hole

    def _create_scheduler(self) -> Any:
        choices = self.choices
        scheduling = SchedulerConfig(
            max_num_seqs=choices["max_num_seqs"],
            max_num_batched_tokens=choices["max_tokens"],
            max_model_len=512,
            enable_chunked_prefill=True,
            async_scheduling=choices["is_async"],
            is_encoder_decoder=False,
            policy=choices["policy"],
            watermark=0.0,
        )
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=choices["has_prefix_cache"])
        speculation = None
        if choices["has_drafts"]:
            speculation = SpeculativeConfig(
                model="ngram", num_speculative_tokens=DRAFTS, prompt_lookup_max=3, prompt_lookup_min=1
            )
        config = VllmConfig(
            scheduler_config=scheduling,
            model_config=ModelConfig(model=self.model, dtype="float32", seed=1, max_model_len=512),
            cache_config=cache,
            parallel_config=ParallelConfig(pipeline_parallel_size=choices["stages"]),
            speculative_config=speculation,
        )
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache.num_gpu_blocks = choices["num_blocks"]
        register_all_kvcache_specs(config)
        scheduler = (AsyncScheduler if choices["is_async"] else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=choices["num_blocks"],
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            block_size=BLOCK,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
        )
        scheduler.use_v2_model_runner = choices["is_v2"]
        return scheduler

    def add_request(self) -> None:
        draw = self.random
        self.count += 1
        shared = [7] * draw.choice((0, 32, 64))  # prefixes that hit
        prompt = shared + [draw.randrange(VOCABULARY) for _ in range(draw.choice((3, 20, 90)))]
        features = None
        if self.choices["has_images"] and draw.random() < 0.5:
            where = PlaceholderRange(offset=len(shared), length=2)
            features = [
                MultiModalFeatureSpec(MultiModalKwargsItem.dummy(), "image", f"image{draw.randrange(9)}", where)
            ]
            self.counts["images"] += 1
        lora = (
            LoRARequest(f"adapter{draw.randrange(3)}", 1 + draw.randrange(3), "/nowhere")
            if draw.random() < 0.3
            else None
        )
        request = Request(
            request_id=f"cmpl-{self.count}-{draw.getrandbits(64):016x}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=draw.choice((1, 5, 40, 200)), ignore_eos=True),
            pooling_params=None,
            mm_features=features,
            lora_request=lora,
            priority=draw.randrange(3),
            block_hasher=self.hasher,
        )
        self.counts["adapters"] += lora is not None
        if draw.random() < 0.15:
            request.structured_output_request = StructuredOutputRequest(request.sampling_params)
            request.structured_output_request.grammar = Grammar()
            self.counts["grammars"] += 1
        self.scheduler.add_request(request)

    def abort_one(self) -> None:
        ids = list(self.scheduler.requests)
        if ids:
            self.scheduler.finish_requests(self.random.choice(ids), RequestStatus.FINISHED_ABORTED)
            self.counts["aborts"] += 1

    def messages(self, steps: int) -> Iterator[Any]:
        """Yields calls and replies, as an executor and a worker would send them."""
        draw, waiting = self.random, []
        for _ in range(steps):
            for _ in range(int(draw.expovariate(1 / self.choices["arrivals"]))):
                self.add_request()
            if draw.random() < 0.03:
                self.abort_one()
            step = self.scheduler.schedule()
            self._count(step)
            yield "execute_model", (step,), {}, draw.choice((0, None)) if draw.random() < 0.01 else 0
            if step.has_structured_output_requests:
                ids = list(step.num_scheduled_tokens)
                yield "sample_tokens", (GrammarOutput(ids, np.ones((len(ids), 4), np.int32)),), {}, 0
            waiting.append(step)
            # Asynchronous scheduling and stages have one more step under way.
            if len(waiting) > (self.choices["is_async"] or self.choices["stages"] > 1):
                step = waiting.pop(0)
                output = self._output(step)
                yield SUCCESS, output
                self.scheduler.update_from_output(step, output)
                if self.choices["has_drafts"]:
                    ids = [request for request in output.req_ids if request in self.scheduler.requests]
                    drafts = [[draw.randrange(VOCABULARY) for _ in range(draw.randrange(DRAFTS + 1))] for _ in ids]
                    self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def _count(self, step: Any) -> None:
        cached, counts = step.scheduled_cached_reqs, self.counts
        counts["steps"] += 1
        counts["new requests"] += len(step.scheduled_new_reqs)
        counts["prefix hits"] += sum(request.num_computed_tokens > 0 for request in step.scheduled_new_reqs)
        counts["chunks"] += sum(
            n > 1 and not step.scheduled_spec_decode_tokens.get(request)
            for request, n in step.num_scheduled_tokens.items()
        )
        counts["resumed"] += len(cached.resumed_req_ids)
        counts["preempted"] += len(step.preempted_req_ids or ())
        counts["finished"] += len(step.finished_req_ids)
        counts["drafts"] += len(step.scheduled_spec_decode_tokens)
        counts["encoder inputs"] += len(step.scheduled_encoder_inputs)
        counts["masks"] += step.has_structured_output_requests

    def _output(self, step: Any) -> Any:
        draw, scheduled = self.random, step.num_scheduled_tokens
        self.batch = [name for name in self.batch if name in scheduled] + [
            name for name in scheduled if name not in self.batch
        ]
        if len(self.batch) > 2 and draw.random() < 0.1:
            hole = draw.randrange(len(self.batch) - 1)
            self.batch[hole], self.batch[-1] = self.batch[-1], self.batch[hole]
        tokens: list[list[int]] = []
        for name in self.batch:
            request = self.scheduler.requests.get(name)
            is_prefill = request is None or request.is_prefill_chunk
            drafts = step.scheduled_spec_decode_tokens.get(name, ())
            count = 0 if is_prefill else 1 + (draw.randrange(len(drafts) + 1) if drafts else 0)
            tokens.append([draw.randrange(VOCABULARY) for _ in range(count)])
        keys = list(self.batch)
        if draw.random() < 0.1:
            draw.shuffle(keys)
        output = ModelRunnerOutput(list(self.batch), {key: self.batch.index(key) for key in keys}, tokens)
        if draw.random() < 0.05 and all(len(row) == 1 for row in tokens) and tokens:
            shape = len(tokens), 2
            output.logprobs = LogprobsLists(np.ones(shape, np.int32), np.zeros(shape, np.float32), np.ones(len(tokens)))
        return output


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, 5))


def overwrite(value: Any, depth: int = 6) -> None:
    """Writes into everything that may be written."""
    if depth == 0:
        return
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value[...] = 0
    elif isinstance(value, list):
        for item in value:
            overwrite(item, depth - 1)
        value[:] = ["overwritten"]
    elif isinstance(value, dict):
        for item in value.values():
            overwrite(item, depth - 1)
        value.clear()
    elif isinstance(value, set):
        value.clear()
    elif isinstance(value, tuple):
        for item in value:
            overwrite(item, depth - 1)
    elif dataclasses.is_dataclass(value) and type(value).__module__.startswith("vllm.v1"):
        for name, item in list(vars(value).items()):
            overwrite(item, depth - 1)
            setattr(value, name, None)


class FailedSend(Exception):
    pass


class Wire:
    """Passes sections and bodies from a writer to readers, or fails when it has been told to."""

    def __init__(self) -> None:
        self.fails = False
        self.sent: tuple[bytes, bytes | None] = b"", None

    def send(self, section: bytes, body: Any, timeout: float | None) -> None:
        if self.fails:
            raise FailedSend
        self.sent = section, None if body is None else pickle.dumps(body, 5)


def receive(reader: StepReader, sent: tuple[bytes, bytes | None]) -> Any:
    section, body = sent
    return reader.receive(section, None if body is None else pickle.loads(body))


def compare(walk: Walk, steps: int, *, is_checked: bool, has_faults: bool = True) -> dict[str, Any]:
    """Sends all messages and compares what arrives with what pickle makes of them."""
    draw = random.Random(walk.random.random())
    codecs = load_codecs()
    wire = Wire()
    writer = StepWriter(wire.send, codecs, is_checked=is_checked)
    reader, late = StepReader(codecs), StepReader(codecs)
    counts = walk.counts
    lost: set[type] = set()  # of which kind the late reader has missed a message
    for message in walk.messages(steps):
        original = pickled(message)
        kind = type(next((codec.find_output(message) for codec in codecs if codec.find_output(message)), None))
        if has_faults and kind is not type(None) and draw.random() < 0.02:
            wire.fails = True
            try:
                writer.send(message)
            except FailedSend:
                wire.fails = False
            before = writer.num_whole
            assert writer.send(message)
            assert writer.num_whole == before + 1, "a step after a failed send was not sent whole"
            counts["failed sends"] += 1
        elif not writer.send(message):
            assert kind is type(None), f"{kind} was not sent as a step"
            counts["other messages"] += 1
            continue
        is_whole = wire.sent[0][1] == 0
        received = receive(reader, wire.sent)
        difference = find_difference(received, original)
        assert difference is None, difference
        difference = find_difference(pickled(message), original)
        assert difference is None, f"the writer changed what it was given: {difference}"
        overwrite(received)
        counts["wholes" if is_whole else "changes"] += 1
        if has_faults and draw.random() < 0.01:
            lost.add(kind)
            counts["lost"] += 1
            continue
        try:
            received = receive(late, wire.sent)
            assert is_whole or kind not in lost, "a reader that missed a step took a change"
            lost.discard(kind)
            assert find_difference(received, original) is None
        except OutOfStep:
            assert not is_whole and kind in lost, "a reader that missed nothing was out of step"
            counts["out of step"] += 1
    return {"choices": walk.choices, **counts}


if __name__ == "__main__":
    folder, kind, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    for seed in map(int, sys.argv[4:]):
        try:
            counts = compare(Walk(folder, seed), number, is_checked=seed % 2 == 0, has_faults=kind == "faults")
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
        print(json.dumps({"seed": seed, **counts}), flush=True)
