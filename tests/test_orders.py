"""Every atomic operation of the native core states its order, and every order has two halves and a row in its table.

`Atomic` (native/atomic.h) has no default orders, so the compiler refuses most of what is looked for here; this test
finds what goes around it, and that a name has a partner. That each half is needed is for tests/model/test_orders.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ATOMIC = ROOT / "native" / "atomic.h"
SOURCES = sorted(
    path for path in (ROOT / "native").rglob("*") if path.suffix in (".h", ".cpp") and "tests" not in path.parts
)
OPERATION = re.compile(
    r"(?:\.|->)(load|store|exchange|compare_exchange_(?:strong|weak)|fetch_(?:add|sub|or|and))\(|\b(fence)\("
)
USE = re.compile(r"order::(\w+)\.(acquire|release|acq_rel|seq_cst)\b")
BYPASS = re.compile(r"std::(?:atomic\s*<|memory_order|atomic_thread_fence)|__atomic_\w+\((?![^;]*__ATOMIC_RELAXED)")
RELEASES, ACQUIRES = {"release", "acq_rel", "seq_cst"}, {"acquire", "acq_rel", "seq_cst"}
# An order with a foreign other half.
ONE_SIDED = {"robust": "the kernel walks the list of a thread that ends"}


def without_comments(source: str) -> str:
    return re.sub(r"//[^\n]*", "", source)


def arguments(source: str, start: int) -> str:
    """What stands between the parenthesis before `start` and the one that closes it."""
    depth = 1
    for at in range(start, len(source)):
        depth += {"(": 1, ")": -1}.get(source[at], 0)
        if depth == 0:
            return source[start:at]
    raise ValueError("a parenthesis is not closed")


def without_order(source: str) -> Iterator[str]:
    """Each operation that does not say which order it has, and each that gets around Atomic."""
    source = without_comments(source)
    for match in OPERATION.finditer(source):
        values = arguments(source, match.end())
        is_call = not values.strip() and match[1] == "store"  # of something else: an atomic's store has a value
        if not is_call and not re.search(r"\bRELAXED\b|order::\w+\.\w+|\bstd::memory_order order\b", values):
            yield source[match.start() : match.end()] + values + ")"
    for match in BYPASS.finditer(source):
        yield match[0]


def declared() -> list[str]:
    return re.findall(r"^inline constexpr Order (\w+);  *// \S", ATOMIC.read_text(), re.MULTILINE)


def uses() -> dict[str, list[str]]:
    """The halves of each order, as often as they are there."""
    halves: dict[str, list[str]] = {}
    for path in SOURCES:
        for name, half in USE.findall(without_comments(path.read_text())):
            halves.setdefault(name, []).append(half)
    return halves


def has_both_halves(halves: list[str]) -> bool:
    """One operation that releases, and another that acquires."""
    return any(a in RELEASES and b in ACQUIRES for i, a in enumerate(halves) for j, b in enumerate(halves) if i != j)


def rows_of_design() -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "design" / "orders.md").read_text(), re.MULTILINE)


def test_every_atomic_operation_states_its_order() -> None:
    unordered = {
        f"{path.relative_to(ROOT)}: {operation}"
        for path in SOURCES
        if path != ATOMIC
        for operation in without_order(path.read_text())
    }
    assert not unordered


@pytest.mark.parametrize(
    ("source", "is_unordered"),
    [
        ("word.load()", True),
        ("word.store(f(1, 2))", True),
        ("word->fetch_add(1)", True),
        ("fence(std::memory_order_seq_cst);", True),
        ("std::atomic<u64> word;", True),
        ("__atomic_load_n(at, __ATOMIC_ACQUIRE);", True),
        ("word.store(f(1, 2),\n  order::publish.release)", False),
        ("word.load(RELAXED)", False),
        ("__atomic_load_n(at, __ATOMIC_RELAXED);", False),
        ("keeper.store().get(key)", False),
        ("// word.load()", False),
    ],
)
def test_an_operation_without_an_order_is_found_where_it_stands(source: str, is_unordered: bool) -> None:
    assert bool(list(without_order(source))) == is_unordered


def test_every_order_is_declared_once_and_has_both_halves() -> None:
    names, halves = declared(), uses()
    assert len(names) == len(set(names))
    assert set(halves) == set(names)
    assert {name for name in names if not has_both_halves(halves[name])} == set(ONE_SIDED)


@pytest.mark.parametrize(
    ("halves", "is_paired"),
    [
        (["release", "acquire"], True),
        (["acq_rel"], False),
        (["acq_rel", "acquire"], True),
        (["release", "release"], False),
        (["seq_cst", "seq_cst"], True),
        (["acquire", "seq_cst"], True),
        ([], False),
    ],
)
def test_an_operation_is_not_its_own_partner(halves: list[str], is_paired: bool) -> None:
    assert has_both_halves(halves) == is_paired


def test_design_has_a_row_for_each_order_and_no_other() -> None:
    assert rows_of_design() == declared()
