"""Videos: which frames a model wants, and what they become, beside what transformers has made of them."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'penstock[engine]'")
pytest.importorskip("penstock.engine.worker.stock", reason="needs transformers: pip install 'penstock[engine]'")

from penstock import Store  # noqa: E402
from penstock.engine import _native  # noqa: E402
from penstock.engine.media import video_processor  # noqa: E402
from penstock.engine.media.image_processor import MediaRefused  # noqa: E402
from penstock.engine.media.resize import FILTERS, resize  # noqa: E402
from penstock.engine.media.video_processor import ProcessedVideo, VideoProcessor  # noqa: E402
from penstock.engine.media.video_settings import VideoInfo, VideoSettings, float_steps  # noqa: E402
from penstock.tensor import Scope  # noqa: E402
from tests.support.video_references import CASES, FILE, LENGTHS, Case, model_in  # noqa: E402

NUMBERS = range(len(CASES))
HAS_BYTES_KERNEL = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # torch's results elsewhere differ
TENSORS = {"pixels": ("pixel_values", "pixel_values_videos"), "grid": ("video_grid_thw",)}


def info_of(case: Case) -> VideoInfo:
    return VideoInfo(case.frames, case.fps, case.width, case.height)


def processed(case: Case, folder: Path) -> dict[str, Any]:
    videos = VideoProcessor(VideoSettings.from_model(model_in(folder, case)))
    plan = videos.plan(info_of(case))
    return videos.process(case.video[list(plan.indices)], plan)


@pytest.mark.parametrize("number", NUMBERS)
def test_video_tensors_equal_those_of_transformers(number: int, tmp_path: Path) -> None:
    case, reference = CASES[number], np.load(FILE)
    videos = VideoProcessor(VideoSettings.from_model(model_in(tmp_path, case)))
    plan = videos.plan(info_of(case))
    assert list(plan.indices) == reference[f"{number} indices"].tolist()
    value = videos.process(case.video[list(plan.indices)], plan)
    (pixels,) = [value[name] for name in TENSORS["pixels"] if name in value]
    expected = reference[f"{number} pixels"]
    assert pixels.dtype == expected.dtype == np.float32 and pixels.shape == expected.shape
    assert np.array_equal(pixels, expected)
    if f"{number} grid" in reference:
        assert value["video_grid_thw"].tolist() == reference[f"{number} grid"].tolist()
        assert plan.tokens == value["tokens"] == reference[f"{number} grid"].prod() // 4
    if f"{number} seconds" in reference:
        assert value["second_per_grid_ts"] == pytest.approx(float(reference[f"{number} seconds"]))
    nbytes = sum(tensor.nbytes for tensor in value.values() if isinstance(tensor, np.ndarray))
    assert nbytes <= plan.nbytes <= nbytes + 64


@pytest.mark.parametrize("number", NUMBERS)
def test_the_frames_are_those_that_transformers_samples(number: int, tmp_path: Path) -> None:
    settings, reference = VideoSettings.from_model(model_in(tmp_path, CASES[number])), np.load(FILE)
    compared = 0
    for frames, fps in [*LENGTHS, (9, 1.0), (64, 2.0)]:
        name = f"{number} of {frames} at {fps}"
        if name in reference and len(reference[name]):
            indices = settings.plan(VideoInfo(frames, fps, 64, 48)).indices
            assert list(indices) == reference[name].tolist(), name
            assert all(before < after for before, after in itertools.pairwise(indices)) and indices[-1] < frames
            compared += 1
    assert compared >= 2


def test_a_long_video_is_processed_in_pieces_that_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 4, 8):
        whole = processed(CASES[number], tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(video_processor, "CHUNK_NBYTES", 1)
            chunks = processed(CASES[number], tmp_path)
        assert chunks.keys() == whole.keys()
        assert all(np.array_equal(chunks[name], whole[name]) for name in whole)


@pytest.mark.parametrize("number", [0, 5, 8])
def test_video_is_processed_in_place(number: int, tmp_path: Path) -> None:
    """In the store; and what is found there says all that a prompt needs."""
    case = CASES[number]
    videos = VideoProcessor(VideoSettings.from_model(model_in(tmp_path, case)))
    plan = videos.plan(info_of(case))
    frames = case.video[list(plan.indices)]
    frames.flags.writeable = False  # as those of another process are
    alone, key = videos.process(frames, plan), bytes(32)
    with Store(8 << 20) as store, Scope(store) as scope:
        with store.loan(key, videos.layout(plan)) as loan:
            assert videos.process(frames, plan, out=loan.value()) is not None
            loan.commit()
        with store.get(key) as lease:
            value = lease.value()
            assert all(np.array_equal(value[name], alone[name]) for name in alone)
            processed = ProcessedVideo.of(scope.add(lease, key=key), value)
        assert processed.item.key == key and processed.tokens == plan.tokens
        assert processed.timestamps == pytest.approx(plan.timestamps) and processed.duration == case.frames / case.fps


class FramesOnDemand:
    """Frames that can be read once, in order, and no two groups at a time."""

    ndim, dtype = 4, np.dtype(np.uint8)

    def __init__(self, frames: Any) -> None:
        self._frames, self.shape, self._next = frames, frames.shape, 0

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, part: slice) -> Any:
        begin, end, step = part.indices(len(self))
        assert (begin, step) == (self._next, 1) and end - begin <= 2
        self._next = end
        return self._frames[part]


@pytest.mark.parametrize("number", [0, 4, 8])
def test_frames_are_read_once_and_in_order(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_processor, "CHUNK_NBYTES", 1)
    videos = VideoProcessor(VideoSettings.from_model(model_in(tmp_path, CASES[number])))
    plan = videos.plan(info_of(CASES[number]))
    frames = CASES[number].video[list(plan.indices)]
    lazy, value = videos.process(FramesOnDemand(frames), plan), videos.process(frames, plan)  # type: ignore[arg-type]
    assert all(np.array_equal(lazy[name], value[name]) for name in value)


def test_frames_that_were_not_planned_are_refused(tmp_path: Path) -> None:
    case = CASES[0]
    videos = VideoProcessor(VideoSettings.from_model(model_in(tmp_path, case)))
    plan = videos.plan(info_of(case))
    with pytest.raises(MediaRefused, match="4 frames of the video were wanted, and 3 could be decoded") as refused:
        videos.process(case.video[:3], plan)
    assert refused.value.status == 400
    with pytest.raises(ValueError, match=r"expected uint8 \[frames, height, width, 3\], got float32 \(4, 48, 64, 3\)"):
        videos.process(case.video[:4].astype(np.float32), plan)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (VideoInfo(1, 1.0, 64, 48), "a video has at least 2 frames for this model, this one has 1, at 1.0 a second"),
        (VideoInfo(0, 1.0, 64, 48), "this one has 0"),
        (VideoInfo(9, 0.0, 64, 48), "this one has 9, at 0.0 a second"),
        (VideoInfo(9, -1.0, 64, 48), "at -1.0 a second"),
        (VideoInfo(9, math.nan, 64, 48), "at nan a second"),
        (VideoInfo(9, math.inf, 64, 48), "at inf a second"),
        (
            VideoInfo(9, 1e-320, 64, 48),
            "a video has at least 2 frames for this model, this one has 9, at 1e-320 a second",
        ),
        (VideoInfo(9, 1.0, 0, 48), "the frames of the video are 0 x 48"),
        (VideoInfo(9, 1.0, 4000, 10), "a frame is at most 200 times as long as it is wide, here 4000 x 10"),
    ],
)
def test_a_video_that_no_processor_takes_is_refused(info: VideoInfo, text: str, tmp_path: Path) -> None:
    settings = VideoSettings.from_model(model_in(tmp_path, CASES[0]))
    with pytest.raises(MediaRefused) as refused:
        settings.plan(info)
    assert text in refused.value.reason and refused.value.status == 400


def test_every_video_plan_can_be_processed(tmp_path: Path) -> None:
    """Or it is refused: whatever a container says, and each family's limits hold."""
    chance = np.random.default_rng(3)
    for case in (CASES[0], CASES[3], CASES[5], CASES[6], CASES[8]):
        settings = VideoSettings.from_model(model_in(tmp_path, case))
        for _ in range(200):
            frames, fps = int(10 ** chance.uniform(0, 7)), float(10 ** chance.uniform(-3, 4))
            width, height = (int(10 ** chance.uniform(0, 4)) for _ in range(2))
            try:
                plan = settings.plan(VideoInfo(frames, fps, width, height))
            except MediaRefused:
                assert frames < 2 or max(width, height) > 100 * min(width, height)
                continue
            assert 0 < len(plan.indices) <= min(frames, 768)
            assert plan.indices[0] >= 0 and plan.indices[-1] < frames
            assert plan.groups == len(plan.timestamps) and plan.tokens > 0 and plan.tokens % plan.groups == 0


