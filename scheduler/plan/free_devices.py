"""Chooses exact devices: best fit over nodes, then direct links and NUMA inside a node.

The set of free devices lives for one planning round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from scheduler.core.workload import Device, node_of


class FreeDevices:
    """Unassigned devices, by node. The time of `choose` grows linearly with the number of nodes."""

    def __init__(self, devices: Iterable[Device]):
        self._nodes: dict[str, dict[str, Device]] = {}
        for device in devices:
            self._nodes.setdefault(device.node, {})[device.id] = device

    def has(self, device_ids: Iterable[str]) -> bool:
        return all(d in self._nodes.get(node_of(d), ()) for d in device_ids)

    def take(self, device_ids: Iterable[str]) -> None:
        for device_id in device_ids:
            left = self._nodes.get(node := node_of(device_id), {})
            left.pop(device_id, None)
            if not left:
                self._nodes.pop(node, None)

    def _tightest(self, count: int, nodes: Collection[str]) -> dict[str, Device] | None:
        """Return the free devices of the node with the fewest, but at least `count`, among these nodes or all."""
        tightest: dict[str, Device] | None = None
        for node, left in self._nodes.items():
            size = len(left)
            if size >= count and (tightest is None or size < len(tightest)) and (not nodes or node in nodes):
                tightest = left
                if size == count:
                    break
        return tightest

    def choose(
        self,
        count: int,
        *,
        nodes: Collection[str] = (),
        near: Collection[str] = (),
        only: FreeDevices | None = None,
    ) -> tuple[str, ...] | None:
        """Return the best `count` devices of one node, in index order, without taking them; None if no node has enough.

        Args:
            nodes: allowed nodes; empty: any node.
            near: preferred devices, on the preferred node (the holder's current devices).
            only: a subset to try first (devices that no holder has to leave).
        """
        own = Counter(node_of(d) for d in near if self.has([d]) and (not nodes or node_of(d) in nodes))
        kept = [node for node in own if len(self._nodes[node]) >= count]
        if kept:
            node = min(kept, key=lambda n: (-own[n], len(self._nodes[n])))
            return _pick(list(self._nodes[node].values()), count, frozenset(near))
        for free in (only, self):
            if free is not None and (left := free._tightest(count, nodes)) is not None:
                return _pick(list(left.values()), count, frozenset())
        return None


def _pick(devices: list[Device], count: int, prefer: frozenset[str]) -> tuple[str, ...]:
    """Pick `count` of one node's devices: with the most direct links, then the fewest NUMA nodes, then the most devices
    in `prefer`, then the tightest NUMA node. Nodes are small (up to 16 devices): a group grows from each device."""
    if count < len(devices):
        on_numa = Counter(d.numa_node for d in devices)

        def score(group: list[Device]) -> tuple[int, ...]:
            ids = {d.id for d in group}
            numa = {d.numa_node for d in group}
            return (
                -sum(len(d.linked & ids) for d in group),
                sum(len(d.linked & ids) for d in devices if d.id not in ids),  # number of direct links that it breaks
                len(numa),
                -len(ids & prefer),
                sum(on_numa[n] for n in numa),
                *sorted(d.index for d in group),
            )

        seeds: Iterable[Device] = devices
        if not any(d.linked for d in devices):  # then one device of each NUMA node is enough
            first = sorted(devices, key=lambda d: (d.id not in prefer, d.index), reverse=True)
            seeds = {d.numa_node: d for d in first}.values()
        devices = min((_grown(seed, devices, count, prefer) for seed in seeds), key=score)
    return tuple(d.id for d in sorted(devices, key=lambda d: d.index))


def _grown(seed: Device, devices: list[Device], count: int, prefer: frozenset[str]) -> list[Device]:
    """Return `count` devices, starting with `seed`: each time add the best linked, of these the nearest."""
    group, rest = [seed], [d for d in devices if d is not seed]
    while len(group) < count:
        ids = {d.id for d in group}
        nearest = min(
            rest, key=lambda d: (-len(d.linked & ids), d.numa_node != seed.numa_node, d.id not in prefer, d.index)
        )
        group.append(nearest)
        rest.remove(nearest)
    return group
