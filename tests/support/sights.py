"""Tiny models that see, as they lie in folders: parameters, image processor, tokenizer and chat template; and what
transformers answers with them to a conversation."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.models import AFTER, BEFORE, IMAGE, VIDEO, VOCABULARY, stock_of
from tests.unit.engine.media.test_image_processor import processor_in

TILED = ("idefics3", "smolvlm")
SPECIAL = {
    "<pad>": 0,
    "<s>": 1,
    "</s>": 2,
    "<global-img>": 119,
    "<row_1_col_1>": 120,
    "<row_1_col_2>": 121,
    "<row_2_col_1>": 122,
    "<row_2_col_2>": 123,
    "<|vision_start|>": BEFORE,
    "<|vision_end|>": AFTER,
    "<fake_token_around_image>": 126,
}
# As the models of these families write theirs: with texts or parts, with parts only, and with images first.
TEMPLATES = {
    "qwen2_vl": (
        "{% for one in messages %}{{ one.role[0] }}:{% if one.content is string %}{{ one.content }}{% else %}"
        "{% for part in one.content %}{% if part.type == 'image' or 'image_url' in part %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' or 'video' in part %}"
        "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}"
        "{% endif %};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    ),
    "idefics3": (
        "{{ bos_token }}{% for one in messages %}{{ one.role[0] }}:{% for part in one.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<image>"
        "{% elif part.type == 'video' %}<video>{% endif %}{% endfor %};"
        "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    ),
    "llava": (
        "{% for one in messages %}{{ one.role[0] }}:"
        "{% for part in one.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
        "{% for part in one.content | selectattr('type', 'equalto', 'text') %}{{ part.text + ' ' }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    ),
}


# Of a video processor: frames of a few patches.
VIDEOS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 512}},
    "qwen2_5_vl": {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 512}},
    "qwen3_vl": {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 2048}},
    "smolvlm": {
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
        "video_sampling": {"fps": 1, "max_frames": 4, "video_size": {"longest_edge": 32}},
    },
}


def video_processor_in(path: Path, name: str) -> None:
    if name in VIDEOS:
        (path / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS[name]))


def placeholder(name: str) -> str:
    return "<|image_pad|>" if name.startswith("qwen") else "<image>"


def tokenizer_in(path: Path, name: str) -> Tokenizer:
    """One id for each character that can be printed and a line's end, then pairs, then what is special."""
    ids = {token: id for token, id in SPECIAL.items() if id < 3}
    for character in ["Ġ", "Ċ", *map(chr, range(0x21, 0x7F))]:
        ids[character] = len(ids)
    pairs = [("a", character) for character in "abcdefghijklmnopqrst"]
    for first, second in pairs:
        ids[first + second] = len(ids)
    special = {**SPECIAL, placeholder(name): IMAGE}
    if name.startswith("qwen"):
        special["<|video_pad|>"] = VIDEO
    used = set(ids.values()) | set(special.values())
    ids |= special
    ids |= {f"<unused_{id}>": id for id in range(VOCABULARY) if id not in used}
    tokenizer = Tokenizer(models.BPE(ids, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    assert tokenizer.token_to_id(placeholder(name)) == IMAGE and tokenizer.get_vocab_size() == VOCABULARY
    tokenizer.save(str(path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    kind["chat_template"] = TEMPLATES["idefics3" if name in TILED else "qwen2_vl" if name.startswith("qwen") else name]
    (path / "tokenizer_config.json").write_text(json.dumps(kind))
    return tokenizer


class OfImages(transformers.Qwen2VLProcessor):
    """The one for videos wants torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.image_token_id = placeholder("qwen2_vl"), IMAGE
        self.video_token, self.video_token_id = "<|video_pad|>", -1
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class Sight:
    """A model in a folder, and transformers' own view of it."""

    def __init__(self, name: str, path: Path) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.name = name
        self.path = path
        self.stock = stock_of(name)
        self.stock.save_pretrained(path)
        processor_in(path, name)
        video_processor_in(path, name)
        self.tokenizer = tokenizer_in(path, name)
        self.processor = self._processor()

    def _processor(self) -> Any:
        fast = transformers.AutoTokenizer.from_pretrained(self.path)
        of_any_kind: Any = transformers.AutoImageProcessor
        images = of_any_kind.from_pretrained(self.path, backend="pil")
        if self.name == "llava":
            tower = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
            return transformers.LlavaProcessor(images, fast, chat_template=fast.chat_template, **tower)
        if self.name in TILED:
            return transformers.Idefics3Processor(images, fast, image_seq_len=4, chat_template=fast.chat_template)
        return OfImages(images, fast, chat_template=fast.chat_template)

    def inputs(self, messages: Sequence[dict[str, Any]], raws: Sequence[bytes]) -> dict[str, Any]:
        """What transformers makes of a conversation and its images. Contents are lists of parts."""
        pictures = [Image.open(io.BytesIO(raw)).convert("RGB") for raw in raws]
        prompt = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return dict(self.processor(text=prompt, images=pictures or None, add_special_tokens=False, return_tensors="pt"))

    def answer(self, messages: Sequence[dict[str, Any]], raws: Sequence[bytes], count: int) -> tuple[int, str]:
        """Greedy: the length of the prompt, and the text."""
        arguments = self.inputs(messages, raws)
        arguments.pop("rows", None), arguments.pop("cols", None)
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        whole = self.stock.generate(**arguments, max_new_tokens=count, **options)
        length = arguments["input_ids"].shape[1]
        return length, self.tokenizer.decode(whole[0, length:].tolist(), skip_special_tokens=False)
