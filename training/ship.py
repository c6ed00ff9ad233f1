"""Writes what was trained into a folder as `transformers` loads it, and asks what lies there now about new pictures.

python training/ship.py OUT FOLDER [--count 300]     OUT is where train.py keeps its state
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scenes import scene
from talk import CAPTION, CHAT, caption, question
from train import END, IMAGE, PAD, PATCH, SIDE, SPECIAL, TEMPLATE, model, tokenizer
from transformers import (
    AutoProcessor,
    GenerationConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    SiglipImageProcessor,
)

DRAWN = (SIDE, 2 * SIDE, 300)  # sides of the pictures that are asked about; they are made smaller as anybody's are


def ship(state: Path, folder: Path) -> None:
    """In bfloat16, which is half as long; what computes with them says the configuration: float32."""
    tokens = tokenizer()
    trained = model(len(tokens))
    trained.load_state_dict(torch.load(state)["model"])
    trained.generation_config = GenerationConfig(do_sample=False, eos_token_id=END, pad_token_id=PAD)
    trained.to(torch.bfloat16).save_pretrained(folder)
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
    ship(given.out / "state.pt", given.folder)
    for file in sorted(given.folder.iterdir()):
        print(f"{file.stat().st_size:>9,} {file.name}")
    print(evaluate(given.folder, given.count))


if __name__ == "__main__":
    main()
