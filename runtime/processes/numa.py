"""Binds a process to the processors of the NUMA node that its device is attached to.

Only processors are bound, and memory follows: Linux takes a page from the node of the thread that touches it first
(numa(7), the default policy). So the memory that a bound process reserves, pins and copies from is near its device too.
Otherwise half of the copies on a machine with two sockets cross the link between them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def cpus_beside(
    numa_nodes: Sequence[int | None], cpus_of: Mapping[int, Collection[int]], allowed: Collection[int]
) -> frozenset[int] | None:
    """The processors that a process on devices of these NUMA nodes should run on; None leaves it as it is.

    It binds nothing if there is only one node, if a device's node is unknown (None), or if the process may use none of
    the nodes' processors (a container's cpuset): a process on the wrong node is slow, one without a processor does not
    run.
    """
    if sum(bool(cpus) for cpus in cpus_of.values()) < 2 or not all(node in cpus_of for node in numa_nodes):
        return None
    beside = frozenset(cpu for node in numa_nodes if node is not None for cpu in cpus_of[node]) & frozenset(allowed)
    return beside if beside and beside != frozenset(allowed) else None


def bind(numa_nodes: Sequence[int | None], root: Path | None = None) -> frozenset[int] | None:
    """Bind this process, and every thread and process that it starts from now on, to the processors of these nodes.
    Returns the processors, None if nothing was bound. Call it before starting threads."""
    cpus_of = {
        int(folder.name.removeprefix("node")): parse_list((folder / "cpulist").read_text())
        for folder in (root or NODES).glob("node[0-9]*")
    }
    cpus = cpus_beside(numa_nodes, cpus_of, os.sched_getaffinity(0))
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    return cpus


def parse_list(text: str) -> frozenset[int]:
    """Parses the kernel's list format: "0-3,8" is 0, 1, 2, 3 and 8. A node without processors has an empty line."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
