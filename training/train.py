"""Trains the small vision-language model that ships: from nothing, on pictures and text made here, on one core.

    python training/train.py OUT [--hours 1.5] [--seed 0]     a folder that `transformers` loads
    python training/train.py OUT --evaluate                   exact captions, answers and chat, on scenes never seen

First the vision tower learns to say, patch by patch, what covers it: end to end alone, captions stay wrong for a long
time. Then everything learns to talk, and that first task stays with a small weight. Stops at its hour and goes on
from OUT/state.pt if that is there.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scenes import COLOURS, SHAPES, scene
from talk import CAPTION, CHAT, caption, chat, conversation, question
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

SIDE, PATCH = 96, 12
CELLS = SIDE // PATCH
KINDS = 1 + len(COLOURS) * len(SHAPES)
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<image>")
PAD, END, USER, ASSISTANT, IMAGE = range(len(SPECIAL))
UNHEARD = -100  # a label that is not learnt
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def texts() -> list[str]:
    rng = np.random.default_rng(1)
    made = [text for _ in range(3000) for turn in conversation(scene(rng), rng) for text in turn]
    return made + [text for asked, answer in CHAT for text in (*asked, answer) for _ in range(20)]


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts(), trainers.BpeTrainer(vocab_size=768, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        extra_special_tokens={"image_token": SPECIAL[IMAGE]},
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def model(vocabulary: int) -> LlavaForConditionalGeneration:
    vision = SiglipVisionConfig(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=CELLS * CELLS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


class Talk:
    """Makes batches."""

    def __init__(self, tokens: PreTrainedTokenizerFast, rng: np.random.Generator) -> None:
        self.tokens = tokens
        self.rng = rng
        self.known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        if text not in self.known:
            self.known[text] = self.tokens.encode(text, add_special_tokens=False)
        return self.known[text]

    def prompt(self, asked: str, has_picture: bool) -> list[int]:
        return [USER, *([IMAGE] * (CELLS * CELLS if has_picture else 0)), *self.ids(asked), END, ASSISTANT]

    def pictures(self, count: int) -> tuple[list[Any], torch.Tensor, torch.Tensor]:
        scenes = [scene(self.rng) for _ in range(count)]
        pixels = np.stack([one.draw(SIDE, self.rng) for one in scenes])
        labels = np.stack([one.cover(CELLS) for one in scenes])
        return scenes, normal(pixels), torch.from_numpy(labels.reshape(count, 2, -1))

    def batch(self, count: int) -> dict[str, torch.Tensor]:
        scenes, pixels, labels = self.pictures(count)
        talks = [(conversation(one, self.rng), True) for one in scenes]
        talks += [(chat(self.rng), False) for _ in range(max(1, count // 10))]
        rows, heard = [], []
        for turns, has_picture in talks:
            row: list[int] = []
            hear: list[int] = []
            for at, (asked, answer) in enumerate(turns):
                prompt, answered = self.prompt(asked, has_picture and at == 0), [*self.ids(answer), END]
                row += prompt + answered
                hear += [UNHEARD] * len(prompt) + answered
            rows.append(row)
            heard.append(hear)
        longest = max(map(len, rows))
        ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
        return {
            "input_ids": ids,
            "attention_mask": (ids != PAD).long(),
            "labels": torch.tensor([hear + [UNHEARD] * (longest - len(hear)) for hear in heard]),
            "pixel_values": pixels,
            "patches": labels,
        }


def normal(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


class Trainer:
    def __init__(self, out: Path, seed: int, hours: float) -> None:
        torch.manual_seed(seed)
        self.out, self.hours = out, hours
        self.tokens = tokenizer()
        self.model = model(len(self.tokens))
        self.head = torch.nn.Linear(192, 2 * KINDS)  # of the first task; it does not ship
        self.talk = Talk(self.tokens, np.random.default_rng(seed + 100))
        self.weights = [*self.model.parameters(), *self.head.parameters()]
        matrices = [one for one in self.weights if one.ndim > 1]
        others = [one for one in self.weights if one.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.98)
        )
        self.step, self.spent = 0, 0.0
        if (out / "state.pt").exists():
            state = torch.load(out / "state.pt")
            self.model.load_state_dict(state["model"])
            self.head.load_state_dict(state["head"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.spent = state["step"], state["spent"]
            self.talk.rng = np.random.default_rng([seed + 100, self.step])

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        state = {"model": self.model.state_dict(), "head": self.head.state_dict()}
        state |= {"optimizer": self.optimizer.state_dict(), "step": self.step, "spent": self.spent}
        torch.save(state, self.out / "state.new")
        (self.out / "state.new").rename(self.out / "state.pt")

    def patches(self, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
        seen = self.model.model.vision_tower(pixels).last_hidden_state
        scores = self.head(seen).unflatten(-1, (2, KINDS)).movedim(2, 1).movedim(-1, 1)
        loss = torch.nn.functional.cross_entropy(scores, labels, reduction="none")
        weight = torch.where(labels > 0, 4.0, 1.0)
        there = labels > 0
        return (loss * weight).sum() / weight.sum(), float((scores.argmax(1) == labels)[there].float().mean())

    def run(self, first: int, batch: int) -> None:
        began = time.monotonic() - self.spent
        saved = time.monotonic()
        seen: list[tuple[float, float, float]] = []
        while True:
            self.spent = time.monotonic() - began
            part = self.spent / (self.hours * 3600)
            if part >= 1:
                break
            warm = min(1.0, (self.step + 1) / 200)
            rate = 1e-3 * warm * (1.0 if part < 0.6 else max(0.02, (1 - part) / 0.4))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            if self.step < first:
                _, pixels, labels = self.talk.pictures(batch)
                loss, right = self.patches(pixels, labels)
                said = 0.0
            else:
                made = self.talk.batch(batch)
                labels = made.pop("patches")
                spoken = self.model(**made).loss
                looked, right = self.patches(made["pixel_values"], labels)
                loss, said = spoken + 0.2 * looked, float(spoken.detach())
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
            self.optimizer.step()
            self.step += 1
            seen.append((float(loss.detach()), said, right))
            if self.step % 50 == 0:
                means = np.mean(seen, 0)
                seen.clear()
                print(
                    f"{self.spent:6.0f} s step {self.step:5} loss {means[0]:.4f} said {means[1]:.4f} "
                    f"patches {means[2]:.3f} rate {rate:.1e}",
                    flush=True,
                )
            if self.step % 400 == 0 and self.step > first:
                print("       ", evaluate(self.model, self.tokens, 60, seed=self.step), flush=True)
            if time.monotonic() - saved > 300:
                saved = time.monotonic()
                self.save()
        self.save()


@torch.no_grad()
def evaluate(
    trained: LlavaForConditionalGeneration, tokens: PreTrainedTokenizerFast, count: int, seed: int
) -> dict[str, float]:
    """Parts that are exactly right, on scenes of other seeds than those of training."""
    rng = np.random.default_rng([977, seed])
    talk = Talk(tokens, rng)
    trained.eval()

    def answer(asked: str, pixels: torch.Tensor | None) -> str:
        ids = torch.tensor([talk.prompt(asked, pixels is not None)])
        made = trained.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, do_sample=False, max_new_tokens=48,
            eos_token_id=END, pad_token_id=PAD,
        )  # fmt: skip
        return str(tokens.decode(made[0, ids.shape[1] :], skip_special_tokens=True))

    captions = answers = 0
    for _ in range(count):
        one = scene(rng)
        pixels = normal(one.draw(SIDE, rng)[None])
        captions += answer(str(rng.choice(CAPTION)), pixels) == caption(one)
        asked, right = question(one, rng)
        answers += answer(asked, pixels) == right
    chats = [(asked, right) for all_asked, right in CHAT for asked in all_asked]
    chats = [chats[at] for at in rng.permutation(len(chats))[: max(10, count // 6)]]
    said = sum(answer(asked, None) == right for asked, right in chats)
    trained.train()
    return {"captions": captions / count, "answers": answers / count, "chat": said / len(chats)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("--hours", type=float, default=1.5)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--batch", type=int, default=48)
    options.add_argument("--first", type=int, default=1200, help="steps of the first task alone")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--evaluate", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    trainer = Trainer(given.out, given.seed, given.hours)
    if not given.evaluate:
        parameters = sum(one.numel() for one in trainer.model.parameters())
        print(f"{parameters / 1e6:.2f} million parameters, {len(trainer.tokens)} tokens", flush=True)
        trainer.run(given.first, given.batch)
    print(evaluate(trainer.model, trainer.tokens, 300, seed=12345))


if __name__ == "__main__":
    main()
