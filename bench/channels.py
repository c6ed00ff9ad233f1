"""How long a message takes, how many pass, and what waiting costs: our channels beside everything else.

All implementations have their processes up at the same time and take turns in every round, so that a ratio compares
what was measured within the same seconds. Nothing is compared while foreign processes use the machine.

    scripts/bench channels                       everything, in about a quarter of an hour
    scripts/bench channels --quick               the main cases in three minutes
    scripts/bench channels --only latency --receivers 1,4 --impl penstock,seqpacket,vllm
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.harness import figures
from bench.harness.figures import Figures
from bench.harness.output import short, short_nbytes
from bench.harness.phases import Order
from bench.harness.run import Run, numbers, one_of, side_by_side
from bench.harness.turns import Cell, Column, Turns
from bench.impls import IMPLEMENTATIONS, PENSTOCK, REPLY_NBYTES

STEP_NBYTES = 2600  # a decode step of 32 requests in today's engines
LARGE_NBYTES = 65536  # from here on a paced sender waits for the replies: at most one such message is under way
MILLISECOND = 1e-3
INBOX_SENDERS = 4


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    receivers: tuple[int, ...]
    sizes: tuple[int, ...]
    paced_sizes: tuple[int, ...]
    seconds: float  # of one lock-step or stream phase
    paced_seconds: float
    slow_seconds: float  # of the phase with a message each 20 ms
    idle_seconds: float


FULL = Scale(
    receivers=(1, 2, 4, 8),
    sizes=(100, STEP_NBYTES, 65536, 1 << 20, 32 << 20),
    paced_sizes=(100, STEP_NBYTES, 65536, 1 << 20),
    seconds=0.12,
    paced_seconds=0.25,
    slow_seconds=0.8,
    idle_seconds=2.0,
)
QUICK = Scale(
    receivers=(1, 4),
    sizes=(100, STEP_NBYTES, 1 << 20),
    paced_sizes=(STEP_NBYTES,),
    seconds=0.1,
    paced_seconds=0.25,
    slow_seconds=0.4,
    idle_seconds=1.5,
)

LATENCY = ("p50_us", "p99_us", "p999_us", "max_us", "messages")
SEND = ("send_p50_us", "send_p99_us", "send_p999_us")
CPU = ("cpu_cores", "cpu_sender_cores", "cpu_receivers_cores")
SPREAD = "µs p50 / p99 / p99.9"


def spread(figures: Figures) -> str:
    return " / ".join(short(figures[key]) for key in LATENCY[:3])


def spread_and_send(figures: Figures) -> str:
    return f"{spread(figures)} (send {short(figures['send_p50_us'])})"


def figure_cell(key: str, form: str) -> Cell:
    return lambda result: format(result[key], form)


def receivers_of(turns: Turns) -> str:
    return f"{turns.receivers} receiver{'s' * (turns.receivers > 1)}"


# The cases, each for the receivers that are up ----------------------------------------------------------------------


def run_latency(turns: Turns, scale: Scale) -> None:
    """Round trip, and one way back to back: in lock-step, one message under way."""
    round_trips: dict[str, Column] = {}
    one_ways: dict[str, Column] = {}
    for nbytes in scale.sizes:
        orders = turns.timed_orders("lock_step", nbytes, scale.seconds, 4 if nbytes > 1 << 20 else 30, 5000)
        outcome = turns.take(orders, figures.lock_step, turns.rounds)
        round_trip, one_way = outcome.part("round_trip."), outcome.part("one_way.")
        parameters = {"receivers": turns.receivers, "nbytes": nbytes}
        turns.record("round_trip", round_trip, LATENCY, "p50_us", **parameters)
        turns.record("one_way", one_way, LATENCY + SEND, "p50_us", **parameters, pace_ms=0)
        round_trips[short_nbytes(nbytes)] = Column(round_trip, spread, "p50_us")
        one_ways[short_nbytes(nbytes)] = Column(one_way, spread_and_send, "p50_us")
    turns.table(f"Round trip, {receivers_of(turns)}, each replies {REPLY_NBYTES} B; {SPREAD}", round_trips)
    turns.table(f"One way, back to back, to the last of {receivers_of(turns)}; {SPREAD}", one_ways)


def run_paced(turns: Turns, scale: Scale) -> None:
    """One way with a message each millisecond: every message finds sleepers. And what CPU it costs."""
    columns: dict[str, Column] = {}
    burned: dict[str, Column] = {}
    for nbytes in scale.paced_sizes:
        is_acknowledged = nbytes >= LARGE_NBYTES
        order = Order("paced", nbytes, int(scale.paced_seconds / MILLISECOND), MILLISECOND, is_acknowledged)
        outcome = turns.take(turns.same_order(order), figures.paced, turns.rounds)
        parameters = {"receivers": turns.receivers, "nbytes": nbytes, "pace_ms": 1, "acknowledged": is_acknowledged}
        turns.record("one_way", outcome, LATENCY + SEND, "p50_us", **parameters)
        columns[short_nbytes(nbytes)] = Column(outcome, spread_and_send, "p50_us")
        if nbytes == STEP_NBYTES:
            turns.record("cpu", outcome, CPU, "cpu_cores", **parameters)
            burned["cores"] = Column(outcome, figure_cell("cpu_cores", ".3f"), "cpu_cores")
    turns.table(f"One way, a message each millisecond, to the last of {receivers_of(turns)}; {SPREAD}", columns)
    turns.table(f"CPU of all ends, {STEP_NBYTES} B each millisecond, {receivers_of(turns)}", burned)


def run_stream(turns: Turns, scale: Scale) -> None:
    columns: dict[str, Column] = {}
    for nbytes in (100, STEP_NBYTES):
        orders = turns.timed_orders("stream", nbytes, scale.seconds, 500, 100_000)
        outcome = turns.take(orders, figures.stream, turns.rounds)
        parameters = {"receivers": turns.receivers, "nbytes": nbytes}
        turns.record("stream", outcome, ("per_s", "messages", *CPU), "per_s", **parameters)
        columns[short_nbytes(nbytes)] = Column(outcome, figure_cell("per_s", ",.0f"), "per_s")
    turns.table(f"Stream, until the last of {receivers_of(turns)} has everything; messages per second", columns)


def run_cpu(turns: Turns, scale: Scale) -> None:
    """What the ends burn while little or nothing is said. Idle counts from a message, as it does in a real lull."""
    parameters: dict[str, Any] = {"receivers": turns.receivers, "nbytes": STEP_NBYTES}
    columns: dict[str, Column] = {}

    order = Order("paced", STEP_NBYTES, int(scale.slow_seconds / 0.02), 0.02, is_acknowledged=False)
    slow = turns.take(turns.same_order(order), figures.paced, turns.rounds)
    turns.record("cpu", slow, CPU, "cpu_cores", **parameters, pace_ms=20)
    columns["each 20 ms"] = Column(slow, figure_cell("cpu_cores", ".4f"), "cpu_cores")

    order = Order("paced", STEP_NBYTES, 1, scale.idle_seconds, is_acknowledged=False)
    idle = turns.take(turns.same_order(order), figures.paced, rounds=1)
    turns.record("cpu", idle, CPU, "cpu_cores", **parameters, idle_s=scale.idle_seconds)
    columns[f"idle for {scale.idle_seconds:g} s"] = Column(idle, figure_cell("cpu_cores", ".4f"), "cpu_cores")
    turns.table(f"CPU of all ends, {STEP_NBYTES} B, {receivers_of(turns)}; cores", columns)


def run_inbox(turns: Turns, scale: Scale) -> None:
    """The way back alone: many senders, one receiver."""
    parameters = {"senders": turns.receivers, "nbytes": REPLY_NBYTES}
    orders = turns.timed_orders("collect", REPLY_NBYTES, scale.seconds, 500, 50_000)
    rate = turns.take(orders, figures.collect, turns.rounds)
    turns.record("inbox_rate", rate, ("per_s", "messages"), "per_s", **parameters)

    orders = turns.timed_orders("exchange", REPLY_NBYTES, scale.seconds, 30, 5000)
    answered = turns.take(orders, figures.exchange, turns.rounds)
    turns.record("inbox_round_trip", answered, LATENCY, "p50_us", **parameters)

    columns = {
        "messages/s": Column(rate, figure_cell("per_s", ",.0f"), "per_s"),
        f"all send, one answers all; {SPREAD}": Column(answered, spread, "p50_us"),
    }
    turns.table(f"Inbox, {turns.receivers} senders, one receiver, {REPLY_NBYTES} B", columns)


def report_memory(turns: Turns, reserved: dict[str, int]) -> None:
    for name, nbytes in reserved.items():
        turns.output.record("memory", name, receivers=turns.receivers, bytes=nbytes)
    if reserved:
        rows = [(name, [f"{nbytes / (1 << 20):,.2f}"]) for name, nbytes in reserved.items()]
        title = f"Reserved for {receivers_of(turns)} and their way back (0: grows as it goes)"
        turns.output.table(title, ["MiB"], rows)


# The command --------------------------------------------------------------------------------------------------------

Case = Callable[[Turns, Scale], None]

CASES: dict[str, tuple[Case, range]] = {  # the case, and for how many receivers it is measured
    "latency": (run_latency, range(1, 1000)),
    "paced": (run_paced, range(1, 1000)),
    "stream": (run_stream, range(1, 5)),
    "cpu": (run_cpu, range(1, 5)),
    "inbox": (run_inbox, range(INBOX_SENDERS, INBOX_SENDERS + 1)),
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = side_by_side(
        "channels",
        __doc__,
        (*CASES, "memory"),
        [*IMPLEMENTATIONS],
        usual=[name for name, each in IMPLEMENTATIONS.items() if each.is_default],
        quick="fewer sizes, receivers and rounds",
    )
    parser.add_argument("--receivers", metavar="N,…", type=numbers)
    parser.add_argument("--sizes", metavar="BYTES,…", type=numbers, help="of the latency and paced cases")
    parser.add_argument("--reference", type=one_of([*IMPLEMENTATIONS]), default=PENSTOCK, help="of the ratios")
    parser.add_argument("--pin", action="store_true", help="sender on the first CPU, receivers on the others")
    return parser.parse_args(arguments)


def scale_of(options: argparse.Namespace) -> Scale:
    scale = QUICK if options.quick else FULL
    if options.receivers:
        scale = replace(scale, receivers=options.receivers)
    if options.sizes:
        paced_sizes = tuple(nbytes for nbytes in options.sizes if nbytes <= 1 << 20)
        scale = replace(scale, sizes=options.sizes, paced_sizes=paced_sizes)
    return scale


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    scale, cases = scale_of(options), options.only.split(",")
    with Run("channels", options, rounds=3, quick_rounds=2, patience=120.0) as run:
        turns = run.turns(options.reference, Turns, is_pinned=options.pin)
        run.output.say(f"×N: that figure over {options.reference}'s, round by round")
        try:
            implementations = run.available(IMPLEMENTATIONS[name] for name in run.named("impl"))
            for receivers in scale.receivers:
                turns.open(implementations, receivers)
                for name, (case, applies) in CASES.items():
                    if name in cases and receivers in applies:
                        case(turns, scale)
                reserved = turns.close()
                if "memory" in cases:
                    report_memory(turns, reserved)
        finally:
            turns.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
