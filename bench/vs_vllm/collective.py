"""The three overheads of `broadcast_object_list` (public vLLM issue #4440), against one broadcast of ours.

Device move, concatenation, and a broadcast of the size before that of the bytes. Gloo's processes and ours are up at
the same time and take turns. Leaves to `collective_end` each process, and to `peer_process` how they are spoken to.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import penstock
from bench.impls import Unavailable
from bench.impls.peer import python_with
from bench.vs_vllm.peer_process import PeerProcess
from penstock.tools.format import short
from penstock.tools.tables import Row, Table, row

NBYTES = 2600  # a decode step of 32 requests in today's engines
RECEIVERS = 4
PACE_NS = 5_000_000  # more than gloo takes for one
PACED, STREAMED = 60, 200  # messages of one round
START_LIMIT, ROUND_LIMIT = 180.0, 60.0  # seconds; five interpreters that import torch at once take their time
SCRIPT = Path(__file__).with_name("collective_end.py")
Figures = dict[str, float]


class Group:
    """The processes of one implementation, by rank."""

    def __init__(self, kind: str, python: str, receivers: int, address: str) -> None:
        self.kind = kind
        self._ends: list[PeerProcess] = []
        for rank in range(receivers + 1):
            command = [python, str(SCRIPT), kind, str(rank), str(receivers), address]
            self._ends.append(PeerProcess(command, f"{kind}, rank {rank}"))

    def wait_until_ready(self) -> dict[str, Any]:
        about: list[dict[str, Any]] = [end.receive(START_LIMIT)["ready"] for end in self._ends]
        return about[0]

    def perform(self, what: str, messages: int, nbytes: int, pace_ns: int = 0) -> list[dict[str, list[int]]]:
        order = {"what": what, "messages": messages, "nbytes": nbytes, "pace_ns": pace_ns}
        for end in reversed(self._ends):
            end.send(order)
        return [end.receive(ROUND_LIMIT) for end in self._ends]

    def alone(self, what: str, messages: int, nbytes: int) -> float:
        """What only the sender does; the median, in microseconds."""
        self._ends[0].send({"what": what, "messages": messages, "nbytes": nbytes, "pace_ns": 0})
        found = self._ends[0].receive(ROUND_LIMIT)
        return float(statistics.median(b - a for a, b in zip(found["begins"], found["ends"]))) / 1e3

    def close(self) -> None:
        for end in self._ends:
            end.close()


def one_way_us(reports: Sequence[dict[str, list[int]]]) -> float:
    """From before the send until the last receiver has it; the median, without the first fifth."""
    sender, *receivers = reports
    arrivals = [max(each) for each in zip(*(report["ends"] for report in receivers))]
    took = [end - begin for begin, end in zip(sender["begins"], arrivals)]
    return float(statistics.median(took[len(took) // 5 :])) / 1e3


def per_message_us(reports: Sequence[dict[str, list[int]]]) -> float:
    """One after another, as fast as it goes, until the last receiver has the last."""
    sender, *receivers = reports
    return (max(report["ends"][-1] for report in receivers) - sender["begins"][0]) / len(sender["begins"]) / 1e3


@contextlib.contextmanager
def groups(receivers: int) -> Iterator[list[Group]]:
    """Gloo's and ours. Raises Unavailable where there is no torch."""
    python = python_with("torch")
    with contextlib.ExitStack() as closing, tempfile.TemporaryDirectory(prefix="penstock-compare-") as folder:
        channel = closing.enter_context(penstock.Broadcast(receivers=receivers, name="compare"))
        made = []
        for kind, its_python, address in (
            ("gloo", python, f"file://{folder}/gloo"),
            ("penstock", sys.executable, str(channel.ticket)),
        ):
            made.append(Group(kind, its_python, receivers, address))
            closing.callback(made[-1].close)
        yield made