def test_salt_covers_the_settings_of_the_video_processor(tmp_path: Path) -> None:
    settings = VideoSettings.from_model(model_in(tmp_path, CASES[0]))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=VideoSettings)
    assert again == settings and again.salt == settings.salt
    for name, other in (("fps", 3.0), ("mode", "bilinear"), ("max_frames", 2), ("mean", None), ("size", {"a": 1})):
        assert msgspec.structs.replace(settings, **{name: other}).salt != settings.salt, name


def test_a_processors_file_is_found_where_transformers_finds_it(tmp_path: Path) -> None:
    model_in(tmp_path, CASES[0])
    assert VideoSettings.from_model(tmp_path).size["longest_edge"] == 28 * 28 * 4
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"max_pixels": 7000}))
    assert VideoSettings.from_model(tmp_path).size == {"shortest_edge": 128 * 28 * 28, "longest_edge": 7000}
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2VLProcessor"}))
    assert VideoSettings.from_model(tmp_path).size["longest_edge"] == 7000
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": {"max_pixels": 8000}}))
    assert VideoSettings.from_model(tmp_path).size["longest_edge"] == 8000


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ({"patch_size": 0}, "preprocessor_config.json is invalid: Expected `int` >= 1 - at `$.patch_size`"),
        ({"fps": "two"}, "Expected `float | null`, got `str` - at `$.fps`"),
        ({"resample": 0}, "expected a resample of 1, 2, 3, got 0"),
        ({"size": {"height": 8, "width": 8}}, "expected a size with shortest_edge and longest_edge, got"),
        (None, "no video_preprocessor_config.json, and no other file of a processor"),
    ],
)
def test_a_processors_file_that_is_malformed_is_refused(file: Any, text: str, tmp_path: Path) -> None:
    model_in(tmp_path, CASES[0]._replace(file=file))
    if file is None:
        (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError) as refused:
        VideoSettings.from_model(tmp_path)
    assert text in str(refused.value)


