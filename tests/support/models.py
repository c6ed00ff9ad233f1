"""Tiny models of every family that is supported, what transformers answers with them, and what our device does.

Without torch or transformers, a test file that imports this module is skipped: import it before torch.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")
pytest.importorskip("penstock.engine.worker.stock", reason="needs transformers: pip install 'penstock[engine]'")
transformers = pytest.importorskip("transformers")

from penstock.codec.buffer import Buffer  # noqa: E402
from penstock.engine.core.scheduler import Scheduler  # noqa: E402
from penstock.engine.core.scheduler_config import SchedulerConfig  # noqa: E402
from penstock.engine.core.step_builder import StepBuilder  # noqa: E402
from penstock.engine.protocol.batch_state import BatchState  # noqa: E402
from penstock.engine.protocol.columns import LogprobRows  # noqa: E402
from penstock.engine.protocol.config import SHIPPED  # noqa: E402
from penstock.engine.protocol.messages import FinishReason, Inputs, Progress, SamplingParams, Submit  # noqa: E402
from penstock.engine.worker.input_batch import InputBatch, build_batch  # noqa: E402
from penstock.engine.worker.model_runner import ModelRunner  # noqa: E402
from penstock.engine.worker.worker import build_result  # noqa: E402
from penstock.tensor import Handle  # noqa: E402
from tests import tiers  # noqa: E402
from tests.property.device import found_in_cache  # noqa: E402

VOCABULARY, IMAGE, VIDEO, BEFORE, AFTER = 131, 130, 129, 128, 127  # ids: of an image's place, and of what is around it
WORDS = range(3, 120)
COUNT = 12  # tokens of an answer
ROUNDING = 1e-3  # of the spread of logits: two that are nearer than that are as likely
BLOCK_SIZE = 4
# Of an engine that serves one of these models: long prompts take several steps, and greedy answers are exact.
ENGINE_SIZES: dict[str, Any] = {
    "num_gpu_blocks_override": 200,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 16,
    "dtype": "float32",
}

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # much, or every prompt has the same answer
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEXT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16, "sliding_window": 8},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "initializer_range": 0.3}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
VISION: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **SHAPE},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 8, "initializer_range": 0.3, **TOWER},
    },
    "qwen2_vl": {
        "text_config": {**SHAPE, **ROPE},
        "vision_config": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, **QWEN},
    },
    "qwen2_5_vl": {
        "text_config": {**SHAPE, **ROPE},
        "vision_config": {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "window_size": 16}
        | {"fullatt_block_indexes": [1], **QWEN},
    },
    "qwen3_vl": {
        "text_config": {**SHAPE, **ROPE, "head_dim": 16},
        "vision_config": {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}
        | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1], **QWEN},
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **SHAPE},
        "vision_config": {"image_size": 16, "initializer_range": 0.3, **TOWER},
        "scale_factor": 2,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **SHAPE},
        "vision_config": {"image_size": 16, "initializer_range": 0.3, **TOWER},
        "scale_factor": 2,
    },
}

PUSHED = ("llama", "gemma2", "mixtral", "qwen2_vl")  # test_models.py says why these


def families(*names: str) -> list[str]:
    """Those of them, or of all, that the tier has."""
    return [name for name in names or (*TEXT, *VISION) if tiers.TIER != "push" or name in PUSHED]


class Asked(NamedTuple):
    """A request. Images have keys."""

    prompt: list[int]
    inputs: list[tuple[bytes | None, int, int]]
    tokens: int = COUNT  # of its answer


class Family(NamedTuple):
    """A model in a folder, some requests, and what transformers answers."""

    name: str
    path: Path
    requests: list[Asked]
    images: dict[bytes, dict[str, Any]]  # and videos
    answers: list[list[int]]

    @property
    def blocks(self) -> int:
        """As many as the longest one needs, so that no two of them run for long."""
        return -(-longest(self.requests) // BLOCK_SIZE)


BuildFamily = Callable[..., Family]  # by its name


def longest(requests: Sequence[Asked]) -> int:
    return max(len(request.prompt) + request.tokens for request in requests)


def build_family(
    name: str,
    path: Path,
    *,
    requests: Sequence[Asked] = (),
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[Any], None] = lambda stock: None,
    **changes: Any,
) -> Family:
    """A model with random parameters, which `prepare` may set, in `path`, and the answers to requests that begin alike,
    and differ.

    `asked`: to these; `dtype`: in which it answers. `changes` are of its text's configuration.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stock = stock_of(name, **changes)
    prepare(stock)
    stock.save_pretrained(path)
    if dtype != torch.float32:  # not stock.to(dtype), by which frequencies would be rounded, too
        stock = type(stock).from_pretrained(path, dtype=dtype, **attention_of(name)).eval()
    chance = random.Random(7)
    images: dict[bytes, dict[str, Any]] = {}
    if requests:
        requests = list(requests)
    elif name in VISION:
        requests = [_with_media(name, chance, images, "i" * count) for count in (0, 1, 2, 1, 2)]
        prompt, inputs, _ = requests[2]
        requests.append(Asked([*prompt, 9, 10], inputs))
    else:
        same = _words(chance, 13)
        requests = [Asked(_words(chance, length), []) for length in (1, 2, 5, 23)]
        requests += [Asked(same + _words(chance, length), []) for length in (1, 4, 9)]
    return Family(name, path, requests, images, [_answer(stock, request, images) for request in requests])


