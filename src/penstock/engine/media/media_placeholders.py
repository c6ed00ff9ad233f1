"""Replaces each placeholder of a prompt, one token, by as many tokens as the model wants for that image or video.

The model's chat template writes the placeholders; `image_processor` and `video_settings` count the tokens. Qwen3-VL and
SmolVLM want the time of each part of a video as text before it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from penstock.engine.media.image_processor import ImageProcessor, ProcessedImage
from penstock.engine.media.video_processor import ProcessedVideo
from penstock.engine.media.video_settings import QWEN3, SMOLVLM, VideoSettings
from penstock.engine.protocol.columns import Input

FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"  # around tiles, and before the one that is all of the image
VIDEO = "<video>"  # what templates of SmolVLM write; often no token
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"  # around each part of a video of Qwen3-VL
ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
TEENS = ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

Media: TypeAlias = "ProcessedImage | ProcessedVideo"


class MediaPlaceholders:
    """The placeholders of one model. `tokenizer`: a `tokenizers.Tokenizer`.

    Raises ValueError if the tokenizer lacks a token for images, or for videos.
    """

    def __init__(self, tokenizer: Any, images: ImageProcessor, videos: VideoSettings | None = None) -> None:
        """`videos`: None if the model takes none."""
        self._tokenizer = tokenizer
        self._image_id = images.image_id
        self._is_tiled = images.is_tiled
        self._family = "" if videos is None else videos.family
        self._video_id = None if videos is None else videos.token_id
        self._has_one_id = self._image_id == self._video_id
        self.image = self._token(self._image_id, "an image")
        self.video = "" if self._video_id is None else self._token(self._video_id, "a video")

    def _token(self, token_id: int, what: str) -> str:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            raise ValueError(f"the tokenizer has no token for {what}: {token_id} is none of its ids")
        return token

    def prepare(self, text: str) -> str:
        """Returns a rendered conversation with videos as it is to be tokenized: SmolVLM's placeholder of a video need
        not be a token, and becomes that of an image."""
        return text.replace(VIDEO, self.video) if self._family == SMOLVLM else text

    def require(self, ids: Sequence[int], images: int, videos: int = 0) -> None:
        """Raises ValueError if the prompt does not have one placeholder for each image and video."""
        if self._has_one_id and videos:
            self._require(ids, self._image_id, images + videos, f"{images} images and {videos} videos")
            return
        self._require(ids, self._image_id, images, f"{images} images")
        if self._video_id is not None and not self._has_one_id:
            self._require(ids, self._video_id, videos, f"{videos} videos")

    def _require(self, ids: Sequence[int], token_id: int, expected: int, what: str) -> None:
        count = ids.count(token_id)
        if count != expected:
            token = self._tokenizer.id_to_token(token_id)
            raise ValueError(f"expected {token} in the prompt once for each of {what}, got {count}")

    def spread(self, ids: Sequence[int], media: Sequence[Media]) -> tuple[list[int], tuple[Input, ...]]:
        """Returns the prompt with each placeholder expanded, and each image and video with its position and length.

        `media`: in the order of the conversation.
        """
        images, videos = (
            iter([entry for entry in media if isinstance(entry, kind)]) for kind in (ProcessedImage, ProcessedVideo)
        )
        ordered: dict[int | None, Iterator[Media]] = {self._video_id: videos, self._image_id: images}
        if self._has_one_id:
            ordered = {self._image_id: iter(media)}
        parts: list[int | Media] = [next(ordered[id_]) if id_ in ordered else id_ for id_ in ids]
        if self._family == SMOLVLM and any(isinstance(part, ProcessedVideo) for part in parts):
            return self._join_texts(parts)
        spread: list[int] = []
        inputs: list[Input] = []
        for part in parts:
            if isinstance(part, int):
                spread.append(part)
            else:
                own = self._ids_of(part)
                inputs.append((part.item, len(spread), len(own)))
                spread += own
        return spread, tuple(inputs)

    def _ids_of(self, entry: Media) -> list[int]:
        if isinstance(entry, ProcessedVideo):
            assert self._video_id is not None, "a model that takes no videos has got one"
            if self._family != QWEN3:
                return [self._video_id] * entry.tokens
            text = "".join(f"<{at:.1f} seconds>{VISION_START}{self.video}{VISION_END}" for at in entry.timestamps)
            return self._repeat(self._encode(text), self._video_id, entry.tokens // len(entry.timestamps))
        if not self._is_tiled:
            return [self._image_id] * entry.tokens
        tiles = self._encode(self._tiles(entry.rows, entry.columns))
        return self._repeat(tiles, self._image_id, entry.tokens // tiles.count(self._image_id))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @staticmethod
    def _repeat(ids: Sequence[int], placeholder: int, each: int) -> list[int]:
        return [repeated for id_ in ids for repeated in [id_] * (each if id_ == placeholder else 1)]

    def _tiles(self, rows: int, columns: int) -> str:
        """Returns the text of a tiled image: a placeholder for each tile, row by row, then one for the whole image."""
        lines = (
            "".join(f"{FAKE}<row_{row}_col_{column}>{self.image}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        )
        text = "".join(f"{line}\n" for line in lines)
        return f"{text}\n" * bool(text) + f"{FAKE}{WHOLE}{self.image}{FAKE}"

    # ── SmolVLM: the text of a video begins and ends with words, which become tokens together with those beside it ──
    def _join_texts(self, parts: list[int | Media]) -> tuple[list[int], tuple[Input, ...]]:
        """Expands a prompt to the ids of the whole text."""
        special = set(self._tokenizer.get_added_tokens_decoder())
        spread: list[int] = []
        inputs: list[Input] = []
        run: list[int | ProcessedVideo] = []  # of words and videos, without special tokens
        for part in [*parts, None]:
            if isinstance(part, ProcessedVideo) or (isinstance(part, int) and part not in special):
                run.append(part)
                continue
            self._write_run(run, spread, inputs)
            run = []
            if isinstance(part, int):
                spread.append(part)
            elif part is not None:
                own = self._ids_of(part)
                inputs.append((part.item, len(spread), len(own)))
                spread += own
        return spread, tuple(inputs)

    def _write_run(self, run: list[int | ProcessedVideo], spread: list[int], inputs: list[Input]) -> None:
        videos = [part for part in run if isinstance(part, ProcessedVideo)]
        if not videos:
            spread += [part for part in run if isinstance(part, int)]
            return
        text, words = "", list[int]()
        for part in run:
            if isinstance(part, int):
                words.append(part)
                continue
            text += self._tokenizer.decode(words, skip_special_tokens=False) + self._frames(part)
            words = []
        rest = iter(self._encode(text + self._tokenizer.decode(words, skip_special_tokens=False)))
        for video in videos:
            each = video.tokens // len(video.timestamps)
            missing, begin = len(video.timestamps), None
            while missing:
                token_id = next(rest)
                if token_id != self._image_id:
                    spread.append(token_id)
                    continue
                begin = len(spread) if begin is None else begin
                spread += [token_id] * each
                missing -= 1
            assert begin is not None, "a video has a frame"
            inputs.append((video.item, begin, len(spread) - begin))
        spread += rest

    def _frames(self, video: ProcessedVideo) -> str:
        """Returns the text of a video, with a placeholder for each frame."""
        duration = datetime.timedelta(seconds=int(video.duration))
        frames = "".join(
            f"\nFrame from {int(at // 60):02d}:{int(at % 60):02d}:{self._tiles(0, 0)}" for at in video.timestamps
        )
        count = spell(len(video.timestamps))
        return (
            f"You are provided the following series of {count} frames from a {duration} [H:MM:SS] video.\n{frames}\n\n"
        )


def spell(number: int) -> str:
    """Returns a number below 1,000,000 in English, as the model has seen it: "one hundred and five"."""
    if number < 20:
        return (ONES + TEENS)[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    begin, rest = f"{spell(number // unit)} {name}", number % unit
    if not rest:
        return begin
    return f"{begin}{' and ' if rest < 100 else ', '}{spell(rest)}"
