"""State that the parts of a rank share (engine, store, phase, suspend request), and messages between the ranks of a
world.

The messages are flags and JSON over the host, never pickles: torch's `broadcast_object_list` unpickles received bytes,
which can run the sender's code, and every user of the machine can connect to loopback while a world starts.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import distributed

from train.model.tensor_parallel import Grid
from train.plan.spec import TrainSpec
from weights.memory.store import WeightStore

Events = Callable[..., None]
"""Receives a run's events, by name with data as keywords."""


class DevicesWanted(Exception):
    """The ranks agreed to leave their devices; every rank raises it at the same point of the run."""


@dataclass
class Progress:
    """The run's current phase, for `ping`: a phase that lasts too long is a hang. suspend: whether this rank shall
    release its device; another thread sets it, and the training loop reads it between micro-batches."""

    phase: str = "starting"
    step: int = 0
    since: float = field(default_factory=time.monotonic)
    suspend: bool = False

    def enter(self, phase: str, step: int | None = None) -> None:
        self.phase, self.step, self.since = phase, self.step if step is None else step, time.monotonic()

    def report(self) -> dict[str, Any]:
        return {"phase": self.phase, "step": self.step, "in_phase_s": time.monotonic() - self.since}

    def ask_suspend(self) -> None:
        self.suspend = True


@dataclass(frozen=True)
class Rank:
    """State that all parts of a run share.

    engine: DeepSpeed's engine around train.methods.packed_objective. emit: reports an event on the first rank, and does
    nothing on others. reported: metrics of the newest steps; snapshots contain them, because a box that crashes may not
    have stored them.
    """

    spec: TrainSpec
    store: WeightStore
    engine: Any
    grid: Grid
    emit: Events
    progress: Progress
    reported: deque[dict[str, Any]] = field(default_factory=partial(deque, maxlen=100))


def any_rank(*flags: bool) -> list[bool]:
    """Collective: return for each flag whether any rank has set it. Devices compute meanwhile."""
    message = torch.tensor(flags, dtype=torch.int32)
    distributed.all_reduce(message, op=distributed.ReduceOp.MAX, group=_over_the_host())
    return [bool(flag) for flag in message.tolist()]


def broadcast_json(value: Any) -> Any:
    """Collective: return rank 0's `value`, plain JSON, on every rank; other ranks' values are ignored."""
    written = json.dumps(value).encode() if distributed.get_rank() == 0 else b""
    length = torch.tensor([len(written)], dtype=torch.int64)
    distributed.broadcast(length, src=0, group=_over_the_host())
    received = torch.empty(int(length), dtype=torch.uint8)
    if written:
        received.copy_(torch.frombuffer(bytearray(written), dtype=torch.uint8))
    distributed.broadcast(received, src=0, group=_over_the_host())
    return json.loads(bytes(received.tolist()))


def barrier() -> None:
    """Collective: return when every rank has called it. Devices compute meanwhile."""
    distributed.barrier(group=_over_the_host())


@cache
def _over_the_host() -> distributed.ProcessGroup | None:
    """Return a gloo group of all ranks; None if the default group uses gloo. The first call is collective."""
    return None if distributed.get_backend() == "gloo" else distributed.new_group(backend="gloo")
