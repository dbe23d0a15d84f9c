"""Decides on how many devices a job may run: what was requested, and what its batch size allows. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from appliance.controller.interfaces.errors import InvalidValue
from appliance.controller.models.node_sizes import NodeSizes
from appliance.store.rows import JobRow
from train.plan import auto


@dataclass(frozen=True, slots=True)
class Wish:
    """The devices that a request asks for, as a JobRow has them."""

    min_devices: int | None = None
    max_devices: int | None = None
    asked_sizes: list[int] | None = None


def bounds(row: JobRow, device_count: int) -> tuple[int, int, tuple[int, ...]]:
    """(fewest, most, allowed sizes or none) for the planner.

    A job too large for the box's current size keeps its sizes and waits: the box may get its devices back.
    """
    least = row.min_devices or 1
    if not row.allowed_sizes:
        return least, max(row.max_devices or device_count, least), ()
    most = row.max_devices or max(row.allowed_sizes)
    fitting = sorted(size for size in row.allowed_sizes if least <= size <= most) or sorted(row.allowed_sizes)
    return fitting[0], fitting[-1], tuple(fitting)


def check(min_devices: int | None, max_devices: int | None, asked_sizes: list[int] | None) -> None:
    """The request must leave at least one size. Raises BadRequest."""
    least, most = min_devices or 1, max_devices or max([min_devices or 1, *(asked_sizes or [])])
    if least > most:
        raise InvalidValue(f"min_devices is {least} and max_devices {most}; expected min <= max.", "min_devices")
    if asked_sizes is not None and not any(least <= size <= most for size in asked_sizes):
        raise InvalidValue(
            f"allowed_sizes is {asked_sizes}; expected at least one size from {least} to {most}.", "allowed_sizes"
        )


def check_room(min_devices: int | None, asked_sizes: list[int] | None, nodes: NodeSizes) -> None:
    """At least one requested size must fit on a node. A larger `max_devices` is not an error: it only limits.
    Raises BadRequest."""
    nodes.refuse_more("min_devices", min_devices or 1)
    if asked_sizes:
        nodes.refuse_more(
            "allowed_sizes", min(size for size in asked_sizes if size >= (min_devices or 1)), str(asked_sizes)
        )


def most_devices(row: Wish | JobRow, nodes: NodeSizes, tensor_parallel: int = 1) -> int:
    """The most devices that a job may take; it need not be there. tensor_parallel: as requested."""
    return row.max_devices or max(nodes.unasked, row.min_devices or 1, tensor_parallel, *(row.asked_sizes or ()))


def sizes(row: Wish | JobRow, resolved: dict[str, Any], nodes: NodeSizes) -> tuple[list[int], list[int]]:
    """(sizes that divide the work of a step, the requested ones among them; [] if there is none)."""
    least, shards = row.min_devices or 1, resolved.get("tensor_parallel", 1)
    most = most_devices(row, nodes, shards)
    by_batch = auto.allowed_sizes(resolved["batch_size"], most, resolved["micro_batch"], shards)
    return by_batch, [s for s in by_batch if s >= least and (row.asked_sizes is None or s in row.asked_sizes)]


def check_sizes(row: Wish | JobRow, resolved: dict[str, Any], nodes: NodeSizes) -> list[int]:
    """The requested sizes that divide the work of a step, including those that only a node yet to join could provide.
    Raises BadRequest when there is none, or none for the known nodes."""
    by_batch, fitting = sizes(row, resolved, nodes)
    param = "allowed_sizes" if row.asked_sizes else "min_devices"
    if not fitting:
        raise InvalidValue(no_size(resolved, by_batch), param)
    nodes.refuse_more(
        param,
        fitting[0],
        f"such that a step of {resolved['batch_size']} sequences divides into "
        f"{', '.join(map(str, fitting))} devices only",
    )
    return fitting


def no_size(resolved: dict[str, Any], by_batch: list[int]) -> str:
    """The message for a job that has no valid number of devices."""
    shards = resolved.get("tensor_parallel", 1)
    grouped = f", each over {shards} devices (tensor_parallel)," if shards > 1 else ""
    return (
        f"A step of {resolved['batch_size']} sequences in micro-batches of {resolved['micro_batch']}{grouped} divides "
        f"into {', '.join(map(str, by_batch)) or 'no allowed number of'} devices; min_devices, max_devices and "
        "allowed_sizes leave none of them."
    )