def shipped_family(requests: Sequence[Asked]) -> Family:
    """The bundled model, and the answers of transformers to requests."""
    stock = transformers.AutoModelForImageTextToText.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    return Family("shipped", Path(SHIPPED), list(requests), {}, [_answer(stock, request, {}) for request in requests])


def batch_of_rows(rows: list[tuple[int, int]], blocks: int = 64, seed: int = 1) -> InputBatch:
    """Of requests that have so many tokens, of which the step computes so many, the last ones."""
    schedule = BatchState(len(rows), blocks, BLOCK_SIZE)
    plan, free = StepBuilder(schedule), random.Random(seed).sample(range(blocks), blocks)
    params = SamplingParams()
    for number, (length, count) in enumerate(rows):
        taken = [free.pop() for _ in range(-(-length // BLOCK_SIZE) + number % 2)]  # some have one in advance
        plan.join(number, np.zeros(length, np.int32), params, taken, computed=length - count, chunk=count)
    schedule.apply(plan.build(1, 1))
    return build_batch(schedule)


def device(of: Family, **options: Any) -> ModelRunner:
    defaults = {
        "slots": 4,
        "block_size": BLOCK_SIZE,
        "blocks": of.blocks,
        "threads": 1,
        "open_handle": opener(of.images),
    }
    return ModelRunner(of.path, **(defaults | options))


def stock_of(name: str, **changes: Any) -> Any:
    kind: Any
    if name in VISION:
        special = {"image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": VIDEO}
        special |= {"vision_start_token_id": BEFORE, "vision_end_token_id": AFTER}
        kind, options = transformers.AutoModelForImageTextToText, {**VISION[name], **special, "initializer_range": 0.3}
        if name == "llava":
            del options["image_token_id"]
        options["text_config"] = {**options["text_config"], **changes}
    else:
        kind, options = transformers.AutoModelForCausalLM, {**SHAPE, **TEXT[name], **changes}
    stock = kind.from_config(transformers.AutoConfig.for_model(name, **options), **attention_of(name)).eval()
    if TEXT.get(name, {}).get("tie_word_embeddings") or name.startswith(
        "gemma"
    ):  # or it would say the same word again and again
        with torch.no_grad():
            stock.get_input_embeddings().weight.mul_(0.1)
    with torch.no_grad():
        for own, parameter in stock.named_parameters():
            if own.endswith("_proj.bias"):  # or they would be zeros
                parameter.normal_(0, 0.3)
    return stock


def attention_of(name: str) -> dict[str, str]:
    """Returns options of transformers: by sdpa, 5.17 leaves the softcap of Gemma 2 out."""
    return {"attn_implementation": "eager"} if name == "gemma2" else {}


def _words(chance: random.Random, count: int) -> list[int]:
    return [chance.choice(WORDS) for _ in range(count)]


def made_with_videos(name: str, path: Path) -> Family:
    """A model, and requests with videos, alone and beside images."""
    torch.manual_seed(1)
    chance, media = random.Random(8), dict[bytes, dict[str, Any]]()
    requests = [_with_media(name, chance, media, kinds) for kinds in ("v", "iv", "vv", "viv", "i")]
    requests.append(Asked([*requests[1].prompt, 9, 10], requests[1].inputs))
    family = build_family(name, path, requests=[Asked([5], [])])
    stock = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    return family._replace(
        requests=requests, images=media, answers=[_answer(stock, request, media) for request in requests]
    )


def _with_media(name: str, chance: random.Random, images: dict[bytes, dict[str, Any]], kinds: str) -> Asked:
    """`kinds`: "i" for an image, "v" for a video."""
    prompt, inputs = _words(chance, chance.randint(2, 6)), []
    for kind in kinds:
        key = b"image %d" % len(images) + bytes(25)
        images[key], ids = image(name, chance) if kind == "i" else video(name, chance)
        inputs.append((key, len(prompt), len(ids)))
        prompt += ids + _words(chance, chance.randint(1, 5))
    return Asked(prompt, inputs)


def image(name: str, chance: random.Random) -> tuple[dict[str, torch.Tensor], list[int]]:
    """What a processor would make of an image, and what stands for it in a prompt."""
    if name == "llava":
        return {"pixel_values": torch.randn(1, 3, 8, 8)}, [IMAGE] * 4
    if name.startswith("qwen"):
        height, width = chance.choice([(4, 4), (4, 6), (2, 8)])
        pixels = torch.randn(height * width, 3 * 2 * 4 * 4)
        grid = torch.tensor([[1, height, width]])
        return {"pixel_values": pixels, "image_grid_thw": grid}, [BEFORE, *[IMAGE] * (height * width // 4), AFTER]
    tiles = chance.choice([1, 2])
    mask = torch.ones(1, tiles, 16, 16, dtype=torch.int64)
    return {"pixel_values": torch.randn(1, tiles, 3, 16, 16), "pixel_attention_mask": mask}, (
        [BEFORE, *[IMAGE] * 4] * tiles + [AFTER]
    )


def video(name: str, chance: random.Random) -> tuple[dict[str, Any], list[int]]:
    """What `VideoProcessor` would make of a video, and what stands for it in a prompt."""
    times = chance.choice([2, 3])
    about = {"tokens": 0, "timestamps": [float(at) for at in range(times)], "duration": float(times)}
    if not name.startswith("qwen"):
        ids = [id_ for _ in range(times) for id_ in [*_words(chance, 2), BEFORE, *[IMAGE] * 4, AFTER]]
        return {"pixel_values": torch.randn(1, times, 3, 16, 16), **about}, ids
    height, width = chance.choice([(4, 4), (2, 6)])
    grid = torch.tensor([[times, height, width]])
    about |= {"video_grid_thw": grid, "second_per_grid_ts": chance.choice([0.7, 1.0])}
    tokens = height * width // 4
    if name == "qwen3_vl":
        ids = [id_ for _ in range(times) for id_ in [*_words(chance, 2), BEFORE, *[VIDEO] * tokens, AFTER]]
    else:
        ids = [BEFORE, *[VIDEO] * times * tokens, AFTER]
    return {"pixel_values_videos": torch.randn(times * height * width, 3 * 2 * 4 * 4), **about}, ids


def _answer(stock: Any, request: Asked, images: dict[bytes, dict[str, Any]]) -> list[int]:
    inputs = [images[key] for key, _, _ in request.inputs]
    arguments: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(
        name for tensors in inputs for name in tensors if isinstance(tensors[name], torch.Tensor)
    ):
        own = [tensors[name] for tensors in inputs if name in tensors]
        arguments[name] = torch.cat(own, dim=1 if stock.config.model_type in ("idefics3", "smolvlm") else 0)
    ids = torch.tensor([request.prompt])
    if "image_grid_thw" in arguments or "video_grid_thw" in arguments:
        arguments["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    if stock.config.model_type == "qwen2_5_vl" and "video_grid_thw" in arguments:
        arguments["second_per_grid_ts"] = torch.tensor(
            [tensors["second_per_grid_ts"] for tensors in inputs if "video_grid_thw" in tensors]
        )
    if "pixel_attention_mask" in arguments and any("pixel_attention_mask" not in tensors for tensors in inputs):
        del arguments["pixel_attention_mask"]  # of ones: there is none for a video
    whole = stock.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **arguments,
    )
    answer: list[int] = whole[0, ids.shape[1] :].tolist()
    return answer


def must_be_greedy(path: Path, requests: Sequence[Asked], answers: Sequence[Sequence[int]]) -> None:
    """Each id is the likeliest of all after what came before it, as transformers computes it in one call for each
    request: but for rounding, it is what `generate` would answer, and found in less time."""
    stock = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        assert len(answer) == request.tokens, f"request {number}: {len(answer)} of {request.tokens} tokens"
        with torch.inference_mode():
            logits = stock(torch.tensor([[*request.prompt, *answer[:-1]]])).logits[0, len(request.prompt) - 1 :]
        less = logits.max(dim=-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        wrong = (less > ROUNDING * logits.std()).nonzero()[:, 0].tolist()
        assert not wrong, f"request {number}: prompt of {len(request.prompt)}, wrong ids at {wrong[:5]} of its answer"


class Shown:
    """An image that is opened."""

    def __init__(self, value: dict[str, torch.Tensor]) -> None:
        self._value = value

    def value(self, as_: str) -> dict[str, torch.Tensor]:
        assert as_ == "torch"
        return self._value


def opener(images: Mapping[bytes, dict[str, torch.Tensor]]) -> Callable[[Handle], Any]:
    return lambda item: Shown(images[item.key])


class Told(NamedTuple):
    """The results of requests: tokens, and failures."""

    answers: list[list[int]]
    reasons: dict[int, FinishReason]  # of failed requests
    cached_tokens: int  # that need not be computed, of all samples each time that they were admitted
    preemptions: int
    logprobs: list[list[float]]  # of the sampled ids, where they are asked for
    prompt_logprobs: dict[tuple[int, int], list[float]]  # by request and position: of the token, and the likeliest ones

    @property
    def failed(self) -> set[int]:
        return set(self.reasons)


def ask(
    device: ModelRunner,
    requests: Sequence[Asked],
    *,
    slots: int = 4,
    budget: int = 6,
    depth: int = 2,
    seed: int | None = None,
    logprobs: int | None = None,
    resumed: Sequence[list[int]] = (),
    params: Sequence[SamplingParams] = (),
    adapters: Sequence[bytes] = (b"",),
) -> Told:
    """Gives requests to the scheduler, one after the other, and its steps to the device, until all have ended.

    `resumed`: the ids of each request before it was resumed; the answers are the ids after these. `params` and
    `adapters`: of the requests, in turn.
    """
    schedule = BatchState(slots, device.blocks, device.block_size)
    config = SchedulerConfig(
        max_model_len=longest(requests),
        max_num_batched_tokens=budget,
        has_overlap=depth > 1,
        max_short_prompt=device.max_short_prompt,
    )
    scheduler, plan = Scheduler(schedule, config), StepBuilder(schedule)
    scheduler.adapter_errors |= dict.fromkeys(adapters, "")
    temperature = 0.0 if seed is None else 1.0
    params = params or [SamplingParams(ignore_eos=True, temperature=temperature, logprobs=logprobs)]
    answers: list[list[int]] = [[] for _ in requests]
    likely: list[list[float]] = [[] for _ in requests]
    flights: deque[Any] = deque()
    reasons: dict[int, FinishReason] = {}
    scores: dict[tuple[int, int], list[float]] = {}
    number, steps, cached_tokens = 0, itertools.count(1), 0
    while number < len(requests) or scheduler.open_requests or flights:
        if number < len(requests):
            submit = _submit(
                number, requests[number], params[number % len(params)], seed or 0, resumed[number] if resumed else []
            )
            scheduler.submit(msgspec.structs.replace(submit, adapter=adapters[number % len(adapters)]))
            number += 1
        while len(flights) < depth and scheduler.schedule(plan):
            step = plan.build(1, next(steps))
            cached_tokens += found_in_cache(step)
            schedule.apply(step)
            scheduler.on_sent(step)
            flights.append((step, device.launch(schedule, step), schedule.sampled, schedule.requests.copy()))
        if flights:
            step, flight, rows, numbers = flights.popleft()
            sampled = flight.result()
            done = build_result(step, sampled)
            for slot, why in done.failures():
                reasons.setdefault(int(numbers[slot]), why)
            for entry in sampled.prompt_logprobs:
                for at, row in enumerate(np.split(entry.logprobs.values, np.cumsum(entry.logprobs.counts)[:-1])):
                    scores[int(numbers[entry.number]), entry.position + at] = row.tolist()
            values = _sampled_logprobs(sampled, rows.size)
            for slot, token, value in zip(rows.tolist(), sampled.ids.tolist(), values, strict=True):
                answers[numbers[slot]].append(token)
                likely[numbers[slot]].append(value)
            scheduler.on_result(done)
    # One more was computed before its end was seen.
    ends = [request.tokens - (len(resumed[at]) if resumed else 0) for at, request in enumerate(requests)]
    answers = [answer[:end] for end, answer in zip(ends, answers, strict=True)]
    likely = [values[:end] for end, values in zip(ends, likely, strict=True)]
    return Told(answers, reasons, cached_tokens, scheduler.preemptions, likely, scores)


def _sampled_logprobs(sampled: Any, rows: int) -> list[float]:
    if sampled.logprobs is None:
        return [0.0] * rows
    logprobs = LogprobRows.read(sampled.logprobs, rows)
    starts = np.cumsum(logprobs.counts) - logprobs.counts
    values = np.zeros(rows)
    values[logprobs.counts > 0] = sampled.logprobs.values[starts[logprobs.counts > 0]]
    return values.tolist()


def _submit(number: int, request: Asked, params: SamplingParams, seed: int, resumed: list[int]) -> Submit:
    inputs = None
    if request.inputs:
        keys, positions, lengths = zip(*request.inputs, strict=True)
        counts = np.array([len(keys)], np.int32)
        items = tuple(Handle(key, b"", Buffer(b"")) for key in keys)
        inputs = Inputs(counts, items, np.array(positions, np.int32), np.array(lengths, np.int32))
    progress = Progress(np.array([len(resumed)], np.int32), np.array(resumed, np.int32)) if resumed else None
    priority = -(number % 3)  # so that some are put aside for others
    own = msgspec.structs.replace(params, max_tokens=request.tokens)
    return Submit(
        0, number, np.array(request.prompt, np.int32), own, priority, inputs=inputs, seed=seed, progress=progress
    )
