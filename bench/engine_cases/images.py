"""Requests with one image each: from before a server looks the image up until the first token is there.

Ours puts it into the store, or finds it there, and the workers read it where it lies. The classic way pickles it to the
core, and the core with the rest of the step to each worker; there is no difference whether it came before. Either way
every worker reads a byte of each of its pages before its device begins.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.engine_cases.decoding import Trees
from bench.engine_cases.load import SHORT, Server, Wrong, until
from bench.engine_cases.trees import CLASSIC_GLOO, CLASSIC_ZEROMQ, OURS, Way
from bench.harness.figures import Figures
from bench.harness.output import short, short_nbytes
from bench.harness.turns import Outcome
from penstock import Scope
from penstock.engine.cluster.status_board import StatusBoard
from penstock.engine.protocol.config import SimulatedDevice

IMAGE_WAYS = (OURS, CLASSIC_ZEROMQ, CLASSIC_GLOO)
SHARES = (0.0, 1.0)
WORKERS = 4
MB = 1 << 20
STEP = 0.005  # seconds
PLACES = 64  # ids that stand for an image
PROMPT = 16  # other ids
_numbers = itertools.count(1 << 30)
_keys = itertools.count()


class Images:
    """As many as there are sizes, evenly from the smallest to the largest."""

    def __init__(self, count: int, largest: int) -> None:
        chance = np.random.default_rng(32104)
        sizes = np.linspace(min(MB, largest), largest, count, dtype=np.int64).tolist()
        self.pixels: list[npt.NDArray[np.uint8]] = [chance.integers(0, 256, size, np.uint8) for size in sizes]


class Asking:
    """One server that asks with images."""

    def __init__(self, server: Server, images: Images, scratch: Path) -> None:
        self.server = server
        self._images = images
        self.renew()
        self._way = server.bench.way
        if self._way.wire is None:
            self._store, self._hits = server.bench.cluster.store, 0
        else:
            import zmq

            self._context = zmq.Context()
            self._wire = self._context.socket(zmq.PUSH)
            self._wire.connect(f"ipc://{scratch / self._way.name}/images")

    def close(self) -> None:
        if self._way.wire is not None:
            self._context.destroy(linger=0)

    def renew(self) -> None:
        """Gives all images new keys, which no store has."""
        self._keys = [next(_keys).to_bytes(32, "little") for _ in self._images.pixels]

    def first_token(self, image: int, chance: np.random.Generator) -> float:
        """Seconds."""
        from bench.engine_cases.classic import WITH_IMAGE

        number = next(_numbers)
        prompt = chance.integers(0, self.server.vocabulary, PLACES + PROMPT, np.int32)
        pixels, key = self._images.pixels[image], self._keys[image]
        began = time.monotonic()
        if self._way.wire is None:
            with Scope(self._store) as scope:
                handle = scope.put(pixels, key=key)
                self._hits += scope.stats().hits
                self.server.ask(number, prompt, params=SHORT, items=((handle, 0, PLACES),))
                return self._answered(began)
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(pixels, 5, buffer_callback=buffers.append)
        self._wire.send_multipart([head, *(each.raw() for each in buffers)], copy=False)
        self.server.ask(number, prompt, params=SHORT, client=WITH_IMAGE)
        return self._answered(began)

    def _answered(self, began: float) -> float:
        delta = self.server.receive()
        took = time.monotonic() - began
        while delta.finished is None:
            delta = self.server.receive()
        until(lambda: self.server.row[StatusBoard.OPEN] == 0)
        return took

    def hits(self) -> float | None:
        return None if self._way.wire is not None else float(self._hits)


def ask_all(images: Images, share: float, asking: Mapping[str, Asking], chance: np.random.Generator,
            server: Server, name: str) -> Figures:  # fmt: skip
    item = asking[name]
    if not share:
        item.renew()
    order = chance.permutation(len(images.pixels)).tolist()
    before = item.hits()
    took = {image: item.first_token(image, chance) * 1e3 for image in order}
    after = item.hits()
    if before is not None and after is not None and after - before != share * len(order):
        raise Wrong(f"expected {share:.0%} of {len(order)} images to be found in the store, not {after - before:g}")
    return {"ttft_ms": float(np.median(list(took.values()))), "ttft_largest_ms": took[len(order) - 1]}


async def run_images(
    trees: Trees, ways: Sequence[Way], count: int, largest: int, model: Path, vocabulary: int, scratch: Path
) -> dict[float, Outcome]:
    """By share of the images that are kept."""
    images = Images(count, largest)
    options: dict[str, Any] = {
        "model": str(model),
        "simulated": SimulatedDevice(step_seconds=STEP, vocabulary=vocabulary),
        "tensor_parallel_size": WORKERS,
        "max_num_seqs": 32,
        "store_nbytes": 4 * sum(each.nbytes for each in images.pixels),
    }
    asking: dict[str, Asking] = {}
    outcomes: dict[float, Outcome] = {}
    try:
        await trees.start([way for way in ways if way.name in IMAGE_WAYS], scratch, options)
        asking.update({server.bench.way.name: Asking(server, images, scratch) for server in trees.servers})
        orders = {name: name for name in asking}
        for share in SHARES:
            measure = partial(ask_all, images, share, asking, np.random.default_rng(int(share)))
            trees.take(orders, measure, rounds=1)  # warms up
            outcomes[share] = trees.take(orders, measure, trees.rounds)
    finally:
        for each in asking.values():
            each.close()
        await trees.stop()
    show(trees, outcomes, f"{WORKERS} workers, {count} images of {short_nbytes(min(MB, largest))} to "
         f"{short_nbytes(largest)}, {STEP * 1e3:g} ms steps")  # fmt: skip
    return outcomes


def show(trees: Trees, outcomes: Mapping[float, Outcome], about: str) -> None:
    for share, outcome in outcomes.items():
        trees.record("images", outcome, ("ttft_ms", "ttft_largest_ms"), "ttft_ms", share=share)
    rows = []
    for name in next(iter(outcomes.values())).rounds:
        cells = []
        for outcome in outcomes.values():
            if name not in outcome.rounds:
                cells += ["-"] * 3
                continue
            figures = outcome.figures(name)
            is_compared = trees.compares(outcome)
            ratio = f"×{short(outcome.ratio(name, 'ttft_ms', OURS))}" if is_compared else "-"
            cells += [f"{figures['ttft_ms']:.2f}", ratio, f"{figures['ttft_largest_ms']:.2f}"]
        rows.append((name, cells))
    heads = [f"{share:.0%} {what}" for share in outcomes for what in ("kept: median", "times ours", "the largest")]
    trees.output.table(f"Time to first token, ms; {about}", heads, rows)
