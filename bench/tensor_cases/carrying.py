"""One tensor to all receivers, by every way in turn: put, get, request to last view, and what memory it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from bench.harness.figures import Figures, differences, median_figures, quantile, warm_up
from bench.harness.output import short, short_nbytes
from bench.harness.phases import Order
from bench.harness.sessions import Session
from bench.harness.tensor_phases import TensorReport
from bench.harness.turns import Column, Outcome, Turns

STORE, PRODUCE = "penstock-store", "penstock-produce"
STORES = (STORE, "penstock-store-torch", "vllm-cache")  # ways that put first, and are got from
LEAST, LARGE_NBYTES = 5, 128 << 20
FIGURES = ("view_p50_us", "view_p99_us", "read_p50_us", "read_p99_us", "messages")
PUT_AND_GET = ("put_p50_us", "put_p99_us", "get_p50_us", "get_p99_us", "copy_p50_us", "put_of_memcpy")


def spread(nanoseconds: Sequence[int], name: str) -> Figures:
    ordered = sorted(nanoseconds)
    return {f"{name}_p50_us": quantile(ordered, 0.5) / 1e3, f"{name}_p99_us": quantile(ordered, 0.99) / 1e3}


def carry(session: Session, order: Order) -> Figures:
    """put: until it is there for others. get: of each receiver, from knowing what to get until it has a view.

    view: from before the put until the last receiver has it. read: until each has read a byte of every page.
    """
    sender, *receivers = cast(list[TensorReport], session.perform(order))
    skipped = warm_up(order.messages)
    views = [max(each) for each in zip(*(report.arrivals for report in receivers), strict=True)]
    reads = [max(each) for each in zip(*(report.reads for report in receivers), strict=True)]
    gets = [each for report in receivers for each in differences(report.tokens, report.arrivals)[skipped:]]
    result = {
        **spread(differences(sender.begins, sender.puts)[skipped:], "put"),
        **spread(gets, "get"),
        **spread(differences(sender.begins, views)[skipped:], "view"),
        **spread(differences(sender.begins, reads)[skipped:], "read"),
        "messages": len(views) - skipped,
    }
    if sender.copies:
        copies = spread(list(sender.copies[skipped:]), "copy")
        result |= {**copies, "put_of_memcpy": copies["copy_p50_us"] / result["put_p50_us"]}
    return result


def weigh(session: Session, order: Order) -> Figures:
    """How many times the tensor lies in memory while all receivers hold it; the sender's own does not count."""

    def total() -> int:
        return sum(report.nbytes for report in cast(list[TensorReport], session.perform(order._replace(kind="weigh"))))

    for kind in ("hold", "let_go"):  # a small one first: what is imported with the first is not its memory
        session.perform(order._replace(kind=kind, nbytes=order.nbytes // 16))
    before = total()
    session.perform(order)
    held = total()
    session.perform(order._replace(kind="let_go"))
    return {"copies": (held - before) / order.nbytes}


def titled(turns: Turns) -> str:
    return f"{turns.receivers} receiver{'s' * (turns.receivers > 1)}"


def run_memory(turns: Turns, nbytes: int) -> Outcome:
    """Before anything else is carried: memory that is touched for the first time shows."""
    outcome = turns.take(turns.same_order(Order("hold", nbytes, 1)), weigh, rounds=1)
    turns.record("memory", outcome, ("copies",), "copies", receivers=turns.receivers, nbytes=nbytes)
    column = Column(outcome, lambda result: f"{result['copies']:.2f}", "copies")
    title = f"Memory for one tensor of {short_nbytes(nbytes)} that {titled(turns)} hold; times its size"
    turns.table(title, {"copies": column})
    return outcome


def warm(turns: Turns, nbytes: int) -> None:
    turns.take(turns.same_order(Order("warm", nbytes, 3)), carry, rounds=1)


def run_sizes(turns: Turns, sizes: Sequence[int], seconds: float) -> dict[int, Outcome]:
    """Records everything; three tables: put, get, and request to last view."""
    outcomes: dict[int, Outcome] = {}
    for nbytes in sizes:
        orders = turns.timed_orders("carry", nbytes, seconds, LEAST if nbytes < LARGE_NBYTES else 3, 400)
        outcomes[nbytes] = outcome = turns.take(orders, carry, turns.rounds)
        parameters = {"receivers": turns.receivers, "nbytes": nbytes}
        turns.record("carry", outcome, FIGURES, "view_p50_us", **parameters)
        for name in outcome.rounds:
            if name in (*STORES, PRODUCE):
                result = {key: each for key, each in median_of(outcome, name).items() if key in PUT_AND_GET}
                turns.output.record("put_and_get", name, **parameters, **result, quiet=outcome.is_quiet)
    put_and_get(turns, outcomes)
    about = f"{titled(turns)}, µs p50 / p99"
    turns.table(f"Request to last view, {about}", {
        short_nbytes(nbytes): Column(outcome, two("view"), "view_p50_us") for nbytes, outcome in outcomes.items()
    })  # fmt: skip
    turns.table(f"Request until all have read a byte of every page, {about}", {
        short_nbytes(nbytes): Column(outcome, two("read"), "read_p50_us") for nbytes, outcome in outcomes.items()
    })  # fmt: skip
    return outcomes


def two(name: str) -> Callable[[Figures], str]:
    return lambda result: f"{short(result[f'{name}_p50_us'])} / {short(result[f'{name}_p99_us'])}"


def median_of(outcome: Outcome, name: str) -> Figures:
    return median_figures(outcome.rounds[name])


def put_and_get(turns: Turns, outcomes: dict[int, Outcome]) -> None:
    """Of the ways that have both; a memcpy of the same bytes in the same process took turns with our puts."""
    rows: list[tuple[str, list[str]]] = []

    def row(label: str, cell: Callable[[int, Outcome], str | None]) -> None:
        cells = [cell(nbytes, outcome) for nbytes, outcome in outcomes.items()]
        if any(each is not None for each in cells):
            rows.append((label, [each or "-" for each in cells]))

    def of(name: str, make: Callable[[int, Figures], str]) -> Callable[[int, Outcome], str | None]:
        return lambda nbytes, outcome: make(nbytes, median_of(outcome, name)) if name in outcome.rounds else None

    def rate(key: str) -> Callable[[int, Figures], str]:
        return lambda nbytes, figures: f"{short(figures[key])} ({nbytes / figures[key] / 1e3:.1f} GB/s)"

    row("memcpy", of(STORE, rate("copy_p50_us")))
    for name in STORES:
        row(f"{name}: put", of(name, rate("put_p50_us")))
    row(f"{STORE}: put, of memcpy's bandwidth", of(STORE, lambda _, result: f"{result['put_of_memcpy']:.2f}"))
    row(f"{PRODUCE}: make + share, filled in place", of(PRODUCE, lambda _, figures: two("put")(figures)))
    for name in (*STORES, PRODUCE):
        row(f"{name}: get + view", of(name, lambda _, actual: two("get")(actual)))
    if rows:
        title = f"Put and get, {titled(turns)}, µs; two figures: p50 / p99"
        turns.output.table(title, [short_nbytes(nbytes) for nbytes in outcomes], rows)
