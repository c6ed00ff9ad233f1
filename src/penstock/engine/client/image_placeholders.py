"""Replaces each image placeholder of a prompt, one token, by as many image tokens as the model wants for that image.

The model's chat template writes the placeholders, and `image_processor` counts the tokens of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engine.client.image_processor import ImageProcessor, ProcessedImage

FAKE, WHOLE = "<fake_token_around_image>", "<global-img>"  # around tiles, and before the one that is all of the image


class ImagePlaceholders:
    """The placeholder of one model. `tokenizer`: a `tokenizers.Tokenizer`.

    Raises ValueError if the tokenizer has no token for images.
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
        """Raises ValueError if the prompt does not have one placeholder for each image."""
        count = ids.count(self._image_id)
        if count != images:
            raise ValueError(f"expected {self.placeholder} in the prompt once for each of {images} images, got {count}")

    def spread(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the prompt with each placeholder expanded, and the position and length of each image in it."""
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
        """Returns the text of a tiled image: a placeholder for each tile, row by row, then one for the whole image."""
        lines = (
            "".join(f"{FAKE}<row_{row}_col_{column}>{self.placeholder}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        )
        text = "".join(f"{line}\n" for line in lines)
        return f"{text}\n" * bool(text) + f"{FAKE}{WHOLE}{self.placeholder}{FAKE}"
