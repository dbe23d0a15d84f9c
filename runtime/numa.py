"""Processes beside their devices: on a machine with several NUMA nodes, a process runs on the processors of the node
that its device hangs on.

Only processors are bound. Memory follows by itself: Linux gives a page from the node of the thread that touches it
first (numa(7), the default policy), so what a bound process reserves, pins and copies from lies beside its device too.
Without that, half of the copies of a machine with two sockets cross the link between them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def cpus_beside(
    numa_nodes: Sequence[int | None], cpus_of: Mapping[int, Collection[int]], allowed: Collection[int]
) -> frozenset[int] | None:
    """The processors that a process on devices of these NUMA nodes should run on; None: leave it as it is.

    Nothing is bound where there is one node only, where a device's node is not known, and where none of the nodes'
    processors may be used (a container's cpuset): a process on the far side is slow, one on no processor does not run.

    Args:
        numa_nodes: one for each device, None where not known. Empty: no devices of that kind.
        cpus_of: NUMA node to its processors; a node with memory alone has none.
        allowed: processors that the process may use now.
    """
    if sum(bool(cpus) for cpus in cpus_of.values()) < 2 or not numa_nodes:
        return None
    known = [node for node in numa_nodes if node is not None and node in cpus_of]
    if len(known) < len(numa_nodes):
        return None
    beside = frozenset(cpu for node in known for cpu in cpus_of[node]) & frozenset(allowed)
    return beside if beside and beside != frozenset(allowed) else None


def bind(numa_nodes: Sequence[int | None], root: Path | None = None) -> frozenset[int] | None:
    """Let this process, with every thread and process that it starts from now on, run beside devices of these nodes.
    The processors it is bound to, None if it is left as it is. Call it before threads are started."""
    if not numa_nodes or None in numa_nodes:
        return None
    cpus = cpus_beside(numa_nodes, _cpus_of(root or NODES), os.sched_getaffinity(0))
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    return cpus


def _cpus_of(root: Path) -> dict[int, frozenset[int]]:
    return {
        int(folder.name.removeprefix("node")): parse_list((folder / "cpulist").read_text())
        for folder in root.glob("node[0-9]*")
    }


def parse_list(text: str) -> frozenset[int]:
    """The kernel's list format: "0-3,8" is 0, 1, 2, 3 and 8; a node without processors has an empty line."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def shown(cpus: Collection[int]) -> str:
    """The inverse of `parse_list`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)
