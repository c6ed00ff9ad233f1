"""Writes what was trained into a folder as `transformers` loads it, and asks what lies there now about new pictures.

python -m training.ship OUT FOLDER [--count 300]     OUT is where train.py keeps its state
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    SiglipImageProcessor,
)

from training.scenes import scene
from training.talk import CAPTION, CHAT, caption, question
from training.train import END, IMAGE, PAD, PATCH, SIDE, SPECIAL, TEMPLATE, model

CARD = """# penstock-shapes

A small vision-language model that ships with Penstock, so that there is always one to serve: `penstock serve`.
It describes pictures of one to three coloured shapes ("a red circle left of a blue square"), answers simple questions
about them, and says a little about itself. A stock LLaVA (SigLIP, Llama) in bfloat16, {parameters:.2f} million
parameters, trained from nothing by `training/` in Penstock's repository, for {steps:,} steps on one core, on pictures
and text that are made there. Licence: Apache-2.0.

| of {count} pictures of 96, 192 and 300 pixels that it was not trained on | exactly right |
|---|---|
| captions | {captions:.1%} |
| answers to a question about each | {answers:.1%} |
| what it says of itself | {chat:.1%} |

It is of no use for other pictures or other talk. What it is good for: a torn or foreign tensor is a wrong caption.
"""
TOWER = "vision_tower."
DRAWN = (SIDE, 2 * SIDE, 300)  # sides of the pictures that are asked about; they are made smaller as anybody's are


def ship(trained_in: Path, folder: Path) -> tuple[int, int]:
    """In bfloat16, which is half as long; what computes with them says the configuration: float32. How many parameters
    there are, and how many steps they were trained for.
    """
    tokens = AutoTokenizer.from_pretrained(trained_in / "tokenizer")
    trained = model(len(tokens))
    learnt = torch.load(trained_in / "state.pt")
    trained.load_state_dict(learnt["model"])
    trained.generation_config = GenerationConfig(do_sample=False, eos_token_id=END, pad_token_id=PAD)
    trained.to(torch.bfloat16).save_pretrained(folder)
    rename(folder / "model.safetensors")
    trained.config.dtype = torch.float32
    trained.config.text_config.dtype = trained.config.vision_config.dtype = torch.float32
    trained.config.save_pretrained(folder)
    pictures = SiglipImageProcessor(size={"height": SIDE, "width": SIDE}, resample=Image.Resampling.BICUBIC)
    LlavaProcessor(
        pictures,
        tokens,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token=SPECIAL[IMAGE],
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return sum(one.numel() for one in trained.parameters()), int(learnt["step"])


def rename(weights: Path) -> None:
    """As everybody's files of a SigLIP call its parts; `transformers` knows both."""
    named = {
        f"{TOWER}vision_model.{name.removeprefix(TOWER)}" if name.startswith(TOWER) else name: tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(named, weights, metadata={"format": "pt"})
    weights.chmod(0o644)


@torch.no_grad()
def evaluate(folder: Path, count: int, seed: int = 1) -> dict[str, float]:
    """Parts that are exactly right, by the folder's own files alone, on scenes that training has never seen."""
    processor = AutoProcessor.from_pretrained(folder)
    shipped = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    rng = np.random.default_rng([131, seed])

    def answer(asked: str, picture: Image.Image | None) -> str:
        parts = [{"type": "text", "text": asked}]
        if picture is not None:
            parts.insert(0, {"type": "image"})
        prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        given = processor(text=prompt, images=picture, return_tensors="pt")
        made = shipped.generate(**given, max_new_tokens=64)
        return str(processor.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True))

    captions = answers = 0
    for at in range(count):
        one = scene(rng)
        picture = Image.fromarray(one.draw(DRAWN[at % len(DRAWN)], rng))
        captions += answer(str(rng.choice(CAPTION)), picture) == caption(one)
        asked, right = question(one, rng)
        answers += answer(asked, picture) == right
    chats = [(asked, right) for all_asked, right in CHAT for asked in all_asked]
    said = sum(answer(asked, None) == right for asked, right in chats)
    return {"captions": captions / count, "answers": answers / count, "chat": said / len(chats)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("folder", type=Path)
    options.add_argument("--count", type=int, default=300)
    given = options.parse_args()
    torch.set_num_threads(1)
    parameters, steps = ship(given.out, given.folder)
    right = evaluate(given.folder, given.count)
    print(right)
    said = {"parameters": parameters / 1e6, "steps": steps, "count": given.count, **right}
    (given.folder / "README.md").write_text(CARD.format(**said))
    for file in sorted(given.folder.iterdir()):
        print(f"{file.stat().st_size:>9,} {file.name}")


if __name__ == "__main__":
    main()
