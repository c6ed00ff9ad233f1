"""Pictures of coloured shapes, made from a seed, with the truth about them.

A scene has one to three shapes that do not touch, on a plain ground. Leaves to talk.py what is said of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "yellow": (240, 205, 40),
    "purple": (140, 60, 170),
    "orange": (245, 130, 30),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
GROUNDS = {"white": (250, 250, 250), "grey": (150, 150, 150), "black": (15, 15, 15)}
RADII = {1: (0.15, 0.22), 2: (0.15, 0.21), 3: (0.13, 0.17)}  # of so many shapes
MAX_SHAPES = len(RADII)
MARGIN = 0.15  # two shapes differ by this much more in one direction than in the other, so that "left of" is no opinion


class Shape(NamedTuple):
    """Lengths are parts of the picture's side."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float
    angle: float


class Scene(NamedTuple):
    ground: str
    shapes: tuple[Shape, ...]  # from left to right

    def draw(self, side: int = 96, rng: np.random.Generator | None = None) -> Pixels:
        """The picture, height × width × 3. With `rng` also blurred, tinted and noisy, as pictures of others are."""
        softness = 0.8 / side if rng is None else float(rng.uniform(0.4, 1.3)) / side
        axis = (np.arange(side, dtype=np.float32) + 0.5) / side
        across, down = axis[None, :], axis[:, None]
        picture = np.empty((side, side, 3), np.float32)
        picture[:] = _tinted(GROUNDS[self.ground], rng)
        for one in self.shapes:
            cover = np.clip(0.5 - _distance(one, across, down) / (2 * softness), 0, 1)[..., None]
            picture += cover * (_tinted(COLOURS[one.colour], rng) - picture)
        if rng is not None:
            picture += rng.normal(0, rng.uniform(0, 4), picture.shape)
        return np.clip(np.rint(picture), 0, 255).astype(np.uint8)

    def cover(self, cells: int) -> npt.NDArray[np.int64]:
        """For each cell of a grid: 0, or 1 + the number of the kind (colour and shape) that covers most of it; then the
        same again for the cells in which a shape has its centre. For training only.
        """
        fine = 4 * cells
        axis = (np.arange(fine, dtype=np.float32) + 0.5) / fine
        labels = np.zeros((2, cells, cells), np.int64)
        most = np.full((cells, cells), 0.3, np.float32)
        for one in self.shapes:
            kind = 1 + list(COLOURS).index(one.colour) * len(SHAPES) + SHAPES.index(one.shape)
            inside = _distance(one, axis[None, :], axis[:, None]) < 0
            part = inside.reshape(cells, 4, cells, 4).mean((1, 3))
            labels[0][part > most] = kind
            most = np.maximum(most, part)
            labels[1, int(one.y * cells), int(one.x * cells)] = kind
        return labels


def scene(rng: np.random.Generator, count: int | None = None) -> Scene:
    """No two shapes are alike in both shape and colour."""
    count = int(rng.integers(1, MAX_SHAPES + 1)) if count is None else count
    made: list[Shape] = []
    tries = 0
    while len(made) < count:
        radius = float(rng.uniform(*RADII[count]))
        x, y = rng.uniform(radius + 0.02, 0.98 - radius, 2)
        angle = float(rng.uniform(-0.15, 0.15))
        one = Shape(str(rng.choice(SHAPES)), str(rng.choice(list(COLOURS))), float(x), float(y), radius, angle)
        if all(_are_apart(one, other) for other in made):
            made.append(one)
        tries += 1
        if tries % 40 == 0:  # there may be no room for another
            made.clear()
    return Scene(str(rng.choice(list(GROUNDS))), tuple(sorted(made, key=lambda one: one.x)))


def _are_apart(one: Shape, other: Shape) -> bool:
    across, down = abs(one.x - other.x), abs(one.y - other.y)
    return (
        (one.shape, one.colour) != (other.shape, other.colour)
        and across**2 + down**2 > (one.radius + other.radius + 0.04) ** 2
        and abs(across - down) > MARGIN
        and across > 0.1  # so that "from left to right" is no opinion either
    )


def _tinted(colour: tuple[int, int, int], rng: np.random.Generator | None) -> Floats:
    tinted = np.array(colour, np.float32)
    return tinted if rng is None else tinted + rng.uniform(-12, 12, 3).astype(np.float32)


def _distance(one: Shape, across: Floats, down: Floats) -> Floats:
    """To the shape's edge, negative within: exact enough for a soft edge."""
    x, y, r = across - one.x, down - one.y, one.radius
    if one.shape in ("circle", "ring"):
        from_centre = np.hypot(x, y)
        outer = from_centre - r
        return np.maximum(outer, 0.55 * r - from_centre) if one.shape == "ring" else outer
    cosine, sine = np.cos(one.angle), np.sin(one.angle)
    x, y = cosine * x + sine * y, cosine * y - sine * x
    if one.shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.85 * r
    if one.shape == "cross":
        long, short = 0.98 * r, 0.34 * r
        return np.minimum(
            np.maximum(np.abs(x) - long, np.abs(y) - short), np.maximum(np.abs(x) - short, np.abs(y) - long)
        )
    if one.shape == "triangle":
        return np.maximum(0.866 * np.abs(x) - 0.5 * y - 0.5 * r, y - 0.55 * r)
    turn = 2 * np.pi / 5  # a star: the distance to the edge between a tip and the notch beside it
    angle = np.abs((np.arctan2(x, -y) + turn / 2) % turn - turn / 2)
    along, aside = np.hypot(x, y) * np.cos(angle), np.hypot(x, y) * np.sin(angle)
    notch = 0.45 * r
    tip, dent = np.array([r, 0.0]), np.array([notch * np.cos(turn / 2), notch * np.sin(turn / 2)])
    edge = dent - tip
    normal = np.array([edge[1], -edge[0]]) / np.hypot(*edge)
    return ((along - tip[0]) * normal[0] + (aside - tip[1]) * normal[1]).astype(np.float32)
