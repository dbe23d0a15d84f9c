"""Devices per node: the most that a job, or an engine with tensor parallelism, can ever have, since neither spans
nodes.

Judged by the nodes known now: present ones, cordoned devices included, and lost ones, which the box waits for. What
only a node that has yet to join could satisfy is refused until it has joined.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from appliance.controller.context.context import ControllerContext
from appliance.controller.devices import lost_nodes
from appliance.controller.interfaces.errors import BadRequest
from runtime.devices.kinds import kind_of


@dataclass(frozen=True, slots=True)
class NodeSizes:
    """counts: devices of each node, of the box's own kind. Empty before the first observation: then nothing is
    refused. cores: of a node whose devices are logical ones, which share them; None for others."""

    counts: tuple[int, ...]
    cores: int | None = None

    @property
    def largest(self) -> int:
        return max(self.counts, default=0)

    @property
    def unasked(self) -> int:
        """The most devices of a job that asks for no number: ranks that share a core take longer than fewer ranks."""
        return max(1, self.largest if self.cores is None else min(self.largest, self.cores))

    def refuse_more(self, name: str, given: int, asked: str = "") -> None:
        """Raises BadRequest if no node has `given` devices. name: the field at fault, with value `asked`."""
        if self.counts and given > self.largest:
            node = "the box" if len(self.counts) == 1 else "the largest node of the box"
            raise BadRequest(
                f"{name} is {asked or given}; expected at most {self.largest}, which is all that {node} has. "
                "Ask for less, or join a node with more devices first (`appliance join`).",
                param=name,
                code="insufficient_devices",
            )

    def refuse_more_replicas(self, name: str, given: int, tensor_parallel: int) -> None:
        """Raises BadRequest if the nodes cannot hold `given` engines with this many devices each."""
        most = sum(count // tensor_parallel for count in self.counts)
        if self.counts and given > most:
            each = "one device" if tensor_parallel == 1 else f"{tensor_parallel} devices side by side"
            raise BadRequest(
                f"{name} is {given}; expected at most {most}: each replica takes {each}, and the box has "
                f"{sum(self.counts)}. Ask for fewer, or join a node first (`appliance join`).",
                param=name,
                code="insufficient_devices",
            )


def known(context: ControllerContext) -> NodeSizes:
    devices = lost_nodes.in_view(context.db, context.scheduler.status()["devices"])
    if not devices:
        return NodeSizes(())
    # Home's devices come first: other nodes run what home prepared, for its kind of devices.
    kind = devices[0]["kind"]
    counts = Counter(d["node"] for d in devices if d["kind"] == kind)
    return NodeSizes(tuple(counts.values()), host_cores() if kind_of(kind).on_host else None)


def host_cores() -> int:
    return len(os.sched_getaffinity(0))
