"""The three overheads of `broadcast_object_list` (public vLLM issue #4440), against one broadcast of ours.

Device move, concatenation, and a broadcast of the size before that of the bytes. Gloo's processes and ours are up at
the same time and take turns; NCCL's, too, where each of its ranks has a device. `collective_end` is each process.
NCCL's row has not run yet: no machine of this project has had two devices.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import penstock
from bench.impls.peer import python_with
from bench.vs_vllm.peer_process import PeerProcess
from penstock.tools.format import short
from penstock.tools.tables import Row, Table, row

NBYTES = 2600  # a decode step of 32 requests in today's engines
RECEIVERS = 4
PACE_NS = 5_000_000  # more than gloo takes for one
PACED, STREAMED = 60, 200  # messages of one round
LARGE_NBYTES, FEWER = 50_000, 5  # of larger messages a round has one in so many
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

    def measure(self, nbytes: int) -> Figures:
        """Measures whole calls of one round."""
        fewer = FEWER if nbytes >= LARGE_NBYTES else 1
        paced = self.perform("whole", PACED // fewer, nbytes, PACE_NS)
        streamed = self.perform("whole", STREAMED // fewer, nbytes)
        return {f"{self.kind}_one_way_us": one_way_us(paced), f"{self.kind}_each_us": per_message_us(streamed)}

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
        message = self._ends[0].receive(ROUND_LIMIT)
        return float(statistics.median(b - a for a, b in zip(message["begins"], message["ends"]))) / 1e3

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
    """Starts ours, gloo's, and nccl's where there are devices for it. Raises Unavailable where there is no torch."""
    python = python_with("torch")
    with contextlib.ExitStack() as closing, tempfile.TemporaryDirectory(prefix="penstock-compare-") as folder:
        channel = closing.enter_context(penstock.Broadcast(receivers=receivers, name="compare"))
        kinds = [("penstock", sys.executable, str(channel.ticket)), ("gloo", python, f"file://{folder}/gloo")]
        if device_count(python) > receivers:
            kinds.append(("nccl", python, f"file://{folder}/nccl"))
        running = []
        for kind, interpreter, address in kinds:
            running.append(Group(kind, interpreter, receivers, address))
            closing.callback(running[-1].close)
        yield running


def device_count(python: str) -> int:
    probe = "import torch; print(torch.cuda.device_count())"
    run = subprocess.run([python, "-c", probe], check=False, capture_output=True, text=True)
    return int(run.stdout) if run.stdout.strip().isdecimal() else 0


def sweep(rounds: int, receivers: int, sizes: Sequence[int]) -> tuple[dict[str, Any], dict[int, list[Figures]]]:
    """Measures messages of several sizes. Returns about what, and the figures of each round by size.

    Raises Unavailable.
    """
    figures: dict[int, list[Figures]] = {}
    with groups(receivers) as running:
        abouts = {group.kind: group.wait_until_ready() for group in running}
        gloo = next(group for group in running if group.kind == "gloo")
        for nbytes in sizes:
            for group in running:
                group.perform("whole", 20, nbytes)
            figures[nbytes] = [_one_round(running, gloo, nbytes, abouts["gloo"]["devices"]) for _ in range(rounds)]
    return abouts["gloo"], figures


def _one_round(running: Sequence[Group], gloo: Group, nbytes: int, devices: int) -> Figures:
    fewer = FEWER if nbytes >= LARGE_NBYTES else 1
    figures: Figures = {}
    for group in running:
        figures |= group.measure(nbytes)
    for what in ("size", "data", "known"):
        figures[f"{what}_one_way_us"] = one_way_us(gloo.perform(what, PACED // fewer, nbytes, PACE_NS))
    for what in ("serialise", "concatenate", *(["device"] if devices else [])):
        figures[f"{what}_us"] = gloo.alone(what, STREAMED // fewer, nbytes)
    return figures


def medians(rounds: Sequence[Figures]) -> Figures:
    """Returns each figure's median; a ratio to ours is taken in each round."""
    figures = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}

    def ratio(key: str, ours: str) -> float:
        return statistics.median(each[key] / each[ours] for each in rounds)

    for key in ("one_way", "each"):
        figures[f"{key}_ratio"] = ratio(f"gloo_{key}_us", f"penstock_{key}_us")
        if f"nccl_{key}_us" in figures:
            figures[f"nccl_{key}_ratio"] = ratio(f"nccl_{key}_us", f"penstock_{key}_us")
    figures["known_ratio"] = ratio("known_one_way_us", "penstock_one_way_us")
    return figures


def describe(figures: Figures, about: dict[str, Any], parameters: dict[str, Any]) -> tuple[list[Row], Table]:
    """Returns the records and the table of one size and one number of receivers."""
    rows = [
        row("codec", "broadcast", "penstock", **parameters, one_way_us=figures["penstock_one_way_us"],
            each_us=figures["penstock_each_us"]),
        row("codec", "broadcast", "gloo", **parameters, torch=about["torch"],
            one_way_us=figures["gloo_one_way_us"], each_us=figures["gloo_each_us"],
            size_broadcast_us=figures["size_one_way_us"], data_broadcast_us=figures["data_one_way_us"],
            serialise_us=figures["serialise_us"], concatenate_us=figures["concatenate_us"],
            **({"device_us": figures["device_us"]} if "device_us" in figures else {}),
            known_one_way_us=figures["known_one_way_us"], known_one_way_ratio_to_penstock=figures["known_ratio"],
            one_way_ratio_to_penstock=figures["one_way_ratio"], each_ratio_to_penstock=figures["each_ratio"]),
    ]  # fmt: skip
    if "nccl_one_way_us" in figures:
        rows.append(row("codec", "broadcast", "nccl", **parameters, torch=about["torch"],
                        one_way_us=figures["nccl_one_way_us"], each_us=figures["nccl_each_us"],
                        one_way_ratio_to_penstock=figures["nccl_one_way_ratio"]))  # fmt: skip
    cells = [
        ["penstock: one broadcast", short(figures["penstock_one_way_us"]), short(figures["penstock_each_us"]), "1"],
        ["gloo: broadcast_object_list", short(figures["gloo_one_way_us"]), short(figures["gloo_each_us"]),
         f"{short(figures['one_way_ratio'])}, {short(figures['each_ratio'])}"],
        _nccl_cells(figures),
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
    if not about["devices"]:
        notes.append("no device: gloo stays on the CPU, so nothing is moved to one")
    if "nccl_one_way_us" not in figures:
        notes.append(
            f"nccl: not measured: {about['devices']} devices, and {parameters['receivers'] + 1} ranks need one each"
        )
    title = f"One message of {parameters['nbytes']:,} bytes to {parameters['receivers']} receivers (#4440)"
    return rows, Table(title, ("", "one way, µs", "each, µs", "times ours"), cells, notes)


def _nccl_cells(figures: Figures) -> list[str]:
    keys = ("nccl_one_way_us", "nccl_each_us", "nccl_one_way_ratio")
    return ["nccl: broadcast_object_list", *(short(figures[key]) if key in figures else "-" for key in keys)]
