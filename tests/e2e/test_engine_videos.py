"""Videos in the whole engine: frames become tensors in the store, and answers are those of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("penstock.engine.worker.stock")
pytest.importorskip("PIL.Image")

from penstock import content_key  # noqa: E402
from penstock.engine.client.client import Client, ImageInput  # noqa: E402
from penstock.engine.cluster.status_board import StatusBoard  # noqa: E402
from penstock.engine.media.image_processor import ImageProcessor, ProcessedImage  # noqa: E402
from penstock.engine.media.media_placeholders import MediaPlaceholders  # noqa: E402
from penstock.engine.media.video_processor import ProcessedVideo, VideoProcessor  # noqa: E402
from penstock.engine.media.video_settings import VideoInfo, VideoSettings  # noqa: E402
from penstock.engine.protocol.config import EngineConfig  # noqa: E402
from penstock.engine.protocol.messages import SamplingParams  # noqa: E402
from penstock.tensor import Scope  # noqa: E402
from tests import tiers  # noqa: E402
from tests.support import models  # noqa: E402
from tests.support.engine import START, launched  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.models import Asked  # noqa: E402
from tests.support.sights import Sight, placeholder  # noqa: E402
from tests.unit.engine.media.test_image_processor import picture  # noqa: E402

INFO = VideoInfo(30, 10.0, 40, 28)
TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)


def frames_of(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (INFO.frames, INFO.height, INFO.width, 3), np.uint8)


class Watcher:
    """Makes prompts with videos for a model in a folder, and knows what transformers answers."""

    def __init__(self, name: str, path: Path) -> None:
        self.sight = Sight(name, path)
        self.images = ImageProcessor(path, None, threads=1)
        self.videos = VideoProcessor(VideoSettings.from_model(path))
        self.places = MediaPlaceholders(self.sight.tokenizer, self.images, self.videos.settings)
        wrap = "{}" if name == "smolvlm" else "<|vision_start|>{}<|vision_end|>"
        self.video = wrap.format("<video>" if name == "smolvlm" else "<|video_pad|>")
        self.image = wrap.format(placeholder(name))

    def tensors(self, seed: int) -> dict[str, Any]:
        plan = self.videos.plan(INFO)
        return self.videos.process(frames_of(seed)[list(plan.indices)], plan)

    def key(self, seed: int) -> bytes:
        return content_key(frames_of(seed).tobytes(), salt=self.videos.settings.salt)

    def put(self, seed: int, scope: Scope) -> ProcessedVideo:
        value = self.tensors(seed)
        return ProcessedVideo.of(scope.put(value, key=self.key(seed)), value)

    def prompt(self, text: str, media: list[ProcessedImage | ProcessedVideo]) -> tuple[list[int], Any]:
        ids = self.sight.tokenizer.encode(self.places.prepare(text), add_special_tokens=False).ids
        return self.places.spread(ids, media)

    def answer(self, ids: list[int], values: list[Any]) -> list[int]:
        keys = [bytes([number]) for number in range(len(values))]

        def as_torch(value: Any) -> Any:
            return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value

        media = [{name: as_torch(array) for name, array in value.items()} for value in values]
        request = Asked(ids, [(key, 0, 0) for key in keys], TOKENS)
        return models._answer(self.sight.stock, request, dict(zip(keys, media, strict=True)))


@pytest.mark.parametrize(
    ("name", "ranks", "transport"),
    [
        ("qwen3_vl", 2, "store"),
        pytest.param("qwen3_vl", 1, "inline", marks=tiers.needs_all),
        pytest.param("qwen2_5_vl", 2, "inline", marks=tiers.needs_all),
        pytest.param("qwen2_vl", 2, "store", marks=tiers.needs_all),
        pytest.param("smolvlm", 2, "auto", marks=tiers.needs_all),
    ],
)
@in_a_loop
async def test_videos_are_answered_as_transformers_does(name: str, ranks: int, transport: str, tmp_path: Path) -> None:
    """Two videos and an image; again, from the store and the prefix cache; and as values of `submit`."""
    watcher = Watcher(name, tmp_path)
    has_store = transport != "inline"
    config = EngineConfig(
        model=str(tmp_path),
        tensor_parallel_size=ranks,
        dtype="float32",
        store_nbytes=1 << 24 if has_store else 0,
        tensor_transport=transport,
        block_size=models.BLOCK_SIZE,
        num_gpu_blocks_override=400,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        threads=1,
    )
    text = f"u:ab{watcher.video}cd{watcher.image}\ne{watcher.video}what?"
    async with launched(config, within=2 * START) as engine:
        store = engine.launcher.cluster.store
        assert (store is not None) == has_store

        async def ask(client: Client, seeds: tuple[int, int]) -> tuple[list[int], list[int], int]:
            scope = Scope(store, inline_nbytes=0)
            image = await watcher.images.load(picture(20, 24), scope)
            media = [watcher.put(seeds[0], scope), image, watcher.put(seeds[1], scope)]
            values = [media.item.open(store).value("numpy") for media in media]
            ids, inputs = watcher.prompt(text, media)
            expected = watcher.answer(ids, [dict(value) for value in values])
            del values
            async with await client.submit(ids, PARAMS, items=inputs, scope=scope, timeout=START) as stream:
                answer = [id_ async for piece in stream for id_ in piece.ids]
            return answer, expected, stream.cached_tokens

        async with Client(engine.launcher.cluster, 0) as client:
            answer, want, cached = await ask(client, (1, 2))
            assert answer == want and not cached
            again, _, cached = await ask(client, (1, 2))
            assert again == want and cached > 0
            other, want, _ = await ask(client, (1, 3))
            assert other == want != answer
            ids, ((_, position, length),) = watcher.prompt(f"u:{watcher.video}?", [watcher.put(4, Scope())])
            value = ImageInput(watcher.tensors(4), position, length, watcher.key(4))
            async with await client.submit(ids, PARAMS, values=[value], timeout=START) as stream:
                answer = [id_ async for piece in stream for id_ in piece.ids]
            assert answer == watcher.answer(ids, [watcher.tensors(4)])
        # The image, and videos 1 to 4: each once for all ranks, where these share encodings.
        encodings = 5 if config.encoder_tp_mode != "weights" else 5 * ranks
        await engine.until(lambda: engine.number(StatusBoard.ENCODINGS) >= encodings)
        assert engine.number(StatusBoard.ENCODINGS) == encodings
    watcher.images.close()
