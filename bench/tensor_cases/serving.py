"""End to end: servers ask with images of which none, half or all are kept already; the classic way carries them all."""

from __future__ import annotations

from typing import Any, cast

from bench.harness.figures import Figures
from bench.harness.output import short, short_nbytes
from bench.harness.phases import Order
from bench.harness.sessions import Session
from bench.harness.turns import Column, Outcome, Turns
from bench.impls.serving import SERVERS, SMALLEST_SHARE, WORKERS, ServingReport
from bench.tensor_cases.carrying import spread, two

OURS = "penstock-serving"
SHARES = (0.0, 0.5, 1.0)
KEYS = (
    "per_s", "view_p50_us", "view_p99_us", "read_p50_us", "read_p99_us", "answer_p50_us", "answer_p99_us",
    "hits", "requests", "steps", "touched_nbytes",
)  # fmt: skip


def serve(session: Session, order: Order) -> Figures:
    """view: from before a server looks its image up until the last worker has it; answer: until the server is told."""
    if order.share:
        session.perform(order._replace(kind="fill"))
    core, *others = cast(list[ServingReport], session.perform(order))
    servers, workers = others[:SERVERS], others[SERVERS:]
    begins = {number: at for each in servers for number, at in zip(each.requests, each.begins, strict=True)}

    def last(stamps: str) -> list[int]:
        at: dict[int, int] = {}
        for each in workers:
            for number, stamp in zip(each.requests, getattr(each, stamps), strict=True):
                at[number] = max(at.get(number, 0), stamp)
        if at.keys() != begins.keys():
            raise ValueError(f"{len(begins)} requests were sent, workers saw {len(at)}")
        return [at[number] - begin for number, begin in begins.items()]

    answers = [done - begin for each in servers for begin, done in zip(each.begins, each.dones, strict=True)]
    wall = max(max(each.dones) for each in servers) - min(begins.values())
    return {
        "per_s": len(begins) / wall * 1e9,
        **spread(last("arrivals"), "view"),
        **spread(last("reads"), "read"),
        **spread(answers, "answer"),
        "requests": len(begins),
        "hits": sum(each.hits for each in servers) / len(begins),
        "steps": core.steps,
        "touched_nbytes": (core.touched_nbytes + sum(each.touched_nbytes for each in servers)) / len(begins),
    }


def run_serving(turns: Turns, images: int, largest: int, messages: int, rounds: int) -> dict[float, Outcome]:
    """By share of requests with a kept image. The classic way keeps none, and takes its turn beside each."""
    outcomes: dict[float, Outcome] = {}
    turns.take(turns.same_order(Order("serve", largest, max(messages // 4, 2))), serve, rounds=1)  # warms up
    for share in SHARES:
        order = Order("serve", largest, messages, share=share)
        outcomes[share] = outcome = turns.take(turns.same_order(order), serve, rounds)
        turns.record("serving", outcome, KEYS, "view_p50_us", share=share, images=images, largest=largest)
    sizes = f"{images} images of {short_nbytes(largest // SMALLEST_SHARE)} to {short_nbytes(largest)}"
    about = f"{SERVERS} servers, 1 core, {WORKERS} workers, {sizes}, by the share that is kept"

    def table(title: str, cell: Any, key: str) -> None:
        turns.table(f"{title}; {about}", {f"{share:.0%}": Column(each, cell, key) for share, each in outcomes.items()})

    table("Requests per second", lambda result: short(result["per_s"]), "per_s")
    table("Request to last view, µs p50 / p99", two("view"), "view_p50_us")
    table("Request until all workers have read it, µs p50 / p99", two("read"), "read_p50_us")
    table("Request to answer, µs p50 / p99", two("answer"), "answer_p50_us")
    for share, outcome in outcomes.items():
        if OURS in outcome.rounds:
            hits = outcome.figures(OURS)["hits"]
            turns.output.say(f"  {share:.0%} asked for an image that was kept at first; {hits:.0%} found theirs")
    return outcomes
