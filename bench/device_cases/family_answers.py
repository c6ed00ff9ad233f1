"""Answers of the engine on a device beside those of transformers: tiny models in float32, a real shape in bfloat16."""

from __future__ import annotations

import random
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from bench.device_cases.device_run import Device
from bench.harness.targets import Target

SHIPPED = "the bundled model"
SHIPPED_TOKENS = 48
MAX_ERROR = 1e-3  # of log-probabilities in float32
LEAST_NEAR = 0.95  # of the answers in bfloat16


def families(device: Device) -> None:
    """With graphs, several rows a step, chunks of prompts and preemptions."""
    for name in (SHIPPED, *device.scale.families):
        device.run.attempt(name, lambda name=name: one_family(device, name, budgets=(6, 16)))  # type: ignore[misc]


def steps(device: Device) -> None:
    """A few steps without graphs, for a tool that watches each access to memory."""
    one_family(device, "llama", budgets=(16,), is_recorded=False)


def one_family(device: Device, name: str, *, budgets: tuple[int, ...], is_recorded: bool = True) -> None:
    from tests.support import models  # imports pytest, torch and transformers

    with tempfile.TemporaryDirectory(dir=device.run.scratch) as folder:
        if name == SHIPPED:
            prompts = device.prompts(5, 1, 90, random.Random(2))
            words = [[id_ % 600 + 5 for id_ in prompt] for prompt in prompts]  # it has 619 ids
            family = models.shipped_family([models.Asked(word, [], SHIPPED_TOKENS) for word in words])
        else:
            family = models.build_family(name, Path(folder))
        graphs = recorder(device) if is_recorded else None
        runner = models.device(family, device=device.scale.device, recorder=graphs, dtype="float32")
        wrong = 0
        for budget in budgets:
            answers = models.ask(runner, family.requests, budget=budget).answers
            wrong += sum(ours != stock for ours, stock in zip(answers, family.answers, strict=True))
    device.record("family", name=name, requests=len(family.requests), budgets=budgets, wrong=wrong)
    device.targets.append(Target(f"{name}: answers unlike transformers'", 0, "", wrong))


def scores(device: Device) -> None:
    """Log-probabilities of prompts, and bad words, which are computed outside of graphs: as on the CPU."""
    from penstock.engine.protocol.messages import SamplingParams
    from tests.support import models

    greedy = SamplingParams(ignore_eos=True, temperature=0, prompt_logprobs=2)
    words = SamplingParams(ignore_eos=True, temperature=0, bad_words_ids=tuple((id_,) for id_ in range(3, 60)))
    for name in device.scale.scored:
        with tempfile.TemporaryDirectory(dir=device.run.scratch) as folder:
            family = models.build_family(name, Path(folder))
            requests = [request for request in family.requests if not request.inputs]
            options: dict[str, Any] = {"params": [greedy, words], "budget": 16}
            expected = models.ask(models.device(family, dtype="float32"), requests, **options)
            runner = models.device(family, device=device.scale.device, recorder=recorder(device), dtype="float32")
            result = models.ask(runner, requests, **options)
        worst = max(
            abs(own - other)
            for place, values in expected.prompt_logprobs.items()
            for own, other in zip(result.prompt_logprobs[place], values, strict=True)
        )
        wrong = sum(own != other for own, other in zip(result.answers, expected.answers, strict=True))
        device.record("scores", name=name, positions=len(expected.prompt_logprobs), worst=worst, wrong=wrong)
        device.targets.append(Target(f"{name}: answers with bad words unlike the CPU's", 0, "", wrong))
        device.targets.append(Target(f"{name}: log-probabilities of prompts, from the CPU's", MAX_ERROR, "", worst))


def waits(device: Device) -> None:
    """Times that the host waits for the device in steps with images, as torch counts them."""
    from penstock.engine.worker.model_runner import ModelRunner
    from tests.support import models

    launch: Any = ModelRunner.launch
    counted: list[str] = []

    def watched(*arguments: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            set_sync_mode(device, "warn")
            try:
                return launch(*arguments)
            finally:
                set_sync_mode(device, "default")
                counted.extend(str(each.message) for each in caught if "synchronizing" in str(each.message))

    for name in device.scale.vision:
        counted.clear()
        with tempfile.TemporaryDirectory(dir=device.run.scratch) as folder:
            family = models.build_family(name, Path(folder))
            runner = models.device(family, device=device.scale.device, recorder=recorder(device), dtype="float32")
            with mock.patch.object(ModelRunner, "launch", watched):
                models.ask(runner, family.requests, budget=16)
        images = sum(len(request.inputs) for request in family.requests)
        device.record("waits", name=name, images=images, waits=len(counted), first=counted[:3])
        device.targets.append(Target(f"{name}: waits for the device in steps with images", 0, "", len(counted)))


def set_sync_mode(device: Device, mode: str) -> None:
    import torch

    if device.scale.device == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def recorder(device: Device) -> Any:
    if device.scale.device != "cuda":
        return None
    from penstock.engine.worker.cuda.graphs import CudaGraphs

    return CudaGraphs()


def bfloat16(device: Device) -> None:
    """Random weights give near ties. An id is right if its logit in float32 is as near to the best as transformers'
    own logits in bfloat16 are to those in float32."""
    scale = device.scale
    prompts = device.prompts(scale.near_prompts, 16, 200, random.Random(1))
    params = {"max_tokens": scale.near_tokens, "ignore_eos": True, "temperature": 0.0}
    answers, _ = device.generate([{"ids": prompt, **params} for prompt in prompts])

    import torch

    rounded, precise = stock_model(device, torch.bfloat16), stock_model(device, torch.float32)
    same = near = ids = 0
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(answer) != scale.near_tokens:
            raise RuntimeError(f"expected {scale.near_tokens} tokens of an answer, got {len(answer)}")
        tokens = torch.tensor([[*prompt, *answer[:-1]]], device=scale.device)
        chosen = torch.tensor(answer, device=scale.device)
        with torch.inference_mode():
            logits, exact = (model(tokens).logits[0, len(prompt) - 1 :].float() for model in (rounded, precise))
        less = exact.max(dim=-1).values - exact.gather(1, chosen[:, None])[:, 0]
        rounding = 2 * (logits - exact).abs().amax(dim=-1)
        agreeing = logits.argmax(dim=-1) == chosen
        same, near = same + int(agreeing.all()), near + int((less <= rounding).all())
        ids, worst = ids + int(agreeing.sum()), max(worst, float((less / rounding).max()))
    count = len(prompts)
    device.record(
        "bfloat16", f"{same} of {count} prompts as transformers', {ids} of {count * scale.near_tokens} ids",
        prompts=count, same=same / count, near=near / count, same_ids=ids / count / scale.near_tokens,
        worst_of_rounding=worst,
    )  # fmt: skip
    name = f"bfloat16: prompts with {scale.near_tokens} tokens as near to the best as transformers'"
    device.targets.append(Target(name, LEAST_NEAR, "", near / count, is_least=True))


def stock_model(device: Device, dtype: Any) -> Any:
    import transformers

    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(device.model(), dtype=dtype, attn_implementation="sdpa")
    return model.to(device.scale.device).eval()
