"""Lets an engine of the box make a step's samples: the current model is an adapter in shared memory, which an engine of
its base loads under a name that nobody else can ask for (weights.format.names.POLICY_PREFIX).

Each state of the model has a name of its own, and each world of ranks its own names: a world that resumes from an
earlier snapshot may reach other weights at the same step, and no engine may take them for those it knows.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from deepspeed import comm

from train.control.rank_messages import broadcast_json
from train.plan.spec import TrainSpec
from train.rollouts.sampler import Answers
from train.state.fragments import Grid
from train.state.publish import publish
from weights.format.errors import VersionLeased, VersionNotFound
from weights.format.names import policy_name, version_name
from weights.memory.store import WeightStore


def steps_to_request(step: int, staleness: int, total: int, asked: Collection[int]) -> list[int]:
    """Steps whose samples are asked for when `step` begins, from the weights that it begins with: its own, and as many
    of the next steps as may learn from earlier weights. So no sample is ever staler than that. Pure."""
    return [one for one in range(step, min(step + staleness + 1, total)) if one not in asked]


class Policy:
    """The policy of one rank. staleness: for so many updates, older weights may still answer."""

    def __init__(self, spec: TrainSpec, engine: Any, grid: Grid, store: WeightStore, staleness: int = 0):
        self._engine, self._grid, self._store, self._staleness = engine, grid, store, staleness
        self._spec = replace(spec, lora_publish="adapter", output_model=policy_name(spec.job_id))
        self._world = ""
        self._there = -1
        self._took_s = 0.0

    def version(self, step: int) -> str:
        """Collective: writes the model, as it is after this many steps, to shared memory under this version. Raises
        StoreFull, on every rank."""
        self._world = self._world or broadcast_json(uuid.uuid4().hex[:8])
        version = f"{version_name(step)}.{self._world}"
        if self._there != step:
            began_s = time.perf_counter()
            meta = {
                "job": self._spec.job_id,
                "base": self._spec.base_model,
                "base_version": self._spec.base_version,
                "step": step,
            }
            publish(self._engine, self._spec, self._store, version=version, meta=meta)
            self._there = step
            if self._grid.rank == 0:
                self._forget_before(step - self._staleness)
            self._took_s += time.perf_counter() - began_s
        return version

    def take_seconds(self) -> float:
        """Seconds that its versions took since the last call."""
        took_s, self._took_s = self._took_s, 0.0
        return took_s

    @property
    def name(self) -> str:
        """Under which engines know its versions."""
        return self._spec.output_model

    @property
    def base(self) -> dict[str, str]:
        return {"model": self._spec.base_model, "version": self._spec.base_version}

    def _forget_before(self, step: int) -> None:
        """Removes versions that this step no longer samples from, and those that other worlds left. A version that an
        engine still has is removed by whoever makes the engine unload it."""
        kept = {f"{version_name(one)}.{self._world}" for one in range(step, self._there + 1)}
        for stored in self._store.list("adapter"):
            if stored.model == self._spec.output_model and stored.version not in kept:
                try:
                    self._store.remove(stored)
                except (VersionLeased, VersionNotFound):
                    continue


def shared(made: Answers, device: torch.device) -> Answers:
    """Collective: the answers of rank 0, on every rank's device."""
    parts = [part.to(device) for part in (made.ids, made.log_probs, made.sizes)]
    for part in parts:
        comm.broadcast(part, src=0)
    return Answers(*parts)
