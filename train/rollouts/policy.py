"""Publishes the model in training for the engines that sample its answers: an adapter of its base where engines of the
base take it, else whole weights, under a name that nobody else can ask for (weights.format.names.POLICY_PREFIX)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from train.plan.spec import TrainSpec
from train.state.fragments import Grid
from train.state.publish import fingerprint, publish
from weights.format.errors import VersionLeased, VersionNotFound
from weights.format.names import policy_name, step_of, version_name
from weights.memory.store import WeightStore


class Policy:
    """One rank's part. staleness: for so many updates, older weights may still sample."""

    def __init__(self, spec: TrainSpec, engine: Any, grid: Grid, store: WeightStore, staleness: int):
        self._engine, self._grid, self._store, self._staleness = engine, grid, store, staleness
        kind = "adapter" if spec.options["policy"] == "adapter" else "merged"
        self._spec = replace(spec, lora_publish=kind, output_model=policy_name(spec.job_id))

    def publish(self, step: int) -> float:
        """Collective: the model as it is after this many steps, in shared memory. Returns the seconds that it took.
        Raises StoreFull, on every rank.

        An earlier world may have published the step: it came to it by the same samples.
        """
        began_s, spec = time.perf_counter(), self._spec
        kind, version = spec.published_kind, version_name(step)
        if self._grid.rank == 0:
            self._forget_before(step - self._staleness)
        meta = {"job": spec.job_id, "base": spec.base_model, "base_version": spec.base_version, "step": step}
        if kind == "version":
            meta["fingerprint"] = fingerprint(self._engine)
        publish(self._engine, spec, self._store, version=version, meta=meta)
        return time.perf_counter() - began_s

    def _forget_before(self, step: int) -> None:
        """Remove versions that no step samples from any more. One that an engine still has is removed by whoever makes
        the engine unload it."""
        for stored in self._store.list(self._spec.published_kind, self._spec.output_model):
            if step_of(stored.version) < step:
                try:
                    self._store.remove(stored)
                except (VersionLeased, VersionNotFound):
                    continue
