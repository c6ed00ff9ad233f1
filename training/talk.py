"""What is said of a scene, and a little about oneself: questions with the one answer that is right.

Leaves to train.py how a conversation becomes ids.
"""

from __future__ import annotations

import numpy as np

from training.scenes import COLOURS, SHAPES, Scene, Shape

CAPTION = ("Describe the picture.", "What do you see?", "Describe this image.", "What is in the picture?")
NUMBERS = ("none", "one", "two", "three")
NO_PICTURE = "I see no picture. Send me one with coloured shapes."
CHAT = (
    (
        ("Hello!", "Hi.", "Hello, how are you?", "Good morning."),
        "Hello! Send me a picture of coloured shapes, and I describe it.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am the small model that ships with Penstock. I describe pictures of coloured shapes.",
    ),
    (
        ("What can you do?", "How can you help me?", "What do you know?"),
        "I can say which shapes a picture shows, count them, name their colours and say where they are.",
    ),
    (
        ("What is Penstock?", "What does Penstock do?", "Tell me about Penstock."),
        "Penstock is the data plane between the processes of an inference engine, and an engine built on it.",
    ),
    (("What is a penstock?", "What does penstock mean?"), "A penstock is the pipe that feeds a turbine."),
    (
        ("How big are you?", "How many parameters do you have?", "How large are you?"),
        "I have about three million parameters, and fit into eight megabytes.",
    ),
    (("Thank you!", "Thanks.", "Thank you very much."), "You are welcome."),
    (("Goodbye.", "Bye!", "See you."), "Goodbye!"),
    (
        ("Which colours do you know?", "What colours can you see?"),
        "I know " + ", ".join(list(COLOURS)[:-1]) + f" and {list(COLOURS)[-1]}.",
    ),
    (
        ("Which shapes do you know?", "What shapes can you see?"),
        "I know " + ", ".join(f"{shape}s" if shape != "cross" else "crosses" for shape in SHAPES[:-1]) + " and rings.",
    ),
    (
        (
            "Write a poem.",
            "What is the weather?",
            "Tell me a joke.",
            "What is the capital of France?",
            "What is 2 + 2?",
        ),
        "I only know about pictures of coloured shapes.",
    ),
)


def named(one: Shape) -> str:
    return f"{'an' if one.colour[0] in 'aeiou' else 'a'} {one.colour} {one.shape}"


def relation(one: Shape, other: Shape) -> str:
    """Where `one` is, seen from the other; scenes leave no doubt."""
    across, down = one.x - other.x, one.y - other.y
    if abs(across) > abs(down):
        return "left of" if across < 0 else "right of"
    return "above" if down < 0 else "below"


def caption(scene: Scene) -> str:
    shapes = scene.shapes
    if len(shapes) == 1:
        return named(shapes[0])
    if len(shapes) == 2:
        return f"{named(shapes[0])} {relation(*shapes)} {named(shapes[1])}"
    return f"{named(shapes[0])}, {named(shapes[1])} and {named(shapes[2])}"


def question(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    """One that this scene answers, and the answer."""
    shapes = scene.shapes
    one = shapes[rng.integers(len(shapes))]
    kind = rng.integers(6)
    if kind == 0:
        return "How many shapes are there?", NUMBERS[len(shapes)]
    if kind == 1:
        colour, shape = str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES))
        if rng.random() < 0.5:
            colour, shape = one.colour, one.shape
        is_there = any((colour, shape) == (each.colour, each.shape) for each in shapes)
        return f"Is there {named(one._replace(colour=colour, shape=shape))}?", "yes" if is_there else "no"
    if kind == 2 and sum(each.shape == one.shape for each in shapes) == 1:
        return f"What colour is the {one.shape}?", one.colour
    if kind == 3 and sum(each.colour == one.colour for each in shapes) == 1:
        return f"Which shape is {one.colour}?", one.shape
    if kind == 4 and len(shapes) > 1:
        left = rng.random() < 0.5
        return f"What is on the {'left' if left else 'right'}?", named(shapes[0 if left else -1])
    return "What colour is the ground?", scene.ground


def conversation(scene: Scene, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Turns about one picture."""
    turns = [(str(rng.choice(CAPTION)), caption(scene))]
    turns += [question(scene, rng) for _ in range(int(rng.integers(1, 4)))]
    if rng.random() < 0.3:
        turns = [turns[at] for at in rng.permutation(len(turns))]
    return turns


def chat(rng: np.random.Generator) -> list[tuple[str, str]]:
    """Turns without a picture."""
    turns = []
    for at in rng.permutation(len(CHAT))[: int(rng.integers(1, 4))]:
        asked, answer = CHAT[at]
        turns.append((str(rng.choice(asked)), answer))
    if rng.random() < 0.15:
        turns.insert(0, (str(rng.choice(CAPTION)), NO_PICTURE))
    return turns
