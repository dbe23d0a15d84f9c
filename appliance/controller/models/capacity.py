"""Checks whether a job to be trained fits the box, before anything starts, and finds the layout that suits it. Pure.

Each answer states what is taken, where there is too little, and what would fit instead. Sizes are bytes; sentences
show them in decimal units (1 GB is 10^9 bytes), like all user-visible texts of the box.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from typing import Any

from runtime.devices.kinds import Accelerator, accelerator, kind_of
from scheduler.core.config import SchedulerConfig
from train.methods.method import Method
from train.methods.methods import DEFAULT
from train.plan import estimate
from train.plan.auto import ranks_of_row
from train.plan.estimate import Load, ModelShape

CPU_RANK_BYTES, GPU_RANK_BYTES = 200_000_000, 2 * 2**30
"""Host memory of a rank besides its tensors: Python and torch, forked from the warm parent; on a GPU also the CUDA
context and pinned buffers."""
_LEAST_TOKENS = 512  # shortest advised row: shorter ones save little and truncate examples
_MOST_DEVICES = 16  # most devices that a job is advised to use: those of a large machine
FOUR_BITS = 0.5 + estimate.SCALE_BYTES  # bytes of a quantised weight
LAYOUT = ("zero_stage", "offload", "activation_checkpointing", "micro_batch")
"""Fields of a TrainSpec that decide where a job's numbers are held and computed, and nothing of what it learns."""
OFFLOADS = ("none", "optimizer", "parameters")
NEAR = 1.03
"""Layouts within this factor of the fastest step count as equally fast: the estimate cannot tell them apart."""
WAIT = 0.01 / 3.0
"""Share of a job's speed that a second of a micro-batch is worth: requests wait for the end of a micro-batch when they
take over its devices."""
SAFE = 0.92
"""Share of a device's memory beyond which a layout is taken last: estimates are off by some percent."""
NO_RISK = (0, False)  # Layout.risk


@dataclass(frozen=True, slots=True)
class BoxFacts:
    """devices: number of devices, all alike. device_memory_bytes: memory of one device; logical CPU devices share the
    host's, so each of a few may use more. store_budget_bytes: limit on shared memory for weights, None: no limit.
    store_room_bytes: part of it that a new reservation could get now. node_devices: devices of the largest node, the
    limit for a job or an engine; 0: no limit. host_memory_bytes: memory of one node, None if unknown.
    asleep_per_device: sleeping engines that may hold memory of a device. device_name: from the driver. memory_factor,
    speed_factor: measured over estimated values of similar jobs here; without any, 1 and None."""

    devices: int
    device_kind: str
    device_memory_bytes: int
    store_budget_bytes: int | None
    store_room_bytes: int
    node_devices: int = 0
    host_memory_bytes: int | None = None
    asleep_per_device: int = SchedulerConfig().max_asleep_per_device
    device_name: str = ""
    memory_factor: float = 1.0
    speed_factor: float | None = None

    @property
    def accelerator(self) -> Accelerator:
        return accelerator(self.device_name) or estimate.UNKNOWN

    @property
    def on_host(self) -> bool:
        """Whether the devices are parts of the host: they share its memory, and one may use memory that another does
        not."""
        return kind_of(self.device_kind).on_host

    def room_per_rank(self, ranks: int) -> int:
        """Return the bytes that a job's weights, states and activations may take on each device."""
        if self.on_host:
            return self.devices * self.device_memory_bytes // ranks
        residual = estimate.residual_bytes(self.device_kind, self.device_memory_bytes, self.asleep_per_device)
        return self.device_memory_bytes - residual

    def takes(self, memory: estimate.RankMemory) -> int:
        """Return the bytes that a rank takes on its device. On a logical CPU device, which has the host's memory,
        offloading saves nothing."""
        return int(self.memory_factor * memory.device_bytes) + (memory.host_bytes if self.on_host else 0)

    def rank_host_bytes(self, memory: estimate.RankMemory) -> int:
        """Return the host memory of a rank: on a logical CPU device all its memory, on a GPU its process and offloaded
        data."""
        return CPU_RANK_BYTES + self.takes(memory) if self.on_host else GPU_RANK_BYTES + memory.host_bytes

    def holds(self, memory: estimate.RankMemory, ranks: int) -> bool:
        return self.takes(memory) <= self.room_per_rank(ranks)


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout that fits.

    fields: values of LAYOUT. sizes: numbers of devices on which it fits; the other fields are for a rank on the largest
    number. device_bytes: bytes used of room_bytes. weighed_s: seconds of a step, with a penalty for long micro-batches;
    0 on the host.
    """

    fields: dict[str, Any]
    sizes: tuple[int, ...]
    device_bytes: int
    room_bytes: int
    time: estimate.StepTime
    weighed_s: float

    @property
    def risk(self) -> tuple[int, bool]:
        return OFFLOADS.index(self.fields["offload"]), self.device_bytes > SAFE * self.room_bytes

    @property
    def cost(self) -> tuple[int, int, bool, int]:
        return -len(self.sizes), self.fields["zero_stage"], self.fields["activation_checkpointing"], self.device_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """fits: the job fits now or later. waits: a sentence why it fits only after shared memory is freed, "" if it fits
    now. problems: sentences why it does not fit. instead: jobs that would fit, in words. numbers: {part: memory
    needed}."""

    fits: bool
    problems: tuple[str, ...]
    instead: tuple[str, ...]
    numbers: dict[str, Any]
    waits: str = ""
    warnings: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    def memory(self) -> dict[str, Any]:
        """The job's memory in the form of `JobRow.estimate`."""
        needed, limit = self.numbers["host"]["needed_bytes"], self.numbers["host"]["limit_bytes"]
        return {"store_bytes": needed, "host_bytes": self.numbers["job_bytes"], "limit_bytes": limit}


