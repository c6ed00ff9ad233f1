"""How long a message takes, how many pass, and what waiting costs: our channels beside everything else.

All implementations have their processes up at the same time and take turns in every round, so that a ratio compares
what was measured within the same seconds. Nothing is compared while foreign processes use the machine.

    scripts/bench channels                       everything, in about a quarter of an hour
    scripts/bench channels --quick               the main cases in three minutes
    scripts/bench channels --only latency --receivers 1,4 --impl penstock,seqpacket,vllm
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness import figures
from bench.harness.figures import Figures
from bench.harness.output import Output, machine, short, short_nbytes
from bench.harness.phases import Order
from bench.harness.quiet import load_between, look
from bench.harness.run import Run, numbers, one_of, side_by_side
from bench.harness.sessions import Hogs
from bench.harness.turns import Cell, Column, Outcome, Turns
from bench.impls import IMPLEMENTATIONS, PENSTOCK, REPLY_NBYTES, Unavailable
from bench.impls.floor import compile_floor, run_floor
from penstock.tools import bar_chart

STEP_NBYTES = 2600  # a decode step of 32 requests in today's engines
LARGE_NBYTES = 65536  # from here on a paced sender waits for the replies: at most one such message is under way
MILLISECOND = 1e-3
SILENCE = 1.5  # seconds
INBOX_SENDERS = 4
PLOTS = Path(__file__).resolve().parent / "plots"


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
    silence_rounds: int


FULL = Scale(
    receivers=(1, 2, 4, 8),
    sizes=(100, STEP_NBYTES, 65536, 1 << 20, 32 << 20),
    paced_sizes=(100, STEP_NBYTES, 65536, 1 << 20),
    seconds=0.12,
    paced_seconds=0.25,
    slow_seconds=0.8,
    idle_seconds=2.0,
    silence_rounds=2,
)
QUICK = Scale(
    receivers=(1, 4),
    sizes=(100, STEP_NBYTES, 1 << 20),
    paced_sizes=(STEP_NBYTES,),
    seconds=0.1,
    paced_seconds=0.25,
    slow_seconds=0.4,
    idle_seconds=1.5,
    silence_rounds=1,
)

LATENCY = ("p50_us", "p99_us", "p999_us", "max_us", "messages")
SEND = ("send_p50_us", "send_p99_us", "send_p999_us")
CPU = ("cpu_cores", "cpu_sender_cores", "cpu_receivers_cores")
SPREAD = "µs p50 / p99 / p99.9"


def spread(figures: Figures) -> str:
    return " / ".join(short(figures[key]) for key in LATENCY[:3])


def spread_and_send(figures: Figures) -> str:
    return f"{spread(figures)} (send {short(figures['send_p50_us'])})"


def spread_and_worst(figures: Figures) -> str:
    return f"{spread_and_send(figures)} max {short(figures['max_us'])}"


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


def run_silence(turns: Turns, scale: Scale) -> None:
    order = Order("paced", STEP_NBYTES, 1, SILENCE, is_acknowledged=True)
    outcome = turns.take(turns.same_order(order), figures.paced, scale.silence_rounds)
    parameters = {"receivers": turns.receivers, "nbytes": STEP_NBYTES, "silence_s": SILENCE}
    turns.record("silence", outcome, ("p50_us", "max_us", "send_p50_us", "messages"), "p50_us", **parameters)
    column = Column(outcome, lambda result: short(result["p50_us"]), "p50_us")
    title = f"First message after {SILENCE} s of silence, one way, to the last of {receivers_of(turns)}; µs"
    turns.table(title, {short_nbytes(STEP_NBYTES): column})


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


def run_hogs(turns: Turns, scale: Scale) -> None:
    hogs = len(os.sched_getaffinity(0))
    order = Order("paced", STEP_NBYTES, int(scale.paced_seconds / MILLISECOND), MILLISECOND, is_acknowledged=False)
    with Hogs(hogs):
        outcome = turns.take(turns.same_order(order), figures.paced, turns.rounds)
    parameters = {"receivers": turns.receivers, "nbytes": STEP_NBYTES, "pace_ms": 1, "hogs": hogs}
    turns.record("hogs", outcome, LATENCY + SEND + CPU, "p50_us", **parameters)
    title = f"One way each millisecond beside {hogs} processes that burn all CPUs, to the last of"
    column = Column(outcome, spread_and_worst, "p50_us")
    turns.table(f"{title} {receivers_of(turns)}; {SPREAD}", {short_nbytes(STEP_NBYTES): column})


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


# The cases without processes of ours --------------------------------------------------------------------------------


def run_floor_case(turns: Turns) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        try:
            commands = compile_floor(Path(scratch))
        except Unavailable as missing:
            turns.output.say(f"\nfloor: {missing}")
            return
        outcome = Outcome({name: [] for name in commands})
        for _ in range(turns.rounds):
            before = look()
            for name, command in commands.items():
                outcome.rounds[name].append(run_floor(command))
            outcome.loads.append(load_between(before, look()))
    turns.record("floor", outcome, LATENCY, "p50_us")
    rows = [(name, [spread(outcome.figures(name))]) for name in outcome.rounds]
    turns.output.table("Floor: round trip of one word between two processes in C", [SPREAD], rows)


def call_ns(statement: str, names: dict[str, Any]) -> float:
    """Best of seven, the loop subtracted."""
    calls = 200_000
    whole = min(timeit.repeat(statement, globals=names, number=calls, repeat=7))
    loop = min(timeit.repeat("pass", globals=names, number=calls, repeat=7))
    return (whole - loop) / calls * 1e9


def run_call(turns: Turns) -> None:
    before = look()
    result = {"len(bytes)": call_ns("len(b)", {"b": b"x"}), "a Python function": call_ns("f()", {"f": lambda: 0})}
    try:
        IMPLEMENTATIONS[PENSTOCK].check()
        import penstock

        sender = penstock.Ring().open_sender()
        result["penstock: sender.is_closed"] = call_ns("s.is_closed", {"s": sender})
        sender.close()
    except Unavailable as missing:
        turns.output.say(f"\ncall: {missing}")
    load = load_between(before, look())
    for name, nanoseconds in result.items():
        turns.output.record("call", name, ns=nanoseconds, foreign_cores=load.cores, quiet=load.is_quiet)
    turns.output.table("One call from Python", ["ns"], [(name, [f"{ns:.1f}"]) for name, ns in result.items()])


def draw(output: Output, folder: Path) -> None:
    """One chart for each question, from the records of this run."""
    about = machine()
    subtitle = f"{about['cpus']} CPUs, {about['cpu_model']}, Python {about['python']}"
    if not all(record.get("quiet", True) for record in output.records):
        subtitle += "; the machine was not quiet"

    def chart(name: str, title: str, unit: str, key: str, group_by: str, **fixed: Any) -> None:
        groups: dict[Any, list[tuple[str, float]]] = {}
        for record in output.records:
            if key in record and all(record.get(each) == value for each, value in fixed.items()):
                groups.setdefault(record[group_by], []).append((record["impl"], record[key]))
        labels: dict[str, Callable[[int], str]] = {"nbytes": short_nbytes, "receivers": "1 → {}".format}
        bar_chart.draw(
            folder / f"{name}.svg",
            title,
            subtitle,
            unit,
            [(labels[group_by](value), groups[value]) for value in sorted(groups)],
        )

    measured = sorted({record["receivers"] for record in output.records if record["case"] == "round_trip"})
    for receivers in measured:
        chart(
            f"round_trip_{receivers}",
            f"Round trip, 1 → {receivers}, all reply: p50",
            "µs",
            "p50_us",
            "nbytes",
            case="round_trip",
            receivers=receivers,
        )
    by_receivers: dict[str, Any] = {"group_by": "receivers", "nbytes": STEP_NBYTES}
    title = f"One way, {STEP_NBYTES} B each millisecond, to the last receiver: p50"
    chart("one_way", title, "µs", "p50_us", case="one_way", pace_ms=1, **by_receivers)
    chart("stream", f"Stream of {STEP_NBYTES} B: messages per second", "/s", "per_s", case="stream", **by_receivers)
    chart("silence", f"First message after {SILENCE} s of silence", "µs", "p50_us", case="silence", **by_receivers)
    title = f"CPU of all ends, {STEP_NBYTES} B each millisecond"
    chart("cpu", title, "cores", "cpu_cores", case="cpu", pace_ms=1, **by_receivers)
    title = "One way each millisecond while all CPUs are busy: p99"
    chart("hogs", title, "µs", "p99_us", case="hogs", **by_receivers)


# The command --------------------------------------------------------------------------------------------------------

Case = Callable[[Turns, Scale], None]

CASES: dict[str, tuple[Case, range]] = {  # the case, and for how many receivers it is measured
    "latency": (run_latency, range(1, 1000)),
    "paced": (run_paced, range(1, 1000)),
    "stream": (run_stream, range(1, 5)),
    "silence": (run_silence, range(1, 5)),
    "cpu": (run_cpu, range(1, 5)),
    "hogs": (run_hogs, range(1, 5, 3)),
    "inbox": (run_inbox, range(INBOX_SENDERS, INBOX_SENDERS + 1)),
}
OTHER_CASES = ("floor", "call", "memory")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = side_by_side(
        "channels",
        __doc__,
        (*CASES, *OTHER_CASES),
        [*IMPLEMENTATIONS],
        usual=[name for name, each in IMPLEMENTATIONS.items() if each.is_default],
        quick="fewer sizes, receivers and rounds",
        out=f"charts and records; of a full run: {PLOTS.name}/",
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
    is_full = not options.quick and set(cases) == {*CASES, *OTHER_CASES}
    options.out = options.out or (PLOTS if is_full else None)
    with Run("channels", options, rounds=3, quick_rounds=2, patience=120.0) as run:
        turns = run.turns(options.reference, Turns, is_pinned=options.pin)
        run.output.say(f"×N: that figure over {options.reference}'s, round by round")
        if "floor" in cases:
            run_floor_case(turns)
        if "call" in cases:
            run_call(turns)
        try:
            if set(cases) & {*CASES, "memory"}:
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
        if options.out:
            draw(run.output, options.out)
            run.output.say(f"\ncharts and records are in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
