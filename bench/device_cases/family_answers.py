"""Answers of the engine on a device beside those of transformers: tiny models in float32, a real shape in bfloat16."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from bench.device_cases.device_run import Device
from bench.harness.targets import Target

SHIPPED = "the bundled model"
SHIPPED_TOKENS = 48
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

    recorder: Any = None
    if device.scale.device == "cuda" and is_recorded:
        from penstock.engine.worker.cuda.graphs import CudaGraphs

        recorder = CudaGraphs()
    with tempfile.TemporaryDirectory(dir=device.run.scratch) as folder:
        if name == SHIPPED:
            prompts = device.prompts(5, 1, 90, random.Random(2))
            words = [[id_ % 600 + 5 for id_ in prompt] for prompt in prompts]  # it has 619 ids
            family = models.shipped_family([models.Asked(word, [], SHIPPED_TOKENS) for word in words])
        else:
            family = models.build_family(name, Path(folder))
        runner = models.device(family, device=device.scale.device, recorder=recorder, dtype="float32")
        wrong = 0
        for budget in budgets:
            answers = models.ask(runner, family.requests, budget=budget).answers
            wrong += sum(ours != stock for ours, stock in zip(answers, family.answers, strict=True))
    device.record("family", name=name, requests=len(family.requests), budgets=budgets, wrong=wrong)
    device.targets.append(Target(f"{name}: answers unlike transformers'", 0, "", wrong))


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
