"""Chooses exact devices: best fit over nodes, then direct links and NUMA inside a node.

The free devices are a temporary value of one planning round. Every choice costs about the size of one node (plus a heap
operation), so placing all holders of a cluster is O(devices log nodes).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from itertools import groupby

from scheduler.core.inventory import Device


class FreeDevices:
    """Devices not yet assigned."""

    def __init__(self, devices: Iterable[Device]):
        self._nodes: dict[str, dict[str, Device]] = {}
        self._node_of: dict[str, str] = {}
        for device in devices:
            self._nodes.setdefault(device.node, {})[device.id] = device
            self._node_of[device.id] = device.node
        self._order = {node: n for n, node in enumerate(self._nodes)}
        self._names = list(self._nodes)
        # heaps[f] holds nodes that had f devices left when pushed; stale entries are dropped when popped.
        self._heaps: dict[int, list[int]] = {}
        for node in self._nodes:
            self._push(node)

    def __len__(self) -> int:
        return len(self._node_of)

    def __contains__(self, device_id: str) -> bool:
        return device_id in self._node_of

    def has(self, device_ids: Iterable[str]) -> bool:
        return all(d in self._node_of for d in device_ids)

    def take(self, device_ids: Iterable[str]) -> None:
        touched = set()
        for device_id in device_ids:
            node = self._node_of.pop(device_id, None)
            if node is not None:
                del self._nodes[node][device_id]
                touched.add(node)
        for node in touched:
            self._push(node)

    def _push(self, node: str) -> None:
        if left := len(self._nodes[node]):
            heapq.heappush(self._heaps.setdefault(left, []), self._order[node])

    def _node_with(self, left: int) -> str | None:
        """The first node (in inventory order) with exactly `left` devices."""
        heap = self._heaps.get(left)
        while heap:
            node = self._names[heap[0]]
            if len(self._nodes[node]) == left:
                return node
            heapq.heappop(heap)
        return None

    def _tightest(self, count: int) -> str | None:
        """The node with the fewest devices left that still has `count`."""
        for left in sorted(f for f, heap in self._heaps.items() if f >= count and heap):
            if (node := self._node_with(left)) is not None:
                return node
        return None

    def choose(
        self,
        count: int,
        *,
        single_node: bool = False,
        nodes: Collection[str] = (),
        near: Collection[str] = (),
        only: FreeDevices | None = None,
    ) -> tuple[str, ...] | None:
        """The best `count` devices, in node and index order; None if there are too few. Takes nothing.

        Args:
            single_node: refuse devices of more than one node (a tensor-parallel engine).
            nodes: take them all from one of these; empty: from anywhere.
            near: devices to prefer (what the holder has now).
            only: first try within these fewer (devices that no holder has to leave).
        """
        if count > len(self):
            return None
        if nodes:
            within = only._on(nodes) if only is not None else None
            return self._on(nodes).choose(count, single_node=True, near=near, only=within)
        if near:
            again = self._choose_near(count, near)
            if again is not None:
                return again
        if only is not None:
            chosen = only.choose(count, single_node=True) or (
                None if single_node or self._tightest(count) is not None else only.choose(count)
            )
            if chosen is not None:
                return chosen
        node = self._tightest(count)
        if node is not None:
            return _pick(list(self._nodes[node].values()), count, frozenset())
        return None if single_node else self._choose_across(count)

    def _on(self, nodes: Collection[str]) -> FreeDevices:
        """Those on these nodes."""
        return FreeDevices(device for node in self._nodes if node in nodes for device in self._nodes[node].values())

    def _choose_near(self, count: int, near: Collection[str]) -> tuple[str, ...] | None:
        own: dict[str, int] = {}
        for device_id in near:
            if device_id in self._node_of:
                own[self._node_of[device_id]] = own.get(self._node_of[device_id], 0) + 1
        fitting = [node for node in own if len(self._nodes[node]) >= count]
        if not fitting:
            return None
        node = min(fitting, key=lambda n: (-own[n], len(self._nodes[n]), self._order[n]))
        return _pick(list(self._nodes[node].values()), count, frozenset(near))

    def _choose_across(self, count: int) -> tuple[str, ...]:
        """Takes as few nodes as possible: the fullest first, the last one by best fit."""
        by_left = sorted(self._nodes, key=lambda n: (-len(self._nodes[n]), self._order[n]))
        chosen: list[str] = []
        for at, node in enumerate(by_left):
            rest = count - len(chosen)
            if len(self._nodes[node]) >= rest:
                fitting = [n for n in by_left[at:] if len(self._nodes[n]) >= rest]
                tight = min(fitting, key=lambda n: (len(self._nodes[n]), self._order[n]))
                chosen += _pick(list(self._nodes[tight].values()), rest, frozenset())
                break
            chosen += [d.id for d in sorted(self._nodes[node].values(), key=lambda d: d.index)]
        return tuple(chosen)


def _pick(devices: list[Device], count: int, prefer: frozenset[str]) -> tuple[str, ...]:
    """`count` of one node's devices: closest together first, those in `prefer` first among equals."""
    if count < len(devices):
        if count > 1 and _partly_linked(devices):
            devices = _closest_by_links(devices, count, prefer)
        else:
            devices = _closest_by_numa(devices, count, prefer)
    return tuple(d.id for d in sorted(devices, key=lambda d: d.index))


def _partly_linked(devices: list[Device]) -> bool:
    """Whether some pairs have a direct link and some do not; where all or none have one, only NUMA matters."""
    ids = frozenset(d.id for d in devices)
    links = sum(len(d.linked & ids) for d in devices)
    return 0 < links < len(devices) * (len(devices) - 1)


def _closest_by_numa(devices: list[Device], count: int, prefer: frozenset[str]) -> list[Device]:
    def numa(d: Device) -> int:
        return -1 if d.numa_node is None else d.numa_node

    groups = [
        sorted(group, key=lambda d: (d.id not in prefer, d.index))
        for _, group in groupby(sorted(devices, key=numa), key=numa)
    ]
    kept = {id(g): sum(d.id in prefer for d in g) for g in groups}
    fitting = [g for g in groups if len(g) >= count]
    if fitting:
        return min(fitting, key=lambda g: (-min(kept[id(g)], count), len(g), g[0].index))[:count]
    groups.sort(key=lambda g: (-kept[id(g)], -len(g), g[0].index))
    return [d for group in groups for d in group][:count]


def _closest_by_links(devices: list[Device], count: int, prefer: frozenset[str]) -> list[Device]:
    """From every seed add the best linked device; keep the group with most links (a node is small: at most 16)."""
    best: tuple[tuple[int, int, int, int], list[Device]] | None = None
    for seed in devices:
        group, rest = [seed], [d for d in devices if d is not seed]
        while len(group) < count:
            ids = {d.id for d in group}
            nxt = min(
                rest,
                key=lambda d: (
                    -len(d.linked & ids),
                    d.numa_node != seed.numa_node,
                    d.id not in prefer,
                    d.index,
                ),
            )
            group.append(nxt)
            rest.remove(nxt)
        ids = {d.id for d in group}
        outside = {d.id for d in rest}
        score = (
            -sum(len(d.linked & ids) for d in group),
            sum(len(d.linked & outside) for d in group),  # breaks as few links of the others as possible
            -sum(d.id in prefer for d in group),
            min(d.index for d in group),
        )
        if best is None or score < best[0]:
            best = (score, group)
    assert best is not None
    return best[1]
