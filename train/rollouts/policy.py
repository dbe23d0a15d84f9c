"""Lets an engine of the box make a step's samples: the current model is an adapter in shared memory, which an engine of
its base loads under a name that nobody else can ask for (weights.format.names.POLICY_PREFIX).

Each state of the model has a name of its own, and each world of ranks its own names: a world that resumes from an
earlier snapshot may reach other weights at the same step, and no engine may take them for those it knows.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from deepspeed import comm

from train.control.rank_messages import broadcast_json
from train.plan.spec import TrainSpec
from train.rollouts.sampler import Answers
from train.state.fragments import Grid
from train.state.publish import publish
from weights.format.errors import VersionLeased, VersionNotFound
from weights.format.names import policy_name, step_of, version_name
from weights.memory.store import WeightStore


def steps_to_request(step: int, staleness: int, total: int, asked: Collection[int]) -> list[int]:
    """Steps whose samples are asked for when `step` begins, from the weights that it begins with: its own, and as many
    of the next steps as may learn from earlier weights. So no sample is ever staler than that. Pure."""
    return [one for one in range(step, min(step + staleness + 1, total)) if one not in asked]


class Policy:
    """The policy of one rank. `questions`: what is made of it for whoever runs the job. staleness: for so many updates,
    older weights may still answer."""

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

    def question(self, version: str, prompts: Sequence[dict[str, Any]], room: int, ends: Sequence[int]) -> dict:
        """The question. prompts: {"place": of its first answer, "n": answers, "seed", "tokens"}. "in_flight": whether
        newer versions continue an answer, once they are asked about."""
        return {
            "kind": "sample",
            "policy": {"name": self._spec.output_model, "version": version},
            "base": {"model": self._spec.base_model, "version": self._spec.base_version},
            "prompts": prompts,
            "room": room,
            "ends": list(ends),
            "in_flight": bool(self._spec.options.get("in_flight")),
        }

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


def take_answers(samples: Sequence[dict[str, Any]], made: Answers, vocabulary: int, step: int, version: str) -> Answers:
    """Copies an engine's answer into `made`, on the host: {"place": of the first, "ids": [[...]], "log_probs": [[...]],
    "spans": [[[version, tokens], ...]]}; without spans, `version` wrote all of it. Leaves out answers to anything that
    was not asked for this step, and second answers of a place."""
    n, room = made.ids.shape
    for part in samples:
        spans_of = part.get("spans") or [[[version, len(ids)]] for ids in part["ids"]]
        answers = zip(part["ids"], part["log_probs"], spans_of, strict=True)
        for place, (ids, log_probs, spans) in enumerate(answers, part["place"]):
            older = _older(spans, len(ids), step, version, made.older.shape[1])
            fits = 0 < len(ids) == len(log_probs) <= room and all(0 <= one < vocabulary for one in ids)
            if not 0 <= place < n or not fits or made.sizes[place] or not np.isfinite(log_probs).all() or older is None:
                continue
            made.ids[place, : len(ids)] = torch.tensor(ids)
            made.log_probs[place, : len(ids)] = torch.tensor(log_probs)
            made.sizes[place] = len(ids)
            made.older[place] = torch.tensor(older)
    return made


def _older(spans: Sequence[Sequence[Any]], size: int, step: int, version: str, staleness: int) -> list[int] | None:
    """How many tokens of an answer the weights of 1, 2, … updates before this step wrote; None if older weights wrote
    some, or those of another world than `version`'s."""
    _, _, world = version.partition(".")
    found = [0] * staleness
    for one, tokens in spans:
        name, _, of = one.partition(".")
        behind = step - step_of(name)
        if of != world or not 0 <= behind <= staleness:
            return None
        if behind:
            found[behind - 1] += tokens
    return found if sum(tokens for _, tokens in spans) == size else None


def shared(made: Answers, device: torch.device) -> Answers:
    """Collective: the answers of rank 0, on every rank's device."""
    parts = [part.to(device) for part in (made.ids, made.log_probs, made.sizes, made.older)]
    for part in parts:
        if part.numel():
            comm.broadcast(part, src=0)
    return Answers(*parts)
