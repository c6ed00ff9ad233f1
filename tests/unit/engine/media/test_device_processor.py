"""Image processors on a device, or a double of a device, against those of transformers on the host."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")
transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL.Image", reason="needs Pillow: pip install 'penstock[engine]'")

from penstock.engine.media.device_processor import DeviceProcessor  # noqa: E402
from penstock.engine.media.encoded_image import EncodedImage  # noqa: E402
from penstock.engine.media.image_processor import ImageProcessor, decode_image, read_processor  # noqa: E402
from penstock.engine.media.media_kind import MediaRefused  # noqa: E402
from tests.support.cuda_double import CudaDouble  # noqa: E402
from tests.support.models import VISION  # noqa: E402
from tests.unit.engine.media.test_image_processor import PATCHES, PROCESSORS, TILES, model_in, picture  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(), reason="needs a CUDA device"
)

LANCZOS, BILINEAR = 1, 2
CROP: dict[str, Any] = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
SIZES = [(50, 30), (20, 64), (16, 16), (7, 5), (301, 200), (3, 190), (17, 1000)]
OPTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("llava", "CLIPImageProcessorPil", {**CROP, "do_normalize": False}),
    ("llava", "CLIPImageProcessorPil", {"size": {"height": 16, "width": 12}, "crop_size": {"height": 19, "width": 5}}),
    ("llava", "CLIPImageProcessorPil", {**CROP, "resample": BILINEAR, "do_rescale": False}),
    ("llava", "CLIPImageProcessorPil", {**CROP, "do_center_crop": False}),
    ("llava", "CLIPImageProcessorPil", {"size": {"shortest_edge": 8, "longest_edge": 20}, "do_center_crop": False}),
    ("llava", "CLIPImageProcessorPil", {"size": {"max_height": 9, "max_width": 20}, "do_center_crop": False}),
    ("llava", "CLIPImageProcessorPil", {**CROP, "do_resize": False}),
    ("llava", "SiglipImageProcessorPil", {"size": {"height": 16, "width": 12}}),
    ("llava", "LlavaImageProcessorPil", {**CROP, "do_pad": True}),
    ("llava", "LlavaImageProcessorPil", CROP),
    ("qwen2_vl", "Qwen2VLImageProcessorPil", {**PATCHES, "resample": LANCZOS}),
    ("idefics3", "Idefics3ImageProcessorPil", {**TILES, "do_image_splitting": False}),
    ("idefics3", "Idefics3ImageProcessorPil", {**TILES, "size": {"longest_edge": 48}, "do_resize": False}),
    ("smolvlm", "SmolVLMImageProcessorPil", {**TILES, "resample": BILINEAR, "do_pad": False}),
]


def must_agree(path: Path) -> None:
    device = contextlib.nullcontext() if torch.version.cuda is not None else CudaDouble()
    with ImageProcessor(path, None, threads=1) as host, device as double:
        processor = DeviceProcessor(read_processor(path)[1], torch.device("cuda", 0))
        for size in SIZES:
            encoded = EncodedImage.parse(picture(*size))
            pixels = np.array(decode_image(encoded))
            try:
                expected = host._make(encoded)
            except MediaRefused:
                with pytest.raises(ValueError, match="of 1 or more"):
                    processor.process(pixels)
                continue
            with contextlib.nullcontext() if double is None else double.watched() as report:
                features = processor.process(pixels)
            assert report is None or not report.faults, size
            assert (features.rows, features.columns) == (expected.pop("rows"), expected.pop("columns"))
            del expected["tokens"]
            tensors = {name: tensor.cpu().numpy() for name, tensor in features.tensors.items()} | features.small
            assert tensors.keys() == expected.keys()
            for name, tensor in tensors.items():
                assert tensor.shape == expected[name].shape and (tensor == expected[name]).all(), (size, name)
                assert tensor.dtype == expected[name].dtype


@pytest.mark.parametrize("name", VISION)
def test_device_makes_the_tensors_of_each_family_bit_by_bit(name: str, tmp_path: Path) -> None:
    must_agree(model_in(tmp_path, name))


@pytest.mark.parametrize(("name", "kind", "options"), OPTIONS)
def test_device_follows_the_settings_of_a_processor(
    name: str, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model_in(tmp_path, name)
    getattr(transformers, kind)(**options).save_pretrained(tmp_path)
    must_agree(tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"resample": 0}, {"do_pad": True, "pad_size": CROP["crop_size"]}, {"do_rescale": False, "do_normalize": False}],
)
def test_processor_with_steps_that_no_device_knows_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    model_in(tmp_path)
    transformers.CLIPImageProcessorPil(**CROP, **options).save_pretrained(tmp_path)
    processor = read_processor(tmp_path)[1]
    with pytest.raises(ValueError, match="no device runs the steps of CLIPImageProcessorPil"):
        DeviceProcessor(processor, torch.device("cpu"))
    assert PROCESSORS.keys() == set(VISION), "each family is compared"