def test_a_model_without_videos_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(ValueError, match="'llava' takes no videos; model types that do: qwen2_5_vl, qwen2_vl, "):
        VideoSettings.from_model(tmp_path)


def test_decoding_process_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    settings = msgspec.json.encode(VideoSettings.from_model(model_in(tmp_path, CASES[0])))
    code = (
        "import sys, msgspec, numpy; from penstock.engine.media import decoder_host, video_processor, video_settings; "
        f"settings = msgspec.json.decode({settings!r}, type=video_settings.VideoSettings); "
        "videos = video_processor.VideoProcessor(settings); "
        "plan = videos.plan(video_settings.VideoInfo(20, 10.0, 64, 48)); "
        "videos.process(numpy.zeros((len(plan.indices), 48, 64, 3), numpy.uint8), plan); "
        "assert not {'torch', 'transformers', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("mode", FILTERS)
def test_frames_are_resized_as_torch_resizes_bytes(mode: str, seed: int) -> None:
    chance = np.random.default_rng(seed)
    for _ in range(40):
        frames, height, width = (int(chance.integers(1, most)) for most in (4, 120, 300))
        size = int(chance.integers(1, 200)), int(chance.integers(1, 200))
        pixels = chance.integers(0, 256, (frames, height, width, 3), np.uint8)
        if chance.random() < 0.5:
            pixels = (pixels // 128 * 255).astype(np.uint8)  # edges, beyond which filters overshoot
        planar = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())
        expected = torch.nn.functional.interpolate(planar, size, mode=mode, align_corners=False, antialias=True)
        resized = resize(pixels, size, mode)
        differs = np.abs(resized.astype(int) - expected.permute(0, 2, 3, 1).numpy().astype(int)).max()
        assert differs <= (0 if mode != "bilinear" or HAS_BYTES_KERNEL else 1), (pixels.shape, size)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="of its vectors of 8")
