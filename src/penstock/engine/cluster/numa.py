"""The NUMA nodes of this machine, as the kernel lists them."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def nodes() -> dict[int, set[int]]:
    """Returns the processors of each node; nothing where the kernel lists no nodes."""
    processors = {}
    for path in NODES.glob("node*/cpulist"):
        number = path.parent.name.removeprefix("node")
        if number.isdecimal():
            processors[int(number)] = _numbers(path.read_text())
    return processors


def node_of(processors: Collection[int]) -> int | None:
    """Returns the node to which all these processors belong; None: they are of several, or there is only one node."""
    all_nodes = nodes()
    owners = [node for node, own in all_nodes.items() if own.issuperset(processors)]
    return owners[0] if owners and len(all_nodes) > 1 else None


def require_node(number: int) -> None:
    """Raises ValueError where the kernel lists nodes, and this one is not among them."""
    all_nodes = nodes()
    if all_nodes and number not in all_nodes:
        raise ValueError(f"there is no NUMA node {number} here, but {', '.join(map(str, sorted(all_nodes)))}")


def _numbers(ranges: str) -> set[int]:
    """Returns the numbers in `0-3,8`."""
    numbers: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
