"""From the stamps of the processes to the figures of one round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bench.harness.phases import Order, Report
from bench.harness.sessions import Session

Figures = dict[str, float]


def quantile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank quantile of values that are in order."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median_figures(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over the rounds."""
    return {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}


def latency_figures(nanoseconds: Sequence[int], prefix: str = "") -> Figures:
    """p50, p99, p99.9 and the largest, in microseconds."""
    ordered = sorted(nanoseconds)
    return {
        f"{prefix}p50_us": quantile(ordered, 0.5) / 1e3,
        f"{prefix}p99_us": quantile(ordered, 0.99) / 1e3,
        f"{prefix}p999_us": quantile(ordered, 0.999) / 1e3,
        f"{prefix}max_us": ordered[-1] / 1e3,
    }


def warm_up(messages: int) -> int:
    """How many messages at the beginning of a phase are not counted; in lock-step the first is compared in full."""
    return min(50, max(1, messages // 5)) if messages > 1 else 0


def differences(begins: Sequence[int], ends: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


def one_way_figures(reports: Sequence[Report], skipped: int) -> Figures:
    """From just before the send until the last receiver had it, and the time the send took the sender."""
    sender, *receivers = reports
    last = [max(arrivals) for arrivals in zip(*(report.arrivals for report in receivers), strict=True)]
    return {
        **latency_figures(differences(sender.begins, last)[skipped:]),
        **latency_figures(differences(sender.begins, sender.sents)[skipped:], "send_"),
        "messages": len(last) - skipped,
    }


def cpu_figures(reports: Sequence[Report]) -> Figures:
    """CPU time of each process over its wall time, in cores."""
    shares = [report.cpu / report.wall for report in reports]
    return {"cpu_cores": sum(shares), "cpu_sender_cores": shares[0], "cpu_receivers_cores": sum(shares[1:])}


# Each measure below has one session perform one order, and returns the figures.


def lock_step(session: Session, order: Order) -> Figures:
    """Two sets in one: the round trip's keys begin with "round_trip.", the others with "one_way."."""
    reports = session.perform(order)
    skipped = warm_up(order.messages)
    round_trips = differences(reports[0].begins, reports[0].dones)[skipped:]
    round_trip = {**latency_figures(round_trips), "messages": len(round_trips)}
    one_way = one_way_figures(reports, skipped)
    return {
        **{f"round_trip.{key}": value for key, value in round_trip.items()},
        **{f"one_way.{key}": value for key, value in one_way.items()},
    }


def paced(session: Session, order: Order) -> Figures:
    reports = session.perform(order)
    return {**one_way_figures(reports, warm_up(order.messages)), **cpu_figures(reports)}


def stream(session: Session, order: Order) -> Figures:
    reports = session.perform(order)
    nanoseconds = max(report.arrivals[0] for report in reports[1:]) - reports[0].begins[0]
    return {"per_s": order.messages / nanoseconds * 1e9, "messages": order.messages, **cpu_figures(reports)}


def collect(session: Session, order: Order) -> Figures:
    reports = session.perform(order)
    messages = order.messages * session.receivers
    return {"per_s": messages / (reports[0].dones[0] - reports[0].begins[0]) * 1e9, "messages": messages}


def exchange(session: Session, order: Order) -> Figures:
    receivers = session.perform(order)[1:]
    skipped = warm_up(order.messages)
    took = [each for report in receivers for each in differences(report.begins, report.dones)[skipped:]]
    return {**latency_figures(took), "messages": len(took)}