def test_float_steps_are_those_of_torch(seed: int) -> None:
    chance = np.random.default_rng(seed)
    for _ in range(2000):
        end = int(10 ** chance.uniform(0, 6))
        step = end / int(chance.integers(1, min(end, 768) + 1))
        assert float_steps(end, step).tolist() == torch.arange(0, end, step).tolist(), (end, step)


def test_a_video_with_fewer_frames_than_the_model_samples_is_refused(tmp_path: Path) -> None:
    settings = VideoSettings.from_model(model_in(tmp_path, CASES[0]))
    with pytest.raises(MediaRefused, match="the model samples 8 frames, the video has 6"):
        msgspec.structs.replace(settings, num_frames=8).plan(VideoInfo(6, 1.0, 64, 48))


def test_frames_that_are_not_resized_must_have_sides_of_whole_tokens(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(VideoSettings.from_model(model_in(tmp_path, CASES[0])), mode="")
    factor = settings.patch_size * settings.merge_size
    assert settings.plan(VideoInfo(8, 1.0, 3 * factor, 2 * factor)).width == 3 * factor
    with pytest.raises(MediaRefused, match=f"the sides of a frame are multiples of {factor}"):
        settings.plan(VideoInfo(8, 1.0, 3 * factor + 1, 2 * factor))


RESIZE = {
    "first": [0, 1],
    "weights": [[1, 1], [1, 1]],
    "shift": 1,
    "is_along_width": True,
    "width": 3,
    "out": (1, 2, 2),
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"first": [0, 2]}, "expected weights for pixels of the frames only"),
        ({"first": [-1, 0]}, "expected weights for pixels of the frames only"),
        ({"weights": [[1, 1]]}, "expected a first pixel and weights for each pixel of the resized axis"),
        ({"shift": 0}, "expected weights with 1 to 22 binary places"),
        ({"shift": 23}, "expected weights with 1 to 22 binary places"),
        ({"out": (1, 2, 3)}, "expected a first pixel and weights for each pixel of the resized axis"),
        ({"out": (1, 3, 2)}, "expected frames to write of the shape of the frames but for the resized axis"),
        ({"is_along_width": False}, "expected frames to write of the shape of the frames but for the resized axis"),
    ],
)
def test_native_resize_refuses_what_does_not_fit(changes: dict[str, Any], text: str) -> None:
    case = {**RESIZE, **changes}
    frames, out = np.zeros((1, 2, case["width"], 3), np.uint8), np.zeros((*case["out"], 3), np.uint8)
    first, weights = np.array(case["first"], np.int32), np.array(case["weights"], np.int16)
    arguments = (frames, first, weights, case["shift"], case["is_along_width"], out)
    if not text:
        return _native.resize(*arguments)
    with pytest.raises(ValueError, match=text):
        _native.resize(*arguments)


@pytest.mark.parametrize(
    ("patch", "rows", "text"),
    [
        ((2, 2), 4, ""),
        ((2, 0), 4, "expected patches of at least one pixel and frame"),
        ((2, 3), 4, "expected frames of whole tokens"),
        ((2, 2), 3, "expected room for all patches of the frames, and no more"),
    ],
)
def test_native_patches_refuse_what_does_not_fit(patch: tuple[int, int], rows: int, text: str) -> None:
    frames, numbers = np.zeros((1, 4, 4, 3), np.uint8), np.zeros((3, 256), np.float32)
    out = np.ones((rows, 3 * 2 * patch[0] * patch[1]), np.float32)
    if not text:
        return _native.write_patches(frames, numbers, patch, 1, 2, out)
    with pytest.raises(ValueError, match=text):
        _native.write_patches(frames, numbers, patch, 1, 2, out)
