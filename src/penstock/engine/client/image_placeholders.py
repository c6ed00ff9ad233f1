"""Where images stand in a prompt: each has one placeholder in its text, which becomes the tokens that stand for it.

Leaves to `image_processor` how many these are, and to the model's chat template where the placeholders are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.client.image_processor import ImageProcessor, ProcessedImage

FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"  # around tiles, and before the one that is all of the image


class ImagePlaceholders:
    """Of one model. `tokenizer`: that of `tokenizers`.

    Raises ValueError where the tokenizer has no placeholder.
    """

    def __init__(self, images: ImageProcessor, tokenizer: Any) -> None:
        self._image_id = images.image_id
        self._is_tiled = images.is_tiled
        self._tokenizer = tokenizer
        placeholder = tokenizer.id_to_token(self._image_id)
        if placeholder is None:
            raise ValueError(f"the tokenizer has no token for an image: {self._image_id} is none of its ids")
        self.placeholder: str = placeholder

    def require(self, ids: Sequence[int], images: int) -> None:
        """Raises ValueError where the prompt has another number of placeholders."""
        count = ids.count(self._image_id)
        if count != images:
            raise ValueError(f"expected {self.placeholder} in the prompt once for each of {images} images, got {count}")

    def spread(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> tuple[list[int], list[tuple[int, int]]]:
        """The prompt in which each of its placeholders has become an image; and of each image position and length."""
        spread: list[int] = []
        places: list[tuple[int, int]] = []
        rest = iter(images)
        for token_id in ids:
            if token_id != self._image_id:
                spread.append(token_id)
                continue
            image_ids = self._ids_of(next(rest))
            places.append((len(spread), len(image_ids)))
            spread += image_ids
        return spread, places

    def _ids_of(self, image: ProcessedImage) -> list[int]:
        if not self._is_tiled:
            return [self._image_id] * image.tokens
        tiles = self._tokenizer.encode(self._tiles(image.rows, image.columns), add_special_tokens=False).ids
        each = image.tokens // tiles.count(self._image_id)
        return [repeated for token_id in tiles for repeated in [token_id] * (each if token_id == self._image_id else 1)]

    def _tiles(self, rows: int, columns: int) -> str:
        """What is written for an image, with one placeholder for each tile: row by row, then all of it once more."""
        lines = (
            "".join(f"{FAKE}<row_{row}_col_{column}>{self.placeholder}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        )
        text = "".join(f"{line}\n" for line in lines)
        return f"{text}\n" * bool(text) + f"{FAKE}{WHOLE}{self.placeholder}{FAKE}"
