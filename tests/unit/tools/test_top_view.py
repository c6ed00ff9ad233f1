"""A server on a terminal: rows that fit, unknown figures, and names with the syntax of markup."""

import io
from typing import Any

import msgspec
import pytest

pytest.importorskip("rich")

from rich.console import Console

from penstock.server.status.counters import ITEM_FIELDS
from penstock.server.status.snapshot import ChannelView, HolderView, ProcessView, ServerSnapshot, StoreView
from penstock.server.status.snapshot_rates import View
from penstock.tools.top.view import BARS, History, amount, drawn, sparkline
from tests.unit.server.status.test_snapshot_rates import NOTICE, moment, view, zero


def busy(at: float, name: str = "m") -> ServerSnapshot:
    """A server with many processes and channels, with counts in proportion to `at`."""
    many = int(at * 100)
    server_info = msgspec.structs.replace(NOTICE, name=name)
    engine = view(
        "engines", engine_incarnation=1, num_requests_running=4, num_requests_waiting=3, blocks=100, free_blocks=25,
        engine_steps=many, sampled_tokens=4 * many, engine_busy_seconds=0.008 * many, engine_idle_seconds=0.002 * many,
        engine_core_seconds=0.0005 * many,
    )  # fmt: skip
    result = moment(
        at,
        time=at,
        engines=(engine, engine),
        served=(view("served"), view("served")),
        servers=(view("servers", open_requests=7),),
        processes=tuple(
            zero(ProcessView, role="worker", index=item, pid=item + 1, incarnation=1 + (item == 3), state="serves")
            for item in range(12)
        ),
        channels=tuple(zero(ChannelView, name=f"{name} {item}", kind="inbox", records=many) for item in range(30)),
        stores=(zero(StoreView, name="s", hits=many, misses=many, holders=(HolderView(name, 1, 2048),)),),
    )
    return msgspec.structs.replace(result, server_info=server_info)


def view_and_history(name: str = "m") -> tuple[View, History]:
    result, history = View.after(busy(10.0, name), busy(12.0, name), 5.0), History()
    history.add(result.rates)
    return result, history


def shown(width: int, height: int, name: str = "m", is_terminal: bool = True, **options: Any) -> list[str]:
    output = {"force_terminal": is_terminal, "color_system": None, "legacy_windows": False, "highlight": False}
    console = Console(file=io.StringIO(), width=width, height=height, **output)
    console.print(drawn(*view_and_history(name), console, **options))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def lines_of(snapshot: ServerSnapshot) -> list[str]:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(drawn(View(snapshot, None), History(), console))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def shown_moment(**parts: Any) -> list[str]:
    return lines_of(moment(10.0, **parts))


def test_top_counts_shared_memory_once() -> None:
    result, _ = view_and_history()
    known = zero(ProcessView, role="core", pid=1, state="serves", private_nbytes=3 << 20)
    gone = zero(ProcessView, role="core", index=1, state="gone", private_nbytes=None)
    moment = msgspec.structs.replace(
        result.moment, processes=(known, gone), memory={"channels": 2 << 30, "kv pages": 3 << 30}
    )
    rows = [line.split() for line in lines_of(moment)]
    assert ["shared", "5.0", "GiB"] in rows
    assert [row for row in rows if row[-1:] == ["GiB"]][1:] == [
        ["kv", "pages", "3.0", "GiB"],
        ["channels", "2.0", "GiB"],
    ]
    assert [row[-2:] for row in rows if row[:1] == ["core"]] == [["3.0", "MiB"], ["–", "–"]]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("height", [8, 15, 24, 40, 100])
def test_view_is_never_larger_than_the_terminal(width: int, height: int) -> None:
    lines = shown(width, height)
    assert len(lines) < max(height, 10) and max(map(len, lines)) <= width
    assert any("7 open" in line for line in lines)


def test_rows_that_do_not_fit_are_counted() -> None:
    lines = shown(120, 20)
    assert any("worker 0.0" in line for line in lines)
    left = [line for line in lines if "more" in line]
    assert left and left[0].split()[:2] == ["…", str(12 - sum("worker 0." in line for line in lines))]
    assert not any("more" in line.split() for line in shown(120, 100))


def test_top_prints_all_rows_into_a_pipe() -> None:
    lines = shown(120, 10, is_terminal=False)
    assert sum(" inbox " in line for line in lines) == 30


def test_view_shows_current_numbers_and_rates() -> None:
    text = "\n".join(shown(160, 100))
    assert "14 running" not in text and "8 running" in text and "6 waiting" in text
    assert "800 generated/s" in text and "150 of 200 (75%) KV blocks" in text
    assert "10 ms: device 8 ms + waiting 2 ms; core 500 µs; 100/s" in text
    worker = next(line for line in text.splitlines() if "worker 0.3" in line)
    assert worker.split()[:5] == ["worker", "0.3", "4", "serves", "1"]
    store = next(line for line in text.splitlines() if "2.0 KiB" in line)
    assert "50% of 2400" in store and "m 2.0 KiB" in store


