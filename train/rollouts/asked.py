"""Has a step's samples made by an engine of the box: the model as it stands is an adapter in shared memory, which an
engine of its base loads, under a name that nobody else can ask for (weights.format.names.POLICY_PREFIX).

Each state of the model has a name of its own, and each world of ranks its own names: one that resumes from an earlier
snapshot may come to other weights at the same step, which no engine may take for those it knows.
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


def to_ask(step: int, staleness: int, total: int, asked: Collection[int]) -> list[int]:
    """Steps whose samples are asked for as `step` begins, by the weights that it begins with: its own and as many of
    the next as may be learnt from weights of before. So no sample is ever staler than that. Pure."""
    return [one for one in range(step, min(step + staleness + 1, total)) if one not in asked]


class Policy:
    """The policy of one rank. `questions`: made of it for whoever runs the job. staleness: updates after which weights
    still answer."""

    def __init__(self, spec: TrainSpec, engine: Any, grid: Grid, store: WeightStore, staleness: int = 0):
        self._engine, self._grid, self._store, self._staleness = engine, grid, store, staleness
        self._spec = replace(spec, lora_publish="adapter", output_model=policy_name(spec.job_id))
        self._world = ""
        self._there = -1
        self._took_s = 0.0

    def version(self, step: int) -> str:
        """Collective: the model as it is after this many steps is in shared memory under this version. Raises
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
        """That its versions took since it was asked last."""
        took_s, self._took_s = self._took_s, 0.0
        return took_s

    def question(self, version: str, prompts: Sequence[dict[str, Any]], room: int, ends: Sequence[int]) -> dict:
        """What is asked. prompts: {"place": of its first answer, "n": answers, "seed", "tokens"}. "in_flight": whether
        an answer goes on by newer versions, once they are asked about."""
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
        """What this step no longer samples from, and what other worlds left. Those that an engine still has are removed
        by whoever has it unload them."""
        kept = {f"{version_name(one)}.{self._world}" for one in range(step, self._there + 1)}
        for stored in self._store.list("adapter"):
            if stored.model == self._spec.output_model and stored.version not in kept:
                try:
                    self._store.remove(stored)
                except (VersionLeased, VersionNotFound):
                    continue


def told(samples: Sequence[dict[str, Any]], made: Answers, vocabulary: int, step: int, version: str) -> Answers:
    """Into `made`, on the host, what an answer has: {"place": of the first, "ids": [[...]], "log_probs": [[...]],
    "spans": [[[version, tokens], ...]], without which `version` wrote it all}. What is no answer to what was asked for
    this step, or the second one of a place, is left out."""
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
    """Tokens of an answer that the weights of 1, 2, … updates before this step wrote; None if others than these and
    those of the step did, or of another world than that of `version`."""
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
    """Collective: those of rank 0, on every rank's device."""
    parts = [part.to(device) for part in (made.ids, made.log_probs, made.sizes, made.older)]
    for part in parts:
        if part.numel():
            comm.broadcast(part, src=0)
    return Answers(*parts)
