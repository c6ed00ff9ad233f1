"""Trains the small vision-language model that ships: from nothing, on pictures and text made here, on one core.

    python -m training.train OUT [--hours 1.5] [--seed 0]     a folder that `transformers` loads
    python -m training.train OUT --evaluate                   exact captions, answers and chat, on scenes never seen

First the vision tower learns to say, patch by patch, what covers it: end to end alone, captions stay wrong for a long
time. Then everything learns to talk, and that first task stays with a small weight. Stops at its hour and goes on
from OUT/state.pt if that is there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

from training.scenes import COLOURS, MAX_SHAPES, SHAPES, Scene, scene
from training.talk import CAPTION, CHAT, caption, chat, conversation, question

SIDE, PATCH = 96, 12
CELLS = SIDE // PATCH
KINDS = 1 + len(COLOURS) * len(SHAPES)
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<image>")
PAD, END, USER, ASSISTANT, IMAGE = range(len(SPECIAL))
LOOKING = 0.4  # the weight of the first task, beside talking
SHARES = (0.15, 0.45, 0.4)  # of the pictures: with one shape, two, three; one alone is learnt soon
FALLING = 0.85  # the part of the time in which it learns ever more slowly
POOLED = 8  # batches that are made together
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
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,  # one that other servers have kernels for
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


class Batch(NamedTuple):
    """Conversations about pictures, one a picture, and chats without."""

    ids: torch.Tensor
    heard: torch.Tensor
    pixels: torch.Tensor
    patches: torch.Tensor
    chat_ids: torch.Tensor
    chat_heard: torch.Tensor


def padded(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(ids) for ids, _ in rows)
    return (
        torch.tensor([ids + [PAD] * (longest - len(ids)) for ids, _ in rows]),
        torch.tensor([heard + [UNHEARD] * (longest - len(heard)) for _, heard in rows]),
    )


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

    def pictures(self, scenes: list[Scene]) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = np.stack([one.draw(SIDE, self.rng) for one in scenes])
        labels = np.stack([one.cover(CELLS) for one in scenes])
        return normal(pixels), torch.from_numpy(labels.reshape(len(scenes), 2, -1))

    def batches(self, count: int) -> Iterator[Batch]:
        """Without end. Rows of about one length come together: padding costs as much as what is learnt."""
        while True:
            many = self.rng.choice(np.arange(1, MAX_SHAPES + 1), size=POOLED * count, p=SHARES)
            scenes = [scene(self.rng, int(one)) for one in many]
            rows = sorted(
                ((self.row(conversation(one, self.rng), True), one) for one in scenes), key=lambda row: len(row[0][0])
            )
            chats = [self.row(chat(self.rng), False) for _ in range(max(1, count // 10) * POOLED)]
            for at in self.rng.permutation(POOLED):
                part = rows[at * count : (at + 1) * count]
                pixels, patches = self.pictures([one for _, one in part])
                yield Batch(*padded([row for row, _ in part]), pixels, patches, *padded(chats[at::POOLED]))

    def row(self, turns: list[tuple[str, str]], has_picture: bool) -> tuple[list[int], list[int]]:
        """Ids, and the same where they are to be learnt."""
        ids: list[int] = []
        heard: list[int] = []
        for at, (asked, answer) in enumerate(turns):
            prompt, answered = self.prompt(asked, has_picture and at == 0), [*self.ids(answer), END]
            ids += prompt + answered
            heard += [UNHEARD] * len(prompt) + answered
        return ids, heard


def normal(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


class Trainer:
    def __init__(self, out: Path, seed: int, hours: float) -> None:
        torch.manual_seed(seed)
        self.out, self.hours = out, hours
        kept = out / "tokenizer"  # what is said of pictures makes the ids, and must not change them afterwards
        self.tokens = AutoTokenizer.from_pretrained(kept) if kept.exists() else tokenizer()
        self.tokens.save_pretrained(kept)
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

    def spoken(self, ids: torch.Tensor, heard: torch.Tensor, features: torch.Tensor | None) -> torch.Tensor:
        """The sum of the losses of what is to be learnt: scores are made for that alone."""
        language = self.model.model.language_model
        embedded = language.get_input_embeddings()(ids)
        if features is not None:
            embedded = embedded.masked_scatter((ids == IMAGE)[..., None], features)
        known = language(inputs_embeds=embedded, attention_mask=(ids != PAD).long(), use_cache=False).last_hidden_state
        is_heard = heard[:, 1:] != UNHEARD
        scores = self.model.lm_head(known[:, :-1][is_heard])
        return torch.nn.functional.cross_entropy(scores, heard[:, 1:][is_heard], reduction="sum")

    def patches(self, seen: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
        scores = self.head(seen).unflatten(-1, (2, KINDS)).movedim(2, 1).movedim(-1, 1)
        loss = torch.nn.functional.cross_entropy(scores, labels, reduction="none")
        weight = torch.where(labels > 0, 4.0, 1.0)
        there = labels > 0
        return (loss * weight).sum() / weight.sum(), float((scores.argmax(1) == labels)[there].float().mean())

    def run(self, first: int, batch: int) -> None:
        began = time.monotonic() - self.spent
        saved = time.monotonic()
        seen: list[tuple[float, float, float]] = []
        batches = self.talk.batches(batch)
        while True:
            self.spent = time.monotonic() - began
            part = self.spent / (self.hours * 3600)
            if part >= 1:
                break
            warm = min(1.0, (self.step - (first if self.step >= first else 0) + 1) / 200)
            rate = 1e-3 * warm * min(1.0, max(0.02, (1 - part) / FALLING))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            made = next(batches)
            looked = self.model.model.vision_tower(made.pixels, output_hidden_states=self.step >= first)
            loss, right = self.patches(looked.last_hidden_state, made.patches)
            said = 0.0
            if self.step >= first:
                features = self.model.model.multi_modal_projector(looked.hidden_states[-1])
                spoken = self.spoken(made.ids, made.heard, features) + self.spoken(made.chat_ids, made.chat_heard, None)
                spoken = spoken / ((made.heard != UNHEARD).sum() + (made.chat_heard != UNHEARD).sum())
                loss, said = spoken + LOOKING * loss, float(spoken.detach())
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
        picture = {} if pixels is None else {"pixel_values": pixels}
        made = trained.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48, eos_token_id=END,
            pad_token_id=PAD, **picture,
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
