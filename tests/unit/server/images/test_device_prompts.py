"""A chat with images, from the server through the media process to the model, on a double of a device."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

# First: where torch is missing, this skips the rest.
from tests.support.models import BLOCK_SIZE, Asked, ask

# isort: split
from tests.support.interpreter import interpreted_kernels, require_interpreter

require_interpreter()

import torch  # noqa: E402

from penstock import Store  # noqa: E402
from penstock.engine.media import device_images  # noqa: E402
from penstock.engine.protocol.config import EngineConfig  # noqa: E402
from penstock.engine.worker.model_runner import ModelRunner  # noqa: E402
from penstock.server.chat.media_prompts import build_media_prompts  # noqa: E402
from penstock.server.chat.prompt_builder import PromptBuilder, build_tokenizer  # noqa: E402
from penstock.server.options import ServerOptions  # noqa: E402
from penstock.server.status.counters import ProcessCounters, ServerCounters  # noqa: E402
from tests.support.libcuda import open_device  # noqa: E402
from tests.support.loops import in_a_loop  # noqa: E402
from tests.support.sights import Sight  # noqa: E402
from tests.unit.engine.media.test_device_images import MAIN  # noqa: E402
from tests.unit.engine.media.test_image_processor import picture  # noqa: E402
from tests.unit.server.images.test_image_prompts import Conversation, chat_request, part, text  # noqa: E402

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
BUDGET = 16  # tokens of a step
ON_DEVICE = {
    "device": "cuda",
    "tensor_transport": "device",
    "image_processor_device": "cuda",
    "store_nbytes": 4 << 20,
}


async def answer(path: Path, device: str, row: ProcessCounters | None) -> list[int]:
    options = ON_DEVICE if device == "cuda" else {}
    config = EngineConfig(model=str(path), **options)  # type: ignore[arg-type]
    with Store(4 << 20) as store:
        media = build_media_prompts(config, ServerOptions(), store, row=row)
        request = chat_request(part(picture()), text("and"), part(picture(20, 64, seed=1)), text("?"))
        with contextlib.closing(PromptBuilder(config, build_tokenizer(config), media)) as reader:
            prompt = await reader.conversation(Conversation.of(request.messages), True, {})
            items = {item.key: item for item, _, _ in prompt.items}
            runner = ModelRunner(
                path,
                slots=4,
                block_size=BLOCK_SIZE,
                blocks=64,
                threads=1,
                device=device,
                token_budget=BUDGET,
                store=store,
                open_handle=lambda handle: items[handle.key].open(store),
                receives_tensors=device == "cuda",
            )
            inputs = [(item.key, position, length) for item, position, length in prompt.items]
            result = ask(runner, [Asked(prompt.ids, inputs, 4)], budget=BUDGET)
            prompt.release()
            if device == "cuda":
                images: Any = runner._images
                images._encoder._received.close()
                assert images._encoder._uploads.stats.copies == 0 and images._encoder._uploads.close()
            return result.answers[0]


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "idefics3"])
@in_a_loop
async def test_images_processed_on_a_device_are_answered_alike(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Sight(name, tmp_path)
    expected = await answer(tmp_path, "cpu", None)
    monkeypatch.setattr(device_images, "MAIN", MAIN.format(""))
    row = ServerCounters(ServerCounters.create(1), 1, writable=True).rows[0]
    with interpreted_kernels(), open_device():
        assert await answer(tmp_path, "cuda", row) == expected
    assert row[ProcessCounters.DEVICE_IMAGES.at["device"]] == 2
    assert row[ProcessCounters.ITEMS.at["put"]] == 2