def measure(rounds: int, *, receivers: int = RECEIVERS, nbytes: int = NBYTES) -> tuple[dict[str, Any], list[Figures]]:
    """What was measured on, and the figures of each round. Raises Unavailable."""
    found: list[Figures] = []
    with groups(receivers) as (gloo, ours):
        about = gloo.wait_until_ready()
        ours.wait_until_ready()
        for group in (gloo, ours):
            group.perform("whole", 20, nbytes)
        for _ in range(rounds):
            figures: Figures = {}
            for group in (gloo, ours):
                paced = group.perform("whole", PACED, nbytes, PACE_NS)
                figures[f"{group.kind}_one_way_us"] = one_way_us(paced)
                figures[f"{group.kind}_each_us"] = per_message_us(group.perform("whole", STREAMED, nbytes))
            for what in ("size", "data", "known"):
                figures[f"{what}_one_way_us"] = one_way_us(gloo.perform(what, PACED, nbytes, PACE_NS))
            for what in ("serialise", "concatenate", *(["device"] if about["has_device"] else [])):
                figures[f"{what}_us"] = gloo.alone(what, STREAMED, nbytes)
            found.append(figures)
    return about, found


def medians(found: Sequence[Figures]) -> Figures:
    """Of each figure; a ratio is taken in each round."""
    figures = {key: statistics.median(one[key] for one in found) for key in found[0]}
    for key in ("one_way", "each"):
        ratios = [one[f"gloo_{key}_us"] / one[f"penstock_{key}_us"] for one in found]
        figures[f"{key}_ratio"] = statistics.median(ratios)
    ratios = [one["known_one_way_us"] / one["penstock_one_way_us"] for one in found]
    figures["known_ratio"] = statistics.median(ratios)
    return figures


def told(rounds: int, receivers: int = RECEIVERS, nbytes: int = NBYTES) -> tuple[list[Row], Table]:
    title = f"One message of {nbytes:,} bytes to {receivers} receivers (#4440)"
    parameters: dict[str, Any] = {"receivers": receivers, "nbytes": nbytes}
    try:
        about, found = measure(rounds, receivers=receivers, nbytes=nbytes)
    except Unavailable as error:
        return [row("compare", "broadcast", "gloo", **parameters, missing=str(error))], Table(
            title, (), (), [f"not measured: {error}"]
        )
    figures = medians(found)
    parameters["rounds"] = rounds
    rows = [
        row("compare", "broadcast", "penstock", **parameters, one_way_us=figures["penstock_one_way_us"],
            each_us=figures["penstock_each_us"]),
        row("compare", "broadcast", "gloo", **parameters, torch=about["torch"],
            one_way_us=figures["gloo_one_way_us"], each_us=figures["gloo_each_us"],
            size_broadcast_us=figures["size_one_way_us"], data_broadcast_us=figures["data_one_way_us"],
            serialise_us=figures["serialise_us"], concatenate_us=figures["concatenate_us"],
            **({"device_us": figures["device_us"]} if "device_us" in figures else {}),
            known_one_way_us=figures["known_one_way_us"], known_one_way_ratio_to_penstock=figures["known_ratio"],
            one_way_ratio_to_penstock=figures["one_way_ratio"], each_ratio_to_penstock=figures["each_ratio"]),
    ]  # fmt: skip
    cells = [
        ["penstock: one broadcast", short(figures["penstock_one_way_us"]), short(figures["penstock_each_us"]), "1"],
        ["gloo: broadcast_object_list", short(figures["gloo_one_way_us"]), short(figures["gloo_each_us"]),
         f"{short(figures['one_way_ratio'])}, {short(figures['each_ratio'])}"],
        ["gloo: a whole call, the size known", short(figures["known_one_way_us"]), "-", short(figures["known_ratio"])],
        ["  of which: broadcast of the size", short(figures["size_one_way_us"]), "-", "-"],
        ["  of which: broadcast of the bytes", short(figures["data_one_way_us"]), "-", "-"],
        ["  of which: pickle, into a tensor", short(figures["serialise_us"]), "-", "-"],
        ["  concatenation of two such halves", short(figures["concatenate_us"]), "-", "-"],
        ["  move to the device and back", short(figures["device_us"]) if "device_us" in figures else "-", "-", "-"],
    ]  # fmt: skip
    notes = [
        f"one way: to the last receiver, one every {PACE_NS / 1e6:g} ms; each: one after another, per message",
        f"torch {about['torch']} concatenates only where a list has more than one object",
    ]
    if not about["has_device"]:
        notes.append("no device: gloo stays on the CPU, so nothing is moved to one")
    return rows, Table(title, ("", "one way, µs", "each, µs", "times ours"), cells, notes)
