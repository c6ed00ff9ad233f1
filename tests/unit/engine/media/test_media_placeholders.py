"""What a prompt becomes by its images and videos, beside what transformers writes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL.Image")

from transformers.models.smolvlm import processing_smolvlm  # noqa: E402
from transformers.video_utils import VideoMetadata  # noqa: E402

from penstock.codec.buffer import Buffer  # noqa: E402
from penstock.engine.media.image_processor import ImageProcessor, ProcessedImage  # noqa: E402
from penstock.engine.media.media_placeholders import MediaPlaceholders, spell  # noqa: E402
from penstock.engine.media.video_processor import ProcessedVideo  # noqa: E402
from penstock.engine.media.video_settings import VideoInfo, VideoPlan, VideoSettings  # noqa: E402
from penstock.engine.model_dir import VIDEO  # noqa: E402
from penstock.tensor import Handle  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.models import stock_of  # noqa: E402
from tests.support.sights import placeholder, tokenizer_in, video_processor_in  # noqa: E402
from tests.unit.engine.media.test_image_processor import processor_in  # noqa: E402

INFOS = [VideoInfo(40, 10.0, 40, 30), VideoInfo(2000, 25.0, 20, 60)]
TEXTS = {"qwen2_vl": "<|vision_start|><|video_pad|><|vision_end|>", "smolvlm": "<video>"}


class Scene:
    def __init__(self, name: str, path: Path) -> None:
        stock_of(name).config.save_pretrained(path)
        processor_in(path, name)
        video_processor_in(path, name)
        self.name = name
        self.tokenizer = tokenizer_in(path, name)
        self.images = ImageProcessor(path, None, threads=1)
        self.settings = VideoSettings.from_model(path)
        self.places = MediaPlaceholders(self.tokenizer, self.images, self.settings)
        self.plans = [self.settings.plan(info) for info in INFOS]
        self.video_token = "<video>" if name == "smolvlm" else "<|video_pad|>"
        self.video = TEXTS["smolvlm" if name == "smolvlm" else "qwen2_vl"]
        self.image = placeholder(name) if name == "smolvlm" else f"<|vision_start|>{placeholder(name)}<|vision_end|>"

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(self.places.prepare(text), add_special_tokens=False).ids
        return ids


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    scene = Scene(request.param, tmp_path)
    yield scene
    scene.images.close()


def item(key: int) -> Handle:
    return Handle(bytes([key]) * 32, b"", Buffer(b""))


def processed(plan: VideoPlan, key: int) -> ProcessedVideo:
    return ProcessedVideo(item(key), plan.tokens, plan.timestamps, plan.duration)


def text_of_transformers(scene: Scene, plan: VideoPlan, info: VideoInfo, monkeypatch: pytest.MonkeyPatch) -> str:
    """What its processor writes for a video."""
    metadata = VideoMetadata(total_num_frames=info.frames, fps=info.fps, duration=info.duration)
    metadata.frames_indices = list(plan.indices)
    if scene.name == "smolvlm":
        monkeypatch.setattr(processing_smolvlm, "num2words", spell)
        kind: Any = transformers.SmolVLMProcessor
        inputs = {"pixel_values": torch.zeros(1, len(plan.indices), 3, 1, 1), "video_metadata": [metadata]}
    else:
        kind = transformers.Qwen3VLProcessor if scene.name == "qwen3_vl" else transformers.Qwen2VLProcessor
        patch = scene.settings.patch_size
        grid = torch.tensor([[plan.groups, plan.height // patch, plan.width // patch]])
        inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
    processor = object.__new__(kind)  # without torchvision it cannot be made
    processor.video_processor = scene.settings
    processor.image_seq_len, processor.image_token = scene.settings.frame_tokens, "<image>"
    processor.fake_image_token, processor.global_image_token = "<fake_token_around_image>", "<global-img>"
    processor.video_token, processor.vision_start_token = "<|video_pad|>", "<|vision_start|>"
    processor.vision_end_token = "<|vision_end|>"
    return str(processor.replace_video_token(inputs, 0))


@pytest.mark.parametrize("scene", VIDEO, indirect=True)
def test_video_prompts_equal_those_of_transformers(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [
        scene.video.replace(scene.video_token, text_of_transformers(scene, plan, info, monkeypatch))
        for plan, info in zip(scene.plans, INFOS, strict=True)
    ]
    tokens = placeholder(scene.name) * 4
    tiles = f"<fake_token_around_image><global-img>{tokens}<fake_token_around_image>"
    image = tiles if scene.name == "smolvlm" else f"<|vision_start|>{tokens}<|vision_end|>"
    ids = scene.ids(f"u: look at{scene.video}ab {scene.image}\nand{scene.video}. what?\na:")
    scene.places.require(ids, 1, 2)
    videos = [processed(plan, key) for key, plan in enumerate(scene.plans, 1)]
    spread, inputs = scene.places.spread(ids, [videos[0], ProcessedImage(item(9), 4, 0, 0), videos[1]])
    whole = f"u: look at{written[0]}ab {image}\nand{written[1]}. what?\na:"
    assert spread == scene.tokenizer.encode(whole, add_special_tokens=False).ids
    assert [handle.key for handle, _, _ in inputs] == [bytes([1]) * 32, bytes([9]) * 32, bytes([2]) * 32]
    token_ids = [scene.settings.token_id, models.IMAGE, scene.settings.token_id]
    counts = [scene.plans[0].tokens, 4, scene.plans[1].tokens]
    for (_, position, length), token_id, count in zip(inputs, token_ids, counts, strict=True):
        assert spread[position : position + length].count(token_id) == count
    assert sum(length for _, _, length in inputs) < len(spread)


@pytest.mark.parametrize("scene", VIDEO, indirect=True)
def test_placeholders_and_media_must_be_as_many(scene: Scene) -> None:
    ids = scene.ids(scene.video + "a" + scene.image)
    scene.places.require(ids, 1, 1)
    for images, videos in ((1, 0), (0, 1), (2, 1), (1, 2)):
        with pytest.raises(ValueError, match=r"^expected <.*> in the prompt once for each of \d .*, got \d$"):
            scene.places.require(ids, images, videos)


@pytest.mark.parametrize("scene", ["qwen2_vl", "smolvlm"], indirect=True)
def test_a_prompt_with_nothing_but_text_and_images_stays_as_it_is(scene: Scene) -> None:
    ids = scene.ids("some words" + scene.image + "more")
    spread, ((_, position, length),) = scene.places.spread(ids, [ProcessedImage(item(1), 4, 0, 0)])
    assert [id_ for id_ in ids if id_ != models.IMAGE] == [
        id_ for id_ in spread if id_ != models.IMAGE and id_ not in (119, 126)
    ]
    assert spread[position : position + length].count(models.IMAGE) == 4


def test_a_tokenizer_without_a_token_for_videos_is_refused(tmp_path: Path) -> None:
    scene = Scene("qwen2_vl", tmp_path)
    other = msgspec.structs.replace(scene.settings, token_id=5000)
    with pytest.raises(ValueError, match="the tokenizer has no token for a video: 5000 is none of its ids"):
        MediaPlaceholders(scene.tokenizer, scene.images, other)
    scene.images.close()


def test_numbers_are_spelled_in_english() -> None:
    words = {0: "zero", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred", 105: "one hundred and five"}
    words |= {768: "seven hundred and sixty-eight", 1000: "one thousand", 1101: "one thousand, one hundred and one"}
    assert {number: spell(number) for number in words} == words


@pytest.mark.parametrize("scene", ["smolvlm"], indirect=True)
def test_words_between_special_tokens_stay_beside_a_video(scene: Scene) -> None:
    special = min(scene.tokenizer.get_added_tokens_decoder().keys() - {scene.settings.token_id, models.IMAGE})
    words = scene.ids("some words")
    videos = [processed(scene.plans[0], 1)]
    alone, _ = scene.places.spread(scene.ids(scene.video), videos)
    spread, ((_, position, _),) = scene.places.spread([*words, special, *scene.ids(scene.video)], videos)
    assert spread == [*words, special, *alone]
    assert position > len(words)
