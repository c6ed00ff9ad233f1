"""Everything that the segments tell at one moment, and what became of it since the moment before."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from penstock import _native
from penstock.demo.plumbing import Figures, Plumbing
from penstock.tools.inspect import Json, in_seconds, in_units


@dataclass
class Sight:
    """One such moment."""

    at: float
    elapsed: float
    channels: dict[str, Json]
    pool: Json
    pids: dict[str, int]
    counts: dict[str, int]
    round_trips: tuple[float, float]
    before: Sight | None

    @classmethod
    def take(
        cls, plumbing: Plumbing, figures: Figures, pids: dict[str, int], elapsed: float, before: Sight | None
    ) -> Sight:
        channels = {channel.name: channel.snapshot() for channel in plumbing.channels}
        pool = dict(_native.snapshot(os.dup(plumbing.images.fd)))
        counts = {
            "steps": figures[Figures.STEPS],
            "right": figures[Figures.RIGHT],
            "wrong": figures[Figures.WRONG],
            "gone": figures[Figures.GONE],
            "read": figures[Figures.NBYTES_READ],
            "written": pool["pool"][0]["taken_nbytes_total"],
            "images": pool["pool"][0]["takes"],
            "messages": sum(end["records"] for one in channels.values() for end in one["receivers"]),
        }
        for name, channel in channels.items():
            counts[f"{name} records"] = sum(end["records"] for end in channel["senders"])
            counts[f"{name} nbytes"] = sum(end["nbytes"] for end in channel["senders"])
            counts[f"{name} parks"] = sum(end["parks"] for end in channel["senders"] + channel["receivers"])
        if before is not None:
            before.before = None  # one is enough
        return cls(time.monotonic(), elapsed, channels, pool, pids, counts, figures.round_trips(), before)

    def rate(self, name: str) -> float:
        if self.before is None:
            return 0.0
        return max(self.counts[name] - self.before.counts[name], 0) / max(self.at - self.before.at, 1e-3)

    def longest_wait(self, channel: str, role: str) -> str:
        return in_seconds(max((end["longest_wait_ns"] for end in self.channels[channel][role]), default=0))

    def state(self, pid: int) -> str:
        states = [peer["state"] for one in self.channels.values() for peer in one["peers"] if peer["pid"] == pid]
        return states[0] if states else "starting"

    def holds(self, pid: int) -> int:
        indices = {peer["index"] for peer in self.pool["peers"] if peer["pid"] == pid}
        return sum(one["nbytes"] for one in self.pool["pool"][0]["holders"] if one["peer"] in indices)

    @property
    def pool_text(self) -> str:
        pool = self.pool["pool"][0]
        return f"{in_units(pool['taken_nbytes'])} of {in_units(pool['nbytes'])} in {pool['blocks']} blocks"

    @property
    def line(self) -> str:
        p50, p99 = self.round_trips
        if self.counts["steps"] == 0:
            return f"{self.elapsed:6.1f} s  starting {len(self.pids)} processes"
        return (
            f"{self.elapsed:6.1f} s  {self.rate('steps'):.0f} steps/s  {self.rate('messages'):.0f} messages/s  "
            f"round trip p50 {in_seconds(p50)} p99 {in_seconds(p99)}  images {self.rate('images'):.0f}/s, "
            f"{self.rate('written') / 1e6:.0f} MB/s written, {self.rate('read') / 1e6:.0f} MB/s read  "
            f"pool {self.pool_text}  longest wait for a step {self.longest_wait('steps', 'receivers')}"
        )