def gb(count_bytes: int) -> str:
    """Format bytes: 1,234,567,890 is "1.23 GB"; small numbers are in MB."""
    return f"{count_bytes / 1e9:.2f} GB" if abs(count_bytes) >= 1e9 else f"{count_bytes / 1e6:.1f} MB"


@dataclass(frozen=True, slots=True)
class Estimator:
    """Estimates the memory and time of jobs that train this model with this method on this box. load: contents of a
    row; None: rows filled by one sequence each."""

    shape: ModelShape
    box: BoxFacts
    method: Method = DEFAULT
    load: Load | None = None

    def verdict(self, fields: Mapping[str, Any], sizes: Sequence[int]) -> Verdict:
        """Whether a job whose TrainSpec has `fields` fits at any of the world sizes `sizes`.

        The job needs device memory for its ranks, host memory for offloaded data, and room in the store for its result.
        A snapshot that does not fit the store goes to disk, which only costs time.
        """
        box, shape, method = self.box, self.shape, self.method
        fields = {**fields, "device_kind": box.device_kind}
        memory = {size: method.rank_memory(shape, fields, size) for size in sizes}
        fitting = tuple(size for size in sizes if box.holds(memory[size], size))
        shown = fitting[-1] if fitting else sizes[-1]
        version, budget = estimate.version_bytes(shape, fields), box.store_budget_bytes
        offloaded = shown * memory[shown].host_bytes
        needed, limit = self._stored(fields, offloaded)
        problems = [] if fitting else [_too_large(memory, box)]
        if budget is not None and version > budget:
            most = f"the store's budget is {gb(budget)} (weights.budget_bytes)"
            problems.append(f"The result takes {gb(version)} of shared memory; {most}.")
        beyond_host = _offload_problem(offloaded, needed, box)
        problems += beyond_host
        instead = self._instead(fields, sizes) if not fitting or beyond_host else []
        if not fitting and not instead:
            problems.append("No milder setting fits either: it needs more devices, larger ones, or a smaller model.")
        waits, warnings = "", []
        if not problems and needed > box.store_room_bytes:
            waits = store_full(needed, box.store_room_bytes)
        if limit is not None and not problems:
            warnings.append(
                f"A snapshot takes {gb(estimate.snapshot_bytes(shape, fields))} of shared memory and does not fit next "
                f"to the result in {gb(limit)}: snapshots go to disk, and moving the job between devices takes "
                "longer."
            )
        numbers = {
            "trained_parameters": estimate.trained_parameters(shape, fields),
            "devices": shown,
            "device": asdict(memory[shown])
            | {"device_bytes": box.takes(memory[shown]), "room_bytes": box.room_per_rank(shown)},
            "job_bytes": {size: size * box.rank_host_bytes(of_size) + needed for size, of_size in memory.items()},
            "host": {"needed_bytes": needed, "room_bytes": box.store_room_bytes, "limit_bytes": limit},
        }
        return Verdict(not problems, tuple(problems), tuple(instead), numbers, waits, tuple(warnings), fitting)

    def _stored(self, fields: Mapping[str, Any], offloaded: int) -> tuple[int, int | None]:
        """Return the shared memory that a job needs, and the limit that sends its snapshots to disk (None: they stay in
        memory). offloaded: bytes of host memory that its ranks take."""
        box, versions = self.box, 1 + self.method.policies(fields.get("options", {}))
        results = versions * estimate.version_bytes(self.shape, fields)
        both = results + estimate.snapshot_bytes(self.shape, fields)
        limits = [box.store_budget_bytes]
        if offloaded and box.host_memory_bytes is not None and not box.on_host:
            limits.append(max(0, box.host_memory_bytes - offloaded))
        limit = min((each for each in limits if each is not None), default=both)
        return (results, limit) if both > limit else (both, None)

    def layouts(
        self, fields: Mapping[str, Any], sizes: Mapping[int, Sequence[int]], kept: Collection[str] = ()
    ) -> list[Layout]:
        """Return a job's fitting layouts, one of each kind with its best micro-batch, best first. The order: least
        offloading, then speed on the most devices; among nearly equal speeds, the layout that fits the most numbers of
        devices, then the simplest and smallest.

        Args:
            fields: of a TrainSpec. A layout decides how the work is divided, not its results. sizes: {micro-batch:
            allowed numbers of devices, ascending}.
            kept: names of LAYOUT whose value in `fields` stays.
        """
        fields = {**fields, "device_kind": self.box.device_kind}
        by_kind = defaultdict(list)
        for values in self._candidates(fields, sizes, kept):
            if layout := self._fitting(fields | values, sizes[values["micro_batch"]]):
                by_kind[values["zero_stage"], values["offload"], values["activation_checkpointing"]].append(layout)
        fastest = sorted(map(fastest_of, by_kind.values()), key=lambda layout: (*layout.risk, layout.weighed_s))
        if not fastest:
            return []
        best = fastest_of(fastest, NEAR)
        return [best, *(layout for layout in fastest if layout is not best)]

    def _candidates(
        self, fields: Mapping[str, Any], sizes: Mapping[int, Sequence[int]], kept: Collection[str]
    ) -> Iterator[dict[str, Any]]:
        """Yield values of LAYOUT worth an estimate. Arguments as for `layouts`."""
        on_host = self.box.on_host
        is_single = max(map(max, sizes.values())) <= fields["tensor_parallel"]
        requested = {name: fields[name] for name in kept}
        if "zero_stage" in requested:
            requested["zero_stage"] = max(1, fields["zero_stage"])
        for stage, offload, recompute, micro in product((1, 2, 3), OFFLOADS, (False, True), sizes):
            values = dict(zip(LAYOUT, (stage, offload, recompute, micro), strict=True))
            wasteful = offload == "parameters" and stage < 3
            if "offload" not in kept:  # an adapter's optimizer is small
                wasteful |= (on_host and offload != "none") or (offload == "optimizer" and not fields["full"])
            if "zero_stage" not in kept:  # a single copy of the model has nothing to shard across
                wasteful |= is_single and stage > 1 and offload != "parameters"
            if values | requested == values and not wasteful and not (on_host and micro != fields["micro_batch"]):
                yield values

    def _fitting(self, fields: Mapping[str, Any], sizes: Sequence[int]) -> Layout | None:
        """Return the layout of `fields` with those `sizes` on which it fits; None if it fits on none."""
        box = self.box
        memory = {size: self.method.rank_memory(self.shape, fields, size) for size in sizes}
        offloaded = {size: size * of_rank.host_bytes for size, of_rank in memory.items()}
        fitting = [size for size in sizes if box.holds(memory[size], size)]
        fitting = [n for n in fitting if not _offload_problem(offloaded[n], self._stored(fields, offloaded[n])[0], box)]
        if not fitting:
            return None
        most = fitting[-1]
        load = self.load or Load(fields["max_length"], fields["max_length"])
        time = estimate.step_time(self.shape, fields, most, box.accelerator, load=load)
        micro_s = time.step_s * fields["micro_batch"] * (most // ranks_of_row(fields)) / fields["batch_size"]
        # The speed of links within a host is unknown, so the simplest layout that fits is chosen.
        weighed_s = 0.0 if box.on_host else time.step_s * (1 + WAIT * micro_s)
        values = {name: fields[name] for name in LAYOUT}
        taken, room = box.takes(memory[most]), box.room_per_rank(most)
        return Layout(values, tuple(fitting), taken, room, time, weighed_s)

    def fit(
        self, fields: Mapping[str, Any], sizes: Mapping[int, Sequence[int]], requested: Collection[str]
    ) -> tuple[list[Layout], str]:
        """Return the fitting layouts as `layouts` does, and a warning if no layout has all requested settings: the
        layouts then keep as many settings as possible."""
        for left_out in range(len(requested) + 1):
            for names in combinations(requested, len(requested) - left_out):
                if fitting := self.layouts(fields, sizes, names):
                    dropped = " and ".join(f"{name} {fields[name]}".lower() for name in requested if name not in names)
                    taken = ", ".join(f"{name} {value}".lower() for name, value in fitting[0].fields.items())
                    warning = f"It does not fit with {dropped}; it takes {taken}, which trains the same."
                    return fitting, warning if dropped else ""
        return [], ""

    def leanest(self) -> dict[str, Any]:
        """Return the layout that needs the least device memory."""
        offload = "none" if self.box.on_host else "parameters"
        return {"zero_stage": 3, "offload": offload, "activation_checkpointing": True}

    def described(self, layout: Layout, fields: Mapping[str, Any], steps: int) -> dict[str, Any]:
        """Return a layout's numbers. "modelled_tokens_per_s": rate of one device, by arithmetic alone. Time and energy
        are None if neither a table nor a past job gives the devices' speed, and for methods that mostly generate
        answers."""
        box, count, time, factor = self.box, layout.sizes[-1], layout.time, self.box.speed_factor or 1.0
        assert self.load is not None
        tokens_per_s = self.load.row_tokens * fields["batch_size"] / time.step_s
        known = box.speed_factor is not None or (accelerator(box.device_name) and fields["precision"] == "bf16")
        known = known and not self.method.rolls_out
        hours = steps * time.step_s / factor / 3600
        return {
            **layout.fields,
            "devices": count,
            "device_bytes": layout.device_bytes,
            "room_bytes": layout.room_bytes,
            "bound_by": time.bound_by if known else None,
            "tokens_per_s": factor * tokens_per_s if known else None,
            "hours": hours if known else None,
            "kwh": hours * count * time.watts(box.accelerator) / 1000 if known and not box.on_host else None,
            "modelled_tokens_per_s": tokens_per_s / count,
            "memory_factor": box.memory_factor,
        }

    def _instead(self, fields: Mapping[str, Any], sizes: Sequence[int]) -> list[str]:
        """Return up to 3 jobs that fit if this one does not: LoRA, a base of 4 bits, shorter rows, more devices."""
        whole_rows, micro = replace(self, load=None), fields["micro_batch"]

        def option(label: str, by: Estimator = whole_rows, sizes: Sequence[int] = sizes, **changes: Any) -> str:
            """Describe the option; "" if it does not fit either."""
            layouts = by.layouts({**fields, **changes}, {micro: sizes})
            return f"{label} on {_devices(layouts[0].sizes[-1])}: {gb(layouts[0].device_bytes)} each" if layouts else ""

        lora = f"LoRA (full false, lora_rank {fields['lora_rank']})"
        options = [option(lora, full=False)] if fields["full"] else []
        if not self.shape.quantised_bytes:
            small = replace(whole_rows, shape=replace(self.shape, quantised_bytes=FOUR_BITS))
            on_small = f"{lora} on a base in 4 bits (`appliance model quantize NAME --form int4`)"
            options.append(option(on_small, small, full=False, tensor_parallel=1))
        lengths = (fields["max_length"] >> halvings for halvings in range(1, 32))
        shorter = (option(f"max_length {tokens}", max_length=tokens) for tokens in lengths if tokens >= _LEAST_TOKENS)
        options.append(next(filter(None, shorter), ""))
        if not self.box.on_host:
            counts = (count for count in range(sizes[-1] + 1, _MOST_DEVICES + 1) if count % 4 == 0 or count < 8)
            larger = (option("the same job", sizes=(count,)) for count in counts)
            options.append(next(filter(None, larger), ""))
        return list(filter(None, options))[:3]


def store_full(needed_bytes: int, room_bytes: int) -> str:
    return (
        f"Shared memory is full: the job's result and a snapshot need {gb(needed_bytes)}, {gb(max(0, room_bytes))} can "
        "be allocated now. It starts when models or other jobs have freed some."
    )


def _too_large(memory: Mapping[int, estimate.RankMemory], box: BoxFacts) -> str:
    """Describe the shortage. memory: {number of ranks: memory of a rank}."""
    best = min(memory, key=lambda size: box.takes(memory[size]) - box.room_per_rank(size))
    rank = memory[best]
    parts = ", ".join(
        f"{part} {gb(getattr(rank, f'{part}_bytes'))}"
        for part in ("weights", "gradients", "optimizer", "buffers", "activations")
    )
    if rank.offloaded_bytes:
        parts += f", less {gb(rank.offloaded_bytes)} in host memory"
    needs, room = f"{gb(box.takes(rank))} on each of {_devices(best)} ({parts})", gb(box.room_per_rank(best))
    return f"Training needs {needs}; there are {room}."


def _offload_problem(host_bytes: int, stored_bytes: int, box: BoxFacts) -> list[str]:
    """Describe a shortage of host memory. host_bytes: host memory of all ranks, without the `stored_bytes` in the
    store, which are also host memory. On logical CPU devices, device memory is host memory and counts there."""
    host = box.host_memory_bytes
    if not host_bytes or host is None or box.on_host or host_bytes <= host - stored_bytes:
        return []
    return [
        f"Offloading takes {gb(host_bytes)} of host memory; the host has {gb(host)}, of which the job's own result "
        f"takes {gb(stored_bytes)}."
    ]


def fastest_of(layouts: Sequence[Layout], near: float = 1.0) -> Layout:
    """Return the cheapest of the safest layouts that take at most `near` times as long as the fastest."""
    least = min(layout.risk for layout in layouts)
    safest = [layout for layout in layouts if layout.risk == least]
    near_s = near * min(layout.weighed_s for layout in safest)
    return min((layout for layout in safest if layout.weighed_s <= near_s), key=lambda layout: layout.cost)


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"