def test_prefix_hits_are_those_of_all_groups() -> None:
    engines = [view("engines", prefix_cache_queries=count, prefix_cache_hits=50) for count in (300, 100)]
    text = "\n".join(shown_moment(engines=engines, served=[view("served")] * 2))
    assert "25% prefix hits" in text
    assert "– prefix hits" in "\n".join(shown_moment(engines=[view("engines")], served=[view("served")]))


def test_restarted_group_counts_once_and_a_gone_process_counts() -> None:
    group = [
        zero(ProcessView, role=role, pid=1, incarnation=3, state="serves") for role in ("core", "worker", "output")
    ]
    servers = [
        zero(ProcessView, role="server", index=entry, incarnation=1 + entry, state="serves") for entry in range(2)
    ]
    gone = zero(ProcessView, role="worker", group=1, incarnation=1, state="gone")
    item, two = shown_moment(processes=(*group, *servers)), shown_moment(processes=(*group, *servers, gone))
    assert any("3 restarts" in line and "gone" not in line for line in item)
    assert any("3 restarts   1 gone" in line for line in two)
    assert any("0 restarts" in line for line in shown_moment())


def test_spills_of_channels_are_shown_where_there_are_any() -> None:
    still = zero(ChannelView, name="still", kind="ring")
    spilling = zero(ChannelView, name="spilling", kind="ring", spills=1234, exhaustions=2)
    assert not any("spills" in line for line in shown_moment(channels=(still,)))
    lines = shown_moment(channels=(still, spilling))
    assert any(line.split()[-3:] == ["spills", "no", "room"] for line in lines)
    assert next(line for line in lines if line.startswith("spilling")).split()[-2:] == ["1,234", "2"]
    assert next(line for line in lines if line.startswith("still")).split()[-2:] == ["0", "0"]


def test_the_ways_of_values_are_shown_where_there_is_a_store_or_a_value() -> None:
    def lines(values: int, *stores: Any) -> list[list[str]]:
        servers = (view("servers", **{"items.hit": values, "items.put": 2 * values}),) * 2
        return [line.split() for line in shown_moment(servers=servers, stores=stores)]

    head, row = ["images", "and", "embeddings", *ITEM_FIELDS], ["all", "servers"]
    assert head not in lines(0) and [*row, *"000000"] in lines(0, zero(StoreView, name="s"))
    assert head in lines(3) and [*row, "6", "12", *"0000"] in lines(3)


def test_counters_that_are_not_0_are_listed() -> None:
    rows = [line.split() for line in shown(160, 100)]
    assert ["counter", "number", "per", "second"] in rows
    assert ["engine_steps", "2,400", "200"] in rows and ["num_requests_running", "8"] in rows
    assert not any(row[:1] == ["encodings"] for row in rows)


def test_keys_are_named_where_they_have_an_effect() -> None:
    assert shown(120, 30, keys="q: end")[1].strip() == "q: end"
    assert shown(120, 30)[1].strip() == ""


def test_view_shows_no_rates_before_the_second_reading() -> None:
    text = "\n".join(lines_of(busy(10.0)))
    assert "– generated/s" in text and "answered/s" not in text


def test_group_that_is_coming_back_has_a_line_with_the_requests_that_wait() -> None:
    result = busy(10.0)
    engines = (result.engines[0], view("engines"))
    served = (result.served[0], view("served", requests_waiting_to_resume=5))
    text = "\n".join(lines_of(msgspec.structs.replace(result, engines=engines, served=served)))
    assert "5 waiting to resume" in text and "group 1     is coming back, 5 requests to resume" in text
    assert "group 0" not in text and "to resume" not in "\n".join(shown(120, 100))


def test_view_reports_a_gone_server() -> None:
    assert "GONE: process 7 has ended" in shown(120, 30, gone="process 7 has ended\nmore")[0]


def test_a_name_is_no_markup() -> None:
    assert "[red]x[/red]" in "\n".join(shown(160, 100, name="[red]x[/red]"))


def test_sparkline_ends_with_the_last_value_and_zero_is_blank() -> None:
    assert sparkline([1, 2, 4, 8], 6) == "  ▂▃▅█"
    assert sparkline([0, 0.001, 5], 3) == f"{BARS[0]}{BARS[1]}{BARS[8]}"
    assert sparkline([9, 1, 1], 2) == "██"  # a hidden value does not count
    assert sparkline([], 3) == "   " and sparkline([0.0], 1) == " "


def test_amounts_have_three_figures() -> None:
    assert [amount(item) for item in (None, 0, 0.04, 3.14159, 99.96, 1234.5)] == "– 0 0.0 3.1 100 1,234".split()
